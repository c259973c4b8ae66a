"""benchmarks/training.py: short real runs, invalid results and wrong arguments."""

import argparse
import json
import subprocess
import sys

import pytest

from launch import HERE, needs_network

pytest.importorskip("horovod.torch")
pytest.importorskip("sklearn")

import training

PARAMETERS = 188_234  # of `cnn` on digits


def benchmark(*arguments):
    command = [
        sys.executable, str(HERE.parent / "benchmarks" / "training.py"), "--model", "cnn", "--rounds", "1",
        "--steps", "3", "--warmup", "1", *map(str, arguments),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_two_variants(tmp_path):
    completed = benchmark("compute", "horovod:topk", "--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.strip() == (tmp_path / "r.md").read_text().strip()
    assert "[2/2] cnn, none, round 1, horovod:topk: " in completed.stderr

    report = json.loads((tmp_path / "r.json").read_text())
    assert report["provenance"]["ranks"] == 2
    assert "horovod:topk" in report["provenance"]["command"]
    compute, topk = report["rows"]
    assert (compute["variant"], topk["variant"]) == ("compute", "horovod:topk")
    for row in report["rows"]:
        assert row["errors"] == []
        assert row["parameters"] == PARAMETERS
        assert 0 < row["ms_p20"] <= row["ms"] == row["ms_of_rounds"][0] <= row["ms_p80"]
        assert row["speedup"] is None  # stock Horovod did not run
        assert row["wire_bytes"] is None  # the loopback interface is shared with other processes
    assert compute["share_of_ideal"] == 1
    assert topk["share_of_ideal"] == compute["ms"] / topk["ms"]
    assert compute["payload_bytes"] == 0
    # 1 % of each weight matrix, at 4 bytes and at least one bit of index. Headers and biases are added.
    assert 0.01 * 4.1 * PARAMETERS < topk["payload_bytes"] < 0.02 * 4 * PARAMETERS
    assert f"| horovod:topk | {topk['ms']:.1f} (" in completed.stdout


@needs_network
def test_bytes_on_the_wire(tmp_path):
    completed = benchmark("ddp", "--rate", "5gbit", "--json", tmp_path / "r.json")
    assert completed.returncode == 0, completed.stderr
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert row["payload_bytes"] == 4 * PARAMETERS
    # In a ring all-reduce of two ranks, each receives as many bytes as its gradients have. Headers are added.
    assert 1 < row["wire_bytes"] / row["payload_bytes"] < 1.1


def test_failing_method_is_reported_and_exits_with_an_error():
    completed = benchmark("horovod:topk", "--timeout", 1)
    assert completed.returncode == 1
    assert "| horovod:topk | aborts in 1 of 1 rounds: not done after 1 s" in completed.stdout
    assert completed.stderr.endswith("training.py: error: failed: horovod:topk\n")


@pytest.mark.parametrize(
    ("variant", "result", "expected"),
    [
        ("ddp", {"finite": False, "identical": True}, "a loss is not finite"),
        ("ddp", {"finite": True, "identical": False}, "the replicas differ"),
        ("compute", {"finite": True, "identical": False}, None),
    ],
)
def test_invalid_results_do_not_count(monkeypatch, variant, result, expected):
    job_result = {"ms": [1.0, 2.0], "wire_bytes": 0.0, "payload_bytes": 0.0, "parameters": 1, **result}
    monkeypatch.setattr(training, "run_job", lambda row, args: job_result)
    row = training.Row("cnn", "none", variant)
    training.measure(row, argparse.Namespace())
    assert row.errors == ([expected] if expected else [])
    assert row.rounds == ([] if expected else [[1.0, 2.0]])


def test_rounds_are_pooled_and_compared():
    rows = [
        training.Row("cnn", "1gbit", "compute", [[1.0, 2.0], [3.0]], [0.0, 0.0]),
        training.Row("cnn", "1gbit", "horovod", [[9.0, 8.0], [7.0]], [4e6, 6e6], 5e6),
        training.Row("cnn", "1gbit", "ddp", [[4.0, 4.0], [4.0]], [4e6, 4e6], 4e6),
        training.Row("cnn", "1gbit", "ddp-powersgd", errors=["RuntimeError: a | b", "bad"]),
        training.Row("cnn", "1gbit", "ddp-fp16", [[5.0, 5.0]], [3e6], 2e6, errors=["bad"]),
        training.Row("cnn", "100mbit", "ddp", [[4.0, 4.0], [4.0]], [4e6, 4e6], 4e6),
    ]
    lines = list(training.markdown(training.reports(rows), 2))
    assert "| compute | 2.0 (1.4–2.6) | 4.00 | 100% | 0.000 | 0.000 |" in lines
    assert "| horovod | 8.0 (7.4–8.6) | 1.00 | 25% | 5.000 | 5.000 |" in lines
    assert "| ddp | 4.0 (4.0–4.0) | 2.00 | 50% | 4.000 | 4.000 |" in lines
    assert "| ddp-powersgd | aborts in 2 of 2 rounds: RuntimeError: a \\| b | | | | |" in lines
    assert "| ddp-fp16 | 5.0 (5.0–5.0); aborts in 1 of 2 rounds: bad | 1.60 | 40% | 3.000 | 2.000 |" in lines
    assert "| ddp | 4.0 (4.0–4.0) | - | - | 4.000 | 4.000 |" in lines  # no baseline on that network


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("[1]<stderr>:Traceback:\n[1]<stderr>:torch.x.DistError: no | way\nbye", "torch.x.DistError: no | way"),
        ("terminate called\n  what():  [enforce fail] 3 vs 7\nRuntimeError: peer", "what():  [enforce fail] 3 vs 7"),
        ("something\nlast words\n\n", "last words"),
        ("", None),
    ],
)
def test_error_line(output, expected):
    assert training.error_line(output) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["horovd"], "got 'horovd', expected stock, compute, horovod"),
        (["ddp:nothing"], "unknown compression method 'nothing'"),
        (["--steps", "1"], "got '1', expected a whole number of at least 2"),
        (["--rate", "fast"], "got rate 'fast', expected a number"),
        (["--data", "/no/such"], "/no/such: no such folder"),
        (["--batch-size", "700"], "expected at most all 1297 images"),
        (["--json", "/no/such/file"], "expected a file in a folder that exists"),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, arguments, expected):
    monkeypatch.setattr(sys, "argv", ["training.py", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        training.parse_arguments()
    assert exit_info.value.code == 2
    assert expected in capsys.readouterr().err


def test_stock_expands_to_its_variants(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["training.py", "horovod:topk", "stock", "ddp"])
    args = training.parse_arguments()
    assert args.variants == ["horovod:topk", *training.STOCK]
    assert (args.model, args.rate) == (["resnet18", "alexnet"], ["none"])
