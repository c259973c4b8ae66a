"""Local steps: the algorithm against a plain reference, and real jobs against workers in one process."""

import copy
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import gradzip
from contract import TIMEOUT, gradient
from gradzip.outer import background, fragments
from harness import residuals as of_rank_residuals
from launch import assert_done, horovodrun, scenarios, torchrun
from outer_worker import (
    EVERY,
    EXCHANGES,
    LIES,
    SHAPES,
    SPECS,
    STREAMED,
    STREAMED_SPECS,
    STREAMED_STEPS,
    Model,
    make,
    parameters,
    take_step,
)

LocalWorkers = gradzip.outer.LocalWorkers
SIZE = 3
NBYTES_OF_CONFIGURATIONS = 10_000  # that ranks compare at the start, and lengths


def workers(size, compressor=None, optimizer=None, **options):
    """Models and optimizers of so many workers, and what exchanges."""
    pairs = [make(rank) for rank in range(size)]
    if optimizer is not None:
        pairs = [(model, optimizer(model.parameters())) for model, _ in pairs]
    models, optimizers = map(list, zip(*pairs))
    return models, optimizers, LocalWorkers(models, optimizers, compressor, **options)


def step_all(models, optimizers, step):
    for rank, (model, optimizer) in enumerate(zip(models, optimizers)):
        take_step(model, optimizer, rank, step)


def reference(size, steps, every, lr=0.7, momentum=0.9):
    """DiLoCo as in its Algorithm 1, with Nesterov's momentum written out. Returns the global parameters."""
    models, optimizers = zip(*[make(rank) for rank in range(size)])
    common = parameters(models[0])
    buffers = [torch.zeros_like(p) for p in common]
    for model in models:
        for parameter, value in zip(model.parameters(), common):
            parameter.data.copy_(value)
    for step in range(steps):
        step_all(models, optimizers, step)
        if (step + 1) % every == 0:
            means = [
                sum((g.double() - p.double()) for p in locals_) / size
                for g, locals_ in zip(common, zip(*[list(model.parameters()) for model in models]))
            ]
            buffers = [momentum * b + d for b, d in zip(buffers, means)]
            common = [(g - lr * (d + momentum * b)).float() for g, d, b in zip(common, means, buffers)]
            for model in models:
                for parameter, value in zip(model.parameters(), common):
                    parameter.data.copy_(value)
    return [value.detach() for value in common]


@pytest.mark.parametrize("size", [1, SIZE])
def test_it_is_diloco(size):
    """With one worker, it is the outer optimizer around the inner one."""
    models, optimizers, group = workers(size, every=EVERY)
    for step in range(EVERY * EXCHANGES):
        step_all(models, optimizers, step)
    assert group.exchanges == EXCHANGES
    for model in models:
        for ours, theirs in zip(parameters(model), reference(size, EVERY * EXCHANGES, EVERY)):
            # Rounding to float32: a few ulps of the parameters in each of 4 exchanges, which AdamW's steps pass on.
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_each_step_averaged_is_data_parallel_sgd():
    """`every` = 1, SGD inside and the mean outside: one SGD step with the mean gradient, to rounding."""
    models, optimizers, _ = workers(SIZE, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), every=1, outer=None)
    expected = parameters(models[0])
    for step in range(5):
        step_all(models, optimizers, step)
        for i, (name, shape) in enumerate(SHAPES.items()):
            expected[i] -= 0.1 * sum(gradient(name, rank, step, shape) for rank in range(SIZE)) / SIZE
    for model in models:
        for ours, theirs in zip(parameters(model), expected):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=5 * 4 * 2**-23 * theirs.abs().max().item())


@pytest.mark.parametrize("spec", ["topk:theta=0.9", "block-float:bits=4", "signsgd:majority=False"])
def test_nothing_of_the_differences_is_lost(spec):
    """The way of the global parameters, and the mean residual, make the mean of the ways of all workers.

    Given gradients do not depend on parameters, nor do the steps of SGD: a worker's way is -lr times their sum.
    """
    models, optimizers, group = workers(
        SIZE, gradzip.parse(spec), lambda ps: torch.optim.SGD(ps, lr=0.1), every=EVERY, outer=None
    )
    start, steps = parameters(models[0]), EVERY * EXCHANGES
    for step in range(steps):
        step_all(models, optimizers, step)
    residuals = [of_rank_residuals(compressor) for compressor in group._group.compressors]
    for i, (name, shape) in enumerate(SHAPES.items()):
        way = start[i].double() - parameters(models[0])[i].double()
        left = sum(of_rank[name].double() for of_rank in residuals) / SIZE if name in residuals[0] else 0.0
        gradients = [gradient(name, rank, step, shape).double() for rank in range(SIZE) for step in range(steps)]
        expected = 0.1 * sum(gradients) / SIZE
        # One rounding to float32 in each step and each of some sums of an exchange, of numbers below 16.
        torch.testing.assert_close(way + left, expected, rtol=0, atol=(steps + 4 * EXCHANGES) * 16 * 2**-24)
        assert name == "bias" or left.abs().max() > 0.01


