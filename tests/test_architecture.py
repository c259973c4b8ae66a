"""Imports point one way, from primitives to the command line, without a circle. And importing has no side effects."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import gradzip

PACKAGE = Path(gradzip.__file__).parent

# Modules and packages in order: each may import those before it, and, within a package, modules of its own.
ORDER = [
    "_version",
    "ops",
    "state",
    "memory",
    "collectives",
    "fusion",
    "hyper_parameters",
    "compressor",
    "gather",
    "registry",
    "schedule",
    "methods",
    "spec",
    "codec_ring",
    "averaging",
    "engines",
    "handshake",
    "checkpoint",
    "monitor",
    "horovod",
    "ddp",
    "__init__",
    "cli",
    "__main__",
]


def module_name(path):
    return path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name):
    """Modules of this package that a module imports, anywhere in its file. The package itself is `__init__`."""
    path = MODULES[name]
    package = ["gradzip", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            stems = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            stems = [(stem, alias.name) for alias in node.names]
        else:
            continue
        for stem, attribute in stems:
            if stem != "gradzip" and not stem.startswith("gradzip."):
                continue
            stem = stem.removeprefix("gradzip").removeprefix(".")
            # `from package import module` imports the module; `from module import name` only the module.
            inner = f"{stem}.{attribute}".removeprefix(".")
            if inner in MODULES:
                found.add(inner)
            elif inner != "_C":
                found.add(stem or "__init__")
    return found - {name}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    own = name.partition(".")[0]
    for imported in imports(name):
        top = imported.partition(".")[0]
        assert top == own or ORDER.index(top) < ORDER.index(own), f"gradzip.{name} imports gradzip.{imported}"


def test_no_module_imports_itself_by_way_of_others():
    graphlib.TopologicalSorter({name: imports(name) for name in MODULES}).prepare()


def test_every_module_has_its_place():
    assert {name.partition(".")[0] for name in MODULES} == set(ORDER)


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
