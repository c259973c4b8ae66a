"""Jobs with the libraries of .venv-integrations, which scripts/integrations.sh makes (gradzip/integrations)."""

import functools

import pytest

import launch
import turns
from paths import ROOT

BIN = ROOT / ".venv-integrations" / "bin"
needs_integrations = pytest.mark.skipif(
    not (BIN / "accelerate").exists(), reason="no .venv-integrations: make integrations installs it"
)


def python():
    """Return the command of its Python, which imports torch for each rank: `launch.python` has no such libraries."""
    turns.take()
    return [str(BIN / "python")]


torchrun = functools.partial(launch.torchrun, interpreter=python, timeout=500)
