#!/usr/bin/env bash
# Make or repair .venv: PyTorch, Horovod (built from source), the test and lint tools, and gradzip itself, editable.
#
# usage: scripts/bootstrap.sh        (`make test`, `make train` and others run it first)
#
# Environment: PYTHON         the Python to use, 3.10 to 3.13 (default: python3, else one of those on PATH)
#              GRADZIP_CACHE  folder of Horovod's built wheels (default: ~/.cache/gradzip)
#              MAX_JOBS       compilers to run at a time (default: one per core, as memory permits)
#              GRADZIP_CUDA and the others of setup.py
#
# All installing is skipped while .venv/done holds the current `stamp`; what to compile is up to ninja. Every step may be
# repeated, so the next run repairs a killed one. The output of each step is in .venv/log.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv python=$root/.venv/bin/python log=$root/.venv/log
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off
# These would redirect installs or imports, or (make's) limit the compilers of a sub-make.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER MAKEFLAGS MFLAGS MAKELEVEL

die() { # die WHAT REMEDY
  printf 'bootstrap: %s\n  %s\n' "$1" "$2" >&2
  exit 1
}

explain() { # explain LOG: print the likely cause of a failure, with its remedy if it is known
  local log=$1
  has() { grep -qiE "$1" "$log"; }
  if has 'no space left on device|disk quota exceeded'; then
    echo "The disk is full. Free some space (df -h), or move caches: GRADZIP_CACHE=..., TMPDIR=..., PIP_CACHE_DIR=..."
  elif has 'name resolution|connection (refused|reset|broken)|network is unreachable|proxyerror|timed out|sslerror|max retries|from versions: none'; then
    echo "The package index cannot be reached. Check the network, or set a proxy (HTTPS_PROXY) or a mirror (PIP_INDEX_URL)."
  elif has 'no matching distribution|could not find a version'; then
    echo "The package index has no such release for this Python. Try another: PYTHON=python3.11 $0"
  elif has 'fatal error: Killed|signal terminated program|cannot allocate memory|MemoryError'; then
    echo "The machine ran out of memory. Run fewer compilers at a time: MAX_JOBS=1 $0"
  else
    grep -m1 -A1 -E 'CMake Error|[0-9]: (fatal )?error:|gradzip build:|E[Rr][Rr][Oo][Rr]:' "$log" | tr -s '\n ' ' ' | sed 's/^ */First error: /'
  fi
}

failed() { # failed STEP
  { printf '\n' && tail -n 20 "$log/$1.log"; } >&2
  die "$1 failed; all it printed is in $log/$1.log" "$(explain "$log/$1.log")"
}

step() { # step NAME WHAT COMMAND...
  local start=$SECONDS
  printf '  %-9s %s ... ' "$1" "$2"
  "${@:3}" >"$log/$1.log" 2>&1 || failed "$1"
  echo "$((SECONDS - start)) s"
}

lock() { # lock FD: wait for other runs that hold the same file
  command -v flock >/dev/null || return 0
  flock -n "$1" || { echo "bootstrap: waiting for another run" && flock "$1"; }
}

