"""Time to a loss: the steps of a study, times the measured time of a step.

Scores are those of benchmarks/convergence at the ends of epochs, where each method has its best learning rate. Times of
a step are those of benchmarks/training, of as many ranks with the same batches. The target is what training without
compression ends with, the mean of its seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gradzip
from benchmarks.common.arguments import Parser
from benchmarks.common.charts import OTHER_COLORS, open_frame, pyplot, save
from benchmarks.common.local_steps import local_steps
from benchmarks.common.palette import METHOD_COLORS
from benchmarks.common.results import RESULTS, ROOT, Blocks, ResultsError, replace_blocks
from benchmarks.common.tables import markdown
from benchmarks.convergence.recipes import compressor
from benchmarks.convergence.report import NONE, Table
from benchmarks.convergence.results import Results, Row
from benchmarks.training.variants import bandwidth, label
from gradzip.methods.spec import unparse

PAGE, IMAGES = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "images"
START = "<!-- tables of time to loss: python -m benchmarks.time_to_loss --write -->\n\n"
RATES = ("50mbit", "100mbit", "1gbit", "none")
STOCK = ("ddp", "ddp-fp16")  # variants that train as no compression does
FOUR_BITS = "20%=block-float(bits=4,rounding=nearest)"
UNCOMPRESSED = tuple(f"local(every={every}):phases:0=qsgd,20%=none" for every in (10, 30))

EXAMPLES = f"""\
examples:
  python -m benchmarks.time_to_loss              the tables
  python -m benchmarks.time_to_loss --write      the tables and the pictures of docs/benchmarks.md
  python -m benchmarks.time_to_loss --commands   what measures the steps:

    sudo python -m benchmarks.training VARIANT... --model MODEL --ranks 4 --batch-size N \\
        {" ".join(f"--rate {rate}" for rate in RATES)} --json benchmarks/results/training_time_MODEL.json
