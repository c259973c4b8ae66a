"""`gradzip inspect`: error, bytes and time of methods on real gradients."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import gradzip
from gradzip.inspection import cells, figure, gradients
from gradzip.inspection.cells import Cell, Report
from gradzip.methods.base.compressor import Compressor
from gradzip.methods.spec import parse

from .command import CommandError, check_picture, table

DEFAULTS = ("fp16", "fft-range", "dct-range", "topk", "qsgd", "terngrad", "signsgd", "acpsgd")

WARM = 10  # steps on the same gradient before the measured one, for methods that use factors again
MOST_DRAWN = 20  # layers in a picture

EXAMPLES = """examples:
  gradzip inspect step500.pt                     a file that gradzip.capture(model, "step500.pt") wrote
  gradzip inspect train.py:backward              gradients of a function, computed on the spot
  gradzip inspect step500.pt --method topk:theta=0.99 --method topk:theta=0.999
  gradzip inspect step500.pt --layer 'layer4.*conv' --png layer4.png
  gradzip inspect step500.pt --json | jq '.totals[] | {method, error, ratio}'

FUNCTION (default: build) is called without arguments. It returns a model after backward(), a model and its loss (for
which backward() is called), or a dict from names to gradients. docs/inspect.md explains the columns.
"""

HEADER = ("method", "error α", "cosine", "ratio", "zeros", "enc ms", "GB/s", "dec ms", "GB/s")


def add(commands: Any) -> None:
    """Add `gradzip inspect`."""
    parser = commands.add_parser(
        "inspect",
        help="error, bytes and time of methods on your gradients",
        description="Compress gradients layer by layer with several methods, and show errors, compression ratios from "
        "true payload bytes, and times.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("gradients", metavar="GRADIENTS", help="file of gradients, or FILE.py[:FUNCTION]")
    parser.add_argument(
        "--method", metavar="SPEC", action="append", help=f"method, may be repeated (default: {', '.join(DEFAULTS)})"
    )
    parser.add_argument("--layer", metavar="REGEX", help="only layers whose name matches")
    parser.add_argument("--top", metavar="N", type=int, default=5, help="show the N largest layers; 0: all (5)")
    parser.add_argument("--repeats", metavar="N", type=int, default=3, help="timed steps (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, with all layers")
    parser.add_argument("--png", metavar="FILE", type=Path, help="draw histograms (needs matplotlib)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    for name, least in (("top", 0), ("repeats", 1)):
        if getattr(options, name) < least:
            raise CommandError(f"got --{name} {getattr(options, name)}, expected an integer >= {least}")
    if options.png:
        check_picture(options.png)
    try:
        compressors: dict[str, Compressor] = {spec: parse(spec) for spec in options.method or DEFAULTS}
        found = _finite(_chosen(_gradients(options.gradients), options.layer))
    except ValueError as error:
        raise CommandError(str(error)) from None
    top = options.top or len(found)
    drawn = min(top, MOST_DRAWN) if options.png else 0
    with torch.no_grad():
        report = cells.inspect(found, compressors, repeats=options.repeats, warm=WARM, drawn=drawn)
    if options.png:
        if not report.histograms:
            raise CommandError("--png: got no layer that any method compresses, expected one: give other methods")
        figure.save(report, options.png)
    if options.json:
        print(json.dumps(_as_json(report, options.gradients), indent=2))
    else:
        print("\n".join(lines(report, top)))
    return 0


def _gradients(source: str) -> gradients.Named:
    script = re.fullmatch(r"(.+\.py)(?::(\w+))?", source)
    return gradients.compute(script[1], script[2] or "build") if script else gradients.read(source)


def _chosen(found: gradients.Named, pattern: str | None) -> gradients.Named:
    """The non-empty layers whose name matches."""
    try:
        test = re.compile(pattern or "")
    except re.error as error:
        raise CommandError(f"got --layer {pattern!r}, expected a regular expression: {error}") from None
    chosen = {name: grad for name, grad in found.items() if grad.numel() and test.search(name)}
    if not chosen:
        raise CommandError(
            f"got --layer {pattern!r}, which matches none of {len(found)} layers, expected one such as "
            f"{next(iter(found))!r}"
        )
    return chosen


def _finite(found: gradients.Named) -> gradients.Named:
    """The finite gradients. Prints the names of the others to stderr."""
    finite = {name: gradient for name, gradient in found.items() if gradient.isfinite().all()}
    for name in found.keys() - finite.keys():
        print(f"gradzip inspect: {name}: left out, it is not finite", file=sys.stderr)
    if not finite:
        raise CommandError("got no gradient that is finite, expected one: capture another step")
    return finite


# --- text


def lines(report: Report, top: int) -> Iterator[str]:
    """A table of the whole model, one of each of the `top` largest layers that any method compresses, and notes."""
    uncompressed = report.uncompressed
    compressed = [layer for layer in report.shapes if layer not in uncompressed]
    numel = next(iter(report.totals.values())).numel
    yield f"whole model  {len(report.shapes)} layers, {numel:,} elements"
    yield from _table(report.totals)
    for layer in compressed[:top]:
        yield f"{layer}  {report.shape_text(layer)}"
        yield from _table({method: report.cells[layer, method] for method in report.methods})
    for note in _notes(report, uncompressed, len(compressed) - min(top, len(compressed))):
        yield from textwrap.wrap(note, 100, subsequent_indent="  ")


def _table(of_methods: dict[str, Cell]) -> Iterator[str]:
    rows = [(f"{method} (warm)" if cell.is_warm else method, *_texts(cell)) for method, cell in of_methods.items()]
    yield from (f"  {line}" for line in table([HEADER, *rows]))
    yield ""


def _texts(cell: Cell) -> list[str]:
    """The columns after the method's name."""
    empty = [""] * (len(HEADER) - 2)
    if not cell.compressed:
        return ["uncompressed", *empty]
    if math.isnan(cell.error):  # in float16, for example: the average is not finite
        return ["overflow", *empty]
    speeds = [
        text
        for seconds in (cell.encode, cell.decode)
        for text in (f"{1e3 * seconds:.3f}", f"{cell.dense_nbytes / seconds / 1e9:.2f}" if seconds else "")
    ]
    zeros = f"{100 * cell.zeros / cell.numel:.1f} %"
    return [f"{cell.error:.4f}", f"{cell.cosine:.4f}", f"{cell.ratio:.1f}", zeros, *speeds]


