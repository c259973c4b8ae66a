"""Captured gradients, `gradzip inspect` and `gradzip list`."""

import importlib.util
import json
import math
import re
import sys
from inspect import getdoc

import numpy as np
import pytest
import torch

import gradzip
from gradzip import cli
from gradzip.inspection import cells, gradients
from gradzip.inspection.cells import Histogram
from gradzip.methods.base.registry import registered
from kinds import params

BUILD = """
from __future__ import annotations
import dataclasses
import torch
from sklearn.datasets import load_digits

@dataclasses.dataclass
class Settings:  # which dataclasses can only make if the module is known
    width: int = 3

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(2048, 10),
    )

def build():
    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels[:64]).float().view(-1, 1, 8, 8) / 16
    net = model()
    return net, torch.nn.functional.cross_entropy(net(inputs), torch.from_numpy(labels[:64]))

def after_backward():
    net, loss = build()
    loss.backward()
    return net

def by_name():
    return {name: parameter.grad for name, parameter in after_backward().named_parameters()}

def untrained():
    return model()

def leaves():
    raise SystemExit(1)

def inputs():
    return model(), torch.ones(2, 1, 8, 8)

def detached():
    net, loss = build()
    return net, loss.detach()

def number():
    return 3

def fails():
    raise RuntimeError("no\\ndata")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspect") / "net.py"
    path.write_text(BUILD)
    return path


@pytest.fixture(scope="module")
def digits(script):
    """Gradients of a small network on real images."""
    return gradients.compute(script, "build")


@pytest.fixture(scope="module")
def file(script, digits):
    path = script.with_name("digits.pt")
    torch.save(digits, path)
    return str(path)


def inspect(capsys, *arguments):
    """Run `gradzip inspect`: (exit status, stdout, stderr)."""
    status = cli.main(["inspect", *map(str, arguments), "--repeats", "1"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def as_json(capsys, *arguments):
    status, out, _ = inspect(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(out)


# --- capture


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_gradients_are_read_again(tmp_path, dtype):
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 5)).to(dtype)
    model[2].weight.requires_grad_(False)
    model(torch.randn(8, 40, dtype=dtype)).square().sum().backward()
    path = tmp_path / "g.pt"
    assert gradzip.capture(model, path) is None
    read = gradients.read(path)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert list(read) == list(expected) and "2.weight" not in read
    for name, gradient in expected.items():
        assert read[name].dtype == dtype and torch.equal(read[name], gradient)
    gradzip.capture(model.named_parameters(), str(path))
    assert gradients.read(path).keys() == read.keys()
    assert list(tmp_path.iterdir()) == [path]


def test_captured_views_do_not_save_their_bucket(tmp_path):
    bucket = torch.randn(1 << 20)
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    weight.grad = bucket[: 64 * 64].view(64, 64)
    gradzip.capture([("w", weight)], tmp_path / "g.pt")
    assert (tmp_path / "g.pt").stat().st_size < 32_000
    assert torch.equal(gradients.read(tmp_path / "g.pt")["w"], weight.grad)


def test_sparse_gradients_are_left_out(tmp_path):
    embedding, linear = torch.nn.Embedding(100, 16, sparse=True), torch.nn.Linear(16, 4)
    model = torch.nn.Sequential(embedding, linear)
    model(torch.arange(5)).sum().backward()
    gradzip.capture(model, tmp_path / "g.pt")
    assert list(gradients.read(tmp_path / "g.pt")) == ["1.weight", "1.bias"]


def test_nothing_to_capture(tmp_path):
    with pytest.raises(ValueError, match="capture: got parameters without gradients, expected some; call it after"):
        gradzip.capture(torch.nn.Linear(2, 2), tmp_path / "g.pt")
    with pytest.raises(ValueError, match="capture: got named_parameters of Parameter, expected .name, tensor. pairs"):
        gradzip.capture(torch.nn.Linear(2, 2).parameters(), tmp_path / "g.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("function", ["build", "after_backward", "by_name"])
def test_gradients_of_a_function(script, digits, function):
    computed = gradients.compute(script, function)
    assert all(torch.equal(computed[name], digits[name]) for name in digits) and len(digits) == 6


# --- cells


def test_cells_against_numpy(digits):
    layer = "2.weight"
    x = digits[layer].double().numpy()
    kept = np.sort(np.abs(x).ravel())[-round(0.1 * x.size)]
    sent = np.where(np.abs(x) >= kept, x, 0)
    cell, histogram = cells.measure(gradzip.TopK(theta=0.9), layer, digits[layer], repeats=1, bins=11)
    assert cell.error == pytest.approx(np.linalg.norm(x - sent) / np.linalg.norm(x), rel=1e-6)
    assert cell.cosine == pytest.approx((x * sent).sum() / np.linalg.norm(x) / np.linalg.norm(sent), rel=1e-6)
    assert cell.zeros == (sent == 0).sum()
    assert cell.ratio == 4 * x.size / gradzip.roundtrip(gradzip.TopK(theta=0.9), digits[layer])[1]
    assert sum(histogram.wanted) == sum(histogram.sent) == x.size
    assert histogram.sent[5] > histogram.wanted[5]  # zeros


@pytest.mark.parametrize("spec", params())
def test_bytes_and_error_of_every_method(digits, spec):
    compressor = gradzip.parse(spec)
    for layer, gradient in digits.items():
        cell, histogram = cells.measure(compressor, layer, gradient, repeats=1)
        approximation, nbytes = gradzip.roundtrip(compressor, gradient, layer)
        assert (cell.nbytes, histogram) == (nbytes, None)
        expected = (gradient - approximation).norm() / gradient.norm()
        # With error feedback the residual is measured, which is rounded to float32.
        assert cell.error == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
        assert cell.compressed or (cell.error, cell.ratio) == (0, 1)


def test_total_is_that_of_the_concatenated_gradient(digits):
    compressors = {"topk": gradzip.TopK(theta=0.9), "fp16": gradzip.Cast()}
    report = cells.inspect(digits, compressors, repeats=1)
    assert list(report.gradients) == sorted(digits, key=lambda layer: -digits[layer].numel())
    assert report.uncompressed == [layer for layer in report.gradients if digits[layer].numel() < 1024]
    for method, compressor in compressors.items():
        sent = [gradzip.roundtrip(compressor, g, layer) for layer, g in digits.items()]
        x, y = (torch.cat([t.reshape(-1) for t in ts]).double() for ts in (digits.values(), [s for s, _ in sent]))
        whole = report.totals[method]
        assert whole.error == pytest.approx(((x - y).norm() / x.norm()).item(), rel=1e-6)
        assert whole.cosine == pytest.approx((x @ y / x.norm() / y.norm()).item(), rel=1e-6)
        assert whole.ratio == x.numel() * 4 / sum(nbytes for _, nbytes in sent)
        assert whole.zeros == (y == 0).sum()


def test_warm_factors_reach_the_best_approximation():
    x = torch.randn(64, 4) @ torch.randn(4, 48) + 0.1 * torch.randn(64, 48)
    singular = torch.linalg.svdvals(x.double())
    best = (singular[4:].square().sum() / singular.square().sum()).sqrt().item()
    for compressor in (gradzip.ACPSGD(rank=4), gradzip.PowerSGD(rank=4)):
        cold, _ = cells.measure(compressor, "w", x, repeats=1)
        warm, _ = cells.measure(compressor, "w", x, repeats=1, warm=20)
        assert best * (1 - 1e-4) <= warm.error < 1.001 * best < cold.error
        assert warm.first_error == pytest.approx(cold.error, rel=1e-6) and cold.first_error == cold.error
        assert warm.is_warm and not cold.is_warm
    assert cells.measure(gradzip.DGC(), "b", x[0], repeats=1, warm=3)[0].error == 0


@pytest.mark.parametrize("spec", ["qsgd", "topk", "fft-range", "dgc"])
def test_methods_without_factors_are_not_warmed(spec):
    x = torch.randn(64, 48)
    cold, warm = (cells.measure(gradzip.parse(spec), "w", x, repeats=1, warm=steps)[0] for steps in (0, 3))
    assert (cold.error, cold.nbytes, cold.is_warm) == (warm.error, warm.nbytes, warm.is_warm)


def test_low_rank_is_shown_with_factors_that_fit(capsys, file, digits):
    """By default. Its first step, from random factors, would condemn it."""
    _, out, _ = inspect(capsys, file, "--method", "acpsgd", "--method", "topk", "--layer", "5.w")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(("  acpsgd", "  topk"))}
    assert rows["acpsgd"][1] == "(warm)" and rows["topk"][1] != "(warm)"
    report = as_json(capsys, file, "--method", "acpsgd", "--method", "topk", "--layer", "5.w")
    acpsgd, topk = report["totals"]
    assert (
        report["warm"] == 10 and acpsgd["error"] < 0.9 * acpsgd["first_error"] and topk["error"] == topk["first_error"]
    )
    assert f"The error of its first step is {acpsgd['first_error']:.2f}" in " ".join(out.split())


def test_histogram():
    x = torch.cat([torch.linspace(-1, 1, 2001), torch.tensor([50.0])])
    sent = x.sign() / 4
    histogram = Histogram.of(x, sent, 4)
    assert 0.99 < histogram.high == -histogram.low < 1.01
    for values, counted in ((x, histogram.wanted), (sent, histogram.sent)):
        clipped = np.clip(values.numpy(), histogram.low, histogram.high)
        assert counted == np.histogram(clipped, 4, (histogram.low, histogram.high))[0].tolist()
    error = (x - sent).abs()
    assert (histogram.errors[0], histogram.errors[-1]) == (error.min(), 49.75)
    assert histogram.errors[100] == pytest.approx(error.median().item(), abs=1e-3)


# --- the command


def test_table(capsys, file):
    status, out, err = inspect(capsys, file, "--top", "1")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "whole model  6 layers, 25,290 elements"
    assert [line.split()[0] for line in lines[2:11]] == list(cli.inspect.DEFAULTS)
    assert lines[12] == "5.weight  10×2048, 20,480 elements"
    assert "1 smaller layers not shown (--top, --layer)." in out
    assert re.search(r"uncompressed by all methods: 4 layers of 202 elements in all\s+\(0.weight,\s+2.bias, ", out)
    assert max(map(len, lines)) <= 100
    for rows in (lines[1:11], lines[13:23]):
        assert len({len(line) for line in rows}) == 1  # aligned


def test_layers_that_bypass_are_shown_as_such(capsys, file):
    _, out, _ = inspect(capsys, file, "--method", "acpsgd:rank=40", "--method", "topk", "--layer", "^2.w")
    rows = [line.split() for line in out.splitlines() if line.startswith("  acpsgd")]
    assert rows == [["acpsgd:rank=40", "uncompressed"]] * 2
    report = as_json(capsys, file, "--method", "acpsgd:rank=40", "--method", "topk", "--layer", "^2.w")
    (layer,) = report["layers"]
    assert [m["compressed"] for m in layer["methods"]] == [False, True]


def test_json(capsys, file, digits):
    report = as_json(capsys, file, "--method", "dct-range:value_range=0.01", "--method", "qsgd")
    assert [total["method"] for total in report["totals"]] == ["dct-range:value_range=0.01", "qsgd"]
    assert {layer["name"]: layer["shape"] for layer in report["layers"]} == {n: [*g.shape] for n, g in digits.items()}
    ranged, qsgd = report["totals"]
    assert 0 < ranged["clamped"] < 1 and qsgd["clamped"] is None
    _, out, _ = inspect(capsys, file, "--method", "dct-range:value_range=0.01")
    assert f"{100 * ranged['clamped']:.2f} % of the values sent are clamped to its value_range." in " ".join(
        out.split()
    )
    for total in report["totals"]:
        assert total["ratio"] == total["dense_nbytes"] / total["nbytes"]
        assert total["encode"] > 0


def test_function_on_the_command_line(capsys, script, file):
    sources = (f"{script}:build", script, file)
    errors = {as_json(capsys, source, "--method", "topk")["totals"][0]["error"] for source in sources}
    assert len(errors) == 1


def test_gradients_that_are_not_finite_are_named_and_left_out(capsys, tmp_path, digits):
    bad = dict(digits, extra=torch.tensor([[1.0, math.nan], [math.inf, 0.0]]))
    torch.save(bad, tmp_path / "bad.pt")
    status, out, err = inspect(capsys, tmp_path / "bad.pt", "--method", "topk")
    assert status == 0 and out.startswith("whole model  6 layers")
    assert err == "gradzip inspect: extra: left out, it is not finite\n"
    torch.save({"extra": bad["extra"]}, tmp_path / "bad.pt")
    status, out, err = inspect(capsys, tmp_path / "bad.pt")
    assert (status, out) == (2, "") and "error: got no gradient that is finite, expected one" in err


@pytest.mark.filterwarnings("default")
def test_picture(capsys, tmp_path, file):
    pytest.importorskip("matplotlib")
    status, _, _ = inspect(capsys, file, "--png", tmp_path / "g.png", "--method", "topk", "--method", "fp16")
    assert status == 0
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")
    status, _, err = inspect(capsys, file, "--png", tmp_path / "h.png", "--method", "none")
    assert status == 2 and "got no layer that any method compresses" in err


def test_picture_without_matplotlib(capsys, monkeypatch, tmp_path, file):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, out, err = inspect(capsys, file, "--png", tmp_path / "g.png")
    assert (status, out) == (2, "")
    assert err == "gradzip inspect: error: --png: matplotlib is not installed: pip install matplotlib\n"


BAD = [
    (["nonesuch.pt"], "nonesuch.pt: No such file or directory; save gradients with gradzip.capture(model, path)"),
    (["."], ".: Is a directory; save gradients with"),
    (["{folder}/text.pt"], "text.pt: torch.load refuses it"),
    (["{folder}/empty.pt"], "empty.pt: torch.load refuses it"),
    (["{folder}/list.pt"], "got list, expected gradients by name; save gradients"),
    (["{folder}/none.pt"], "got no gradients in 2 entries, expected some; save gradients"),
    (["{folder}/numbers.pt"], "got 'epoch' of int, expected dense floating-point gradients by name"),
    (["{folder}/integers.pt"], "got 'w' of torch.strided torch.int64, expected dense floating-point gradients"),
    (["{script}:leaves"], "net.py:leaves: SystemExit: 1"),
    (["{script}:untrained"], "got no gradients in 0 entries, expected some; return a model after backward()"),
    (["{script}:number"], "got int, expected gradients by name; return a model after backward(), or a model and its"),
    (["{script}:fails"], "net.py:fails: RuntimeError: no data"),
    (["{script}:nonesuch"], "net.py:nonesuch: KeyError: 'nonesuch'"),
    (["{script}:inputs"], "net.py:inputs: backward() of the second, which must be a loss: RuntimeError: "),
    (["{script}:detached"], "net.py:detached: backward() of the second, which must be a loss: RuntimeError: "),
    (["{file}", "--png", "a.foo"], "got a.foo to write, expected a file that ends in .png, .svg, .pdf"),
    (["nonesuch.py:build"], "nonesuch.py:build: FileNotFoundError: "),
    (["{file}", "--method", "tpok"], "unknown compression method 'tpok', did you mean 'topk'?"),
    (["{file}", "--method", "topk:theta=2"], "got theta = 2, expected a number in [0, 1)"),
    (["{file}", "--layer", "fc"], "got --layer 'fc', which matches none of 6 layers, expected one such as '0.weight'"),
    (["{file}", "--layer", "("], "got --layer '(', expected a regular expression: "),
    (["{file}", "--top", "-1"], "got --top -1, expected an integer >= 0"),
    (["{file}", "--png", "nonesuch/a.png"], "got nonesuch/a.png to write, expected a file in a folder that exists"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda value: value[0] if len(value) > 1 else None)
def test_bad_input_is_one_line(capsys, monkeypatch, tmp_path, script, file, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.pt").write_text("")
    contents = {
        "list": [1],
        "none": {"a": None, "b": None},
        "numbers": {"epoch": 3},
        "integers": {"w": torch.ones(2).long()},
    }
    for name, content in contents.items():
        torch.save(content, tmp_path / f"{name}.pt")
    places = {"folder": tmp_path, "script": script, "file": file}
    status, out, err = inspect(capsys, *(argument.format(**places) for argument in arguments))
    assert (status, out) == (2, "")
    assert err.startswith("gradzip inspect: error: ") and err.count("\n") == 1
    assert message.format(**places) in err


PARSES = """
import argparse, sys
import torch
parser = argparse.ArgumentParser(description="train a network")
parser.add_argument("--data", {required})
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()
print("epochs", options.epochs, file=sys.stderr)
def build():
    assert sys.argv[1:] == []
    return {{"w": torch.ones(64, 64)}}
