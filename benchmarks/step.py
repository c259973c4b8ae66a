"""Time training steps with DDP, with and without compression: of one rank, or of those that torchrun starts.

With one rank, there is no network: a step consists of computing the gradients, compressing them, and decompressing this
rank's own payloads. The row "stock" is DDP without a hook. Steps of variants are timed in turns: of a few at a time,
since each has a network of its own, and always beside "stock".

On CUDA, also methods with `skip_nonfinite(False)`, where most wait for nothing; and whole steps in a CUDA graph, which
are compared with "stock, captured".
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradzip
import gradzip.ddp
from benchmarks.common.arguments import Parser, at_least, method, output_file
from benchmarks.common.hooks import HOOKS
from benchmarks.common.networks import GPT, resnet50
from benchmarks.common.results import provenance, write_json

EXAMPLES = """\
examples:
  python -m benchmarks.step --device cuda --json step.json          all methods, ResNet-50, 64 images of 224 x 224
  python -m benchmarks.step --device cuda --model gpt2              a transformer of 124 M parameters in bfloat16
  python -m benchmarks.step --image-size 32 --batch-size 4 acpsgd   on a CPU
  torchrun --standalone --nproc-per-node 8 -m benchmarks.step --device cuda --model gpt2 block-float    eight GPUs
"""

SPECS = (
    "none", "acpsgd", "powersgd", "block-float", "block-float:bits=4,rounding=nearest", "fft-range", "dct-range",
    "topk", "randomk", "qsgd", "natural", "terngrad", "signsgd", "onebit", "dgc",
    "momentum:inner=signsgd(majority=False),warmup_steps=1",
)  # fmt: skip
UNCHECKED, CAPTURED = ", skip_nonfinite(False)", ", captured"  # ends of the names of variants
CAPTURABLE = ("none", "powersgd", "acpsgd", "block-float:rounding=nearest")
WARM_UP = 4  # steps: DDP rebuilds its buckets after the first; methods with two kinds of steps take both
ALONE = 3  # steps of which each is started on an idle device, for what the host takes


@dataclass(frozen=True)
class Task:
    """A network, its loss and optimizer, and a batch.

    Args:
        dtype: of autocast, if any.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    optimizer: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]
    dtype: torch.dtype | None = None

    def loss(self, model: nn.Module) -> Tensor:
        with torch.autocast(self.inputs.device.type, self.dtype, enabled=self.dtype is not None):
            return nn.functional.cross_entropy(model(self.inputs).flatten(0, -2), self.targets)


def task(args: argparse.Namespace) -> Task:
    fused = {"fused": True} if args.device == "cuda" else {}
    if args.model == "resnet50":
        images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=args.device)
        labels = torch.randint(1000, (args.batch_size,), device=args.device)
        return Task(resnet50().to(args.device), images, labels, torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, **fused})
    ids = torch.randint(50257, (args.batch_size, args.length + 1), device=args.device)
    model = GPT(length=args.length).to(args.device)
    targets = ids[:, 1:].flatten()
    return Task(model, ids[:, :-1], targets, torch.optim.AdamW, {"lr": 1e-4, **fused}, torch.bfloat16)


@dataclass
class Variant:
    """A step, and what was measured of it: milliseconds in each round, and the peak of memory in bytes."""

    step: Callable[[], None]
    traffic: gradzip.Traffic
    nbytes: int | None = None
    memory: int | None = None
    times: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


def variant_of(name: str, task: Task) -> Variant:
    """A training step of a copy of the network under DDP, or two captured ones, and what counts its bytes."""
    spec = name.removesuffix(CAPTURED).removesuffix(UNCHECKED)
    if name.endswith(CAPTURED):
        return Variant(captured(lambda: eager(task, spec, checks=False).step), gradzip.Traffic())
    return eager(task, spec, checks=spec == name)


