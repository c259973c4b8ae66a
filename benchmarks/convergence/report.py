"""Tables of the results of benchmarks/convergence, and where docs/accuracy.md has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.results import RESULTS, ROOT, replace_block
from benchmarks.common.tables import markdown
from benchmarks.convergence.chart import PICTURES
from benchmarks.convergence.results import Results, Row, rows
from benchmarks.training.variants import bandwidth, compression

STEPS = RESULTS / "training_studies.json"  # times of steps of the networks of studies
RATE = "1gbit"  # of the network that they were measured on
PAGE = ROOT / "docs" / "accuracy.md"
NONE = "none"  # the method that others are compared with


def start_mark(path: Path) -> str:
    """The line before the tables of a file of results."""
    return f"<!-- tables of {path.name}: python -m benchmarks.convergence --write -->\n\n"


def study(path: Path) -> str:
    """The name of the study of a file of results."""
    return path.stem.removeprefix("convergence_")


def picture(path: Path) -> Path | None:
    """Where the page has the picture of a file of results; None if it has none."""
    return PAGE.parent / "images" / f"accuracy-{study(path)}.png" if study(path) in PICTURES else None


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
        self.step_times = step_times(settings["network"], settings["workers"])

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

    def cells(self, row: Row) -> Iterator[str]:
        yield f"`{row.method}`"
        if row.payload_bytes:
            per_step = row.payload_bytes[-1] / (len(row.payload_bytes) * self.settings["steps"])
            yield from (figure(per_step / 1e3), figure(4 * row.records[0].parameters / per_step))
        else:
            yield from ("", "")
        finals = sorted(record.scores[-1] for record in row.records if record.scores)
        spread = row.score is not None and len(finals) > 1
        yield self.shown(row.score) + (f" ({self.shown(finals[0])}–{self.shown(finals[-1])})" if spread else "")
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


def write(results: Results, page: Path = PAGE) -> None:
    """Replace the tables of a file of results on the page.

    Raises:
        ResultsError: the page has no place for them.
    """
    replace_block(page, start_mark(results.path), report(results))
