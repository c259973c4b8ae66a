"""Train networks to the end with each method, and compare test accuracy with the bytes that were sent.

Workers are simulated in one process (`gradzip.LocalGroup`), through the same coroutines as in a real job, so accuracy
and bytes are those of as many ranks; steps are not timed. All methods train alike: network, data, order of examples,
learning rates and their schedule, seeds. Runs whose loss is not finite are shown as diverged.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import signal
import sys
from typing import Any

from benchmarks.common.progress import Progress
from benchmarks.common.results import ResultsError, provenance
from benchmarks.convergence import chart, report
from benchmarks.convergence.arguments import checked, parser
from benchmarks.convergence.jobs import BusyError, exclusive, run_all
from benchmarks.convergence.recipes import Run
from benchmarks.convergence.results import Results
from benchmarks.convergence.run import Record, work


def study(args: argparse.Namespace, results: Results) -> list[str]:
    """Do the runs that are not finished. Returns the titles of those that failed.

    Raises:
        BusyError: another process uses the folder of checkpoints.
    """
    pending = [run for run in args.runs if results.finished_epochs(run) < run.epochs]
    epochs_left = sum(run.epochs - results.finished_epochs(run) for run in pending)
    checkpoints = {run: args.work / f"{args.json.stem}-{run.stem}-{args.threads}.pt" for run in pending}
    jobs = {run: (run, args.data_of[run.recipe], args.threads, path) for run, path in checkpoints.items()}
    failed, ended = [], 0
    with (
        exclusive(args.work) as lock,
        Progress(epochs_left) as progress,
        contextlib.closing(run_all(work, jobs, args.jobs, lock)) as lines,
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


def described(run: Run, results: Results) -> str:
    """What a run has found until now, in a line."""
    record, settings = results.records[run.key], results.recipes[run.recipe]
    if record.diverged is not None:
        return f"{run.title}: diverged in epoch {len(record.scores) + 1}"
    score = f"{record.scores[-1]:.{settings['digits']}f}"
    return f"{run.title}: epoch {len(record.scores)} of {run.epochs}, {settings['measure']} {score}"


def conditions(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """The machine and versions, the same for all runs of a file; and all commits and commands that added to it."""
    about = provenance()
    commit = about.pop("commit")
    return {
        **about, "python": platform.python_version(), "threads": args.threads, "commits": [commit],
        "commands": [command],
    }  # fmt: skip


def main() -> None:
    parse = parser(__doc__)
    args = checked(parse)
    results = Results({} if args.report else conditions(args, parse.command), args.json)
    failed = []
    try:
        resumed = results.resume()
        if args.report and not resumed:
            parse.error(f"argument --report: {args.json}: no such file, expected results to report")
        if not args.report:
            results.plan(args.settings, args.runs)
            if resumed:
                print(f"continuing {args.json}", file=sys.stderr)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            failed = study(args, results)
        print(report.report(results), end="")
        if args.png:
            chart.draw(results, args.png)
    except ResultsError as error:
        parse.error(str(error))
    except BusyError as error:
        parse.error(f"{error} --work")
    except KeyboardInterrupt:
        kept = f"from the last finished epochs, in {args.json} and {args.work}"
        parse.fail(f"interrupted; to go on {kept}: {parse.command}", 130)
    if failed:
        parse.fail(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
