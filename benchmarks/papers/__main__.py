"""Replay what the papers claim, and set their figures beside ours: hits and misses alike.

ResNet-20 trains for 500 steps, ResNet-18 and AlexNet for 60 each. What the papers say of gradients is then measured on
theirs, and what they say of sizes is computed from the shapes of their networks. Speed and accuracy are measured
elsewhere: benchmarks/training and examples/train.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import data
from benchmarks.common.arguments import Parser, output_file
from benchmarks.common.progress import tenths
from benchmarks.common.results import RESULTS, ROOT, Blocks, ResultsError, replace_blocks, stored
from benchmarks.papers import acp, atomo, fft, gradiveq, pictures
from benchmarks.papers.capture import QUICK, RUNS, Captured, capture
from benchmarks.papers.results import Results, blocks_of, table

PAPERS: dict[str, ModuleType] = {
    "fft": fft, "gradiveq": gradiveq, "atomo": atomo, "acp": acp,
}  # fmt: skip
PAGE, STORED = ROOT / "docs" / "results.md", RESULTS / "papers.json"

EXAMPLES = """\
examples:
  python -m benchmarks.papers --quick                          all papers after a few steps, digits: a minute
  python -m benchmarks.papers --data cifar-10-batches-bin      all papers: five minutes
  python -m benchmarks.papers --only atomo --only acp          two of them, with scikit-learn's digits
  python -m benchmarks.papers --data cifar-10-batches-bin --json benchmarks/results/papers.json \\
      --png-dir docs/images --write                            and refill docs/results.md

--json PATH is written after each paper. The same command continues an interrupted run: it measures what the file lacks,
and again what --only names.
"""


def parse_arguments(parser: Parser) -> argparse.Namespace:
    parser.add_argument("--data", metavar="DIR", help="folder with CIFAR-10's binary version (default: digits)")
    parser.add_argument("--only", metavar="PAPER", action="append", choices=PAPERS, help=f"one of {', '.join(PAPERS)}")
    parser.add_argument("--json", metavar="PATH", type=output_file, help="keep results here, and continue them")
    parser.add_argument("--png-dir", metavar="DIR", type=Path, help="draw results-PAPER.png here (needs matplotlib)")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/results.md, between its marks")
    parser.add_argument("--cache", metavar="DIR", type=Path, help="keep gradients here, and find them here: 0.4 GB")
    parser.add_argument("--quick", action="store_true", help="train for a few steps only")
    args = parser.parse_args()
    if args.png_dir and not args.png_dir.is_dir():
        parser.error(f"--png-dir {args.png_dir}: expected a folder that exists")
    if args.png_dir and not importlib.util.find_spec("matplotlib"):
        parser.error("argument --png-dir: matplotlib is not installed; pip install '.[bench]', or leave this out")
    return args


def measure(args: argparse.Namespace, dataset: data.Images, results: Results) -> None:
    """Study the papers that are missing, or named by --only. Trains each network when the first of them needs it."""
    runs = QUICK if args.quick else RUNS
    captured: dict[str, Captured] = {}
    for name in args.only or [name for name in PAPERS if name not in results.papers]:
        paper, begin = PAPERS[name], time.monotonic()
        for model, title in paper.NEEDS.items():
            if model not in captured:
                with tenths(f"training {title}, {dataset.name}") as report:
                    captured[model] = capture(runs[model], dataset, args.cache, report)
        with tenths(paper.TITLE) as report:
            study = paper.study(captured)
            report(1.0)
        results.add(name, study, time.monotonic() - begin)


def blocks() -> Blocks:
    """The blocks of docs/results.md, from benchmarks/results/papers.json."""
    with stored(STORED) as content:
        results = Results(content["conditions"], STORED)
    results.resume()
    return blocks_of(PAGE, results)


def main() -> None:
    parser = Parser("papers", __doc__, EXAMPLES)
    args = parse_arguments(parser)
    runs = QUICK if args.quick else RUNS
    try:
        dataset = data.images(args.data)
        conditions = {"data": dataset.name, "runs": [asdict(run) for run in runs.values()]}
        results = Results(conditions, args.json)
        results.resume()
        measure(args, dataset, results)
        for name in args.only or PAPERS:
            print(f"\n{PAPERS[name].TITLE}\n", *table(results.rows(name)), sep="\n")
        if args.png_dir:
            for name in args.only or PAPERS:
                pictures.draw(name, results.papers[name]["picture"], args.png_dir / f"results-{name}.png")
        if args.write:
            replace_blocks(blocks_of(PAGE, results))
    except (data.DataError, ResultsError, OSError) as error:
        parser.fail(str(error), 2)
    except KeyboardInterrupt:
        kept = args.json and args.json.exists()
        which = f"; {args.json} has the papers that are done, and the same command continues" if kept else ""
        parser.fail(f"interrupted{which}", 130)


if __name__ == "__main__":
    main()
