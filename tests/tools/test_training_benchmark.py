"""benchmarks/training: short real runs, invalid results, interrupted runs and wrong arguments."""

import contextlib
import json
import math
import signal
import subprocess
import sys

import pytest
import torch

from launch import needs_network, python

pytest.importorskip("horovod.torch")
pytest.importorskip("sklearn")

import gradzip
from benchmarks.common.jobs import JobError, error_line, has_own_net
from benchmarks.common.results import ResultsError
from benchmarks.training import __main__ as training
from benchmarks.training import report
from benchmarks.training.jobs import Job
from benchmarks.training.rank import num_steps
from benchmarks.training.results import Results, Round
from benchmarks.training.variants import METHODS, QUICK, SHORTHANDS, expanded, front_end, label, least_warmup
from gradzip.methods.base.registry import registered

PARAMETERS = 188_234  # of `cnn` on digits
CELL = ("cnn", "1gbit", 2)


def command(*arguments):
    return [
        *python(), "-m", "benchmarks.training", "--model", "cnn", "--rounds", "1",
        "--steps", "4", "--warmup", "1", *map(str, arguments),
    ]  # fmt: skip


def benchmark(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=280)


@pytest.mark.long
def test_two_variants(tmp_path):
    completed = benchmark("compute", "horovod:topk", "--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.strip() == (tmp_path / "r.md").read_text().strip()
    assert "[2/2] cnn, none, 2 ranks, round 1, compute: " in completed.stderr

    report = json.loads((tmp_path / "r.json").read_text())
    assert report["provenance"]["data"]["images"] == "digits"
    assert "horovod:topk" in report["provenance"]["commands"][0]
    rows = {row["variant"]: row for row in report["rows"]}
    compute, topk = rows["compute"], rows["horovod:topk"]
    for row in rows.values():
        assert (row["model"], row["rate"], row["ranks"]) == ("cnn", "none", 2)
        (only,) = row["rounds"]
        assert "error" not in only and len(only["ms"]) == 4
        assert row["parameters"] == PARAMETERS
        assert 0 < row["ms_p20"] <= row["ms"] == row["ms_of_rounds"][0] <= row["ms_p80"]
        assert row["times_fp32"] is None  # stock Horovod did not run
        assert row["compute_ms"] == compute["ms"]
    assert (compute["share_of_ideal"], compute["compression_ms"], compute["communication_ms"]) == (1, 0, 0)
    assert topk["share_of_ideal"] == compute["ms"] / topk["ms"]
    assert 0 < topk["compression_ms"] < topk["ms"]
    assert topk["communication_ms"] == max(0, topk["ms"] - compute["ms"] - topk["compression_ms"])
    assert compute["payload_bytes"] == 0
    # 1 % of each weight matrix, at 4 bytes and at least one bit of index. Headers and biases are added.
    assert 0.01 * 4.1 * PARAMETERS < topk["payload_bytes"] < 0.02 * 4 * PARAMETERS
    if has_own_net():
        assert topk["payload_bytes"] < topk["wire_bytes"]
    else:
        assert topk["wire_bytes"] is None
    assert f"| horovod:topk | {topk['ms']:.1f} (" in completed.stdout

    (profile,) = report["profiles"]
    layers = profile["layers"]
    assert {layer["name"] for layer in layers[-2:]} == {"0.bias", "0.weight"}  # of the first convolution
    assert sorted(layer["ready"] for layer in layers) == [layer["ready"] for layer in layers]
    assert 0 < layers[0]["ready"] < layers[-1]["ready"] < 2 * profile["seconds"]
    assert sum(math.prod(layer["shape"]) for layer in layers) == PARAMETERS


@pytest.mark.long
@needs_network
def test_one_job_measures_several_variants_and_their_bytes_on_the_wire(tmp_path):
    completed = benchmark("ddp", "ddp:topk", "--rate", "5gbit", "--json", tmp_path / "r.json")
    assert completed.returncode == 0, completed.stderr
    row, topk = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert row["payload_bytes"] == 4 * PARAMETERS
    # In a ring all-reduce of two ranks, each receives as many bytes as its gradients have. Headers are added.
    assert 1 < row["wire_bytes"] / row["payload_bytes"] < 1.1
    assert 0.01 * 4.1 * PARAMETERS < topk["payload_bytes"] < 0.02 * 4 * PARAMETERS
    assert 0 < topk["wire_bytes"] < row["wire_bytes"] / 10


@pytest.mark.long
@needs_network
def test_two_hosts_and_the_bytes_between_them(tmp_path):
    """Two ranks on each. FSDP2 sends half of the gradients from each rank to the other host."""
    variants = "ddp", "fsdp-noop", "fsdp", "fsdp:none", "fsdp:block-float"
    completed = benchmark(*variants, "--hosts", 2, "--ranks", 4, "--rate", "5gbit", "--json", tmp_path / "r.json")
    assert completed.returncode == 0, completed.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    rows = {row["variant"]: row for row in report["rows"]}
    assert report["provenance"]["hosts"] == 2 and not report["links"] and not report["codecs"]
    for name in ("fsdp", "fsdp:none"):
        assert rows[name]["payload_bytes"] == pytest.approx(2 * PARAMETERS, rel=0.01)
        assert 1 < rows[name]["wire_bytes"] / rows[name]["payload_bytes"] < 1.1
    assert rows["fsdp-noop"]["payload_bytes"] == 0
    assert rows["fsdp-noop"]["wire_bytes"] < rows["fsdp"]["wire_bytes"] / 20
    # All-to-all, and gather of shards: half of a payload of its own to the other host, twice.
    assert rows["fsdp:block-float"]["wire_bytes"] < rows["fsdp"]["wire_bytes"] / 3
    # A ring through all four ranks crosses the link once in each direction: half as much from each rank of a host.
    assert 0.7 < rows["ddp"]["wire_bytes"] / (3 / 4 * 4 * PARAMETERS) < 1.1


@pytest.mark.long
def test_variants_take_turns_in_each_step(tmp_path):
    variants = "compute", "ddp-noop", "ddp:acpsgd", "horovod", "horovod-noop", "horovod:topk"
    completed = benchmark(*variants, "--interleave", "--json", tmp_path / "r.json")
    assert completed.returncode == 0, completed.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    rows = {row["variant"]: row for row in report["rows"]}
    assert report["provenance"]["interleave"] and not (report["profiles"] or report["links"] or report["codecs"])
    assert tuple(rows) == variants
    for name, row in rows.items():
        (only,) = row["rounds"]
        assert "error" not in only and len(only["ms"]) == 4
        assert row["wire_bytes"] is None
        front = "horovod" if name.startswith("horovod") else "ddp"
        assert row["share_of_floor"] == rows[f"{front}-noop"]["ms"] / row["ms"]
    sent = {name: row["payload_bytes"] for name, row in rows.items()}
    assert (sent["compute"], sent["ddp-noop"], sent["horovod-noop"], sent["horovod"]) == (0, 0, 0, 4 * PARAMETERS)
    assert 0 < sent["ddp:acpsgd"] < PARAMETERS
    assert 0.01 * 4.1 * PARAMETERS < sent["horovod:topk"] < 0.02 * 4 * PARAMETERS


@pytest.mark.long
def test_local_steps_are_timed_with_their_exchange(tmp_path):
    """With more ranks than cores."""
    variants = "compute", "local(every=3):topk", "ddp"
    completed = benchmark(*variants, "--ranks", 4, "--json", tmp_path / "r.json")
    assert completed.returncode == 0, completed.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["ranks"], row["variant"], "ms" in row) for row in rows] == [(4, name, True) for name in variants]
    local = rows[1]
    assert len(local["rounds"][0]["ms"]) == 1  # the mean of three steps
    # An exchange in three steps; 1 % of each weight matrix, at 4 bytes and at least one bit of index, and all biases.
    assert 0.01 * 4.1 * PARAMETERS / 3 < local["payload_bytes"] < 0.02 * 4 * PARAMETERS / 3


