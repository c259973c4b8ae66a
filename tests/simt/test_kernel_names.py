"""One name per primitive through every layer, and one parameter list for both devices."""

import ast
import re

import pytest

from paths import ROOT

OPS = ROOT / "gradzip" / "ops"


def declared(device):
    """The kernels of csrc/DEVICE/ops.h: name -> (stem of its section, parameters)."""
    kernels, stem = {}, None
    text = (ROOT / "csrc" / device / "ops.h").read_text()
    for section, name, parameters in re.findall(
        r"^// --- (\w+)$|^(?:void|int64_t) (\w+)\(([^;]*)\);", text, re.MULTILINE
    ):
        if section:
            stem = section
        else:
            kernels[name] = stem, [re.sub(r"\s+", " ", parameter.strip()) for parameter in parameters.split(",")]
    return kernels


CPU, CUDA = declared("cpu"), declared("cuda")
STEMS = sorted({stem for stem, _ in CPU.values()})


@pytest.mark.parametrize("stem", STEMS)
def test_a_primitive_has_a_file_in_every_layer(stem):
    layers = ("csrc/cpu/{}.cpp", "csrc/cuda/{}.cu", "csrc/cuda/{}.cuh", "gradzip/ops/{}.py", "tests/ops/test_{}.py")
    for path in (*layers, "tests/simt/{}.cpp"):
        assert (ROOT / path.format(stem)).is_file()


@pytest.mark.parametrize("name", CPU)
def test_a_kernel_is_named_after_its_file(name):
    stem = CPU[name][0]
    assert name == stem or name.startswith(f"{stem}_")
    for path in (f"csrc/cpu/{stem}.cpp", f"csrc/cuda/{stem}.cu"):
        assert re.search(rf"^(void|int64_t) {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}: no {name}"


@pytest.mark.parametrize("name", CPU)
def test_cpu_and_cuda_take_the_same_parameters(name):
    stem, parameters = CPU[name]
    assert parameters[-1] == "int threads"
    on_cuda = [parameter for parameter in CUDA[name][1] if parameter != "void* workspace"]
    assert on_cuda[-1] == "cudaStream_t stream"
    assert (CUDA[name][0], on_cuda[:-1]) == (stem, parameters[:-1])


def test_every_kernel_is_bound_and_none_but_these():
    bound = re.findall(r"^ *KERNEL\((\w+)\)", (ROOT / "csrc" / "kernels.h").read_text(), re.MULTILINE)
    assert len(bound) == len(set(bound))
    assert set(bound) == set(CPU) == set(CUDA)
    sources = {path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu")}
    assert set(STEMS) == sources - {"device"}  # of the runtime, without kernels


def kernels_run_by(path):
    """The kernels whose names a module holds as strings, which is how it runs them."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and node.value in CPU}


@pytest.mark.parametrize("name", CPU)
def test_a_kernel_is_run_by_the_module_of_its_name_only(name):
    users = {path.stem for path in OPS.glob("*.py") if path.stem != "__init__" and name in kernels_run_by(path)}
    assert users == {CPU[name][0]}


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
