#!/usr/bin/env python
"""Replay what the papers claim, and set their figures beside ours: hits and misses alike.

ResNet-20 trains for 500 steps, ResNet-18 and AlexNet for 60 each. What the papers say of gradients is then measured on
theirs, and what they say of sizes is computed from the shapes of their networks. Speed and accuracy are measured
elsewhere: benchmarks/training.py and examples/train.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import papers_acp
import papers_atomo
import papers_fft
import papers_gradiveq
from arguments import output_file
from gradients import data
from papers_capture import QUICK, RUNS, Captured, capture
from papers_results import Results, table, write_page
from result_files import ResultsError
from transforms import progress

PAPERS: dict[str, ModuleType] = {
    "fft": papers_fft, "gradiveq": papers_gradiveq, "atomo": papers_atomo, "acp": papers_acp,
}  # fmt: skip
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"

EXAMPLES = """\
examples:
  python benchmarks/papers.py --quick                          all papers after a few steps, digits: a minute
  python benchmarks/papers.py --data cifar-10-batches-bin      all papers: five minutes
  python benchmarks/papers.py --only atomo --only acp          two of them, with scikit-learn's digits
  python benchmarks/papers.py --data cifar-10-batches-bin --json benchmarks/results/papers.json \\
      --png-dir docs/images --write                            and refill docs/results.md

--json PATH is written after each paper. The same command continues an interrupted run: it measures what the file lacks,
and again what --only names.
"""


def fail(message: str) -> NoReturn:
    print(f"papers.py: error: {message}", file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"{message}; see --help")


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        prog="papers.py", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        parser.error("--png-dir needs matplotlib: pip install matplotlib, or leave --png-dir out")
    return args


def measure(args: argparse.Namespace, dataset: data.Images, results: Results) -> None:
    """Study the papers that are missing, or named by --only. Trains each network when the first of them needs it."""
    runs = QUICK if args.quick else RUNS
    captured: dict[str, Captured] = {}
    for name in args.only or [name for name in PAPERS if name not in results.papers]:
        paper, begin = PAPERS[name], time.monotonic()
        for model, title in paper.NEEDS.items():
            if model not in captured:
                with progress(f"training {title}, {dataset.name}") as report:
                    captured[model] = capture(runs[model], dataset, args.cache, report)
        with progress(paper.TITLE) as report:
            study = paper.study(captured)
            report(1.0)
        results.add(name, study, time.monotonic() - begin)


def main() -> None:
    args = parse_arguments()
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
            from papers_pictures import draw

            for name in args.only or PAPERS:
                draw(name, results.papers[name]["picture"], args.png_dir / f"results-{name}.png")
        if args.write:
            write_page(PAGE, results)
    except (data.DataError, ResultsError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        kept = args.json and args.json.exists()
        which = f"; {args.json} has the papers that are done, and the same command continues" if kept else ""
        print(f"papers.py: interrupted{which}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
