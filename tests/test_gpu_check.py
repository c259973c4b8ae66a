"""scripts/gpu_check.py as far as that goes without a GPU: budget, outcomes, and the file of results."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import kernels
import step

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "gpu_check.sh"

spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
gpu_check = importlib.util.module_from_spec(spec)
sys.modules["gpu_check"] = gpu_check  # dataclasses look there
spec.loader.exec_module(gpu_check)
Step, Outcome = gpu_check.Step, gpu_check.Outcome


def start(*arguments):
    return subprocess.run(
        ["bash", SCRIPT, *arguments], env=dict(os.environ, PYTHON=sys.executable), capture_output=True, text=True
    )


def shell(name, text, **options):
    options.setdefault("seconds", 1)
    return Step(name, command=["bash", "-c", text], **options)


def ran(*todo, seconds=100.0):
    return gpu_check.run(list(todo), seconds, lambda done: None, {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_no_gpu_is_a_one_line_error(tmp_path):
    done = start(tmp_path / "results.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "sees no GPU; name a Python" in done.stderr
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--minutes", "0"], "got --minutes 0, expected a number above 0"),
        (["--minutes", "long"], "argument --minutes: invalid float value: 'long'"),
        (["/nowhere/at/all.json"], "got /nowhere/at/all.json, whose folder is missing"),
    ],
)
def test_bad_arguments(arguments, says):
    done = start(*arguments)
    assert done.returncode == 2 and says in done.stderr


def test_all_steps_fit_the_budget():
    listed = start("--list", "--minutes", "5").stdout.splitlines()
    names = [line.split()[0] for line in listed]
    assert names == [
        "build_nvrtc", "tests_nvrtc", "build_nvcc", "tests_nvcc", "memcheck", "racecheck", "synccheck", "initcheck",
        "kernels", "training",
    ]  # fmt: skip
    assert sum(float(line.split()[1]) for line in listed) == pytest.approx(300, abs=5)  # each is rounded
    todo = gpu_check.steps("90", Path("folder"))
    assert sum(s.seconds for s in todo) <= 60 * gpu_check.MINUTES == 25 * 60
    (command,) = (s.command for s in todo if s.name == "tests_nvcc")
    assert {f"tests/test_{name}.py" for name in ("arrays", "cuda", "streams")} <= {*command}
    for number, s in enumerate(todo):
        assert {*s.after} <= {earlier.name for earlier in todo[:number]}
        for part in s.command:
            assert not part.endswith(".py") or (ROOT / part).is_file()


@pytest.mark.parametrize("module", [kernels, step], ids=lambda module: module.__name__)
def test_benchmarks_have_the_arguments_that_are_passed(monkeypatch, capsys, module):
    (passed,) = (
        s.command for s in gpu_check.steps("90", Path("folder")) if s.command[1] == f"benchmarks/{module.__name__}.py"
    )
    monkeypatch.setattr(sys, "argv", [*passed[1:], "--rounds", "0", "--numel", "1"][: 99 if module is kernels else -2])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    error = capsys.readouterr().err
    assert "expected an even number" in error or "got --rounds 0, expected" in error, "the first thing that is wrong"


def test_budget_is_kept():
    """Of 2 seconds, a step that sleeps gets a half, however many processes it has started."""
    left = "sleep 31.4159 & sleep 31.4159"
    begin = time.monotonic()
    first, second = ran(shell("first", left, seconds=3), shell("second", "sleep 0.1", seconds=3), seconds=2)
    assert time.monotonic() - begin < 4
    assert (first.outcome, second.outcome) == ("stopped", "passed")
    assert first.limit == 1 and 0.5 < second.limit <= 1 and 1 <= first.seconds < 2 and 0.1 <= second.seconds < 1
    assert subprocess.run(["pgrep", "-f", "sleep 31.4159"], capture_output=True).returncode == 1


def test_outcomes():
    outcomes = ran(
        shell("good", "exit 0"),
        shell("bad", "for i in {1..99}; do echo line $i; done; exit 3"),
        shell("needs a tool", "exit 0", tool="no-such-tool"),
        shell("after good", "exit 0", after=("bad", "good")),
        shell("after bad", "exit 0", after=("bad",)),
        shell("variables", "[[ $COLOUR == red ]]", environment={"COLOUR": "red"}),
    )
    assert {o.name: o.outcome for o in outcomes} == {
        "good": "passed", "bad": "failed", "needs a tool": "unavailable", "after good": "passed",
        "after bad": "skipped", "variables": "passed",
    }  # fmt: skip
    assert outcomes[1].tail == [f"line {i}" for i in range(70, 100)] and outcomes[0].tail == []
    assert outcomes[2].tail == ["no no-such-tool on PATH or in CUDA_HOME/bin"]
    assert outcomes[4].tail == ["bad did not pass"]


# Last lines as pytest prints them, and what compute-sanitizer says where it cannot work.
@pytest.mark.parametrize(
    ("status", "output", "outcome", "tests"),
    [
        (0, "....\n93 passed, 1044 deselected in 71.20s (0:01:11)\n", "passed", {"passed": 93, "deselected": 1044}),
        (0, "ssss\n93 skipped, 1044 deselected in 7.20s\n", "failed", {"skipped": 93, "deselected": 1044}),
        (1, "FAILED tests/test_cuda.py\n1 failed, 92 passed in 9.1s\n", "failed", {"failed": 1, "passed": 92}),
        (2, "ImportError: no module\n", "failed", {}),
        (None, "....", "stopped", {}),
        (9, "5 passed in 1.0s\n========= ERROR SUMMARY: 2 errors\n", "failed", {"passed": 5}),
        (1, "========= Error: Device not supported. Please refer to the list of devices\n", "unavailable", {}),
    ],
)  # fmt: skip
def test_tests_must_have_passed(status, output, outcome, tests):
    a_step = Step("memcheck", 1, [], tool="compute-sanitizer", tests=True)
    assert gpu_check.judge(a_step, status, output) == (outcome, tests)


def test_one_file_has_everything(tmp_path):
    (tmp_path / "kernels.json").write_text('{"provenance": {"device": "X"}, "rows": [{"name": "select", "ms": 0.2}]}')
    outcomes = [
        Outcome("build_nvcc", "passed", 61.5, 220.0),
        Outcome("tests_nvcc", "failed", 9.0, 150.0, {"failed": 1, "passed": 92}, ["FAILED tests/test_cuda.py"]),
    ]
    written = gpu_check.document({"device": "X", "arch": "90"}, outcomes, tmp_path)
    assert json.loads(json.dumps(written)) == {
        "about": {"device": "X", "arch": "90"},
        "seconds": 70.5,
        "checks": {
            "build_nvcc": {"outcome": "passed", "seconds": 61.5, "limit": 220.0, "tests": None, "tail": []},
            "tests_nvcc": {
                "outcome": "failed", "seconds": 9.0, "limit": 150.0, "tests": {"failed": 1, "passed": 92},
                "tail": ["FAILED tests/test_cuda.py"],
            },
        },
        "kernels": {"provenance": {"device": "X"}, "rows": [{"name": "select", "ms": 0.2}]},
        "training": None,
    }  # fmt: skip


@pytest.mark.parametrize(("last", "status"), [("exit 0", 0), ("exit 1", 1)])
def test_a_run_on_a_described_machine(monkeypatch, tmp_path, capsys, last, status):
    """From arguments to the file and the exit status, with commands that need no GPU."""

    def steps(arch, folder):
        measured = f'echo \'{{"rows": ["{arch}"]}}\' >{folder}/kernels.json'
        return [shell("kernels", measured), shell("none", "exit 0", tool="no-such-tool"), shell("last", last)]

    path = tmp_path / "results.json"
    monkeypatch.setattr(gpu_check, "describe", lambda: {"device": "X", "arch": "90", "driver": "580", "torch": "2"})
    monkeypatch.setattr(gpu_check, "steps", steps)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--minutes", "1", str(path)])
    assert gpu_check.main() == status
    written = json.loads(path.read_text())
    assert written["kernels"] == {"rows": ["90"]} and written["training"] is None
    outcomes = {name: check["outcome"] for name, check in written["checks"].items()}
    assert outcomes == {"kernels": "passed", "none": "unavailable", "last": ("passed", "failed")[status]}
    assert capsys.readouterr().out.startswith("gpu_check: X, driver 580, torch 2\n  kernels      passed, ")


# The benchmark of steps


def test_resnet50_has_the_published_parameters():
    from gradzip import models

    with torch.device("meta"):
        shapes = sorted(tuple(p.shape) for p in step.resnet50().parameters())
    assert shapes == sorted(p.shape for p in models.MODELS["resnet50"]())


@pytest.mark.long
def test_step_times_are_measured(monkeypatch, tmp_path, capsys):
    path = tmp_path / "steps.json"
    arguments = ["--image-size", "32", "--batch-size", "2", "--steps", "1", "--rounds", "2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["step.py", *arguments, "acpsgd"])
    assert step.main() == 0
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    assert [*rows] == ["stock", "fp16 hook", "acpsgd"]
    assert rows["stock"]["added_ms"] == 0 and rows["acpsgd"]["ms"] > 0
    parameters = sum(p.numel() for p in step.resnet50().parameters())
    assert 4 * parameters / 200 < rows["acpsgd"]["nbytes"] < 4 * parameters / 50
    assert "acpsgd" in capsys.readouterr().out