def test_failing_method_is_reported_and_exits_with_an_error():
    completed = benchmark("horovod:topk", "--timeout", 1, "--steps", 100000)
    assert completed.returncode == 1
    assert "| horovod:topk | aborts in 1 of 1 rounds: not done after 1 s" in completed.stdout
    assert completed.stderr.endswith("python -m benchmarks.training: error: failed: horovod:topk\n")


@pytest.mark.long
def test_an_interrupted_run_keeps_its_rounds_and_continues(tmp_path):
    arguments = ["compute", "ddp", "--steps", "100000", "--seconds", "1", "--json", tmp_path / "r.json"]
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith("[1/2]"):
                process.send_signal(signal.SIGINT)
                break
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "| compute | " in output
    assert "interrupted" in errors
    first = json.loads((tmp_path / "r.json").read_text())
    (compute,) = first["rows"]
    completed = benchmark(*arguments)
    assert completed.returncode == 0, completed.stderr
    assert "continuing" in completed.stderr
    second = json.loads((tmp_path / "r.json").read_text())
    assert second["rows"][0]["rounds"] == compute["rounds"]
    assert [len(row["rounds"]) for row in second["rows"]] == [1, 1]


def arguments(monkeypatch, *given):
    monkeypatch.setattr(sys, "argv", ["training.py", *map(str, given)])
    return training.checked(training.parser())


