"""A build without nvcc: launchers ask for the kernels that nvcc compiles, NVRTC compiles them, the driver gets them."""

import ctypes.util
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import types
from pathlib import Path

import pytest

import simt_build
from gradzip.ops import nvrtc
from gradzip.ops.nvrtc import __main__ as main

COVERS = ["csrc/**/*", "setup.py", "gradzip/ops/nvrtc/*.py", "tests/simt/**/*", "tests/support/simt_build.py"]

# The module takes a minute to compile on a slow machine.
pytestmark = [pytest.mark.long, pytest.mark.skipif(not shutil.which("g++"), reason="no g++")]


@pytest.fixture(scope="module")  # so that one worker runs these tests: another one would wait for the compiler
def module():
    spec = importlib.util.spec_from_file_location("nvrtc_cuda", simt_build.nvrtc_module())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def library():
    try:
        return nvrtc.find()
    except RuntimeError as reason:
        pytest.skip(str(reason))


def test_launchers_ask_for_the_kernels_of_nvcc(module):
    """tests/simt/kernel_resources.json names those."""
    asked = {name.replace("long long unsigned int", "unsigned long long") for _, name, *_ in module.kernels()}
    recorded = json.loads((Path(__file__).parent / "kernel_resources.json").read_text())["kernels"]
    assert {name.replace("gradzip::cuda::", "").replace("gradzip::", "") for name in asked} == recorded.keys()
    assert len(module.kernels()) == len({(stem, name) for stem, name, *_ in module.kernels()})


def test_sources_are_those_of_the_repository(module):
    for path, text in module.sources().items():
        assert (simt_build.CSRC / path).read_text() == text


def parameters(cubin):
    """The sizes of the parameters of each kernel, by symbol: records of kind 0x17 in sections `.nv.info.SYMBOL`."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + size * i) for i in range(count)]
    found = {}
    for name, _, _, _, at, nbytes in sections:
        first = sections[names][4] + name
        symbol = cubin[first : cubin.index(b"\0", first)].decode()
        if not symbol.startswith(".nv.info."):
            continue
        rows, end = [], at + nbytes
        while at < end:
            form, kind, length = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == 4:
                if kind == 0x17:
                    _, ordinal, _, flags = struct.unpack_from("<IHHI", cubin, at)
                    rows.append((ordinal, flags >> 18))
                at += length
        found[symbol.removeprefix(".nv.info.")] = [nbytes for _, nbytes in sorted(rows)]
    return found


@pytest.mark.timeout(900)  # a minute or two where cores are shared
def test_all_kernels_compile_with_the_parameters_of_the_launchers(module, library):
    """Parameters have the same sizes for g++ and on the device. Takes 20 s of CPU time.

    For the oldest architecture of gradzip or of the library: no kernel asks which it is.
    """
    capability = min(known for known in library.capabilities if known >= 75)
    by_module = {}
    for stem, name, sizes, _ in module.kernels():
        by_module.setdefault(stem, {})[name] = sizes
    options = [*nvrtc.OPTIONS, f"-arch=sm_{capability}"]
    headers = {**module.sources(), **nvrtc.STANDARD_HEADERS}
    for stem, kernels in by_module.items():
        image, symbols = library.compile(nvrtc.program(stem), headers, options, list(kernels))
        assert image.startswith(b"\x7fELF")
        on_device = parameters(image)
        assert {name: on_device[symbols[name]] for name in kernels} == kernels


def environment(folder, driver=True):
    if driver:
        shutil.copy(simt_build.stand_in_driver(), folder / "libcuda.so.1")
    return os.environ | {
        "LD_LIBRARY_PATH": str(folder),
        "STAND_IN_LOG": str(folder / "log"),
        "STAND_IN_SIZES": str(folder / "sizes"),
        "GRADZIP_CACHE": str(folder / "cache"),
    }


def test_launches_are_those_of_the_other_builds(tmp_path):
    """Grid, block and all bytes of all parameters, in steps of all methods, and every module is compiled once."""
    command = [
        sys.executable,
        Path(__file__).with_name("nvrtc_worker.py"),
        simt_build.nvrtc_module(),
        simt_build.module(),
    ]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    modules, launches, fills = (int(word) for word in done.stdout.split() if word.isdecimal())
    assert modules == len(list((simt_build.CSRC / "cuda").glob("*.cu"))) - 1, "all but device.cu"
    assert launches > 1000 and fills > 100


PROGRAM = """
import importlib.util, sys
import gradzip.ops.nvrtc.library as library
spec = importlib.util.spec_from_file_location("nvrtc_cuda", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
{setup}
for _ in range(2):
    try: module.abs_max(0, 4096, 0, 1000, 8192, 0)
    except RuntimeError as error: print(error)
"""


def run_abs_max(folder, setup="", driver=True):
    program = PROGRAM.format(path=str(simt_build.nvrtc_module()), setup=setup)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(folder, driver), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_from_the_launcher_to_nvrtc_to_the_driver(library, tmp_path):
    symbol = "_ZN7gradzip4cuda14abs_max_kernelIfEEvPKT_lPj"
    columns = "_ZN7gradzip4cuda22abs_max_columns_kernelENS0_12ColumnsTableE"
    (tmp_path / "sizes").write_text(f"{symbol}: 8 8 8\n{columns}: 8\n")
    queued = ["fill 4 0 0020000000000000", "launch 1 1 256 0 0010000000000000 e803000000000000 0020000000000000"]
    for compiled in (True, False):  # then it is in the cache
        (tmp_path / "log").write_text("")
        done = run_abs_max(tmp_path)
        log = (tmp_path / "log").read_text().splitlines()
        assert not done.stdout and ("compiling the CUDA kernels of abs_max" in done.stderr) == compiled
        assert log[:2] == [queued[0], "load 7f454c46"] and sorted(log[2:4]) == [f"get {symbol}", f"get {columns}"]
        assert log[4:] == [queued[1], *queued]


def test_all_kernels_can_be_compiled_beforehand(module, monkeypatch):
    asked = []
    monkeypatch.setattr(main, "_C", types.SimpleNamespace(cuda=module, cuda_nvrtc=True))
    monkeypatch.setattr(
        main, "compile_module", lambda sources, stem, names, capability: asked.append((stem, names, capability))
    )
    main.main(["80", "9.0"])
    for capability in (80, 90):
        kernels = [(stem, name) for stem, names, of in asked if of == capability for name in names]
        assert sorted(kernels) == sorted((stem, name) for stem, name, *_ in module.kernels())
    with pytest.raises(SystemExit, match="usage: python -m gradzip.ops.nvrtc CAPABILITY"):
        main.main([])
    monkeypatch.setattr(main, "_C", types.SimpleNamespace(cuda_nvrtc=False))
    with pytest.raises(SystemExit, match="compiles no kernels at run time"):
        main.main(["80"])


def test_errors_reach_python(tmp_path):
    (tmp_path / "sizes").touch()
    done = run_abs_max(tmp_path, "library.candidates = lambda: []")
    assert done.stdout.count("there is no NVRTC to compile its CUDA kernels; pip install nvidia-cuda-nvrtc") == 2


@pytest.mark.skipif(bool(ctypes.util.find_library("cuda")), reason="there is a driver")
def test_without_a_driver(module, tmp_path):
    done = run_abs_max(tmp_path, driver=False)
    assert done.stdout.count("cudaMemsetAsync: no driver (libcuda.so.1)") == 2
    assert module.devices() == [] and module.driver_version() == 0
