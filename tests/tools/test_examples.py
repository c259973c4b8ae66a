"""The training example: data, networks, errors, and real runs under horovodrun and torchrun."""

import hashlib
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from launch import horovodrun, python, torchrun
from paths import ROOT

pytest.importorskip("horovod.torch")
pytest.importorskip("sklearn")

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import data  # noqa: E402
import models  # noqa: E402
import train  # noqa: E402


@pytest.fixture
def cifar10(tmp_path):
    """A folder like CIFAR-10's binary version, with 20 digits a file, scaled to 32x32 pixels."""
    pixels, labels = data.digits().train
    colours = np.kron(pixels[:120], np.ones((1, 1, 4, 4), np.uint8)) * np.array([15, 8, 4], np.uint8)[:, None, None]
    records = np.concatenate([labels[:120, None].astype(np.uint8), colours.reshape(120, -1)], axis=1)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for name, part in zip(names, records.reshape(6, 20, 3073), strict=True):
        part.tofile(tmp_path / name)
    return tmp_path


@pytest.fixture
def text(tmp_path):
    """A file with 25 kB of English and Python."""
    path = tmp_path / "text.txt"
    path.write_bytes(Path(train.__file__).read_bytes() + Path(models.__file__).read_bytes())
    return path


def error_of(monkeypatch, capsys, *arguments):
    """The line on stderr when the example is started with these wrong arguments."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        train.main()
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("train.py: error: ")
    return captured.err


def test_digits_split_is_fixed():
    images = data.images()
    assert images.train[0].shape == (1297, 1, 8, 8)
    assert images.test[0].shape == (500, 1, 8, 8)
    assert (data.images().test[1] == images.test[1]).all()
    together = {image.tobytes() for image in np.concatenate([images.train[0], images.test[0]])}
    assert len(together) == 1797


def test_cifar10_is_read_record_by_record(cifar10):
    images = data.images(cifar10)
    pixels, labels = data.digits().train
    assert images.train[0].shape == (100, 3, 32, 32)
    assert images.test[0].shape == (20, 3, 32, 32)
    assert (images.train[1] == labels[:100]).all()
    assert (images.test[1] == labels[100:120]).all()
    for channel, factor in enumerate((15, 8, 4)):
        assert (images.train[0][:, channel, ::4, ::4] == factor * pixels[:100, 0]).all()
    assert images.dimensions == (3, 10)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "test_batch.bin").unlink(), "test_batch.bin: No such file or directory"),
        (lambda folder: (folder / "test_batch.bin").write_bytes(b""), "test_batch.bin: got 0 bytes"),
        (lambda folder: (folder / "data_batch_3.bin").write_bytes(bytes(3072)), "data_batch_3.bin: got 3072 bytes"),
        (lambda folder: (folder / "data_batch_5.bin").write_bytes(b"\x0a" + bytes(3072)), "got label 10 in record 0"),
    ],
    ids=["missing", "empty", "truncated", "label"],
)
def test_bad_data_is_a_one_line_error(cifar10, monkeypatch, capsys, damage, says):
    damage(cifar10)
    error = error_of(monkeypatch, capsys, "--data", cifar10)
    assert says in error
    assert "expected" in error


def test_missing_folder_is_a_one_line_error(tmp_path, monkeypatch, capsys):
    assert "no such folder; expected" in error_of(monkeypatch, capsys, "--data", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("missing.txt", "missing.txt: No such file or directory; expected a text file"),
        (".", "Is a directory; expected a text file"),
        ("short.txt", "short.txt: got 1289 bytes, expected at least 1290"),
    ],
)
def test_unusable_text_is_a_one_line_error(tmp_path, monkeypatch, capsys, path, says):
    (tmp_path / "short.txt").write_bytes(bytes(1289))
    assert says in error_of(monkeypatch, capsys, "--model", "charlm", "--data", tmp_path / path)


@pytest.mark.parametrize(
    ("variable", "engine", "launcher"),
    [("TORCHELASTIC_RUN_ID", "horovod", "horovodrun"), ("HOROVOD_RANK", "ddp", "torchrun")],
)
def test_wrong_launcher_for_the_engine_is_refused(monkeypatch, capsys, variable, engine, launcher):
    monkeypatch.setenv(variable, "0")
    assert f"start it with {launcher}" in error_of(monkeypatch, capsys, "--engine", engine)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--compression", "zip"),
        ("--compression", "none", "--compression", "fft-range:theta=much"),
        ("--compression", "fft-range:theta=2"),
        ("--model", "transformer"),
        ("--engine", "mpi"),
        ("--steps", "0"),
        ("--lr", "nan"),
        ("--momentum", "1"),
        ("--optimizer", "adam"),
        ("--optimizer", "adamw", "--beta2", "1"),
        ("--beta2", "0.99"),  # of SGD
        ("--engine", "fsdp", "--optimizer", "muon"),
        ("--seed", "-1"),
        ("--json", "/nowhere/at/all.json"),
    ],
    ids=" ".join,
)
def test_bad_arguments_are_a_one_line_error(monkeypatch, capsys, arguments):
    assert f"argument {arguments[-2]}: " in error_of(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--local-steps", "50", "--fragments", "40"), "got fragments = 40, expected at most the 5 layers"),
        (("--local-steps", "3", "--fragments", "4"), "got fragments = 4 and every = 3"),
        (("--outer", "mean"), "got one without --local-steps"),
        (("--delay", "2"), "got one without --local-steps"),
    ],
)
def test_bad_local_steps_are_a_one_line_error(monkeypatch, capsys, arguments, says):
    assert says in error_of(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("cnn", 188_810), ("resnet8", 75_290), ("resnet20", 269_722), ("resnet18", 11_173_962), ("alexnet", 27_445_194)],
)
def test_networks_have_their_published_size_and_take_both_images(name, parameters):
    build = models.MODELS[name].build
    model = build(3, 10)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert build(1, 10)(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_cnn_has_a_layer_worth_compressing():
    assert max(p.numel() for p in models.cnn(1, 10).parameters()) > 100_000


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_share_an_epoch_and_shuffle_the_next(size):
    images = data.images()
    images.train[1][:] = np.arange(1297)  # label = number of the image
    steps = 1297 // (32 * size)

    def epochs(rank):
        shard = data.batches(images, batch_size=32, rank=rank, size=size, seed=0)
        labels = torch.cat([labels for _, labels in itertools.islice(shard, 2 * steps)])
        return labels.reshape(2, -1).tolist()

    first, second = zip(*map(epochs, range(size)), strict=True)
    assert len(set(itertools.chain(*first))) == 32 * size * steps
    assert len(set(itertools.chain(*second))) == 32 * size * steps
    assert first != second
    assert epochs(0)[0] == first[0]


@pytest.mark.skipif(not torch.__version__.startswith("2.13.0"), reason="the text is that of torch 2.13.0")
def test_the_default_text_is_the_one_of_the_docs():
    text = data.text()
    digest = hashlib.sha256(text.train.tobytes() + text.test.tobytes()).hexdigest()
    assert text.name == "torch.nn 2.13.0"
    assert f"SHA-256 `{digest[:8]}…{digest[-5:]}`" in (ROOT / "docs/accuracy.md").read_text()


def test_text_is_cut_into_sequences(text):
    raw = text.read_bytes()
    dataset = data.text(text)
    train, test = raw[: -(len(raw) // 10)], raw[-(len(raw) // 10) :]

    inputs, targets = dataset.batch(np.arange(len(dataset)), np.random.default_rng(0))
    assert inputs.shape == targets.shape == (len(dataset), dataset.context)
    for i, (before, after) in enumerate(zip(inputs, targets, strict=True)):
        assert (before[1:] == after[:-1]).all()
        start = train.index(bytes([*before.tolist(), after[-1]]), i * dataset.context)
        assert start < (i + 1) * dataset.context
    again, _ = dataset.batch(np.arange(len(dataset)), np.random.default_rng(1))
    assert (inputs != again).any()

    # The parts of two ranks are the whole test text, except for less than a sequence at its end.
    parts = [[batch for batch, _ in dataset.test_batches(rank, 2, batch_size=7)] for rank in range(2)]
    assert len(parts[0]) > 1
    rows = torch.cat(parts[0]), torch.cat(parts[1])
    whole = [row for pair in itertools.zip_longest(*rows) for row in pair if row is not None]
    assert 0 < len(test) - len(whole) * dataset.context <= dataset.context
    assert bytes(torch.cat(whole).tolist()) == test[: len(whole) * dataset.context]


def test_charlm_is_causal():
    model = models.charlm(256, 128).eval()
    for block in model.blocks:  # blocks are initialized as the identity
        torch.nn.init.normal_(block.project.weight)
    assert sum(p.numel() for p in model.parameters()) == 1_899_648
    characters = torch.randint(256, (1, 128))
    changed = characters.clone()
    changed[0, 70] ^= 1
    before, after = (model(c)[0] for c in (characters, changed))
    assert torch.equal(before[:70], after[:70])
    assert (before[70:] != after[70:]).any(1).all()


def test_augmentation_shifts_and_mirrors_each_image():
    rng = np.random.default_rng(0)
    pixels = rng.integers(1, 256, (64, 3, 8, 8), dtype=np.uint8)
    padded = np.pad(pixels, ((0, 0), (0, 0), (4, 4), (4, 4)))
    found = set()
    for image, border, result in zip(pixels, padded, data.augment(pixels, rng), strict=True):
        assert result.shape == image.shape
        matches = [
            (row, column, mirror)
            for row, column, mirror in itertools.product(range(9), range(9), (1, -1))
            if (border[:, row : row + 8, column : column + 8][:, :, ::mirror] == result).all()
        ]
        assert len(matches) == 1
        found.update(matches)
    assert len(found) > 40  # 64 draws out of 162


def test_trains_in_one_plain_process(cifar10):
    arguments = ["--model", "resnet8", "--data", str(cifar10), "--epochs", "1"]
    command = [*python(), str(EXAMPLES / "train.py"), *arguments]
    job = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert job.returncode == 0, job.stderr
    assert "3 steps" in job.stdout
    assert "nothing was compressed" in job.stdout


def report_of(tmp_path, specs, *arguments, launch=horovodrun):
    """The example's results for each compression on two ranks, which have equal replicas, and what it prints."""
    results = tmp_path / "results.json"
    compressions = [text for spec in specs for text in ("--compression", spec)]
    job = launch(2, EXAMPLES / "train.py", *compressions, *arguments, "--json", results, timeout=280)
    assert job.returncode == 0, job.stdout + job.stderr
    report = json.loads(results.read_text())
    assert report["configuration"]["engine"] == ("horovod" if launch is horovodrun else "ddp")
    assert ("horovod" in report["versions"]) == (launch is horovodrun)
    assert all(run["replicas_identical"] for run in report["runs"])
    return report, job.stdout


