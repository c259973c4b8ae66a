"""Write the tables and pictures of what benchmarks/convergence has found.

python -m benchmarks.convergence.report            print the tables of the pages
python -m benchmarks.convergence.report --write    write them, and draw the pictures of docs/accuracy.md (needs
                                                   matplotlib); all tables to benchmarks/results/convergence.md
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common.arguments import Parser
from benchmarks.common.results import RESULTS, ROOT, Blocks, ResultsError, replace_blocks, write_whole
from benchmarks.common.tables import markdown
from benchmarks.convergence import chart, wire
from benchmarks.convergence.results import Results, Row, rows
from benchmarks.training.variants import bandwidth, compression
from gradzip.collectives.cost import sent_share
from models import MODELS

STEPS = RESULTS / "training_studies.json"  # times of steps of the networks of studies, with their own optimizers
WHOLE = RESULTS / "whole_runs.json"  # runs with real ranks
RATE = "1gbit"  # of the network that they were measured on
README, PAGE, OUTER = ROOT / "README.md", ROOT / "docs" / "accuracy.md", ROOT / "docs" / "outer.md"
START = "<!-- table of {}: python -m benchmarks.convergence.report --write -->\n\n"
ALL = RESULTS / "convergence.md"  # all tables of all studies
NONE = "none"  # the method that others are compared with
NEAREST = "block-float(bits=4,rounding=nearest)"
EXEMPT = ",exempt=^characters,exempt=^positions"
RECIPE = f"phases:0=qsgd,156={NEAREST},196=momentum(inner=signsgd(majority=False))" + EXEMPT
FROZEN = "phases:0=none,196=momentum(inner=topk(theta=0,bits=32))" + EXEMPT
LOCAL = "local(every={}):phases:0=qsgd,20%=" + NEAREST
MEAN = "local(every={},lr=1,momentum=0):phases:0=" + NEAREST + ",20%={}"
IMAGES = ("resnet20", "images")


@dataclass(frozen=True)
class Line:
    """A run beside training without compression, in a table of several studies.

    Args:
        study, recipe, method: which run.
        without: study and recipe of training without compression, where the study of the run has none.
    """

    title: str
    study: str
    recipe: str
    method: str
    without: tuple[str, str] | None = None


@dataclass(frozen=True)
class RealLine:
    """The run of a study with real ranks, beside such a run with torch's fp16 hook."""

    title: str
    study: str
    recipe: str
    method: str


