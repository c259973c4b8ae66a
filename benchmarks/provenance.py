"""Provenance of benchmark results."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch

import gradzip
from gradzip import _C


def provenance(device: str = "cpu") -> dict[str, object]:
    """Versions, the commit, and the processor or GPU.

    The commit ends in -dirty if files were changed, and is empty without a checkout or without git.
    """
    here = Path(__file__).parent
    # Shaped networks need root, for whom git refuses to describe another user's checkout.
    describe = ["git", "-c", "safe.directory=*", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=here, capture_output=True, text=True).stdout if shutil.which("git") else ""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or [platform.machine()]
    return {
        "gradzip": gradzip.__version__,
        "commit": commit.strip(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else names[0],
        "simd": _C.simd(),
    }