def measured(variant, **changes):
    result = {
        "ms": [1.0, 2.0, 3.0], "compression_ms": 0.5, "wire_bytes": 9.0, "payload_bytes": 8.0, "identical": True,
        "finite": True, "parameters": 1, "choice": None,
    }  # fmt: skip
    return [{"start": variant}, {"variant": variant, "result": result | changes}]


class Jobs:
    """In place of jobs.run: jobs that end as `fails` says, and a record of their variants."""

    def __init__(self, fails=()):
        self.fails = dict(fails)
        self.jobs = []

    def __call__(self, job, timeout):
        self.jobs.append(job.variants)
        if job.link:
            yield {"start": "link"}
            if "link" in self.fails:
                raise self.fails["link"]
            yield {"link": {"ranks": job.ranks}}
        for variant in job.variants:
            failure = self.fails.get(variant)
            if isinstance(failure, BaseException):
                yield {"start": variant}
                raise failure
            yield from measured(variant, **(failure or {}))


def run(monkeypatch, jobs, *given, results=None):
    args = arguments(monkeypatch, "--model", "cnn", *given)
    results = results or Results({}, args.json)
    results.plan(training.Benchmark(args, results).cells, args.variants)
    monkeypatch.setattr(training.jobs, "run", jobs)
    training.Benchmark(args, results).run()
    return results


def test_a_variant_that_aborts_ends_its_job_and_the_rest_run_in_another(monkeypatch):
    variants = ["horovod", "compute", "ddp-powersgd", "ddp", "ddp-fp16"]
    jobs = Jobs({"ddp-powersgd": JobError("aborted")})
    results = run(monkeypatch, jobs, *variants, "--rounds", 2)
    assert jobs.jobs == [
        ("horovod",), ("compute", "ddp-powersgd", "ddp", "ddp-fp16"), ("ddp", "ddp-fp16"),
        ("compute", "ddp-powersgd", "ddp", "ddp-fp16"), ("ddp", "ddp-fp16"), ("horovod",),
    ]  # fmt: skip
    for variant in variants:
        errors = [r.error for r in results.row(("cnn", "none", 2), variant).rounds]
        assert errors == (["aborted"] * 2 if variant == "ddp-powersgd" else [None] * 2)


def test_a_turn_that_aborts_is_the_failure_of_all_that_take_turns(monkeypatch):
    def aborts(job, timeout):
        assert job.interleaved and not (job.link or job.profile or job.codecs)
        yield {"start": job.variants[0]}
        yield {"start": "turn 1 of 9"}
        raise JobError("aborted")

    results = run(monkeypatch, aborts, "compute", "ddp-noop", "ddp:topk", "--rounds", 1, "--interleave")
    assert [row.rounds[0].error for row in results.rows.values()] == ["aborted"] * 3
    # Before its first turn, a variant fails alone.
    jobs = Jobs({"ddp:topk": JobError("aborted")})
    results = run(monkeypatch, jobs, "compute", "ddp:topk", "ddp-noop", "--rounds", 1, "--interleave")
    assert jobs.jobs == [("compute", "ddp:topk", "ddp-noop"), ("ddp-noop",)]
    assert results.row(("cnn", "none", 2), "ddp:topk").rounds[0].error == "aborted"


def test_a_link_that_cannot_be_measured_costs_no_result_and_is_not_tried_again(monkeypatch):
    jobs = Jobs({"link": JobError("aborted")})
    results = run(monkeypatch, jobs, "compute", "ddp", "--rounds", 2)
    assert jobs.jobs == [("compute", "ddp"), ("compute", "ddp"), ("ddp", "compute")]
    assert all(r.error is None for row in results.rows.values() for r in row.rounds) and not results.links
    results = run(monkeypatch, Jobs(), "compute", "ddp", "--rounds", 2)
    assert results.links == [{"rate": "none", "ranks": 2, "front_end": "ddp", "link": {"ranks": 2}}]


