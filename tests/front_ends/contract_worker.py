"""Contracts for tests/front_ends/test_contract.py, run by horovodrun: `contract_worker.py FOLDER SPEC ...`.

The results of a method are those of all contracts, by name: averages, read from the gradients, or parameters.
"""

import contextlib
import copy
import functools
import gc
from concurrent.futures import ThreadPoolExecutor

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

import gradzip
from contract import AMP_STEPS, OVERFLOWS, SHAPES, STEPS, gradient
from harness import SIZE, backward, main, message
from harness import parameters as parameters_of

HOROVOD_NAMES = [f"allreduce.noname.0.{i}" for i in range(len(SHAPES))]
FIRST_RANK = hvd.ProcessSet([0])
CONTRACTS = {}


def contract(function):
    CONTRACTS[function.__name__] = function
    return function


def parameters(shapes=SHAPES):
    return parameters_of(shapes)


def distributed_optimizer(named, compression, names=True, **arguments):
    sgd = torch.optim.SGD(named.values(), lr=0.5)
    named_parameters = list(named.items()) if names else None
    return hvd.DistributedOptimizer(sgd, named_parameters=named_parameters, compression=compression, **arguments)


def grads(named):
    return {name: p.grad.to_dense().clone() for name, p in named.items()}


def last_averages(spec, rank, run=backward, before=lambda opt, step: None, passes=1, **options):
    """Return the averages of the last of STEPS steps, as synchronize() leaves them in the gradients.

    Args:
        run: run(named, rank, step) instead of `backward`.
        before: before(opt, step) is called before each step.
        options: of Horovod's optimizer; `groups` may list names.
    """
    named = parameters()
    if isinstance(options.get("groups"), list):
        options["groups"] = [[named[name] for name in group] for group in options["groups"]]
    opt = distributed_optimizer(named, gradzip.parse(spec), backward_passes_per_step=passes, **options)
    for step in range(STEPS):
        before(opt, step)
        opt.zero_grad()
        for i in range(passes):
            run(named, rank, passes * step + i)
        opt.synchronize()
    return grads(named)


@contract
def sum_op(spec, rank):
    return last_averages(spec, rank, op=hvd.Sum)


@contract
def average_op(spec, rank):
    return last_averages(spec, rank)


@contract
def predivided(spec, rank):
    return last_averages(spec, rank, gradient_predivide_factor=4.0)


@contract
def accumulated(spec, rank):
    return last_averages(spec, rank, passes=2)


@contract
def number_of_groups(spec, rank):
    return last_averages(spec, rank, groups=2)


@contract
def discarded(spec, rank):
    """Before each step, take a pass whose averages are announced to be thrown away."""
    compressor, named = gradzip.parse(spec), parameters()
    opt, discarding = distributed_optimizer(named, compressor), compressor.discarding()
    for step in range(STEPS):
        for number in (100 + step, step):
            opt.zero_grad()
            with discarding if number >= 100 else contextlib.nullcontext():
                backward(named, rank, number)
            opt.synchronize()
    return grads(named)


@contract
def written(spec, rank):
    """Gradients that the user writes to `.grad`, without a backward pass."""
    named = parameters()
    opt = distributed_optimizer(named, gradzip.parse(spec))
    for step in range(STEPS):
        for name, p in named.items():
            if step == 0:
                p.grad = gradient(name, rank, step)
            else:
                p.grad.copy_(gradient(name, rank, step))
        opt.synchronize()
    return grads(named)


