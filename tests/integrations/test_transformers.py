"""gradzip.integrations.transformers in real jobs, against the same front ends in a Trainer without callbacks."""

import pytest
import torch

from integrations import needs_integrations, torchrun
from launch import scenarios

pytestmark = [needs_integrations, pytest.mark.long, pytest.mark.timeout(600)]

SAVED, STEPS, EVERY = 3, 6, 2  # of transformers_worker.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("transformers")


def run(folder, ranks, *names):
    return scenarios(ranks, "transformers_worker.py", folder, *names, run=torchrun, timeout=500)


@pytest.fixture(scope="module")
def results(folder):
    return run(folder, 2)


def same(steps, others):
    """Whether parameters after each step are the same, bit for bit."""
    assert len(steps) == len(others) > 0
    return all(all(map(torch.equal, ours, theirs)) for ours, theirs in zip(steps, others))


def test_compression_is_the_hook_of_ddp(results):
    first, _, losses = results["uninterrupted"][0]["compression"]
    assert len(first) == STEPS and losses[-1] < losses[0]
    for of_rank, by_hand in zip(results["uninterrupted"], results["by_hand"]):
        assert same(of_rank["compression"][0], by_hand["compression"][0])
        assert same(of_rank["compression"][0], first), "replicas are equal"


def test_local_steps_are_those_of_gradzip(results):
    """Ranks are equal after each exchange, and at the end."""
    (steps, *_), (others, *_) = (of_rank["local"] for of_rank in results["uninterrupted"])
    assert [same([a], [b]) for a, b in zip(steps, others)] == [(step + 1) % EVERY == 0 for step in range(STEPS)]
    for of_rank, by_hand in zip(results["uninterrupted"], results["by_hand"]):
        assert same(of_rank["local"][0], by_hand["local"][0])
    (steps, end, _), (others, other_end, _) = (of_rank["streamed"] for of_rank in results["uninterrupted"])
    assert not same(steps[-1:], others[-1:]) and same([end], [other_end])


def test_gradient_accumulation(results):
    for found in results["accumulated"]:
        assert same(found["compression"][0], found["compression by hand"][0])
        assert same(found["local"][0], found["local by hand"][0])
        assert not same(found["compression"][0], results["by_hand"][0]["compression"][0])


def test_logs_say_what_was_sent(results):
    for logs, ratio, nbytes in results["logs"]:
        *steps, end = logs
        assert len(steps) == STEPS and not any(tag.startswith("gradzip/") for tag in end)
        sent = [log["gradzip/mb"] for log in steps]
        assert sent == sorted(sent) and sent[0] > 0 and sent[-1] == nbytes / 1e6
        assert steps[-1]["gradzip/ratio"] == ratio > 1


def test_resumes_from_a_checkpoint_of_the_trainer(folder, results):
    for uninterrupted, resumed in zip(results["uninterrupted"], run(folder, 2, "resumed")["resumed"]):
        for kind, (steps, end, losses) in uninterrupted.items():
            after, last, last_losses = resumed[kind]
            assert same(steps[SAVED:], after) and same([end], [last]) and losses == last_losses
        assert not same(uninterrupted["compression"][0][SAVED:], resumed["without states"][0])


def test_resumes_on_another_number_of_processes(folder, results):
    """On one, nothing is averaged. Residuals are dropped."""
    (found,) = run(folder, 1, "with_other_checkpoints")["with_other_checkpoints"]
    steps, texts = found["compression"]
    assert steps > 0 and len(texts) == 1 and "residuals are dropped" in texts[0]
    assert found["local"][0] > 0
    steps, texts = found["without"]
    assert steps > 0 and len(texts) == 1
    assert texts[0].startswith("got a checkpoint without gradzip_compression_*.pt: ")


def test_a_trainer_may_train_twice(results):
    for lengths in results["twice"]:
        assert lengths == [2, 4, 6, 8]


def test_a_trainer_may_train_again_after_an_error(results):
    (_, first, *_), (_, second, *_) = results["again"]
    assert same([first], [second])
    for error, _, steps, tokens, kept in results["again"]:
        assert error == "RuntimeError: a bad batch" and steps == [1 + 3, 1 + 3 + 5]
        assert tokens == {False} and kept, "ranks communicate in no step, and the Trainer's arguments are as before"


def test_data_parallel_start(results):
    for started, uninterrupted in zip(results["started"], results["uninterrupted"]):
        assert same(started[0], uninterrupted["compression"][0])


def test_refuses_what_it_cannot_average(results):
    for found in results["refused"]:
        assert found["type"] == "TypeError: Compression: got 'topk', expected a compressor, as gradzip.TopK()"
        assert found["outside"].startswith("RuntimeError: got a call outside of Trainer.train")
        for strategy in ("DeepSpeed", "Megatron-LM", "XLA"):
            assert found[f"compression {strategy}"].startswith(f"ValueError: compress: got {strategy}, which averages")
            assert found[f"local {strategy}"].startswith(f"ValueError: LocalSteps: got {strategy}, which averages")
