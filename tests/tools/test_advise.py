"""`gradzip advise`: known networks, inputs, predictions, accuracy, sentences, bad input, and real jobs."""

import argparse
import contextlib
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

import gradzip
from benchmarks.convergence import studies as written
from gradzip.advice import advice, cost, measure, studies
from gradzip.advice.advice import MARGIN, decide
from gradzip.advice.cost import Compressed, Layer, Link, Step
from gradzip.advice.measure import LayerCost, measure_method
from gradzip.cli import advise, conditions, devices, main
from gradzip.cli.command import CommandError
from gradzip.cli.models import MODELS, Parameter, step_of
from gradzip.collectives.engine import Engine
from kinds import SAMPLE, params
from launch import assert_done, horovodrun, torchrun
from paths import ROOT

# Published numbers of parameters, of torchvision's and Hugging Face's networks.
PUBLISHED = {
    "resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032, "resnet101": 44_549_160,
    "resnet152": 60_192_808, "bert-base": 109_482_240, "bert-large": 335_141_888, "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168, "gpt2-xl": 1_557_611_200, "llama-7b": 6_738_415_616, "llama-7b-lora": 4_194_304,
}  # fmt: skip
# Published multiply-adds of one image, in units of 10^9.
GIGA = {
    "resnet18": 1.81, "resnet34": 3.66, "resnet50": 4.09, "resnet101": 7.80, "resnet152": 11.51,
}  # fmt: skip

SHAPES = {"conv": [64, 32, 3, 3], "norm": [64], "fc": [100, 1024]}
BASE = ["--bandwidth", "1gbit", "--ranks", "4", "--step-ms", "10", "--methods", "topk", "acpsgd"]


@pytest.mark.parametrize("name", MODELS)
def test_known_networks(name):
    parameters = list(MODELS[name]())
    assert sum(p.numel for p in parameters) == PUBLISHED[name]
    assert len({p.name for p in parameters}) == len(parameters)
    if name in GIGA:  # published numbers leave normalizations out, or in
        assert sum(p.work for p in parameters) / 1e9 == pytest.approx(GIGA[name], rel=0.02)


def test_estimated_step():
    step = step_of([Parameter("a", (2, 3), 100.0), Parameter("b", (5,), 0.0), Parameter("c", (7,), 300.0)], 0.6)
    assert [layer.name for layer in step.layers] == ["c", "b", "a"]
    assert [layer.ready for layer in step.layers] == pytest.approx([0.2 + 0.3, 0.2 + 0.3, 0.6])
    assert step.seconds == 0.6
    assert all(layer.ready <= 0.1 for layer in step_of([Parameter("a", (1,), 0.1)] * 7, 0.1).layers)


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.py"
    path.write_text(f"""import torch
def build():
    model = torch.nn.Module()
    for name, shape in {SHAPES}.items():
        model.register_parameter(name, torch.nn.Parameter(torch.empty(shape, device="meta")))
    return model
""")
    return str(path)


def run(capsys, *arguments, status=0):
    assert main(["advise", *map(str, arguments)]) == status
    return capsys.readouterr()


def test_json(capsys, shapes):
    out = json.loads(run(capsys, "--model", shapes, *BASE, "--json").out)
    assert out["parameters"] == 64 * 32 * 9 + 64 + 102400 and out["layers"] == 3
    assert out["front_end"] == "ddp" and out["optimizer"] is None
    assert out["conditions"] == "NVIDIA H100 SXM: times of methods measured on one"
    assert out["assumed"].startswith("No --device, and no GPU here: assumed is --device h100;")
    assert {m["method"] for m in out["methods"]} == {"none", "fp16", "topk", "acpsgd"}
    for m in out["methods"]:
        assert m["seconds"] == pytest.approx(m["compute"] + m["compression"] + m["exposed"])
        assert m["compute"] == out["step_seconds"] == 0.01
        assert m["share_of_ideal"] == pytest.approx(0.01 / m["seconds"])
    times = [m["seconds"] for m in out["methods"]]
    assert times == sorted(times)
    by_name = {m["method"]: m for m in out["methods"]}
    assert by_name["none"]["nbytes"] == 4 * out["parameters"] and by_name["none"]["times_fp32"] == 1
    assert 1.9 < by_name["fp16"]["ratio"] < 2
    kept = {name: m["memory_bytes"] for name, m in by_name.items()}
    shapes = {name: tuple(shape) for name, shape in SHAPES.items()}
    assert kept == {name: gradzip.memory_bytes(gradzip.parse(name), shapes, 4) for name in by_name}
    assert kept["none"] == kept["fp16"] == 0 < kept["topk"] == 4 * (64 * 32 * 9 + 102400) < kept["acpsgd"]
    # The same as a prediction by hand, of work that is estimated by elements.
    parameters = [Parameter(name, tuple(shape), math.prod(shape)) for name, shape in SHAPES.items()]
    step = step_of(parameters, 0.01)
    dense = [cost_of(4.0 * layer.numel) for layer in step.layers]
    expected = cost.predict(step, dense, Link(4, 1.25e8, 5e-5), bucket_nbytes=25 << 20).seconds
    assert by_name["none"]["seconds"] == pytest.approx(expected, rel=1e-12)