def _notes(report: Report, uncompressed: list[str], hidden: int) -> Iterator[str]:
    """Sentences about what the tables leave out."""
    if hidden:
        yield f"{hidden} smaller layers not shown (--top, --layer)."
    if uncompressed:
        numel = sum(report.cells[layer, report.methods[0]].numel for layer in uncompressed)
        names = ", ".join(uncompressed[:4]) + (", …" if len(uncompressed) > 4 else "")
        what = f"{len(uncompressed)} layers of {numel:,} elements in all ({names})"
        yield f"Averaged uncompressed by all methods: {what}."
    for method, cell in report.totals.items():
        if cell.is_warm:
            yield (
                f"{method} (warm): after {report.warm} steps on the same gradient, which its factors fit by then. The "
                f"error of its first step is {cell.first_error:.2f}; in training it is between the two."
            )
        if cell.clamped:
            yield f"{method}: {100 * cell.clamped:.2f} % of the values sent are clamped to its value_range."


# --- JSON


def _as_json(report: Report, source: str) -> dict[str, Any]:
    layers = [
        {
            "name": layer,
            "shape": list(shape),
            "dtype": report.dtypes[layer],
            "methods": [_facts(method, report.cells[layer, method]) for method in report.methods],
        }
        for layer, shape in report.shapes.items()
    ]
    totals = [_facts(method, cell) for method, cell in report.totals.items()]
    conditions = {"version": gradzip.__version__, "threads": torch.get_num_threads(), "warm": report.warm}
    return {"gradients": source, **conditions, "totals": totals, "layers": layers}


def _facts(method: str, cell: Cell) -> dict[str, Any]:
    """A cell in JSON types. Numbers that are not finite are None."""
    ratios = {name: getattr(cell, name) for name in ("error", "first_error", "cosine", "ratio")}
    facts = asdict(cell) | ratios
    return {"method": method} | {name: None if value != value else value for name, value in facts.items()}
