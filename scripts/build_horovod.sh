#!/usr/bin/env bash
# Builds Horovod's wheel for the torch in a virtual environment.
#
# usage: scripts/build_horovod.sh VENV WHEEL_FOLDER
#
# Gloo, because it needs neither MPI nor a GPU. Only the PyTorch half, because gradzip is for PyTorch. Horovod's own
# variables change that: HOROVOD_GPU_OPERATIONS=NCCL, say, which needs a torch for CUDA. A CUDA toolkit is never needed; one
# in HOROVOD_CUDA_HOME is used.
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

# Horovod's CMake files need a CUDA toolkit if torch is built for CUDA, also for Gloo alone. Take nvcc of torch's version
# from the package index: a toolkit of the machine may have another version, or only parts. Libraries and headers, also
# NCCL's, are those that torch's wheel brings. Wheels have no links for the linker.
cuda_of_torch() {
  local version=$1 site home=$work/cuda
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
  "$python" -m pip install --no-deps --target "$work/compiler" nvidia-{cuda-nvcc,nvvm,cuda-crt,cuda-cccl}=="$version.*"
  mv "$work/compiler/nvidia/cu${version%.*}" "$home"
  cp -rsn "$site/cu${version%.*}/." "$site/nccl/." "$home"
  ln -s lib "$home/lib64"
  (cd "$home/lib" && ln -s libcudart.so.* libcudart.so && ln -s libnccl.so.* libnccl.so)
  # Shared, so that a process has one NCCL: the one that torch has loaded.
  export CUDA_HOME=$home HOROVOD_CUDA_HOME=$home HOROVOD_NCCL_HOME=$home HOROVOD_NCCL_LINK=SHARED PATH=$home/bin:$PATH
}
cuda=$("$python" -c 'import torch; print(torch.version.cuda or "")')
if [[ -n $cuda && -z ${HOROVOD_CUDA_HOME:-} ]]; then cuda_of_torch "$cuda"; fi

# torch's headers take 1.5 GB per compiler.
cores=$(getconf _NPROCESSORS_ONLN)
memory=$(awk '/^MemAvailable/ { print int($2 / 1.5e6) }' /proc/meminfo 2>/dev/null || true)
jobs=${MAX_JOBS:-$((cores < ${memory:-1} ? cores : ${memory:-1}))}
export MAKEFLAGS=-j$((jobs > 0 ? jobs : 1))

"$python" -m pip wheel -v --no-build-isolation --no-deps --no-cache-dir -w "$wheels" .
