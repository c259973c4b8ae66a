"""`Momentum` with `gradzip.optim.AdamW` in real jobs: both switch in the same step on all ranks, as in a LocalGroup."""

import itertools

import pytest
import torch
import torch.distributed as dist

import gradzip
from contract import TIMEOUT, assert_equal_states, gradient
from harness import Model
from launch import horovodrun, scenarios, torchrun
from momentum_worker import AUTO, AUTO_STEPS, EVERY, FEW, ROWS, SPECS, STEPS, VARIANTS, WARMUP, settling
from nonfinite_worker import SHAPES


def run_job(tmp_path_factory, run, *others):
    folder = tmp_path_factory.mktemp("momentum")
    return scenarios(
        2, "momentum_worker.py", folder, "refused", "auto", "late_rows", *others, *SPECS, run=run, timeout=TIMEOUT
    )


@pytest.fixture(scope="module")
def under_horovod(tmp_path_factory):
    return run_job(tmp_path_factory, horovodrun, "loaded_on_one_rank")


@pytest.fixture(scope="module")
def under_torch(tmp_path_factory):
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    pytest.importorskip("torch.distributed.fsdp._fully_shard", reason="torch without FSDP2")
    return run_job(tmp_path_factory, torchrun, "unused")


@pytest.fixture
def results(request, engine):
    return request.getfixturevalue(f"under_{engine}")


def reference(spec):
    """The parameters and states of AdamW after each step of a LocalGroup, in the order of the parameters."""
    group = gradzip.LocalGroup(gradzip.parse(spec), 2)
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer, after = gradzip.optim.AdamW(parameters.values(), lr=0.1, weight_decay=0.1), []
    for step in range(STEPS):
        grads = [{name: gradient(name, rank, step, shape) for name, shape in SHAPES.items()} for rank in range(2)]
        for name, average in group.step(grads)[0].items():
            parameters[name].grad = average
        group.tell_optimizers(parameters)
        optimizer.step()
        after.append([p.detach().clone() for p in parameters.values()])
    return after


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("engine", "variant"), [(e, variant) for e, of in VARIANTS.items() for variant in of])
def test_both_switch_in_the_same_step(results, variant, spec):
    per_rank = [of_rank[variant] for of_rank in results[spec]]
    for of_rank in per_rank:
        for step, (before, after) in enumerate(itertools.pairwise(of_rank), start=1):
            for name, was, now in zip(SHAPES, before["optimizer"], after["optimizer"]):
                second = was["exp_avg_sq"]  # of a shard
                compressed = step >= WARMUP and second.dim() > 1 and second.numel() >= 1024
                assert torch.equal(second, now["exp_avg_sq"]) == compressed, (step, name)
                assert now["exp_avg_sq_step"] == (WARMUP if compressed else now["step"])
        if variant != "fsdp shards":
            for step, of_first in zip(of_rank, per_rank[0]):
                assert_equal_states(step["parameters"], of_first["parameters"])
                assert_equal_states(step["optimizer"], of_first["optimizer"])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("engine", "variant"), [("horovod", "float32"), ("torch", "ddp")])
def test_trains_as_in_a_local_group(results, variant, spec):
    for step, expected in zip(results[spec][0][variant], reference(spec)):
        for got, wanted in zip(step["parameters"], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("engine", "variant"), [(e, variant) for e, of in VARIANTS.items() for variant in of])
def test_warm_ups_end_in_the_same_step_for_all_ranks_and_shards(results, variant):
    group = gradzip.LocalGroup(gradzip.parse(AUTO), 2)
    for step in range(AUTO_STEPS):
        group.step([{name: settling(name, rank, step) for name in FEW} for rank in range(2)])
    last = group.compressors[0].memory.fields("w")["warmup_steps"]
    assert 4 < last < AUTO_STEPS  # 4 is the least; the second shard alone ends there
    for of_rank in results["auto"]:
        for step, (ended, learnt) in enumerate(of_rank[variant], start=1):
            assert ended == [last if step >= last else None] * 2
            assert learnt == [step, min(step, last), min(step, last)]  # of b, which is not compressed, v and w


