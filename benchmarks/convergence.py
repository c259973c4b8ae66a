#!/usr/bin/env python
"""Train networks to the end with each method, and compare test accuracy with the bytes that were sent.

Workers are simulated in one process (`gradzip.LocalGroup`), through the same coroutines as in a real job, so accuracy
and bytes are those of as many ranks; steps are not timed. All methods train alike: network, data, order of examples,
learning rates and their schedule, seeds. Runs whose loss is not finite are shown as diverged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import convergence_report
from convergence_arguments import parse_arguments, parser
from convergence_jobs import BusyError, exclusive, run_all
from convergence_recipes import Run
from convergence_results import Results
from convergence_run import Record
from provenance import provenance
from result_files import ResultsError
from training_progress import Progress

RUN = Path(__file__).with_name("convergence_run.py")


def study(args: argparse.Namespace, results: Results) -> list[str]:
    """Do the runs that are not finished. Returns the titles of those that failed.

    Raises:
        BusyError: another process uses the folder of checkpoints.
    """
    pending = [run for run in args.runs if results.finished_epochs(run) < run.epochs]
    epochs_left = sum(run.epochs - results.finished_epochs(run) for run in pending)
    checkpoints = {run: args.work / f"{args.json.stem}-{run.stem}-{args.threads}.pt" for run in pending}
    requests = {run: request(run, args, checkpoint) for run, checkpoint in checkpoints.items()}
    failed, ended = [], 0
    with (
        exclusive(args.work) as lock,
        Progress(epochs_left) as progress,
        contextlib.closing(run_all([sys.executable, str(RUN)], requests, args.jobs, pass_fds=[lock])) as lines,
    ):
        for run, line in lines:
            if "step" in line:
                progress.now(f"{run.title}: step {line['step']} of {line['steps']}, loss {line['loss']:.3f}")
            elif "record" in line:
                before = results.finished_epochs(run)
                results.records[run.key] = Record(**line["record"])
                results.save()
                if (new := results.finished_epochs(run) - before) > 0:
                    progress.count += new - 1
                    progress.done(f"{described(run, results)}; {ended} of {len(pending)} runs ended")
            elif line["end"] is not None:
                failed.append(run.title)
                progress.note(f"{run.title}: failed: {line['end']}")
            else:
                ended += 1
                checkpoints[run].unlink(missing_ok=True)  # the file of results has it
    return failed


def request(run: Run, args: argparse.Namespace, checkpoint: Path) -> str:
    """What convergence_run.py needs to know about a run."""
    job = {
        "run": asdict(run), "data": args.data_of[run.recipe], "threads": args.threads,
        "checkpoint": str(checkpoint.absolute()),
    }  # fmt: skip
    return json.dumps(job)


def described(run: Run, results: Results) -> str:
    """What a run has found until now, in a line."""
    record, settings = results.records[run.key], results.recipes[run.recipe]
    if record.diverged is not None:
        return f"{run.title}: diverged in epoch {len(record.scores) + 1}"
    score = f"{record.scores[-1]:.{settings['digits']}f}"
    return f"{run.title}: epoch {len(record.scores)} of {run.epochs}, {settings['measure']} {score}"


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """The machine and versions, the same for all runs of a file; and all commits and commands that added to it."""
    about = provenance()
    commit = about.pop("commit")
    return {
        **about, "python": platform.python_version(), "threads": args.threads, "commits": [commit],
        "commands": [shlex.join(["python", *sys.argv])],
    }  # fmt: skip


def main() -> None:
    args = parse_arguments(__doc__)
    results = Results({} if args.report else conditions(args), args.json)
    try:
        resumed = results.resume()
        results.plan(args.settings, args.runs)
    except ResultsError as error:
        parser().error(str(error))
    if resumed and not args.report:
        print(f"continuing {args.json}", file=sys.stderr)
    if args.report and not resumed:
        parser().error(f"argument --report: {args.json}: no such file, expected results to report")
    failed = []
    if not args.report:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            failed = study(args, results)
        except BusyError as error:
            parser().error(f"{error} --work")
        except KeyboardInterrupt:
            print(
                f"convergence.py: interrupted; to go on from the last finished epochs, in {args.json} and {args.work}: "
                f"{shlex.join(['python', *sys.argv])}",
                file=sys.stderr,
            )
            sys.exit(130)
    print(convergence_report.report(results), end="")
    if args.png or args.write:
        show(args, results)
    if failed:
        sys.exit(f"convergence.py: error: failed: {'; '.join(failed)}")


def show(args: argparse.Namespace, results: Results) -> None:
    """Draw and write what the arguments ask for."""
    import convergence_chart

    if args.png:
        convergence_chart.draw(results, args.png)
    if args.write:
        try:
            convergence_report.write(results)
        except ResultsError as error:
            parser().error(str(error))
        convergence_chart.draw(results, convergence_report.picture(args.json))


if __name__ == "__main__":
    main()
