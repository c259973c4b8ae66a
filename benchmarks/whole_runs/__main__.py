"""Train whole runs on shaped networks, and compare them with what benchmarks/time_to_loss predicts.

`time_to_loss` multiplies the steps of a study with simulated workers by the time of some steps. Here, as many real
ranks train to the end through DDP, with the network, data, seed and learning rate of the study. The prediction takes
steps that are measured on the same network right before. Tests at the ends of epochs and loading of data do not count.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import jobs
from benchmarks.common.arguments import Parser, at_least, data_path, output_file
from benchmarks.common.progress import Progress
from benchmarks.common.results import RESULTS, Blocks, ResultsError, provenance, replace_blocks, stored_rows, write_json
from benchmarks.common.tables import markdown
from benchmarks.convergence.recipes import Run, compressor
from benchmarks.convergence.report import Table
from benchmarks.convergence.results import Row
from benchmarks.time_to_loss import PAGE, STUDIES, Contender, Study, contenders
from benchmarks.training import jobs as training_jobs
from benchmarks.training.variants import bandwidth
from benchmarks.whole_runs.rank import Job
from gradzip.methods.spec import unparse
from models import MODELS

EXAMPLES = """\
examples:
  sudo python -m benchmarks.whole_runs --study text --rate 50mbit --method ddp-fp16 \\
      --method block-float:bits=4,rounding=nearest --data tinyshakespeare.txt --json benchmarks/results/whole_runs.json
                                       five minutes on two cores: two runs of charlm-small
  python -m benchmarks.whole_runs --write --json benchmarks/results/whole_runs.json     the table of docs/benchmarks.md

Methods are those of the study, and ddp and ddp-fp16. The same command adds runs to the file that has others.
"""
START = "<!-- table of whole runs: python -m benchmarks.whole_runs --write -->\n\n"
FILE = RESULTS / "whole_runs.json"


def name_of(study: Study) -> str:
    return (study.file_of_others or study.file).removeprefix("convergence_").removesuffix(".json")


def study_named(name: str) -> Study:
    """The study with the name that `--study` takes."""
    return next(study for study in STUDIES if name_of(study) == name)


def run_of(study: Study, table: Table, row: Row, epochs: int | None) -> Run:
    """The study's run of a method, at its best learning rate and with the first seed."""
    settings = table.settings
    return Run(
        study.recipe, row.method, row.lr, 0, settings["network"], epochs or settings["epochs"], settings["workers"],
        settings["batch_size"], 1.0, settings["optimizer"], tuple(settings["betas"]),
    )  # fmt: skip


def parts_of(one: Contender, steps: int) -> list[tuple[str, int]]:
    """What averages a whole run: a method with its phases is one part, but local steps follow earlier phases."""
    if one.spec.startswith("ddp") or any(variant.startswith("local") for variant, _ in one.parts):
        return one.parts
    return [(f"ddp:{unparse(compressor(one.spec, steps))}", steps)]


def step_times(run: Run, one: Contender, rate: str, data: str | None, seconds: float) -> dict[str, float]:
    """Milliseconds of a step of each variant that a run consists of. Raises JobError."""
    found = {}
    for variant in dict.fromkeys(variant for variant, _ in one.parts):
        job = training_jobs.Job(
            run.network, rate, run.workers, (variant,), data, run.batch_size, run.seed, warmup=5, steps=1000,
            seconds=seconds, threads=1,
        )  # fmt: skip
        for line in training_jobs.run(job, timeout=900):
            if "variant" in line:
                found[variant] = statistics.median(line["result"]["ms"])
    return found


