"""What bases of GradiVeQ lose of gradients of later steps, by the batch, and by the slices that their samples are of.

A ResNet trains for 200 steps of 64 images, then for STEPS of the batch, all at its recipe's rate. Two thirds of those
are samples. A basis of `d` components, for slices of K numbers, loses a share of the energy of the gradients of the
other third. Samples of the first slice alone are fewer than K / 4 or K / 8: their basis has all of their components.
A basis is also made again every few steps, of samples of which one slice in each step, in turns, takes the place of the
oldest.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import data
from benchmarks.common.arguments import Parser, at_least
from benchmarks.common.progress import tenths
from benchmarks.common.results import RESULTS, ROOT, Blocks, provenance, stored_rows, write_json
from benchmarks.common.studies import Rows, block, run_study
from benchmarks.common.tables import markdown
from benchmarks.common.workers import Workers, batches, save
from benchmarks.papers.gradiveq import flat, loss_of, spectrum
from gradzip.methods.gradiveq import best_slice_size
from models import MODELS, resnet

EXAMPLES = """\
examples:
  python -m benchmarks.gradiveq_bases --data cifar-10-batches-bin                          half an hour on a core
  python -m benchmarks.gradiveq_bases --data cifar-10-batches-bin --network resnet32 --batch-size 64
  python -m benchmarks.gradiveq_bases --batch-size 8 --steps 9 --json /tmp/try.json        to try it out
