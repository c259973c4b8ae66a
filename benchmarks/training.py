#!/usr/bin/env python
"""Measure training steps on a slow network, with stock Horovod and DDP and with gradzip's methods.

Variants take turns, because times on shared machines drift: in each round, each variant trains for some steps in fresh
processes. The medians are over the steps of all rounds. A step is rank 0's zero_grad, forward, backward and optimizer
step. `compute` exchanges no gradients: the upper bound. A result counts only if all ranks end with the same parameters,
bit for bit, and with finite losses.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import gradzip
from provenance import provenance
from training_rank import MODELS, STOCK, data

HERE = Path(__file__).parent
SHAPED_NET = HERE.parent / "scripts" / "shaped_net.sh"
BATCH_SIZES = {"alexnet": 32}  # others: 16

EXAMPLES = """\
variants:
  compute        no exchange of gradients
  horovod        stock Horovod              horovod-fp16   with hvd.Compression.fp16
  ddp            stock DDP                  ddp-fp16       with fp16_compress_hook
                                            ddp-powersgd   with powerSGD_hook, rank 4
  horovod:SPEC   Horovod with a method of gradzip, for example horovod:fft-range:theta=0.9
  ddp:SPEC       DDP with a method of gradzip
  stock          the first six (the default)

examples:
  python benchmarks/training.py --rate 1gbit                     stock variants, digits, both models
  python benchmarks/training.py stock horovod:topk ddp:topk --model resnet18 --data cifar-10-batches-bin \\
      --rate 1gbit --rate 100mbit --json results.json            and two methods, on two networks, with CIFAR-10
  python benchmarks/training.py compute horovod horovod:fft-range --ranks 4 --rate none

Rates other than none need root, for scripts/shaped_net.sh. benchmarks/report.py makes README's table of the results.
"""


@dataclass
class Row:
    """The results of one variant: times in milliseconds, bytes per step and rank."""

    model: str
    rate: str
    variant: str
    rounds: list[list[float]] = field(default_factory=list)  # times of the steps of each round
    wire_bytes: list[float] = field(default_factory=list)  # for each round
    payload_bytes: float = 0.0
    parameters: int = 0
    errors: list[str] = field(default_factory=list)  # one for each failed round

    @property
    def ms(self) -> float:
        return self.deciles[4]

    @property
    def deciles(self) -> list[float]:
        return statistics.quantiles(itertools.chain(*self.rounds), n=10, method="inclusive")

    def report(self, ideal: Row | None, stock: Row | None) -> dict[str, object]:
        """All results of this row, for the JSON file. ideal, stock: the rows that it is compared with."""
        about: dict[str, object] = {k: v for k, v in asdict(self).items() if k not in ("rounds", "wire_bytes")}
        if self.rounds:
            about |= {
                "ms": self.ms,
                "ms_p20": self.deciles[1],
                "ms_p80": self.deciles[7],
                "ms_of_rounds": [statistics.median(steps) for steps in self.rounds],
                "speedup": stock.ms / self.ms if stock else None,
                "share_of_ideal": ideal.ms / self.ms if ideal else None,
                "wire_bytes": statistics.median(self.wire_bytes) if self.rate != "none" else None,
            }
        return about


class JobError(Exception):
    """A variant could not be measured. The message is one line."""


def launcher(variant: str, ranks: int) -> list[str]:
    """The launcher's command line for a variant."""
    if variant.startswith("horovod"):
        script = str(Path(sys.executable).with_name("horovodrun"))
        return [script, "--network-interface", "lo", "-np", str(ranks), sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def run_job(row: Row, args: argparse.Namespace) -> dict:
    """Run a variant once. Returns rank 0's results. Raises JobError."""
    batch_size = args.batch_size or BATCH_SIZES.get(row.model, 16)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            *launcher(row.variant, args.ranks), str(HERE / "training_rank.py"),
            f"--variant={row.variant}", f"--model={row.model}", f"--batch-size={batch_size}", f"--seed={args.seed}",
            f"--warmup={args.warmup}", f"--steps={args.steps}", f"--threads={args.threads}", f"--json={result}",
        ]  # fmt: skip
        if args.data:
            command.append(f"--data={Path(args.data).absolute()}")
        if row.rate != "none":
            command = [str(SHAPED_NET), row.rate, str(args.ranks), "--", *command]
        status, output = finish(command, args)
        if status != 0 or not result.exists():
            raise JobError(error_line(output) or f"ended with status {status} and no output")
        return json.loads(result.read_text())


