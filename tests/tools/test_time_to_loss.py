"""benchmarks.time_to_loss: steps of studies, times measured steps."""

import json

import pytest

from benchmarks import time_to_loss
from benchmarks.common.results import RESULTS, write_json
from benchmarks.time_to_loss import Contender, Study, contenders, epochs_to, parts, step_times

FOUR = "block-float:bits=4,rounding=nearest"


def test_parts_of_a_run():
    assert parts("none", 100) == [("ddp", 100)]
    assert parts("qsgd", 100) == [("ddp:qsgd", 100)]
    assert parts(f"phases:0=qsgd,10%=none,30={FOUR.replace(':', '(', 1)})", 100) == [
        ("ddp:qsgd", 10), ("ddp", 20), (f"ddp:{FOUR}", 70),
    ]  # fmt: skip
    signs = "ddp:momentum:inner=signsgd(majority=False),warmup_steps=1"
    assert parts("momentum:inner=signsgd(majority=False),warmup_steps=40", 100) == [("ddp", 40), (signs, 60)]
    assert parts("local(every=30):phases:0=qsgd,5%=none", 100) == [("ddp:qsgd", 5), ("local(every=30):none", 95)]
    assert parts("local(every=30):topk", 100) == [("local(every=30):topk", 100)]


def test_seconds_to_the_target():
    one = Contender("", [("a", 10), ("b", 90)], 1.0, 40)
    assert one.seconds({"a": 100.0, "b": 10.0}) == pytest.approx(10 * 0.1 + 30 * 0.01)
    assert one.seconds({"a": 100.0}) is None
    one.steps = None
    assert one.seconds({"a": 100.0, "b": 10.0}) is None


def test_steps_between_tests():
    assert epochs_to(2.0, [3.0, 2.5, 1.5], lower_is_better=True) == 2.5
    assert epochs_to(2.0, [1.0, 1.5, 2.0, 3.0], lower_is_better=False) == 3.0
    assert epochs_to(2.0, [1.9, 1.0], lower_is_better=True) == 1.0  # not known before
    assert epochs_to(2.0, [3.0, 2.1], lower_is_better=True) is None


def test_the_page_says_how_many_rates_and_seeds_studies_have():
    text = " ".join(time_to_loss.PAGE.read_text().split())
    assert (
        "In the studies of 735 and 980 steps, each method has the best of three learning rates; the others have" in text
    )
    assert "The studies of 735 and 2940 steps have one seed, the others two." in text
    found = {}
    for study in time_to_loss.STUDIES:
        table = study.table()
        steps = table.settings["epochs"] * table.settings["steps"]
        found[steps] = (len(table.lrs), {len(row.records) for row in table.rows})
    assert found == {735: (3, {1}), 980: (3, {2}), 2940: (1, {1}), 3120: (1, {2})}


def test_tables_of_a_study(monkeypatch, tmp_path):
    """`none` reaches 2.05 after 1.95 epochs, QSGD after the first one, and signs do not."""
    run = {"recipe": "text", "lr": 0.1, "seed": 0, "parameters": 10, "test_losses": [1, 1], "train_losses": [[1], [1]]}
    run |= {"payload_bytes": [1, 2], "diverged": None, "digest": "", "done": True}
    scores = {"none": [3.0, 2.0], "qsgd": [2.04, 2.01], "signsgd": [3.0, 2.5]}
    settings = json.loads((RESULTS / "convergence_text.json").read_text())["recipes"]["text"]
    settings |= {"network": "tiny", "epochs": 2, "steps": 100, "workers": 2, "margin": 0.05}
    study = {"provenance": {"commits": [], "commands": []}, "recipes": {"text": settings}}
    study["runs"] = [run | {"method": method, "scores": values} for method, values in scores.items()]
    write_json(tmp_path / "study.json", study)
    ms = {"ddp": 40.0, "ddp-fp16": 30.0, "ddp:qsgd": 20.0, "ddp:signsgd": 10.0}
    rows = [{"rate": "1gbit", "ranks": 2, "variant": variant, "ms": value} for variant, value in ms.items()]
    write_json(tmp_path / "training_time_tiny.json", {"rows": [*rows, rows[0] | {"ranks": 4, "ms": 1.0}]})
    monkeypatch.setattr(time_to_loss, "RESULTS", tmp_path)
    monkeypatch.setattr(time_to_loss, "STUDIES", (Study("study.json", "text", "Tiny"), Study("no.json", "text", "No")))
    assert step_times("tiny", 2)["1gbit"] == ms
    assert [(one.parts, one.steps) for one in contenders(time_to_loss.STUDIES[0].table())] == [
        ([("ddp", 200)], 195), ([("ddp-fp16", 200)], 195), ([("ddp:qsgd", 200)], 100), ([("ddp:signsgd", 200)], None),
    ]  # fmt: skip
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in time_to_loss.tables() if line.startswith("|")]
    rows = {row[0]: row[1:] for row in table[2:]}
    assert table[0][-2] == "1 Gb/s"
    assert rows["DDP, torch's `fp16_compress_hook`"][1:] == ["195", "", "", "6 (1.00)", ""]
    assert rows["stock DDP, fp32"][4] == "8 (0.75)" and rows["`qsgd`"][4] == "2 (2.92)"
    assert "`signsgd`" not in rows and "Not reached: `signsgd`." in time_to_loss.tables()


def test_steps_of_all_studies_are_measured():
    assert all(study in time_to_loss.measured() for study in time_to_loss.STUDIES if (RESULTS / study.file).exists())
