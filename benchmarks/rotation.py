"""Compare block-scaled integers of real gradients and momenta, with and without a random rotation of each block.

A rotation multiplies a block by random signs and by an orthonormal Walsh-Hadamard matrix. Its elements are then close
to normal, without the outliers that decide the step of a block. Decoding rotates back, which keeps the error. What that
wins depends on how the step is chosen, so that three rules are compared:

    largest    codes are integers; the step is the largest magnitude / s, s = 2^(bits - 1) - 1, as of `BlockFloat`
    clipped    codes are integers up to s; the step is 0.05, 0.1, ... or 1 times that, the one with the least error
    normal     codes are odd multiples of 1/2; the step is the best one for normal elements of the block's mean square

Vectors are of what `BlockFloat` compresses: the gradient of a rank, and what it sends when momenta are compressed, beta
times the shared momentum plus its gradient. Both are without residuals. Errors are relative to the vector; with AdamW
also after both are divided by the root of its second moment, as in its update, where that is not 0.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import data
from benchmarks.common.arguments import Parser, output_file
from benchmarks.common.progress import tenths
from benchmarks.common.results import provenance, write_json
from benchmarks.common.tables import markdown
from benchmarks.common.workers import Workers, batches
from benchmarks.transforms import hadamard_blocks
from models import MODELS
from train import learning_rate

EXAMPLES = """\
examples:
  python -m benchmarks.rotation --quick                        a minute: a few steps on digits and on Python's library
  python -m benchmarks.rotation --data cifar-10-batches-bin --text tinyshakespeare.txt \\
      --json benchmarks/results/rotation.json                  two minutes
