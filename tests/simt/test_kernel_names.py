"""One name per primitive through every layer."""

import ast
import re

import pytest

import simt_build
from paths import ROOT

OPS = ROOT / "gradzip" / "ops"


KERNELS = simt_build.kernels()
STEMS = sorted({stem for stem, *_ in KERNELS.values()})


@pytest.mark.parametrize("stem", STEMS)
def test_a_primitive_has_a_file_in_every_layer(stem):
    layers = ("csrc/cpu/{}.cpp", "csrc/cuda/{}.cu", "csrc/cuda/{}.cuh", "gradzip/ops/{}.py", "tests/ops/test_{}.py")
    for path in (*layers, "tests/simt/{}.cpp"):
        assert (ROOT / path.format(stem)).is_file()


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_named_after_its_file(name):
    stem = KERNELS[name][0]
    assert name == stem or name.startswith(f"{stem}_")
    for path in (f"csrc/cpu/{stem}.cpp", f"csrc/cuda/{stem}.cu"):
        assert re.search(rf"^(void|int64_t) {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}: no {name}"


def test_every_launcher_has_kernels():
    assert simt_build.launchers() == STEMS


@pytest.mark.parametrize("path", ["csrc/cpu/ops.h", "csrc/cuda/ops.h", "csrc/bindings.cpp", "csrc/cuda/bindings.h"])
def test_kernels_are_declared_and_bound_by_one_table(path):
    """A name that only one device has could not be called: gradzip/ops picks the device."""
    text = (ROOT / path).read_text()
    assert text.count('#include "kernels.h"\n') == (2 if path.endswith("ops.h") else 1)
    assert not re.search(rf"\b({'|'.join(KERNELS)})\b\(", text)


def kernels_run_by(path):
    """The kernels whose names a module holds as strings, which is how it runs them."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and node.value in KERNELS}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_run_by_the_module_of_its_name_only(name):
    """Or by `groups`, which runs it unchecked. `tensors` lists functions, some of which have a kernel's name."""
    others = {"__init__", "tensors", "groups"}
    users = {path.stem for path in OPS.glob("*.py") if path.stem not in others and name in kernels_run_by(path)}
    assert users == {KERNELS[name][0]} or (not users and name in kernels_run_by(OPS / "groups.py"))


def imports(path):
    """The modules of gradzip.ops that a module imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names |= {node.module} if node.module else {alias.name for alias in node.names}
    return names


def test_ops_has_no_import_circle():
    graph = {path.stem: imports(path) for path in OPS.glob("*.py") if path.stem != "__init__"}
    while ready := {name for name, needs in graph.items() if not needs & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in ready}
    assert not graph
