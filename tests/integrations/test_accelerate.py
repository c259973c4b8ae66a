"""gradzip.integrations.accelerate in real jobs, against the same front ends without Accelerate."""

import pytest
import torch

from integrations import needs_integrations, torchrun
from launch import scenarios

pytestmark = [needs_integrations, pytest.mark.long, pytest.mark.timeout(600)]

SAVED, STEPS, EVERY = 3, 6, 2  # of accelerate_worker.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("accelerate")


def run(folder, ranks, *names):
    return scenarios(ranks, "accelerate_worker.py", folder, *names, run=torchrun, timeout=500)


@pytest.fixture(scope="module")
def results(folder):
    return run(folder, 2)


@pytest.fixture(scope="module")
def later(folder, results):
    """Of a later job, which has the checkpoints."""
    return run(folder, 2, "resumed")


def same(steps, others):
    """Whether values after each step are the same, bit for bit."""
    assert len(steps) == len(others) > 0
    return all(
        ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        for ours, theirs in zip(steps, others)
    )


def trained(steps):
    """The parameters among the values of steps: buffers differ between ranks."""
    return [{name: value for name, value in values.items() if name.endswith(("weight", "bias"))} for values in steps]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_compress_is_the_hook_of_ddp(results, accumulated):
    """The same bits and bytes; with gradient accumulation, ranks communicate once for each step of the optimizer."""
    first = results["averaged"][0][accumulated][0]
    assert len(first) == STEPS and not same(first[:1], first[1:2])
    for of_rank in results["averaged"]:
        after, by_hand, sent = of_rank[accumulated]
        assert same(after, by_hand) and same(trained(after), trained(first))
        assert sent[0] == sent[1] == of_rank[1][2][0] > 0


def test_states_follow_the_loss_scale_of_accelerate(results):
    """The scale changes, and the step with an overflow on rank 1 is skipped on all ranks."""
    for after, by_hand, scales in results["scaled"]:
        assert same(after, by_hand) and scales[0] == scales[1] != 2.0**10
        skipped = [same([a], [b]) for a, b in zip(trained(after), trained(after[1:]))]
        assert skipped == [True, False, False, False, False]


def test_local_steps_are_those_of_gradzip(results):
    """DDP averages neither gradients nor buffers, and ranks are equal after each exchange."""
    (after, *_), (others, *_) = results["alone"]
    equal = [same([a], [b]) for a, b in zip(trained(after), trained(others))]
    assert equal == [(step + 1) % EVERY == 0 for step in range(STEPS)]
    assert not same(after[-1:], others[-1:]), "running statistics are those of a rank"
    for after, by_hand, exchanges in results["alone"]:
        assert same(after, by_hand) and exchanges == STEPS // EVERY


@pytest.mark.parametrize("kind", ["compress", "local", "streamed"])
def test_resumes_from_a_checkpoint_of_accelerate(results, later, kind):
    for uninterrupted, resumed in zip(results["uninterrupted"], later["resumed"]):
        assert same(uninterrupted[kind][SAVED:], resumed[kind])


def test_resuming_needs_the_states(folder, results, later):
    """Without them, the parameters are others: the test above would see a state that is lost."""
    for uninterrupted, resumed in zip(results["uninterrupted"], run(folder, 2, "without_states")["without_states"]):
        assert not same(uninterrupted["compress"][SAVED:], resumed)


def test_on_one_process_nothing_is_averaged(folder, results, later):
    """A checkpoint of two ranks goes on without residuals."""
    (found,) = run(folder, 1, "on_one_process")["on_one_process"]
    assert found["returned"] == [None, None] and found["trained"] == STEPS
    assert [text for text in found["warnings"] if "residuals are dropped" in text] == found["warnings"][-1:]
    assert found["states"] == ["0.weight", "3.weight"]
    assert found["local"] == ""


def test_fsdp2_averages_over_replicas(tmp_path):
    """Two shards in each of two replicas: the same bits as by hand, also from a checkpoint of Accelerate."""
    for after, by_hand, resumed, sent in run(tmp_path, 4, "replicas")["replicas"]:
        for values, others in zip([*after, *after[SAVED:]], [*by_hand, *resumed], strict=True):
            assert all(map(torch.equal, values, others))
        assert sent[0] == sent[1] > 0


def test_another_try_after_one_that_has_failed(results):
    """Nothing of the first is alive, or in checkpoints."""
    for found in results["again"]:
        assert found == [([0, 0], 1)] * 3


def test_data_parallel_start(results):
    for started, of_rank in zip(results["started"], results["averaged"]):
        assert same(started, of_rank[1][0])


def test_refuses_what_it_cannot_average(results):
    for found in results["refused"]:
        assert found["type"] == "TypeError: compress: got 'topk', expected a compressor, as gradzip.TopK()"
        assert found["accelerator"] == (
            "TypeError: compress: got DistributedDataParallel, expected an accelerate.Accelerator"
        )
        assert found["unwrapped"].startswith("TypeError: compress: got a Sequential without DDP and FSDP2")
        assert "FSDP1, expected FSDP2" in found["FSDP1"]
        assert found["twice"].startswith("RuntimeError: register_comm_hook")
        assert found["unprepared"] == "TypeError: got a Sequential, expected a model that accelerator.prepare returned"
        assert found["count"] == (
            "ValueError: got a checkpoint of 1 calls of compress and local_steps, expected 2: make the same calls "
            "before load_state"
        )
        for strategy, name in (("DEEPSPEED", "DeepSpeed"), ("MEGATRON_LM", "Megatron-LM"), ("XLA", "XLA")):
            assert found[strategy].startswith(f"ValueError: compress: got {name}, which averages gradients itself: use")
            assert found[f"local {strategy}"].startswith(f"ValueError: LocalSteps: got {name}")
        assert found["local FSDP"].startswith("ValueError: LocalSteps: got FSDP: use DDP")
