"""Time training steps of one rank with DDP, with and without compression: what compressing takes, without a network.

The group has one rank, so that a step consists of computing the gradients, compressing them, and decompressing this
rank's own payloads. The row "stock" is DDP without a hook. Steps of all variants are timed in turns.

On CUDA, also methods of which nothing waits for the device: with `skip_nonfinite(False)`, and with whole steps in a
CUDA graph, which are compared with "stock, captured".
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import gradzip
import gradzip.ddp
from benchmarks.common.arguments import Parser, at_least, method, output_file
from benchmarks.common.results import provenance, write_json

EXAMPLES = """\
examples:
  python -m benchmarks.step --device cuda --json step.json          all methods, ResNet-50, 64 images of 224 x 224
  python -m benchmarks.step --image-size 32 --batch-size 4 acpsgd   on a CPU
"""

SPECS = (
    "none", "acpsgd", "powersgd", "block-float", "fft-range", "dct-range", "topk", "qsgd", "terngrad", "signsgd",
    "onebit",
)  # fmt: skip
UNCHECKED, CAPTURED = ", skip_nonfinite(False)", ", captured"  # ends of the names of variants
CAPTURABLE = ("powersgd", "acpsgd", "block-float:rounding=nearest")
WARM_UP = 4  # steps: DDP rebuilds its buckets after the first; methods with two kinds of steps take both


class Bottleneck(nn.Module):
    """He et al., CVPR 2016, figure 5, with the stride in the convolution of 3x3."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return (self.convolutions(x) + self.shortcut(x)).relu_()


def resnet50(classes: int = 1000) -> nn.Sequential:
    """ResNet-50: 25.6 M parameters."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks, channels = [], 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(depth):
            blocks.append(Bottleneck(channels, width, 2 if i == 0 and width > 64 else 1))
            channels = 4 * width
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def step_of(
    model: nn.Module, variant: str, images: Tensor, labels: Tensor
) -> tuple[Callable[[], None], gradzip.Traffic]:
    """A training step of a copy of the network under DDP, or two captured ones, and what counts its bytes."""
    spec = variant.removesuffix(CAPTURED).removesuffix(UNCHECKED)
    if variant.endswith(CAPTURED):
        return captured(lambda: eager(model, spec, images, labels, checks=False)[0]), gradzip.Traffic()
    return eager(model, spec, images, labels, checks=spec == variant)


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


def eager(
    model: nn.Module, spec: str, images: Tensor, labels: Tensor, checks: bool
) -> tuple[Callable[[], None], gradzip.Traffic]:
    """A step that is not captured. checks: whether a step is skipped if an average is not finite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch 2.13, about a new name of the argument
        replica = DistributedDataParallel(model, broadcast_buffers=False)
    traffic, momentum = gradzip.Traffic(), 0.9
    if spec == "fp16 hook":
        replica.register_comm_hook(None, fp16_compress_hook)
    elif spec != "stock":
        compressor = gradzip.parse(spec).skip_nonfinite(checks)
        momentum *= not any(part.optimizer_momentum for part in compressor.parts)  # DGC refuses another one
        state = gradzip.ddp.HookState(compressor, named_parameters=model.named_parameters())
        replica.register_comm_hook(state, gradzip.ddp.hook)
        traffic = state.traffic
    optimizer = torch.optim.SGD(replica.parameters(), 1e-3, momentum)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(images), labels).backward()
        optimizer.step()

    return step, traffic


def milliseconds(step: Callable[[], None], steps: int, device: str) -> float:
    """Of a step, the mean of several. On CUDA the host does not wait between them, as in training."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return 1000 * (time.perf_counter() - start) / steps


def measure(
    specs: list[str], build: Callable[[], nn.Module], args: argparse.Namespace, failed: dict[str, str]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows after each round. Methods that fail are left out, and noted in `failed` with the error."""
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=args.device)
    labels = torch.randint(1000, (args.batch_size,), device=args.device)
    steps: dict[str, Callable[[], None]] = {}
    nbytes: dict[str, int | None] = {}
    for spec in specs:
        try:
            step, traffic = step_of(build().to(args.device), spec, images, labels)
            milliseconds(step, WARM_UP, args.device)
            before = traffic.bytes_sent
            milliseconds(step, 2, args.device)
        except Exception as error:
            failed[spec] = str(error).partition("\n")[0]
            continue
        steps[spec] = step
        nbytes[spec] = (traffic.bytes_sent - before) // 2 or None
    times: dict[str, list[float]] = {spec: [] for spec in steps}
    for _ in range(args.rounds):
        for spec, step in steps.items():
            each = 2 if spec.endswith(CAPTURED) else 1
            times[spec].append(milliseconds(step, max(1, args.steps // each), args.device) / each)
        yield [row_of(spec, times, nbytes[spec]) for spec in steps]


def row_of(spec: str, times: dict[str, list[float]], nbytes: int | None) -> dict[str, Any]:
    """The row of a variant, in milliseconds of a step; `added_ms` compared with "stock", in the same round.

    Captured steps are compared with captured ones.
    """
    own = times[spec]
    base = f"stock{CAPTURED}" if spec.endswith(CAPTURED) else "stock"
    added = statistics.median(ms - stock for ms, stock in zip(own, times[base]))
    p20, median, p80 = (sorted(own)[round(share * (len(own) - 1))] for share in (0.2, 0.5, 0.8))
    return {"variant": spec, "ms": median, "ms_p20": p20, "ms_p80": p80, "added_ms": added, "nbytes": nbytes}


@contextlib.contextmanager
def group_of_one(device: str) -> Iterator[None]:
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
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
    parser.add_argument("--batch-size", type=at_least(1), default=64, help="images (default: %(default)s)")
    parser.add_argument("--image-size", type=at_least(1), default=224, help="pixels (default: %(default)s)")
    parser.add_argument(
        "--steps", type=at_least(1), default=10, help="of each variant in a round (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=5, help="turns of all variants (default: %(default)s)")
    parser.add_argument("--json", metavar="PATH", type=output_file, help="write the rows and their provenance")
    args = parser.parse_args()
    torch.manual_seed(0)
    settings = {name: getattr(args, name) for name in ("batch_size", "image_size", "steps", "rounds")}
    about = {**provenance(args.device), "model": "resnet50", **settings}
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    with group_of_one(args.device):
        variants = ["stock", "fp16 hook", *(args.methods or SPECS)]
        if args.device == "cuda" and not args.methods:
            variants += [f"{spec}{UNCHECKED}" for spec in CAPTURABLE]
            variants += [f"{spec}{CAPTURED}" for spec in ("stock", *CAPTURABLE)]
        for rows in measure(variants, resnet50, args, failed):
            if args.json:  # after each round: a run that is stopped leaves what it has measured
                write_json(args.json, {"provenance": about, "rows": rows, "failed": failed})
    for row in rows:
        sent = "" if row["nbytes"] is None else f"  {row['nbytes'] / 1e6:.2f} MB"
        spread = f"({row['ms_p20']:.2f} to {row['ms_p80']:.2f})"
        print(f"{row['variant']:52} {row['ms']:9.2f} ms  {spread:20} {row['added_ms']:+8.2f} ms{sent}")
    for spec, error in failed.items():
        print(f"{spec:52} failed: {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