def test_text(capsys, shapes):
    """The first line is the answer, the second one what is assumed. No line is longer than 100 characters."""
    text = run(capsys, "--model", shapes, *BASE).out
    lines = text.splitlines()
    assert re.match(r"(Use \w+\(.*\): [\d.]+ times as fast as|Do not compress: \w+ takes) ", lines[0])
    assert lines[1].startswith("No --device, and no GPU here: assumed is --device h100; --device cpu measures here.")
    top = lines.index("") + 1
    assert re.split("  +", lines[top]) == [
        "method", "ms/step", "× fp16", "codec", "exposed", "MB", "MB kept", "holds with"
    ]  # fmt: skip
    assert {line.split()[0] for line in lines[top + 1 : top + 5]} == {"fp32", "fp16", "topk", "acpsgd"}
    assert len({len(line) for line in lines[top : top + 5]}) == 1  # aligned
    after = " ".join(lines[top + 6 :])
    assert f"{shapes}: 0.1 M elements in 3 parameters; 10.0 ms a step without communication" in after
    assert "4 ranks, 1 Gb/s with DDP; 50 us a message NVIDIA H100 SXM: times of methods measured on one" in after
    assert max(map(len, lines)) <= 100


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["advise", "--help"])
    lines = capsys.readouterr().out.splitlines()
    examples = lines[lines.index("examples:") + 1 :]
    assert sum("gradzip advise --" in line for line in examples) >= 6 and max(map(len, examples)) <= 100


def test_here_is_measured(capsys, shapes):
    text = run(capsys, "--model", shapes, *BASE[:-2], "acpsgd", "--device", "cpu").out
    assert "No --device" not in text
    assert re.search(rf"methods measured on cpu, threads: {torch.get_num_threads()}; load [\d.]+, cores: \d+\n", text)


def test_local_steps_where_every_step_cannot_average(capsys, shapes):
    arguments = ["--model", shapes, "--ranks", "2", "--methods", "block-float"]
    text = " ".join(run(capsys, *arguments, "--bandwidth", "1mbit", "--step-ms", 10).out.split())
    every = int(re.search(r"90% takes every=(\d+)\.", text)[1])
    # 0.9 / 0.1 times the 0.12 MB of integers of 8 bits, at 0.125 MB/s, in steps of 10 ms.
    assert 9 * 0.95 * 100 * 0.96 <= every <= 9 * 100 * 1.5
    # No more than was studied: of 30 steps of 10 ms beside an exchange of 0.96 s or more, 0.24 are left at most.
    (reached,) = re.findall(r"LocalSteps\(..., every=30\) with block-float reaches (\d+)%", text)
    assert 15 <= int(reached) <= 24
    assert (
        "integers of 4 bits, after a start of a fifth of the steps, ended worse than without compression: SGD" in text
    )
    ends = "AdamW by 0.5 with every=10 and 1.6 with every=30, in % of the bits per character (charlm-small, 2940 steps,"
    assert ends in text and "Muon by 0.7 with every=10 and 1.3 with every=30," in text  # without --optimizer, of all
    assert "2 seeds), and in one run by 6.1 with every=5 and 4.3 with every=100;" in text
    text = run(capsys, *arguments, "--bandwidth", "1mbit", "--step-ms", 10, "--optimizer", "sgd").out
    text = " ".join(text.split())
    assert "SGD by 1.45 with every=10, in points of test accuracy (outer=None, resnet20, 3120 steps, one run)." in text
    assert "AdamW" not in text and "Muon" not in text
    assert "LocalSteps" not in run(capsys, *arguments, "--bandwidth", "10gbit", "--step-ms", 500).out