choose_python() { # set `base`, which is never a Python inside a virtual environment
  local candidate found reasons='' candidates=(python3 python3.13 python3.12 python3.11 python3.10)
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    found=$("$candidate" -c '
import os, sys, sysconfig
if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    sys.exit("is Python %d.%d.%d, expected 3.10 to 3.13" % sys.version_info[:3])
import ensurepip, venv
if not os.path.exists(sysconfig.get_path("include") + "/Python.h"):
    sys.exit("has no headers to compile with")
print(os.path.realpath(sys._base_executable))' 2>&1) && base=$found && return
    reasons+="$candidate: ${found##*$'\n'}; "
  done
  die "no usable Python (${reasons%; })" "Install Python 3.10 to 3.13 with venv and headers (Debian, Ubuntu: \
apt install python3-venv python3-dev), or name one: PYTHON=/path/to/python3.11 $0"
}

require_compilers() { # before minutes of downloads, not after
  local cxx=${CXX:-g++} error
  # shellcheck disable=SC2086 # CXX may hold options
  error=$(echo '#include <optional>' | $cxx -std=c++17 -x c++ -c - -o /dev/null 2>&1) ||
    die "'$cxx' does not compile C++17: ${error%%$'\n'*}" \
      "Install g++ 8 or newer (Debian, Ubuntu: apt install g++ make), or name another: CXX=clang++ $0"
  command -v make >/dev/null || die "no make, which builds Horovod" "Install it (Debian, Ubuntu: apt install make)."
}

made_here() { # whether .venv was made whole, at this path (its scripts hold it), and with the PYTHON asked for
  local path by
  { read -r path && read -r by; } 2>/dev/null <"$venv/made" && [[ $path == "$venv" && $by == "${base:-$by}" && -x $python ]]
}

horovod_recipe() { # what a built Horovod depends on, besides the versions in its wheel's folder
  cat "$root/scripts/build_horovod.sh"
  env | sort | sed -n '/^HOROVOD_\(BUILD_\|CUDA_\|GPU\|NCCL_\|WITH\)/p' | tr '\n' '\0'
}

stamp() { # a digest of what .venv is installed from, and of the name and size of every file in it
  {
    cat "$root"/scripts/{requirements,horovod}.txt "$root/pyproject.toml" && horovod_recipe
    find "$venv/bin" "$venv/lib" -name __pycache__ -prune -o ! -type d -printf '%P %s\n' 2>/dev/null | sort
  } | sha256sum
}

make_venv() {
  rm -rf "$root"/.venv/{made,bin,lib,lib64,share,include} && "$base" -m venv "$venv" && printf '%s\n' "$venv" "$base" >"$venv/made"
}

install_packages() { # install_packages ARGUMENT...: those of `pip install`
  # pip installs a package again if its metadata is gone: here, that of every package which lacks a part.
  # --no-compile: most of torch's modules are never imported.
  "$python" -c '
import csv, os, pathlib, shutil, sysconfig
site = pathlib.Path(sysconfig.get_path("purelib"))
for info in site.glob("*.dist-info"):
    try:
        rows = csv.reader((info / "RECORD").open(newline=""))
        whole = all(not size or os.stat(site / name).st_size == int(size) for name, _, size in rows)
    except (OSError, ValueError):
        whole = False
    if not whole:
        shutil.rmtree(info)
for moved_aside in site.glob("~*"):
    shutil.rmtree(moved_aside)' && "$python" -m pip install --no-compile "$@"
}

install_horovod() { # install_horovod FOLDER; fails if the wheel there is damaged (zip checksums) or does not work
  "$python" -m pip install --no-index --no-deps --force-reinstall "$1"/horovod-*.whl &&
    "$python" -c 'import horovod.torch'
}

horovod() {
  local cache=${GRADZIP_CACHE:-${XDG_CACHE_HOME:-${HOME:-$venv}/.cache}/gradzip} wheels
  mkdir -p "$cache" && [[ -w $cache ]] || { cache=$venv/cache && mkdir -p "$cache"; }
  wheels=$cache/$(sed -n 's/^horovod==\([^ ]*\).*/horovod-\1/p' "$root/scripts/horovod.txt")-$("$python" -c '
import importlib.metadata as metadata, platform, sys
print("torch", metadata.version("torch"), sys.implementation.cache_tag, platform.machine(), *platform.libc_ver(), sep="-")
')-$(horovod_recipe | sha256sum | head -c 8)
  exec 8>"$wheels.lock" && lock 8 && { { [[ -d $wheels ]] && install_horovod "$wheels"; } || {
    rm -rf "$wheels.new" && mkdir "$wheels.new" && "$root/scripts/build_horovod.sh" "$venv" "$wheels.new" &&
      rm -rf "$wheels" && mv "$wheels.new" "$wheels" && install_horovod "$wheels"
  }; } && exec 8>&-
}

main() {
  local base=''
  exec </dev/null # so that nothing waits for an answer
  mkdir -p "$log"
  exec 9>"$venv/.lock"
  lock 9
  [[ -z ${PYTHON:-} ]] || choose_python
  if ! made_here || [[ $(stamp) != "$(cat "$venv/done" 2>&1)" ]]; then
    echo "bootstrap: making .venv (logs in .venv/log)"
    rm -f "$venv/done" "$log"/*.log
    require_compilers
    if ! made_here || ! "$python" -m pip --version >/dev/null 2>&1; then
      [[ -n $base ]] || choose_python
      step venv "with $("$base" -V)" make_venv
    fi
    step packages "installing scripts/requirements.txt" install_packages -r "$root/scripts/requirements.txt"
    step horovod "from the cache, else built (minutes)" horovod
    step gradzip "building the extension, installing" "$python" -m pip install -v --no-build-isolation --no-deps -e "$root"
    stamp >"$venv/done"
  fi
  (cd "$root" && "$python" setup.py -q build_ext --inplace) 2>&1 | tee "$log/extension.log" | sed -un 's/^\[/  [/p' ||
    failed extension
  echo "bootstrap: .venv is up to date"
}

# Sourced, it only defines its functions.
[[ ${BASH_SOURCE[0]} != "$0" ]] || main
