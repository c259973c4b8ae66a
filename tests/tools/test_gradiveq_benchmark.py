"""benchmarks/gradiveq.py: what it measures is what GradiVeQ does, and a run continues from its file."""

import argparse
import json
import sys

import pytest
import torch

from benchmarks import gradiveq
from gradzip import GradiVeQ, LocalGroup
from gradzip.methods.gradiveq import best_slice_size

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (16, 8, 3, 3)


def gradients(count: int) -> list[torch.Tensor]:
    """A mean, a few common directions, and noise."""
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(6, *SHAPE, generator=generator)
    return [
        torch.einsum("d,dfchw->fchw", torch.randn(6, generator=generator) + 1, directions)
        + 0.5 * torch.randn(SHAPE, generator=generator)
        for _ in range(count)
    ]


@pytest.mark.parametrize("reuse", [None, 1, 2])
def test_bases_lose_what_gradiveq_loses(reuse):
    """Learned from the same samples, and measured on the same later gradients."""
    steps, later = 12, 5
    method = GradiVeQ(warmup_steps=0, sample_steps=steps, compress_steps=9, reuse=reuse, slice_size=None, stop=None)
    group, grads = LocalGroup(method, 1), gradients(steps + later)
    samples = torch.stack([gradiveq.to_slices(grad) for grad in grads[:steps]])
    assert samples.shape == (steps, 1152 // best_slice_size(torch.Size(SHAPE)), best_slice_size(torch.Size(SHAPE)))
    bases = gradiveq.Bases(samples, gradiveq.Window(steps, method.loss, reuse))
    lost = energy = 0.0
    for step, grad in enumerate(grads):
        average = group.average([grad], "w")[0]
        if step >= steps:
            slices = gradiveq.to_slices(grad)
            lost += float(bases.lost(slices).sum())
            energy += float(gradiveq.energy(slices).sum())
            assert float((average - grad).double().square().sum()) == pytest.approx(
                float(bases.lost(slices).sum()), rel=1e-4
            )
    state = group.compressors[0].states["w"]
    assert bases.dimension == sum(map(len, state.bases)) / len(state.bases)
    assert state.lost / state.energy == pytest.approx(lost / energy, rel=1e-4)
    assert 0.02 < lost / energy < 0.5
    # Of the samples' variance, of which their energy is more, lambda is lost at most in the slices that a basis is of.
    firsts = slice(None) if reuse == 1 else slice(1) if reuse is None else slice(None, None, 2)
    inside = sum(float(bases.lost(one)[firsts].sum()) for one in samples)
    assert 0 <= inside <= method.loss * sum(float(gradiveq.energy(one)[firsts].sum()) for one in samples)


def arguments(**changes) -> argparse.Namespace:
    return argparse.Namespace(**{"steps": 9, "workers": 2, "batch_size": 8, "bf16": False, "seed": 3, **changes})


def test_runs_are_equal_until_compression_starts():
    """A basis of 2 directions loses most of the first compressed gradients."""
    dataset, args = gradiveq.data.images(), arguments()
    study = gradiveq.LossStudy(args.steps)
    plain = gradiveq.train("none", args, dataset, study=study)
    late = gradiveq.train("gradiveq:warmup_steps=9", args, dataset)
    assert late["train_loss"] == plain["train_loss"] and plain["ratio"] == late["ratio"] == 1.0
    run = gradiveq.train("gradiveq:warmup_steps=2,sample_steps=3,compress_steps=3,stop=none", args, dataset)
    (point,) = run["points"]
    assert run["train_loss"] != plain["train_loss"] and run["ratio"] > 1.1
    assert point["compressed"] == pytest.approx(3 / 9, abs=1e-4)
    # Above 1 where the mean of the samples is not that of later gradients.
    assert 0.1 < point["lost"] < 3 and 0.1 < point["error"] < 3
    assert study.rows() == []  # the first window has 25 samples


def test_a_run_continues_from_its_file(monkeypatch, tmp_path, capsys):
    file = tmp_path / "results.json"
    spec = "gradiveq:warmup_steps=1,sample_steps=2,compress_steps=2"
    common = ["gradiveq", "--steps", "6", "--workers", "2", "--batch-size", "4", "--json", str(file)]
    for specs in (["none"], ["none", spec]):
        monkeypatch.setattr(sys, "argv", [*common, *specs])
        gradiveq.main()
    results = json.loads(file.read_text())
    assert [run["compression"] for run in results["runs"]] == ["none", spec]
    assert results["configuration"]["data"] == "digits" and not list(tmp_path.glob("*.part"))
    captured = capsys.readouterr()
    assert captured.err.count("training loss") == 2  # `none` ran once
    assert spec in captured.out.splitlines()[-1]
    monkeypatch.setattr(sys, "argv", [*common, "--seed", "1"])
    with pytest.raises(SystemExit, match="1"):
        gradiveq.main()
    assert "results.json: was measured with seed 0, expected 1; give another --json" in capsys.readouterr().err


def test_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gradiveq", "--help"])
    with pytest.raises(SystemExit, match="0"):
        gradiveq.main()
    assert capsys.readouterr().out.startswith("usage: python -m benchmarks.gradiveq ")
