"""Benchmarks, run from the root of the repository: `python -m benchmarks.NAME`. They train networks of examples/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