@pytest.mark.parametrize("size", [2, SIZE])
def test_a_worker_that_diverges_starts_again_from_the_global_parameters(size):
    models, optimizers, _ = workers(size, gradzip.TopK(theta=0.9), every=2)
    step_all(models, optimizers, 0)
    step_all(models, optimizers, 1)
    common = parameters(models[0])
    step_all(models, optimizers, 2)
    models[1].wide.data[3, 4] = torch.inf
    with pytest.warns(UserWarning, match="not finite"):
        step_all(models, optimizers, 3)
    assert all(map(torch.equal, parameters(models[1]), common))
    assert not optimizers[1].state and optimizers[0].state
    assert not any(map(torch.equal, parameters(models[0]), common))
    step_all(models, optimizers, 4)
    step_all(models, optimizers, 5)
    assert all(p.isfinite().all() for p in parameters(models[1]))
    assert all(map(torch.equal, parameters(models[0]), parameters(models[1])))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_do_not_count(fused):
    model, optimizer = make(0, fused=fused)
    group = LocalWorkers([model], [optimizer], every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in model.parameters()) * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert group.exchanges == 0 or factor == 1.0
    assert group.exchanges == 1


class Tied(torch.nn.Module):
    """A head that shares its weights with an embedding, a layer to freeze, and running statistics."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.embed, self.frozen = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8)
        self.norm, self.head = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.frozen(self.embed(tokens))))


@pytest.mark.parametrize("streaming", [{}, {"fragments": 2, "delay": 1}])
def test_frozen_and_tied_parameters_buffers_and_accumulated_gradients(streaming):
    """Frozen ones are left as they are if the optimizer has none of them; if it has, they start and stay equal."""
    models = [Tied(rank) for rank in range(2)]
    for model in models:
        model.frozen.weight.requires_grad_(False)
        model.frozen.bias.requires_grad_(False)
    before = [model.frozen.weight.clone() for model in models]
    optimizers = [torch.optim.SGD([m.embed.weight, m.norm.weight, m.frozen.bias], lr=0.1) for m in models]
    group = LocalWorkers(models, optimizers, every=4, outer=None, **streaming)
    biases = [model.frozen.bias.clone() for model in models]
    assert torch.equal(*biases)
    for step in range(8):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers)):
            optimizer.zero_grad()
            for part in range(2):  # two backward passes for each step
                torch.manual_seed(100 * step + 10 * rank + part)
                model(torch.randint(16, (8,))).square().mean().backward()
            optimizer.step()
    assert group.exchanges == 2 * streaming.get("fragments", 1) - (1 if streaming else 0)  # the last is in progress
    group.synchronize()
    assert all(model.head.weight is model.embed.weight for model in models)
    assert torch.equal(models[0].embed.weight, models[1].embed.weight)
    assert not torch.equal(models[0].norm.running_mean, models[1].norm.running_mean)
    assert all(torch.equal(model.frozen.weight, weight) for model, weight in zip(models, before))
    assert all(torch.equal(model.frozen.bias, bias) for model, bias in zip(models, biases))


def test_a_parameter_is_an_element_of_one_fragment_even_if_it_is_tied():
    model = Tied(0)
    LocalWorkers([model], [torch.optim.SGD(model.parameters(), lr=0.1)], every=4, fragments=3)
    with pytest.raises(ValueError, match="expected at most the 3 layers of the model"):
        LocalWorkers([model], [torch.optim.SGD(model.parameters(), lr=0.1)], every=4, fragments=4)


def test_parameters_of_other_types_are_averaged_in_float32():
    models = [Model(rank).bfloat16() for rank in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    LocalWorkers(models, optimizers, every=1, outer=None)
    start = parameters(models[0])
    for rank, model in enumerate(models):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 2.0 * rank)
        optimizers[rank].step()
    for before, after, other in zip(start, parameters(models[0]), parameters(models[1])):
        local = [before, before - 2.0]
        mean = before.float() - sum(before.float() - p.float() for p in local) / 2
        assert torch.equal(after, mean.bfloat16()) and torch.equal(after, other)


def test_layers_and_fragments():
    names = ["module.embed.weight", "blocks.0.mlp.0.weight", "blocks.0.mlp.1.bias", "blocks.10.b", "3.weight", "scale"]
    layers = ["module.embed", "blocks.0", "blocks.0", "blocks.10", "3", "scale"]
    assert [fragments.layer_of(name) for name in names] == layers
    equal = {f"blocks.{i}.{name}": torch.zeros(8) for i in range(7) for name in ("weight", "bias")}
    for i, names in enumerate(fragments.cut(equal, 3, "LocalSteps")):
        assert names == [name for name in equal if int(name.split(".")[1]) % 3 == i]  # strided
    unequal = {"large.weight": torch.zeros(100), **{f"{i}.weight": torch.zeros(20) for i in range(5)}}
    assert fragments.cut(unequal, 2, "LocalSteps") == [["large.weight"], [f"{i}.weight" for i in range(5)]]
    assert all(fragments.cut(dict.fromkeys("abc", torch.zeros(0)), 3, "LocalSteps"))


def streaming_reference(steps, every, fragments, delay, blend, lr=0.7, momentum=0.9):
    """Streaming DiLoCo as in its Algorithm 2, for parameters that are layers of equal turns."""
    models, optimizers = zip(*[make(rank) for rank in range(SIZE)])
    common = parameters(models[0])
    buffers = [torch.zeros_like(p) for p in common]
    for model in models:
        for parameter, value in zip(model.parameters(), common):
            parameter.data.copy_(value)
    started = {}
    for step in range(1, steps + 1):
        step_all(models, optimizers, step - 1)
        for i in range(len(common)):
            turn = (fragments.index(i) + 1) * every // len(fragments)
            if (step - delay) % every == turn % every and i in started:
                means = started.pop(i)
                buffers[i] = momentum * buffers[i] + means
                common[i] = (common[i] - lr * (means + momentum * buffers[i])).float()
                for model in models:
                    local = list(model.parameters())[i].data
                    local.copy_(blend * local + (1 - blend) * common[i])
        for i in range(len(common)):
            turn = (fragments.index(i) + 1) * every // len(fragments)
            if step % every == turn % every:
                locals_ = [list(model.parameters())[i].detach() for model in models]
                started[i] = sum(common[i].double() - local.double() for local in locals_) / SIZE
                if not delay:
                    raise AssertionError("the reference has no exchange without a delay")
    return [parameters(model) for model in models]


@pytest.mark.parametrize("blend", [0.0, 0.5])
def test_it_is_streaming_diloco(blend):
    options = {"every": 8, "fragments": 3, "delay": 2, "blend": blend}
    models, optimizers, _ = workers(SIZE, **options)
    for step in range(30):
        step_all(models, optimizers, step)
    # matrix and wide have equally many bytes: three layers are three fragments, in order.
    expected = streaming_reference(30, **options | {"fragments": [0, 1, 2]})
    for model, of_worker in zip(models, expected):
        for ours, theirs in zip(parameters(model), of_worker):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # as above, of as many exchanges


def linear():
    return torch.nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"every": 0}, "got every = 0, expected an integer >= 1"),
        ({"every": 2.5}, "got every = 2.5, expected an integer >= 1"),
        ({"every": 4, "delay": 4}, "got delay = 4, expected less than every / fragments = 4"),
        ({"every": 30, "fragments": 1, "delay": 31}, "got delay = 31, expected less than every / fragments = 30"),
        ({"delay": -1}, "got delay = -1, expected an integer >= 0"),
        ({"fragments": 0}, "got fragments = 0, expected an integer >= 1"),
        ({"fragments": 3}, "got fragments = 3, expected at most the 2 layers of the model"),
        ({"fragments": 5, "every": 4}, "got fragments = 5 and every = 4, expected at most one fragment a step"),
        ({"blend": 1.5}, "got blend = 1.5, expected a number from 0 to 1"),
        ({"blend": float("nan")}, "got blend = nan, expected a number from 0 to 1"),
        ({"outer": lambda params: torch.optim.SGD(linear().parameters(), lr=1.0)}, "an optimizer of other parameters"),
        ({"outer": lambda params: torch.optim.SGD(params[:1], lr=1.0)}, "an optimizer of other parameters"),
        ({"outer": lambda params: params}, "outer returned list, expected an optimizer"),
        ({"offload": "cpu"}, "got offload = 'cpu', expected True or False"),
        (
            {"compressor": gradzip.DGC()},
            "got DGC, which applies momentum 0.9, and an outer optimizer with",
        ),
        ({"compressor": "topk"}, "got 'topk', expected a compressor"),
    ],
)
def test_bad_arguments(options, error):
    model = linear()
    with pytest.raises((TypeError, ValueError), match=error):
        LocalWorkers([model], [torch.optim.SGD(model.parameters(), lr=0.1)], **options)


def test_a_method_with_momentum_needs_an_outer_optimizer_without():
    models, optimizers, group = workers(2, gradzip.DGC(), every=1, outer=lambda params: torch.optim.SGD(params, lr=0.7))
    step_all(models, optimizers, 0)
    assert group.exchanges == 1


def test_bad_models_and_optimizers():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="2 parameters that are not the model's"):
        LocalWorkers([linear()], [optimizer])
    with pytest.raises(TypeError, match=r"got list as the model"):
        LocalWorkers([[model]], [optimizer])
    with pytest.raises(TypeError, match=r"got Linear as the optimizer"):
        LocalWorkers([model], [model])
    with pytest.raises(ValueError, match="complex128"):
        of_complex = torch.nn.ParameterList([torch.zeros(2, dtype=torch.complex128)])
        LocalWorkers([of_complex], [torch.optim.SGD(of_complex.parameters(), lr=0.1)])
    with pytest.raises(ValueError, match="'weight': got torch.float64, expected at most 32 bits"):
        of_double = linear().double()
        LocalWorkers([of_double], [torch.optim.SGD(of_double.parameters(), lr=0.1)])
    with pytest.raises(ValueError, match="1 models and 2 optimizers"):
        LocalWorkers([model], [optimizer, optimizer])
    if dist.is_available() and not dist.is_initialized():
        with pytest.raises(ValueError, match="torch.distributed is not initialized"):
            gradzip.outer.LocalSteps(model, optimizer)


@pytest.fixture
def alone():
    """A process group of this process."""
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_twin_has_the_backend_of_its_group(alone):
    group = dist.new_group([0], backend="cpu:gloo")
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = gradzip.outer.LocalSteps(model, optimizer, delay=1, group=group)
    twin = outer._session.engine.group
    assert twin is not group and dist.get_backend(twin) == "cpu:gloo" != dist.get_backend()
    outer.remove()
    again = [gradzip.outer.LocalSteps(*make(0), delay=1, group=group) for _ in range(2)]
    assert again[0]._session.engine.group is twin is not again[1]._session.engine.group
    for outer in again:
        outer.remove()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("part", ["finish", "end"])
def test_an_exchange_that_has_failed_is_postponed(alone, monkeypatch, part, delay):
    """Its error is raised once, and nothing of the differences is lost."""
    model, optimizer = make(0)
    compressor = gradzip.TopK(theta=0.9)
    outer = gradzip.outer.LocalSteps(model, optimizer, compressor, every=EVERY, outer=None, delay=delay)

    def without_residuals():
        left = of_rank_residuals(compressor)
        return [p.detach() - left.get(name, 0) for name, p in model.named_parameters()]

    def fail(_):
        monkeypatch.undo()
        raise gradzip.ops.PayloadError("corrupt payload")

    monkeypatch.setattr(outer._session, part, fail)
    failed = []
    for step in range(EVERY * EXCHANGES):
        try:
            take_step(model, optimizer, 0, step)
        except gradzip.ops.PayloadError:
            failed.append(step)
    assert failed == [EVERY - 1 + delay] and outer.exchanges >= EXCHANGES - 2
    outer.state_dict()
    before = without_residuals()
    monkeypatch.setattr(outer._session, part, fail)
    with pytest.raises(gradzip.ops.PayloadError):
        outer.synchronize()
    outer.synchronize()
    for ours, theirs in zip(without_residuals(), before):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=4 * 16 * 2**-24)  # roundings of numbers below 16
    outer.remove()


def test_a_group_that_a_rank_is_not_in_is_refused(alone):
    with pytest.raises(ValueError, match="got a group that this rank is not in"):
        gradzip.outer.LocalSteps(*make(0), group=dist.GroupMember.NON_GROUP_MEMBER)


def test_training_changes_no_state_dict(alone):
    model, optimizer = make(0)
    outer = gradzip.outer.LocalSteps(model, optimizer, gradzip.TopK(theta=0.9), every=1)
    for step in range(3):
        take_step(model, optimizer, 0, step)

    def tensors(state):
        return state["global"]["parameters"], state["global"]["optimizer"]["state"], state["compressor"]["states"]

    saved, of_model = outer.state_dict(), copy.deepcopy(model.state_dict())
    before = copy.deepcopy(saved)
    take_step(model, optimizer, 0, 3)
    model.load_state_dict(of_model)
    outer.load_state_dict(saved)
    take_step(model, optimizer, 0, 3)
    torch.testing.assert_close(tensors(saved), tensors(before), rtol=0, atol=0)
    outer.remove()


def test_a_local_steps_whose_exchange_has_failed_can_be_removed(alone, monkeypatch):
    model, optimizer = make(0)
    outer = gradzip.outer.LocalSteps(model, optimizer, every=EVERY, delay=1)
    monkeypatch.setattr(outer._session, "finish", lambda _: 1 / 0)
    for step in range(EVERY):
        take_step(model, optimizer, 0, step)
    with pytest.raises(ZeroDivisionError):
        outer.remove()
    outer.remove()
    take_step(model, optimizer, 0, EVERY)
    with pytest.raises(RuntimeError, match="got an exchange after remove"):
        outer.synchronize()


def test_a_thread_ends_with_what_submits_to_it():
    runner = background.Runner(background.Seconds(), torch.device("cpu"), in_background=True)
    assert runner.submit(lambda number: number + 1, 1)() == 2
    thread = runner._thread
    del runner
    thread.join(TIMEOUT)
    assert not thread.is_alive()


def test_a_process_exits_while_something_runs_in_the_background():
    """An exchange in which other ranks do not take part, when this one fails."""
    script = (
        "import threading, torch; from gradzip.outer.background import Runner, Seconds;"
        "Runner(Seconds(), torch.device('cpu'), True).submit(threading.Event().wait); raise SystemExit(3)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=TIMEOUT).returncode == 3


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_ranks_keep_their_own_steps_in_one_checkpoint_but_not_other_exchanges():
    """The state dicts of one rank in several steps, as if of several ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, optimizer = make(0)
        outer = gradzip.outer.LocalSteps(model, optimizer, every=3, delay=1)
        saved = []
        for step in range(7):
            take_step(model, optimizer, 0, step)
            saved.append(copy.deepcopy(outer.state_dict()))
        outer.synchronize()
        saved.append(outer.state_dict())
        outer.remove()
    finally:
        dist.destroy_process_group()
    merge, shard = gradzip.checkpoint.merge, gradzip.checkpoint.shard
    for ranks in (saved[0:2], saved[2:5]):  # in each, some have applied an exchange that others have only received
        merged = merge(ranks)
        for rank, own in enumerate(ranks):
            given = shard(merged, rank, len(ranks))
            for name in ("steps", "exchanges", "equal", "pending"):
                assert given[name] == own[name], (rank, name)
    assert saved[-1]["equal"]
    with pytest.warns(UserWarning, match="residuals are dropped"):
        assert not shard(merge(saved[-1:]), 1, 2)["equal"]
    with pytest.raises(ValueError, match=r"merge: got state dicts with exchanges \[0, 1\], expected the same on all"):
        merge(saved[1:3])
    for name, value in (("next", 1), ("fragments", 2), ("shard", "shard1of2")):
        with pytest.raises(ValueError, match=rf"merge: got state dicts with {name}s? \["):
            merge([saved[0], saved[0] | {name: value}])


