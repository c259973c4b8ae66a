"""Jobs with the libraries of .venv-integrations, which scripts/integrations.sh makes (gradzip/integrations)."""

import functools

import pytest

import launch
from paths import ROOT

BIN = ROOT / ".venv-integrations" / "bin"
needs_integrations = pytest.mark.skipif(
    not (BIN / "accelerate").exists(), reason="no .venv-integrations: make integrations installs it"
)


python = functools.partial(launch.python, BIN / "python")
torchrun = functools.partial(launch.torchrun, interpreter=python, timeout=500)
