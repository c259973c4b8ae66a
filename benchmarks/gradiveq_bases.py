"""What bases of GradiVeQ lose of gradients of later steps, by the batch, and by the slices that their samples are of.

ResNet-20 trains for 200 steps of 64 images, then for STEPS of the batch, all at its recipe's rate. Two thirds of those
are samples. A basis of `d` components, for slices of K numbers, loses a share of the energy of the gradients of the
other third.
"""

from __future__ import annotations

import argparse
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
from benchmarks.papers.capture import STAGES
from benchmarks.papers.gradiveq import flat, loss_of, spectrum
from gradzip.methods.gradiveq import best_slice_size
from models import MODELS

EXAMPLES = """\
examples:
  python -m benchmarks.gradiveq_bases --data cifar-10-batches-bin                          half an hour on a core
  python -m benchmarks.gradiveq_bases --batch-size 8 --steps 9 --json /tmp/try.json        to try it out
"""
FILE = RESULTS / "gradiveq_bases.json"
PAGE = ROOT / "docs" / "methods.md"
START = "<!-- table: python -m benchmarks.gradiveq_bases --write -->\n\n"
BATCH_SIZES, STEPS = (64, 512), 120
FIRST_STEPS, FIRST_BATCH_SIZE, WARM_UP = 200, 64, 20
RATIOS = (4, 8)  # K / d
SLICES = {"first": "the first slice", "all": "all slices"}  # whose samples a basis is made of


def series(dataset: data.Images, batch_size: int, steps: int) -> dict[str, Tensor]:
    """Gradients of a convolution of each stage in successive steps of a batch, (steps, F, D, H, W)."""
    recipe = MODELS["resnet20"]
    torch.manual_seed(0)
    model = recipe.build(*dataset.dimensions)
    training = Workers(model, recipe.make_optimizer(model, recipe.lr))
    for step, batch in zip(range(FIRST_STEPS), batches(dataset, FIRST_BATCH_SIZE)):
        training.step(recipe.lr * min(1, (step + 1) / WARM_UP), batch)
    found: dict[str, list[Tensor]] = {name: [] for name in STAGES}
    with tenths(f"ResNet-20, batches of {batch_size}") as report:
        for step, batch in zip(range(steps), batches(dataset, batch_size, seed=3)):
            training.step(recipe.lr, batch)
            for name, of_layer in found.items():
                of_layer.append(training.gradients[name][0].clone())
            report((step + 1) / steps)
    return {name: torch.stack(of_layer) for name, of_layer in found.items()}


def lost(gradients: Tensor) -> dict[str, Any]:
    """The channels of a convolution, and what bases of its first slice and of all of them lose, by K / d."""
    size = best_slice_size(gradients.shape[1:])
    slices = flat(gradients).view(len(gradients), -1, size)
    past, later = slices.tensor_split([2 * len(slices) // 3])
    means = past.mean(0)
    samples = {"first": past[:, 0], "all": (past - means).flatten(0, 1)}
    return {
        "channels": gradients.shape[1], "slices": slices.shape[1],
        "lost": {
            name: {str(ratio): round(loss_of(later, means, components[: size // ratio]), 4) for ratio in RATIOS}
            for name, of in samples.items() for components in (spectrum(of)[1],)
        },
    }  # fmt: skip


def tables(rows: Rows) -> Iterator[str]:
    header = ["batch", "samples of", "K / d", *(f"{row['channels']} channels" for row in rows[0]["layers"])]
    yield f"Energy lost in {rows[0]['steps'] // 3} steps after {rows[0]['steps'] * 2 // 3} samples (`{FILE.name}`):"
    yield ""
    cells = [
        [
            str(row["batch_size"]), shown, str(ratio),
            *(f"{layer['lost'][name][str(ratio)]:.2f}" for layer in row["layers"]),
        ]
        for row in rows for ratio in RATIOS for name, shown in SLICES.items()
    ]  # fmt: skip
    yield from markdown(header, cells)


def blocks() -> Blocks:
    """The block of docs/methods.md."""
    return {(PAGE, START): block(tables(stored_rows(FILE)))}


def measure(args: argparse.Namespace, rows: Rows, command: str) -> None:
    dataset = data.images(args.data)
    for batch_size in args.batch_size or BATCH_SIZES:
        about = {"batch_size": batch_size, "steps": args.steps, "data": dataset.name}
        if any(about.items() <= row.items() for row in rows):
            continue
        file = args.cache and args.cache / f"gradiveq-bases-{dataset.name}-{batch_size}-{args.steps}.pt"
        gradients = torch.load(file) if file and file.exists() else series(dataset, batch_size, args.steps)
        if file:
            save(gradients, file)
        layers = [lost(of_layer) for of_layer in gradients.values()]
        rows.append(about | {"layers": layers, **provenance(), "command": command})
        write_json(args.json, {"rows": rows})


def main() -> None:
    parser = Parser("gradiveq_bases", __doc__, EXAMPLES)
    parser.add_argument("--data", metavar="DIR", help="folder with CIFAR-10's binary version (default: digits)")
    parser.add_argument("--batch-size", action="append", type=at_least(1), metavar="N", help="default: 64 and 512")
    parser.add_argument("--steps", type=at_least(9), default=STEPS, metavar="N", help="default: %(default)s")
    parser.add_argument("--cache", metavar="DIR", type=Path, help="keep gradients here, and find them here: 40 MB")
    run_study(parser, FILE, measure, tables, blocks)


if __name__ == "__main__":
    main()