@pytest.mark.parametrize(
    ("optimizer", "baseline", "file", "first", "outer"),
    [
        ("sgd", "resnet20", "images_outer", "qsgd", ",lr=1,momentum=0"),
        ("adamw", "outer_more", "outer_more", "qsgd", ""),
        ("muon", "muon_outer_more", "muon_outer_more", advice.FOUR_BITS, ",lr=1,momentum=0"),
    ],
)
def test_what_local_steps_cost_is_what_was_studied(optimizer, baseline, file, first, outer):
    def stored(study):
        return json.loads((ROOT / "benchmarks" / "results" / f"convergence_{study}.json").read_text())

    first = first.replace(":", "(").replace("nearest", "nearest)")
    name = f"local(every={{}}{outer}):phases:0={first},20%=block-float(bits=4,rounding=nearest)"
    content, found = stored(file), studies.LOCAL_STEPS[optimizer]
    (recipe,) = content["recipes"].values()
    of_optimizer = [run for run in content["runs"] if run["method"] == name.format(10)]
    rate, seeds = of_optimizer[0]["lr"], {run["seed"] for run in of_optimizer}

    def final(study, method):
        runs = [r for r in stored(study)["runs"] if (r["method"], r["lr"]) == (method, rate) and r["seed"] in seeds]
        assert {run["seed"] for run in runs} == seeds
        return sum(run["scores"][-1] for run in runs) / len(runs)

    for every, worse_by in found.worse_by.items():
        difference = final(file, name.format(every)) - final(baseline, "none")
        percent = found.measure.startswith("%")
        assert worse_by == (round(100 * difference / final(baseline, "none"), 1) if percent else round(-difference, 2))
    for every, worse_by in found.beyond.items():
        (once,), (none,) = (
            [run["scores"][-1] for run in stored(file.removesuffix("_more"))["runs"]
             if (run["method"], run["lr"]) == (method, rate)] for method in (name.format(every), "none")
        )  # fmt: skip
        assert worse_by == round(100 * once / none - 100, 1) and every not in found.worse_by
    assert bool(found.beyond) == file.endswith("_more")
    runs = "one run" if len(seeds) == 1 else f"{len(seeds)} seeds"
    assert found.network.endswith(f"{recipe['network']}, {recipe['epochs'] * recipe['steps']} steps, {runs}")
    assert found.network.startswith("outer=None, ") == bool(outer)


def test_local_steps_are_not_advised_with_compressed_momenta():
    """Nor where every step reaches what they would. Programs get the numbers of the sentence."""
    found = make_advice(Link(2, 1e7, 0.0), "adamw", momentum=0.03, topk=0.05)
    content = found.json()["local_steps"]
    assert content["method"] == "topk" and content["every"] > content["hidden_by"] >= 1
    fast = make_advice(Link(2, 1e12, 0.0), topk=0.01)
    assert fast.json()["local_steps"] is None


def test_one_rank_needs_no_compression(capsys, shapes):
    text = run(capsys, "--model", shapes, *BASE[:3], "1", *BASE[4:]).out
    assert text.startswith("Do not compress: fp32 takes 10.0 ms a step, 100% of the ideal, predicted.")


FILE = """from __future__ import annotations
import dataclasses
import torch
@dataclasses.dataclass
class Settings:  # which dataclasses can only make if the module is known
    width: int = 64
def build():
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
def number(): return 3
def fails(): raise KeyError("no such\\nkey")
def empty(): return torch.nn.ReLU()
def lazy(): return torch.nn.Sequential(torch.nn.LazyLinear(8))
"""


