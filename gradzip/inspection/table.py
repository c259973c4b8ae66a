"""A report as text: for a terminal by rich, if it is installed, and plain otherwise."""

from __future__ import annotations

import importlib.util
import math
import textwrap
from collections.abc import Iterator

from .cells import Cell, Report

HEADER = ("method", "error α", "cosine", "ratio", "zeros", "enc ms", "GB/s", "dec ms", "GB/s")
_UNCOMPRESSED = "uncompressed"


def cell_texts(cell: Cell) -> tuple[str, ...]:
    """The columns after the method's name."""
    if not cell.compressed:
        return _UNCOMPRESSED, *[""] * (len(HEADER) - 2)
    overflows = math.isnan(cell.error)  # in float16, for example: the average is not finite
    return (
        "overflow" if overflows else f"{cell.error:.4f}",
        "" if overflows else f"{cell.cosine:.4f}",
        f"{cell.ratio:.1f}",
        f"{100 * cell.zeros / cell.numel:.1f} %",
        *_speed(cell.dense_nbytes, cell.encode),
        *_speed(cell.dense_nbytes, cell.decode),
    )


def sections(report: Report, top: int) -> Iterator[tuple[str, str, list[tuple[str, ...]]]]:
    """(title, facts, rows) of the whole model, and of the `top` largest layers that any method compresses."""
    numel = sum(_numel(report, layer) for layer in report.layers)
    yield (
        "whole model",
        f"{count(len(report.layers), 'layer')}, {count(numel, 'element')}",
        [(_label(method, report.totals[method]), *cell_texts(report.totals[method])) for method in report.methods],
    )
    uncompressed = set(report.uncompressed)
    compressed = [layer for layer in report.layers if layer not in uncompressed]
    for layer in compressed[:top]:
        found = {method: report.cells[layer, method] for method in report.methods}
        rows = [(_label(method, cell), *cell_texts(cell)) for method, cell in found.items()]
        yield layer, shape_text(report, layer), rows


def notes(report: Report, top: int) -> Iterator[str]:
    """Sentences about what the sections leave out."""
    uncompressed = report.uncompressed
    shown = min(top, len(report.layers) - len(uncompressed))
    hidden = len(report.layers) - len(uncompressed) - shown
    if hidden:
        yield f"{count(hidden, 'smaller layer')} not shown (--top, --layer)."
    if uncompressed:
        numel = sum(_numel(report, layer) for layer in uncompressed)
        names = ", ".join(uncompressed[:4]) + (", …" if len(uncompressed) > 4 else "")
        what = f"{count(len(uncompressed), 'layer')} of {count(numel, 'element')} in all ({names})"
        yield f"Averaged uncompressed by all methods: {what}."
    for method in report.methods:
        if (cell := report.totals[method]).is_warm:
            yield (
                f"{method} (warm): after {count(report.warm, 'step')} on the same gradient, which its factors fit by "
                f"then. The error of its first step is {cell.first_error:.2f}; in training it is between the two."
            )
        if clamped := report.totals[method].clamped:
            yield f"{method}: {100 * clamped:.2f} % of the values sent are clamped to its value_range."


def _label(method: str, cell: Cell) -> str:
    """The name of a method in a row, with a mark if its memory has made the error what it is."""
    return f"{method} (warm)" if cell.is_warm else method


def lines(report: Report, top: int, width: int) -> Iterator[tuple[str, str]]:
    """Aligned lines with their styles: "bold", "dim" or "". Names of methods are shortened to fit into `width`."""
    tables = list(sections(report, top))
    rows = [HEADER, *(row for _, _, of_section in tables for row in of_section)]
    widths = [max(len(row[i]) for row in rows if i == 0 or row[1] != _UNCOMPRESSED) for i in range(len(HEADER))]
    widths[0] = max(12, min(widths[0], width - sum(widths[1:]) - 2 * len(widths)))
    for title, facts, of_section in tables:
        yield f"{shortened(title, max(20, width - len(facts) - 2))}  {facts}", "bold"
        yield _line(HEADER, widths), "dim"
        for row in of_section:
            yield _line(row, widths), "dim" if row[1] == _UNCOMPRESSED else ""
        yield "", ""
    for note in notes(report, top):
        for line in textwrap.wrap(note, max(width, 40), subsequent_indent="  "):
            yield line, "dim"


def show(report: Report, top: int, width: int, terminal: bool) -> None:
    """Print the report to stdout: with styles on a terminal, if rich is installed."""
    if not (terminal and importlib.util.find_spec("rich")):
        print("\n".join(text for text, _ in lines(report, top, width)))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for text, style in lines(report, top, width):
        console.print(Text(text, style), soft_wrap=True)


def shape_text(report: Report, layer: str) -> str:
    """The shape, type and size of a layer."""
    shape = "×".join(map(str, report.shapes[layer])) or "scalar"
    dtype = report.dtypes[layer]
    return f"{shape}{'' if dtype == 'float32' else f' {dtype}'}, {count(_numel(report, layer), 'element')}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shortened(text: str, width: int) -> str:
    """Shorten a text to `width` characters, by leaving out the middle: names of layers differ at their ends."""
    if len(text) <= width:
        return text
    head = max(1, (width - 1) // 3)
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    first = f"  {shortened(row[0], widths[0]):<{widths[0]}}"
    if row[1] == _UNCOMPRESSED:
        return f"{first}  {_UNCOMPRESSED}"
    return first + "".join(f"  {text:>{width}}" for text, width in zip(row[1:], widths[1:]))


def _numel(report: Report, layer: str) -> int:
    return report.cells[layer, report.methods[0]].numel


def _speed(nbytes: int, seconds: float) -> tuple[str, str]:
    """Milliseconds, and 10^9 bytes of the gradient per second."""
    milliseconds = 1000 * seconds
    digits = 1 if milliseconds >= 100 else 3
    return f"{milliseconds:.{digits}f}", f"{nbytes / seconds / 1e9:.2f}" if seconds else ""