def train(run: Run, parts: list[tuple[str, int]], rate: str, data: str | None) -> Iterator[dict[str, Any]]:
    """Train a whole run. Yields what rank 0 writes. Raises JobError."""
    job = Job(asdict(run), parts, data)
    command = [
        *jobs.network(rate, run.workers), *jobs.launcher("ddp", run.workers), "benchmarks.whole_runs.rank",
        json.dumps(asdict(job)),
    ]  # fmt: skip
    return jobs.run(command, threads=1, timeout=1800)


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table: what is predicted, and what whole runs took."""
    header = ["study", "method", "network", "seconds: predicted, run", "", "score of the first seed: study, run"]
    cells = []
    for row in rows:
        study = study_named(row["study"])
        table = study.table()
        one = next(one for one in contenders(study) if one.spec == row["method"])
        ours, ran = one.seconds(row["ms"], len(row["seconds"]) * table.settings["steps"]), row["seconds"][-1]
        assert ours is not None
        share = f"{100 * (ran / ours - 1):+.0f} %".replace("-", "−")
        scores = f"{table.shown(one.row.records[0].scores[-1])}, {table.shown(row['scores'][-1])}"
        cells.append([study.title, one.name, bandwidth(row["rate"]), f"{ours:.0f}, {ran:.0f}", share, scores])
    yield from markdown(header, cells, left=3)


def blocks(path: Path = FILE) -> Blocks:
    """The block of docs/benchmarks.md, from a file of runs."""
    return {(PAGE, START): "\n".join(lines(stored_rows(path))) + "\n"}


def main() -> None:
    parser = Parser("whole_runs", __doc__, EXAMPLES)
    parser.add_argument("--study", choices=[name_of(study) for study in STUDIES], help="which runs to repeat")
    parser.add_argument("--method", action="append", metavar="SPEC", help="of the study; repeat for several")
    parser.add_argument("--rate", action="append", metavar="RATE", help="such as 50mbit, or none; repeat for several")
    parser.add_argument("--data", action="append", default=[], metavar="PATH", help="a folder or text of the study")
    parser.add_argument("--seconds", type=at_least(1), default=10, metavar="N", help="of measured steps (default: 10)")
    parser.add_argument("--epochs", type=at_least(1), metavar="N", help="a shorter run, to try this out")
    parser.add_argument("--json", metavar="PATH", type=output_file, default=FILE, help=f"(default: {FILE.name})")
    parser.add_argument("--write", action="store_true", help="write the table of docs/benchmarks.md")
    args = parser.parse_args()
    try:
        rows = stored_rows(args.json)
        if args.study:
            measure(parser, args, rows)
        print("\n".join(lines(rows)))
        if args.write:
            replace_blocks(blocks(args.json))
    except (ResultsError, jobs.JobError) as error:
        parser.fail(str(error))


def measure(parser: Parser, args: Any, rows: list[dict[str, Any]]) -> None:
    """Measure the runs that are asked for, and add them to the rows and the file."""
    study = study_named(args.study)
    table = study.table()
    known = {one.spec: one for one in contenders(study)}
    methods, rates = args.method or [], args.rate or ["none"]
    if unknown := [spec for spec in methods if spec not in known]:
        parser.error(f"--method: got {unknown[0]}, expected one of {', '.join(known)}")
    for rate in rates:
        if error := jobs.shaping_error(rate, table.settings["workers"]):
            parser.error(f"--rate {rate}: {error}")
    load_of = MODELS[table.settings["network"]].data
    data = data_path(load_of, args.data)
    if (found := len(load_of(data))) != (examples := table.settings["examples"]):
        parser.error(f"--data: got {found} examples, expected the {examples} of {table.settings['data']}")
    with Progress(len(methods) * len(rates)) as progress:
        for rate, spec in itertools.product(rates, methods):
            one, run = known[spec], run_of(study, table, known[spec].row, args.epochs)
            progress.now(f"{spec}, {rate}")
            ms = step_times(run, one, rate, data, args.seconds)
            row = {
                "study": args.study, "method": spec, "rate": rate, "ranks": run.workers, "lr": run.lr, "ms": ms,
                "seconds": [], "scores": [], **provenance(), "command": parser.command,
            }  # fmt: skip
            steps = run.epochs * table.settings["steps"]
            for line in train(run, parts_of(one, steps), rate, data):
                if not line.get("identical", True):
                    raise jobs.JobError(f"{spec}: the replicas differ")
                if "score" in line:
                    row["seconds"].append(round(line["seconds"], 2))
                    row["scores"].append(line["score"])
                    progress.note(
                        f"{spec}, {rate}: epoch {len(row['scores'])}, {row['seconds'][-1]} s, {row['scores'][-1]:.4g}"
                    )
            key = ("study", "method", "rate")
            rows[:] = [other for other in rows if any(other[k] != row[k] for k in key)] + [row]
            write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
