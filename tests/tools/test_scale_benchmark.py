"""benchmarks/scale: a short real run, its continuation, and the predictions against arithmetic."""

import itertools
import json
import subprocess

import pytest

from benchmarks.common.jobs import has_own_net
from benchmarks.common.results import RESULTS
from benchmarks.scale import predictions, report
from benchmarks.scale.variants import PROJECTED, VARIANTS, label
from gradzip.advice.cost import JOINED, Link, cut
from gradzip.cli.models import MODELS
from launch import python


def benchmark(*arguments):
    command = [*python(), "-m", "benchmarks.scale", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.long
def test_a_short_run_and_its_continuation(tmp_path):
    path = tmp_path / "scale.json"
    base = ["--side", 64, "--steps", 2, "--rounds", 1, "--model", "resnet18", "--json", path]
    variants = ["none", "block-float", "qsgd:exchange=gather", "qsgd:exchange=scatter_reduce", "qsgd:exchange=auto"]
    first = benchmark(*base, "--ranks", 2, *(word for variant in variants[:2] for word in ("--variant", variant)))
    assert first.returncode == 0, first.stderr
    known = json.loads(path.read_text())
    completed = benchmark(
        *base, "--ranks", 2, "--ranks", 4, *(word for variant in variants for word in ("--variant", variant))
    )
    assert completed.returncode == 0, completed.stderr
    results = json.loads(path.read_text())
    assert results["links"]["2"] == known["links"]["2"] and results["links"].keys() == {"2", "4"}
    assert results["rows"][:2] == known["rows"] and len(results["provenance"]["commands"]) == 2
    assert {(row["variant"], row["ranks"]) for row in results["rows"]} == {(v, p) for v in variants for p in (2, 4)}
    for row in results["rows"]:
        assert len(row["cpu_seconds"]) == row["ranks"] and min(row["cpu_seconds"]) > 0
        expected = predictions.bucket(results, row["variant"], row["ranks"]).sent_nbytes
        if has_own_net():  # headers of TCP and of barriers are not predicted
            assert 0.95 * expected < row["wire_bytes"] < 1.3 * expected + 20_000
    assert f"| `{label('none')}` | " in completed.stdout
    assert {cell["model"] for cell in results["projection"]} == {"resnet18"}
    refused = benchmark(*base, "--side", 32)
    assert refused.returncode == 1 and "results with side 64, expected 32; give another --json" in refused.stderr
    pytest.importorskip("matplotlib")
    report.draw(results, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 5000


def test_an_odd_number_of_steps_is_refused():
    completed = benchmark("--steps", 3)
    assert completed.returncode == 2 and "got --steps 3, expected an even number" in completed.stderr


def stored():
    return json.loads((RESULTS / "scale_cpu.json").read_text())


def test_all_variants_are_measured_on_all_ranks():
    measured = {(row["variant"], row["ranks"]) for row in stored()["rows"]}
    assert measured >= set(itertools.product(VARIANTS, (2, 4, 8, 16)))


def test_projection_is_that_of_the_cost_model():
    """A cell: an all-reduce of fp32 in DDP's buckets, an exchange in one piece, and what a codec must do."""
    results = stored()
    (cell,) = (c for c in results["projection"] if (c["model"], c["gbit"], c["ranks"]) == ("resnet50", 10, 64))
    link = Link(64, 10e9 / 8, results["provenance"]["latency_us"] / 1e6)
    parameters = list(MODELS["resnet50"]())
    dense = 4 * sum(p.numel for p in parameters)
    once = link.all_reduce(dense)
    buckets = cut([4 * p.numel for p in reversed(parameters)], JOINED["ddp"]["bucket_nbytes"], large_alone=False)
    messages = (len(buckets) - 1) * link.messages("all_reduce") * link.latency
    seconds = cell["seconds"]
    assert seconds["none"] == pytest.approx(once + messages, rel=1e-3)
    assert cell["local_step"]["none"] == pytest.approx(9 * once / 30)
    assert seconds["qsgd:exchange=gather"] > seconds["none"] > seconds["fp16"] > seconds["block-float"]
    assert dense / cell["rate"]["acpsgd"] == pytest.approx(0.83 * seconds["fp16"] - seconds["acpsgd"])
    # The backward pass, two thirds of a step, hides most of the communication.
    assert 1 < cell["least_step"]["none"] / seconds["none"] < 9
    sizes = {v: {p.shape: (("all_reduce", 4.0 * p.numel),) for p in parameters} for v in PROJECTED}
    (again, *_) = predictions.project(sizes, ["resnet50"], link.latency)
    assert again["seconds"]["none"] == pytest.approx(seconds["none"])
    assert again["least_step"]["none"] == pytest.approx(cell["least_step"]["none"])


def test_auto_is_predicted_as_the_exchange_that_it_chooses():
    results = stored()
    for variant, ranks in itertools.product(VARIANTS, (2, 4, 8, 16)):
        if variant.endswith("auto"):
            chosen = predictions.chosen(results, variant, ranks)
            rows = [r for r in results["rows"] if (r["variant"], r["ranks"]) == (variant, ranks)]
            assert {row["scattered"] for row in rows} == {chosen == "scatter_reduce"}, (variant, ranks)
