"""benchmarks.sharded: FSDP2 whose collectives are quantized, in a study that continues."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from benchmarks.common.jobs import has_own_net
from benchmarks.sharded import __main__ as sharded
from benchmarks.sharded import steps, study
from gradzip.advice.cost import Link
from launch import python


def command(monkeypatch, file, *arguments):
    """Run the command with jobs that end at once, with a score of their learning rate. Returns the jobs."""
    jobs = []

    def run_job(job):
        jobs.append(job)
        score = job.run["lr"] + (0.5 if "4/4" in job.run["method"] else 0.0) + job.run["seed"]
        first = {"score": 9.0, "losses": [3.0], "sent": {}, "wire": 0.0, "seconds": 1.0, "steps": 5}
        return [first, first | {"score": score, "sent": {"gather": 10e6, "reduce": 5e6}, "steps": 10}]

    monkeypatch.setattr(sys, "argv", ["sharded", "--json", str(file), *arguments])
    monkeypatch.setattr(study, "run_job", run_job)
    sharded.main()
    return jobs


def test_a_study_continues_and_each_learning_rate_has_a_table(monkeypatch, tmp_path, capsys):
    file, variants = tmp_path / "runs.json", ("--variant", "float32", "--variant", "4/4 delta")
    first = command(monkeypatch, file, *variants, "--optimizer", "adamw", "--lr", "2")
    assert [(job.run["method"], job.run["seed"]) for job in first] == [
        ("float32", 0), ("4/4 delta", 0), ("float32", 1), ("4/4 delta", 1),
    ]  # fmt: skip
    assert first[0].options == {} and first[1].options["reference"] == "delta"
    more = command(monkeypatch, file, *variants, "--optimizer", "adamw", "--lr", "2", "--lr", "1")
    assert {job.run["lr"] for job in more} == {1.0} and len(more) == 4
    assert len(json.loads(file.read_text())["rows"]) == 8
    of_two, of_one = capsys.readouterr().out.strip().split("\n\ncharlm,")[-2:]
    assert "rate 2," in of_two and "rate 1, 10 steps, 4 ranks, 2 seeds" in of_one
    *_, own, delta = of_one.splitlines()
    assert own == "| float32 | 1 | 1.500 (1.000–2.000) |  |"
    # Three quarters of 8 bytes for each of 1 899 648 parameters, and of 4 more for 1 776 384 in blocks: 16.7 MB a step,
    # in place of 15 MB in 10 steps.
    assert delta == "| 4/4 delta | 11.15 | 2.000 (1.500–2.500) | +33.33 |"


def test_images_are_trained_with_sgd(monkeypatch, tmp_path, capsys):
    options = ["--network=resnet8", "--variant=float32", "--variant=4/4", "--seed=0", "--lr=70"]
    jobs = command(monkeypatch, tmp_path / "runs.json", *options)
    assert {(job.run["optimizer"], job.run["recipe"], job.run["batch_size"]) for job in jobs} == {("sgd", "images", 32)}
    *_, own, rounded = capsys.readouterr().out.strip().splitlines()
    assert own == "| float32 | 1 | 70.00 (70.00–70.00) |  |"
    # Three quarters of 8 bytes for each of 75 290 parameters, and of 4 more for 74 176 in blocks, in place of 1.5 MB.
    assert rounded == "| 4/4 | 0.45 | 70.50 (70.50–70.50) | +0.50 |"


def test_runs_of_other_lengths_are_refused(monkeypatch, tmp_path, capsys):
    file = tmp_path / "runs.json"
    command(monkeypatch, file, "--variant", "8/8", "--seed", "0", "--lr", "1")
    with pytest.raises(SystemExit):
        command(monkeypatch, file, "--variant", "8/8", "--seed", "0", "--lr", "1", "--steps", "3")
    assert "expected runs of one length; name another file" in capsys.readouterr().err


@pytest.mark.long
def test_timed_steps_of_two_ranks(tmp_path):
    """Bytes on the wire are those of the collectives: of one all-gather, since the root module keeps its weights."""
    file = tmp_path / "steps.json"
    options = ["--network=cnn", "--rate=none", "--ranks=2", "--batch-size=2", "--warmup=1", "--steps=2", "--json"]
    done = subprocess.run(
        [*python(), "-m", "benchmarks.sharded.steps", *options, file], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert row["modules"] == 1 and row["seconds"].keys() == steps.VARIANTS.keys()
    assert all(len(seconds) == 2 for seconds in row["seconds"].values())
    assert "2 ranks, unshaped loopback, medians of 2 steps" in done.stdout
    if has_own_net():
        numel = row["parameters"]
        whole = 4 * numel / 2 + 4 * numel  # half of the weights; gloo reduces and scatters by an all-reduce
        assert whole < row["wire"][steps.FLOAT32] < 1.03 * whole
        assert whole / 2 < row["wire"][steps.BFLOAT16] < 1.03 * whole / 2
        both = (260 / 256) * numel  # 8 bits and a scale of 4 bytes for each 256: a half of each
        assert both < row["wire"]["gather=8 bits, reduce=8 bits"] < 1.1 * both
        assert row["wire"][steps.FLOOR] < 0.01 * whole


def test_predicted_steps_by_hand():
    """1 M parameters in one module, 50 ms without communication, and 100 MB/s for four ranks."""
    integers = {"rounds": [["all_to_all", 1e6], ["all_gather_partitions", 1e6]], "encode": 0.001, "decode": 0.002}
    fewer = integers | {"rounds": [[kind, 0.5e6] for kind, _ in integers["rounds"]]}
    row = {
        "seconds": {steps.FLOOR: [0.04, 0.05, 0.09]}, "parameters": 1_000_000, "modules": 1,
        "link": asdict(Link(4, 1e8, 0.0)),
        "codecs": {"block-float": integers, "block-float:bits=4,rounding=nearest": fewer},
    }  # fmt: skip
    found = steps.predicted(row)
    # Three quarters of what each collective has are sent; twice as much by the all-reduce in place of a reduce-scatter.
    assert found[steps.FLOAT32] == pytest.approx(0.05 + 0.75 * (4 + 4 + 8) / 100)
    assert found[steps.BFLOAT16] == pytest.approx(0.05 + 0.75 * (2 + 2 + 4) / 100)
    assert found["reduce=8 bits"] == pytest.approx(0.05 + 0.75 * (4 + 4 + 1) / 100 + 0.003)
    assert found["gather=8 bits, reduce=8 bits"] == pytest.approx(0.05 + 0.75 * 3 / 100 + 0.006)
    assert found["gather=8 bits, reduce=8 bits, keep=True"] == pytest.approx(0.05 + 0.75 * 2 / 100 + 0.006)
    assert found["gather=4 bits, reduce=4 bits, reference='delta'"] == pytest.approx(0.05 + 0.75 * 1 / 100 + 0.006)
