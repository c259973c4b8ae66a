#!/usr/bin/env bash
# Build the documentation as a website in build/site: pages of the repository, and a reference made of docstrings.
# A link without a target is an error. MkDocs is in build/docs-tools, which this makes from pyproject.toml's extra `docs`.
#
# usage: scripts/build_docs.sh [OPTION...]        (options of `mkdocs build`; `make docs` runs it)
#
# Environment: PYTHON   a Python that has gradzip installed (default: python3)
set -euo pipefail

cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=${PYTHON:-python3} tools=build/docs-tools

needs=$("$python" -c '
from importlib.metadata import requires
print(*(line.partition(";")[0] for line in requires("gradzip") if "docs" in line.partition(";")[2]), sep="\n")')
if [[ $needs != "$(cat $tools/done 2>/dev/null)" ]]; then
  "$python" -m venv --clear $tools
  mapfile -t packages <<<"$needs"
  $tools/bin/pip install -q --disable-pip-version-check "${packages[@]}"
  echo "$needs" >$tools/done
fi
export NO_MKDOCS_2_WARNING=1 # about a later release, which is not installed
exec $tools/bin/mkdocs build "$@"
