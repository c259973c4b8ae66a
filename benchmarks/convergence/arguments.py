"""The command line of benchmarks/convergence."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import data
from benchmarks.common.arguments import Parser, data_path, output_file, picture_file
from benchmarks.convergence.recipes import (
    BY_NAME,
    SIZES,
    Recipe,
    compressor,
    is_text,
    load_data,
    runs_of,
    steps_per_epoch,
)
from models import MODELS
from train import cores, positive, seed

EXAMPLES = """\
examples:
  python -m benchmarks.convergence --quick                     five minutes: digits, and some of torch's sources
  python -m benchmarks.convergence --data cifar-10-batches-bin --data tinyshakespeare.txt --json study.json
                                                               three hours on two cores; the same command continues
  python -m benchmarks.convergence --only images --compression none --compression topk:theta=0.9 --lr 0.1 \\
      --seed 0 --data cifar-10-batches-bin --json study.json   two runs, as a part of the same study
  python -m benchmarks.convergence --full --data cifar-10-batches-bin --data tinyshakespeare.txt --json full.json
                                                               ResNet-20 and charlm: days on two cores
  python -m benchmarks.convergence --report --json study.json --png study.png
                                                               tables and curves of what is done, no training

SPEC is that of make train, with three additions: 10% stands for a tenth of the steps of a run; theta may be a schedule
of steps: fft-range:theta={0:0.9,50%:0.0}; and local(every=30):phases:0=none,5%=qsgd averages differences of parameters
every 30 steps in the last phase, and gradients before.

--json PATH is written after each epoch, and so is a checkpoint of each run, in PATH.work. The same command continues an
interrupted study, bit for bit, at the last finished epoch of each run. Other methods, learning rates and seeds are
added to it. Every method trains with the same learning rates; the tables show each at its best one.
"""


def method(text: str) -> str:
    """Check a spec. Raises ArgumentTypeError."""
    try:
        compressor(text, steps=1000)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parser(description: str | None = None) -> Parser:
    parser = Parser("convergence", description, EXAMPLES)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const="quick", help="small data, small networks")
    size.add_argument(
        "--full", dest="size", action="store_const", const="full", help="larger networks, more learning rates"
    )
    recipes = list(SIZES["full"])
    parser.add_argument(
        "--only",
        metavar="RECIPE",
        choices=recipes,
        help=f"one of {', '.join(recipes)} (default: all without local steps)",
    )
    several = {"action": "append", "metavar": "SPEC", "type": method}
    parser.add_argument("--compression", **several, help="a method; repeat for several (default: those of the recipe)")
    several = {"action": "append", "metavar": "X", "type": positive(float)}
    parser.add_argument(
        "--lr", **several, help="a peak learning rate; repeat for several (default: those of the recipe)"
    )
    several = {"action": "append", "metavar": "N", "type": seed}
    parser.add_argument(
        "--seed", **several, help="of weights and data order; repeat for several (default: those of the recipe)"
    )
    number: dict[str, Any] = {"type": positive(int), "metavar": "N"}
    parser.add_argument("--epochs", **number, help="passes over the data (default: that of the recipe)")
    parser.add_argument("--workers", **number, help="simulated ranks (default: 4)")
    parser.add_argument(
        "--data", action="append", default=[], metavar="PATH",
        help="a folder with CIFAR-10's binary version (--quick: default scikit-learn's digits), or a text (default: "
        "sources of torch.nn); give both for both",
    )  # fmt: skip
    parser.add_argument(
        "--json", metavar="PATH", type=output_file, default=Path("results_convergence.json"),
        help="keep results here, and continue them (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--work", metavar="DIR", type=Path, help="keep checkpoints here (default: PATH.work)")
    parser.add_argument("--jobs", default=cores(), **number, help="runs at a time (default: %(default)s, the cores)")
    parser.add_argument("--threads", default=1, **number, help="torch threads of a run (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="do not train: only show what is done")
    parser.add_argument("--png", metavar="PATH", type=picture_file, help="draw the curves")
    return parser


def checked(parse: Parser) -> argparse.Namespace:
    """The checked arguments of the process, with `runs`, and by recipe `data_of` and `settings`. Exits for others."""
    args = parse.parse_args()
    args.size = args.size or "default"
    args.work = args.work or args.json.with_name(args.json.name + ".work")
    for path in args.data:
        if not Path(path).exists():
            parse.error(f"argument --data: {path}: no such file or folder")
    if args.lr and not args.only:
        parse.error("argument --lr: expected --only as well, because recipes have different optimizers")
    names = [args.only] if args.only else [name for name in SIZES[args.size] if name not in BY_NAME]
    chosen = {name: customized(SIZES[args.size][name], args) for name in names}
    args.data_of, args.settings = {}, {}
    for name, recipe in chosen.items() if not args.report else ():
        path = data_path(MODELS[recipe.network].data, args.data)
        if path is None and not is_text(recipe.network) and args.size != "quick":
            parse.error(
                f"{name} trains on CIFAR-10: got no folder, expected --data DIR with its binary version, --quick or "
                "--only text"
            )
        try:
            dataset = load_data(recipe, path)
        except data.DataError as error:
            parse.error(str(error))
        if not steps_per_epoch(recipe, dataset):
            parse.error(
                f"{name}: got {len(dataset)} {dataset.unit}, expected at least {recipe.workers} x {recipe.batch_size}, "
                "one step of all workers; give more data, or fewer --workers"
            )
        args.data_of[name], args.settings[name] = path, settings(recipe, dataset)
    args.runs = runs_of(chosen)
    return args


def customized(recipe: Recipe, args: argparse.Namespace) -> Recipe:
    """The recipe with what the command line replaces."""
    given = {
        "methods": args.compression, "lrs": args.lr, "seeds": args.seed, "epochs": args.epochs, "workers": args.workers,
    }  # fmt: skip
    lists = {name: tuple(dict.fromkeys(value)) for name, value in given.items() if isinstance(value, list)}
    return replace(recipe, **{name: value for name, value in given.items() if value} | lists)


def settings(recipe: Recipe, dataset: data.Images | data.Text) -> dict[str, Any]:
    """What all runs of a recipe in one file have in common."""
    return {
        "network": recipe.network, "optimizer": recipe.optimizer, "betas": list(recipe.betas), "data": dataset.name,
        "examples": len(dataset), "workers": recipe.workers, "batch_size": recipe.batch_size,
        "epochs": recipe.epochs, "steps": steps_per_epoch(recipe, dataset),
        "measure": dataset.measure.label, "digits": dataset.measure.digits,
        "lower_is_better": is_text(recipe.network), "margin": recipe.margin,
    }  # fmt: skip
