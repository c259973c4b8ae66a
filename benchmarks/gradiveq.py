"""Train ResNet-20 with GradiVeQ on simulated workers: what later gradients lose, why, and what that costs.

The workers take turns in one process, each with its own batches, and share one copy of the network.
`gradzip.LocalGroup` averages their gradients. Every run starts from the same weights and sees the same images, so that
training losses can be compared.

The run of `none` also learns bases from its averages, in several ways, and measures what gradients of later steps lose
in them: the energy that a basis leaves out, as a fraction of theirs (equation 7 over |g|^2). In the other runs, `lost`
is the same for the gradients of worker 0 in compressed steps, and `error` for the averages.
"""

from __future__ import annotations

import argparse
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import data
import gradzip
from benchmarks.common.arguments import Parser, at_least, method, output_file
from benchmarks.common.progress import Progress
from benchmarks.common.results import ResultsError, check_same, provenance, stored, write_json
from benchmarks.common.tables import markdown
from benchmarks.common.workers import Workers, batches
from gradzip.methods.gradiveq import best_slice_size, unflatten
from gradzip.methods.pca import principal_weights
from models import MODELS
from train import learning_rate

RECIPE = MODELS["resnet20"]
SHORT = "gradiveq:warmup_steps=50,compress_steps=100"
SPECS = [
    "none",
    f"{SHORT},sample_steps=50,stop=none",
    f"{SHORT},sample_steps=50,stop=0.5",
    f"{SHORT},sample_steps=100,stop=none",
    f"{SHORT},sample_steps=100,stop=0.5",
    f"{SHORT},sample_steps=100,reuse=1,stop=none",
    f"{SHORT},sample_steps=100,stop=0.5,sampling=qsgd(bits=4)",
    "acpsgd",
    "qsgd:bits=4",
]
EVERY = 25  # steps in a point of a curve
FINAL = 50  # last steps, of which training losses are compared
LEARNED_AT = (4 / 9, 7 / 9)  # of the steps
AGES = ((1, 10), (11, 50), (51, 100))  # steps since a basis was learned
EXAMPLES = f"""\
examples:
  python -m benchmarks.gradiveq --steps 100 --batch-size 8                   a look, on scikit-learn's digits
  python -m benchmarks.gradiveq --data cifar-10-batches-bin --bf16 --json benchmarks/results/gradiveq.json
  python -m benchmarks.gradiveq none {SHORT},loss=0 --data cifar-10-batches-bin
"""


# --- what later gradients lose


class Window(NamedTuple):
    """How a basis is learned: from the last `samples` averages, with lambda = `loss`, for `reuse` slices."""

    samples: int = 100
    loss: float = 0.01
    reuse: int | None = None


WINDOWS = [*(Window(samples) for samples in (25, 50, 100, 200)), Window(loss=0.0), Window(loss=0.1), Window(reuse=1)]


class Bases:
    """The bases of a layer, learned from samples of its slices, (samples, slices, K), as by GradiVeQ."""

    def __init__(self, samples: Tensor, window: Window) -> None:
        means = samples.mean(0)
        self.group = window.reuse or len(means)  # slices that share a basis
        self.bases = []
        for first in range(0, len(means), self.group):
            centred = samples[:, first] - means[first]
            centred = centred / centred.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
            weights, _ = principal_weights(centred, window.loss, recent=2)
            self.bases.append(weights[(weights != 0).any(1)] @ centred)
        groups = zip(means.split(self.group), self.bases)
        self.offset = torch.cat([group - group @ basis.t() @ basis for group, basis in groups])

    @property
    def dimension(self) -> float:
        """Components of a basis, on average."""
        return sum(map(len, self.bases)) / len(self.bases)

    def lost(self, slices: Tensor) -> Tensor:
        """The energy that each slice loses: (slices,), double.

        |g - U U^T g - offset|^2 = |g - offset|^2 - |U^T g|^2, because U^T offset = 0.
        """
        found = [(part @ basis.t()).double() for part, basis in zip(slices.split(self.group), self.bases)]
        return energy(slices - self.offset) - torch.cat([each.square().sum(1) for each in found])


