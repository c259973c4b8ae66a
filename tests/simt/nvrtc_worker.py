"""Compare what a build without nvcc queues with what the CUDA launchers queue on the CPU (tests/simt), call by call.

usage: nvrtc_worker.py NVRTC_MODULE SIMT_MODULE, with the stand-in for the driver where the loader finds it

Steps of all methods run on the emulation, whose results are real. Each call of a kernel also goes to the other module,
with the same arguments, and both must have queued the same launches with the same bytes of parameters.
"""

import contextlib
import importlib.util
import os
import sys
import types
from pathlib import Path

import torch

import gradzip
import gradzip.ops._native as native
import gradzip.ops.nvrtc
from gradzip import ops
from gradzip.methods.base.registry import registered


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Both:
    """The kernels of both modules, called with the same arguments."""

    def __init__(self, nvrtc, simt, log):
        self.nvrtc, self.simt, self.log = nvrtc, simt, log
        self.launches = self.fills = 0

    def __getattr__(self, name):
        def call(*arguments):
            self.log.write_text("")
            before = getattr(self.nvrtc, name)(*arguments)
            got = [line for line in self.log.read_text().splitlines() if line.startswith(("launch", "fill"))]
            nbytes = None

            def run():
                nonlocal nbytes
                nbytes = getattr(self.simt, name)(*arguments)

            expected = self.simt.recorded(run)
            assert before == nbytes, f"{name}: asks for {before} bytes of workspace, expected {nbytes}"
            for one, other in zip(got, expected):
                assert one == other, f"{name} queues\n{one}\nexpected\n{other}"
            assert len(got) == len(expected), name
            self.launches += sum(line.startswith("launch") for line in got)
            self.fills += len(got)
            return nbytes

        return call


def main(nvrtc_path, simt_path):
    nvrtc, simt = load("nvrtc_cuda", nvrtc_path), load("simt_cuda", simt_path)
    log, sizes = Path(os.environ["STAND_IN_LOG"]), Path(os.environ["STAND_IN_SIZES"])
    numbers_of = {name: numbers for _, name, numbers, _ in nvrtc.kernels()}
    sizes.write_text("".join(f"{name}: {' '.join(map(str, numbers))}\n" for name, numbers in numbers_of.items()))
    units = {(module, name): unit for module, name, _, unit in nvrtc.kernels()}
    compiled = set()

    def compile_module(sources, module, names, capability, driver):
        assert capability == 90 and driver == 13000 and f"cuda/{module}.cuh" in sources
        added = {(module, name) for name in names}
        assert len({units[key] for key in added}) == 1
        assert not compiled & added, "once"
        compiled.update(added)
        return b"\x7fELF", {name: name for name in names}

    gradzip.ops.nvrtc.compile_module = compile_module
    both = Both(nvrtc, simt, log)
    module = types.SimpleNamespace(cuda=both, cuda_built=True)
    native._C = module
    torch.Tensor.is_cuda = property(lambda x: True)
    torch.cuda.device = contextlib.nullcontext
    torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=0)
    torch.cuda.current_device = lambda: None  # as the index of a tensor on the CPU
    torch.cuda.is_current_stream_capturing = lambda: False
    ops.tensors.CopyLater = lambda x: types.SimpleNamespace(result=x.clone, is_done=lambda: True)

    for spec in (spec for method in registered().values() for spec in method.examples):
        group = gradzip.LocalGroup(gradzip.parse(spec), 2)
        for _ in range(2):
            group.average([torch.randn(60, 70) for _ in range(2)], "w")
    x = torch.randn(5000)
    ops.atom_probabilities(x.double().abs(), 10)
    ops.quantize(x, 9, 100, "l2", 7)
    ops.pack_bits(x.int(), 5)
    ops.select_threshold(x, 100)
    ops.restore_unless_finite(x[:1] * torch.nan, [ops.Restoration(x.clone(), x), ops.Restoration(x.double(), None)])
    payloads = ops.seal_payloads([ops.Seal(ops.new_payload(nbytes), 1) for nbytes in (0, 10**5)], method=1, digest=2)
    ops.verify_payloads([ops.ExpectedPayloads(payloads, [1, 1], 1, 2)])
    assert nvrtc.devices() == [("stand-in", 9, 0, 80 << 30)] and nvrtc.driver_version() == 13000
    assert not any("DctRow<7, 7>" in name for _, name in compiled), "no gradient has such kernels"
    modules = {module for module, _ in compiled}
    print(len(modules), "modules,", both.launches, "launches,", both.fills - both.launches, "fills")


if __name__ == "__main__":
    main(*sys.argv[1:])