def runs_of(*arguments, **options):
    return report_of(*arguments, **options)[0]["runs"]


LEARNT = 0.8  # accuracy after a few epochs, of which each is 20 steps; guesses have 0.1


def test_trains_under_horovodrun(tmp_path):
    specs = ["none", "fft-range:theta=0.85,bits=10"]
    report, printed = report_of(tmp_path, specs, "--epochs", 4)
    assert "[1]<stdout>" not in printed and len(printed.splitlines()) < 45
    assert report["configuration"]["ranks"] == 2
    assert report["versions"]["torch"] == torch.__version__
    plain, compressed = report["runs"]
    assert [run["compression"] for run in report["runs"]] == specs
    for run in report["runs"]:
        assert run["steps"] == len(run["loss_curve"]) == 80
        assert 0 < run["ms_per_step_p20"] <= run["ms_per_step"] <= run["ms_per_step_p80"]
        assert run["loss_curve"][0] > 2
        assert run["test_accuracy"] > LEARNT
    # The same weights and images: the first losses are equal.
    assert plain["loss_curve"][0] == compressed["loss_curve"][0]
    assert plain["uncompressed_bytes_per_step"] == 4 * (188_810 - 2 * 288)
    # Horovod also all-reduces one number for each of ten gradients.
    assert plain["payload_bytes_per_step"] == plain["uncompressed_bytes_per_step"] + 4 * 10
    assert all(run["sent_bytes_per_step"] == run["payload_bytes_per_step"] for run in report["runs"])  # of two ranks
    # 15 % of the coefficients with 10 bits each are 1/21; the bitmap, headers and small layers come on top.
    assert 10 < compressed["ratio"] < 21.4


