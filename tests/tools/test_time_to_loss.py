"""benchmarks.time_to_loss: steps of studies, times measured steps."""

import json

import pytest

from benchmarks import time_to_loss
from benchmarks.common.results import RESULTS, write_json
from benchmarks.time_to_loss import Contender, Study, contenders, epochs_to, parts, step_times, uncompressed

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


def test_seconds_of_the_first_steps():
    one = Contender("", [("a", 10), ("b", 90)], None, None)
    ms = {"a": 100.0, "b": 10.0}
    assert [one.seconds(ms, steps) for steps in (5, 40, 100)] == pytest.approx([0.5, 1.3, 1.9])
    assert one.seconds({"a": 100.0}, 5) is None


def test_uncompressed_local_steps_take_what_was_measured():
    """On ResNet-20, where they were: without the work of the outer optimizer, which a network does not hide."""
    times = json.loads((RESULTS / "training_time_resnet20.json").read_text())["rows"]
    for rate in time_to_loss.RATES:
        ms = {row["variant"]: row["ms"] for row in times if (row["rate"], row["ranks"]) == (rate, 4) and "ms" in row}
        assert 0.92 * ms["local(every=10):none"] < uncompressed(ms, 10) < 1.02 * ms["local(every=10):none"]


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
    assert "torch's `powerSGD_hook` was not trained." in text
    found = {study.title: len(study.table().lrs) for study in time_to_loss.STUDIES}
    assert {steps.split()[-2]: rates for steps, rates in found.items()} == {"735": 3, "980": 3, "2940": 1, "3120": 1}


def test_pictures_are_of_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    for name, picture in time_to_loss.PICTURES.items():
        assert (time_to_loss.IMAGES / name).exists()
        time_to_loss.draw(picture, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000


def test_tables_of_a_study(monkeypatch, tmp_path):
    """The target is what `none` ends with. QSGD reaches it in the middle of the second epoch, and signs do not."""
    run = {"recipe": "text", "lr": 0.1, "seed": 0, "parameters": 10, "test_losses": [1, 1], "train_losses": [[1], [1]]}
    run |= {"payload_bytes": [1, 2], "diverged": None, "digest": "", "done": True}
    scores = {"none": [3.0, 2.0], "qsgd": [2.04, 1.96], "signsgd": [3.0, 2.5]}
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
    assert [(one.parts, one.steps) for one in contenders(time_to_loss.STUDIES[0])] == [
        ([("ddp", 200)], 200), ([("ddp-fp16", 200)], 200), ([("ddp:qsgd", 200)], 150), ([("ddp:signsgd", 200)], None),
    ]  # fmt: skip
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in time_to_loss.tables() if line.startswith("|")]
    rows = {row[0]: row[1:] for row in table[2:]}
    assert table[0][3] == "steps to 2.000" and table[0][-2] == "1 Gb/s"
    assert rows["DDP, torch's `fp16_compress_hook`"] == ["2.000", "1", "200", "", "", "6 (1.00)", ""]
    assert rows["stock DDP, fp32"][5] == "8 (0.75)" and rows["`qsgd`"][2:6] == ["150", "", "", "4 (1.50)"]
    assert rows["`signsgd`"][2:6] == ["never", "", "", "2 (3.00)"]


def test_steps_of_all_studies_are_measured():
    assert all(study in time_to_loss.measured() for study in time_to_loss.STUDIES if (RESULTS / study.file).exists())
