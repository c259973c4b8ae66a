#!/usr/bin/env bash
# Makes .venv: PyTorch, Horovod (built from source), the test and lint tools, and gradzip itself, editable.
#
# usage: scripts/bootstrap.sh        (`make train` and `make test` call it; run again, it only does what is missing)
#
# Environment: PYTHON         the Python to use, 3.10 to 3.13 (default: python3, else one of those on PATH)
#              GRADZIP_CACHE  where Horovod's built wheels are kept for the next clone (default: ~/.cache/gradzip)
#              GRADZIP_CUDA   auto, 0 or 1: whether gradzip's CUDA kernels are built (see setup.py)
#              MAX_JOBS       compilers to run at a time (default: one per core, as memory permits)
#
# It may be killed at any moment: scripts/venv_state.py looks at what is really there, and the next run repairs it.
# What each step printed is in .venv/log/STEP.log.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
log=$venv/log
python=$venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off
# These would send installs or imports elsewhere, or (make's) restrict the compilers of a sub-make.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER MAKEFLAGS MFLAGS MAKELEVEL

die() { # die WHAT REMEDY: the end, when something is missing
  printf 'bootstrap: %s\n  %s\n' "$1" "$2" >&2
  exit 1
}

# The likely cause of a failure, with its remedy, as its log tells.
explain() {
  local log=$1
  has() { grep -qiE "$1" "$log"; }
  if has 'no space left on device|disk quota exceeded'; then
    echo "The disk is full. Free some space (df -h), or put caches elsewhere: GRADZIP_CACHE=..., TMPDIR=..., PIP_CACHE_DIR=..."
  elif has 'name resolution|connection (refused|reset|broken)|network is unreachable|proxyerror|timed out|sslerror|max retries|from versions: none'; then
    echo "The package index cannot be reached. Check the network, or name a proxy (HTTPS_PROXY) or a mirror (PIP_INDEX_URL)."
  elif has 'no matching distribution|could not find a version'; then
    echo "The package index has no such release for this Python ($("$python" -V 2>&1)). Try another: PYTHON=python3.11 $0"
  elif has 'do not match the hashes'; then
    echo "A download is not what was expected, byte for byte. Try again, or check the mirror in PIP_INDEX_URL."
  elif has 'Python\.h: no such file'; then
    echo "Python's headers are missing. Install them (Debian, Ubuntu: apt install python3-dev)."
  elif has 'fatal error: Killed|signal terminated program|cannot allocate memory|MemoryError'; then
    echo "The machine ran out of memory. Run fewer compilers at a time: MAX_JOBS=1 $0"
  elif has 'CMake Error'; then
    echo "CMake refused: $(grep -m1 -A2 'CMake Error' "$log" | tr -s '\n ' ' ')"
  elif has '[0-9]: (fatal )?error:'; then
    echo "First error: $(grep -m1 -E '[0-9]: (fatal )?error:' "$log" | sed 's/^ *//')"
  elif has 'gradzip build:'; then
    grep -m1 'gradzip build:' "$log" | sed 's/^ *//'
  fi
}

# step NAME WHAT COMMAND...: runs the command, its output in NAME's log, and says in one line what it does, how long
# it took and, should it fail, why.
step() {
  local name=$1 what=$2 status=0 start
  shift 2
  start=$(date +%s%N)
  printf '  %-9s %s ... ' "$name" "$what"
  "$@" >>"$log/$name.log" 2>&1 || status=$?
  if ((status == 0)); then
    local tenths=$((($(date +%s%N) - start) / 100000000))
    printf '%d.%d s\n' $((tenths / 10)) $((tenths % 10))
    return
  fi
  printf 'failed\n'
  {
    echo
    tail -n 20 "$log/$name.log"
    printf '\nbootstrap: %s failed (exit status %d); all it printed is in %s\n' "$name" "$status" "$log/$name.log"
    explain "$log/$name.log" | sed 's/^/  /'
  } >&2
  exit 1
}

# Prints why Python $1 will not do; nothing if it will.
unfit() {
  command -v "$1" >/dev/null || { echo "not found"; return; }
  "$1" - 2>&1 <<'PYTHON' || echo "does not run"
import os, sys
if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    print("is Python %d.%d.%d, expected 3.10 to 3.13" % sys.version_info[:3])
    sys.exit()
import sysconfig
try:
    import ensurepip, venv
except ImportError as error:
    print("has no %s module (Debian, Ubuntu: apt install python3-venv)" % error.name)
    sys.exit()
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print("has no headers to compile with (Debian, Ubuntu: apt install python3-dev)")
PYTHON
}

# Sets `base` to the Python to make .venv with, never one inside a virtual environment: that may be .venv itself.
choose_python() {
  local candidate reason reasons=()
  local candidates=(python3 python3.13 python3.12 python3.11 python3.10)
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    reason=$(unfit "$candidate")
    if [[ -z $reason ]]; then
      base=$("$candidate" -c 'import os, sys; print(os.path.realpath(sys._base_executable))')
      return
    fi
    reasons+=("$candidate: ${reason##*$'\n'}")
  done
  die "no usable Python ($(printf '%s; ' "${reasons[@]}" | sed 's/; $//'))" \
    "Install Python 3.10 to 3.13 with its venv module and headers, or name one: PYTHON=/path/to/python3.11 $0"
}