"""


def test_a_script_parses_an_empty_command_line(capsys, monkeypatch, tmp_path):
    """Not that of gradzip."""
    monkeypatch.setattr(sys, "argv", ["gradzip", "inspect", "train.py", "--top", "1"])
    path = tmp_path / "train.py"
    path.write_text(PARSES.format(required="default='digits'"))
    status, out, err = inspect(capsys, path, "--method", "topk")
    assert status == 0 and "4,096 elements" in out and err == "epochs 3\n"
    assert sys.argv[0] == "gradzip"


@pytest.mark.parametrize("command", ["inspect", "advise"])
def test_a_script_that_exits_is_one_error(capsys, monkeypatch, tmp_path, command):
    monkeypatch.setattr(sys, "argv", ["gradzip", command, "--help"])
    path = tmp_path / "train.py"
    path.write_text(PARSES.format(required="required=True"))
    given = ["--bandwidth", "1gbit", "--ranks", "4", "--step-ms", "10", "--model"] if command == "advise" else []
    assert cli.main([command, *given, str(path)]) == 2
    captured = capsys.readouterr()
    assert "train.py: error: the following arguments are required: --data" in captured.err
    assert f"\ngradzip {command}: error: {path}:build: SystemExit: 2" in captured.err and captured.out == ""


def test_a_file_with_code_is_not_run(capsys, tmp_path):
    torch.save({"w": cells.Report}, tmp_path / "code.pt")
    assert inspect(capsys, tmp_path / "code.pt")[0] == 2


# --- gradzip list


def listing(capsys, *arguments):
    assert cli.main(["list", *arguments]) == 0
    return capsys.readouterr().out


def test_list_has_every_method(capsys):
    report = {method["name"]: method for method in json.loads(listing(capsys, "--json"))}
    assert report.keys() == registered().keys()
    for name, method in registered().items():
        assert report[name]["class"] == method.__name__
        assert report[name]["summary"].endswith(".")
    assert report["topk"]["arguments"] == {
        "theta": "0.99", "select": "exact", "bits": "32", "error_feedback": "True", "seed": "0", "min_numel": "1024",
        "exchange": "gather", "chunk": "None", "residual_decay": "1.0",
    }  # fmt: skip
    assert report["per-layer"]["arguments"]["rules"] is report["phases"]["arguments"]["phases"] is None


def test_arguments_of_the_list_can_be_parsed(capsys):
    for method in json.loads(listing(capsys, "--json")):
        if None not in method["arguments"].values():
            arguments = ",".join(f"{name}={value}" for name, value in method["arguments"].items())
            assert gradzip.parse(f"{method['name']}:{arguments}") == gradzip.parse(method["name"])


def test_list_as_text(capsys):
    out = listing(capsys)
    assert [line.partition(":")[0] for line in out.splitlines() if re.match(r"\S", line)] == list(registered())
    details = listing(capsys, "signsgd")
    assert getdoc(gradzip.SignSGD) in details
    assert details.startswith("signsgd:majority=True,error_feedback=True,seed=0,min_numel=1024,exchange=gather")


def test_list_of_an_unknown_method(capsys):
    assert cli.main(["list", "TopK"]) == 2
    assert "gradzip list: error: unknown compression method 'TopK', did you mean 'topk'?" in capsys.readouterr().err


def test_list_works_without_kernels(capsys, monkeypatch):
    monkeypatch.delattr(gradzip, "_C", raising=False)
    monkeypatch.setitem(sys.modules, "gradzip._C", None)
    assert len(json.loads(listing(capsys, "--json"))) == len(registered())


@pytest.mark.parametrize("command", ["inspect", "list"])
def test_help_has_examples(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    assert f"  gradzip {command} " in capsys.readouterr().out.partition("examples:")[2]