# Tables of whole studies, by the name in their mark: study and recipe of each.
SHOWN = {
    "AdamW": [("text", "text"), ("text_more", "text"), ("betas", "text-betas")],
    "a compressed warm-up": [("momentum", "text"), ("charlm", "text")],
    "codecs for momenta": [("codecs", "text")],
    "Muon": [("muon", "text-muon"), ("muon_more", "text-muon"), ("muon_8", "text-muon")],
    "twelve epochs of images": [("long", "images")],
    "ResNet-20": [IMAGES],
    "all methods": [("default", "images")],
    "block-scaled integers": [("block_float", "text"), ("block_float", "images")],
    "exchanges": [
        ("exchange", "text"),
        ("exchange_resnet20", "images"),
        ("exchange_resnet20_more", "images"),
        ("exchange", "images"),
    ],
    "local steps": [("outer_more", "text-outer")],
    "local steps with Muon": [("muon_outer_more", "text-muon-outer")],
}
# Tables of single runs, by page and name.
CHOSEN: dict[tuple[Path, str], list[Line | RealLine]] = {
    (README, "recommendations"): [
        Line("AdamW | `BlockFloat()`", "block_float", "text", "block-float"),
        Line('AdamW | `BlockFloat(bits=4, rounding="nearest")`', "text", "text", "block-float:bits=4,rounding=nearest"),
        RealLine(
            "AdamW | the same, four real ranks, beside the fp16 hook", "text", "text",
            "block-float:bits=4,rounding=nearest",
        ),
        Line("AdamW | `gradzip.recipes.adamw`", "recipe", "text", RECIPE, ("momentum", "text")),
        Line("AdamW | not recommended: `ACPSGD(rank=4)`", "text", "text", "acpsgd:rank=4"),
        Line(
            'Muon | `BlockFloat(bits=4, rounding="nearest")`', "muon_more", "text-muon",
            "block-float:bits=4,rounding=nearest",
        ),
        Line("Muon | `BlockFloat()`", "muon_8", "text-muon", "block-float"),
        Line("SGD, ResNet-20 | `FFTRange()`", *IMAGES, "fft-range"),
        Line("SGD, ResNet-8 | `BlockFloat()`", "block_float", "images", "block-float"),
        Line("SGD, ResNet-8 | `PowerSGD()`", "long", "images", "powersgd"),
        Line("AdamW | `LocalSteps`, every 10 steps, 4 bits", "outer_more", "text-outer", LOCAL.format(10)),
        Line("AdamW | `LocalSteps`, every 30 steps, 4 bits", "outer_more", "text-outer", LOCAL.format(30)),
        Line(
            "Muon | `LocalSteps`, every 30 steps, 2 bits, `outer=None`", "muon_outer_more", "text-muon-outer",
            MEAN.format(30, "block-float(bits=2,rounding=nearest)"),
        ),
        Line("AdamW, eight workers | `LocalSteps`, every 30 steps, 4 bits", "outer_k8", "text-outer", LOCAL.format(30)),
        Line("AdamW, charlm | `LocalSteps`, every 10 steps, 4 bits", "charlm_outer", "text-outer", LOCAL.format(10)),
        Line(
            "SGD, ResNet-20 | `LocalSteps`, every 10 steps, 4 bits, `outer=None`", "images_outer", "images-outer",
            LOCAL.format(10).replace("every=10", "every=10,lr=1,momentum=0"), IMAGES,
        ),
    ],
    (PAGE, "the recipe"): [
        Line("`gradzip.recipes.adamw`", "recipe", "text", RECIPE, ("momentum", "text")),
        Line("its second moment, nothing compressed", "recipe", "text", FROZEN, ("momentum", "text")),
    ],
    (PAGE, "other local steps"): [
        Line("one worker, uncompressed | 30", "outer_k1", "text-outer", "local(every=30):phases:0=none,20%=none"),
        Line("two workers, twice the steps | 30", "outer_k2", "text-outer", LOCAL.format(30)),
        Line("eight workers, half the steps | 30", "outer_k8", "text-outer", LOCAL.format(30)),
        Line("charlm, a third of the steps | 10", "charlm_outer", "text-outer", LOCAL.format(10)),
        Line("ResNet-20, SGD | 10", "images_outer", "images-outer", LOCAL.format(10), IMAGES),
        Line(
            "ResNet-20, SGD, mean of the parameters | 10", "images_outer", "images-outer",
            LOCAL.format(10).replace("every=10", "every=10,lr=1,momentum=0"), IMAGES,
        ),
    ],
    (OUTER, "local steps"): [
        Line("AdamW | 10", "outer_more", "text-outer", LOCAL.format(10)),
        Line("AdamW | 30", "outer_more", "text-outer", LOCAL.format(30)),
        Line("AdamW, a start of 5 % | 30", "outer", "text-outer", LOCAL.format(30).replace("20%", "5%")),
        Line("Muon, `outer=None` | 10", "muon_outer_more", "text-muon-outer", MEAN.format(10, NEAREST)),
        Line("Muon, `outer=None` | 30", "muon_outer_more", "text-muon-outer", MEAN.format(30, NEAREST)),
        Line(
            "Muon, DiLoCo's outer optimizer | 10", "muon_outer", "text-muon-outer",
            MEAN.format(10, NEAREST).replace(",lr=1,momentum=0", ""),
        ),
    ],
}  # fmt: skip
FEWER = [f"times fewer bytes, {ranks} ranks" for ranks in wire.RANKS]  # on the wire
COLUMNS = {
    (README, "recommendations"): "optimizer | method",
    (PAGE, "the recipe"): "what",
    (PAGE, "other local steps"): "what | `every`",
    (OUTER, "local steps"): "optimizer | `every`",
}


def study(path: Path) -> str:
    """The name of the study of a file of results."""
    return path.stem.removeprefix("convergence_")


