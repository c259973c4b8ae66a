"""Imports of the package's modules follow one order and have no side effects, and modules are short."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import gradzip

PACKAGE = Path(gradzip.__file__).parent

# Modules and packages in order. Each may import earlier ones and, in a package, the package's own modules.
ORDER = [
    "_version",
    "nvrtc",
    "ops",
    "optim",
    "state",
    "streams",
    "state_dict",
    "memory",
    "collectives",
    "traffic",
    "routines",
    "cost",
    "models",
    "fusion",
    "sharding",
    "hooks",
    "hyper_parameters",
    "compressor",
    "composite",
    "codec",
    "gather",
    "bucket_codec",
    "registry",
    "schedule",
    "methods",
    "spec",
    "codec_ring",
    "fixed_codec",
    "averaging",
    "decay_momentum",
    "engines",
    "buckets",
    "measure",
    "auto",
    "handshake",
    "checkpoint",
    "monitor",
    "replay",
    "script",
    "inspection",
    "telemetry",
    "horovod",
    "ddp",
    "fsdp",
    "__init__",
    "cli",
    "__main__",
]

# Of a module directly in gradzip/.
MAX_LINES = 220


def module_name(path):
    return path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name):
    """All modules of gradzip that a module imports, at any place in its file. The package itself is `__init__`."""
    path = MODULES[name]
    package = ["gradzip", *path.relative_to(PACKAGE).parts[:-1]]
    imported_modules = set()
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
                imported_modules.add(inner)
            elif inner != "_C":
                imported_modules.add(stem or "__init__")
    return imported_modules - {name}


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_order(name):
    own = name.partition(".")[0]
    for imported in imports(name):
        top = imported.partition(".")[0]
        assert top == own or ORDER.index(top) < ORDER.index(own), f"gradzip.{name} imports gradzip.{imported}"


def test_no_import_cycles():
    graphlib.TopologicalSorter({name: imports(name) for name in MODULES}).prepare()


def test_order_lists_every_module():
    assert {name.partition(".")[0] for name in MODULES} == set(ORDER)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_modules_of_the_core_are_short(path):
    """One idea for each module: a longer one has two."""
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"gradzip/{path.name} has {lines} lines, expected at most {MAX_LINES}; split it"


def test_import_has_no_side_effects():
    """`import gradzip` works without Horovod, starts no thread, seeds nothing and filters no warning."""
    code = (
        "import sys, threading, warnings, torch\n"
        "sys.modules['horovod'] = None\n"  # as if not installed
        "before = (torch.initial_seed(), threading.active_count(), list(warnings.filters))\n"
        "import gradzip\n"
        "assert before == (torch.initial_seed(), threading.active_count(), list(warnings.filters))\n"
        "assert not [m for m in sys.modules if m.startswith(('cupy', 'horovod.', 'gradzip.ddp', 'gradzip.fsdp'))]\n"
        "gradzip.roundtrip(gradzip.FFTRange(), torch.ones(64, 64))\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert process.returncode == 0, process.stderr


def test_missing_extension_is_reported_on_first_use():
    code = (
        "import sys; sys.modules['gradzip._C'] = None\n"
        "import gradzip, torch\n"
        "try: gradzip.roundtrip(gradzip.FFTRange(), torch.ones(64, 64))\n"
        "except RuntimeError as error: print(error)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert "compiled kernels cannot be loaded" in process.stdout and "pip install ." in process.stdout, process.stderr
