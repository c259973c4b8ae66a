"""Whole runs with GradiVeQ, and with bases that it does not have: how they end, and how many bytes they send.

Beyond the paper, a basis may be made of samples of all slices. What it loses may be a residual, of which a share is
added to the next gradient, and all is sent with the next samples, which are not compressed. Or one slice, in turns, is
sent whole in each compressed step, as a sample that takes the place of the oldest one. For these, averages of four
workers are compressed: that commutes with the mean, so ranks that average coordinates would have the same averages, up
to rounding. Bytes are those of all-reduces.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import data
from benchmarks.common.arguments import Parser, at_least
from benchmarks.common.progress import tenths
from benchmarks.common.results import RESULTS, ROOT, Blocks, provenance, stored_rows, write_json
from benchmarks.common.studies import Rows, block, run_study
from benchmarks.common.tables import markdown
from benchmarks.common.workers import batches
from benchmarks.convergence.recipes import SIZES, Run, runs_of
from benchmarks.convergence.training import Training
from gradzip.methods.gradiveq import best_slice_size, unflatten

EXAMPLES = """\
examples:
  python -m benchmarks.gradiveq_runs --data cifar-10-batches-bin             an hour on a core
  python -m benchmarks.gradiveq_runs --epochs 1 --only none --json /tmp/try.json    digits, to try it out
