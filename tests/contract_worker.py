"""Scenarios for tests/test_contract.py, run by horovodrun: `contract_worker.py FOLDER [NAME ...]`.

Each scenario runs with every registered method. It returns averages, read from the gradients, or parameters, by method.
"""

import copy
import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

import gradzip
from contract import AMP_STEPS, OVERFLOWS, SHAPES, SPECS, STEPS, gradient

HOROVOD_NAMES = [f"allreduce.noname.0.{i}" for i in range(len(SHAPES))]
FIRST_RANK = hvd.ProcessSet([0])
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = lambda rank: {spec: function(spec, rank) for spec in SPECS}
    return function


def parameters(shapes=SHAPES):
    return {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}


def distributed_optimizer(named, compression, names=True, **arguments):
    sgd = torch.optim.SGD(named.values(), lr=0.5)
    named_parameters = list(named.items()) if names else None
    return hvd.DistributedOptimizer(sgd, named_parameters=named_parameters, compression=compression, **arguments)


def backward(named, rank, step, scale=lambda loss: loss, non_finite=()):
    """Give each parameter that requires one its gradient. Hooks are called in a different order on each rank.

    Args:
        non_finite: names of parameters whose gradients get one infinite element.
    """
    order = torch.randperm(len(named), generator=torch.Generator().manual_seed(10 * step + rank)).tolist()
    for name, p in [list(named.items())[i] for i in order]:
        if p.requires_grad:
            grad = gradient(name, rank, step, p.shape)
            if name in non_finite:
                grad[-1] = float("inf")
            scale((p * grad).sum()).backward()


def grads(named):
    return {name: p.grad.to_dense().clone() for name, p in named.items()}


def last_averages(spec, rank, passes=1, **arguments):
    """Return the averages of the last of STEPS steps, as synchronize() leaves them in the gradients."""
    named = parameters()
    opt = distributed_optimizer(named, gradzip.parse(spec), backward_passes_per_step=passes, **arguments)
    for step in range(STEPS):
        opt.zero_grad()
        for i in range(passes):
            backward(named, rank, passes * step + i)
        opt.synchronize()
    return grads(named)


@scenario
def sum_op(spec, rank):
    return last_averages(spec, rank, op=hvd.Sum)


@scenario
def average_op(spec, rank):
    return last_averages(spec, rank)


@scenario
def predivided(spec, rank):
    return last_averages(spec, rank, gradient_predivide_factor=4.0)


@scenario
def accumulated(spec, rank):
    return last_averages(spec, rank, passes=2)


@scenario
def number_of_groups(spec, rank):
    return last_averages(spec, rank, groups=2)


@scenario
def no_names(spec, rank):
    return last_averages(spec, rank, names=False)


@scenario
def process_set(spec, rank):
    """Use a process set of rank 0 only. The gradients of rank 1 do not change."""
    return last_averages(spec, rank, process_set=FIRST_RANK)


@scenario
def listed_groups(spec, rank):
    named = parameters()
    opt = distributed_optimizer(named, gradzip.parse(spec), groups=[[named["w"], named["b"]]])
    for step in range(STEPS):
        opt.zero_grad()
        backward(named, rank, step)
        opt.synchronize()
    return grads(named)


@scenario
def unused_on_one_rank(spec, rank):
    named = parameters()
    opt = distributed_optimizer(named, gradzip.parse(spec))
    for step in range(STEPS):
        opt.zero_grad()
        backward({n: p for n, p in named.items() if not (rank == 0 and n == "w")}, rank, step)
        opt.synchronize()
    return grads(named)


@scenario
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


@scenario
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


@scenario
def two_optimizers(spec, rank):
    """Share a compressor between two models, as in a GAN. Names are equal, and one shape."""
    compressor = gradzip.parse(spec)
    pairs = [parameters(), parameters({"w": (50, 60), "v": SHAPES["v"]})]
    opts = [distributed_optimizer(named, compressor) for named in pairs]
    return alternate(pairs, opts, rank)


@scenario
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


@scenario
def two_process_sets(spec, rank):
    """Share a compressor between an optimizer of rank 0 only and one of all ranks."""
    compressor = gradzip.parse(spec)
    pairs = [parameters(), parameters()]
    opts = [
        distributed_optimizer(pairs[0], compressor, process_set=FIRST_RANK),
        distributed_optimizer(pairs[1], compressor),
    ]
    return alternate(pairs, opts, rank)


@scenario
def backward_in_threads(spec, rank):
    """Call hooks in several threads, as for a model on several devices."""
    named = parameters()
    opt = distributed_optimizer(named, gradzip.parse(spec))
    for step in range(STEPS):
        opt.zero_grad()
        with ThreadPoolExecutor(len(named)) as pool:
            list(pool.map(lambda item, step=step: backward(dict([item]), rank, step), named.items()))
        opt.synchronize()
    return grads(named)


@scenario
def loaded_on_one_rank(spec, rank):
    """Rank 0 loads an optimizer's state in mid-training and broadcasts it, as Horovod's examples do."""
    named = parameters()
    opt = distributed_optimizer(named, gradzip.parse(spec))
    for step in range(STEPS):
        if step == 1 and rank == 0:
            opt.load_state_dict(opt.state_dict())
        hvd.broadcast_optimizer_state(opt, root_rank=0)
        opt.zero_grad()
        backward(named, rank, step)
        opt.synchronize()
    return grads(named)


@scenario
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


@scenario
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


@scenario
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


@scenario
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


@scenario
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


@scenario
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


def message(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@scenario
def misuse(spec, rank, compression=None):
    """Misuse Horovod's optimizer, and continue. Return its error messages and the parameters."""
    named = parameters()
    opt = distributed_optimizer(named, compression or gradzip.parse(spec))
    backward(named, rank, 0)
    messages = [message(opt.zero_grad), message(lambda: backward(named, rank, 1))]
    opt.synchronize()
    opt.zero_grad()
    backward(named, rank, 2)
    opt.step()
    return messages, {name: p.detach().clone() for name, p in named.items()}


@scenario
def unsupported_gradients(spec, rank):
    """Return the errors of the backward pass for a class as compressor, and for complex gradients."""
    named = parameters({"z": (48, 48)})
    opt = distributed_optimizer(named, type(gradzip.parse(spec)))
    class_error = message(lambda: backward(named, rank, 0))
    opt._grad_accs.clear()
    named = {"z": torch.nn.Parameter(torch.zeros(48, 48, dtype=torch.complex64))}
    distributed_optimizer(named, gradzip.parse(spec))
    return class_error, message(lambda: named["z"].real.sum().backward())


def table_gradient(rank, step):
    """Return the indices of the table's rows in use, and the gradients of these rows."""
    return torch.tensor([rank, 5, 199, 5]), gradient("table", rank, step, (4, 16))


@scenario
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


@scenario
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


@scenario
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


def main():
    folder, *names = sys.argv[1:]
    hvd.init(process_sets=[FIRST_RANK] if int(os.environ.get("HOROVOD_SIZE", 1)) > 1 else [])
    torch.set_num_threads(1)
    results = {name: SCENARIOS[name](hvd.rank()) for name in names or SCENARIOS}
    results["stock_misuse"] = misuse(None, hvd.rank(), hvd.Compression.none)
    torch.save(results, Path(folder) / f"{hvd.rank()}.pt")


if __name__ == "__main__":
    main()