"""
BITS, BLOCKS, SHOWN_BLOCK = (2, 3, 4, 8), (64, 256, 1024), 256
BETA = 0.9
STEPS_OF_NORMAL = {2: 0.9957, 3: 0.5860, 4: 0.3352, 8: 0.03072}  # in standard deviations


@dataclass(frozen=True)
class Capture:
    """A training run as by `examples/train.py`, seed 0, without compression, of four simulated ranks.

    Args:
        lr: peak learning rate.
        steps: of the schedule of learning rates.
        captured: steps whose gradient is measured, after as many updates.
    """

    model: str
    batch_size: int
    lr: float
    steps: int
    captured: tuple[int, ...]
    ranks: int = 4


CAPTURES = [Capture("charlm-small", 8, 0.004, 123, (20, 120)), Capture("resnet8", 32, 0.1, 98, (20, 80))]
QUICK = [Capture("charlm-small", 8, 0.004, 24, (20,)), Capture("resnet8", 8, 0.1, 24, (20,))]


def capture(run: Capture, dataset: data.Images | data.Text) -> Iterator[tuple[int, dict[str, Tensor], Tensor | None]]:
    """Train, and yield (step, {kind: vector of rank 0}, root of the second moment) for the steps to capture."""
    torch.manual_seed(0)
    recipe = MODELS[run.model]
    model = recipe.build(*dataset.dimensions)
    workers = Workers(model, recipe.make_optimizer(model, run.lr), workers=run.ranks)
    torch.manual_seed(0)
    momentum: dict[str, Tensor] = {}
    steps = itertools.islice(batches(dataset, run.batch_size, run.ranks), max(run.captured) + 1)
    for step, shards in enumerate(steps):
        workers.step(learning_rate(run.lr, step, run.steps), shards)
        shared = {name: BETA * m for name, m in momentum.items()}
        momentum = {name: shared.get(name, 0) + p.grad for name, p in workers.parameters.items()}
        if step in run.captured:
            names = [n for n, p in workers.parameters.items() if p.dim() >= 2 and p.numel() >= 1024]
            of_parameters = [workers.optimizer.state[workers.parameters[name]] for name in names]
            own = {name: workers.gradients[name][0] for name in names}
            vectors = {"gradient": own, "momentum": {name: shared[name] + own[name] for name in names}}
            joined = {kind: torch.cat([x.flatten() for x in of.values()]) for kind, of in vectors.items()}
            squares = [of["exp_avg_sq"].flatten() for of in of_parameters if "exp_avg_sq" in of]
            yield step, joined, torch.cat(squares).sqrt() if squares else None


# Quantizers: blocks as rows -> the same, decoded.


def largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(1, keepdim=True).clamp_min(2.0**-100)


def nearest(rows: Tensor, bits: int) -> Tensor:
    step = largest(rows) / (2 ** (bits - 1) - 1)
    return (rows / step).round() * step


def stochastic(rows: Tensor, bits: int) -> Tensor:
    step = largest(rows) / (2 ** (bits - 1) - 1)
    return (rows / step + torch.rand_like(rows)).floor() * step


def clipped(rows: Tensor, bits: int) -> Tensor:
    top = 2 ** (bits - 1) - 1
    best, least = torch.zeros_like(rows), torch.full((len(rows), 1), math.inf)
    for share in torch.arange(1, 21) / 20:
        step = share * largest(rows) / top
        decoded = (rows / step).round().clamp(-top, top) * step
        error = (decoded - rows).square().sum(1, keepdim=True)
        best, least = torch.where(error < least, decoded, best), torch.minimum(error, least)
    return best


def normal(rows: Tensor, bits: int) -> Tensor:
    half = 2 ** (bits - 1)
    step = STEPS_OF_NORMAL[bits] * rows.square().mean(1, keepdim=True).sqrt().clamp_min(2.0**-100)
    return ((rows / step).floor().clamp(-half, half - 1) + 0.5) * step


QUANTIZERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "largest, nearest": nearest,
    "largest, stochastic": stochastic,
    "clipped, nearest": clipped,
    "normal, nearest": normal,
}


class Rotation:
    """Of the rows of a matrix, blocks of so many elements: random signs, and a Walsh-Hadamard transform."""

    def __init__(self, block: int) -> None:
        self.signs = 1 - 2 * torch.randint(2, (block,), generator=torch.Generator().manual_seed(0))
        self.transform = hadamard_blocks(block)

    def __call__(self, rows: Tensor) -> Tensor:
        return self.transform(rows * self.signs)[0]

    def back(self, rows: Tensor) -> Tensor:
        return self.transform(rows)[0] * self.signs


def in_blocks(x: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block)


def errors(x: Tensor, rms: Tensor | None = None) -> Iterator[dict[str, Any]]:
    """The relative errors of a vector, as it is and rotated. rms: the root of the second moment of its elements."""
    weights = None if rms is None else torch.where(rms > 0, 1 / rms, 0)
    for block in BLOCKS:
        rotation = Rotation(block)
        for bits, (name, quantize) in itertools.product(BITS, QUANTIZERS.items()):
            row: dict[str, Any] = {"block": block, "bits": bits, "rule": name}
            for key in ("plain", "rotated"):
                torch.manual_seed(0)
                rows = in_blocks(x, block)
                rows = rotation.back(quantize(rotation(rows), bits)) if key == "rotated" else quantize(rows, bits)
                off = rows.flatten()[: len(x)] - x
                row[key] = relative(off, x)
                if weights is not None:
                    row[f"{key}, divided"] = relative(off * weights, x * weights)
            yield row


def relative(off: Tensor, x: Tensor) -> float:
    return float(f"{off.double().norm() / x.double().norm():.4g}")


def shown(error: float) -> str:
    return f"{error:.3f}" if error >= 0.05 else f"{error:.4f}"


def table(vectors: list[dict]) -> Iterator[str]:
    """Errors with blocks of SHOWN_BLOCK, plain → rotated: means over the steps of a network."""

    def rows() -> Iterator[list[str]]:
        for (model, kind), group in itertools.groupby(vectors, lambda vector: (vector["model"], vector["kind"])):
            found = [row for vector in group for row in vector["rows"] if row["block"] == SHOWN_BLOCK]
            for of, bits in itertools.product(("", ", divided"), BITS):
                if "plain" + of in found[0]:
                    cells = (
                        cell([r for r in found if (r["bits"], r["rule"]) == (bits, rule)], of) for rule in QUANTIZERS
                    )
                    yield [f"{model}, {kind}{of}", str(bits), *cells]

    return markdown(["", "bits", *QUANTIZERS], rows())


def cell(rows: list[dict], of: str) -> str:
    return " → ".join(shown(statistics.fmean(row[key + of] for row in rows)) for key in ("plain", "rotated"))


def main() -> None:
    parser = Parser("rotation", __doc__, EXAMPLES)
    parser.add_argument("--data", metavar="DIR", help="folder with CIFAR-10's binary version (default: digits)")
    parser.add_argument("--text", metavar="FILE", help="text for charlm (default: sources of Python's library)")
    parser.add_argument("--json", metavar="PATH", type=output_file, help="write all results to this file")
    parser.add_argument("--quick", action="store_true", help="a few steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = QUICK if args.quick else CAPTURES
    vectors: list[dict] = []
    try:
        datasets = [MODELS[run.model].data(args.text if "charlm" in run.model else args.data) for run in runs]
        for run, dataset in zip(runs, datasets):
            with tenths(f"{run.model} on {dataset.name}") as report:
                for done, (step, of_kinds, rms) in enumerate(capture(run, dataset), 1):
                    for kind, x in of_kinds.items():
                        rows = list(errors(x, rms))
                        vectors.append({"model": run.model, "kind": kind, "step": step, "rows": rows})
                    report(done / len(run.captured))
    except (data.DataError, OSError) as error:
        parser.fail(str(error))
    vectors.sort(key=lambda vector: (vector["model"], vector["kind"], vector["step"]))
    print(f"Relative error, blocks of {SHOWN_BLOCK}, plain → rotated, mean over steps:\n")
    print(*table(vectors), sep="\n")
    if args.json:
        captures = [{**asdict(run), "data": dataset.name} for run, dataset in zip(runs, datasets)]
        write_json(Path(args.json), {"provenance": provenance(), "captures": captures, "vectors": vectors})


if __name__ == "__main__":
    main()