@contract
def unused_with_a_gradient(spec, rank):
    """A backward pass that does not use "w", which still has its last average; then none. What they have changed."""
    compressor, named = gradzip.parse(spec), parameters()
    opt = distributed_optimizer(named, compressor)

    def of(name):
        found = {"grad": named[name].grad.clone()}
        for part in compressor.parts:
            for key, value in part.memory.by_parameter().get(name, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == named[name].shape and value.any():
                    found[key] = value.clone()
        return found

    def changed(before, after):
        return [key for key in {*before, *after} if not torch.equal(before.get(key, NONE), after.get(key, NONE))]

    for step in range(STEPS):
        opt.zero_grad()
        backward(named, rank, step)
        opt.synchronize()
    named["v"].grad = named["b"].grad = None
    before = of("w")
    backward(named, rank, STEPS, unused=["w"])
    opt.synchronize()
    found = changed(before, of("w"))
    moved = named["v"].grad.any().item()
    before = of("v")
    opt.synchronize()  # once more: no parameter is used
    return found, moved, changed(before, of("v"))


NONE = torch.zeros(0)


@contract
def no_names(spec, rank):
    return last_averages(spec, rank, names=False)


@contract
def process_set(spec, rank):
    """Use a process set of rank 0 only. The gradients of rank 1 do not change."""
    return last_averages(spec, rank, process_set=FIRST_RANK)


@contract
def listed_groups(spec, rank):
    return last_averages(spec, rank, groups=[["w", "b"]])


@contract
def unused_on_one_rank(spec, rank):
    return last_averages(spec, rank, functools.partial(backward, unused=["w"] if rank == 0 else []))


@contract
def frozen_in_one_step(spec, rank):
    """Freeze two parameters in the second step. Return the parameters after each step, and the last averages."""
    named, after = parameters(), []
    opt = distributed_optimizer(named, gradzip.parse(spec))
    for step in range(STEPS):
        opt.zero_grad()
        for name in ("w", "b"):
            named[name].requires_grad = step != 1
        backward(named, rank, step)
        opt.step()
        after.append({name: p.detach().clone() for name, p in named.items()})
    return after, grads(named)


@contract
def clipped(spec, rank):
    """Return the norm of all averages, and the parameters after a step clipped to a norm of 1."""
    named = parameters()
    opt = distributed_optimizer(named, gradzip.parse(spec))
    backward(named, rank, 0)
    opt.synchronize()
    norm = torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
    with opt.skip_synchronize():
        opt.step()
    return norm, {name: p.detach().clone() for name, p in named.items()}


def alternate(pairs, opts, rank):
    """Take steps with several optimizers in turns. Return the last averages of each."""
    for step in range(STEPS):
        for i, (named, opt) in enumerate(zip(pairs, opts)):
            opt.zero_grad()
            backward(named, rank, 100 * i + step)
            opt.step()
    return [grads(named) for named in pairs]


@contract
def two_optimizers(spec, rank):
    """Share a compressor between two models, as in a GAN. Names are equal, and one shape."""
    compressor = gradzip.parse(spec)
    pairs = [parameters(), parameters({"w": (50, 60), "v": SHAPES["v"]})]
    opts = [distributed_optimizer(named, compressor) for named in pairs]
    return alternate(pairs, opts, rank)


@contract
def recreated_optimizer(spec, rank):
    """Create a new optimizer for the same parameters in each step. It finds their state."""
    named, compressor = parameters(), gradzip.parse(spec)
    for step in range(STEPS):
        opt = distributed_optimizer(named, compressor)
        opt.zero_grad()
        backward(named, rank, step)
        opt.synchronize()
        opt._grad_accs.clear()  # removes its hooks now, as garbage collection does later
    return grads(named)


@contract
def two_process_sets(spec, rank):
    """Share a compressor between an optimizer of rank 0 only and one of all ranks."""
    compressor = gradzip.parse(spec)
    pairs = [parameters(), parameters()]
    opts = [
        distributed_optimizer(pairs[0], compressor, process_set=FIRST_RANK),
        distributed_optimizer(pairs[1], compressor),
    ]
    return alternate(pairs, opts, rank)


@contract
def backward_in_threads(spec, rank):
    """Call hooks in several threads, as for a model on several devices."""

    def run(named, rank, step):
        with ThreadPoolExecutor(len(named)) as pool:
            list(pool.map(lambda item: backward(dict([item]), rank, step), named.items()))

    return last_averages(spec, rank, run)


@contract
def loaded_on_one_rank(spec, rank):
    """Rank 0 loads an optimizer's state in mid-training and broadcasts it, as Horovod's examples do."""

    def before(opt, step):
        if step == 1 and rank == 0:
            opt.load_state_dict(opt.state_dict())
        hvd.broadcast_optimizer_state(opt, root_rank=0)

    return last_averages(spec, rank, before=before)


@contract
def step_dropped(spec, rank):
    """Drop a step with pending operations, as after an exception. It changes no result."""
    named = parameters()
    opt = distributed_optimizer(named, gradzip.parse(spec))
    for step in range(STEPS):
        opt.zero_grad()
        if step == 1:
            backward(named, rank, 50)
            for handle in list(mpi_ops._handle_map):
                hvd.synchronize(handle)  # the operations' names can be used again
            opt.load_state_dict(opt.state_dict())
            opt.zero_grad()
        backward(named, rank, step)
        opt.synchronize()
    return grads(named)


@contract
def deep_copied(spec, rank):
    """Continue with copies of the model and its compressor."""
    named, compressor = parameters(), gradzip.parse(spec)
    opt = distributed_optimizer(named, compressor)
    for step in range(STEPS):
        if step == 1:
            named, compressor = copy.deepcopy((named, compressor))
            opt = distributed_optimizer(named, compressor)
        opt.zero_grad()
        backward(named, rank, step)
        opt.synchronize()
    return grads(named)


@contract
def closure_step(spec, rank):
    """Use a closure. step() synchronizes before it calls the closure, without new gradients."""
    named = parameters()
    opt = distributed_optimizer(named, gradzip.parse(spec))
    for step in range(2):

        def closure(step=step):
            opt.zero_grad()
            backward(named, rank, step)
            opt.synchronize()

        opt.step(closure)
    return grads(named)


@contract
def early_step(spec, rank):
    """Take one step after one of two backward passes, and one after both."""
    named = parameters()
    opt = distributed_optimizer(named, gradzip.parse(spec), backward_passes_per_step=2)
    backward(named, rank, 0)
    opt.step()
    opt.zero_grad()
    backward(named, rank, 1)
    backward(named, rank, 2)
    opt.synchronize()
    return grads(named)


@contract
def gradients_in_one_buffer(spec, rank):
    """Average gradients that are views of one buffer. Return the averages in it, and whether p.grad are still views."""
    named = parameters()
    buffer = torch.zeros(sum(p.numel() for p in named.values()))
    for p, view in zip(named.values(), buffer.split([p.numel() for p in named.values()])):
        p.grad = view.view_as(p)
    views = {name: p.grad for name, p in named.items()}
    opt = distributed_optimizer(named, gradzip.parse(spec))
    for step in range(STEPS):
        buffer.zero_()
        backward(named, rank, step)
        opt.synchronize()
    parts = buffer.split([p.numel() for p in named.values()])
    averages = {name: part.view_as(p).clone() for (name, p), part in zip(named.items(), parts)}
    return averages, all(p.grad is views[name] for name, p in named.items())


@contract
def recreated_models(spec, rank):
    """Use one compressor for several models in turn. Return the number of states it keeps after each."""
    compressor, counts = gradzip.parse(spec), []
    gc.freeze()  # makes gc.collect() skip existing objects
    for _ in range(3):
        named = parameters()
        opt = distributed_optimizer(named, compressor)
        backward(named, rank, 0)
        opt.step()
        counts.append(sum(len(part.states) for part in getattr(compressor, "parts", [compressor])))
        opt._grad_accs.clear()  # removes its hooks, which form a reference cycle with it
        del named, opt
        gc.collect()
    return counts


@contract
def misuse(spec, rank):
    """Misuse Horovod's optimizer, and continue. Return messages and parameters, with the method and without one."""
    return misused(gradzip.parse(spec), rank), misused(hvd.Compression.none, rank)


def misused(compression, rank):
    named = parameters()
    opt = distributed_optimizer(named, compression)
    backward(named, rank, 0)
    messages = [message(opt.zero_grad), message(lambda: backward(named, rank, 1))]
    opt.synchronize()
    opt.zero_grad()
    backward(named, rank, 2)
    opt.step()
    return messages, {name: p.detach().clone() for name, p in named.items()}


@contract
def class_as_compressor(spec, rank):
    """Return the error of the backward pass for a class as compressor."""
    named = parameters({"z": (48, 48)})
    opt = distributed_optimizer(named, type(gradzip.parse(spec)))
    class_error = message(lambda: backward(named, rank, 0))
    opt._grad_accs.clear()
    return class_error


def table_gradient(rank, step):
    """Return the indices of the table's rows in use, and the gradients of these rows."""
    return torch.tensor([rank, 5, 199, 5]), gradient("table", rank, step, (4, 16))


@contract
def sparse(spec, rank):
    """Average an embedding's sparse gradients and a dense one, with and without `sparse_as_dense`.

    Returns for each: the averages, whether the embedding's gradient is sparse, and the number of dense bytes counted.
    """
    results = []
    for as_dense in (True, False):
        named = {"table": torch.nn.Parameter(torch.zeros(200, 16)), **parameters({"w": SHAPES["w"]})}
        compressor = gradzip.parse(spec)
        opt = distributed_optimizer(named, compressor, sparse_as_dense=as_dense)
        for step in range(STEPS):
            opt.zero_grad()
            indices, factors = table_gradient(rank, step)
            rows = torch.nn.functional.embedding(indices, named["table"], sparse=True)
            (rows * factors).sum().backward()
            backward({"w": named["w"]}, rank, step)
            opt.synchronize()
        results.append((grads(named), named["table"].grad.is_sparse, compressor.traffic.bytes_dense))
    return results


@contract
def loss_scaled(spec, rank):
    """Use GradScaler. Return scales, parameters and states after each step, and the last averages, unscaled."""
    named = parameters()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    compressor = gradzip.parse(spec).follow(scaler)
    opt = distributed_optimizer(named, compressor)
    scales, after, states = [], [], []
    for step in range(AMP_STEPS):
        opt.zero_grad()
        scales.append(scaler.get_scale())
        non_finite = ["v"] if step == OVERFLOWS and rank == hvd.size() - 1 else []
        backward(named, rank, step, scaler.scale, non_finite)
        opt.synchronize()
        scaler.unscale_(opt)
        with opt.skip_synchronize():
            scaler.step(opt)
        scaler.update()
        after.append({name: p.detach().clone() for name, p in named.items()})
        states.append(copy.deepcopy(compressor.state_dict()))
    return scales, after, states, grads(named)


@contract
def autocast(spec, rank):
    """Train a network under bfloat16 autocast, including the backward pass.

    Returns this rank's gradients of each step, and the last averages.
    """
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.ReLU(), torch.nn.Linear(64, 48))
    named, own = dict(network.named_parameters()), []
    for name, p in named.items():
        p.register_hook(lambda grad, name=name: own[-1].__setitem__(name, grad.clone()))
    opt = distributed_optimizer(named, gradzip.parse(spec))
    for step in range(STEPS):
        own.append({})
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            network(gradient("x", rank, step, (16, 48))).float().square().mean().backward()
            opt.synchronize()
    return own, grads(named)


if __name__ == "__main__":
    main(
        [FIRST_RANK] if SIZE > 1 else [],
        of_spec=lambda spec: {name: run(spec, hvd.rank()) for name, run in CONTRACTS.items()},
    )