def energy(slices: Tensor) -> Tensor:
    """|g|^2 of each slice: (slices,), double."""
    return slices.double().square().sum(1)


def to_slices(gradient: Tensor) -> Tensor:
    """The slices of a convolution's gradient, (slices, K)."""
    flat = gradient.new_empty(gradient.numel())
    unflatten(flat, gradient.shape).copy_(gradient)
    return flat.view(-1, best_slice_size(gradient.shape))


class LossStudy:
    """Learns bases at some steps of a run, and measures what gradients of later steps lose in them.

    Sums are over layers of as many output channels, so a layer counts by the energy of its gradient.
    """

    def __init__(self, steps: int) -> None:
        self.ends = [round(share * steps) for share in LEARNED_AT]
        self._samples: dict[str, deque[Tensor]] = {}
        self._learned: dict[tuple[int, Window, str], Bases] = {}
        self._dimensions: dict[tuple, list[float]] = defaultdict(list)
        self._sums: dict[tuple, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def observe(self, step: int, gradients: dict[str, list[Tensor]], averages: dict[str, Tensor]) -> None:
        """Called after each step (from 0), with the workers' gradients and their averages."""
        for name, average in averages.items():
            if gradzip.GradiVeQ().bypasses(average):
                continue
            channels, slices = average.shape[0], to_slices(average)
            for end in self.ends:
                age = step + 1 - end
                if 1 <= age <= 10 or (10 < age <= AGES[-1][1] and age % 5 == 0):
                    self._measure(end, age, name, channels, slices, to_slices(gradients[name][0]))
            samples = self._samples.setdefault(name, deque(maxlen=max(window.samples for window in WINDOWS)))
            samples.append(slices)
            if step + 1 in self.ends:
                self._learn(step + 1, name, channels, torch.stack(list(samples)))

    def _learn(self, end: int, name: str, channels: int, samples: Tensor) -> None:
        self._learned = {key: bases for key, bases in self._learned.items() if key[0] == end}
        for window in WINDOWS:
            if len(samples) >= window.samples:
                recent = samples[-window.samples :]
                bases = self._learned[end, window, name] = Bases(recent, window)
                self._dimensions[end, window, channels].append(bases.dimension)
                for slices in recent:
                    self._add((end, window, channels, "in samples", 0), bases, slices)

    def _measure(self, end: int, age: int, name: str, channels: int, average: Tensor, own: Tensor) -> None:
        period = next(number for number, (_, last) in enumerate(AGES) if age <= last)
        for window in WINDOWS:
            if bases := self._learned.get((end, window, name)):
                self._add((end, window, channels, "own", period), bases, own)
                self._add((end, window, channels, "average", period), bases, average)

    def _add(self, key: tuple, bases: Bases, slices: Tensor) -> None:
        lost, whole = bases.lost(slices), energy(slices)
        *where, what, period = key
        parts = {what: slice(None), f"{what}, first slice": slice(1), f"{what}, others": slice(1, None)}
        for part, some in parts.items():
            sums = self._sums[(*where, part, period)]
            sums[0] += float(lost[some].sum())
            sums[1] += float(whole[some].sum())

    def rows(self) -> list[dict[str, Any]]:
        """What was lost, by basis and number of channels: "samples" in the samples themselves, others for each age."""
        rows = []
        for (end, window, channels), dimensions in self._dimensions.items():
            row: dict[str, Any] = {"learned_at": end, **window._asdict(), "channels": channels}
            row["dimension"] = round(sum(dimensions) / len(dimensions), 1)
            for (*where, what, _), (lost, whole) in sorted(self._sums.items(), key=lambda item: item[0][-1]):
                if tuple(where) == (end, window, channels):
                    fraction = round(lost / whole, 4) if whole else 0.0
                    row.setdefault(what, []).append(fraction)
            rows.append(row)
        return rows


# --- training


@dataclass
class Point:
    """Sums over some steps of a run."""

    losses: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=lambda: [0.0, 0.0])  # energy lost, and of the gradients of worker 0
    averages: list[float] = field(default_factory=lambda: [0.0, 0.0])
    compressed: int = 0  # gradients

    def report(self, convolutions: int, ratio: float) -> dict[str, Any]:
        steps = len(self.losses)
        report = {"loss": sum(self.losses) / steps, "ratio": ratio, "compressed": 0.0}
        if self.compressed:
            report["compressed"] = self.compressed / (convolutions * steps)  # the share of the gradients
            report |= {"lost": self.own[0] / self.own[1], "error": self.averages[0] / self.averages[1]}
        return {name: round(value, 4) for name, value in report.items()}