"""


@dataclass(frozen=True)
class Study:
    """A recipe in a file of results of benchmarks/convergence.

    Args:
        others: methods that another file has, of the same recipe.
    """

    file: str
    recipe: str
    title: str
    others: tuple[str, ...] = ()
    file_of_others: str = ""

    def table(self) -> Table:
        return _table(self.file, self.recipe)

    def rows(self) -> list[Row]:
        """The methods, also those of the other file."""
        others = _table(self.file_of_others, self.recipe).rows if self.others else []
        return [*self.table().rows, *(row for row in others if row.method in self.others)]


def _table(file: str, recipe: str) -> Table:
    results = Results({}, RESULTS / file)
    results.resume()
    return Table(results, recipe)


STUDIES = (
    Study("convergence_text.json", "text", "charlm-small, AdamW, 735 steps"),
    Study(
        "convergence_outer_more.json", "text-outer", "charlm-small, AdamW, 2940 steps",
        (*UNCOMPRESSED, "local(every=10):phases:0=qsgd,5%=block-float(bits=4,rounding=nearest)"),
        "convergence_outer.json",
    ),
    Study("convergence_charlm.json", "text", "charlm, AdamW, 980 steps"),
    Study("convergence_resnet20.json", "images", "ResNet-20, SGD, 3120 steps"),
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """How a picture shows a contender."""

    spec: str
    label: str
    color: str
    marker: str


@dataclass(frozen=True)
class Picture:
    """The scores of a study by time, on a network.

    Args:
        scores: the range that is shown.
    """

    study: str
    rate: str
    scores: tuple[float, float]
    lines: tuple[Line, ...]


DDP = (
    Line("ddp", "every step: fp32", METHOD_COLORS["none"], "o"),
    Line("ddp-fp16", "every step: torch's fp16 hook", METHOD_COLORS["fp16"], "s"),
)
PICTURES = {
    "time-to-loss.png": Picture(
        "convergence_outer_more.json", "50mbit", (2.19, 2.6),
        (
            *DDP,
            Line(UNCOMPRESSED[0], "every 10 steps: fp32", OTHER_COLORS[1], "v"),
            Line(f"local(every=10):phases:0=qsgd,{FOUR_BITS}", "every 10 steps: 4 bits", OTHER_COLORS[2], "^"),
            Line(f"local(every=30):phases:0=qsgd,{FOUR_BITS}", "every 30 steps: 4 bits", METHOD_COLORS["acpsgd"], "D"),
        ),
    ),
    "time-to-loss-charlm.png": Picture(
        "convergence_charlm.json", "100mbit", (2.2, 3.0),
        (
            *DDP,
            Line(
                "phases:0=qsgd,160=block-float(bits=4,rounding=nearest),200=momentum(inner=signsgd(majority=False))",
                "every step: compressed momenta", METHOD_COLORS["momentum"], "D",
            ),
        ),
    ),
}  # fmt: skip


@dataclass
class Contender:
    """A way to train, and how long it takes.

    Args:
        spec: a method of the study, or a stock variant that trains alike.
        parts: the variants of benchmarks/training that it consists of, each with its number of steps.
        row: its scores.
        steps: until the target is reached; None: it is not.
    """

    spec: str
    parts: list[tuple[str, int]]
    row: Row = field(repr=False)
    steps: int | None

    @property
    def name(self) -> str:
        """For people."""
        return label(self.spec) if self.spec in STOCK else f"`{self.spec}`"

    def seconds(self, ms: dict[str, float], steps: float) -> float | None:
        """Of the first steps, with these times of a step by variant; None if one is unknown."""
        if any(variant not in ms for variant, _ in self.parts):
            return None
        total = 0.0
        for variant, count in self.parts:
            total += ms[variant] * min(count, steps) / 1e3
            steps -= min(count, steps)
        return total


def parts(method: str, steps: int) -> list[tuple[str, int]]:
    """The variants of a method in a run of so many steps, each with its number of steps."""
    local, _ = local_steps(method)
    made = compressor(method, steps)
    phases = dict(made.phases) if isinstance(made, gradzip.Phases) else {0: made}
    for begin, of_phase in list(phases.items()):
        if isinstance(of_phase, gradzip.Momentum) and isinstance(of_phase.warmup_steps, int) and of_phase.warmup_steps:
            phases |= {begin: gradzip.NoCompression(), begin + of_phase.warmup_steps: replace(of_phase, warmup_steps=0)}
    *_, last = begins = sorted(phases)
    found = []
    for begin, end in zip(begins, [*begins[1:], steps]):
        of_phase = phases[begin]
        if isinstance(of_phase, gradzip.Momentum):
            of_phase = replace(of_phase, warmup_steps=1)  # AdamW needs a gradient first
        spec = unparse(of_phase)
        front = method.partition(":")[0] if local and begin == last else "ddp"
        found.append((f"{front}:{spec}" if (front, spec) != ("ddp", NONE) else "ddp", end - begin))
    return found


def contenders(study: Study) -> Iterator[Contender]:
    """All methods of a study, and stock ones that train alike."""
    table = study.table()
    settings, goal = table.settings, table.baseline
    total = settings["epochs"] * settings["steps"]
    assert goal is not None  # there is a run without compression
    for row in study.rows():
        epochs = None if row.score is None else epochs_to(goal, row.curve, settings["lower_is_better"])
        steps = None if epochs is None else round(epochs * settings["steps"])
        if row.method == NONE:
            yield from (Contender(variant, [(variant, total)], row, steps) for variant in STOCK)
        else:
            yield Contender(row.method, parts(row.method, total), row, steps)


def epochs_to(goal: float, curve: list[float], lower_is_better: bool) -> float | None:
    """Epochs until a score is reached, of scores at their ends; None: it is not."""
    left = [score - goal if lower_is_better else goal - score for score in curve]
    for epoch, (before, after) in enumerate(zip([math.inf, *left], left)):
        if after <= 0:
            return epoch + (1.0 if epoch == 0 else before / (before - after))
    return None


def step_times(network: str, workers: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step by rate and variant, of as many ranks. Empty without measurements.

    Those of uncompressed local steps that were not measured are computed: the step without communication, and of each
    `every` steps once what averages of the gradients add to it.
    """
    path = RESULTS / f"training_time_{network}.json"
    found: dict[str, dict[str, float]] = {rate: {} for rate in RATES}
    for row in json.loads(path.read_text())["rows"] if path.exists() else []:
        if row["ranks"] == workers and "ms" in row:
            found[row["rate"]][row["variant"]] = row["ms"]
    for ms in found.values():
        for every in (10, 30) if {"compute", "ddp"} <= ms.keys() else ():
            ms.setdefault(f"local(every={every}):{NONE}", uncompressed(ms, every))
    return found


def uncompressed(ms: dict[str, float], every: int) -> float:
    """Milliseconds of a local step, with an uncompressed exchange after each `every` steps."""
    return ms["compute"] + (ms["ddp"] - ms["compute"]) / every


def tables() -> Iterator[str]:
    """The lines of a table for each study whose steps were measured."""
    for study in measured():
        table = study.table()
        settings = table.settings
        total = settings["epochs"] * settings["steps"]
        times = step_times(settings["network"], settings["workers"])
        everyone = list(contenders(study))
        fp16 = next(one for one in everyone if one.spec == "ddp-fp16")
        yield (
            f"**{study.title}**: seconds of the whole run (times as fast as with the fp16 hook), "
            f"{settings['workers']} ranks"
        )
        yield ""
        header = ["", settings["measure"], "seeds", f"steps to {table.shown(table.baseline)}", *map(bandwidth, RATES)]
        shown = [
            [one.name, table.final(one.row), f"{len(one.row.records)}", f"{one.steps or 'never'}", *cells]
            for one in everyone
            if any(cells := [cell(one, fp16, times[rate], total) for rate in RATES])
        ]
        yield from markdown(header, shown)
        yield ""


