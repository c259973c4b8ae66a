"""Count the memory of a device that methods take, on the stand-in (stand_in.py). Needs no GPU.

One rank of 8 averages the gradients of a model of equal matrices, under DDP. Bytes are those of tensors, without what
torch's allocator rounds them up to, and for each element of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from unittest import mock

import torch

import gradzip
from benchmarks.common.arguments import Parser, method
from benchmarks.common.results import ROOT, Blocks, replace_blocks
from benchmarks.common.tables import markdown
from benchmarks.device_ops import __main__ as device_ops
from benchmarks.device_ops.__main__ import ddp_steps, fake_group, future
from benchmarks.device_ops.capture import methods
from benchmarks.device_ops.stand_in import stand_in, zeros
from gradzip.collectives import cost
from gradzip.methods.base import compressor as base

PAGE = ROOT / "docs" / "methods.md"
START = "<!-- table: python -m benchmarks.device_ops.memory --write -->\n\n"
OTHERS = ("block-float:error_feedback=owner", "block-float:error_feedback=False", "momentum:inner=qsgd")


def specs() -> list[str]:
    """One of each method whose steps a device undoes, and others."""
    first = [of_method[0] for _, of_method in methods()]
    return sorted([spec for spec in first if gradzip.parse(spec).undone_on_device] + list(OTHERS))


RANKS, STEPS = 8, 4
SIDE, MATRICES = 384, 16
SHAPES = {f"{i}.weight": torch.Size((SIDE, SIDE)) for i in range(MATRICES)}
NUMEL = SIDE * SIDE * MATRICES


class Memory(NamedTuple):
    """Bytes for each element of the gradients."""

    kept: float  # between steps
    in_step: float  # in addition, at most
    of_states: float  # of what is kept, the tensors of states


def count(compressor: gradzip.Compressor, dtype: torch.dtype = torch.float32) -> Memory:
    """Count the memory of a method, beyond parameters, gradients and DDP's buckets, which have this type."""
    own = dtype.itemsize * NUMEL
    with (
        fake_group(RANKS),
        mock.patch("gradzip.ddp.Future", future),
        mock.patch.object(device_ops, "BUCKET", 4 * SIDE * SIDE),
        mock.patch.object(base, "TOGETHER_NBYTES", 0),  # as for large models
        mock.patch.object(cost, "ALONE_NBYTES", dtype.itemsize * SIDE * SIDE),  # likewise
        stand_in(compute=False, small=1 << 16) as device,
    ):
        allocated = device.allocated()
        run = ddp_steps(compressor, SHAPES, RANKS, device, dtype)
        for _ in range(STEPS):  # buckets and gradients are those of the model in each step
            gradients = {n: device.tensor(zeros(s, dtype)) for n, s in SHAPES.items()}
            before = allocated.start()
            with device.counting() as counts:
                run(gradients, counts)
            most = allocated.peak - before - own  # without buckets
            del gradients
        of_states = sum(part.memory.nbytes for part in compressor.parts)
        return Memory((allocated.now - own) / NUMEL, most / NUMEL, of_states / NUMEL)  # without parameters


def rows(specs: Iterable[str]) -> Iterator[list[str]]:
    for spec in specs:
        found, half = count(gradzip.parse(spec)), count(gradzip.parse(spec), torch.bfloat16)
        yield [f"`{spec}`", f"{found.kept:.2f}", f"{found.in_step:.1f}", f"{half.in_step:.1f}"]


def blocks() -> Blocks:
    """The block of docs/methods.md."""
    lines = markdown(["method", "kept", "in a step", "with bfloat16"], rows(specs()))
    return {(PAGE, START): "".join(f"{line}\n" for line in lines)}


def main() -> None:
    parser = Parser("device_ops.memory", __doc__)
    parser.add_argument("methods", metavar="SPEC", nargs="*", type=method, help="methods (default: those of the table)")
    parser.add_argument("--write", action="store_true", help="write the table of docs/methods.md")
    args = parser.parse_args()
    if args.write:
        replace_blocks(blocks())
        return
    for spec, kept, in_step, half in rows(args.methods or specs()):
        print(f"{spec:42} {kept:>6} bytes an element kept, {in_step:>5} in a step, {half:>5} bfloat16", flush=True)


if __name__ == "__main__":
    main()