def test_rounds_rotate_the_variants_and_fresh_gives_each_a_job(monkeypatch):
    jobs = Jobs()
    run(monkeypatch, jobs, "compute", "ddp", "ddp-fp16", "--rounds", 3)
    assert jobs.jobs == [("compute", "ddp", "ddp-fp16"), ("ddp", "ddp-fp16", "compute"), ("ddp-fp16", "compute", "ddp")]
    jobs = Jobs()
    run(monkeypatch, jobs, "compute", "ddp", "--rounds", 1, "--fresh")
    assert jobs.jobs == [("compute",), ("ddp",)]


def test_a_job_that_does_not_start_fails_all_its_variants(monkeypatch):
    def broken(job, timeout):
        raise JobError("no such launcher")
        yield

    results = run(monkeypatch, broken, "compute", "ddp", "--rounds", 1)
    assert [row.rounds[0].error for row in results.rows.values()] == ["no such launcher"] * 2


@pytest.mark.parametrize(
    ("variant", "result", "expected"),
    [
        ("ddp", {"finite": False}, "a loss is not finite"),
        ("ddp", {"identical": False}, "the replicas differ"),
        ("compute", {"identical": False}, None),
        ("ddp-noop", {"identical": False}, None),
    ],
)
def test_invalid_results_do_not_count(monkeypatch, variant, result, expected):
    results = run(monkeypatch, Jobs({variant: result}), variant, "--rounds", 1)
    (only,) = results.row(("cnn", "none", 2), variant).rounds
    assert only.error == expected
    assert only.ms == ([] if expected else [1.0, 2.0, 3.0])


def test_results_continue_where_they_were(monkeypatch, tmp_path):
    path = tmp_path / "r.json"
    given = ("compute", "ddp", "--json", path)
    about = {"torch": "2.0", "commands": ["a"]}
    stopped = Jobs({"ddp": training.Interrupted(130)})
    with pytest.raises(training.Interrupted):
        run(monkeypatch, stopped, *given, "--rounds", 1, results=Results(about, path))
    results = Results({"torch": "2.0", "commands": ["b"]}, path)
    assert results.resume()
    assert results.provenance["commands"] == ["a", "b"]
    jobs = Jobs()
    run(monkeypatch, jobs, *given, "--rounds", 2, results=results)
    assert jobs.jobs == [("ddp",), ("ddp", "compute")]
    again = Results(about, path)
    again.resume()
    assert again.reports() == results.reports()
    assert [[r.number for r in row.rounds] for row in again.rows.values()] == [[0, 1], [0, 1]]
    assert not list(tmp_path.glob("*.part"))

    with pytest.raises(ResultsError, match=r"r.json: was measured with torch '2.0', expected '2.1'; give another"):
        Results({"torch": "2.1", "commands": []}, path).resume()
    with pytest.raises(ResultsError, match=r"cnn, none, 2 was measured with the variants compute ddp, expected ddp"):
        again.plan([("cnn", "none", 2)], ["ddp"])
    again.plan([("cnn", "none", 4)], ["ddp"])
    path.write_text('{"rows": []}')
    with pytest.raises(ResultsError, match="got no results of this benchmark"):
        Results(about, path).resume()


