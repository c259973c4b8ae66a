"""benchmarks/convergence: runs against plain torch and real jobs, interrupted runs, tables, wrong arguments."""

import contextlib
import copy
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

import gradzip
from launch import python, scenarios
from meeting import meet

pytest.importorskip("sklearn")

import data
import models
from benchmarks.common.charts import MOST_SERIES
from benchmarks.common.palette import METHOD_COLORS, method_color
from benchmarks.common.results import RESULTS, ResultsError
from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence import chart, report
from benchmarks.convergence.arguments import checked, parser
from benchmarks.convergence.jobs import BusyError, exclusive, run_all
from benchmarks.convergence.recipes import IMAGE_METHODS, SIZES, Run, compressor, load_data, runs_of
from benchmarks.convergence.results import Results, rows
from benchmarks.convergence.run import Record, Training, train, work
from gradzip.methods.base.registry import registered
from train import learning_rate

PARAMETERS = 188_234  # of `cnn` on digits
TINY = Run(  # 4 steps an epoch
    "images", "none", 0.05, seed=1, network="cnn", epochs=3, workers=2, batch_size=8, share=0.06, optimizer="sgd",
    betas=(),
)  # fmt: skip
SETTINGS = {
    "network": "cnn", "optimizer": "sgd", "betas": [], "data": "digits", "examples": 1000, "workers": 4,
    "batch_size": 5, "epochs": 2, "steps": 50, "measure": "test accuracy, %", "digits": 1, "lower_is_better": False,
    "margin": 2.0,
}  # fmt: skip


# Runs.


def digest_of(parameters):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters)).hexdigest()


