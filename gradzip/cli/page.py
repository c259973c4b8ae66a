"""A report as one HTML file, with tables to sort and pictures inside."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from html import escape

from .. import _version
from ..inspection import figure
from ..inspection.cells import Cell, Report
from ..inspection.table import shape_text

_COLUMNS = (
    "layer", "elements", "method", "error α", "cosine", "ratio", "bytes", "zeros, %", "clamped, %", "encode, ms",
    "decode, ms",
)  # fmt: skip

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th { cursor: pointer; text-align: right; position: sticky; top: 0; background: #eee }
td { text-align: right; border-top: 1px solid #ddd } th, td { padding: .2em .7em; white-space: nowrap }
.name { text-align: left } .bypassed td { color: #999 } img { max-width: 100% } h2 { font-size: 1.1em }
"""

_SCRIPT = """
for (const table of document.querySelectorAll("table"))
  table.querySelectorAll("th").forEach((th, i) => th.onclick = () => {
    const key = row => { const v = row.cells[i].dataset.value; return v === undefined ? row.cells[i].textContent : +v }
    const sign = th.dataset.sign = th.dataset.sign === "-1" ? 1 : -1
    const rows = [...table.tBodies[0].rows]
    rows.sort((a, b) => sign * (key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0))
    table.tBodies[0].append(...rows)
  })
"""


def page(report: Report, source: str) -> str:
    """The page, without pictures if matplotlib is missing. source: where the gradients are from."""
    title = f"Gradients of {escape(source)}"
    totals = [_row("whole model", method, report.totals[method]) for method in report.methods]
    cells = [_row(layer, m, report.cells[layer, m]) for layer in report.layers for m in report.methods]
    return "\n".join([
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>',
        f"<h1>{title}</h1>",
        "<p>α is the relative error |x − x̂| / |x| of one step without a residual. Methods that use factors again have "
        f"made {report.warm} steps on the same gradient before. The ratio is that of the bytes which "
        "one rank sends, headers included. Times are of one rank's payload on this machine.</p>",
        "<p>Click on a column to sort by it.</p>",
        "<h2>Whole model</h2>", _table(totals),
        "<h2>Distributions</h2>",
        "<p>Grey: the gradient. Line: what is sent of it. The counts are logarithmic. The last panel has the errors of "
        "the elements: the share that is smaller.</p>",
        *_pictures(report),
        "<h2>Layers</h2>", _table(cells),
        f"<p>gradzip {_version.__version__}</p><script>{_SCRIPT}</script></body></html>",
        "",
    ])  # fmt: skip


def _pictures(report: Report) -> Iterator[str]:
    if not figure.available():
        yield f"<p>No pictures: {escape(figure.MISSING)}</p>"
        return
    for layer in dict.fromkeys(layer for layer, _ in report.histograms):
        data = base64.b64encode(figure.png(report, layer)).decode()
        text = escape(f"{layer}, {shape_text(report, layer)}: histograms before and after compression")
        yield f'<p><img alt="{text}" src="data:image/png;base64,{data}"></p>'


def _table(rows: list[str]) -> str:
    names = {"layer", "method"}
    header = "".join(f"<th{' class=name' if name in names else ''}>{name}</th>" for name in _COLUMNS)
    return f"<table><thead><tr>{header}</tr></thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table>"


def _row(layer: str, method: str, cell: Cell) -> str:
    numbers = [
        _number(cell.error, ".4f"), _number(cell.cosine, ".4f"), _number(cell.ratio, ".2f"),
        _number(cell.nbytes, ",d"), _number(100 * cell.zeros / cell.numel, ".1f"),
        '<td data-value="-1"></td>' if cell.clamped is None else _number(100 * cell.clamped, ".2f"),
        _number(1000 * cell.encode, ".3f"), _number(1000 * cell.decode, ".3f"),
    ]  # fmt: skip
    return (
        f"<tr{'' if cell.compressed else ' class=bypassed'}><td class=name>{escape(layer)}</td>"
        f"{_number(cell.numel, ',d')}<td class=name>{escape(method)}</td>{''.join(numbers)}</tr>"
    )


def _number(value: float, form: str) -> str:
    # The script sorts by the value: JavaScript reads "Infinity", not "inf".
    sorted_by = "Infinity" if math.isinf(value) else repr(value)
    return f'<td data-value="{sorted_by}">{format(value, form)}</td>'
