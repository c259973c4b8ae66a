"""Studies of real ranks: runs of variants with several learning rates and seeds, which a file of results continues."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.common import jobs
from benchmarks.common.arguments import Parser, at_least, data_path
from benchmarks.common.jobs import has_own_net
from benchmarks.common.progress import Progress
from benchmarks.common.results import ResultsError, provenance, write_json
from benchmarks.common.studies import Rows
from benchmarks.convergence.recipes import SIZES, Run, is_text
from benchmarks.sharded.rank import Job
from models import MODELS

_TEXT = SIZES["full"]["text"]
RECIPES = {"charlm": _TEXT, "charlm-small": _TEXT, "resnet8": SIZES["default"]["images"]}  # by network
BASELINE = "float32"
Variants = Mapping[str, dict[str, Any]]  # by name: options of a `Job`
KEYS = ("network", "optimizer", "variant", "lr", "seed")  # of a run


def add_arguments(parser: Parser, variants: Variants, lrs: Mapping[str, Sequence[float]], epochs: int) -> None:
    """Those of `study`. epochs: by default."""
    parser.add_argument("--variant", action="append", choices=variants, help="default: all; repeat for several")
    parser.add_argument("--optimizer", action="append", choices=lrs, help="default: all; repeat for several")
    shown = "; ".join(f"{optimizer}: {', '.join(f'{lr:g}' for lr in of)}" for optimizer, of in lrs.items())
    parser.add_argument(
        "--lr", action="append", type=float, metavar="LR", help=f"repeat for several (default: {shown})"
    )
    parser.add_argument("--seed", action="append", type=at_least(0), metavar="N", help="default: 0 and 1")
    networks = [network for network in RECIPES if is_text(network) or "sgd" in lrs]
    parser.add_argument("--network", choices=networks, default="charlm", help="default: charlm")
    parser.add_argument("--epochs", type=at_least(1), default=epochs, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=at_least(1), metavar="N", help="cut runs short, to try this out")
    parser.add_argument("--ranks", type=at_least(2), default=_TEXT.workers, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--data", metavar="PATH", help="a text, or a folder with CIFAR-10 (default: sources of torch.nn, or digits)"
    )


def study(
    front_end: str, variants: Variants, lrs: Mapping[str, Sequence[float]], args: Any, rows: Rows, command: str
) -> None:
    """Do the runs that the file does not have yet. Each variant once, then other seeds, then other learning rates.

    lrs: by optimizer, by default.
    """
    length = {"epochs": args.epochs, "cut": args.steps}
    of_network = [row for row in rows if row["network"] == args.network]
    if others := [row for row in of_network if any(row[key] != value for key, value in length.items())]:
        got = f"got a run of {others[0]['epochs']} epochs, {others[0]['steps']} steps"
        raise ResultsError(f"{args.json}: {got}, expected runs of one length; name another file")
    path = data_path(MODELS[args.network].data, [args.data] if args.data else [])
    recipe, text = RECIPES[args.network], is_text(args.network)
    optimizers = args.optimizer or [optimizer for optimizer in lrs if (optimizer == "sgd") != text]
    wanted = [
        (optimizer, variant, lr, seed)
        for place in range(max(map(len, lrs.values())))
        for seed in args.seed or recipe.seeds
        for optimizer in optimizers
        for lr in (args.lr or lrs[optimizer])[place : place + 1]
        for variant in args.variant or variants
    ]
    done = {tuple(row[key] for key in KEYS) for row in rows}
    left = [one for one in wanted if (args.network, *one) not in done]
    with Progress(len(left)) as progress:
        for optimizer, variant, lr, seed in left:
            progress.now(f"{optimizer}, {variant}, lr {lr:g}, seed {seed}")
            run = Run(
                "text" if text else "images", variant, lr, seed, args.network, args.epochs, args.ranks,
                recipe.batch_size, 1.0, optimizer, (),
            )  # fmt: skip
            epochs = run_job(Job(asdict(run), front_end, variants[variant], path, args.steps))
            row = {
                "network": args.network, "optimizer": optimizer, "variant": variant, "lr": lr, "seed": seed,
                "ranks": args.ranks, **length, "steps": epochs[-1]["steps"],
                "scores": [line["score"] for line in epochs],
                "losses": [round(loss, 5) for line in epochs for loss in line["losses"]],
                "sent": epochs[-1]["sent"], "wire": epochs[-1]["wire"] if has_own_net() else None,
                "seconds": round(epochs[-1]["seconds"], 1), **provenance(), "command": command,
            }  # fmt: skip
            rows.append(row)
            write_json(args.json, {"rows": rows})
            progress.note(f"{optimizer}, {variant}, lr {lr:g}, seed {seed}: {row['scores'][-1]:.4f}")


def run_job(job: Job, timeout: float = 1800) -> list[dict[str, Any]]:
    """Train. Returns what rank 0 writes: a line for each epoch. Raises JobError."""
    ranks = job.run["workers"]
    command = [*jobs.launcher(job.front_end, ranks), "benchmarks.sharded.rank", json.dumps(asdict(job))]
    return list(jobs.run([*jobs.network("none", ranks), *command], threads=1, timeout=timeout))


def best_of(rows: Rows, variants: Iterable[str]) -> dict[str, tuple[float, float, Rows]]:
    """Of each variant: the mean score over seeds at the learning rate where it is lowest, that rate, and its rows."""
    best = {}
    for variant in variants:
        by_lr: dict[float, Rows] = {}
        for row in rows:
            if row["variant"] == variant:
                by_lr.setdefault(row["lr"], []).append(row)
        scored = [(statistics.fmean(row["scores"][-1] for row in of_lr), lr, of_lr) for lr, of_lr in by_lr.items()]
        if scored:
            best[variant] = min(scored, key=lambda found: found[:2])
    return best