def test_file(capsys, tmp_path):
    path = tmp_path / "net.py"
    path.write_text(FILE)
    folders = list(sys.path)
    out = json.loads(run(capsys, "--model", f"{path}:build", *BASE, "--json").out)
    assert out["layers"] == 4 and out["parameters"] == 2 * 64 * 128 + 192
    assert sys.path == folders
    assert json.loads(run(capsys, "--model", path, *BASE, "--json").out)["layers"] == 4  # build is the default


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "resnet51"],
            r"got --model 'resnet51', expected file.py:build, or one of: .*",
        ),
        (["--model", "gone.py:build"], r"gone.py:build: FileNotFoundError: .*; expected .*"),
        (["--model", "{file}:gone"], r".*net.py:gone: KeyError: 'gone'; expected a file with a function gone\(\) .*"),
        (["--model", "{file}:number"], r".*net.py:number: got int, expected .*torch.nn.Module"),
        (["--model", "{file}:fails"], r".*net.py:fails: KeyError: 'no such.*key'; expected .*"),
        (["--model", "{file}:empty"], r".*got a module without parameters that need a gradient, expected some"),
        (["--model", "{file}:lazy"], r".*net.py:lazy: got the lazy parameter 0.weight, expected a module whose .*"),
        (["--bandwidth", "10gigs"], r"got --bandwidth '10gigs', expected a number > 0 and kbit, mbit or gbit, .*"),
        (["--bandwidth", "0gbit"], r"got --bandwidth '0gbit', expected a number > 0 .*"),
        (["--ranks", "0"], r"got --ranks 0, expected an integer >= 1"),
        (["--step-ms", "-1"], r"got --step-ms -1.0, expected a number >= 1e-06"),
        (["--step-ms", "nan"], r"got --step-ms nan, expected a number >= 1e-06"),
        (["--latency-us", "-1"], r"got --latency-us -1.0, expected a number >= 0"),
        (["--methods", "topk", "zip"], r"--methods: unknown compression method 'zip'.*"),
        (["--methods", "auto"], r"got --methods auto, whose steps differ; expected the methods that it is made of"),
        (["--methods", "phases:0=topk"], r"got --methods phases:0=topk, whose steps differ; expected .*"),
        (["--methods", "topk:exchange=auto"], r".* topk:exchange=auto, whose .*; expected exchange=gather or .*"),
        (["--methods", "per-layer:fc=topk(exchange=auto),default=fp16"], r".*; expected exchange=gather or .*"),
        (["--methods", "atomo"], r"got --methods atomo, which was measured on no GPU; expected --device here, or .*"),
        (["--methods", "hierarchical:inner=topk"], r"got .* with one rank on each node, expected --nodes and .*"),
        (
            ["--device", "cuda:99"],
            r"got --device 'cuda:99' with \d+ GPUs here, expected here, cpu, or one of: h200, .*",
        ),
        (["--device", "tpu"], r"got --device 'tpu', expected here, cpu, or .*, or a GPU here: cuda, cuda:1"),
        (["--nodes", "2"], r"got --ranks with --nodes, expected --ranks and --bandwidth, or --nodes and others"),
        (["--measure"], r"got --ranks with --measure, which measures the job; expected one of both"),
        (["--front-end", "fsdp"], r"got --methods or --optimizer with --front-end fsdp, which compares FSDP2 .*"),
    ],
)
def test_bad_input(capsys, shapes, tmp_path, arguments, message):
    path = tmp_path / "net.py"
    path.write_text(FILE)
    given = [argument.format(file=path) for argument in arguments]
    output = run(capsys, "--model", shapes, *BASE, *given, status=2)
    assert output.out == "" and re.fullmatch(f"gradzip advise: error: {message}\n", output.err), output.err


NODES = ["--step-ms", "10", "--nodes", "2", "--gpus-per-node", "2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (NODES, r"got no --between, expected --step-ms 180 and .*"),
        (NODES[:4], r"got no --gpus-per-node, expected .*"),
        ([*NODES, "--between", "fast"], r"got --between 'fast', expected a number > 0 and kbit, mbit or gbit, .*"),
        (
            [*NODES, "--between", "1gbit", "--within", "usb"],
            r"got --within 'usb', expected nvlink, pcie4, pcie-shm, or a rate such as 200gbit",
        ),
        ([*NODES, "--between", "1gbit", "--within", "4"], r"got --within '4', expected a number > 0 and kbit, .*"),
        ([*NODES[:3], "0", *NODES[4:]], r"got --nodes 0, expected an integer >= 1"),
        (
            [*NODES, "--between", "1gbit", "--methods", "hierarchical:inner=topk,local_size=4"],
            r"got .*,local_size=4 with --gpus-per-node 2, expected the same local_size, or none",
        ),
        (
            [*NODES[:2], "--nodes", "1", "--gpus-per-node", "8", "--methods", "hierarchical:inner=topk"],
            r"got --methods hierarchical:inner=topk on one node, expected --nodes and --gpus-per-node of 2 or more",
        ),
    ],
)
def test_bad_machines(capsys, shapes, arguments, message):
    output = run(capsys, "--model", shapes, *arguments, status=2)
    assert output.out == "" and re.fullmatch(f"gradzip advise: error: {message}\n", output.err), output.err


@pytest.mark.parametrize("missing", ["--bandwidth", "--ranks", "--step-ms"])
def test_what_is_missing(capsys, shapes, missing):
    i = BASE.index(missing)
    error = run(capsys, "--model", shapes, *BASE[:i], *BASE[i + 2 :], status=2).err
    assert f"got no {missing}, expected" in error and error.count("\n") == 1


