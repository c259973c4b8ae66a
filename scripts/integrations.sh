#!/usr/bin/env bash
# Make or repair .venv-integrations: the libraries that gradzip/integrations adapts to, beside the packages of .venv.
#
# usage: scripts/integrations.sh        (`make integrations` runs it, after scripts/bootstrap.sh)
#
# A .pth file adds the packages of .venv, and pip keeps their versions: torch is not installed twice.
#
# All is skipped while .venv-integrations/done holds the current stamp. The next run repairs a killed one. The output of
# each step is in .venv-integrations/log.
set -euo pipefail

# shellcheck source=scripts/bootstrap.sh
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
below=$venv
venv=$root/.venv-integrations python=$root/.venv-integrations/bin/python log=$root/.venv-integrations/log

make_layer() {
  rm -rf "$root"/.venv-integrations/{made,bin,lib,lib64,share,include} && "$below/bin/python" -m venv --without-pip "$venv"
  echo "import site; site.addsitedir('$("$below/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
  printf '%s\n' "$venv" "$below" >"$venv/made"
}

stamp_of_layer() { # of its files, what they are installed from, and those of .venv
  { stamp && cat "$root/scripts/integrations.txt" "$below/done"; } | sha256sum
}

integrate() {
  local base=$below # for made_here
  exec </dev/null
  [[ -e $below/done ]] || die "no .venv" "Run scripts/bootstrap.sh first."
  mkdir -p "$log"
  exec 9>"$venv/.lock"
  lock 9
  if ! made_here || [[ $(stamp_of_layer) != "$(cat "$venv/done" 2>&1)" ]]; then
    echo "integrations: making .venv-integrations (logs in .venv-integrations/log)"
    rm -f "$venv/done" "$log"/*.log
    made_here || step layer "over .venv" make_layer
    step packages "installing scripts/integrations.txt" \
      install_packages -c "$root/scripts/requirements.txt" -r "$root/scripts/integrations.txt"
    stamp_of_layer >"$venv/done"
  fi
  echo "integrations: .venv-integrations is up to date"
}

integrate
