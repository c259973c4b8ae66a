"""Time to the target loss: the steps after which a study has reached it, times the measured time of a step.

Steps are those of benchmarks/convergence, where each method has its best learning rate. Times of a step are those of
benchmarks/training, of as many ranks with the same batches. The target is what training without compression ends with,
and the margin of the study. Scores are those of tests at the ends of epochs, and linear between them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradzip
from benchmarks.common.arguments import Parser
from benchmarks.common.charts import MOST_SERIES, open_frame, pyplot, save
from benchmarks.common.local_steps import local_steps
from benchmarks.common.palette import method_color
from benchmarks.common.results import RESULTS, ROOT, Blocks, ResultsError, replace_blocks
from benchmarks.common.tables import markdown
from benchmarks.convergence.recipes import compressor
from benchmarks.convergence.report import NONE, Table
from benchmarks.convergence.results import Results, Row
from benchmarks.training.variants import bandwidth, compression, label
from gradzip.methods.spec import unparse

PAGE, PICTURE = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "images" / "time-to-loss.png"
START = "<!-- tables of time to loss: python -m benchmarks.time_to_loss --write -->\n\n"
RATES = ("50mbit", "100mbit", "1gbit", "none")
STOCK = {  # the method of a study: variants of others that train alike
    NONE: ("ddp", "ddp-fp16"),
    "powersgd:rank=4": ("ddp-powersgd",),
}

EXAMPLES = f"""\
examples:
  python -m benchmarks.time_to_loss              the tables
  python -m benchmarks.time_to_loss --write      the tables and the picture of docs/benchmarks.md
  python -m benchmarks.time_to_loss --commands   what measures the steps:

    sudo python -m benchmarks.training VARIANT... --model MODEL --ranks 4 --batch-size N \\
        {" ".join(f"--rate {rate}" for rate in RATES)} --json benchmarks/results/training_time_MODEL.json