@pytest.mark.parametrize(("name", "device"), [("cuda", "cuda"), ("cuda:1", "cuda:1"), ("here", "cuda"), ("cpu", "cpu")])
def test_a_gpu_here_is_measured(monkeypatch, name, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert advise._device(argparse.Namespace(device=name, measure=False)) == (torch.device(device), "")
    with pytest.raises(CommandError, match="got --device 'cuda:2' with 2 GPUs here, expected here, cpu, or one of"):
        advise._device(argparse.Namespace(device="cuda:2", measure=False))


def test_the_size_of_nodes_may_be_named(capsys, shapes):
    """It is that of the machines, and changes nothing."""
    specs = [f"hierarchical:inner=topk{given}" for given in ("", ",local_size=2")]
    out = run(capsys, "--model", shapes, *NODES, "--between", "1gbit", "--methods", *specs, "--json").out
    plain, sized = ([m for m in json.loads(out)["methods"] if m.pop("method") == spec] for spec in specs)
    assert plain == sized != []


def test_jobs_are_measured_on_the_cpu(capsys, shapes):
    error = run(capsys, "--model", shapes, "--measure", "--step-ms", 10, "--device", "cuda", status=2).err
    assert "got --device cuda with --measure, which measures on the CPU; expected cpu" in error


def test_outside_of_a_job(capsys, shapes, monkeypatch):
    for name in ("HOROVOD_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    error = run(capsys, "--model", shapes, "--measure", "--step-ms", 10, status=2).err
    assert "got --measure outside of a job, expected horovodrun -np 2 gradzip advise" in error


def make_advice(link, optimizer=None, named=True, momentum=None, **seconds):
    """Advice for one layer of 4 MB, with methods that take this long and send 40 kB."""
    seconds |= {advice.SIGNS: momentum} if momentum else {}
    step = Step((Layer("w", (1000, 1000), 0.1),), 0.1)
    methods = {name: [Compressed((("all_reduce", 4e4),), time)] for name, time in seconds.items()}
    stock = {"none": [cost_of(4e6)], "fp16": [Compressed((("all_reduce", 2e6),), 1e-3, 1e-3)]}
    compressors = {name: gradzip.parse(name) for name in stock | methods}
    return advice.Advice(step, link, "ddp", stock | methods, compressors, named, optimizer)


def said(found):
    """The sentences of the advice, without those on local steps and buckets, which have tests of their own."""
    lines = found.sentences()
    return [line for line in lines if not line.startswith(("No method that may be advised", "With bucket_cap_mb"))]


def cost_of(nbytes):
    return Compressed((("all_reduce", nbytes),))


def test_sentences():
    slow, fast = Link(2, 1e7, 0.0), Link(2, 1e10, 0.0)  # 0.4 s and 0.4 ms for the layer
    good = make_advice(slow, acpsgd=0.01, topk=1.0)
    # 100 ms, 10 ms to compress and 4 ms for 40 kB; 2 MB take 200 ms more, and 2 ms to cast.
    assert said(good)[:2] == [
        "Use ACPSGD(): 2.6 times as fast as fp16, predicted.",
        f"114 ms a step, 88% of the ideal; fp16 takes 302 ms. It saves 62%; the margin of error is {MARGIN:.0%}.",
    ]
    assert [row.method for row in good.rows] == ["acpsgd", "fp16", "none", "topk"]
    assert said(make_advice(slow, topk=1.0)) == [
        "Do not compress: fp16 takes 302 ms a step, 33% of the ideal, predicted.",
        "topk, the fastest that may be advised, takes 1104 ms.",
    ]
    pointless = said(make_advice(fast, topk=0.01))
    assert pointless[0] == "Do not compress: fp32 takes 100 ms a step, 100% of the ideal, predicted."
    assert pointless[1].startswith("topk, ")
    assert said(make_advice(slow)) == ["Do not compress: fp16 takes 302 ms a step, 33% of the ideal, predicted."]


def test_buckets_of_another_size():
    """Twenty gradients of 4 MB, ready from 0.1 to 1 s: DDP's last bucket of 28 MB takes 0.28 s, one of 4 MB 0.04 s."""
    layers = tuple(Layer(f"{i}", (1000, 1000), 0.05 * (i + 1)) for i in range(20))
    costs = {"none": [cost_of(4e6)] * 20, "fp16": [Compressed((("all_reduce", 2e6),), 1.0)] * 20}
    methods = {name: gradzip.parse(name) for name in costs}
    found = advice.Advice(Step(layers, 1.0), Link(2, 1e8, 0.0), "ddp", costs, methods, True)
    whole = next(row.seconds for row in found.rows if row.method == "none")
    assert whole == pytest.approx(1.0 + 0.2, rel=0.1)  # the last bucket has 5 gradients, or more
    mb, seconds = found.bucket_mb()
    assert mb in (1, 4) and seconds == pytest.approx(1.04, rel=1e-9) and found.json()["bucket_cap_mb"] == mb
    (line,) = [line for line in found.sentences() if line.startswith("With bucket_cap_mb")]
    assert line == f"With bucket_cap_mb={mb} in DistributedDataParallel, a step takes 1040 ms."
    fast = advice.Advice(Step(layers, 1.0), Link(2, 1e12, 0.0), "ddp", costs, methods, True)
    assert fast.bucket_mb() is None


def test_a_gain_within_the_margin_of_error_is_noise():
    """fp16 takes 200 ms after 100 ms, and the method 0.4 s / 100 and what it computes."""
    link = Link(2, 1e7, 0.0)
    for part, noise in ((0.9, True), (1.1, False)):
        seconds = 0.302 * (1 - part * MARGIN) - 0.104
        first, second, *_ = said(make_advice(link, topk=seconds))
        assert first.startswith("Do not compress: fp16 takes 302 ms") == noise, first
        assert second.endswith(f": within the margin of error of {MARGIN:.0%}.") == noise


@pytest.mark.parametrize(
    "seconds, allowed, chosen, gain",
    [
        ({"none": 1.0, "fp16": 0.99, "topk": 0.75}, None, "topk", 1 - 0.75 / 0.99),
        ({"none": 1.0, "fp16": 0.99, "topk": 0.9}, None, "none", 1 - 0.9 / 0.99),  # fp16 is hardly faster
        ({"none": 1.0, "fp16": 0.97, "topk": 0.9}, None, "fp16", 1 - 0.9 / 0.97),
        ({"none": 1.0, "fp16": 1.2, "topk": 1.1}, None, "none", -0.1),
        ({"none": 1.0, "fp16": 0.5, "topk": 0.1, "qsgd": 0.3}, ["none", "fp16", "qsgd"], "qsgd", 0.4),
        ({"none": 1.0, "fp16": 0.5, "topk": 0.1}, [], "fp16", 0.0),
        ({"fp16": 1.0, "topk": 0.5}, None, "topk", 0.5),
        ({"none": 1.0, "fp16": 0.6, "bf16": 0.5, "topk": 0.45}, None, "bf16", 0.1),
        ({"none": 1.0, "fp16": 0.5, "bf16": 0.5}, None, "fp16", 0.0),  # of two that are alike, the studied one
    ],
)
def test_decisions(seconds, allowed, chosen, gain):
    decision = decide(seconds, allowed)
    assert decision.chosen == chosen and decision.gain == pytest.approx(gain)
    assert decision.compresses == (chosen not in advice.STOCK)


# --- accuracy


def test_stored_studies_are_those_of_the_results():
    refill = "run python -m benchmarks.convergence.studies --write"
    assert written.best() == [study for _, study in studies.studies()], refill


def test_studies():
    found = studies.study_of(gradzip.ACPSGD(rank=4), "adamw")
    assert found.worse_by == pytest.approx(3.393 - 2.502, abs=1e-3) and not found.holds  # docs/accuracy.md
    assert found.difference == "0.89 bits worse"
    assert found.conditions == "charlm-small of 0.28 M parameters on tinyshakespeare, 735 steps, one run"
    of_sgd = studies.study_of(gradzip.ACPSGD(), "sgd")
    assert (of_sgd.difference, of_sgd.steps, of_sgd.holds) == ("0.8 points worse", 4680, True)
    assert studies.study_of(gradzip.BlockFloat(), "adamw").difference == "as fp32"
    of_hook = studies.study_of(gradzip.Cast(torch.bfloat16), "adamw")
    assert (of_hook.difference, of_hook.seeds, of_hook.source) == ("as fp32", 2, "peers.json")  # −0.12 %
    # Coding and seed change no accuracy; the rank does.
    packed, plain = (studies.study_of(gradzip.QSGD(**given), "sgd") for given in ({"coding": "packed", "seed": 3}, {}))
    assert packed is plain is not None
    assert studies.study_of(gradzip.ACPSGD(rank=5), "adamw") is None
    # The length of a warm-up follows from that of the training.
    lengths = [gradzip.Momentum(gradzip.SignSGD(majority=False), warmup_steps=n) for n in (0, 75, 5000, "auto")]
    (of_momentum,) = {studies.study_of(method, "adamw") for method in lengths}
    assert of_momentum.holds and of_momentum.difference == "0.04 bits better"
    assert gradzip.parse(of_momentum.method).phases.keys() == {0, 160, 200}  # of its last phase
    assert studies.study_of(gradzip.Momentum(gradzip.SignSGD()), "adamw") is None  # of votes
    assert studies.study_of(gradzip.PerLayer([("w", gradzip.ACPSGD())]), "adamw") is None


@pytest.mark.parametrize("optimizer", [None, *studies.OPTIMIZERS])
def test_only_methods_that_hold_are_safe(optimizer):
    """Low rank, RandomK and DGC are never advised for AdamW and Muon unasked."""
    compared = advise._methods(None, None, "ddp", None)
    safe = {name for name, method in compared.items() if studies.is_safe(method, optimizer)}
    never = {name for name in ("randomk", "dgc", "signsgd", "topk") if studies.is_safe(gradzip.parse(name), optimizer)}
    assert {"fp16", "block-float"} <= safe and not never
    four = {advice.FOUR_BITS} if optimizer else set()
    if optimizer != "sgd":
        assert safe == {"fp16", "block-float"} | four | ({advice.SIGNS, "bf16"} if optimizer == "adamw" else set())
    else:
        assert {"acpsgd", "powersgd", "qsgd", "fft-range"} | four <= safe


@pytest.mark.parametrize(
    ("optimizer", "chosen"), [("sgd", "acpsgd"), ("adamw", "fp16"), ("muon", "fp16"), (None, "fp16")]
)
def test_the_optimizer_decides_what_is_advised(optimizer, chosen):
    found = make_advice(Link(2, 1e7, 0.0), optimizer, named=False, randomk=0.001, signsgd=0.002, acpsgd=0.01)
    lines = said(found)
    assert found.decide(optimizer).chosen == chosen
    assert lines[0].startswith("Use ACPSGD(): " if optimizer == "sgd" else "Do not compress: fp16 takes ")
    if optimizer == "sgd":
        assert lines[2].startswith("With SGD, acpsgd ends 0.8 points worse than fp32 (resnet8 of ")
        assert lines[3].startswith("A study is no proof") and len(lines) == 4
        (row,) = (row for row in found.table() if row[0] == "randomk")
        assert row[-1] == "no study"
    elif optimizer == "adamw":
        (row,) = (row for row in found.table() if row[0] == "acpsgd")
        assert row[-1] == "+0.89 bits"
    elif optimizer is None:
        assert "What would be advised with one: sgd acpsgd, adamw fp16, muon fp16." in lines[-1]
        assert {row[0]: row[-1] for row in found.table()}.items() >= {("acpsgd", "SGD"), ("randomk", "none")}
    content = found.json()
    assert content["advised"] == chosen and content["optimizer"] == optimizer and content["margin"] == MARGIN
    of_acpsgd = next(m["studies"] for m in content["methods"] if m["method"] == "acpsgd")
    assert of_acpsgd.keys() == ({optimizer} if optimizer else studies.OPTIMIZERS.keys())


@pytest.mark.parametrize(("optimizer", "chosen"), [("adamw", advice.SIGNS), ("sgd", "acpsgd"), ("muon", "fp16")])
def test_compressed_momenta_are_advised_for_adamw(optimizer, chosen):
    found = make_advice(Link(2, 1e7, 0.0), optimizer, named=False, momentum=0.001, acpsgd=0.01)
    lines = said(found)
    assert found.decide(optimizer).chosen == chosen
    if optimizer == "adamw":
        assert lines[0].startswith("Use gradzip.recipes.adamw: ")
        assert lines[2].startswith("With AdamW, recipes.adamw ends 0.04 bits better than fp32 (charlm of ")
    notes = list(found.notes())
    assert len(notes) == (optimizer == "adamw")  # of a method that is used
    assert not notes or notes[0] == (
        "recipes.adamw: the step is one after the warm-up. In the study with AdamW, "
        "phases:0=qsgd,160=block-float(bits=4,rounding=nearest),200=momentum(inner=signsgd(majority=False)) averaged "
        "the whole training. The optimizer must have the momentum 0.9, and AdamW must be gradzip.optim.AdamW: "
        "gradzip.recipes.adamw makes both."
    )


def test_a_step_after_the_warm_up_is_measured():
    layers = step_of([Parameter("w", (64, 64), 1.0)], 0.1)
    specs = [f"{advice.SIGNS},warmup_steps={n}" for n in (0, 500, "auto")]
    found = advise._costs({spec: gradzip.parse(spec) for spec in specs}, layers.layers, torch.device("cpu"))
    rounds = [of_layers[0].rounds for of_layers in found.values()]
    assert rounds == rounds[:1] * 3 and sum(nbytes for _, nbytes in rounds[0]) < 4 * 64 * 64 / 10


def test_named_methods_are_advised_with_what_they_cost():
    """The user has asked for them."""
    (use, _, cost_of_it, compare) = said(make_advice(Link(2, 1e7, 0.0), "adamw", acpsgd=0.01))
    assert use.startswith("Use ACPSGD()") and compare.startswith("A study is no proof")
    assert cost_of_it.startswith("With AdamW, acpsgd ends 0.89 bits worse than fp32 (charlm-small")
    assert cost_of_it.endswith(". It is not advised with this optimizer.")
    assert (
        "With Muon, no study has measured what acpsgd costs"
        in said(make_advice(Link(2, 1e7, 0), "muon", acpsgd=0.01))[2]
    )
    lines = said(make_advice(Link(2, 1e7, 0.0), None, acpsgd=0.01))
    assert [line[:9] for line in lines[2:4]] == ["With SGD,", "With Adam"]


def test_conditions(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(conditions.os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    monkeypatch.setattr(conditions.os, "cpu_count", lambda: 4)
    assert conditions.conditions(torch.device("meta")) == (
        f"methods measured on meta, threads: {threads}; load 0.5, cores: 4",
        [],
    )
    assert conditions._contention() > 0 and torch.get_num_threads() == threads
    monkeypatch.setattr(conditions, "_contention", lambda: 40.0)
    monkeypatch.setattr(conditions.os, "getloadavg", lambda: (6.2, 6.2, 6.2))
    _, (spinning, loaded) = conditions.conditions(torch.device("cpu"))
    assert f"{threads} threads take 40.0 times as long as one" in spinning and "OMP_WAIT_POLICY=passive" in spinning
    assert loaded.startswith("Warning: the load is 6.2 on 4 cores")


@pytest.mark.parametrize("spec", params([*advise.CANDIDATES, "fp16"], ["fp16", *SAMPLE]))
@pytest.mark.parametrize("shape", [(2048, 1024), (512, 256, 3, 3)])
def test_large_layers_are_scaled(spec, shape, monkeypatch):
    monkeypatch.setattr(measure, "LARGEST", 1 << 20)
    (layer,) = measure.measure_layers(gradzip.parse(spec), [Layer("w", shape, 0.0)], torch.device("cpu"))
    true = measure_method(gradzip.parse(spec), torch.randn(shape), repeats=2)
    assert [kind for kind, _ in layer.rounds] == [kind for kind, _ in true.rounds]
    for (_, nbytes), (_, expected) in zip(layer.rounds, true.rounds):
        assert nbytes == pytest.approx(expected, rel=0.1)


def test_decoding_grows_with_the_ranks():
    layer = LayerCost((("all_gather", 10.0),), 1.0, 2.0, 0.5)
    assert [layer.among(ranks).decode for ranks in (1, 2, 3, 10)] == [2.0, 2.0, 2.5, 6.0]


def test_default_methods():
    """Those that README recommends; torch's hooks with DDP; between nodes too where ranks share a connection."""
    known = devices.device("h100")
    flat = {"none", "fp16", *advise.CANDIDATES}
    assert advise._methods(None, known, "ddp", Link(8, 1e9, 0.0)).keys() == flat | {"bf16", advise.POWERSGD_HOOK}
    assert advise._methods(None, None, "ddp", None).keys() == flat | {"bf16"}
    assert advise._methods(None, known, "horovod", Link(8, 1e9, 0.0, per_node=8)).keys() == flat
    between = advise._methods(None, known, "horovod", Link(16, 1e9, 0.0, per_node=8)).keys() - flat
    assert between == {f"{advice.BETWEEN}block-float", f"{advice.BETWEEN}{advice.FOUR_BITS}"}
    readme = (ROOT / "README.md").read_text().partition("## Which method")[2].partition("## ")[0]
    for spec in advise.CANDIDATES[:4]:
        assert advice.called(gradzip.parse(spec)).replace("'", '"').removeprefix("gradzip.") in readme


@pytest.fixture
def alone(monkeypatch):
    """Let `--measure` run in a job of this process alone. Returns the slots of what it exchanges."""
    slots = []

    class Alone(Engine):
        rank, size = 0, 1

        def launch(self, collective, slot):
            raise AssertionError("a rank alone exchanges nothing else")

        def allgather_bytes(self, data, slot):
            slots.append(slot)
            return [data]

    monkeypatch.setattr(advise, "_job", lambda: contextlib.nullcontext((Alone(), "ddp")))
    return slots


def test_rank_0_does_not_keep_the_others_waiting(capsys, shapes, alone, monkeypatch):
    def fails(*arguments):
        raise CommandError("no space")

    monkeypatch.setattr(advise, "_report", fails)
    run(capsys, "--model", shapes, "--measure", "--step-ms", 10, "--methods", "topk", status=2)
    assert alone[-1] == "gradzip.advise.end"


@pytest.mark.parametrize(
    ("run_job", "ranks", "front"),
    [(horovodrun, 2, "horovod"), pytest.param(torchrun, 3, "ddp", marks=pytest.mark.long)],
)
def test_measured_in_a_job(run_job, ranks, front, tmp_path):
    path = tmp_path / "net.py"
    path.write_text(FILE)
    gradzip_command = Path(sys.executable).with_name("gradzip")
    arguments = ["--model", f"{path}:build", "--step-ms", 5, "--methods", "topk", "--json"]
    job = run_job(ranks, gradzip_command, "advise", "--measure", *arguments)
    assert_done(job)
    # horovodrun says which rank has printed a line: only rank 0 has.
    text = "\n".join(re.sub(r"^\[0\]<stdout>:", "", line) for line in job.stdout.splitlines())
    out = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert out["front_end"] == front and out["link"]["ranks"] == ranks and out["layers"] == 4
    assert out["step_seconds"] == 0.005 and {m["method"] for m in out["methods"]} == {"none", "fp16", "topk"}
