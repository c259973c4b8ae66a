"""`gradzip inspect`: error, bytes and time of methods on real gradients."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

import gradzip
from gradzip.inspection import cells, figure, gradients, table
from gradzip.methods.base.compressor import Compressor
from gradzip.methods.spec import parse

from . import page
from .command import CommandError, check_file, check_picture, progress

DEFAULTS = ("fp16", "fft-range", "dct-range", "topk", "qsgd", "terngrad", "signsgd", "acpsgd")

MOST_DRAWN = 20  # layers in a picture

EXAMPLES = """examples:
  gradzip inspect step500.pt                     a file that gradzip.capture(model, "step500.pt") wrote
  gradzip inspect train.py:backward              gradients of a function, computed on the spot
  gradzip inspect step500.pt --method topk:theta=0.99 --method topk:theta=0.999
  gradzip inspect step500.pt --layer 'layer4.*conv' --png layer4.png --html report.html
  gradzip inspect step500.pt --json | jq '.totals[] | {method, error, ratio}'

FUNCTION (default: build) is called without arguments. It returns a model after backward(), a model and its loss (for
which backward() is called), or a dict from names to gradients:

  def backward():
      model = torch.nn.Linear(784, 10)
      return model, model(torch.randn(64, 784)).square().mean()

The error is alpha = |x - sent| / |x| of one step without a residual. Low-rank methods start from random factors, and
get better in training, because they use them again: rows marked "(warm)" show about the least error that they can reach
on this gradient, and a note says that of the first step. Times are for one rank's
payload on this machine: the least of the timed steps (the mean over even and odd ones).
"""


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
    parser.add_argument(
        "--top", metavar="N", type=int, default=5, help="show and draw the N largest layers; 0: all (5)"
    )
    parser.add_argument("--repeats", metavar="N", type=int, default=3, help="timed steps (default: %(default)s)")
    parser.add_argument(
        "--warm",
        metavar="N",
        type=int,
        default=10,
        help="steps on the same gradient before the measured one, for methods that use factors again (10)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with all layers")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with all layers and histograms")
    parser.add_argument("--png", metavar="FILE", type=Path, help="draw histograms (needs matplotlib)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    compressors = _compressors(options.method or DEFAULTS)
    for name, least in (("top", 0), ("repeats", 1), ("warm", 0)):
        if getattr(options, name) < least:
            raise CommandError(f"got --{name} {getattr(options, name)}, expected an integer >= {least}")
    if options.html:
        check_file(options.html)
    if options.png:
        check_picture(options.png)
    found = _finite(_chosen(_gradients(options.gradients), options.layer))
    top = options.top or len(found)
    drawn = min(top, MOST_DRAWN) if options.png or options.html else 0
    with torch.no_grad(), progress(len(found) * len(compressors), "compressing") as step:
        report = cells.inspect(
            found, compressors, repeats=options.repeats, warm=options.warm, drawn=drawn, advance_progress=step
        )
    if options.png and not report.histograms:
        raise CommandError("--png: got no layer that any method compresses, expected one: give other methods")
    try:
        if options.png:
            figure.save(report, options.png)
        if options.html:
            options.html.write_text(page.page(report, options.gradients), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}; give another file to write") from None
    if options.json:
        print(json.dumps(_as_json(report, options.gradients), indent=2))
    else:
        table.show(report, top, shutil.get_terminal_size((100, 24)).columns, sys.stdout.isatty())
    return 0


def _compressors(specs: Any) -> dict[str, Compressor]:
    try:
        return {spec: parse(spec) for spec in specs}
    except ValueError as error:
        raise CommandError(str(error)) from None


def _gradients(source: str) -> gradients.Named:
    script = re.fullmatch(r"(.+\.py)(?::(\w+))?", source)
    try:
        if script:
            with torch.enable_grad():
                return gradients.compute(script[1], script[2] or "build")
        return gradients.read(source)
    except ValueError as error:
        raise CommandError(str(error)) from None


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
    finite = {}
    for name, gradient in found.items():
        bad = int((~gradient.isfinite()).sum())
        if not bad:
            finite[name] = gradient
            continue
        print(
            f"gradzip inspect: {name}: left out, {bad} of {gradient.numel()} elements are not finite", file=sys.stderr
        )
    if not finite:
        raise CommandError("got no gradient that is finite, expected one: capture another step")
    return finite


def _as_json(report: cells.Report, source: str) -> dict[str, Any]:
    return {
        "gradients": source,
        "version": gradzip.__version__,
        "threads": torch.get_num_threads(),
        "warm": report.warm,
        "totals": [_facts(method, report.totals[method]) for method in report.methods],
        "layers": [
            {
                "name": layer,
                "shape": list(report.shapes[layer]),
                "dtype": report.dtypes[layer],
                "methods": [_facts(method, report.cells[layer, method]) for method in report.methods],
            }
            for layer in report.layers
        ],
    }


def _facts(method: str, cell: cells.Cell) -> dict[str, Any]:
    """A cell in JSON types. Numbers that are not finite are None."""
    numbers = {
        "error": cell.error,
        "first_error": cell.first_error,
        "cosine": cell.cosine,
        "ratio": cell.ratio,
        "zeros": cell.zeros / cell.numel,
        "clamped": math.nan if cell.clamped is None else cell.clamped,
        "encode_seconds": cell.encode,
        "decode_seconds": cell.decode,
        "encode_gb_per_s": cell.dense_nbytes / cell.encode / 1e9 if cell.encode else math.nan,
        "decode_gb_per_s": cell.dense_nbytes / cell.decode / 1e9 if cell.decode else math.nan,
    }
    return {
        "method": method,
        "compressed": cell.compressed,
        "elements": cell.numel,
        "bytes": cell.nbytes,
        "bytes_dense": cell.dense_nbytes,
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
    }