@functools.cache
def stored(name: str) -> Results:
    """The committed results of a study."""
    results = Results({}, RESULTS / f"convergence_{name}.json")
    results.resume()
    return results


def picture(name: str) -> Path:
    """Where the page has the picture of a study."""
    return PAGE.parent / "images" / f"accuracy-{name}.png"


def figure(value: float) -> str:
    """Three significant digits, without an exponent for large values."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def step_times(network: str, workers: int) -> dict[str, float]:
    """Measured milliseconds of a step through DDP by method, on a network of `RATE` with as many ranks as workers."""
    if not STEPS.exists():
        return {}
    where = {"model": network, "rate": RATE, "ranks": workers}
    found = [row for row in json.loads(STEPS.read_text())["rows"] if where.items() <= row.items() and "ms" in row]
    return {spec: row["ms"] for row in found if (spec := compression(row["variant"])) is not None}


class Table:
    """The table of a recipe, with a row for each method.

    Args:
        recipe: a name, with at least one finished run.
    """

    def __init__(self, results: Results, recipe: str) -> None:
        self.results, self.recipe = results, recipe
        self.settings = settings = results.recipes[recipe]
        self.rows = rows(results, recipe)
        self.lrs = list(self.rows[0].by_lr)
        self.baseline = next((row.score for row in self.rows if row.method == NONE), None)
        margin = settings["margin"] if settings["lower_is_better"] else -settings["margin"]
        self.goal = None if self.baseline is None else self.baseline + margin  # the score that counts as reached
        times = step_times(settings["network"], settings["workers"])
        own = bool(times) and MODELS[settings["network"]].optimizer == settings["optimizer"]
        self.step_times = times if own else {}

    def lines(self) -> Iterator[str]:
        settings, millions = self.settings, self.rows[0].records[0].parameters / 1e6
        workers = f"{settings['workers']} worker{'s' * (settings['workers'] > 1)}"
        yield (
            f"**{self.recipe}**: {settings['network']} ({millions:.2f} M parameters) on "
            f"{settings['data']}, {workers} with batches of {settings['batch_size']}, "
            f"{settings['epochs']} epochs of {settings['steps']} steps, {settings['optimizer']}"
            + (f" with betas {', '.join(f'{beta:g}' for beta in settings['betas'])}" if settings["betas"] else "")
        )
        yield ""
        header = ["method", "kB per step", "times fewer", settings["measure"], f"− `{NONE}`"]
        header += [f"lr {lr:g}" for lr in self.lrs] if len(self.lrs) > 1 else []
        header += [] if self.goal is None else [f"steps to {self.shown(self.goal)}", "MB to it"]
        header += ["s to it"] if self.goal is not None and self.step_times else []
        yield from markdown(header, map(self.cells, self.rows))
        yield ""
        yield from self.caption()

    def shown(self, score: float | None) -> str:
        return "diverged" if score is None else f"{score:.{self.settings['digits']}f}"

    def final(self, row: Row) -> str:
        """The final score, with the range of its seeds."""
        finals = sorted(record.scores[-1] for record in row.records if record.scores)
        spread = row.score is not None and len(finals) > 1
        return self.shown(row.score) + (f" ({self.shown(finals[0])}–{self.shown(finals[-1])})" if spread else "")

    def dense(self, row: Row) -> int:
        """Bytes of the float32 gradients of all steps."""
        return 4 * row.records[0].parameters * self.settings["steps"] * len(row.payload_bytes)

    def fewer(self, row: Row) -> float:
        """Bytes of float32 gradients for each byte handed to collectives."""
        return self.dense(row) / row.payload_bytes[-1]

    def fewer_on_the_wire(self, row: Row) -> list[str]:
        """Bytes that all-reduces of float32 gradients send for each byte sent, by number of ranks.

        Empty for one worker. QSGD sends more on a GPU.
        """
        found = wire.stored().get((self.results.path.name, self.recipe, row.method))
        if found is None:
            return [""] * len(wire.RANKS)

        def times(ranks: int, key: str) -> str:
            return figure(sent_share("all_reduce", ranks) * self.dense(row) / found[key][str(ranks)])

        return [
            times(ranks, "wire_bytes") + (f"; GPU {times(ranks, 'on_a_gpu')}" if found["on_a_gpu"] else "")
            for ranks in wire.RANKS
        ]

    def cells(self, row: Row) -> Iterator[str]:
        yield f"`{row.method}`"
        if row.payload_bytes:
            per_step = row.payload_bytes[-1] / (len(row.payload_bytes) * self.settings["steps"])
            yield from (figure(per_step / 1e3), figure(self.fewer(row)))
        else:
            yield from ("", "")
        yield self.final(row)
        if row.score is None or self.baseline is None or row.method == NONE:
            yield ""
        else:
            yield f"{row.score - self.baseline:+.{self.settings['digits']}f}".replace("-", "−")
        if len(self.lrs) > 1:
            for lr, score in row.by_lr.items():
                yield f"**{self.shown(score)}**" if lr == row.lr else self.shown(score)
        if self.goal is not None:
            epoch = None if row.score is None else row.reaches(self.goal, self.settings["lower_is_better"])
            milliseconds = self.step_times.get(row.method)
            if epoch is None:
                yield from ("–", "–")
            else:
                yield from (f"{epoch * self.settings['steps']}", figure(row.payload_bytes[epoch - 1] / 1e6))
            if self.step_times:
                unknown = epoch is None or milliseconds is None
                yield "–" if unknown else figure(epoch * self.settings["steps"] * milliseconds / 1e3)

    def caption(self) -> Iterator[str]:
        """What the rows are means of, and what is missing."""
        counts = [len(row.records) for row in self.rows]
        if max(counts) == 1:
            yield "One run each."
        elif min(counts) < max(counts):
            yield f"Means over {min(counts)} to {max(counts)} seeds, with the range in parentheses."
        else:
            yield f"Means over {counts[0]} seeds, with the range in parentheses."
        if len(self.lrs) > 1:
            yield "Each method has the learning rate (bold) that is best for it."
        elif self.lrs:
            yield f"Peak learning rate {self.lrs[0]:g} for all methods."
        else:
            yield f"Peak learning rates, row by row: {', '.join(format(row.lr, 'g') for row in self.rows)}."
        unfinished = [key for key, record in self.results.records.items() if key[0] == self.recipe and not record.done]
        if unfinished:
            yield f"{len(unfinished)} run(s) are not finished and left out."
        if self.goal is not None:
            yield (
                f"*Steps to* and *MB to it*: until the first epoch that ends within {self.settings['margin']:g} of the "
                f"final result of `{NONE}`."
            )
        if self.goal is not None and self.step_times:
            yield (
                f"*s to it*: these steps with {self.settings['workers']} ranks at {bandwidth(RATE)}, at the measured "
                "time of a step."
            )


def report(results: Results) -> str:
    """The tables of all recipes that have a finished run. Empty without any."""
    tables = [Table(results, name) for name in results.recipes if results.finished(name)]
    return "\n".join("\n".join(table.lines()) + "\n" for table in tables)


def difference(score: float, baseline: float, settings: dict[str, Any]) -> str:
    """From training without compression: %, or points of accuracy."""
    value, digits = 100 * (score / baseline - 1), 1
    if not settings["lower_is_better"]:
        value, digits = score - baseline, settings["digits"]
    text = f"{round(value, digits) + 0.0:+.{digits}f}"  # without a negative zero
    return text.replace("-", "−")


def in_short(name: str, recipe: str) -> Iterator[str]:
    """The lines of a table of a study with few columns: how each method ends, the best first, and what it sends."""
    table = Table(stored(name), recipe)
    settings, lrs, first = table.settings, sorted(table.lrs), 1 if table.settings["lower_is_better"] else -1
    betas = f" with betas of {', '.join(f'{beta:g}' for beta in settings['betas'])}" if settings["betas"] else ""
    seeds = max(len(row.records) for row in table.rows)
    yield (
        f"{settings['network']}, {table.rows[0].records[0].parameters / 1e6:.2f} M parameters, {settings['optimizer']}"
        f"{betas}, {settings['epochs'] * settings['steps']} steps, {seeds} seed{'s' * (seeds > 1)}, "
        + (f"the best of the rates {', '.join(f'{lr:g}' for lr in lrs)}" if len(lrs) > 1 else f"rate {lrs[0]:g}")
        + f" (`{table.results.path.name}`):"
    )
    yield ""
    rest = [settings["measure"]]
    rest += [f"− `{NONE}`, {'%' if settings['lower_is_better'] else 'points'}"] * (table.baseline is not None)
    header = ["method", *FEWER, *rest, *["rate"] * (len(lrs) > 1)]
    lines = []
    for row in table.rows:
        assert row.score is not None
        line = [f"`{row.method}`", *table.fewer_on_the_wire(row), table.final(row)]
        if table.baseline is not None:
            line += ["" if row.method == NONE else difference(row.score, table.baseline, settings)]
        line += [f"{row.lr:g}, {place(row.lr, lrs)}"] * (len(lrs) > 1)
        lines.append((row.method != NONE, first * row.score, line))
    yield from markdown(header, (line for *_, line in sorted(lines)))


def place(lr: float, lrs: list[float]) -> str:
    """Where the best of several rates is among them. Beyond the highest and the lowest, better ones may lie."""
    return {max(lrs): "highest", min(lrs): "lowest"}.get(lr, "middle")


def of_single_runs(columns: str, lines: list[Line | RealLine]) -> Iterator[str]:
    """The lines of a table of chosen runs, each beside training without compression with the same seeds."""
    cells = []
    for line in lines:
        table = Table(stored(line.study), line.recipe)
        (row,) = (row for row in table.rows if row.method == line.method)
        score, tried = row.score, len(table.lrs)
        assert score is not None
        seeds = list(table.results.finished(line.recipe)[line.method][row.lr])
        if isinstance(line, RealLine):
            real = {run["method"]: run for run in json.loads(WHOLE.read_text())["rows"] if run["study"] == line.study}
            score, without = (real[method]["scores"][-1] for method in (line.method, "ddp-fp16"))
            seeds = [0]
        else:
            study, recipe = line.without or (line.study, line.recipe)
            plain = next(row for row in rows(stored(study), recipe) if row.method == NONE)
            of_seeds = stored(study).finished(recipe)[NONE][plain.lr]
            without = fmean(of_seeds[seed].scores[-1] for seed in seeds)
        unit, change = ("", " %") if table.settings["lower_is_better"] else (" %", " points")
        cells.append([
            *line.title.split(" | "), *table.fewer_on_the_wire(row), table.shown(score) + unit,
            table.shown(without) + unit, difference(score, without, table.settings) + change, str(len(seeds)),
            f"{place(row.lr, table.lrs)} of {tried}" if tried > 1 else "only one",
        ])  # fmt: skip
    titles = columns.split(" | ")
    header = [*titles, *FEWER, "score", "without", "difference", "seeds", "best rate"]
    yield from markdown(header, cells, len(titles))


def page_of_all() -> str:
    """The page with all tables of all studies."""
    lines = ["# All studies of accuracy", "", "By `python -m benchmarks.convergence.report --write`; what is measured:",
             "[accuracy.md](../../docs/accuracy.md#what-is-measured).", ""]  # fmt: skip
    for path in sorted(RESULTS.glob("convergence_*.json")):
        lines += [f"## {path.name}", "", report(stored(study(path)))]
    return "\n".join(lines)


def blocks() -> Blocks:
    """The blocks of README.md, docs/accuracy.md and docs/outer.md."""
    found = {}
    for name, tables in SHOWN.items():
        texts = ["\n".join(in_short(*of)) + "\n" for of in tables]
        found[PAGE, START.format(name)] = "\n".join(texts)
    for (page, name), lines in CHOSEN.items():
        found[page, START.format(name)] = "\n".join(of_single_runs(COLUMNS[page, name], lines)) + "\n"
    return found


def main() -> None:
    parser = Parser("convergence.report", __doc__)
    parser.add_argument("--write", action="store_true", help="write all tables, and draw the pictures")
    if not parser.parse_args().write:
        print(*blocks().values(), sep="\n")
        return
    try:
        replace_blocks(blocks())
    except ResultsError as error:
        parser.fail(str(error))
    write_whole(ALL, page_of_all())
    for name, shown in chart.PICTURES.items():
        chart.draw(stored(name), picture(name), shown)


if __name__ == "__main__":
    main()