"""


@dataclass(frozen=True)
class Study:
    """A recipe in a file of results of benchmarks/convergence."""

    file: str
    recipe: str
    title: str

    def table(self) -> Table:
        results = Results({}, RESULTS / self.file)
        results.resume()
        return Table(results, self.recipe)


STUDIES = (
    Study("convergence_text.json", "text", "charlm-small, AdamW, 735 steps"),
    Study("convergence_outer.json", "text-outer", "charlm-small, AdamW, 2940 steps"),
    Study("convergence_charlm.json", "text", "charlm, AdamW, 980 steps"),
    Study("convergence_resnet20.json", "images", "ResNet-20, SGD, 3120 steps"),
)


@dataclass
class Contender:
    """A way to train, and how long it takes.

    Args:
        spec: a method of the study, or a stock variant that trains alike.
        parts: the variants of benchmarks/training that it consists of, each with its number of steps.
        score: at the end.
        steps: until the target is reached; None: it is not.
    """

    spec: str
    parts: list[tuple[str, int]]
    score: float | None
    steps: int | None

    @property
    def name(self) -> str:
        """For people."""
        return label(self.spec) if any(self.spec in variants for variants in STOCK.values()) else f"`{self.spec}`"

    def seconds(self, ms: dict[str, float]) -> float | None:
        """Until the target is reached, with these times of a step by variant; None if one is unknown."""
        if self.steps is None or any(variant not in ms for variant, _ in self.parts):
            return None
        total, left = 0.0, self.steps
        for variant, count in self.parts:
            total += ms[variant] * min(count, left) / 1e3
            left -= min(count, left)
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


def contenders(table: Table) -> Iterator[Contender]:
    """All methods of a study, and stock ones that train alike."""
    settings = table.settings
    total = settings["epochs"] * settings["steps"]

    assert table.goal is not None  # there is a run without compression

    def made(row: Row, spec: str, of: list[tuple[str, int]]) -> Contender:
        epochs = None if row.score is None else epochs_to(table.goal, row.curve, settings["lower_is_better"])
        return Contender(spec, of, row.score, None if epochs is None else round(epochs * settings["steps"]))

    for row in table.rows:
        for variant in STOCK.get(row.method, ()):
            yield made(row, variant, [(variant, total)])
        if row.method != NONE:
            yield made(row, row.method, parts(row.method, total))


def epochs_to(goal: float, curve: list[float], lower_is_better: bool) -> float | None:
    """Epochs until a score is reached, of scores at their ends; None: it is not."""
    left = [score - goal if lower_is_better else goal - score for score in curve]
    for epoch, (before, after) in enumerate(zip([math.inf, *left], left)):
        if after <= 0:
            return epoch + (1.0 if epoch == 0 else before / (before - after))
    return None


def step_times(network: str, workers: int) -> dict[str, dict[str, float]]:
    """Measured milliseconds of a step by rate and variant, of as many ranks. Empty without measurements."""
    path = RESULTS / f"training_time_{network}.json"
    found: dict[str, dict[str, float]] = {rate: {} for rate in RATES}
    for row in json.loads(path.read_text())["rows"] if path.exists() else []:
        if row["ranks"] == workers and "ms" in row:
            found[row["rate"]][row["variant"]] = row["ms"]
    return found


def tables() -> Iterator[str]:
    """The lines of a table for each study whose steps were measured."""
    for study in measured():
        table = study.table()
        settings = table.settings
        times = step_times(settings["network"], settings["workers"])
        yield (
            f"**{study.title}**: seconds to {table.shown(table.goal)} {settings['measure']} "
            f"({settings['workers']} ranks; times as fast as with the fp16 hook)"
        )
        yield ""
        everyone = list(contenders(table))
        fp16 = next(one for one in everyone if one.parts[0][0] == "ddp-fp16")

        header = ["", settings["measure"], "steps", *map(bandwidth, RATES)]
        shown = [
            [one.name, table.shown(one.score), f"{one.steps}", *cells]
            for one in everyone
            if any(cells := [cell(one, fp16, times[rate]) for rate in RATES])
        ]
        yield from markdown(header, shown)
        yield ""
        if never := [one.name for one in everyone if one.steps is None]:
            yield f"Not reached: {', '.join(never)}."
            yield ""


def cell(one: Contender, fp16: Contender, times: dict[str, float]) -> str:
    """Seconds to the target, and how many times as fast that is as the fp16 hook; empty if unknown or not reached."""
    mine, base = one.seconds(times), fp16.seconds(times)
    return "" if mine is None or base is None else f"{mine:.0f} ({base / mine:.2f})"


def measured() -> list[Study]:
    """The studies whose steps were measured."""

    def has_times(study: Study) -> bool:
        if not (RESULTS / study.file).exists():
            return False
        settings = study.table().settings
        return any(step_times(settings["network"], settings["workers"]).values())

    return [study for study in STUDIES if has_times(study)]


def draw(path: Path) -> None:
    """Draw the time to the target against the bandwidth: stock DDP, and those that are fastest at 100 Mb/s.

    Studies in which no other method reaches the target are left out.
    """
    studies = [
        study
        for study in measured()
        if any(one.steps for one in contenders(study.table()) if one.parts[0][0] not in STOCK[NONE])
    ]
    if not studies:
        return
    plt = pyplot()
    figure, axes = plt.subplots(1, len(studies), figsize=(5 * len(studies), 4.6), squeeze=False, layout="constrained")
    for axis, study in zip(axes[0], studies):
        table = study.table()
        times = step_times(table.settings["network"], table.settings["workers"])
        reach = [one for one in contenders(table) if one.seconds(times["100mbit"]) is not None]
        reach.sort(key=lambda one: one.seconds(times["100mbit"]) or 0)
        stock = [one for one in reach if one.parts[0][0] in STOCK[NONE]]
        for one in [*stock, *[one for one in reach if one not in stock][: MOST_SERIES - len(stock)]]:
            seconds = [one.seconds(times[rate]) for rate in RATES]
            last, _ = one.parts[-1]
            line = "s--" if last.startswith("local") else "o-"
            color = method_color(compression(last) or local_steps(last)[1])
            axis.plot(range(len(RATES)), seconds, line, color=color, label=short(one))
        axis.set(title=study.title, xlabel="network of each rank", ylim=(0, None))
        axis.set_ylabel(f"seconds to {table.shown(table.goal)} {table.settings['measure']}")
        axis.set_xticks(range(len(RATES)), [bandwidth(rate).replace("unshaped loopback", "unshaped") for rate in RATES])
        axis.legend(fontsize=8, loc="upper right")
        axis.grid(alpha=0.3)
        open_frame(axis)
    figure.suptitle("Time to the same loss: compression pays where the network is slow (4 ranks on two cores)")
    save(figure, path)
    plt.close(figure)


def short(one: Contender) -> str:
    """Name a contender in the picture: the methods of its parts."""
    variants = [variant for variant, _ in one.parts]
    if len(variants) == 1 and variants[0] in STOCK[NONE]:
        return label(variants[0]).replace("`", "")
    methods = [(compression(variant) or local_steps(variant)[1]).partition(":")[0] for variant in variants]
    local, _ = local_steps(variants[-1])
    return ", then ".join(methods) + (f" every {local.every} steps" if local else "")


def commands() -> Iterator[str]:
    """What measures the steps: a command for each network."""
    of_network: dict[str, tuple[dict[str, Any], dict[str, None]]] = {}
    for study in STUDIES:
        if (RESULTS / study.file).exists():
            table = study.table()
            _, variants = of_network.setdefault(table.settings["network"], (table.settings, {}))
            variants.update(dict.fromkeys(variant for one in contenders(table) for variant, _ in one.parts))
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
    parser.add_argument("--write", action="store_true", help="write the tables and the picture of docs/benchmarks.md")
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
        draw(PICTURE)


if __name__ == "__main__":
    main()
