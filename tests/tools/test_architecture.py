"""Imports of the package's modules follow one order and have no side effects."""

import ast
import functools
import graphlib
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES

import pytest

from gradzip.methods.base.registry import registered
from paths import ROOT

PACKAGE = ROOT / "gradzip"

# Rooms in order: folders, and modules directly in gradzip/. Each may import earlier ones and its own modules.
_PAGE = (ROOT / "docs" / "design.md").read_text()
_PICTURE = _PAGE.partition("## Order of imports")[2].partition("```text\n")[2].partition("```")[0]
ORDER = [line.split()[0] for line in _PICTURE.splitlines()]


def module_name(path):
    return path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def walk_run(node):
    """All nodes but those under `if TYPE_CHECKING:`, which name types and never run."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from walk_run(child)


@functools.cache
def imports(name, walk=walk_run):
    """All modules of gradzip that a module imports when it runs. The package itself is `__init__`.

    walk: `ast.walk` also finds imports for types.
    """
    path = MODULES[name]
    package = ["gradzip", *path.relative_to(PACKAGE).parts[:-1]]
    # methods/__init__.py finds the methods at run time.
    imported_modules = {module for module, file in MODULES.items() if name == "methods" and file.parent == path.parent}
    for node in walk(ast.parse(path.read_text())):
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
    for imported in imports(name, ast.walk):
        top = imported.partition(".")[0]
        assert top == own or ORDER.index(top) < ORDER.index(own), f"gradzip.{name} imports gradzip.{imported}"


def test_no_import_cycles():
    graphlib.TopologicalSorter({name: imports(name) for name in MODULES}).prepare()


FRONT_ENDS = {"horovod", "ddp", "fsdp", "outer", "integrations"}


def test_front_ends_reach_engines_through_the_session():
    for name in MODULES:
        if name.partition(".")[0] in FRONT_ENDS:
            assert not {module for module in imports(name) if module.partition(".")[0] == "engines"}, name


def test_order_in_the_documentation_lists_every_room_once():
    assert sorted({name.partition(".")[0] for name in MODULES}) == sorted(ORDER)


def test_no_module_is_in_the_wrong_room():
    """A module that one other module imports, in another folder, belongs there, unless its folder is named after it.

    Public names are imported by users.
    """
    importers = {name: {other for other in MODULES if name in imports(other)} for name in MODULES}
    lonely = {
        name: other
        for name, (other, *more) in ((name, sorted(found)) for name, found in importers.items() if found)
        if not more
        and other != "__init__"
        and MODULES[name].parent != MODULES[other].parent
        and MODULES[name].stem != MODULES[name].parent.name
        if MODULES[name].name != "__init__.py" or MODULES[name].parent.parent != MODULES[other].parent
    }
    assert lonely == {}


def test_import_has_no_side_effects():
    """`import gradzip` works without Horovod, starts no thread, seeds nothing and filters no warning."""
    code = (
        "import sys, threading, warnings, torch\n"
        "sys.modules['horovod'] = None\n"  # as if not installed
        "before = (torch.initial_seed(), threading.active_count(), list(warnings.filters))\n"
        "import gradzip\n"
        "assert before == (torch.initial_seed(), threading.active_count(), list(warnings.filters))\n"
        "late = ('cupy', 'horovod.', 'gradzip.ddp', 'gradzip.fsdp', 'gradzip.outer', 'gradzip.integrations')\n"
        "assert not [m for m in sys.modules if m.startswith(late)]\n"
        "gradzip.roundtrip(gradzip.FFTRange(), torch.ones(64, 64))\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr


WITHOUT_EXTENSION = """
import sys
sys.modules["gradzip._C"] = None
import gradzip, torch
try: gradzip.roundtrip(gradzip.FFTRange(), torch.ones(64, 64))
except RuntimeError as error: print(error)
"""


def error_without_extension(**options):
    command = [sys.executable, "-c", WITHOUT_EXTENSION]
    process = subprocess.run(command, capture_output=True, text=True, **options)
    assert "compiled kernels cannot be loaded" in process.stdout, process.stderr
    return process.stdout


def test_missing_extension_is_reported_on_first_use():
    assert "build them with `pip install -e .`" in error_without_extension(cwd=ROOT)


def test_sources_that_hide_the_installed_package_are_reported(tmp_path):
    """After `pip install .`, Python started in the clone finds the sources, without the extension."""
    clone, site = tmp_path / "clone", tmp_path / "site"
    shutil.copytree(PACKAGE, clone / "gradzip", ignore=shutil.ignore_patterns("_C*.so", "__pycache__"))
    options = {"cwd": clone, "env": {**os.environ, "PYTHONPATH": str(site)}}
    assert "build them with `pip install -e .`" in error_without_extension(**options)
    (site / "gradzip").mkdir(parents=True)
    (site / "gradzip" / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    hidden = f"the sources in {clone} hide the gradzip that is installed in {site}: start Python in another folder"
    assert hidden in error_without_extension(**options)


# Files that choose methods on purpose: studies that compare these, small networks that learn with them, and random
# trainings, whose model knows what these do. Pictures, which cannot show all, and the colours in them.
CHOSEN = {
    "benchmarks/common/palette.py",
    "benchmarks/convergence/chart.py",
    "benchmarks/convergence/recipes.py",
    "benchmarks/devices.py",
    "benchmarks/papers/pictures.py",
    "benchmarks/step.py",
    "benchmarks/training/chart.py",
    "benchmarks/training/variants.py",
    "tests/front_ends/buckets_worker.py",
    "tests/support/stateful.py",
    "tests/tools/test_examples.py",
}
MOST_NAMED = 4


def named_methods(node):
    """The registered methods that the elements of a literal are: specs, classes, instances."""
    names = {name for key, method in registered().items() for name in (key, method.__name__)}
    elements = [*node.keys, *node.values] if isinstance(node, ast.Dict) else node.elts
    named = set()
    for element in elements:
        if isinstance(element, ast.Call):
            element = element.func
        text = getattr(element, "value", None) if isinstance(element, ast.Constant) else getattr(element, "attr", None)
        if isinstance(text, str):
            named.add(re.split(r"[:(]", text)[0])
    return named & names


def test_no_list_of_methods_is_kept_by_hand():
    """What holds for every method is asked of the registry (tests/support/kinds.py)."""
    found = set()
    for path in sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)) and len(named_methods(node)) > MOST_NAMED:
                found.add(path.relative_to(ROOT).as_posix())
    assert found == CHOSEN