@pytest.mark.long
def test_charlm_trains_alike_under_both_launchers(text, tmp_path):
    """Horovod and DDP: from the same weights, on the same sequences."""
    # One thread, so that both add in the same order.
    arguments = ("--model", "charlm", "--data", text, "--batch-size", 2, "--steps", 20, "--threads", 1)
    plain, compressed = runs_of(tmp_path, ["none", "topk:theta=0.9"], *arguments)
    (ddp,) = runs_of(tmp_path, ["none"], *arguments, launch=torchrun)
    for run in (plain, compressed, ddp):
        assert run["test_loss"] < math.log(256) - 1  # log(256) is the loss of a uniform guess
        assert run["uncompressed_bytes_per_step"] == 4 * 1_899_648
    assert 0.999 < plain["ratio"] < ddp["ratio"] == 1 < compressed["ratio"]
    # With two ranks, half of the sum equals the sum of halves.
    assert ddp["loss_curve"] == plain["loss_curve"]
    assert compressed["loss_curve"][0] == plain["loss_curve"][0]
    assert compressed["loss_curve"][2] != plain["loss_curve"][2]


@pytest.mark.long
def test_charlm_trains_under_fsdp(text, tmp_path):
    """Two replicas of two shards, against DDP on as many ranks."""
    arguments = ("--model", "charlm-small", "--data", text, "--batch-size", 2, "--steps", 6, "--threads", 1)
    fsdp = ("--engine", "fsdp", "--compression", "none", "--compression", "acpsgd", "--amp", "fp16")
    ddp = ("--engine", "ddp", "--compression", "none", "--amp", "fp16")
    runs = []
    for options in (fsdp, ddp):
        results = tmp_path / "results.json"
        job = torchrun(4, EXAMPLES / "train.py", *arguments, *options, "--json", results, timeout=280)
        assert job.returncode == 0, job.stdout + job.stderr
        runs += json.loads(results.read_text())["runs"]
    plain, compressed, replicated = runs
    assert all(run["replicas_identical"] for run in runs)
    assert 0.999 < plain["ratio"] <= 1 and compressed["ratio"] > 5  # ranks compare their configurations, too
    assert abs(plain["uncompressed_bytes_per_step"] / replicated["uncompressed_bytes_per_step"] - 0.5) < 0.01
    assert replicated["ratio"] == 1  # of four ranks; shards have two replicas
    assert replicated["sent_bytes_per_step"] == 1.5 * replicated["payload_bytes_per_step"]
    np.testing.assert_allclose(plain["loss_curve"], replicated["loss_curve"], rtol=1e-2)
    assert plain["loss_curve"][0] == compressed["loss_curve"][0]
    assert compressed["test_loss"] < math.log(256) - 0.5