# Before minutes of downloads, not after.
require_compilers() {
  local cxx=${CXX:-g++} error
  command -v "${cxx%% *}" >/dev/null ||
    die "no C++ compiler: '$cxx' is not on PATH" \
      "Install g++ (Debian, Ubuntu: apt install g++ make), or name another: CXX=clang++ $0"
  # shellcheck disable=SC2086 # CXX may hold options
  error=$(echo '#include <optional>
    int main() { return std::optional<int>{0}.value(); }' | $cxx -std=c++17 -x c++ - -o /dev/null 2>&1) ||
    die "'$cxx' does not compile C++17: ${error%%$'\n'*}" \
      "Install a whole g++ 8 or newer (Debian, Ubuntu: apt install g++), or name another: CXX=clang++ $0"
  command -v make >/dev/null ||
    die "no make: Horovod is built with it" "Install it (Debian, Ubuntu: apt install make)."
}

state() { "$python" "$root/scripts/venv_state.py" "$@"; }

# Whether .venv was made whole, at this path (its scripts hold it) and, where one is asked for, with that Python.
made_here() {
  local path by
  { read -r path && read -r by; } 2>/dev/null <"$venv/made" || return
  [[ $path == "$venv" && (-z ${PYTHON:-} || $by == "$base") ]]
}

make_venv() {
  find "$venv" -mindepth 1 -maxdepth 1 ! -name log ! -name .lock -exec rm -rf {} + &&
    "$base" -m venv "$venv" &&
    "$python" -m pip --version &&
    printf '%s\n%s\n' "$venv" "$base" >"$venv/made"
}

install_packages() {
  # --no-compile: most of torch's modules are never imported, and those that are get compiled then.
  state repair && "$python" -m pip install --no-compile -r "$root/scripts/requirements.txt"
}

intact() { # intact WHEEL: whether it is there and none of its bytes changed
  "$python" -c 'import sys, zipfile; sys.exit(zipfile.ZipFile(sys.argv[1]).testzip() is not None)' "$1" 2>/dev/null
}

# Built aside and moved into place: what is in the cache is whole.
build_horovod() {
  rm -rf "$wheels.new" && mkdir "$wheels.new" &&
    "$root/scripts/build_horovod.sh" "$venv" "$wheels.new" &&
    rm -rf "$wheels" && mv "$wheels.new" "$wheels"
}

install_horovod() {
  # A wheel of another torch may be installed in the same version: --force-reinstall.
  state repair && "$python" -m pip install --no-index --no-deps --force-reinstall "$wheels"/horovod-*.whl &&
    state mark horovod
}

install_gradzip() {
  state repair && "$python" -m pip install -v --no-build-isolation --no-deps -e "$root" && state mark gradzip
}

confirm() { # confirm STEP: that what was just done is there and works
  local reason
  reason=$(state check "$1")
  [[ -z $reason ]] || die "$1: installed, but ${reason#*$'\t'}" "Its log is $log/$1.log; to start afresh: rm -rf '$venv'"
}

lacks() { grep -q "^$1\b" <<<"$lacking"; }

lock() { # lock FD WHAT: one at a time; flock is part of every Linux, and without it only time is lost
  command -v flock >/dev/null || return 0
  flock -n "$1" || { echo "bootstrap: waiting for another one that $2"; flock "$1"; }
}

main() {
  exec </dev/null # nothing here asks a question, and nothing must wait for an answer
  mkdir -p "$log"
  exec 9>"$venv/.lock"
  lock 9 "works on this clone"

  base='' lacking=''
  [[ -z ${PYTHON:-} ]] || choose_python
  if ! made_here || ! lacking=$(state check 2>/dev/null); then
    lacking=$'venv\npackages'
  elif [[ -z $lacking ]]; then
    echo "bootstrap: .venv is up to date"
    return
  fi

  echo "bootstrap: making .venv (logs in .venv/log)"
  rm -f "$log"/*.log
  require_compilers
  if lacks venv; then
    [[ -n $base ]] || choose_python
    step venv "with $("$base" -V 2>&1)" make_venv
  fi
  if lacks packages; then
    step packages "installing what scripts/requirements.txt pins" install_packages
    confirm packages
    lacking=$(state check horovod gradzip) # both may have been made for other packages
  fi
  if lacks horovod; then
    local from_cache=yes
    cache=${GRADZIP_CACHE:-${XDG_CACHE_HOME:-${HOME:-$venv}/.cache}/gradzip}
    mkdir -p "$cache" 2>/dev/null && [[ -w $cache ]] || { cache=$venv/cache && mkdir -p "$cache"; }
    key=$(state key)
    wheels=$cache/$key
    exec 8>"$wheels.lock"
    lock 8 "builds the same Horovod"
    intact "$wheels"/horovod-*.whl || {
      from_cache=
      step horovod "building it for $("$python" -c 'import torch; print("torch", torch.__version__)'), 2 to 4 minutes" build_horovod
    }
    step horovod "installing the wheel kept in $cache" install_horovod
    if [[ $from_cache && -n $(state check horovod) ]]; then
      step horovod "that wheel does not work here, building another, 2 to 4 minutes" build_horovod
      step horovod "installing it" install_horovod
    fi
    confirm horovod
    exec 8>&-
  fi
  if lacks gradzip; then
    step gradzip "building its extension and installing it, editable" install_gradzip
    confirm gradzip
  fi
  echo "bootstrap: .venv is ready"
}

# Sourced, it only defines its functions.
[[ ${BASH_SOURCE[0]} != "$0" ]] || main
