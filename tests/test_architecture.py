"""Imports point one way: csrc -> ops -> methods -> engines -> front ends -> command line. And cost nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradzip

PACKAGE = Path(gradzip.__file__).parent

# Each layer may import itself and those before it.
LAYERS = [
    ["_version", "ops"],
    ["collectives", "schedule"],
    ["compressor"],
    ["methods", "engines"],
    ["agreement", "checkpoint", "joint", "monitor"],
    ["elastic"],
    ["horovod", "ddp"],
    ["cli", "__init__", "__main__"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

# The one way up: Horovod calls the compressor it was given, which leads to its front end.
ALLOWED = {("compressor", "horovod"), ("ops", "_C"), ("cli", "_C")}


def top(name):
    return name.partition(".")[0]


def imports(path):
    """Modules of this package that a file imports, anywhere in it, as first components."""
    package = ["gradzip", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [stem] if stem != "gradzip" else [f"gradzip.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (top(n.removeprefix("gradzip.")) for n in names if n.startswith("gradzip."))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    own = top(path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."))
    for imported in imports(path):
        if (own, imported) in ALLOWED or own == imported or imported not in RANK:
            assert (own, imported) in ALLOWED or own == imported or own == "__init__", f"{own} imports {imported}"
        else:
            assert RANK[imported] <= RANK[own], f"{path.name} imports gradzip.{imported}, which is above it"


def test_methods_know_no_engine_and_engines_no_method():
    for folder, others in (("methods", {"engines", "horovod", "ddp"}), ("engines", {"methods", "horovod", "ddp"})):
        for path in (PACKAGE / folder).glob("*.py"):
            assert not others & set(imports(path)), path


def test_import_loads_no_framework_and_changes_nothing():
    """`import gradzip` works without Horovod, starts no thread, seeds nothing and filters no warning."""
    code = (
        "import sys, threading, warnings, torch\n"
        "sys.modules['horovod'] = None\n"  # as if it was not installed
        "before = (torch.initial_seed(), threading.active_count(), list(warnings.filters))\n"
        "import gradzip\n"
        "assert before == (torch.initial_seed(), threading.active_count(), list(warnings.filters))\n"
        "assert not [m for m in sys.modules if m.startswith(('cupy', 'horovod.', 'gradzip.ddp'))]\n"
        "gradzip.roundtrip(gradzip.FFTRange(), torch.ones(64, 64))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


def test_missing_extension_is_reported_when_a_kernel_is_called():
    code = (
        "import sys; sys.modules['gradzip._C'] = None\n"
        "import gradzip, torch\n"
        "try: gradzip.roundtrip(gradzip.FFTRange(), torch.ones(64, 64))\n"
        "except RuntimeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert "compiled kernels cannot be loaded" in done.stdout and "pip install ." in done.stdout, done.stderr