@pytest.mark.long
@pytest.mark.parametrize("launch", [horovodrun, torchrun])
def test_local_steps_train_in_jobs(tmp_path, launch):
    arguments = ("--steps", 90, "--local-steps", 10)
    plain, compressed = runs_of(tmp_path, ["none", "topk:theta=0.9"], *arguments, launch=launch)
    for run in (plain, compressed):
        assert run["replicas_identical"] and run["test_accuracy"] > 0.85
        # All parameters once in ten steps.
        assert run["uncompressed_bytes_per_step"] == 4 * (188_810 - 2 * 288) / 10
    assert 0.9 < plain["ratio"] <= 1 and compressed["ratio"] > 4  # ranks compare configurations and steps, too


@pytest.mark.long
def test_streaming_local_steps_train_in_jobs(tmp_path):
    arguments = ("--steps", 90, "--local-steps", 10, "--fragments", 3, "--delay", 2, "--outer", "mean")
    (run,) = runs_of(tmp_path, ["none"], *arguments, launch=torchrun)
    assert run["replicas_identical"] and run["test_accuracy"] > 0.8
    assert run["exchange_seconds"]["exposed"] >= 0 and run["exchange_seconds"]["total"] > 0


@pytest.mark.long
@pytest.mark.parametrize("launch", [horovodrun, torchrun])
def test_muon_trains_in_jobs(text, tmp_path, launch):
    arguments = ("--model", "charlm-small", "--data", text, "--batch-size", 2, "--steps", 30, "--threads", 1)
    (run,) = runs_of(tmp_path, ["block-float:bits=4"], "--optimizer", "muon", *arguments, launch=launch)
    assert run["test_loss"] < math.log(256) - 1
    assert run["ratio"] > 5


