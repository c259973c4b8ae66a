"""The steps of gpu_check.sh: runs them within a budget of time, and writes what came of them to one JSON file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu_check.json"
MINUTES = 25
TAIL = 30  # lines of a failed step's output
WORKERS = 12  # processes of the tests, each with a CUDA context
NCCL = "test_nccl.py"  # has a step of its own: its jobs have several ranks

# What compute-sanitizer prints where it does not support the device, or is not installed completely.
NO_SANITIZER = re.compile(r"Device not supported|Unable to find .*injection|compute-sanitizer: (command )?not found")


@dataclass(frozen=True)
class Step:
    """A command with a share of the time.

    Args:
        seconds: it has as large a share of what is left as these have of all that are left.
        tool: program that it needs, beside Python.
        lacks: what the machine does not have for it. Empty: nothing.
        after: it is skipped unless one of these steps has passed. Those that are not to run do not count.
        tests: it runs pytest, and fails if no test passes.
    """

    name: str
    seconds: float
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    tool: str = ""
    lacks: str = ""
    after: tuple[str, ...] = ()
    tests: bool = False


@dataclass
class Outcome:
    """outcome: passed, failed, stopped (out of time), unavailable, or skipped."""

    name: str
    outcome: str
    seconds: float
    limit: float
    tests: dict[str, int] | None = None  # how many passed, failed, were skipped
    tail: list[str] = field(default_factory=list)  # of the output, unless it passed


def steps(arch: str, folder: Path, gpus: int = 1) -> list[Step]:
    """All steps. arch: of the device, as in "90"; folder: for files of results."""
    python = sys.executable
    build = [python, "setup.py", "build_ext", "--inplace"]
    # Only files with such tests: others need packages that a machine with a GPU may not have.
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.cuda" in path.read_text() and path.name != NCCL
    ]
    # Versions of torch and NumPy may be newer than those that the suite knows: what they deprecate is not an error.
    one_by_one = [python, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
    pytest = [*one_by_one]
    if importlib.util.find_spec("xdist"):
        pytest += ["-n", str(min(WORKERS, len(os.sched_getaffinity(0))))]
    tests = [*pytest, *files, "-m", "cuda"]
    # Without the largest sizes, and without front ends, where most kernels are those of NCCL and torch.
    of_kernels = [*pytest, *(file for file in files if file.startswith("tests/ops/")), "-m", "cuda and not slow"]
    sanitizer = ["compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all", "--tool"]
    # Kernels compiled by NVRTC are cached in the folder, so that they are compiled here at least once.
    nvrtc, nvcc = {"GRADZIP_CUDA": "nvrtc"}, {"GRADZIP_CUDA": "1", "GRADZIP_CUDA_ARCHS": arch}
    cache = {"GRADZIP_CACHE": str(folder / "cache")}
    builds = ("build_nvcc", "build_nvrtc")

    def timing(benchmark: str, results: str) -> list[str]:
        return ["-m", f"benchmarks.{benchmark}", "--device", "cuda", "--json", str(folder / results)]

    few = ["--rounds", "2", "--steps", "3"]  # steps, which a slow link makes long
    of_all = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    alone = "" if gpus > 1 else "one GPU"
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # ranks may share a GPU
    return [
        Step("build_nvrtc", 60, build, nvrtc),
        Step("tests_nvrtc", 160, tests, cache, after=("build_nvrtc",), tests=True),
        Step("build_nvcc", 120, build, nvcc, tool="nvcc"),
        Step("tests_nvcc", 170, tests, cache, after=("build_nvcc",), tests=True),
        # Each tensor gets memory of its own: the sanitizer does not see an access beyond a tensor within a block of
        # torch's cache.
        *(
            Step(
                tool, seconds, [*sanitizer, tool, *of_kernels],
                {**cache, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "compute-sanitizer", builds, tests=True,
            )
            for tool, seconds in (("memcheck", 150), ("racecheck", 150), ("synccheck", 90), ("initcheck", 90))
        ),
        Step("kernels", 140, [python, *timing("kernels", "kernels.json"), "--rounds", "3"], cache, after=builds),
        Step("training", 120, [python, *timing("step", "training.json")], cache, after=builds),
        Step(
            "nccl", 150, [*one_by_one, f"tests/front_ends/{NCCL}", "-m", "cuda"], cache, lacks="" if shared else alone,
            after=builds, tests=True,
        ),
        Step(
            "training_of_all", 100,
            [*of_all, *timing("step", "training_of_all.json"), "--model", "gpt2", *few, "block-float",
             "block-float:bits=4,rounding=nearest"],
            cache, lacks=alone, after=builds,
        ),
    ]  # fmt: skip


def search_path() -> str:
    """PATH with the programs of the CUDA toolkit."""
    toolkit = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return os.pathsep.join([os.environ.get("PATH", ""), f"{toolkit}/bin"])


def find(tool: str) -> str | None:
    """The path of a program, None if there is none."""
    return shutil.which(tool, path=search_path())


def execute(command: list[str], environment: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
    """Run a command, and end it and all it has started when the time is over. Return (status or None, its output)."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process)
        log.seek(0)
        return status, log.read()


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and all of its session that are left."""
    for number, seconds in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def counts(output: str) -> dict[str, int]:
    """How many tests passed, failed and so on, as pytest's last line says."""
    lines = [line for line in output.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    found = re.findall(r"(\d+) ([a-z]+)", lines[-1].partition(" in ")[0]) if lines else []
    return {word: int(number) for number, word in found}


def judge(step: Step, status: int | None, output: str) -> tuple[str, dict[str, int] | None]:
    """Return the outcome of a step that ran, and its tests. status: None if it was stopped."""
    tests = counts(output) if step.tests else None
    if step.tool == "compute-sanitizer" and NO_SANITIZER.search(output):
        return "unavailable", tests
    if status is None:
        return "stopped", tests
    return ("passed" if status == 0 and (tests is None or tests.get("passed")) else "failed"), tests


def run(
    todo: list[Step],
    seconds: float,
    report: Callable[[Outcome], None],
    environment: Mapping[str, str],
    logs: Path | None = None,
) -> list[Outcome]:
    """Run steps within `seconds`, which they share as `Step.seconds` says. What one leaves is shared by the next ones.

    logs: a folder for the whole output of each step.
    """
    deadline = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for number, step in enumerate(todo):
        left = max(0.0, deadline - time.monotonic())  # ending a step takes time, too
        limit = left * step.seconds / sum(later.seconds for later in todo[number:])
        done = Outcome(step.name, "skipped", 0.0, round(limit, 1))
        passed = {o.name for o in outcomes if o.outcome == "passed"}
        after = [earlier for earlier in step.after if earlier in {o.name for o in outcomes}]
        if step.lacks or (step.tool and not find(step.tool)):
            done.outcome, done.tail = "unavailable", [step.lacks or f"no {step.tool} on PATH or in CUDA_HOME/bin"]
        elif after and not passed.intersection(after):
            done.tail = [f"{' and '.join(after)} did not pass"]
        else:
            start = time.monotonic()
            status, output = execute(step.command, {**environment, **step.environment}, limit)
            done.seconds = round(time.monotonic() - start, 1)
            done.outcome, done.tests = judge(step, status, output)
            if done.outcome != "passed":
                done.tail = output.splitlines()[-TAIL:]
            if logs:
                (logs / f"{step.name}.log").write_text(output)
        outcomes.append(done)
        report(done)
    return outcomes


def show(done: Outcome) -> None:
    tests = "".join(f", {number} {word}" for word, number in (done.tests or {}).items())
    print(f"  {done.name:15} {done.outcome}, {done.seconds:.0f} of {done.limit:.0f} s{tests}", flush=True)
    for line in done.tail:
        print(f"    {line}", flush=True)


def document(about: dict[str, Any], outcomes: list[Outcome], folder: Path) -> dict[str, Any]:
    """The file: the machine, the steps, and the files that the benchmarks have written, as far as they came."""
    measured = {}
    for name in ("kernels", "training", "training_of_all"):
        path = folder / f"{name}.json"
        measured[name] = json.loads(path.read_text()) if path.exists() else None
    return {
        "about": about,
        "seconds": round(sum(o.seconds for o in outcomes), 1),
        "checks": {o.name: {k: v for k, v in asdict(o).items() if k != "name"} for o in outcomes},
        **measured,
    }


def said(*command: str) -> str:
    """What a command prints; empty if it does not exist or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def describe() -> dict[str, Any]:
    """The device and versions. Raises RuntimeError, with what to do, if torch sees no device."""
    remedy = "name a Python whose PyTorch is for CUDA, on a machine with a GPU: PYTHON=..."
    try:
        import torch
    except ImportError as error:
        raise RuntimeError(f"{sys.executable} has no PyTorch ({error}); {remedy}") from error
    if not torch.cuda.is_available():
        raise RuntimeError(f"PyTorch {torch.__version__} of {sys.executable} sees no GPU; {remedy}")
    driver, _, memory = said(
        "nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"
    ).partition(", ")
    version = re.search(r"release ([\d.]+)", said(find("nvcc") or "nvcc", "--version"))
    return {
        "device": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "arch": "{}{}".format(*torch.cuda.get_device_capability()),
        "memory": memory,
        "driver": driver,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "nvcc": version[1] if version else None,
        "python": platform.python_version(),
        "commit": said("git", "-c", "safe.directory=*", "describe", "--always", "--dirty"),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def main() -> int:
    usage = "gpu_check.sh [--minutes N] [--only STEP,...] [--logs FOLDER] [--list] [FILE]"
    parser = argparse.ArgumentParser(prog="gpu_check.sh", usage=usage)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--only", metavar="STEP,...", type=lambda names: names.split(","), default=[])
    parser.add_argument("--logs", metavar="FOLDER", type=Path)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    names = [step.name for step in steps("XX", Path("FOLDER"))]
    if unknown := [name for name in args.only if name not in names]:
        parser.error(f"got --only {unknown[0]}, expected some of {', '.join(names)}")
    if args.logs and not args.logs.is_dir():
        parser.error(f"got --logs {args.logs}, which is no folder; make it first")

    def wanted(*about: Any) -> list[Step]:
        return [step for step in steps(*about) if not args.only or step.name in args.only]

    if not args.minutes > 0:
        parser.error(f"got --minutes {args.minutes:g}, expected a number above 0")
    if not args.file.resolve().parent.is_dir():
        parser.error(f"got {args.file}, whose folder is missing; make it first")
    if args.list:
        todo = wanted("XX", Path("FOLDER"))
        share = args.minutes / sum(step.seconds for step in todo)
        for step in todo:
            print(f"{step.name:15} {60 * share * step.seconds:4.0f} s  {' '.join(step.command)}")
        return 0
    try:
        about = describe()
    except RuntimeError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    print(f"gpu_check: {about['device']}, driver {about['driver']}, torch {about['torch']}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        todo = wanted(about["arch"], Path(folder), about["gpus"])
        outcomes: list[Outcome] = []

        def report(done: Outcome) -> None:
            show(done)
            outcomes.append(done)  # a run that is interrupted leaves what it has found
            args.file.write_text(json.dumps(document(about, outcomes, Path(folder)), indent=1) + "\n")

        run(todo, 60 * args.minutes, report, {"PYTHONPATH": str(ROOT), "PATH": search_path()}, args.logs)
    print(f"gpu_check: results in {args.file}")
    return int(any(done.outcome in ("failed", "stopped") for done in outcomes))


if __name__ == "__main__":
    sys.exit(main())