class Measured(Workers):
    """Workers that measure what is lost of their gradients when they are compressed."""

    def __init__(self, spec: str, args: argparse.Namespace, dataset: data.Images) -> None:
        torch.manual_seed(args.seed)
        network = RECIPE.build(*dataset.dimensions)
        optimizer = RECIPE.make_optimizer(network, RECIPE.lr)
        super().__init__(network, optimizer, gradzip.parse(spec), args.workers)
        self.bf16 = args.bf16
        self.point = Point()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            return super().loss(inputs, targets)

    def average(self) -> dict[str, Tensor]:
        """Average the gradients, and add up what was lost of those that were compressed."""
        compressor, point = self.group.compressors[0], self.point
        phase_of = compressor.phase if isinstance(compressor, gradzip.GradiVeQ) else lambda state: ""
        before = {name: (phase_of(state), vars(state).copy()) for name, state in compressor.states.items()}
        averages = super().average()
        for name, state in compressor.states.items():
            after, (phase, earlier) = vars(state), before.get(name, ("", {}))
            if after.get("energy") == earlier.get("energy"):
                continue
            mean = torch.stack(self.gradients[name]).mean(0)
            # A cycle counts from 0.
            for i, key in enumerate(("lost", "energy")):
                point.own[i] += after[key] - (earlier[key] if phase == "compressing" else 0.0)
            point.averages[0] += float((averages[name] - mean).double().square().sum())
            point.averages[1] += float(mean.double().square().sum())
            point.compressed += 1
        return averages


def train(
    spec: str,
    args: argparse.Namespace,
    dataset: data.Images,
    report: Callable[[int], object] = lambda step: None,
    study: LossStudy | None = None,
) -> dict[str, Any]:
    """Train with one compression. Returns its curves: a point for each EVERY steps."""
    workers = Measured(spec, args, dataset)
    traffic = workers.group.compressors[0].traffic
    convolutions = sum(not gradzip.GradiVeQ().bypasses(p) for p in workers.parameters.values())
    points, losses, seen = [], [], (0, 0)
    for step, shards in zip(range(args.steps), batches(dataset, args.batch_size, args.workers, args.seed)):
        losses.append(workers.step(learning_rate(RECIPE.lr, step, args.steps), shards))
        workers.point.losses.append(losses[-1])
        if study:
            study.observe(step, workers.gradients, {name: p.grad for name, p in workers.parameters.items()})
        if (step + 1) % EVERY == 0 or step + 1 == args.steps:
            sent, dense = traffic.bytes_sent - seen[0], traffic.bytes_dense - seen[1]
            points.append(workers.point.report(convolutions, dense / sent))
            workers.point, seen = Point(), (traffic.bytes_sent, traffic.bytes_dense)
        report(step + 1)
    final = losses[-FINAL:]
    return {"compression": spec, "train_loss": round(sum(final) / len(final), 4), "ratio": round(traffic.ratio, 2),
            "points": points}  # fmt: skip