def test_the_momentum_stays_that_of_the_optimizer_if_no_rank_uses_a_parameter(under_torch):
    """The optimizer skips a parameter without a gradient, and takes a step with a gradient of zeros."""
    first, second = under_torch["unused"]
    for case, steps in first.items():
        for step, (shared, own) in enumerate(steps):
            assert_equal_states(shared, second[case][step][0])
            for name, momentum in shared.items():
                # Momenta are up to 20; each of 7 steps rounds a few numbers of that size, and divides by 0.9.
                torch.testing.assert_close(0.1 * momentum, own[name], rtol=0, atol=7 * 10 * 2 * 2**-24)


@pytest.mark.parametrize("engine", ["horovod", "torch"])
def test_optimizers_that_do_not_fit_are_refused_in_the_first_step(results):
    for of_rank in results["refused"]:
        assert all(moved == 0 for _, moved in of_rank.values())
        errors = {name: error for name, (error, _) in of_rank.items()}
        assert "AdamW: got a parameter whose momentum Momentum compresses, expected an optimizer" in errors["torch"]
        assert "got betas = (0.8, 0.99) for a parameter whose momentum Momentum compresses" in errors["momentum"]
        assert "AdamW: got a compressed momentum as the first average of '" in errors["at once"]


def test_a_state_that_one_rank_has_loaded_is_broadcast(under_horovod):
    first, second = under_horovod["loaded_on_one_rank"]
    assert_equal_states(first["parameters"], second["parameters"])
    assert_equal_states(first["optimizer"], second["optimizer"])
    for name, state in zip(SHAPES, first["optimizer"]):
        assert state["step"] == 2 and state["exp_avg_sq_step"] == (2 if name == "b" else 1)


@pytest.mark.long
def test_momenta_in_a_site_and_local_steps_between_sites(tmp_path):
    """As with two workers in one process, each of which averages momenta over two ranks."""
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    (of_ranks,) = scenarios(4, "momentum_worker.py", tmp_path, "two_levels", run=torchrun).values()
    models = [Model(SHAPES) for _ in range(2)]
    optimizers = [gradzip.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1) for model in models]
    sites = [gradzip.LocalGroup(gradzip.parse(SPECS[0]), 2) for _ in range(2)]
    gradzip.outer.LocalWorkers(models, optimizers, every=EVERY)
    for step, after in enumerate(zip(*of_ranks, strict=True)):
        for site, (model, group) in enumerate(zip(models, sites)):
            ranks = (2 * site, 2 * site + 1)
            grads = [{name: gradient(name, rank, step, shape) for name, shape in SHAPES.items()} for rank in ranks]
            for name, average in group.step(grads)[0].items():
                model.get_parameter(name).grad = average
            group.tell_optimizers(dict(model.named_parameters()))
        for optimizer in optimizers:  # the second one's step exchanges
            optimizer.step()
        equal = [all(map(torch.equal, after[0], other)) for other in after]
        assert equal == [True, True, *[step % EVERY == EVERY - 1] * 2]
        for rank, got in enumerate(after):
            for ours, expected in zip(got, models[rank // 2].parameters(), strict=True):
                torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("engine", "variant"), [(e, variant) for e, of in VARIANTS.items() for variant in of])
def test_late_rows_of_an_embedding_train_with_the_recipe(results, variant):
    plain, compressed = results["late_rows"][0][variant]
    moved, expected = (torch.cat(of["moved"])[:ROWS][ROWS // 2 :].mean() for of in (compressed, plain))
    assert 0.8 * expected < moved < 1.2 * expected
    assert compressed["sent"] < plain["sent"] / 5
    if variant != "fsdp shards":
        for of_rank in results["late_rows"][1:]:
            assert_equal_states(of_rank[variant][1]["parameters"], compressed["parameters"])
