#!/usr/bin/env bash
# Builds Horovod's wheel for the torch in a virtual environment.
#
# usage: scripts/build_horovod.sh VENV WHEEL_FOLDER
#
# Gloo, because it needs neither MPI nor a GPU. Only the PyTorch half, because gradzip is for PyTorch. Horovod's own
# variables change that (HOROVOD_GPU_OPERATIONS=NCCL, say).
set -euo pipefail
requirement=$(cd "$(dirname "$0")" && pwd)/horovod.txt
venv=$1 wheels=$2

work=$(mktemp -d "${TMPDIR:-/tmp}/gradzip-horovod.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' HUP INT TERM

# Horovod's CMake files do not quote the paths of torch and Python; seen through this link they contain no space.
ln -s "$venv" "$work/venv"
python=$work/venv/bin/python
mkdir "$work/tmp"
export TMPDIR=$work/tmp # pip's temporary folders go with ours
export PATH=$work/venv/bin:$PATH

cd "$work"
"$python" -m pip download --no-deps --no-build-isolation --no-binary :all: -r "$requirement"
tar -xzf horovod-*.tar.gz
rm horovod-*.tar.gz
cd horovod-*

# torch's headers need C++17. Without the build's own paths in its libraries the wheel works in every clone: torch is
# loaded before them.
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)\nset(CMAKE_SKIP_RPATH ON)/' \
  CMakeLists.txt horovod/torch/CMakeLists.txt

export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=${HOROVOD_WITH_GLOO:-1}
[[ -n ${HOROVOD_WITH_MPI:-} ]] || export HOROVOD_WITHOUT_MPI=1
# Its CMake files are older than what CMake 4 accepts unasked.
export CMAKE_POLICY_VERSION_MINIMUM=3.5

# torch's headers take 1.5 GB per compiler.
cores=$(getconf _NPROCESSORS_ONLN)
memory=$(awk '/^MemAvailable/ { print int($2 / 1.5e6) }' /proc/meminfo 2>/dev/null || true)
jobs=${MAX_JOBS:-$((cores < ${memory:-1} ? cores : ${memory:-1}))}
export MAKEFLAGS=-j$((jobs > 0 ? jobs : 1))

"$python" -m pip wheel -v --no-build-isolation --no-deps --no-cache-dir -w "$wheels" .