def test_training_without_compression_is_plain_training(tmp_path, one_thread):
    """One copy of the network, trained with the mean of four workers' gradients, in plain torch."""
    run = replace(TINY, workers=4, epochs=2)
    dataset = load_data(run, None)
    lines = []
    record = train(run, dataset, tmp_path / "c.pt", lines.append)

    steps = 2 * (77 // 32)
    torch.manual_seed(1)
    network = models.cnn(1, 10)
    optimizer = torch.optim.SGD(network.parameters(), 0.05, 0.9, weight_decay=5e-4)
    shards = [data.batches(dataset, batch_size=8, rank=rank, size=4, seed=1) for rank in range(4)]
    all_losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(0.05, step, steps)
        losses = [F.cross_entropy(network(inputs), targets) for inputs, targets in map(next, shards)]
        gradients = [torch.autograd.grad(loss, list(network.parameters())) for loss in losses]
        for parameter, *of_workers in zip(network.parameters(), *gradients):
            parameter.grad = sum(of_workers[1:], start=of_workers[0]) / 4
        optimizer.step()
        all_losses.append(sum(loss.item() for loss in losses) / 4)
    inputs, labels = (torch.cat(parts) for parts in zip(*dataset.test_batches(0, 1)))
    right = (network.eval()(inputs).argmax(1) == labels).sum().item()

    assert record.digest == digest_of(network.parameters())
    assert record.scores[-1] == pytest.approx(100 * right / 500)
    assert record.train_losses[1] == [pytest.approx(sum(all_losses[2:]) / 2, abs=1e-5)]
    assert record.payload_bytes == [4 * PARAMETERS * 2, 4 * PARAMETERS * 4]
    assert record.handed == {"reduced": 4 * PARAMETERS * 4}
    assert record.done and record.diverged is None and record.parameters == PARAMETERS
    assert lines[-1] == {"record": asdict(record)} and [len(line["record"]["scores"]) for line in lines] == [1, 2]


def test_local_steps_are_plain_training_of_each_worker(tmp_path, one_thread):
    """After a step of data-parallel training, two copies train alone and meet every third step, in plain torch."""
    run = replace(TINY, method="local(every=3,lr=0.5,momentum=0):phases:0=none,1=none", epochs=2)
    dataset = load_data(run, None)
    record = train(run, dataset, tmp_path / "c.pt", lambda line: None)

    torch.manual_seed(1)
    networks = [models.cnn(1, 10)]
    optimizers = [torch.optim.SGD(networks[0].parameters(), 0.05, 0.9, weight_decay=5e-4)]
    shards = [data.batches(dataset, batch_size=8, rank=rank, size=2, seed=1) for rank in range(2)]
    alone = 0
    for step in range(8):
        batches = [next(shard) for shard in shards]
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(0.05, step, 8)
            optimizer.zero_grad()
        if step == 0:
            (sum(F.cross_entropy(networks[0](inputs), targets) for inputs, targets in batches) / 2).backward()
            optimizers[0].step()
            network, optimizer = copy.deepcopy((networks[0], optimizers[0]))
            networks, optimizers = [*networks, network], [*optimizers, optimizer]
            shared = [p.detach().clone() for p in network.parameters()]
            continue
        for network, optimizer, (inputs, targets) in zip(networks, optimizers, batches):
            F.cross_entropy(network(inputs), targets).backward()
            optimizer.step()
        alone += 1
        if alone == 3 or step in (3, 7):  # 4 steps an epoch; the end of one is an exchange, too
            with torch.no_grad():
                for ours, *theirs in zip(shared, *(network.parameters() for network in networks)):
                    ours -= 0.5 * sum(ours - p for p in theirs) / 2
                    for p in theirs:
                        p.copy_(ours)
            alone = 0

    inputs, labels = (torch.cat(parts) for parts in zip(*dataset.test_batches(0, 1)))
    loss = F.cross_entropy(networks[1].eval()(inputs), labels).item()
    assert record.done and record.test_losses[1] == pytest.approx(loss, rel=1e-5)
    assert record.test_losses[1] != pytest.approx(record.test_losses[0], rel=1e-3)
    assert record.payload_bytes == [4 * PARAMETERS * n for n in (2, 4)]


class Stop(Exception):
    pass


def run_to_epoch(run, dataset, checkpoint, epoch):
    """Train until an epoch is done, and stop."""

    def report(line):
        if len(line.get("record", {"scores": ()})["scores"]) == epoch:
            raise Stop

    with pytest.raises(Stop):
        train(run, dataset, checkpoint, report)


QUICK_METHODS = ("acpsgd", "topk", IMAGE_METHODS[-1])


@pytest.mark.parametrize(
    "method", [m if m in QUICK_METHODS else pytest.param(m, marks=pytest.mark.long) for m in IMAGE_METHODS]
)
def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path, one_thread, method):
    run = replace(TINY, method=method)
    dataset = load_data(run, None)
    run_to_epoch(run, dataset, tmp_path / "a.pt", 1)
    run_to_epoch(run, dataset, tmp_path / "a.pt", 2)
    resumed = train(run, dataset, tmp_path / "a.pt", lambda line: None)
    direct = train(run, dataset, tmp_path / "b.pt", lambda line: None)
    if method.startswith("gradiveq"):  # compares the ranks' positions again: a header for each convolution and start
        assert [b - a for a, b in zip(direct.payload_bytes, resumed.payload_bytes)] == [0, 2 * 48, 4 * 48]
        resumed.payload_bytes = direct.payload_bytes
        assert resumed.handed == direct.handed | {"gathered": direct.handed["gathered"] + 4 * 48}
        resumed.handed = direct.handed
    assert sum(direct.handed.values()) == direct.payload_bytes[-1]
    assert resumed == direct
    assert resumed.digest and len(resumed.scores) == 3


def test_methods_change_what_is_sent_and_what_is_learned(tmp_path, one_thread):
    run = replace(TINY, epochs=1)
    dataset = load_data(run, None)
    records = {
        method: train(replace(run, method=method), dataset, tmp_path / f"{i}.pt", lambda line: None)
        for i, method in enumerate(("none", "topk", "topk:theta=0.9"))
    }
    assert len({record.digest for record in records.values()}) == 3
    none, sparse, dense = (record.payload_bytes[0] / 4 for record in records.values())
    # 1 % or 10 % of the elements, at 4 bytes and at least one bit of index; biases and headers are added.
    assert none == 4 * PARAMETERS
    assert 0.01 * 4.1 * PARAMETERS < sparse < 0.02 * 4 * PARAMETERS
    assert 0.1 * 4.1 * PARAMETERS < dense < 0.12 * 4 * PARAMETERS


def test_a_run_that_diverges_is_recorded_and_not_repeated(tmp_path, monkeypatch):
    run = replace(TINY, lr=1e30)
    dataset = load_data(run, None)
    record = train(run, dataset, tmp_path / "c.pt", lambda line: None)
    assert record.done and 0 < record.diverged < 4 and record.scores == []
    monkeypatch.setattr(Training, "step", None)
    assert train(run, dataset, tmp_path / "c.pt", lambda line: None) == record