@pytest.mark.long
def test_script_of_ddp_alone_learns_digits():
    """Both matrices are compressed, in two collectives."""
    job = torchrun(2, EXAMPLES / "train_ddp.py")
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch {i}" for i in range(1, 6)]
    accuracy, ratio = re.search(r"accuracy ([0-9.]+)%, ([0-9.]+) times", lines[-1]).groups()
    assert float(accuracy) > 80 and 2 < float(ratio) < 4


@pytest.mark.long
def test_methods_learn_digits_through_ddp(tmp_path):
    """One method of each kind: averages have the bits of one process with all methods."""
    specs = ["none", "topk:theta=0.9", "per-layer:^9=none,default=fp16", "acpsgd", "qsgd"]
    runs = runs_of(tmp_path, specs, "--epochs", 4, "--threads", 1, launch=torchrun)
    plain, topk, by_name, *rest = runs
    assert all(run["test_accuracy"] > LEARNT for run in runs)
    assert {run["uncompressed_bytes_per_step"] for run in runs} == {4 * (188_810 - 2 * 288)}
    assert plain["ratio"] == 1
    assert topk["ratio"] > 7
    assert all(run["ratio"] > 9 for run in rest)
    # Half of all but the named layer, biases and the small first convolution.
    halved = 64 * 32 * 9 + 64 * 64 * 9 + 128 * 10
    assert by_name["payload_bytes_per_step"] == pytest.approx(4 * (188_810 - 2 * 288) - 2 * halved, rel=0.001)


@pytest.mark.parametrize(
    ("amp", "launch", "specs", "arguments"),
    [
        ("bf16", torchrun, ["fft-range", "acpsgd"], ["--epochs", 4]),
        pytest.param("bf16", horovodrun, ["qsgd"], ["--epochs", 4], marks=pytest.mark.long),
        pytest.param(  # processors are slow at it
            "fp16", torchrun, ["acpsgd"], ["--batch-size", 8, "--epochs", 1], marks=pytest.mark.long
        ),
    ],
    ids=["bf16-ddp", "bf16-horovod", "fp16-ddp"],
)
def test_mixed_precision_learns_digits(tmp_path, amp, launch, specs, arguments):
    for run in runs_of(tmp_path, specs, "--amp", amp, "--threads", 1, *arguments, launch=launch):
        assert run["test_accuracy"] > LEARNT and run["ratio"] > 10, run["compression"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("specs", "arguments"),
    [
        (
            [
                "qsgd", "terngrad", "signsgd", "onebit", "atomo", "powersgd", "acpsgd", "topk",
                "per-layer:^9=none,default=topk(select=sampled,exchange=scatter_reduce)",
            ],
            ["--epochs", 5],
        ),
        (["dgc"], ["--epochs", 8]),  # it learns late
        # Without momentum, which would multiply what error feedback sends late.
        (["randomk"], ["--momentum", 0, "--lr", 0.5, "--epochs", 8]),
        # Each step moves each weight by the learning rate.
        (["signsgd:error_feedback=False"], ["--lr", 0.0003, "--epochs", 4]),
    ],
    ids=["most", "late", "random", "votes"],
)  # fmt: skip
def test_methods_learn_digits(tmp_path, specs, arguments):
    """All at their defaults."""
    ratios = {"topk": (55, 80), "randomk": (60, 100)}  # 1-D parameters travel uncompressed
    for run in runs_of(tmp_path, specs, *arguments):
        assert run["test_accuracy"] > LEARNT, run["compression"]
        least, most = ratios.get(run["compression"], (1.2 if "per-layer" in run["compression"] else 10, math.inf))
        assert least < run["ratio"] < most, run["compression"]