def test_rounds_are_compared_one_by_one():
    results = Results({})

    def add(variant, *rounds, cell=CELL):
        results.variants.setdefault(cell, []).append(variant)
        results.row(cell, variant).rounds += rounds

    # The machine is half as fast in the second round, and a third as fast in the third.
    add("compute", Round(0, [1.0, 1.0], 0, 0.0), Round(1, [2.0] * 3, 0, 0.0), Round(2, [3.0], 0, 0.0))
    add(
        "horovod",
        Round(0, [8.0, 8.0], 0, 4e6, 5e6),
        Round(1, [16.0], 0, 6e6, 5e6),
        Round(2, error="RuntimeError: a | b"),
    )
    add("ddp-fp16", Round(0, [4.0], 0, 3e6, 2e6), Round(1, [8.0], 0, 3e6, 2e6), Round(2, [12.0], 0, 3e6, 2e6))
    add("ddp:topk", Round(0, [2.0], 0.5, 3e6, 2e6), Round(1, [4.0], 0.5, 3e6, 2e6), Round(2, [5.0], 3.0, 3e6, 2e6))
    add("ddp-powersgd", Round(0, error="bad | worse"), Round(1, error="bad"))
    add("ddp", Round(0, [4.0, 4.0], 0, 4e6, 4e6), cell=("cnn", "100mbit", 2))
    rows = {(row["rate"], row["variant"]): row for row in results.reports()}
    topk = rows["1gbit", "ddp:topk"]
    assert (topk["times_fp32"], topk["times_fp16"], topk["share_of_ideal"]) == (4.0, 2.0, 0.5)
    # Of the rounds: 2 - 1 - 0.5, 4 - 2 - 0.5 and max(0, 5 - 3 - 3).
    assert (topk["compute_ms"], topk["compression_ms"], topk["communication_ms"]) == (2.0, 0.5, 0.5)

    lines = list(training.markdown(rows.values()))
    assert "**cnn** (0.0 M parameters), 2 ranks, 1 Gb/s for each" in "\n".join(lines)
    assert "| ddp:topk | 4.0 (2.8–4.6) | 50% | 4.00 | 2.00 | 2.0 | 0.5 | 0.5 | 3.000 | 2.000 |" in lines
    fp32 = "| horovod | 8.0 (8.0–12.8); aborts in 1 of 3 rounds: RuntimeError: a \\| b | 12% | 1.00 | 0.50 | 1.5 | 0.0 "
    assert fp32 + "| 10.5 | 5.000 | 5.000 |" in lines
    assert f"| ddp-powersgd | aborts in 2 of 2 rounds: bad \\| worse {'|  ' * 8}|" in lines
    assert "| ddp | 4.0 (4.0–4.0) | - | - | - | - | 0.0 | - | 4.000 | 4.000 |" in lines  # no baseline on that network


def test_a_chart_has_a_panel_for_each_model_and_number_of_ranks(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.training import chart

    results = Results({})
    for ranks in (2, 4):
        for rate in ("1gbit", "none"):
            results.plan([("cnn", rate, ranks)], ["compute", "horovod"])
            results.row(("cnn", rate, ranks), "compute").rounds.append(Round(0, [1.0, 1.0, 1.0]))
            results.row(("cnn", rate, ranks), "horovod").rounds.append(Round(0, [9.0, 9.0, 9.0]))
    chart.draw(results.reports(), tmp_path / "r.svg")
    text = (tmp_path / "r.svg").read_text()
    assert all(f"<!-- cnn, {ranks} ranks -->" in text for ranks in (2, 4))
    assert text.count("<!-- stock Horovod fp32 -->") == 4


def test_a_chart_of_speeds_has_the_fastest_variant_of_each_series(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.training import chart

    results = Results({})
    ms = {"compute": 1.0, "horovod": 9.0, "ddp": 8.0, "ddp-fp16": 4.0, "horovod:acpsgd": 3.0, "ddp:acpsgd": 2.0}
    for rate in ("none", "100mbit", "1gbit"):
        results.plan([("cnn", rate, 2)], list(ms))
        for variant, step in ms.items():
            results.row(("cnn", rate, 2), variant).rounds.append(Round(0, [step] * 3))
    rows = results.reports()
    found = chart.fastest(rows[: len(ms)])
    assert {name: row["variant"] for name, row in found.items()} == {
        "fp32": "ddp", "fp16": "ddp-fp16", "`ACPSGD()`": "ddp:acpsgd",
    }  # fmt: skip
    chart.draw_rates(rows, tmp_path / "r.svg", ranks=2)
    text = (tmp_path / "r.svg").read_text()
    assert all(f"<!-- {label} -->" in text for label in ("cnn", "fp32", "ACPSGD()", "100 Mb/s", "1 Gb/s", "unshaped"))
    assert text.index("<!-- 100 Mb/s -->") < text.index("<!-- 1 Gb/s -->") < text.index("<!-- unshaped -->")
    assert "QSGD" not in text


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
    assert error_line(output) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["horovd"], "got 'horovd', expected stock, methods, ddp-methods, all, floor, compute, horovod"),
        (["ddp:nothing"], "unknown compression method 'nothing'"),
        (["horovod:gradiveq"], "which compresses after 2600 steps, expected at most 199"),
        (["--steps", "2"], "got '2', expected a whole number of at least 3"),
        (["--interleave", "--fresh"], "--interleave: got --fresh, expected one of them"),
        (["--ranks", "0"], "got '0', expected a whole number of at least 1"),
        (["ddp", "--hosts", "2", "--ranks", "3"], "--hosts 2: got [3] ranks, expected even numbers"),
        (["horovod", "--hosts", "2"], "--hosts 2: got variants of Horovod, expected those of torchrun"),
        (["--rate", "fast"], "got rate 'fast', expected a number"),
        (["--data", "/no/such"], "/no/such: no such file or folder"),
        (["--batch-size", "700"], "expected at most all 1297 images"),
        (["--png", "chart"], "expected a name that ends in .png, .svg or .pdf"),
        (["--json", "/no/such/file"], "expected a file in a folder that exists"),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, given, expected):
    with pytest.raises(SystemExit) as exit_info:
        arguments(monkeypatch, *given)
    assert exit_info.value.code == 2
    assert expected in capsys.readouterr().err


