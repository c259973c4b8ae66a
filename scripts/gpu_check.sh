#!/usr/bin/env bash
# Check gradzip's CUDA half on a machine with an NVIDIA GPU: builds in place, runs the GPU tests, repeats them under
# compute-sanitizer, and times the kernels. Needs nvcc, ninja, and a Python with PyTorch for CUDA, pybind11, setuptools,
# NumPy and pytest. Needs no network.
#
# usage: scripts/gpu_check.sh [FOLDER]     writes gpu_check.json and kernels_cuda.json to FOLDER (default: benchmarks/results)
#
# Environment: PYTHON   the Python to use (default: python3)
#              MINUTES  how long each pass of compute-sanitizer may take (default: 2)
#
# A failed step does not stop the next ones; the exit status is 0 if none failed. A sanitizer that does not support the
# machine is reported as unavailable, not as passed.
set -uo pipefail
if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^set/ { /^#/ s/^# \{0,1\}//p }' "${BASH_SOURCE[0]}"
  exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

python=${PYTHON:-python3}
results=${1:-benchmarks/results}
limit=$((${MINUTES:-2} * 60))
log=$(mktemp -d)
export PYTHONPATH=$PWD
mkdir -p "$results"

die() {
  printf 'gpu_check: %s\n  %s\n' "$1" "$2" >&2
  exit 2
}

command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]] || die "no nvcc" "Install the CUDA toolkit, or put it on PATH."
device=$("$python" -c 'import torch; print(torch.cuda.get_device_name(), "sm_%d%d" % torch.cuda.get_device_capability(), sep="|")' \
  2>"$log/device") || die "PyTorch of '$python' sees no GPU: $(tail -n 1 "$log/device")" "Name another Python: PYTHON=..."
arch=${device##*|sm_}
echo "gpu_check: ${device%|*}, $("$python" -c 'import torch; print("torch", torch.__version__)')"

names=() outcomes=() seconds=()

# step NAME COMMAND...: run the command, log its output and record the outcome.
step() {
  local name=$1 start=$SECONDS outcome=passed
  shift
  printf '  %-11s ' "$name"
  "$@" >"$log/$name" 2>&1 || outcome=failed
  if grep -qE 'Device not supported|Unable to find .*injection|compute-sanitizer: (command )?not found' "$log/$name"; then
    outcome=unavailable
  fi
  names+=("$name") outcomes+=("$outcome") seconds+=($((SECONDS - start)))
  echo "$outcome, $((SECONDS - start)) s"
  [[ $outcome == passed ]] || tail -n 30 "$log/$name" | sed 's/^/    /'
}

# sanitize TOOL: the GPU tests, without the largest sizes. Each tensor gets memory of its own: the sanitizer does not see an
# access beyond a tensor within a block of torch's cache.
sanitize() {
  timeout "$limit" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 9 --target-processes all \
    "$python" -m pytest -q -m 'cuda and not slow' -p no:cacheprovider tests
}

step build env GRADZIP_CUDA=1 GRADZIP_CUDA_ARCHS="$arch" "$python" setup.py build_ext --inplace
step tests timeout 200 "$python" -m pytest -q -m cuda -p no:cacheprovider tests
step memcheck sanitize memcheck
step racecheck sanitize racecheck
step synccheck sanitize synccheck
step initcheck sanitize initcheck
step benchmark timeout 600 "$python" benchmarks/kernels.py --device cuda --json "$results/kernels_cuda.json"
cat "$log/benchmark"

{
  printf '{\n "device": "%s",\n "commit": "%s",\n "steps": {' "${device%|*}" "$(git describe --always --dirty 2>/dev/null)"
  for i in "${!names[@]}"; do
    printf '%s\n  "%s": {"outcome": "%s", "seconds": %d}' "$([[ $i == 0 ]] || echo ,)" "${names[i]}" "${outcomes[i]}" "${seconds[i]}"
  done
  printf '\n },\n "tests": "%s"\n}\n' "$(grep -E '(passed|failed)' "$log/tests" | tail -n 1 | tr -d '"=')"
} >"$results/gpu_check.json"
echo "gpu_check: results in $results"
[[ ! " ${outcomes[*]} " == *" failed "* ]]