def finish(command: list[str], args: argparse.Namespace) -> tuple[int, str]:
    """Run a command to its end. Returns its exit status and output. Raises JobError after the timeout."""
    # DDP must use loopback, as Horovod does.
    environment = dict(os.environ, OMP_NUM_THREADS=str(args.threads), GLOO_SOCKET_IFNAME="lo")
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as job:  # fmt: skip
        try:
            output, _ = job.communicate(timeout=args.timeout)
        except BaseException as error:
            # Launchers stop their ranks on SIGTERM, but not on SIGKILL.
            os.killpg(job.pid, signal.SIGTERM)
            try:
                job.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise JobError(f"not done after {args.timeout} s; see --timeout") from None
            raise
    return job.returncode, output


def error_line(output: str) -> str | None:
    """The most useful line of a failed job's output: the first exception's message, else the last line."""
    lines = [re.sub(r"^\[(rank)?\d+\](<std(out|err)>)?: ?", "", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    raised = (line for line in lines if re.match(r"(what\(\)|\S*(Error|Exception)): ", line))
    return next(raised, lines[-1] if lines else None)


def measure(row: Row, args: argparse.Namespace) -> str:
    """Run one round of a variant. Returns its outcome as text."""
    try:
        result = run_job(row, args)
        if not result["finite"]:
            raise JobError("a loss is not finite")
        if row.variant != "compute" and not result["identical"]:
            raise JobError("the replicas differ")
    except JobError as error:
        row.errors.append(str(error))
        return f"aborts: {error}"
    row.rounds.append(result["ms"])
    row.wire_bytes.append(result["wire_bytes"])
    row.payload_bytes = result["payload_bytes"]
    row.parameters = result["parameters"]
    return f"{statistics.median(result['ms']):.1f} ms per step"


def measure_all(args: argparse.Namespace) -> list[Row]:
    rows = [
        Row(model, rate, variant)
        for model, rate, variant in itertools.product(args.model, args.rate, args.variants)
    ]  # fmt: skip
    jobs = [
        (row, number)
        for _, group in itertools.groupby(rows, key=lambda row: (row.model, row.rate))
        for number, row in itertools.product(range(args.rounds), list(group))
    ]
    for done, (row, number) in enumerate(jobs, 1):
        start = time.perf_counter()
        outcome = measure(row, args)
        print(
            f"[{done}/{len(jobs)}] {row.model}, {row.rate}, round {number + 1}, {row.variant}: {outcome} "
            f"({time.perf_counter() - start:.0f} s)",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return rows


def reports(rows: list[Row]) -> list[dict]:
    def find(row: Row, variant: str) -> Row | None:
        same = (r for r in rows if (r.model, r.rate, r.variant) == (row.model, row.rate, variant) and r.rounds)
        return next(same, None)

    return [row.report(find(row, "compute"), find(row, "horovod")) for row in rows]


def markdown(reports: list[dict], ranks: int) -> Iterator[str]:
    """Yield the lines of a table for each model and network."""

    def cell(value: float | None, text: str, scale: float = 1.0) -> str:
        return "-" if value is None else format(value / scale, text)

    for (model, rate), group in itertools.groupby(reports, key=lambda report: (report["model"], report["rate"])):
        network = "unshaped loopback" if rate == "none" else f"{rate} per rank"
        group = list(group)
        parameters = max(report["parameters"] for report in group)
        yield f"\n**{model}** ({parameters / 1e6:.1f} M parameters), {ranks} ranks, {network}\n"
        yield "| variant | ms per step (p20–p80) | × speed of Horovod | share of ideal | wire MB | payload MB |"
        yield "|---|---:|---:|---:|---:|---:|"
        for report in group:
            aborts = ""
            if errors := report["errors"]:
                rounds = len(errors) + len(report.get("ms_of_rounds", ()))
                aborts = f"aborts in {len(errors)} of {rounds} rounds: {errors[0]}".replace("|", "\\|")
            if "ms" not in report:
                yield f"| {report['variant']} | {aborts} | | | | |"
                continue
            figures = f"{report['ms']:.1f} ({report['ms_p20']:.1f}–{report['ms_p80']:.1f})"
            yield (
                f"| {report['variant']} | {'; '.join(filter(None, (figures, aborts)))} "
                f"| {cell(report['speedup'], '.2f')} | {cell(report['share_of_ideal'], '.0%')} "
                f"| {cell(report['wire_bytes'], '.3f', 1e6)} | {cell(report['payload_bytes'], '.3f', 1e6)} |"
            )
    yield "\nBytes are per step and rank: wire as counted by the shaped loopback, payload as counted by each method."


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least {least}")
        return int(text)

    return parse


def variant(text: str) -> str:
    if text == "stock" or text in STOCK:
        return text
    front, _, spec = text.partition(":")
    if front not in ("horovod", "ddp"):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected stock, {', '.join(STOCK)}, horovod:SPEC or ddp:SPEC"
        )  # fmt: skip
    try:
        gradzip.parse(spec)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="*", metavar="VARIANT", type=variant, help="see below (default: stock)")
    parser.add_argument(
        "--model", action="append", choices=MODELS, help="repeat for several (default: resnet18 and alexnet)"
    )
    parser.add_argument(
        "--rate", action="append", metavar="RATE",
        help="bandwidth of each rank, for example 1gbit; none is unshaped loopback (the default); repeat for several",
    )  # fmt: skip
    parser.add_argument("--data", metavar="DIR", help="CIFAR-10's binary version (default: scikit-learn's digits, 8x8)")
    number = {"type": at_least(1), "metavar": "N"}
    parser.add_argument("--ranks", default=2, **number, help="(default: %(default)s)")
    parser.add_argument("--threads", default=1, **number, help="torch threads per rank (default: %(default)s)")
    parser.add_argument("--batch-size", **number, help="images per step and rank (default: 16; alexnet 32)")
    parser.add_argument(
        "--rounds", default=3, **number, help="rounds, in which each variant runs once (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", default=10, type=at_least(2), metavar="N", help="timed steps per round (default: %(default)s)"
    )
    parser.add_argument("--warmup", default=5, **number, help="untimed steps before them (default: %(default)s)")
    parser.add_argument("--seed", default=0, type=at_least(0), metavar="N", help="(default: %(default)s)")
    parser.add_argument("--timeout", default=900, **number, help="limit of one run, in seconds (default: %(default)s)")
    parser.add_argument("--json", metavar="PATH", type=Path, help="write results and provenance")
    parser.add_argument("--markdown", metavar="PATH", type=Path, help="write the printed tables")
    args = parser.parse_args()
    chosen = itertools.chain(*(STOCK if text == "stock" else [text] for text in args.variants or ["stock"]))
    args.variants = list(dict.fromkeys(chosen))
    args.model = list(dict.fromkeys(args.model or ["resnet18", "alexnet"]))
    args.rate = list(dict.fromkeys(args.rate or ["none"]))
    for path in filter(None, (args.json, args.markdown)):
        if path.is_dir() or not path.absolute().parent.is_dir():
            parser.error(f"got {path}, expected a file in a folder that exists")
    for model in args.model:
        try:
            dataset = MODELS[model].data(args.data)
        except data.DataError as error:
            parser.error(str(error))
        batch = args.batch_size or BATCH_SIZES.get(model, 16)
        if batch * args.ranks > len(dataset):
            parser.error(f"got a batch of {args.ranks} x {batch}, expected at most all {len(dataset)} {dataset.unit}")
    if version("horovod") is None and any(text.startswith("horovod") for text in args.variants):
        parser.error("Horovod is not installed; run make bootstrap, or name variants without it")
    for rate in args.rate:
        if rate != "none":
            shaped = subprocess.run(
                [SHAPED_NET, rate, str(args.ranks), "--", "true"], capture_output=True, text=True
            )  # fmt: skip
            if shaped.returncode:
                parser.error(f"--rate {rate}: {shaped.stderr.strip()}")
    return args


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends a running job
    about = {
        **provenance(), "horovod": version("horovod"), "python": platform.python_version(), "cores": os.cpu_count(),
        "data": "digits" if args.data is None else "cifar10", "ranks": args.ranks, "threads": args.threads,
        "rounds": args.rounds, "warmup": args.warmup, "steps": args.steps, "seed": args.seed,
        "command": shlex.join(["python", *sys.argv]),
    }  # fmt: skip
    print("  ".join(f"{key} {value}" for key, value in about.items()), file=sys.stderr)
    measured = reports(measure_all(args))
    tables = "\n".join(markdown(measured, args.ranks))
    print(tables)
    if args.markdown:
        args.markdown.write_text(tables.lstrip() + "\n")
    if args.json:
        args.json.write_text(json.dumps({"provenance": about, "rows": measured}, indent=1) + "\n")
    # A stock variant that aborts is a result; one of gradzip's methods that aborts is an error.
    failed = {report["variant"]: None for report in measured if report["errors"] and ":" in report["variant"]}
    if failed:
        sys.exit(f"training.py: error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
