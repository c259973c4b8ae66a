"""Callbacks of Lightning, in real jobs: with the same bits as without Lightning."""

import re
import subprocess

import pytest
import torch

import integrations
from integrations import needs_integrations, torchrun
from launch import assert_done, environment, scenarios
from paths import ROOT

pytestmark = [needs_integrations, pytest.mark.long, pytest.mark.timeout(600)]

PARAMETERS = 6  # which are followed by the running statistics of each rank


def run(folder, ranks, *names):
    return scenarios(ranks, "lightning_worker.py", folder, *names, run=torchrun, timeout=500)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(tmp_path_factory.mktemp("two"), 2)


def equal(ours, theirs):
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def test_trainer_gives_the_bits_of_ddp_with_the_hook(two):
    for spec, ((ours, sent), (theirs, sent_without)) in two["plain"][0].items():
        assert equal(ours, theirs), spec
        assert sent == sent_without > 0, spec
        assert equal(ours[:PARAMETERS], two["plain"][1][spec][0][0][:PARAMETERS]), spec


def test_gradients_are_accumulated(two):
    for ours, theirs in two["accumulated"]:
        assert equal(ours, theirs)
    assert not equal(two["accumulated"][0][0], two["plain"][0]["acpsgd:rank=2"][0][0])


def test_loggers_are_told_what_was_sent(two):
    sparse, dense, none = two["logged"][0]
    assert [step for step, _ in sparse[0]] == [2] and [step for step, _ in dense[0]] == list(range(5))
    assert none[0] == []
    last = dense[0][-1][1]
    assert (last["gradzip/ratio"], last["gradzip/mb"]) == pytest.approx((dense[1], dense[2] / 1e6))
    assert sparse[0][0][1]["gradzip/mb"] == dense[0][2][1]["gradzip/mb"]


def test_compressor_follows_the_scaler_of_mixed_precision(two):
    for ours, theirs, follows, scale in two["scaled"]:
        assert follows and equal(ours, theirs)
        assert scale != 2.0**20 and all(tensor.isfinite().all() for tensor in ours)


def test_resumed_trainer_gives_the_bits_of_an_uninterrupted_one(two):
    for of_rank in two["resumed"]:
        for spec, (whole, continued, _) in of_rank.items():
            assert equal(whole, continued), spec


def test_checkpoint_has_the_residuals_of_all_ranks(two):
    for spec, (_, _, residuals) in two["resumed"][0].items():
        assert len(residuals) == 2 and not torch.equal(*residuals), spec


def test_fabric(two):
    for ours, theirs, follows in two["fabric"]:
        assert equal(ours, theirs) and follows


def test_local_steps_give_the_bits_of_a_plain_loop(two):
    for ours, theirs, (sent, sent_without), exchanges, ddp_is_freed in two["local_steps"]:
        assert equal(ours, theirs)
        assert sent == sent_without > 0 and exchanges > 4 and ddp_is_freed
    (first, *_), (second, *_) = two["local_steps"]
    assert equal(first[:PARAMETERS], second[:PARAMETERS])
    assert not torch.equal(first[PARAMETERS], second[PARAMETERS])  # running means, which nothing averages


def test_resumed_local_steps_give_the_bits_of_uninterrupted_ones(two):
    for whole, continued in two["local_steps_resumed"]:
        assert equal(whole, continued)


def test_state_that_is_no_tensor_is_resumed(two):
    for whole, continued in two["extra_state"]:
        assert equal(whole, continued)
    assert not equal(two["extra_state"][0][0], two["local_steps_resumed"][0][0])


def test_data_parallel_start(two):
    for of_rank in two["started"]:
        for whole, continued, by_hand in of_rank:
            assert equal(whole, by_hand) and equal(continued, by_hand)


def test_an_evaluation_from_a_checkpoint_leaves_the_next_fit_alone(two):
    for of_rank in two["evaluated"]:
        for evaluated, plain in of_rank:
            assert equal(evaluated, plain)


def test_a_fit_after_one_that_has_failed(two):
    (error, first), (_, second) = two["failed"]
    assert error == "RuntimeError: a bad batch" and equal(first[:PARAMETERS], second[:PARAMETERS])