# --- results


CONFIGURATION = ("steps", "workers", "batch_size", "bf16", "seed")


def continued(path: Path | None, configuration: dict[str, Any]) -> dict[str, Any]:
    """The results in a file, or new ones. Raises ResultsError if they have another configuration."""
    if path is None or not path.exists():
        return {"provenance": provenance(), "configuration": configuration, "lost": [], "runs": []}
    with stored(path) as results:
        known = results["configuration"]
    check_same(path, "was measured", known, configuration)
    return results


def lines(results: dict[str, Any]) -> Iterator[str]:
    """Both tables."""
    header = ["basis", "step", "channels", "d", "samples, first slice", "others"]
    header += [f"{what} {first}-{last}" for what in ("own", "average") for first, last in AGES]
    rows = []
    for row in results["lost"]:
        basis = f"{row['samples']} samples, loss={row['loss']}, reuse={row['reuse']}"
        samples = [row[f"in samples, {which}"][0] for which in ("first slice", "others")]
        lost = [100 * share for share in (*samples, *row.get("own", []), *row.get("average", []))]
        rows.append([basis, *(f"{x:.0f}" for x in (row["learned_at"], row["channels"], row["dimension"], *lost))])
    if rows:
        yield "Energy lost, %, by age in steps:\n"
        yield from markdown(header, rows)
        yield ""
    header = ["compression", "training loss", "difference", "ratio", "compressed", "lost", "error"]
    rows, first = [], results["runs"][0]["train_loss"]
    for run in results["runs"]:
        points = [point for point in run["points"] if "lost" in point]
        loss, compressed = run["train_loss"], sum(point["compressed"] for point in run["points"]) / len(run["points"])
        numbers = [f"{loss:.4f}", f"{loss - first:+.4f}", f"{run['ratio']:.2f}", f"{compressed:.2f}"]
        means = [f"{sum(point[key] for point in points) / len(points):.2f}" for key in ("lost", "error") if points]
        rows.append([run["compression"], *numbers, *(means or ["", ""])])
    yield f"Mean training loss of the last {FINAL} steps:\n"
    yield from markdown(header, rows)


# --- command line


def main() -> None:
    parser = Parser("gradiveq", __doc__, EXAMPLES)
    parser.add_argument("specs", nargs="*", metavar="SPEC", type=method, default=SPECS,
                        help="compression; the first is what the others are compared with (default: none, and GradiVeQ "
                        "with several arguments)")  # fmt: skip
    positive = at_least(1)
    parser.add_argument("--data", metavar="DIR", help="folder with CIFAR-10's binary version (default: digits)")
    parser.add_argument("--steps", type=positive, default=450, help="(default: %(default)s)")
    parser.add_argument("--workers", type=positive, default=4, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=positive, default=32, help="per worker (default: %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="forward passes under torch.autocast, which is faster")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--json", metavar="PATH", type=output_file,
                        help="write results to this file after each run; skip the runs that are in it")  # fmt: skip
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        dataset = data.images(args.data)
        configuration = {key: getattr(args, key) for key in CONFIGURATION} | {"data": dataset.name}
        results = continued(args.json, configuration)
    except (data.DataError, ResultsError) as error:
        parser.fail(str(error))
    left = [spec for spec in args.specs if spec not in [run["compression"] for run in results["runs"]]]
    with Progress(len(left)) as progress:
        for spec in left:
            study = LossStudy(args.steps) if spec == "none" else None
            run = train(spec, args, dataset, lambda step, spec=spec: progress.now(f"{spec}, step {step}"), study)
            results["runs"].append(run)
            if study:
                results["lost"] = study.rows()
            if args.json:
                write_json(args.json, results)
            progress.done(f"{spec}: training loss {run['train_loss']:.4f}")
    print(*lines(results), sep="\n")


if __name__ == "__main__":
    main()