def test_defaults(monkeypatch, tmp_path):
    args = arguments(monkeypatch, "horovod:topk", "stock", "ddp")
    assert args.variants == ["horovod:topk", *SHORTHANDS["stock"]]
    assert (args.model, args.rate, args.ranks) == (["alexnet", "resnet18", "charlm"], ["none"], [2])
    text = tmp_path / "text"
    text.write_text("x" * 10_000)
    args = arguments(monkeypatch, "--data", text, "--quick", "--rate", "none", "--model", "charlm", "--model", "cnn")
    assert args.data_of == {"charlm": str(text), "cnn": None}
    assert (args.variants, args.rounds) == (list(QUICK), 1)


@pytest.mark.parametrize(
    ("variant", "seconds", "expected"),
    [
        ("ddp", [1.0, 1.0], 7), ("ddp", [1.0, 2.0], 3), ("ddp", [9.0, 1.0], 3), ("ddp", [0.01, 0.01], 20),
        ("ddp:topk", [1.0, 1.0], 8), ("ddp:topk", [9.0, 1.0], 4),
    ],
)  # fmt: skip
def test_ranks_agree_on_the_number_of_steps(variant, seconds, expected):
    class Group:
        def gather(self, row):
            return torch.tensor(seconds, dtype=row.dtype)[:, None]

    job = Job("cnn", "none", 2, (variant,), None, 1, seed=0, warmup=1, steps=20, seconds=7, threads=1)
    assert {num_steps(job, own, ":" in variant, Group()) for own in seconds} == {expected}


def test_shorthands_have_every_method():
    def needs_no_arguments(name):
        with contextlib.suppress(ValueError):
            return gradzip.parse(name)

    assert {spec.partition(":")[0] for spec in METHODS} == set(filter(needs_no_arguments, registered())) - {"none"}
    every = expanded(["all"])
    assert len(set(map(label, every))) == len(every)
    assert {front_end(variant) for variant in every} == {"horovod", "ddp"}
    assert least_warmup("horovod:gradiveq:warmup_steps=1,sample_steps=4") == 6
    assert least_warmup("ddp:per-layer:conv=gradiveq(warmup_steps=0,sample_steps=2),default=topk") == 3
    assert least_warmup("ddp:phases:0=none,7=gradiveq(warmup_steps=1,sample_steps=4)") == 7 + 6
    assert (least_warmup("ddp-powersgd"), least_warmup("horovod:topk"), least_warmup("local(every=9):qsgd")) == (
        3,
        1,
        9,
    )
    assert label("local(every=30,lr=1,momentum=0):topk:bits=8") == "every 30 steps, `topk:bits=8`"


def test_the_floor_is_that_of_the_same_front_end():
    results = Results({})
    ms = {"compute": 90.0, "ddp-noop": 100.0, "ddp:topk": 125.0, "horovod-noop": 120.0, "horovod:topk": 160.0}
    for rate in ("1gbit", "none"):
        results.plan([("resnet18", rate, 2)], list(ms))
        for variant, time in ms.items():
            time *= 1 if rate == "1gbit" else 2
            results.row(("resnet18", rate, 2), variant).rounds.append(Round(0, [time, time]))
    shares = {row["variant"]: round(100 * row["share_of_floor"]) for row in results.reports() if row["rate"] == "1gbit"}
    assert shares == {"compute": 111, "ddp-noop": 100, "ddp:topk": 80, "horovod-noop": 100, "horovod:topk": 75}


def test_a_beaten_step_without_communication_is_no_bound():
    rows = [{"variant": "compute", "ms": 651.0}, {"variant": "horovod", "ms": 529.0}]
    assert "no bound" in report.labels(rows)("compute") and "Horovod" in report.labels(rows)("horovod")
    rows[1]["ms"] = 700.0
    assert report.labels(rows)("compute") == "no communication (upper bound)"
