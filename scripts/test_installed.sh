#!/usr/bin/env bash
# Test the installed gradzip, not the checkout. The tests and what they need are copied to a folder without the package,
# so that they fail if the installed package lacks a file.
#
# usage: scripts/test_installed.sh [PYTEST_ARGUMENT...]
#
# Environment: PYTHON   the Python that gradzip is installed for (default: python3)
set -euo pipefail

python=${PYTHON:-python3}
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/gradzip-test.XXXXXX")
trap 'rm -rf "$work"' EXIT

# Everything but the package, the history, build outputs and caches.
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
