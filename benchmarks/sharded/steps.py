"""Time steps of FSDP2 whose collectives are quantized, on slow networks, beside what `gradzip advise` predicts.

All variants are in the memory of one job, and take turns in each step, which all ranks begin together. A step is rank
0's: zero_grad, forward and backward pass, optimizer. All compute with float32: a CPU computes slowly with bfloat16, so
the variant of that name only sends it. The floor gathers and reduces nothing. A prediction knows the floor, the
measured link, and the time of the codec on the network's gradients.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import jobs
from benchmarks.common.arguments import Parser, at_least, data_path
from benchmarks.common.progress import Progress
from benchmarks.common.results import RESULTS, ROOT, Blocks, link_of, provenance, stored_rows, write_json
from benchmarks.common.studies import Rows, block, run_study
from benchmarks.common.tables import markdown
from benchmarks.training.variants import bandwidth
from gradzip.advice.cost import Compressed, Layer, Step
from gradzip.cli.sharded import NAMES, QUANTIZED, ShardedAdvice, call_of, short
from models import MODELS

EXAMPLES = """\
examples:
  python -m benchmarks.sharded.steps --data cifar-10-batches-bin --data tinyshakespeare.txt     minutes, as root
  python -m benchmarks.sharded.steps --network charlm-small --rate none --steps 3 --json /tmp/try.json
"""
FILE = RESULTS / "sharded_steps.json"
PAGE = ROOT / "docs" / "links.md"
START = "<!-- table: python -m benchmarks.sharded.steps --write -->\n\n"
FLOOR = "nothing is sent"
STOCK = {name: spec for spec, name in NAMES.items()}  # FSDP2's own: float32, bfloat16
FLOAT32, BFLOAT16 = STOCK

# What is timed: also the arguments of `quantize` that are advised.
VARIANTS: dict[str, tuple[str | None, str, str | None] | None] = {
    FLOOR: None, FLOAT32: None, BFLOAT16: None, **{short(call_of(*arguments)): arguments for arguments in QUANTIZED}
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What the ranks of a job do, with all variants."""

    network: str
    data: str | None
    batch_size: int
    warmup: int
    steps: int


def run_job(job: Job, rate: str, ranks: int, timeout: float) -> dict[str, Any]:
    """Time steps. Returns what rank 0 writes (step_rank.py). Raises JobError."""
    command = [
        *jobs.network(rate, ranks), *jobs.launcher("fsdp", ranks), "benchmarks.sharded.step_rank",
        json.dumps(asdict(job)),
    ]  # fmt: skip
    for line in jobs.run(command, 1, timeout):
        return line
    raise jobs.JobError("ended without results")


def predicted(row: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step by variant, as `gradzip advise` predicts them from the floor, the link and the codec."""
    step = Step((Layer("", (row["parameters"],), 0.0),), statistics.median(row["seconds"][FLOOR]))
    costs = {spec: [Compressed(**codec)] for spec, codec in row["codecs"].items()}
    advice = ShardedAdvice(step, link_of(row["link"]), costs, row["modules"], gloo=True)
    by_call = {call: prediction.seconds for call, prediction in advice.rows}
    names = STOCK | {name: call_of(*arguments) for name, arguments in VARIANTS.items() if arguments}
    return {name: by_call[call] for name, call in names.items()}


def tables(rows: Rows) -> Iterator[str]:
    """For each network and rate: steps of the variants, how many times as fast as FSDP2's own, and predictions."""
    header = ["", "ms (range)", "× float32", "× bfloat16", "MB on the wire", "predicted, ms", "error, %"]
    errors = []
    for row in rows:
        yield (
            f"{row['network']}, {row['parameters'] / 1e6:.1f} M parameters, {row['ranks']} ranks, "
            f"{bandwidth(row['rate'])}, medians of {row['steps']} steps (`{FILE.name}`):"
        )
        yield ""
        foreseen, cells = predicted(row), []
        medians = {name: statistics.median(seconds) for name, seconds in row["seconds"].items()}
        for name, seconds in medians.items():
            times = [f"{medians[own] / seconds:.2f}" for own in STOCK]
            sent = row["wire"][name]
            low, high = (1e3 * extreme(row["seconds"][name]) for extreme in (min, max))
            wire = "" if sent is None else f"{sent / 1e6:.2f}"
            cell = [name, f"{1e3 * seconds:.0f} ({low:.0f}–{high:.0f})", *times, wire]
            if name in foreseen:
                errors.append(round(100 * (foreseen[name] / seconds - 1)) or 0)  # without a negative zero
                cell += [f"{1e3 * foreseen[name]:.0f}", f"{errors[-1]:+d}".replace("-", "−")]
            cells.append([*cell, *[""] * (len(header) - len(cell))])
        yield from markdown(header, cells)
        yield ""
    sizes = list(map(abs, errors))
    yield f"Of {len(sizes)} errors, the median is {statistics.median(sizes):.0f} % and the largest {max(sizes)} %."


def blocks() -> Blocks:
    """The block of docs/links.md."""
    return {(PAGE, START): block(tables(stored_rows(FILE)))}


def main() -> None:
    parser = Parser("sharded.steps", __doc__, EXAMPLES)
    number = {"type": at_least(1), "metavar": "N"}
    parser.add_argument("--network", action="append", choices=MODELS, help="default: charlm and resnet18")
    parser.add_argument("--rate", action="append", metavar="RATE", help="default: 100mbit and 1gbit; none: no limit")
    parser.add_argument("--ranks", default=4, **number, help="default: %(default)s")
    parser.add_argument("--batch-size", default=16, **number, help="examples of a rank (default: %(default)s)")
    parser.add_argument("--warmup", default=2, **number, help="untimed steps of each variant (default: %(default)s)")
    parser.add_argument("--steps", default=7, **number, help="timed steps of each variant (default: %(default)s)")
    parser.add_argument("--timeout", default=1200, **number, help="seconds of a job (default: %(default)s)")
    parser.add_argument("--data", action="append", default=[], metavar="PATH", help="CIFAR-10's folder, or a text")
    run_study(parser, FILE, measure, tables, blocks)


def measure(args: Any, rows: Rows, command: str) -> None:
    """Time what the file does not have yet, of each network and rate."""
    done = {(row["network"], row["rate"], row["ranks"]) for row in rows}
    networks, rates = args.network or ("charlm", "resnet18"), args.rate or ("100mbit", "1gbit")
    cells = [cell for cell in itertools.product(networks, rates) if (*cell, args.ranks) not in done]
    with Progress(len(cells)) as progress:
        for network, rate in cells:
            if rate != "none" and (reason := jobs.shaping_error(rate, args.ranks)):
                raise jobs.JobError(f"--rate {rate}: {reason}")
            progress.now(f"{network}, {rate}")
            path = data_path(MODELS[network].data, args.data)
            job = Job(network, path, args.batch_size, args.warmup, args.steps)
            found = run_job(job, rate, args.ranks, args.timeout)
            about = {"network": network, "rate": rate, "ranks": args.ranks, "batch_size": args.batch_size}
            rows.append(about | {"steps": args.steps, **found, **provenance(), "command": command})
            write_json(args.json, {"rows": rows})
            progress.done(f"{network}, {rate}")


if __name__ == "__main__":
    main()
