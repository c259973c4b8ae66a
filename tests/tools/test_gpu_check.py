"""scripts/gpu_check.py as far as that goes without a GPU: budget, outcomes, and the file of results."""

import importlib.util
import itertools
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

import commands
from benchmarks import kernels, step
from gradzip.cli import models
from paths import ROOT

COVERS = [
    "scripts/gpu_check.*", "benchmarks/step.py", "benchmarks/kernels.py", "benchmarks/gpu.py", "docs/gpu.md",
    "benchmarks/results/gpu_check*.json",
]  # fmt: skip

spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
gpu_check = importlib.util.module_from_spec(spec)
sys.modules["gpu_check"] = gpu_check  # dataclasses look there
spec.loader.exec_module(gpu_check)
Step = gpu_check.Step
ABOUT = {"device": "X", "arch": "90", "gpus": 1, "driver": "580", "torch": "2"}


def shell(name, text, **options):
    return Step(name, **{"seconds": 1, "command": ["bash", "-c", text], **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_no_gpu_is_a_one_line_error(tmp_path):
    script, variables = ROOT / "scripts" / "gpu_check.sh", os.environ | {"PYTHON": sys.executable}
    done = commands.run("bash", script, tmp_path / "results.json", env=variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and "sees no GPU; name a Python" in done.stderr
    assert not (tmp_path / "results.json").exists()


def test_steps_fit_the_budget_and_name_what_is_there():
    todo = gpu_check.steps("90", Path("folder"))
    assert sum(s.seconds for s in todo) <= 60 * gpu_check.MINUTES
    names = [s.name for s in todo]
    (command,) = (s.command for s in todo if s.name == "tests_nvcc")
    assert {"tests/ops/test_arrays.py", "tests/ops/test_cuda.py", "tests/front_ends/test_gpu.py"} <= {*command}
    for number, s in enumerate(todo):
        assert {*s.after} <= {*names[:number]}
        assert all((ROOT / part).is_file() for part in s.command if part.endswith(".py"))
        modules = [part for part in s.command if part.startswith("benchmarks.")]
        assert all((ROOT / f"{module.replace('.', '/')}.py").is_file() for module in modules)
    assert all(file.startswith("tests/ops/") for s in todo if s.tool == "compute-sanitizer" for file in files_of(s))


def test_several_gpus_are_used():
    """Ranks between which NCCL is tested, and a training step of all; on one GPU, only where ranks may share it."""
    one, eight = ({s.name: s for s in gpu_check.steps("90", Path("folder"), gpus)} for gpus in (1, 8))
    assert all(one[name].lacks == "one GPU" and not eight[name].lacks for name in ("nccl", "training_of_all"))
    assert "tests/front_ends/test_nccl.py" in eight["nccl"].command
    command = eight["training_of_all"].command
    assert command[command.index("--nproc-per-node") + 1] == "8" and "benchmarks.step" in command


def test_a_step_alone_uses_the_build_that_is_there():
    lacking = shell("lacking", "exit 0", lacks="one GPU")
    alone, other = gpu_check.run([shell("alone", "exit 0", after=("build",)), lacking], 4, lambda done: None, {})
    assert (alone.outcome, other.outcome, other.tail) == ("passed", "unavailable", ["one GPU"])


def files_of(step):
    return [part for part in step.command if part.startswith("tests/")]


def test_what_a_step_leaves_is_shared_by_the_next_ones():
    todo = [shell(name, "true", seconds=1) for name in "abcd"]
    limits = [done.limit for done in gpu_check.run(todo, 4, lambda done: None, {})]
    assert limits[0] == 1 and all(1 <= earlier <= later for earlier, later in itertools.pairwise(limits))


def test_some_steps_alone(monkeypatch, tmp_path, capsys):
    """They keep their order, and their output is kept where the user wants it."""
    steps = [shell(name, f"echo {name}{name}") for name in "abc"]
    monkeypatch.setattr(gpu_check, "describe", lambda: ABOUT)
    monkeypatch.setattr(gpu_check, "steps", lambda arch, folder, gpus=1: steps)
    command = ["gpu_check.py", "--only", "c,a", "--logs", str(tmp_path), "--minutes", "1", str(tmp_path / "x.json")]
    monkeypatch.setattr(sys, "argv", command)
    assert gpu_check.main() == 0
    assert [*json.loads((tmp_path / "x.json").read_text())["checks"]] == ["a", "c"]
    assert {path.name: path.read_text() for path in tmp_path.glob("*.log")} == {"a.log": "aa\n", "c.log": "cc\n"}
    for arguments, message in (
        (["--only", "a,d"], "got --only d, expected some of a, b, c"),
        (["--logs", str(tmp_path / "none")], "which is no folder; make it first"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
        with pytest.raises(SystemExit, match="2"):
            gpu_check.main()
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", [kernels, step], ids=lambda module: module.__name__)
def test_benchmarks_have_the_arguments_that_are_passed(monkeypatch, capsys, tmp_path, module):
    passed, *_ = (s.command for s in gpu_check.steps("90", tmp_path) if module.__name__ in s.command)
    monkeypatch.setattr(sys, "argv", [*passed[2:], "--rounds", "0"])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert "argument --rounds: got '0', expected" in capsys.readouterr().err, "the first thing that is wrong"


def test_budget_is_kept():
    """Of 2 seconds, a step that sleeps gets a half, however many processes it has started."""
    left = "sleep 31.4159 & sleep 31.4159"
    begin = time.monotonic()
    todo = [shell("first", left, seconds=3), shell("second", "sleep 0.1", seconds=3)]
    first, second = gpu_check.run(todo, 2, lambda done: None, {})
    assert time.monotonic() - begin < 4
    assert (first.outcome, second.outcome) == ("stopped", "passed")
    assert first.limit == 1 and 0.5 < second.limit <= 1 and 1 <= first.seconds < 2 and 0.1 <= second.seconds < 1
    assert commands.run("pgrep", "-f", "sleep 31.4159").returncode == 1


# Last lines as pytest prints them, and what compute-sanitizer says where it cannot work.
@pytest.mark.parametrize(
    ("status", "output", "outcome"),
    [
        (0, "....\n93 passed, 1044 deselected in 71.20s (0:01:11)\n", "passed"),
        (0, "ssss\n93 skipped, 1044 deselected in 7.20s\n", "failed"),
        (1, "FAILED tests/ops/test_cuda.py\n1 failed, 92 passed in 9.1s\n", "failed"),
        (2, "ImportError: no module\n", "failed"),
        (None, "....", "stopped"),
        (9, "5 passed in 1.0s\n========= ERROR SUMMARY: 2 errors\n", "failed"),
        (1, "========= Error: Device not supported. Please refer to the list of devices\n", "unavailable"),
    ],
)
def test_tests_must_have_passed(status, output, outcome):
    memcheck = shell("memcheck", "", tool="compute-sanitizer", tests=True)
    assert gpu_check.judge(memcheck, status, output)[0] == outcome


@pytest.mark.parametrize("last", [0, 1])
def test_a_run_on_a_described_machine(monkeypatch, tmp_path, capsys, last):
    """From arguments to the file and the exit status, with commands that need no GPU."""

    def steps(arch, folder, gpus=1):
        return [
            shell("kernels", f'echo \'{{"rows": ["{arch}"]}}\' >{folder}/kernels.json'),
            shell("none", "exit 0", tool="no-such-tool"),
            shell("lines", "for i in {1..99}; do echo line $i; done; exit 3"),
            shell("after kernels", "[[ $COLOUR == red ]]", after=("lines", "kernels"), environment={"COLOUR": "red"}),
            shell("after lines", "exit 0", after=("lines",)),
        ][: 5 if last else 2]

    path = tmp_path / "results.json"
    monkeypatch.setattr(gpu_check, "describe", lambda: ABOUT)
    monkeypatch.setattr(gpu_check, "steps", steps)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--minutes", "1", str(path)])
    assert gpu_check.main() == last
    written = json.loads(path.read_text())
    assert written["kernels"] == {"rows": ["90"]} and written["training"] is None and written["about"]["device"] == "X"
    expected = {"kernels": "passed", "none": "unavailable"}
    if last:
        expected |= {"lines": "failed", "after kernels": "passed", "after lines": "skipped"}
        assert written["checks"]["lines"]["tail"] == [f"line {i}" for i in range(70, 100)]
    assert {name: check["outcome"] for name, check in written["checks"].items()} == expected
    assert capsys.readouterr().out.startswith("gpu_check: X, driver 580, torch 2\n  kernels         passed, ")


def test_resnet50_has_the_published_parameters():
    with torch.device("meta"):
        shapes = sorted(tuple(p.shape) for p in step.resnet50().parameters())
    assert shapes == sorted(p.shape for p in models.MODELS["resnet50"]())


@pytest.mark.long
def test_steps_of_several_ranks_are_measured(tmp_path):
    path = tmp_path / "steps.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    size = ["--image-size", "32", "--batch-size", "2", "--steps", "1", "--rounds", "1"]
    done = commands.run(
        *launcher, "-m", "benchmarks.step", *size, "--json", path, "block-float", cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["provenance"]["ranks"] == 2 and done.stdout.count("block-float") == 1
    assert [row["variant"] for row in found["rows"]] == ["stock", "fp16 hook", "FP8 hook", "block-float"]


@pytest.mark.long
def test_step_times_are_measured(monkeypatch, tmp_path, capsys):
    path = tmp_path / "steps.json"
    arguments = ["--image-size", "32", "--batch-size", "2", "--steps", "1", "--rounds", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["step.py", *arguments, "acpsgd"])
    assert step.main() == 0
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    assert [*rows] == ["stock", "fp16 hook", "FP8 hook", "acpsgd"]
    assert rows["stock"]["added_ms"] == 0 and rows["acpsgd"]["ms"] > 0
    parameters = sum(p.numel() for p in step.resnet50().parameters())
    assert 4 * parameters / 200 < rows["acpsgd"]["nbytes"] < 4 * parameters / 50
    assert "acpsgd" in capsys.readouterr().out