def captured(make: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Replays two steps, as those of ACP-SGD take turns. make: makes a step, in the stream of the capture."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step = make()
        for _ in range(11):  # as torch asks for
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
        step()

    def replay() -> None:
        assert step  # kept: the graph has the addresses of the network, the gradients and the method's states
        graph.replay()

    return replay


def eager(task: Task, spec: str, checks: bool) -> Variant:
    """A step that is not captured. checks: whether a step is skipped if an average is not finite."""
    model = copy.deepcopy(task.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch 2.13, about a new name of the argument
        replica = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    traffic, kind, options = gradzip.Traffic(), task.optimizer, dict(task.options)
    if spec in HOOKS:
        HOOKS[spec](replica)
    elif spec != "stock":
        compressor = gradzip.parse(spec).skip_nonfinite(checks)
        if any(part.optimizer_momentum for part in compressor.parts) and "momentum" in options:
            options["momentum"] = 0.0  # DGC refuses another one
        if any(part.averaged_momentum is not None for part in compressor.parts) and kind is torch.optim.AdamW:
            kind, options = gradzip.optim.AdamW, {"lr": options["lr"]}
        state = gradzip.ddp.HookState(compressor, None, model.named_parameters(), find_unused_parameters=False)
        replica.register_comm_hook(state, gradzip.ddp.hook)
        traffic = state.traffic
    optimizer = kind(replica.parameters(), **options)

    def step() -> None:
        optimizer.zero_grad()
        task.loss(replica).backward()
        optimizer.step()

    return Variant(step, traffic)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(step: Callable[[], None], steps: int, device: str, host: bool = False) -> float:
    """Of a step, the mean of several. On CUDA the host does not wait between them, as in training.

    host: what the host takes to start a step on an idle device, with what the step itself waits for.
    """
    total = 0.0
    for _ in range(steps if host else 1):
        wait(device)
        start = time.perf_counter()
        for _ in range(1 if host else steps):
            step()
        if not host:
            wait(device)
        total += time.perf_counter() - start
    wait(device)
    return 1000 * total / steps


def prepared(name: str, task: Task, device: str) -> Variant:
    """A variant after its first steps, with its bytes and its memory."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    variant = variant_of(name, task)
    milliseconds(variant.step, WARM_UP, device)
    before = variant.traffic.bytes_sent
    milliseconds(variant.step, 2, device)
    variant.nbytes = (variant.traffic.bytes_sent - before) // 2 or None
    if device == "cuda":
        variant.memory = torch.cuda.max_memory_allocated() - base
    return variant


def measure(
    names: list[str], task: Task, args: argparse.Namespace, failed: dict[str, str]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows after each few variants. Those that fail are left out, and noted in `failed` with the error."""
    rows: dict[str, dict[str, Any]] = {}
    for base in ("stock", f"stock{CAPTURED}"):
        of_base = [name for name in names if name.endswith(CAPTURED) == base.endswith(CAPTURED)]
        others = [name for name in of_base if name != base]
        for few in chunks(others, args.together) if of_base else ():
            variants: dict[str, Variant] = {}
            for name in (base, *few):
                try:
                    variants[name] = prepared(name, task, args.device)
                except Exception as error:
                    failed[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
            if base not in variants:
                break
            for _ in range(args.rounds):
                for name, variant in variants.items():
                    each = 2 if name.endswith(CAPTURED) else 1
                    taken = milliseconds(variant.step, max(1, args.steps // each), args.device)
                    variant.times.append(taken / each)
                    variant.host.append(milliseconds(variant.step, ALONE, args.device, host=True) / each)
            for name, variant in variants.items():
                rows.setdefault(name, row_of(name, variant, variants[base]))
            yield list(rows.values())


def chunks(names: list[str], most: int) -> list[list[str]]:
    return [names[i : i + most] for i in range(0, len(names), most)] or [[]]


def row_of(name: str, variant: Variant, base: Variant) -> dict[str, Any]:
    """The row of a variant, in milliseconds of a step; `added_ms` compared with "stock", in the same round.

    Captured steps are compared with captured ones.
    """
    added = statistics.median(ms - stock for ms, stock in zip(variant.times, base.times))
    ordered = sorted(variant.times)
    p20, median, p80 = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.5, 0.8))
    return {
        "variant": name, "ms": median, "ms_p20": p20, "ms_p80": p80, "added_ms": added,
        "host_ms": statistics.median(variant.host),
        "host_added_ms": statistics.median(ms - stock for ms, stock in zip(variant.host, base.host)),
        "nbytes": variant.nbytes, "memory": variant.memory,
    }  # fmt: skip


@contextlib.contextmanager
def process_group(device: str) -> Iterator[None]:
    """Of the ranks that torchrun has started, each on a GPU of its own; else of this one."""
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **({} if "RANK" in os.environ else alone))
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> int:
    parser = Parser("step", __doc__, EXAMPLES)
    parser.add_argument(
        "methods", metavar="SPEC", nargs="*", type=method, help=f"methods (default: {', '.join(SPECS)})"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=["resnet50", "gpt2"], default="resnet50", help="default: %(default)s")
    parser.add_argument("--batch-size", type=at_least(1), default=None, help="examples (default: 64; gpt2: 8)")
    parser.add_argument(
        "--image-size", type=at_least(1), default=224, help="pixels, of resnet50 (default: %(default)s)"
    )
    parser.add_argument("--length", type=at_least(1), default=1024, help="tokens, of gpt2 (default: %(default)s)")
    parser.add_argument(
        "--steps", type=at_least(1), default=10, help="of each variant in a round (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=5, help="turns of variants (default: %(default)s)")
    parser.add_argument(
        "--together", type=at_least(1), default=6, help="variants that take turns, beside stock (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="PATH", type=output_file, help="write the rows and their provenance")
    args = parser.parse_args()
    args.batch_size = args.batch_size or {"resnet50": 64, "gpt2": 8}[args.model]
    torch.manual_seed(0)
    names = ("batch_size", "image_size" if args.model == "resnet50" else "length", "steps", "rounds")
    settings = {name: getattr(args, name) for name in names}
    about = {**provenance(args.device), "model": args.model, **settings}
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    with process_group(args.device):
        about["ranks"], first = dist.get_world_size(), dist.get_rank() == 0
        specs = args.methods or SPECS
        # torch's bf16 hook needs NCCL. With gloo, its PowerSGD hook waits in the threads that it waits for.
        hooks = [name for name in HOOKS if args.device == "cuda" or name not in ("bf16 hook", "PowerSGD hook")]
        variants = ["stock", *hooks, *specs]
        if args.device == "cuda":
            variants += [f"{spec}{UNCHECKED}" for spec in specs]
        if args.device == "cuda" and not args.methods:
            variants += [f"{spec}{CAPTURED}" for spec in ("stock", *CAPTURABLE)]
        for rows in measure(variants, task(args), args, failed):
            if args.json and first:  # as they come: a run that is stopped leaves what it has measured
                write_json(args.json, {"provenance": about, "rows": rows, "failed": failed})
    for row in rows if first else ():
        sent = "" if row["nbytes"] is None else f"  {row['nbytes'] / 1e6:.2f} MB sent"
        memory = "" if row["memory"] is None else f"  peak {row['memory'] / 1e6:.0f} MB"
        spread = f"({row['ms_p20']:.2f} to {row['ms_p80']:.2f})"
        print(
            f"{row['variant']:52} {row['ms']:9.2f} ms  {spread:20} {row['added_ms']:+8.2f} ms  "
            f"host {row['host_ms']:.2f} ms{sent}{memory}"
        )
    for name, error in failed.items():
        print(f"{name:52} failed: {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
