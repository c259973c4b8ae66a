"""benchmarks.sharded: FSDP2 whose collectives are quantized, in a study that continues."""

import json
import sys

import pytest

from benchmarks.sharded import __main__ as sharded


def command(monkeypatch, file, *arguments):
    """Run the command with jobs that end at once, with a score of their learning rate. Returns the jobs."""
    jobs = []

    def run_job(job):
        jobs.append(job)
        score = job.run["lr"] + (0.5 if "4/4" in job.run["method"] else 0.0) + job.run["seed"]
        first = {"score": 9.0, "losses": [3.0], "sent": {}, "seconds": 1.0, "steps": 5}
        return [first, first | {"score": score, "sent": {"gather": 10e6, "reduce": 5e6}, "steps": 10}]

    monkeypatch.setattr(sys, "argv", ["sharded", "--json", str(file), *arguments])
    monkeypatch.setattr(sharded, "run_job", run_job)
    sharded.main()
    return jobs


def test_a_study_continues_and_each_variant_has_its_best_learning_rate(monkeypatch, tmp_path, capsys):
    file, variants = tmp_path / "runs.json", ("--variant", "float32", "--variant", "4/4 delta")
    first = command(monkeypatch, file, *variants, "--optimizer", "adamw", "--lr", "2")
    assert [(job.run["method"], job.run["seed"]) for job in first] == [
        ("float32", 0), ("4/4 delta", 0), ("float32", 1), ("4/4 delta", 1),
    ]  # fmt: skip
    assert first[0].options == {} and first[1].options["reference"] == "delta"
    more = command(monkeypatch, file, *variants, "--optimizer", "adamw", "--lr", "2", "--lr", "1")
    assert {job.run["lr"] for job in more} == {1.0} and len(more) == 4
    assert len(json.loads(file.read_text())["rows"]) == 8
    *_, own, delta = capsys.readouterr().out.strip().splitlines()
    assert own == "| charlm | adamw | float32 | 1 | 1.5000 | +0.00 % | – |"
    assert delta == "| charlm | adamw | 4/4 delta | 1 | 2.0000 | +33.33 % | 1.50 MB |"


def test_runs_of_other_lengths_are_refused(monkeypatch, tmp_path, capsys):
    file = tmp_path / "runs.json"
    command(monkeypatch, file, "--variant", "8/8", "--seed", "0", "--lr", "1")
    with pytest.raises(SystemExit):
        command(monkeypatch, file, "--variant", "8/8", "--seed", "0", "--lr", "1", "--steps", "3")
    assert "expected runs of one length; name another file" in capsys.readouterr().err