"""
FILE = RESULTS / "gradiveq_runs.json"
PAGE = ROOT / "docs" / "methods.md"
START = "<!-- table of whole runs: python -m benchmarks.gradiveq_runs --write -->\n\n"
WARM_UP = 50  # steps that are sent whole
LEARN_EVERY = 20  # steps, with new samples in each


@dataclass(frozen=True)
class Variant:
    """Which bases, and what is done with that which they lose.

    Args:
        first: the basis is made of samples of the first slice alone, as in the paper.
        samples, compressed: steps in a cycle.
        decay: share of the residual that is added to the next gradient. None: what is lost is lost.
        fresh: a slice in turn is sent whole in compressed steps, and is a new sample.
        basis: False: nothing but these slices is sent.
        ratio: K / d, at least.
        half: numbers are sent as float16.
    """

    first: bool = False
    samples: int = 40
    compressed: int = 360
    decay: float | None = None
    fresh: bool = False
    basis: bool = True
    ratio: int = 8
    half: bool = False

    def received(self, x: Tensor) -> Tensor:
        """What others receive of numbers that are sent."""
        return x.half().float() if self.half else x


ALWAYS = 10**6  # steps: one cycle
VARIANTS: dict[str, str | Variant] = {
    "none": "none",
    "`GradiVeQ`, sampling by `QSGD`": (
        f"gradiveq:warmup_steps={WARM_UP},sample_steps=100,compress_steps=400,sampling=qsgd(bits=4)"
    ),
    "the first slice": Variant(first=True),
    "all slices": Variant(),
    "all slices, residual": Variant(decay=1.0),
    "all slices, 0.9 of the residual": Variant(decay=0.9),
    "all slices, 0.9 of the residual, short cycles": Variant(samples=10, compressed=90, decay=0.9),
    "all slices, residual, a new sample in each step": Variant(compressed=ALWAYS, decay=1.0, fresh=True),
    "the same, with K / d of 12": Variant(compressed=ALWAYS, decay=1.0, fresh=True, ratio=12),
    "the same, from 10 samples on": Variant(samples=10, compressed=ALWAYS, decay=1.0, fresh=True, ratio=12),
    "from 10 samples on, with K / d of 8": Variant(samples=10, compressed=ALWAYS, decay=1.0, fresh=True),
    "from 20 samples on, with K / d of 8": Variant(samples=20, compressed=ALWAYS, decay=1.0, fresh=True),
    "a new sample in each step, sent as float16": Variant(compressed=ALWAYS, decay=1.0, fresh=True, half=True),
    "the same, with K / d of 4": Variant(compressed=ALWAYS, decay=1.0, fresh=True, ratio=4, half=True),
    "residual, a slice in each step, no basis": Variant(
        samples=1, compressed=ALWAYS, decay=1.0, fresh=True, basis=False
    ),
}


class Layer:
    """The averages of a convolution."""

    def __init__(self, variant: Variant, shape: torch.Size) -> None:
        self.variant, self.shape, self.size = variant, shape, best_slice_size(shape)
        self.samples: list[Tensor] = []  # slices of a step, then centred ones, (K,) each
        self.basis: Tensor | None = None  # (d, K)
        self.left = 0
        self.step, self.sent = 0, 0.0  # sent: numbers of 32 bits
        self.lost: list[float] = []  # share of the energy, in each compressed step
        number = shape.numel() // self.size
        self.residual, self.means = torch.zeros(number, self.size), torch.zeros(number, self.size)

    def average(self, gradient: Tensor) -> Tensor:
        """What a step hands back for the average gradient."""
        slices = torch.empty(self.residual.shape)
        unflatten(slices.view(-1), self.shape).copy_(gradient)
        self.step += 1
        if self.basis is not None:
            slices = self.compress(slices)
        else:
            self.count(slices.numel())
            slices = self.sample(slices) if self.step > WARM_UP else self.variant.received(slices)
        return unflatten(slices.view(-1), self.shape)

    def count(self, numbers: int) -> None:
        self.sent += numbers / 2 if self.variant.half else numbers

    def sample(self, slices: Tensor) -> Tensor:
        whole = self.variant.received(slices + self.residual)
        if not self.residual.any():  # with a residual, it would be no gradient
            self.samples.append(whole.clone())
        self.residual.zero_()
        if len(self.samples) == self.variant.samples:
            past = torch.stack(self.samples)
            self.means = past.mean(0)
            self.samples = [*(past - self.means)[:, : 1 if self.variant.first else None].flatten(0, 1)]
            self.learn()
            self.left = self.variant.compressed
        return whole

    def learn(self) -> None:
        """The principal components of the samples."""
        past = torch.stack(self.samples)
        values, vectors = torch.linalg.eigh(past @ past.t())
        known = int((values > torch.finfo(torch.float32).eps * values.sum()).sum())  # others are rounding
        d = min(self.size // self.variant.ratio, known) if self.variant.basis else 0
        self.basis = torch.nn.functional.normalize(vectors[:, len(past) - d :].t() @ past)

    def compress(self, slices: Tensor) -> Tensor:
        assert self.basis is not None
        whole = slices if self.variant.decay is None else slices + self.variant.decay * self.residual
        rest = whole - self.means
        decoded = self.variant.received(rest @ self.basis.t()) @ self.basis + self.means
        self.count(len(slices) * len(self.basis))
        if self.variant.fresh:
            turn = self.step % len(slices)
            decoded[turn] = self.variant.received(whole[turn])
            self.count(self.size - len(self.basis))
            self.samples = [*self.samples[1:], rest[turn].clone()]
            if self.step % LEARN_EVERY == 0:
                self.learn()
        missed = whole - decoded
        self.lost.append((missed.square().sum() / whole.square().sum().clamp_min(1e-30)).item())
        if self.variant.decay is not None:
            self.residual = missed
        self.left -= 1
        if self.left == 0:
            self.basis, self.samples = None, []
        return decoded


class Compressed(Training):
    """A run of a study, whose averages are compressed if the variant says how."""

    def __init__(self, run: Run, dataset: data.Images, variant: str | Variant) -> None:
        super().__init__(replace(run, method=variant if isinstance(variant, str) else "none"), dataset)
        self.layers: dict[str, Layer] = {}
        if isinstance(variant, Variant):
            self.layers = {name: Layer(variant, p.shape) for name, p in self.parameters.items() if p.dim() == 4}

    def average(self) -> dict[str, Tensor]:
        averages = super().average()
        return averages | {name: layer.average(averages[name]) for name, layer in self.layers.items()}

    def row(self) -> dict[str, Any]:
        if self.record.diverged is not None:
            return {"score": None, "diverged": self.record.diverged, "times_fewer": None, "lost": []}
        traffic = self.group.compressors[0].traffic
        times_fewer = traffic.wire_ratio(self.run.workers)
        if self.layers:
            others = sum(p.numel() for name, p in self.parameters.items() if name not in self.layers)
            sent = others * self.steps + sum(layer.sent for layer in self.layers.values())
            times_fewer = self.record.parameters * self.steps / sent
        lost = [fmean(layer.lost) for layer in self.layers.values() if layer.lost]
        return {
            "score": round(self.record.scores[-1], 2), "digest": self.record.digest,
            "times_fewer": round(times_fewer, 2), "lost": [round(min(lost), 3), round(max(lost), 3)] if lost else [],
        }  # fmt: skip


def measure(args: argparse.Namespace, rows: Rows, command: str) -> None:
    torch.set_num_threads(1)
    dataset = data.images(args.data)
    of_recipe = replace(runs_of({"images": SIZES["default"]["images"]})[0], epochs=args.epochs)
    settings = ("network", "workers", "batch_size", "lr", "seed", "epochs")
    for seed, name in itertools.product(args.seed or [0], args.only or VARIANTS):
        run = replace(of_recipe, seed=seed)
        about = {"variant": name, "data": dataset.name} | {field: getattr(run, field) for field in settings}
        if any(about.items() <= row.items() for row in rows):
            continue
        training = Compressed(run, dataset, VARIANTS[name])
        steps = batches(dataset, run.batch_size, run.workers, run.seed)
        with tenths(f"{name}, seed {seed}") as report:
            while not training.record.done:
                of_epoch = itertools.islice(steps, training.per_epoch)
                training.epoch(of_epoch, lambda step, _, of=training.steps: report(step / of))  # type: ignore[misc]
        rows.append(about | {"steps": training.steps, **training.row(), **provenance(), "command": command})
        write_json(args.json, {"rows": rows})


def tables(rows: Rows) -> Iterator[str]:
    about, scores = rows[0], {(row["variant"], row["seed"]): row["score"] for row in rows}
    yield (
        f"{about['network']}, {about['workers']} workers, {about['steps']} steps, rate {about['lr']:g}; means over "
        f"seeds, and their range (`{FILE.name}`):"
    )
    yield ""
    cells = []
    for name in VARIANTS:
        of_seeds = [row for row in rows if row["variant"] == name]
        diverged = [f"diverges at step {row['diverged']}" for row in of_seeds if row["score"] is None]
        found = ["", "", ", ".join(diverged), ""]
        if of_seeds and not diverged:
            beyond = [row["score"] - scores["none", row["seed"]] for row in of_seeds if ("none", row["seed"]) in scores]
            lost = [row["lost"] for row in of_seeds if row["lost"]]
            found = [
                f"{fmean(row['times_fewer'] for row in of_seeds):.3g}",
                f"{min(least for least, _ in lost):.2f}–{max(most for _, most in lost):.2f}" if lost else "",
                f"{fmean(row['score'] for row in of_seeds):.2f}",
                "" if name == "none" or not beyond else _range(beyond).replace("-", "−"),
            ]
        if of_seeds:
            cells.append([name, *found, str(len(of_seeds))])
    header = ["bases of samples of", "times fewer bytes, 4 ranks", "energy lost, by layer", "test accuracy, %"]
    yield from markdown([*header, "− `none`, points", "seeds"], cells)


def _range(numbers: list[float]) -> str:
    """The mean of numbers, and their range if they are several."""
    several = f" ({min(numbers):+.2f} to {max(numbers):+.2f})" if len(numbers) > 1 else ""
    return f"{fmean(numbers):+.2f}{several}"


def blocks() -> Blocks:
    """The block of docs/methods.md."""
    return {(PAGE, START): block(tables(stored_rows(FILE)))}


def main() -> None:
    parser = Parser("gradiveq_runs", __doc__, EXAMPLES)
    parser.add_argument(
        "--data", metavar="DIR", type=Path, help="folder with CIFAR-10's binary version (default: digits)"
    )
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--only", action="append", choices=[*VARIANTS], metavar="VARIANT", help=f"of {', '.join(VARIANTS)}"
    )
    parser.add_argument("--seed", action="append", type=at_least(0), metavar="N", help="default: 0; repeat for several")
    run_study(parser, FILE, measure, tables, blocks)


if __name__ == "__main__":
    main()
