#!/usr/bin/env bash
# Tests the gradzip that is installed, not the one in the checkout: the tests, and all they need besides the package,
# are copied to a folder of their own, so that a file missing from the installed package is missed.
#
# usage: scripts/test_installed.sh [PYTEST_ARGUMENT...]
#
# Environment: PYTHON   the Python that gradzip is installed for (default: python3)
set -euo pipefail

python=${PYTHON:-python3}
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/gradzip-test.XXXXXX")
trap 'rm -rf "$work"' EXIT

# All but the package, the history, and what was built or cached.
(cd "$root" && tar -c --exclude=./gradzip --exclude=./.git --exclude=./.venv --exclude=./build --exclude='./.*_cache' .) |
  tar -x -C "$work"
cd "$work"

package=$("$python" -c 'import gradzip; print(gradzip.__path__[0])')
if [[ $package == "$root/gradzip" ]]; then
  printf 'test_installed: gradzip is imported from the checkout, %s\n  Install it: pip install . (not editable)\n' "$package" >&2
  exit 1
fi
echo "test_installed: $package"
"$python" -m pytest "$@"
