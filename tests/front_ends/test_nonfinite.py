"""A NaN on one rank skips the step on all ranks, without a GradScaler, with methods of every kind.

Training goes on as if there had been no such step: parameters, and the states of optimizers and methods, are those of
training without it, to the bit.
"""

import pytest
import torch
import torch.distributed as dist

import kinds
from contract import TIMEOUT, assert_equal_states
from launch import Jobs, horovodrun, scenarios, torchrun
from nonfinite_worker import BAD, HOROVOD, STEPS, TORCH

# `auto` chooses by measured times: another composite, which changes methods after the step, in its place.
COMPOSITE = "phases:0=topk(theta=0.9),4=acpsgd"
EXCHANGED = "topk:theta=0.9,exchange=scatter_reduce"
SPECS = [*(spec for spec in kinds.SAMPLE if kinds.kind(spec) != "composite"), COMPOSITE, "none"]
DEFAULT = [*SPECS[:-2:2], COMPOSITE, "none"]
LONG = [*SPECS[1:-2:2], EXCHANGED, "signsgd", "dgc:theta=0.9,min_numel=1000000"]
every_method = pytest.mark.parametrize("spec", kinds.params([*DEFAULT, *LONG], DEFAULT))


def jobs(tmp_path_factory, run):
    def of_specs(specs):
        return scenarios(
            2, "nonfinite_worker.py", tmp_path_factory.mktemp("nonfinite"), *specs, run=run, timeout=TIMEOUT
        )

    return Jobs(of_specs, [DEFAULT, LONG])


@pytest.fixture(scope="module")
def under_horovod(tmp_path_factory):
    return jobs(tmp_path_factory, horovodrun)


@pytest.fixture(scope="module")
def under_torch(tmp_path_factory):
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    pytest.importorskip("torch.distributed.fsdp._fully_shard", reason="torch without FSDP2")
    return jobs(tmp_path_factory, torchrun)


def shared(state_dict):
    """The states of a compressor that are equal on all ranks."""
    if "parts" in state_dict:
        return [shared(part) for part in state_dict["parts"]]
    local = {*state_dict["rank_local"], "rank", "learnt"}  # rank 0 alone keeps what GradiVeQ has learnt
    return {
        name: {field: value for field, value in of.items() if field not in local}
        for name, of in state_dict["states"].items()
    }


def check(per_rank, sharded):
    bad = STEPS.index(BAD)
    for of_rank in per_rank:
        steps, without = of_rank["with"], of_rank["without"]
        assert [step["skipped"] for step in steps] == [step == BAD for step in STEPS]
        assert [len(step["warnings"]) for step in steps] == [step == BAD for step in STEPS]
        for key in ("parameters", "optimizer", "compressor"):
            assert_equal_states(steps[bad][key], steps[bad - 1][key])
            assert_equal_states(steps[-1][key], without[-1][key])
        for before, after in zip(steps[bad]["parameters"], steps[-1]["parameters"]):
            assert after.isfinite().all() and not (after.numel() and torch.equal(before, after))
        if not sharded:
            first = per_rank[0]["with"]
            for step, of_first in zip(steps, first):
                assert_equal_states(step["parameters"], of_first["parameters"])
                assert_equal_states(step["optimizer"], of_first["optimizer"])
                assert_equal_states(shared(step["compressor"]), shared(of_first["compressor"]))


@every_method
@pytest.mark.parametrize("variant", HOROVOD)
def test_horovod(under_horovod, spec, variant):
    check([of_rank[variant] for of_rank in under_horovod[spec]], sharded=False)


@every_method
@pytest.mark.parametrize("variant", TORCH)
def test_ddp_and_fsdp(under_torch, spec, variant):
    check([of_rank[variant] for of_rank in under_torch[spec]], sharded=variant == "fsdp shards")


def test_the_warning_names_the_parameter(under_torch):
    for of_rank in under_torch["none"]:
        (message,) = of_rank["ddp"]["with"][STEPS.index(BAD)]["warnings"]
        assert message.startswith("got an average gradient of 'v' that is not finite, expected finite ones")