def test_weights_that_are_loaded_after_construction_are_taken_over(alone):
    """The next exchange goes on from them, with a warning; weights that are swapped and put back are no others."""
    model, optimizer = make(0)
    outer = gradzip.outer.LocalSteps(model, optimizer, every=2, outer=None)
    own = copy.deepcopy(model.state_dict())
    loaded = {name: value + 1 for name, value in own.items()}
    model.load_state_dict(loaded)
    model.load_state_dict(own)
    take_step(model, optimizer, 0, 0)
    take_step(model, optimizer, 0, 1)
    model.load_state_dict(loaded)
    with pytest.warns(UserWarning, match="were changed without a step, .* global ones now"):
        take_step(model, optimizer, 0, 2)
    for name, tensor in outer._global.tensors.items():
        assert torch.equal(tensor, loaded[name])
    outer.remove()


def test_parameters_that_are_added_later_are_refused():
    models, optimizers, group = workers(2, every=1)
    optimizers[1].add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="got 1 parameters that were added to the optimizer.* call remove()"):
        step_all(models, optimizers, 0)
    group.remove()
    with pytest.raises(ValueError, match="1 parameters that are not the model's"):
        LocalWorkers(models, optimizers)
    step_all(models, optimizers, 1)


def test_the_steps_of_an_optimizer_are_counted_once():
    models, optimizers, group = workers(2)
    with pytest.raises(ValueError, match="got an optimizer whose steps another one counts"):
        LocalWorkers(models, optimizers)
    group.remove()
    group.remove()
    LocalWorkers(models, optimizers)