def test_parameters_that_other_callbacks_change_at_the_end_become_equal(two):
    for first, second in zip(*two["changed_at_the_end"]):
        assert equal(first[:PARAMETERS], second[:PARAMETERS])


def test_models_of_setup_module(two):
    for ((error, _), (none, told)), by_hand, local in two["fabric_modules"]:
        assert error.startswith("RuntimeError: Compression: got a step of parameters that are not averaged, expected")
        assert none == "" and equal(told, by_hand)
        assert local.startswith("RuntimeError: LocalSteps: got a Fabric, expected a Trainer")


def test_refused_by_name(two):
    for errors in two["refused"]:
        assert errors["class"].startswith("TypeError: Compression: got <class 'gradzip.methods.low_rank.ACPSGD'>")
        assert errors["other"].startswith("ValueError: Compression: got Other, expected strategy='ddp'")
        assert errors["model parallel"].startswith("ValueError: Compression: got ModelParallelStrategy, expected")
        assert "sharded over all 2 ranks, expected replicas of shards" in errors["no replicas"]
        assert errors["local fsdp2"].startswith("ValueError: LocalSteps: got ModelParallelStrategy and 1 optimizers")
        assert errors["local optimizers"].startswith("ValueError: LocalSteps: got DDPStrategy and 2 optimizers")
        assert errors["local averages"].startswith(
            "ValueError: LocalSteps: got a StochasticWeightAveraging callback, whose weights differ between ranks"
        )
        assert errors["local options"] == "ValueError: LocalSteps: got every = 0, expected an integer >= 1"


def test_one_process(tmp_path):
    ((whole, continued, without),) = run(tmp_path, 1, "alone")["alone"]
    assert equal(whole, without) and equal(continued, without)


def test_shards_of_fsdp2(tmp_path):
    for whole, continued, theirs in run(tmp_path, 4, "sharded")["sharded"]:
        assert equal(whole, theirs) and equal(continued[:PARAMETERS], theirs[:PARAMETERS])


PRELUDE = """\
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

def record(name, count):  # in a file: both processes may print to one line
    Path(f"{name}.{os.getpid()}").write_text(str(count))

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Linear(512, 512)

    def training_step(self, batch, index):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

loader = DataLoader(TensorDataset(torch.randn(8, 512)), batch_size=1)
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
# What follows each code block of the documentation: some steps.
STEPS = [
    "trainer.fit_loop.max_epochs = 1\ntrainer.fit(Net(), loader)\n"
    "record('trainer', trainer.callbacks[0].compressor.traffic.bytes_sent)\n",
    "fabric.backward(model(torch.randn(8, 512)).square().mean())\n"
    "record('fabric', compression.compressor.traffic.bytes_sent)\n",
    "trainer.fit_loop.max_epochs = 1\ntrainer.fit(Net(), loader)\nrecord('local', local_steps.outer.exchanges)\n",
    "class Trained(Sharded, Net):\n    pass\n"
    "compression = Compression(gradzip.BlockFloat())\n"
    "Trainer(devices=2, strategy=strategy, callbacks=[compression], max_epochs=1).fit(Trained(), loader)\n"
    "record('sharded', compression.compressor.traffic.bytes_sent)\n",
]


def test_documentation_under_the_launcher_of_lightning(tmp_path):
    section = (ROOT / "docs" / "integrations.md").read_text().partition("\n## Lightning\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == len(STEPS)
    code = PRELUDE + "".join(block + steps for block, steps in zip(blocks, STEPS))
    script = tmp_path / "script.py"
    script.write_text(code.replace("RANKS, REPLICAS = 16, 2", "RANKS, REPLICAS = 2, 2"))
    job = subprocess.run(
        [*integrations.python(), str(script)], cwd=tmp_path, env=environment(GLOO_SOCKET_IFNAME="lo"),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert_done(job)
    for name in ("trainer", "fabric", "local", "sharded"):
        counts = [int(path.read_text()) for path in tmp_path.glob(f"{name}.*")]
        assert len(counts) == 2 and min(counts) > 0, name