"""
FILE = RESULTS / "gradiveq_bases.json"
PAGE = ROOT / "docs" / "methods.md"
START = "<!-- table: python -m benchmarks.gradiveq_bases --write -->\n\n"
BATCH_SIZES, STEPS = (64, 512), 120
FIRST_STEPS, FIRST_BATCH_SIZE, WARM_UP = 200, 64, 20
RATIOS = (4, 8)  # K / d
RENEWED_EVERY = 8  # steps
BETA = 0.9  # of momenta
SHOWN = (
    ("first", "the first slice", 8),
    ("all", "all slices", 8),
    ("all", "all slices", 4),
    ("renewed", "all slices, one renewed in each step", 8),
    ("momenta", "all slices, momenta in place of gradients", 8),
)
DEPTHS = {"resnet20": 3, "resnet32": 5}  # blocks in a stage


def series(network: str, dataset: data.Images, batch_size: int, steps: int) -> dict[str, Tensor]:
    """Gradients of a convolution of each stage in successive steps of a batch, (steps, F, D, H, W)."""
    recipe, depth = MODELS["resnet20"], DEPTHS[network]
    torch.manual_seed(0)
    model = resnet(*dataset.dimensions, widths=(16, 32, 64), depth=depth, project=False)
    training = Workers(model, recipe.make_optimizer(model, recipe.lr))
    for step, batch in zip(range(FIRST_STEPS), batches(dataset, FIRST_BATCH_SIZE)):
        training.step(recipe.lr * min(1, (step + 1) / WARM_UP), batch)
    found: dict[str, list[Tensor]] = {f"{4 + depth * stage}.body.0.weight": [] for stage in range(3)}
    with tenths(f"{network}, batches of {batch_size}") as report:
        for step, batch in zip(range(steps), batches(dataset, batch_size, seed=3)):
            training.step(recipe.lr, batch)
            for name, of_layer in found.items():
                of_layer.append(training.gradients[name][0].clone())
            report((step + 1) / steps)
    return {name: torch.stack(of_layer) for name, of_layer in found.items()}


def lost(gradients: Tensor) -> dict[str, Any]:
    """The channels of a convolution, and what bases of its first slice and of all of them lose, by K / d."""
    size = best_slice_size(gradients.shape[1:])
    past, later, means = split(gradients, size)
    samples = {"first": past[:, 0], "all": (past - means).flatten(0, 1)}
    found = {
        name: {str(ratio): round(loss_of(later, means, spectrum(of)[1][: size // ratio]), 4) for ratio in RATIOS}
        for name, of in samples.items()
    }
    found["renewed"] = {str(ratio): round(lost_by_renewed(samples["all"], later, means, ratio), 4) for ratio in RATIOS}
    momenta = torch.stack([*itertools.accumulate(gradients, lambda momentum, gradient: BETA * momentum + gradient)])
    past, later, means = split(momenta, size)
    _, components = spectrum((past - means).flatten(0, 1))
    found["momenta"] = {str(ratio): round(loss_of(later, means, components[: size // ratio]), 4) for ratio in RATIOS}
    return {"channels": gradients.shape[1], "slices": past.shape[1], "lost": found}


def split(gradients: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of K numbers of the first two thirds of the steps and of the others, and the means of the first."""
    slices = flat(gradients).view(len(gradients), -1, size)
    past, later = slices.tensor_split([2 * len(slices) // 3])
    return past, later, past.mean(0)


def lost_by_renewed(samples: Tensor, later: Tensor, means: Tensor, ratio: int) -> float:
    """The share of the energy of later slices (steps, m, K) that is lost if they renew the samples (n, K)."""
    lost = 0.0
    for begin in range(0, len(later), RENEWED_EVERY):
        steps = later[begin : begin + RENEWED_EVERY]
        _, components = spectrum(samples)
        lost += loss_of(steps, means, components[: later.shape[2] // ratio]) * steps.square().sum().item()
        turns = [(begin + i) % len(means) for i in range(len(steps))]
        new = torch.stack([slices[turn] - means[turn] for slices, turn in zip(steps, turns)])
        samples = torch.cat([samples[len(new) :], new])
    return lost / later.square().sum().item()


def tables(rows: Rows) -> Iterator[str]:
    yield f"Energy lost in {rows[0]['steps'] // 3} steps after {rows[0]['steps'] * 2 // 3} samples (`{FILE.name}`):"
    yield ""
    header = ["network, batch", "samples of", *(f"{row['channels']} channels" for row in rows[0]["layers"])]
    cells = [
        [f"{row['network']}, {row['batch_size']}", shown, *(cell(row, layer, name, ratio) for layer in row["layers"])]
        for row in rows
        for name, shown, ratio in SHOWN
        if name in row["layers"][0]["lost"]
    ]
    yield from markdown(header, cells, left=2)


def cell(row: dict[str, Any], layer: dict[str, Any], name: str, ratio: int) -> str:
    """What a basis loses, and K / d: there are no more components than samples."""
    size = best_slice_size(torch.Size([layer["channels"], layer["channels"], 3, 3]))
    samples = row["steps"] * 2 // 3 * (1 if name == "first" else layer["slices"])
    return f"{layer['lost'][name][str(ratio)]:.2f} at {size / min(size // ratio, samples):.3g}"


def blocks() -> Blocks:
    """The block of docs/methods.md."""
    return {(PAGE, START): block(tables(stored_rows(FILE)))}


def measure(args: argparse.Namespace, rows: Rows, command: str) -> None:
    dataset = data.images(args.data)
    for batch_size in args.batch_size or BATCH_SIZES:
        about = {"network": args.network, "batch_size": batch_size, "steps": args.steps, "data": dataset.name}
        if any(about.items() <= row.items() for row in rows):
            continue
        file = args.cache and args.cache / f"gradiveq-bases-{args.network}-{dataset.name}-{batch_size}-{args.steps}.pt"
        gradients = (
            torch.load(file) if file and file.exists() else series(args.network, dataset, batch_size, args.steps)
        )
        if file:
            save(gradients, file)
        layers = [lost(of_layer) for of_layer in gradients.values()]
        rows.append(about | {"layers": layers, **provenance(), "command": command})
        write_json(args.json, {"rows": rows})


def main() -> None:
    parser = Parser("gradiveq_bases", __doc__, EXAMPLES)
    parser.add_argument("--data", metavar="DIR", help="folder with CIFAR-10's binary version (default: digits)")
    parser.add_argument("--network", choices=[*DEPTHS], default="resnet20", help="default: %(default)s")
    parser.add_argument("--batch-size", action="append", type=at_least(1), metavar="N", help="default: 64 and 512")
    parser.add_argument("--steps", type=at_least(9), default=STEPS, metavar="N", help="default: %(default)s")
    parser.add_argument("--cache", metavar="DIR", type=Path, help="keep gradients here, and find them here: 40 MB")
    run_study(parser, FILE, measure, tables, blocks)


if __name__ == "__main__":
    main()