# Real jobs


def run_job(tmp_path_factory, run):
    names = ["resumed", "merged", "monitored", "streamed", "uneven", "two", "not_finite", "refused"]
    names += ["apart", "shared", "by_hand"]
    return scenarios(2, "outer_worker.py", tmp_path_factory.mktemp("outer"), *names, *SPECS, run=run, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def under_horovod(tmp_path_factory):
    pytest.importorskip("horovod.torch")
    return run_job(tmp_path_factory, horovodrun)


@pytest.fixture(scope="module")
def under_torch(tmp_path_factory):
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    return run_job(tmp_path_factory, torchrun)


@pytest.fixture(params=["torch", pytest.param("horovod", marks=pytest.mark.long)])
def results(request):
    return request.getfixturevalue(f"under_{request.param}")


def compare_with_workers(ranks, spec, steps, **options):
    """Compare what each rank has returned with workers in one process, bit for bit."""
    models, optimizers, group = workers(len(ranks), gradzip.parse(spec), **options)
    for step in range(steps):
        step_all(models, optimizers, step)
        for rank, (after, *_) in enumerate(ranks):
            assert all(map(torch.equal, after[step], parameters(models[rank]))), (step, rank)
    group.synchronize()
    for rank, (_, sent, exchanges, buffer, synchronized) in enumerate(ranks):
        assert exchanges == group.exchanges and buffer == rank
        assert group.bytes_sent <= sent <= group.bytes_sent + NBYTES_OF_CONFIGURATIONS
        assert all(map(torch.equal, synchronized, parameters(models[rank])))
        assert all(map(torch.equal, synchronized, ranks[0][4]))


@pytest.mark.parametrize("spec", SPECS)
def test_ranks_have_the_bits_of_workers_in_one_process(results, spec):
    compare_with_workers(results[spec], spec, EVERY * EXCHANGES, every=EVERY)
    for rank, (after, _, exchanges, *_) in enumerate(results[spec]):
        assert exchanges == EXCHANGES
        at_exchange = [step % EVERY == EVERY - 1 for step in range(len(after))]
        equal = [all(map(torch.equal, *pair)) for pair in zip(after, results[spec][1 - rank][0])]
        assert equal == at_exchange


@pytest.mark.parametrize("i", range(len(STREAMED)))
@pytest.mark.parametrize("spec", STREAMED_SPECS)
def test_streaming_ranks_have_the_bits_of_workers_in_one_process(results, spec, i):
    ranks = [of_rank[STREAMED_SPECS.index(spec)][i] for of_rank in results["streamed"]]
    compare_with_workers(ranks, spec, STREAMED_STEPS, **STREAMED[i])


@pytest.mark.parametrize("case", [0, 1, 2])
def test_a_run_goes_on_with_the_same_bits(results, case):
    for whole, resumed in (of_rank[case] for of_rank in results["resumed"]):
        assert whole[1] == resumed[1] >= EXCHANGES
        assert all(map(torch.equal, whole[0], resumed[0]))


def test_one_checkpoint_of_all_ranks_serves_as_many_ranks_and_others(results, request):
    assert len(results["merged"][0]) == (3 if "torch" in request.node.name else 2)
    for whole, resumed, *others in results["merged"]:
        assert whole[1] == resumed[1] and resumed[2] == []
        assert all(map(torch.equal, whole[0], resumed[0]))
        for after, exchanges, texts in others:  # one rank alone
            assert exchanges == whole[1] and all(p.isfinite().all() for p in after)
            assert texts == ["shard: the states of 2 ranks for 1: residuals are dropped"]


@pytest.mark.parametrize("case", [0, 1])
def test_ranks_that_take_more_steps_do_not_wait_for_ever(results, case):
    (first, again), (other, _) = (of_rank[case] for of_rank in results["uneven"])
    assert all(map(torch.equal, first[0], other[0])) and first[1] == other[1]
    assert again[1] == first[1] and all(map(torch.equal, again[0], first[0]))  # nothing was left to exchange


def test_two_models_exchange_at_the_same_time(results):
    expected = results["two"][0][0]
    assert all(all(map(torch.equal, after, expected)) for of_rank in results["two"] for after in of_rank)


@pytest.mark.parametrize("case", [0, 1])
def test_a_rank_with_a_nan_restarts_alone(results, case):
    ranks = [of_rank[case] for of_rank in results["not_finite"]]
    common = ranks[0][0]
    for rank, (_, _, skipped, states, texts, after) in enumerate(ranks):
        assert any("the step is skipped" in text for text in texts)
        assert any("it restarts from the global" in text for text in texts) == (rank == 1)
        assert all(map(torch.equal, skipped, common)) == (rank == 1)
        assert states == (0 if rank == 1 else len(SHAPES))
        assert all(map(torch.equal, after, ranks[0][5])) and all(p.isfinite().all() for p in after)


def test_a_monitor_sees_differences_and_how_the_ranks_agree(results):
    (record, seconds), (other, _) = results["monitored"]
    assert seconds[0] == seconds[1] > 0  # without a delay, training waits for all of it
    assert 0 < record["gradzip/seconds_exposed", 1] < seconds[1] and record["gradzip/seconds_hidden", 1] == 0
    models, optimizers, _ = workers(2, every=100)  # no exchange
    start = parameters(models[0])
    step_all(models, optimizers, 0)  # fragments are exchanged after steps 1, 2 and 3: this is the first one
    own, theirs = [(start[0] - parameters(model)[0]).double() for model in models]
    kept = [torch.where(d.abs() >= d.abs().flatten().sort().values[d.numel() // 2], d, 0.0) for d in (own, theirs)]
    mean = sum(kept) / 2
    for of_rank, difference in ((record, own), (other, theirs)):
        norm, agreement = (of_rank[f"gradzip.{name}/fragment0", 0] for name in ("difference_norm", "agreement"))
        assert norm == pytest.approx(difference.norm().item(), rel=1e-5)
        cosine = torch.sum(difference * mean) / difference.norm() / mean.norm()
        assert agreement == pytest.approx(cosine.item(), rel=1e-5)


def test_groups_of_a_part_of_the_ranks_are_split_from_the_users_group(tmp_path):
    first, second, other = scenarios(3, "outer_worker.py", tmp_path, "bound", run=torchrun)["bound"]
    assert not other and first
    assert all(map(torch.equal, first, second))


def test_processes_that_end_during_an_exchange_end_well(tmp_path):
    job = torchrun(2, "outer_worker.py", tmp_path, "ends")
    assert_done(job)
    assert len(list(tmp_path.glob("*.received"))) == 2  # the end has waited for it


def test_other_arguments_and_state_dicts_are_refused(results):
    for every, delay, outer, method, loads, lies, exempt in results["refused"]:
        assert exempt.startswith("ValueError: LocalSteps: got exemptions of all parameters that the method compresses")
        for (error, unchanged), path in zip(lies, LIES, strict=True):
            assert error.startswith("ValueError: ") and unchanged, (path, error)
            assert "malformed" in error or "outer optimizer" in error or path[-1].split("_")[0] in error, (path, error)
        assert loads[0].startswith(
            "ValueError: LocalSteps.load_state_dict: got None, expected what state_dict() returned"
        )
        assert "got a dict with ['steps'], expected" in loads[1]
        assert "rank 1 has delay = 2, rank 0 delay = 0" in delay
        assert 'rank 1 has outer = SGD [{"lr": 0.7, "momentum": 0.9' in outer
        assert 'rank 0 outer = SGD [{"lr": 1.0, "momentum": 0,' in outer
        assert "rank 1 has every = 4, rank 0 every = 3" in every
        assert "rank 1 compresses with TopK" in method


def test_ranks_at_other_exchanges_are_refused(results):
    """On all ranks, with both sides in the error; so are global parameters that differ in one element."""
    for of_rank in results["apart"]:
        assert {case.partition(",")[0] for case in of_rank} == {"older", "none", "changed"}
        for case, error in of_rank.items():
            found = re.match(r"RuntimeError: LocalSteps: rank 1 is at (.*); rank 0 is at (.*); load the states", error)
            assert found, (case, error)
            one, zero = (side.rpartition(" with ")[0] for side in found.groups())
            assert (one == zero) == case.startswith("changed"), error


def test_synchronize_makes_parameters_equal_that_were_changed_by_hand(results):
    """Weights that one rank alone has changed are an error on all in the next exchange, if steps come first."""
    (first, error), (second, _) = results["by_hand"]
    assert all(torch.equal(a, b) for one, two in zip(first, second) for a, b in zip(one, two))
    assert re.search("rank 1 is at exchange 0, of fragment 0, with global parameters of digest .* rank 0 is at", error)


def test_a_compressor_that_exchanges_in_the_background_is_not_shared(results):
    for *local, first, second in results["shared"]:
        assert all("LocalSteps: got a compressor that LocalSteps has, too, expected one of its" in e for e in local)
        assert re.search("(HookState|compression): got a compressor that LocalSteps has, too", first), first
        assert re.search("LocalSteps: got a compressor that (HookState|compression) has, too", second), second


@pytest.mark.long
def test_sites_of_several_ranks(tmp_path):
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    (ranks,) = scenarios(4, "outer_worker.py", tmp_path, "two_sites", run=torchrun).values()
    for step, of_ranks in enumerate(zip(*ranks)):
        equal = [all(map(torch.equal, of_ranks[0], other)) for other in of_ranks]
        if step % EVERY == EVERY - 1:
            assert equal == [True] * 4
        else:
            assert equal == [True, True, False, False] and all(map(torch.equal, of_ranks[2], of_ranks[3]))


def test_a_data_parallel_start(tmp_path):
    """The bits of DDP, and then of local steps from there on; a loaded state warns beside other parameters."""
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    (ranks,) = scenarios(2, "outer_worker.py", tmp_path, "started", run=torchrun).values()
    for by_hand, runs, _ in ranks:
        for after in runs:
            assert [list(map(torch.equal, *pair)) for pair in zip(after, by_hand, strict=True)] == [[True] * 3] * 6
    equal = [all(map(torch.equal, *pair)) for pair in zip(ranks[0][0], ranks[1][0])]
    assert equal == [True, True, True, False, True, False]
    (warned,) = ranks[1][2]
    assert ranks[0][2] == [] and warned.startswith("LocalSteps: got other parameters than those that were saved")


def test_a_data_parallel_start_needs_ddp(alone):
    for start, error in ((2, "got start = 2 and a Model, expected a DDP model"), (-1, "start = -1, expected an int")):
        model, optimizer = make(0)
        with pytest.raises(ValueError, match=error):
            gradzip.outer.LocalSteps(model, optimizer, start=start)


def shards_of(tensors, place, count):
    return [(tensor.chunk(count)[place]) for tensor in tensors]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_sharded_models(tmp_path, size):
    """Each rank of a site exchanges its own shards, as LocalWorkers whose parameters are these shards."""
    pytest.importorskip("torch.distributed.fsdp._fully_shard", reason="torch without FSDP2")
    ranks = scenarios(size, "outer_worker.py", tmp_path, "sharded", run=torchrun)["sharded"]
    shards, replicas = size // 2, 2
    for case, options in enumerate([{"every": EVERY}, {"every": 6, "fragments": 3, "delay": 1, "blend": 0.5}]):
        for shard in range(shards):
            models = [ShardModel(replica, shard, shards) for replica in range(replicas)]
            optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1) for model in models]
            group = LocalWorkers(models, optimizers, gradzip.TopK(theta=0.9), **options)
            for step in range(EVERY * EXCHANGES):
                for replica, (model, optimizer) in enumerate(zip(models, optimizers)):
                    for (name, parameter), shape in zip(model.named_parameters(), SHAPES.values()):
                        parameter.grad = gradient(name, replica, step, shape).chunk(shards)[shard]
                    optimizer.step()
                for replica, model in enumerate(models):
                    after, _ = ranks[replica * shards + shard][case]
                    assert all(map(torch.equal, after[step], parameters(model))), (case, shard, step, replica)
            group.synchronize()
            for replica, model in enumerate(models):
                assert all(map(torch.equal, ranks[replica * shards + shard][case][1], parameters(model)))


class ShardModel(torch.nn.Module):
    """The shards of `Model` that one rank holds."""

    def __init__(self, replica, shard, shards):
        super().__init__()
        for name, parameter in Model(replica).named_parameters():
            self.register_parameter(name, torch.nn.Parameter(parameter.detach().chunk(shards)[shard].clone()))


@pytest.mark.long
def test_sites_whose_models_are_sharded_diverge_as_one(tmp_path):
    pytest.importorskip("torch.distributed.fsdp._fully_shard", reason="torch without FSDP2")
    ranks = scenarios(4, "outer_worker.py", tmp_path, "sharded_errors", run=torchrun)["sharded_errors"]
    second = 2 * EVERY - 1
    for rank, (everyone, delay, after, texts, merged, loaded, resumed) in enumerate(ranks):
        assert "LocalSteps: shard 1 has delay = 1, shard 0 delay = 0; give all ranks the same one" in delay[0]
        assert (f"{['rank 1 has delay = 1, rank', 'shard 1 has delay = 0, shard'][rank % 2]} 0 delay = ") in delay[1]
        assert "got state dicts with shards ['shard0of2', 'shard1of2'], expected those of one shard" in merged
        assert f"got a state dict of shard 'shard{1 - rank % 2}of2', expected 'shard{rank % 2}of2'" in loaded
        assert all(map(torch.equal, *resumed))
        other = ranks[(rank + 2) % 4][2]
        assert "hold different shards of the model" in everyone
        assert any("it restarts from the global" in text for text in texts) == (rank >= 2)  # the site of rank 2
        restarted = all(map(torch.equal, after[second], after[EVERY - 1]))
        assert restarted == (rank >= 2)
        assert all(map(torch.equal, after[-1], other[-1])) and all(p.isfinite().all() for p in after[-1])
