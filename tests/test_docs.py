"""What docs/guarantees.md says holds a promise is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_tests_that_are_named_exist():
    named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", (ROOT / "docs" / "guarantees.md").read_text())
    assert len(named) > 30
    for path, test in named:
        source = (ROOT / path).read_text()
        assert f"def {test}(" in source if test else "def test_" in source, f"{path}::{test}"
