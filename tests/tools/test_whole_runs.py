"""benchmarks.whole_runs: real ranks train a run of a study to the end."""

import json
import re
import sys

import pytest

from benchmarks import time_to_loss
from benchmarks.convergence.recipes import Run, load_data
from benchmarks.convergence.run import train
from benchmarks.whole_runs import __main__ as whole_runs
from launch import executable

QUICK = {
    "provenance": {"commits": [], "commands": []},
    "recipes": {"images": {
        "network": "cnn", "optimizer": "sgd", "betas": [], "data": "digits", "examples": 1297, "workers": 4,
        "batch_size": 8, "epochs": 1, "steps": 40, "measure": "test accuracy, %", "digits": 2,
        "lower_is_better": False, "margin": 2.0,
    }},
    "runs": [
        {"recipe": "images", "method": method, "lr": 0.05, "seed": 0, "parameters": 188234, "scores": [80.0],
         "payload_bytes": [sent], "done": True}
        for method, sent in (("none", 30117440), ("acpsgd", 824000))
    ],
}  # fmt: skip
LOCAL = "local(every=10):phases:0=qsgd,5%=block-float(bits=4,rounding=nearest)"
FOUR = "block-float:bits=4,rounding=nearest"


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["whole_runs", *arguments])
    whole_runs.main()


@pytest.mark.long
def test_a_whole_run(monkeypatch, tmp_path, one_thread):
    """Four ranks end an epoch about where four simulated workers do: sums of four numbers depend on their order."""
    (tmp_path / "convergence_quick.json").write_text(json.dumps(QUICK))
    monkeypatch.setattr(time_to_loss, "RESULTS", tmp_path)
    quick = time_to_loss.Study("convergence_quick.json", "images", "Digits")
    monkeypatch.setattr(whole_runs, "STUDIES", (quick,))
    monkeypatch.setattr(sys, "executable", str(executable()))
    file = tmp_path / "runs.json"
    command(
        monkeypatch, "--study", "quick", "--method", "acpsgd", "--epochs", "1", "--seconds", "1", "--json", str(file)
    )  # fmt: skip
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["study"], row["method"], row["rate"], row["ranks"]) == ("quick", "acpsgd", "none", 4)
    assert row["ms"].keys() == {"ddp:acpsgd"} and row["seconds"][0] > 0
    run = Run("images", "acpsgd", row["lr"], 0, "cnn", 1, 4, 8, 1.0, "sgd", ())
    simulated = train(run, load_data(run, None), tmp_path / "run.pt", lambda line: None)
    assert row["scores"] == pytest.approx(simulated.scores, abs=1.0)


def test_local_steps_follow_earlier_phases():
    parts = [("ddp:qsgd", 5), (f"local(every=10):{FOUR}", 95)]
    assert whole_runs.parts_of(whole_runs.Contender(LOCAL, parts, None, 90), 100) == parts
    phases = "phases:0=qsgd,10%=fp16"
    one = whole_runs.Contender(phases, [("ddp:qsgd", 10), ("ddp:fp16", 90)], None, 90)
    assert whole_runs.parts_of(one, 100) == [("ddp:phases:0=qsgd,10=fp16", 100)]
    stock = whole_runs.Contender("ddp-fp16", [("ddp-fp16", 100)], None, 90)
    assert whole_runs.parts_of(stock, 100) == [("ddp-fp16", 100)]


def test_a_run_is_compared_with_as_many_steps():
    study = next(study for study in whole_runs.STUDIES if whole_runs.name_of(study) == "text")
    row = {"study": "text", "method": "ddp", "rate": "50mbit", "ms": {"ddp": 100.0}, "scores": [2.5, 2.4]}
    steps = study.table().settings["steps"]
    (*_, line) = whole_runs.lines([row | {"seconds": [20.0, 0.22 * steps]}])
    assert f"| {0.2 * steps:.0f}, {0.22 * steps:.0f} | +10 % |" in line and line.endswith(", 2.400 |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--study", "text", "--method", "topk"], "got topk, expected one of ddp, ddp-fp16, "),
        (["--study", "text", "--method", "ddp"], "--data: got .* examples, expected the 7841 of tinyshakespeare.txt"),
    ],
)
def test_errors(monkeypatch, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        command(monkeypatch, *arguments, "--json", str(tmp_path / "runs.json"))
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)
