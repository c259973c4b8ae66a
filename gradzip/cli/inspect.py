"""`gradzip inspect`: error, bytes and time of methods on your gradients.

Compress gradients layer by layer with several methods, and show errors, compression ratios from true payload bytes, and
times.

examples:
  gradzip inspect step500.pt                     a file that gradzip.capture(model, "step500.pt") wrote
  gradzip inspect train.py:backward              gradients of a function, computed on the spot
  gradzip inspect step500.pt --method topk:theta=0.99 --method topk:theta=0.999
  gradzip inspect step500.pt --layer 'layer4.*conv' --png layer4.png
  gradzip inspect step500.pt --json | jq '.totals[] | {method, error, ratio}'

FUNCTION (default: build) is called without arguments. It returns a model after backward(), a model and its loss (for
which backward() is called), or a dict from names to gradients. docs/inspect.md explains the columns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import gradzip
from gradzip.inspection import cells, gradients
from gradzip.inspection.cells import Cell, Report
from gradzip.methods.spec import parse

from . import figure
from .command import CommandError, check_least, table

DEFAULTS = ("fp16", "block-float", "fft-range", "dct-range", "topk", "qsgd", "terngrad", "signsgd", "acpsgd")

WARM = 10  # steps on the same gradient before the measured one, for methods that use factors again
MOST_DRAWN = 20  # layers in a picture

HEADER = ("method", "error α", "cosine", "ratio", "zeros", "enc ms", "GB/s", "dec ms", "GB/s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("gradients", metavar="GRADIENTS", help="file of gradients, or FILE.py[:FUNCTION]")
    add("--method", metavar="SPEC", action="append", help=f"method, may be repeated (default: {', '.join(DEFAULTS)})")
    add("--layer", metavar="REGEX", help="only layers whose name matches")
    add("--top", metavar="N", type=int, default=5, help="show the N largest layers; 0: all (5)")
    add("--repeats", metavar="N", type=int, default=3, help="timed steps (default: %(default)s)")
    add("--png", metavar="FILE", type=Path, help="draw histograms (needs matplotlib)")


def run(options: argparse.Namespace) -> None:
    check_least(options, top=0, repeats=1)
    if options.png:
        _check_picture(options.png)
    try:
        compressors = {spec: parse(spec) for spec in options.method or DEFAULTS}
        found = _chosen(_gradients(options.gradients), options.layer)
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
    print(json.dumps(_as_json(report, options.gradients), indent=2) if options.json else "\n".join(lines(report, top)))


def _check_picture(path: Path) -> None:
    """Raise CommandError if no picture can be written at this path, its format is unknown, or matplotlib is missing."""
    if path.is_dir() or not path.parent.is_dir():
        raise CommandError(f"got {path} to write, expected a file in a folder that exists")
    if path.suffix not in figure.FORMATS:
        raise CommandError(f"got {path} to write, expected a file that ends in {', '.join(figure.FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--png: matplotlib is not installed: pip install matplotlib")


def _gradients(source: str) -> gradients.Named:
    script = re.fullmatch(r"(.+\.py)(?::(\w+))?", source)
    return gradients.compute(script[1], script[2] or "build") if script else gradients.read(source)


def _chosen(found: gradients.Named, pattern: str | None) -> gradients.Named:
    """The finite and non-empty layers whose name matches. Prints the names of those that are not finite to stderr."""
    try:
        test = re.compile(pattern or "")
    except re.error as error:
        raise CommandError(f"got --layer {pattern!r}, expected a regular expression: {error}") from None
    chosen = {name: grad for name, grad in found.items() if grad.numel() and test.search(name)}
    if not chosen:
        expected = f"expected one such as {next(iter(found))!r}"
        raise CommandError(f"got --layer {pattern!r}, which matches none of {len(found)} layers, {expected}")
    finite = {name: grad for name, grad in chosen.items() if grad.isfinite().all()}
    for name in chosen.keys() - finite.keys():
        print(f"gradzip inspect: {name}: left out, it is not finite", file=sys.stderr)
    if not finite:
        raise CommandError("got no gradient that is finite, expected one: capture another step")
    return finite


# --- text


def lines(report: Report, top: int) -> Iterator[str]:
    """A table of the whole model, one of each of the `top` largest layers that any method compresses, and notes."""
    uncompressed = report.uncompressed
    compressed = [layer for layer in report.gradients if layer not in uncompressed]
    numel = sum(gradient.numel() for gradient in report.gradients.values())
    yield from _table(f"whole model  {len(report.gradients)} layers, {numel:,} elements", report.totals)
    for layer in compressed[:top]:
        yield from _table(report.title(layer), {method: report.cells[layer, method] for method in report.totals})
    for note in _notes(report, uncompressed, len(compressed[top:])):
        yield from textwrap.wrap(note, 100, subsequent_indent="  ")


def _table(title: str, of_methods: Mapping[str, Cell]) -> Iterator[str]:
    rows = [(f"{method} (warm)" if cell.is_warm else method, *_texts(cell)) for method, cell in of_methods.items()]
    yield from (title, *(f"  {line}" for line in table([HEADER, *rows])), "")


def _texts(cell: Cell) -> list[str]:
    """The columns after the method's name."""
    if not cell.compressed:
        return ["uncompressed"]
    if math.isnan(cell.error):  # in float16, for example: the average is not finite
        return ["overflow"]
    texts = [f"{cell.error:.4f}", f"{cell.cosine:.4f}", f"{cell.ratio:.1f}", f"{100 * cell.zeros / cell.numel:.1f} %"]
    for seconds in (cell.encode, cell.decode):
        texts += [f"{1e3 * seconds:.3f}", f"{cell.dense_nbytes / seconds / 1e9:.2f}" if seconds else ""]
    return texts


def _notes(report: Report, uncompressed: list[str], hidden: int) -> Iterator[str]:
    """Sentences about what the tables leave out."""
    if hidden:
        yield f"{hidden} smaller layers not shown (--top, --layer)."
    if uncompressed:
        numel = sum(report.gradients[layer].numel() for layer in uncompressed)
        names = ", ".join(uncompressed[:4]) + (", …" if len(uncompressed) > 4 else "")
        what = f"{len(uncompressed)} layers of {numel:,} elements in all ({names})"
        yield f"Averaged uncompressed by all methods: {what}."
    for method, cell in report.totals.items():
        if cell.is_warm:
            yield (
                f"{method} (warm): after {WARM} steps on the same gradient, which its factors fit by then. The "
                f"error of its first step is {cell.first_error:.2f}; in training it is between the two."
            )
        if cell.clamped:
            yield f"{method}: {100 * cell.clamped:.2f} % of the values sent are clamped to its value_range."


# --- JSON


def _as_json(report: Report, source: str) -> dict[str, Any]:
    layers = [
        {
            "name": layer,
            "shape": list(gradient.shape),
            "dtype": str(gradient.dtype).removeprefix("torch."),
            "methods": [_facts(method, report.cells[layer, method]) for method in report.totals],
        }
        for layer, gradient in report.gradients.items()
    ]
    totals = [_facts(method, cell) for method, cell in report.totals.items()]
    conditions = {"version": gradzip.__version__, "threads": torch.get_num_threads(), "warm": WARM}
    return {"gradients": source, **conditions, "totals": totals, "layers": layers}


def _facts(method: str, cell: Cell) -> dict[str, Any]:
    """A cell in JSON types. NaN is None."""
    facts = asdict(cell) | {name: getattr(cell, name) for name in ("error", "first_error", "cosine", "ratio")}
    return {"method": method} | {name: None if value != value else value for name, value in facts.items()}