def test_text_is_scored_in_bits_per_character(tmp_path, one_thread, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_bytes(b"to be or not to be, " * 700)
    tiny = models.MODELS["charlm"]._replace(build=lambda v, c: models.CharLM(v, c, 24, 1, 2))
    monkeypatch.setitem(models.MODELS, "tiny", tiny)
    run = Run(
        "text", "none", 0.01, seed=0, network="tiny", epochs=1, workers=2, batch_size=4, share=0.5, optimizer="adamw",
        betas=(),
    )  # fmt: skip
    dataset = load_data(run, str(path))
    assert (len(dataset.train), len(dataset.test)) == (6300, 1400)
    record = train(run, dataset, tmp_path / "c.pt", lambda line: None)
    assert record.scores[0] == pytest.approx(record.test_losses[0] / math.log(2))
    assert 0 < record.scores[0] < 8


@pytest.mark.long
def test_a_killed_process_continues_bit_for_bit(tmp_path, one_thread):
    run = replace(TINY, method="qsgd", share=0.5)
    jobs = {"qsgd": (run, None, 1, tmp_path / "c.pt")}
    with exclusive(tmp_path / "work") as lock:
        with contextlib.closing(run_all(work, jobs, 1, lock)) as lines:
            next(line for _, line in lines if "record" in line)
        assert len(torch.load(tmp_path / "c.pt")["record"]["scores"]) == 1
        lines = [line for _, line in run_all(work, jobs, 1, lock)]
    records = [line["record"] for line in lines if "record" in line]
    assert [len(record["scores"]) for record in records] == [1, 2, 3] and lines[-1] == {"end": None}
    direct = train(run, load_data(run, None), tmp_path / "direct.pt", lambda line: None)
    assert Record(**records[-1]) == direct


@pytest.mark.long
def test_real_ranks_end_with_the_bits_of_simulated_ones(tmp_path, one_thread):
    """With two ranks: their mean does not depend on the order of addition."""
    pytest.importorskip("horovod.torch")
    from convergence_worker import RUN

    gradiveq = "gradiveq:warmup_steps=4,sample_steps=4,compress_steps=10"
    results = scenarios(2, "convergence_worker.py", tmp_path, "none", "acpsgd", "fft-range", "topk", "qsgd", gradiveq)
    dataset = load_data(RUN, None)
    for method, of_ranks in results.items():
        run = replace(RUN, method=method)
        training = Training(run, dataset)
        shards = [data.batches(dataset, batch_size=8, rank=rank, size=2, seed=RUN.seed) for rank in range(2)]
        for step, batches in enumerate(itertools.islice(zip(*shards), training.steps)):
            training.step(learning_rate(RUN.lr, step, training.steps), batches)
        for parameters in of_ranks:
            assert digest_of(parameters) == digest_of(training.network.parameters()), method
        record = train(run, dataset, tmp_path / f"{run.stem}.pt", lambda line: None)
        assert record.digest == digest_of(of_ranks[0])


# Recipes.


@pytest.mark.parametrize("size", SIZES)
def test_recipes(size):
    for recipe in SIZES[size].values():
        assert recipe.methods[0] == "none" and len(set(recipe.methods)) == len(recipe.methods)
        for method in recipe.methods:
            compressor(method, steps=100)
    runs = runs_of(SIZES[size])
    assert len({run.stem for run in runs}) == len({run.key for run in runs}) == len(runs)
    if size == "full":
        images = SIZES[size]["images"]
        assert (images.workers * images.batch_size, len(images.lrs), len(images.seeds)) == (128, 3, 2)
        assert images.epochs >= 10
        assert set(Counter((run.recipe, run.method) for run in runs).values()) == {6}


def test_runs_are_in_the_order_of_their_use():
    recipes = {name: replace(recipe, methods=recipe.methods[:2]) for name, recipe in SIZES["full"].items()}
    runs = runs_of(recipes)
    assert [run.key[:2] for run in runs[:4]] == [
        ("images", "none"), ("images", "acpsgd"), ("text", "none"), ("text", "acpsgd:rank=4"),
    ]  # fmt: skip
    assert [(run.seed, run.lr) for run in runs[:: 2 * len(recipes)]] == [
        (seed, lr) for lr in SIZES["full"]["images"].lrs for seed in (0, 1)
    ]


def test_a_run_has_the_optimizer_of_its_recipe():
    parameters = [torch.zeros(2, requires_grad=True)]
    for run, betas in (
        (replace(TINY, optimizer="adamw"), (0.9, 0.95)),
        (replace(TINY, optimizer="adamw", betas=(0.3, 0.99)), (0.3, 0.99)),
    ):
        training = Training(run, load_data(run, None))
        assert training.optimizer.param_groups[0]["betas"] == betas
        assert isinstance(training.optimizer, type(models.OPTIMIZERS[run.optimizer](parameters, 0.1)))
    for method, kind in (("none", torch.optim.SGD), ("dgc", gradzip.optim.DGCSGD)):
        optimizer = Training(replace(TINY, method=method), load_data(TINY, None)).optimizer
        assert (type(optimizer), optimizer.defaults["momentum"]) == (kind, 0.9)
    adamw = Training(replace(TINY, method="dgc", optimizer="adamw"), load_data(TINY, None)).optimizer
    assert adamw.param_groups[0]["betas"] == (0.0, 0.95)
    muon = Training(replace(TINY, optimizer="muon"), load_data(TINY, None))
    matrices, others = (group["params"] for group in muon.optimizer.param_groups)
    assert all(p.ndim == 2 for p in matrices) and len(matrices) + len(others) == len(list(muon.network.parameters()))
    held = Training(
        replace(TINY, method="momentum:inner=topk,warmup_steps=10%", optimizer="adamw"), load_data(TINY, None)
    )
    assert type(held.optimizer) is gradzip.optim.AdamW and held.optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def test_specs_may_depend_on_the_number_of_steps():
    dgc = compressor("dgc:warmup_steps=10%", steps=200)
    assert dgc.warmup_steps == 20
    assert compressor("gradiveq:sample_steps=5%", steps=10).sample_steps == 2  # at least
    for spec in ("fft-range:theta={0:0.9,50%:0.0}", "fft-range:theta={0:0.9,50%:0.0},bits=8"):
        fft = compressor(spec, steps=200)
        assert [fft.theta(step) for step in (0, 99, 100, 199)] == [0.9, 0.9, 0, 0]
        assert fft.bits == (8 if "bits" in spec else 10)
    with pytest.raises(ValueError, match="unknown compression method 'zip'"):
        compressor("zip", steps=10)
    assert compressor("local(every=3):phases:0=none,5%=qsgd", steps=100).configuration == [0, 5]
    with pytest.raises(ValueError, match=r"got local\(steps=3\), expected every=N"):
        compressor("local(steps=3):none", steps=10)
    for spec in ("fft-range:theta={5:0.9}", "fft-range:theta={0:9}", "fft-range:theta={0}", "qsgd:theta={0:0.5}"):
        with pytest.raises(ValueError, match="expected a schedule such as"):
            compressor(spec, steps=10)


# Processes.


def test_processes_work_side_by_side(tmp_path):
    (tmp_path / "met").mkdir()
    jobs = {name: (tmp_path / "met", name) for name in ("a", "b", "c", "bad", "killed", "e")}
    with exclusive(tmp_path / "work") as lock:
        lines = list(run_all(meet, jobs, 2, lock))
    of_job = {job: [line for name, line in lines if name == job] for job in jobs}
    assert len({of_job[job].pop(0)["pid"] for job in "abce"}) == 4
    assert all(of_job[job] == [{"end": None}] for job in "abce")
    assert of_job["bad"] == [{"end": "ValueError: no luck"}] and of_job["killed"] == [{"end": "exit status -9"}]


def test_processes_are_killed_when_a_study_ends_and_hold_its_folder_until_then(tmp_path):
    (tmp_path / "met").mkdir()
    (tmp_path / "met" / "somebody").touch()
    with exclusive(tmp_path / "work") as lock:
        lines = run_all(meet, dict.fromkeys(range(3), (tmp_path / "met", "sleeps")), 2, lock)
        pids = [next(lines)[1]["pid"] for _ in range(2)]
        other = (tmp_path / "work" / "lock").open()
    with other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lines.close()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_folder_is_used_by_one_study(tmp_path):
    folder = tmp_path / "work"
    busy = pytest.raises(BusyError, match="another run uses it; wait until that has ended")
    with exclusive(folder), busy, exclusive(folder):
        pass
    assert not folder.exists()
    with exclusive(folder):
        (folder / "checkpoint.pt").touch()
    assert [path.name for path in folder.iterdir()] == ["checkpoint.pt"]


# Results.


def record(*scores, payload=100, done=True, diverged=None):
    sizes = [payload * (i + 1) for i in range(len(scores))]
    return Record(1000, list(scores), [0.5] * len(scores), [[1.0]] * len(scores), sizes, diverged, "", done)


def results_of(path, records, **changes):
    results = Results({"torch": "2", "commits": ["a"], "commands": ["c"]}, path)
    results.recipes = {"images": SETTINGS | changes}
    results.records = {("images", *key): value for key, value in records.items()}
    results.order = list(results.records)
    return results


def test_results_continue_where_they_were(tmp_path):
    path = tmp_path / "r.json"
    results = results_of(path, {("none", 0.1, 0): record(50.0, 60.0), ("topk", 0.1, 0): record(40.0, done=False)})
    results.save()
    assert json.loads(path.read_text())["runs"][1]["method"] == "topk"
    again = Results({"torch": "2", "commits": ["b"], "commands": ["c"]}, path)
    assert again.resume()
    assert again.records == results.records and again.recipes == results.recipes
    assert (again.provenance["commits"], again.provenance["commands"]) == (["a", "b"], ["c"])
    runs = [replace(TINY, method=method, lr=0.1, seed=0, epochs=2) for method in ("none", "qsgd", "topk")]
    assert [again.finished_epochs(run) for run in runs] == [2, 0, 1]
    again.plan({"images": SETTINGS}, runs)
    again.records[runs[1].key] = record(diverged=7)
    assert again.finished_epochs(runs[1]) == 2
    again.save()
    assert [run["method"] for run in json.loads(path.read_text())["runs"]] == ["none", "qsgd", "topk"]
    assert not list(tmp_path.glob("*.part"))

    with pytest.raises(ResultsError, match=r"r.json: was measured with torch '2', expected '3'; give another --json"):
        Results({"torch": "3"}, path).resume()
    with pytest.raises(ResultsError, match=r"trained images with epochs 2, expected 9; give another --json"):
        again.plan({"images": SETTINGS | {"epochs": 9}}, [])
    for text in ("{", "[]", '{"provenance": {}, "recipes": {}}'):
        path.write_text(text)
        with pytest.raises(ResultsError, match="got no results of this benchmark"):
            Results({}, path).resume()
    assert not Results({}, tmp_path / "none.json").resume()


def test_each_method_has_its_best_learning_rate(tmp_path):
    records = {
        ("none", 0.1, 0): record(50.0, 60.0), ("none", 0.1, 1): record(52.0, 64.0),
        ("none", 0.3, 0): record(50.0, 61.0), ("none", 0.3, 1): record(50.0, 61.0),
        ("topk", 0.1, 0): record(30.0, diverged=70), ("topk", 0.1, 1): record(59.0, 63.0),
        ("topk", 0.3, 0): record(57.0, 59.0), ("topk", 0.3, 1): record(57.0, 63.0),
        ("qsgd", 0.1, 0): record(diverged=3), ("qsgd", 0.3, 0): record(30.0, diverged=60),
        ("dgc", 0.1, 0): record(10.0, done=False),
        ("none", 0.9, 0): record(90.0, 90.0),  # which the others have not been run with
    }  # fmt: skip
    none, topk, qsgd = rows(results_of(tmp_path / "r.json", records), "images")
    assert (none.method, none.lr, none.score, none.by_lr) == ("none", 0.1, 62.0, {0.1: 62.0, 0.3: 61.0})
    assert (topk.method, topk.lr, topk.score, topk.by_lr) == ("topk", 0.3, 61.0, {0.1: None, 0.3: 61.0})
    assert (qsgd.lr, qsgd.score, qsgd.by_lr) == (0.1, None, {0.1: None, 0.3: None})
    assert none.curve == [51.0, 62.0] and none.payload_bytes == [100, 200]
    assert [none.reaches(goal, False) for goal in (51, 62, 63)] == [1, 2, None]

    lower = rows(results_of(tmp_path / "r.json", records, lower_is_better=True), "images")
    assert [(row.method, row.lr) for row in lower] == [("none", 0.3), ("topk", 0.3), ("qsgd", 0.1)]
    assert [lower[0].reaches(goal, True) for goal in (61, 50, 40)] == [1, 1, None]


def test_table(tmp_path):
    records = {
        ("none", 0.1, 0): record(50.0, 60.0, payload=200_000), ("none", 0.1, 1): record(52.0, 64.0, payload=200_000),
        ("none", 0.3, 0): record(50.0, 61.0), ("none", 0.3, 1): record(50.0, 61.0),
        ("topk", 0.1, 0): record(60.0, 60.4, payload=5_000),
        ("topk", 0.3, 0): record(5.0, 5.0),
        ("qsgd", 0.1, 0): record(diverged=3), ("qsgd", 0.3, 0): record(30.0, diverged=60),
        ("dgc", 0.1, 0): record(10.0, done=False),
    }  # fmt: skip
    text = report.report(results_of(tmp_path / "r.json", records))
    lines = text.splitlines()
    assert lines[0] == (
        "**images**: cnn (0.00 M parameters) on digits, 4 workers with batches of 5, 2 epochs of 50 steps, sgd"
    )
    assert lines[2:8] == [
        "| method | kB per step | times fewer | test accuracy, % | − `none` | lr 0.1 | lr 0.3 "
        "| steps to 60.0 | MB to it |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| `none` | 4 | 1 | 62.0 (60.0–64.0) |  | **62.0** | 61.0 | 100 | 0.4 |",
        "| `topk` | 0.1 | 40 | 60.4 | −1.6 | **60.4** | 5.0 | 50 | 0.005 |",
        "| `qsgd` |  |  | diverged |  | **diverged** | diverged | – | – |",
        "",
    ]
    assert "Means over 1 to 2 seeds" in text and "1 run(s) are not finished" in text and "within 2 of" in text

    one = {("topk", 0.1, 5): record(1.0, 2.0)}
    text = report.report(results_of(tmp_path / "r.json", one))
    assert "| `topk` | 0.002 | 2000 | 2.0 |  |\n" in text  # nothing to compare with
    assert "One run each." in text and "Steps to" not in text and "Peak learning rate 0.1 for all methods." in text
    assert report.report(results_of(tmp_path / "r.json", {})) == ""


def test_seconds_are_those_of_measured_steps(tmp_path, monkeypatch):
    where = {"model": "cnn", "rate": "1gbit", "ranks": 4}
    measured = [
        {**where, "variant": "ddp", "ms": 200.0},
        {**where, "variant": "compute", "ms": 100.0},
        {**where, "variant": "ddp:topk", "ms": 120.0},
        {**where, "variant": "ddp:qsgd", "rounds": []},  # failed
        {**where, "variant": "ddp:topk", "ms": 1.0, "rate": "none"},
    ]
    (tmp_path / "steps.json").write_text(json.dumps({"rows": measured}))
    monkeypatch.setattr(report, "STEPS", tmp_path / "steps.json")
    records = {
        ("none", 0.1, 0): record(50.0, 60.0), ("topk", 0.1, 0): record(60.0, 60.4),
        ("qsgd", 0.1, 0): record(50.0, 59.0), ("dgc", 0.1, 0): record(10.0, 20.0),
    }  # fmt: skip
    text = report.report(results_of(tmp_path / "r.json", records))
    assert "| MB to it | s to it |" in text and "with 4 ranks at 1 Gb/s" in text
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    assert [(row[0], row[-3], row[-1]) for row in cells] == [
        ("`none`", "100", "20"), ("`topk`", "50", "6"), ("`qsgd`", "100", "–"), ("`dgc`", "–", "–"),
    ]  # fmt: skip
    assert report.step_times("cnn", 2) == {}


def test_short_tables_have_what_the_full_ones_have():
    lines = list(report.in_short("momentum", "text"))
    assert lines[0] == (
        "charlm-small, 0.28 M parameters, adamw, 980 steps, 2 seeds, the best of the rates 0.002, 0.004, 0.008 "
        "(`convergence_momentum.json`):"
    )
    full = [line.split(" | ") for line in report.report(report.stored("momentum")).splitlines() if "| `" in line]
    short = [line.split(" | ") for line in lines if "| `" in line]
    assert short[0][:2] == ["| `none`", "1"] and sorted(row[0] for row in short) == sorted(row[0] for row in full)
    for row in short:
        (of_method,) = (cells for cells in full if cells[0] == row[0])
        assert row[3] == of_method[3]
    assert [row[4] for row in short] == ["", "−0.8", "+1.3"]  # the best first


def test_single_runs_are_beside_training_without_compression_with_their_seeds():
    lines = report.CHOSEN[report.PAGE, "other local steps"]
    cells = [line.split(" | ") for line in report.of_single_runs("what | `every`", lines)][2:]
    (images,) = (row for row in cells if row[0] == "| ResNet-20, SGD")
    resnet20 = json.loads((RESULTS / "convergence_resnet20.json").read_text())["runs"]
    (seed0,) = (run for run in resnet20 if (run["method"], run["seed"]) == ("none", 0))
    assert images[4:] == ["79.67 %", f"{seed0['scores'][-1]:.2f} %", "−1.95 points", "1", "only one |"]


def test_a_run_with_real_ranks_is_beside_one_with_real_ranks():
    lines = [line for line in report.CHOSEN[report.README, "recommendations"] if isinstance(line, report.RealLine)]
    (cells,) = [line.split(" | ") for line in report.of_single_runs("optimizer | method", lines)][2:]
    runs = json.loads((RESULTS / "whole_runs.json").read_text())["rows"]
    final = {run["method"]: run["scores"][-1] for run in runs if run["study"] == "text"}
    method, hook = final["block-float:bits=4,rounding=nearest"], final["ddp-fp16"]
    assert cells[4:] == [f"{method:.3f}", f"{hook:.3f}", f"{100 * (method / hook - 1):+.1f} %", "1", "highest of 3 |"]


def test_the_page_has_all_pictures():
    page = report.PAGE.read_text()
    pictures = {f"accuracy-{study}.png" for study in chart.PICTURES}
    assert set(re.findall(r"accuracy-\w+\.png", page)) == pictures
    assert {path.name for path in (report.PAGE.parent / "images").glob("accuracy-*")} == pictures


@pytest.mark.parametrize("study", chart.PICTURES)
def test_pictures_show_six_methods_at_most(study):
    results = Results({}, RESULTS / f"convergence_{study}.json")
    results.resume()
    picture = chart.PICTURES[study]
    for recipe, methods in picture.methods.items():
        assert set(methods) <= {row.method for row in rows(results, recipe)} and methods[0] == "none"
        assert len(set(methods)) <= MOST_SERIES
        assert results.recipes[recipe]["epochs"] > 1
    names = {method.partition(":")[0] for methods in picture.methods.values() for method in methods}
    assert len(names) <= MOST_SERIES and names - {"phases"} <= set(METHOD_COLORS)


def test_a_method_has_one_colour():
    assert method_color("topk") == method_color("topk:theta=0.9,bits=4") == METHOD_COLORS["topk"]
    assert method_color("phases:0=none,10%=acpsgd(rank=4)") == METHOD_COLORS["acpsgd"]
    phases = "phases:0=qsgd,200=momentum(inner=signsgd(majority=False))"
    assert method_color(phases) == METHOD_COLORS["momentum"]
    assert set(METHOD_COLORS) <= set(registered())


def test_chart(tmp_path):
    pytest.importorskip("matplotlib")
    records = {
        ("none", 0.1, 0): record(50.0, 60.0), ("topk", 0.1, 0): record(40.0, diverged=70),
        ("qsgd", 0.1, 0): record(diverged=3),
    }  # fmt: skip
    assert chart.draw(results_of(tmp_path / "r.json", records), tmp_path / "r.svg")
    text = (tmp_path / "r.svg").read_text()
    assert all(f"<!-- {label} -->" in text for label in ("none", "topk (diverged)", "images: cnn on digits"))
    assert "<!-- qsgd" not in text
    assert not chart.draw(results_of(tmp_path / "r.json", {}), tmp_path / "empty.png")
    assert not (tmp_path / "empty.png").exists()


# The command line.


def command(tmp_path, *arguments):
    return [
        *python(), "-m", "benchmarks.convergence", "--quick", "--json", str(tmp_path / "r.json"),
        *map(str, arguments),
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(600)  # it loads torch four times
def test_an_interrupted_study_continues(tmp_path):
    arguments = ("--only", "images", "--compression", "none", "--compression", "topk", "--epochs", 3, "--jobs", 1)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    # The tests may run as a background job of a shell, which starts those with SIGINT ignored.
    heeding = ["env", "--default-signal=INT", *command(tmp_path, *arguments)]
    with subprocess.Popen(heeding, **quiet) as process:
        for line in process.stderr:
            if line.startswith("[1/6]"):
                process.send_signal(signal.SIGINT)
                break
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 130
    (line,) = errors.splitlines()[-1:]
    assert (
        line.startswith("python -m benchmarks.convergence: error: interrupted; to go on ")
        and f"--json {tmp_path / 'r.json'}" in line
    )
    first = json.loads((tmp_path / "r.json").read_text())
    assert 1 <= len(first["runs"][0]["scores"]) < 3
    again = command(tmp_path, *arguments, "--png", tmp_path / "r.png")
    completed = subprocess.run(again, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    assert "continuing" in completed.stderr and "(the last one)" in completed.stderr
    second = json.loads((tmp_path / "r.json").read_text())
    assert [(run["method"], run["done"], len(run["scores"])) for run in second["runs"]] == [
        ("none", True, 3), ("topk", True, 3),
    ]  # fmt: skip
    assert second["runs"][0]["scores"][0] == first["runs"][0]["scores"][0]
    assert "| `topk` | " in completed.stdout and (tmp_path / "r.png").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.png"]


@pytest.mark.long
def test_a_run_that_fails_is_reported(tmp_path):
    work = tmp_path / "r.json.work"
    arguments = ("--only", "images", "--compression", "none", "--epochs", 1)
    (run,) = runs_of({"images": replace(SIZES["quick"]["images"], methods=("none",), epochs=1)})
    work.mkdir()
    (work / f"r-{run.stem}-1.pt").write_text("damaged")
    completed = subprocess.run(command(tmp_path, *arguments), capture_output=True, text=True)
    assert completed.returncode == 1
    assert "expected a checkpoint; delete it to start its run again" in completed.stderr
    assert completed.stderr.endswith("python -m benchmarks.convergence: error: failed: images, none, lr 0.05, seed 0\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--data", "nowhere"], "argument --data: nowhere: no such file or folder"),
        (["--compression", "zip"], "unknown compression method 'zip'"),
        (["--compression", "topk:theta=2"], "got theta = 2"),
        (["--only", "speech"], "argument --only"),
        (["--lr", "0"], "expected a number above 0"),
        (["--quick", "--lr", "0.1"], "argument --lr: expected --only as well"),
        (["--quick", "--full"], "not allowed with"),
        (["--quick", "--workers", "500"], "expected at least 500 x 8, one step of all workers"),
        ([], "images trains on CIFAR-10: got no folder, expected --data DIR"),
        (["--quick", "--png", "x.txt"], "expected a name that ends in .png, .svg or .pdf"),
        (["--report", "--json", "missing.json"], "missing.json: no such file, expected results to report"),
    ],
)
def test_wrong_arguments_are_one_line(monkeypatch, capsys, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["convergence", *arguments])
    with pytest.raises(SystemExit, match="2"):
        convergence.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m benchmarks.convergence: error: ") and says in line


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_damaged_data_is_one_line(monkeypatch, capsys, tmp_path, damage):
    for i in range(1, 6):
        (tmp_path / f"data_batch_{i}.bin").write_bytes(bytes(3073))
    if damage == "truncated":
        (tmp_path / "test_batch.bin").write_bytes(bytes(3000))
    monkeypatch.setattr(sys, "argv", ["convergence", "--data", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        checked(parser())
    (line,) = capsys.readouterr().err.splitlines()
    assert "test_batch.bin" in line and "expected" in line


def test_help_has_examples(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["convergence", "--help"])
    with pytest.raises(SystemExit, match="0"):
        convergence.main()
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m benchmarks.convergence ")
    assert "examples:\n" in shown and "--quick" in shown


def test_arguments_replace_parts_of_a_recipe(monkeypatch):
    given = (
        "--quick --only images --compression topk --compression none --lr 0.2 --lr 0.1 --seed 7 --epochs 3 --workers 2"
    )
    monkeypatch.setattr(sys, "argv", ["convergence", *given.split()])
    args = checked(parser())
    assert [run.key for run in args.runs] == [
        ("images", "topk", 0.2, 7), ("images", "none", 0.2, 7), ("images", "topk", 0.1, 7), ("images", "none", 0.1, 7),
    ]  # fmt: skip
    assert {(run.epochs, run.workers) for run in args.runs} == {(3, 2)}
    assert args.settings["images"]["steps"] == 1297 // 16 and args.data_of == {"images": None}
