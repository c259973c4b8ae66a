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

_COLUMNS = {  # and how to read them
    "layer": "The parameter. Grey rows: too small or too short for the method, so averaged as they are.",
    "elements": "Elements of the gradient. Each is 4 bytes in float32.",
    "method": "The method and its arguments, as for <code>gradzip.parse</code>.",
    "error α": "|x − x̂| / |x|, where x is the gradient and x̂ what other ranks see of it, in one step without a "
    "residual: 0 is exact, 1 is as if nothing had been sent. A large α does not mean that training fails: error "
    "feedback sends the rest later, and errors of unbiased methods average out. Compare like methods by it.",
    "cosine": "Of the angle between x and x̂: 1 is the same direction, 0 a useless one.",
    "ratio": "Bytes of the float32 gradient for each byte sent, headers included: larger is less traffic.",
    "bytes": "What one rank sends of it in a step.",
    "zeros, %": "Elements of x̂ that are 0: nothing of them is sent in this step.",
    "clamped, %": "Values beyond a fixed <code>value_range</code>, which are sent as its end. Widen the range if they "
    "are many. Empty: the method has no fixed range.",
    "encode, ms": "Time to compress on this machine. It pays only where it is less than the time saved on the network.",
    "decode, ms": "Time to decompress the payload of one rank. With a gather, a step decodes those of all ranks.",
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th { cursor: pointer; text-align: right; position: sticky; top: 0; background: #eee }
td { text-align: right; border-top: 1px solid #ddd } th, td { padding: .2em .7em; white-space: nowrap }
.name { text-align: left } .bypassed td { color: #777 } img { max-width: 100% } h2 { font-size: 1.1em }
.wide { overflow-x: auto } dt { font-weight: 600 } dd { margin: 0 0 .4em 1.5em } summary { cursor: pointer }
.wide.long { max-height: 80vh }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd } th { background: #333 } td { border-color: #444 }
  .bypassed td { color: #999 } img { border-radius: 4px }
}
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
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        "<details open><summary>How to read the columns</summary><dl>",
        *(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in _COLUMNS.items()),
        f"</dl><p>Methods that use factors again have made {report.warm} steps on the same gradient before: "
        "their error is about the least that the rank allows.</p></details>",
        "<p>Click on the head of a column to sort by it.</p>",
        "<h2>Whole model</h2>", _table(totals),
        "<h2>Distributions</h2>",
        "<p>Grey: the gradient. Line: what is sent of it. The counts are logarithmic. The last panel has the errors of "
        "the elements: the share that is smaller.</p>",
        *_pictures(report),
        "<h2>Layers</h2>", _table(cells, long=True),
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


def _table(rows: list[str], long: bool = False) -> str:
    names = {"layer", "method"}
    header = "".join(f"<th{' class=name' if name in names else ''}>{name}</th>" for name in _COLUMNS)
    box = '<div class="wide long">' if long else '<div class="wide">'
    return f"{box}<table><thead><tr>{header}</tr></thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table></div>"


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