def cell(one: Contender, fp16: Contender, times: dict[str, float], steps: int) -> str:
    """Seconds of so many steps, and how many times as fast that is as the fp16 hook; empty if unknown."""
    mine, base = one.seconds(times, steps), fp16.seconds(times, steps)
    return "" if mine is None or base is None else f"{mine:.0f} ({base / mine:.2f})"


def measured() -> list[Study]:
    """The studies whose steps were measured."""

    def has_times(study: Study) -> bool:
        if not (RESULTS / study.file).exists():
            return False
        settings = study.table().settings
        return any(step_times(settings["network"], settings["workers"]).values())

    return [study for study in STUDIES if has_times(study)]


def draw(picture: Picture, path: Path) -> None:
    """Draw scores by time, a line for each contender, with a band of its seeds. Made to be read on a phone."""
    study = next(study for study in STUDIES if study.file == picture.study)
    table, everyone = study.table(), {one.spec: one for one in contenders(study)}
    settings, ms = table.settings, step_times(table.settings["network"], table.settings["workers"])[picture.rate]
    plt = pyplot()
    with plt.rc_context({"font.size": 13}):
        figure, axis = plt.subplots(figsize=(5.4, 4.5), layout="constrained")
        for line in picture.lines:
            one = everyone[line.spec]
            seconds = [one.seconds(ms, settings["steps"] * (epoch + 1)) for epoch in range(len(one.row.curve))]
            of_seeds = list(zip(*(record.scores for record in one.row.records)))
            axis.fill_between(
                seconds, list(map(min, of_seeds)), list(map(max, of_seeds)), color=line.color, alpha=0.25, linewidth=0
            )
            axis.plot(seconds, one.row.curve, color=line.color, marker=line.marker, markersize=6, label=line.label)
        finals = [record.scores[-1] for record in everyone["ddp"].row.records]
        axis.axhspan(min(finals), max(finals), color="0.6", alpha=0.4, linewidth=0)
        end = f"end of fp32: {table.shown(table.baseline)}"
        axis.axhline(table.baseline, color="0.3", linestyle="--", linewidth=1, label=end)
        axis.set(xlim=(0, None), ylim=picture.scores, ylabel=settings["measure"])
        axis.set_xlabel(f"seconds, {settings['workers']} ranks at {bandwidth(picture.rate)} each")
        axis.set_title(study.title, fontsize=13)
        axis.legend(fontsize=11, loc="upper right", labelspacing=0.3, framealpha=1)
        axis.grid(alpha=0.3)
        open_frame(axis)
        save(figure, path, dpi=144)
        plt.close(figure)


def commands() -> Iterator[str]:
    """What measures the steps: a command for each network."""
    of_network: dict[str, tuple[dict[str, Any], dict[str, None]]] = {}
    for study in STUDIES:
        if (RESULTS / study.file).exists():
            table = study.table()
            _, variants = of_network.setdefault(table.settings["network"], (table.settings, {}))
            variants.update(dict.fromkeys(variant for one in contenders(study) for variant, _ in one.parts))
    rates = " ".join(f"--rate {rate}" for rate in RATES)
    for network, (settings, variants) in of_network.items():
        quoted = " ".join(f"'{variant}'" for variant in ["compute", *variants])
        yield (
            f"python -m benchmarks.training {quoted} --model {network} --ranks {settings['workers']} "
            f"--batch-size {settings['batch_size']} {rates} --json benchmarks/results/training_time_{network}.json"
        )


def blocks() -> Blocks:
    """The block of docs/benchmarks.md."""
    return {(PAGE, START): "\n".join(tables()) + "\n"}


def main() -> None:
    parser = Parser("time_to_loss", __doc__, EXAMPLES)
    parser.add_argument("--write", action="store_true", help="write the tables and the pictures of docs/benchmarks.md")
    parser.add_argument("--commands", action="store_true", help="print the commands that measure the steps")
    args = parser.parse_args()
    if args.commands:
        print("\n".join(commands()))
        return
    print(*blocks().values(), end="")
    if args.write:
        try:
            replace_blocks(blocks())
        except ResultsError as error:
            parser.error(str(error))
        for name, picture in PICTURES.items():
            draw(picture, IMAGES / name)


if __name__ == "__main__":
    main()
