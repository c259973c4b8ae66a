#!/usr/bin/env bash
# Check gradzip on a machine with an NVIDIA GPU, in 25 minutes at most: build it with nvcc, and without through NVRTC; run
# the GPU tests with both builds, and under compute-sanitizer; time the kernels, and training steps of ResNet-50. On several
# GPUs, also test methods between them with NCCL, and time training steps of GPT-2 on all of them. Needs ninja, g++, and a Python with PyTorch for CUDA, pybind11, setuptools, NumPy, pytest and pytest-timeout. Needs no network.
#
# usage: scripts/gpu_check.sh [--minutes N] [--only STEP,...] [--logs FOLDER] [--list] [FILE]
#
#   FILE           for the results (default: benchmarks/results/gpu_check.json)
#   --minutes N    for all steps together (default: 25). Each step has a share of what is left, and is stopped after that
#   --only STEP,.. these steps alone, without builds with the one that is there; as in: --only nccl,training_of_all
#   --logs FOLDER  keep the output of each step there
#   --list         print the steps and their shares, and run nothing
#
# Environment: PYTHON   the Python to use (default: python3)
#
# A failed step does not stop the next ones. The exit status is 0 if none failed or was stopped. What the machine does not
# have, such as nvcc or compute-sanitizer, is reported as unavailable, not as passed. The last build stays in place.
set -euo pipefail
if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^set/ { /^#/ s/^# \{0,1\}//p }' "${BASH_SOURCE[0]}"
  exit
fi
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu_check.py" "$@"
