"""Scenarios that tests/test_contract.py runs under a real horovodrun, with every registered method:
`contract_worker.py FOLDER [NAME ...]`. Each returns what is left in gradients or parameters, by method."""

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

NAMELESS = [f"allreduce.noname.0.{i}" for i in range(len(SHAPES))]
ALONE = hvd.ProcessSet([0])
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = lambda rank: {spec: function(spec, rank) for spec in SPECS}
    return function


def parameters(shapes=SHAPES):
    return {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}


def distributed(named, compression, names=True, **arguments):
    sgd = torch.optim.SGD(named.values(), lr=0.5)
    named_parameters = list(named.items()) if names else None
    return hvd.DistributedOptimizer(sgd, named_parameters=named_parameters, compression=compression, **arguments)


def backward(named, rank, step, scale=lambda loss: loss, spoilt=()):
    """Gives each parameter that wants one its gradient, in another order of hooks on every rank."""
    order = torch.randperm(len(named), generator=torch.Generator().manual_seed(10 * step + rank)).tolist()
    for name, p in [list(named.items())[i] for i in order]:
        if p.requires_grad:
            grad = gradient(name, rank, step, p.shape)
            if name in spoilt:
                grad[-1] = float("inf")
            scale((p * grad).sum()).backward()


def grads(named):
    return {name: p.grad.to_dense().clone() for name, p in named.items()}


def run(spec, rank, passes=1, **arguments):
    """What synchronize() leaves in the gradients in the last of some steps."""
    named = parameters()
    opt = distributed(named, gradzip.parse(spec), backward_passes_per_step=passes, **arguments)
    for step in range(STEPS):
        opt.zero_grad()
        for i in range(passes):
            backward(named, rank, passes * step + i)
        opt.synchronize()
    return grads(named)


@scenario
def summed(spec, rank):
    return run(spec, rank, op=hvd.Sum)


@scenario
def averaged(spec, rank):
    return run(spec, rank)


@scenario
def predivided(spec, rank):
    return run(spec, rank, gradient_predivide_factor=4.0)


@scenario
def accumulated(spec, rank):
    return run(spec, rank, passes=2)


@scenario
def in_groups(spec, rank):
    return run(spec, rank, groups=2)


@scenario
def nameless(spec, rank):
    return run(spec, rank, names=False)


@scenario
def in_a_process_set(spec, rank):
    """Of rank 0 alone; the other one's gradients stay what they are."""
    return run(spec, rank, process_set=ALONE)


@scenario
def in_listed_groups(spec, rank):
    named = parameters()
    opt = distributed(named, gradzip.parse(spec), groups=[[named["w"], named["b"]]])
    for step in range(STEPS):
        opt.zero_grad()
        backward(named, rank, step)
        opt.synchronize()
    return grads(named)


@scenario
def unused_on_one_rank(spec, rank):
    named = parameters()
    opt = distributed(named, gradzip.parse(spec))
    for step in range(STEPS):
        opt.zero_grad()
        backward({n: p for n, p in named.items() if not (rank == 0 and n == "w")}, rank, step)
        opt.synchronize()
    return grads(named)


@scenario
def frozen_and_thawed(spec, rank):
    """In the second step; the parameters after each step, and the last averages."""
    named, after = parameters(), []
    opt = distributed(named, gradzip.parse(spec))
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
    """The norm of all averages, and the parameters after a step of the norm 1."""
    named = parameters()
    opt = distributed(named, gradzip.parse(spec))
    backward(named, rank, 0)
    opt.synchronize()
    norm = torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
    with opt.skip_synchronize():
        opt.step()
    return norm, {name: p.detach().clone() for name, p in named.items()}


def in_turns(pairs, opts, rank):
    """Steps of several optimizers, each with parameters of its own: the last averages of each."""
    for step in range(STEPS):
        for i, (named, opt) in enumerate(zip(pairs, opts)):
            opt.zero_grad()
            backward(named, rank, 100 * i + step)
            opt.step()
    return [grads(named) for named in pairs]


@scenario
def two_optimizers(spec, rank):
    """A GAN's: one compressor, equal names, one of equal shape."""
    compressor = gradzip.parse(spec)
    pairs = [parameters(), parameters({"w": (50, 60), "v": SHAPES["v"]})]
    opts = [distributed(named, compressor) for named in pairs]
    return in_turns(pairs, opts, rank)


@scenario
def an_optimizer_made_anew(spec, rank):
    """For the same parameters, after a step: it finds what was kept of them."""
    named, compressor = parameters(), gradzip.parse(spec)
    for step in range(STEPS):
        opt = distributed(named, compressor)
        opt.zero_grad()
        backward(named, rank, step)
        opt.synchronize()
        opt._grad_accs.clear()  # and with them its hooks: as when it is collected, but at once
    return grads(named)


@scenario
def two_process_sets(spec, rank):
    """One compressor: of rank 0 alone, and of all ranks. One of them has a part in both."""
    compressor = gradzip.parse(spec)
    pairs = [parameters(), parameters()]
    opts = [distributed(pairs[0], compressor, process_set=ALONE), distributed(pairs[1], compressor)]
    return in_turns(pairs, opts, rank)


@scenario
def a_thread_for_each_device(spec, rank):
    """As where a model is on two: its parts' hooks run side by side."""
    named = parameters()
    opt = distributed(named, gradzip.parse(spec))
    for step in range(STEPS):
        opt.zero_grad()
        with ThreadPoolExecutor(len(named)) as pool:
            list(pool.map(lambda item, step=step: backward(dict([item]), rank, step), named.items()))
        opt.synchronize()
    return grads(named)


@scenario
def loaded_on_one_rank(spec, rank):
    """Rank 0 goes back to an optimizer's state in mid-training, and shares it, as Horovod's examples do."""
    named = parameters()
    opt = distributed(named, gradzip.parse(spec))
    for step in range(STEPS):
        if step == 1 and rank == 0:
            opt.load_state_dict(opt.state_dict())
        hvd.broadcast_optimizer_state(opt, root_rank=0)
        opt.zero_grad()
        backward(named, rank, step)
        opt.synchronize()
    return grads(named)


@scenario
def dropped_in_mid_step(spec, rank):
    """What is under way when training begins anew, after an exception, say, is as if it had never been."""
    named = parameters()
    opt = distributed(named, gradzip.parse(spec))
    for step in range(STEPS):
        opt.zero_grad()
        if step == 1:
            backward(named, rank, 50)
            for handle in list(mpi_ops._handle_map):
                hvd.synchronize(handle)  # their names are free again
            opt.load_state_dict(opt.state_dict())
            opt.zero_grad()
        backward(named, rank, step)
        opt.synchronize()
    return grads(named)


@scenario
def copied(spec, rank):
    """A model and its compressor, half-way: the copies go on as they would have."""
    named, compressor = parameters(), gradzip.parse(spec)
    opt = distributed(named, compressor)
    for step in range(STEPS):
        if step == 1:
            named, compressor = copy.deepcopy((named, compressor))
            opt = distributed(named, compressor)
        opt.zero_grad()
        backward(named, rank, step)
        opt.synchronize()
    return grads(named)


@scenario
def in_a_closure(spec, rank):
    """step() synchronizes before it calls the closure, when there is nothing new to average."""
    named = parameters()
    opt = distributed(named, gradzip.parse(spec))
    for step in range(2):

        def closure(step=step):
            opt.zero_grad()
            backward(named, rank, step)
            opt.synchronize()

        opt.step(closure)
    return grads(named)


@scenario
def stepped_early(spec, rank):
    """After one of two backward passes, and then after both."""
    named = parameters()
    opt = distributed(named, gradzip.parse(spec), backward_passes_per_step=2)
    backward(named, rank, 0)
    opt.step()
    opt.zero_grad()
    backward(named, rank, 1)
    backward(named, rank, 2)
    opt.synchronize()
    return grads(named)


@scenario
def in_one_buffer(spec, rank):
    """Gradients that are views of one buffer stay so, and the averages are in it."""
    named = parameters()
    buffer = torch.zeros(sum(p.numel() for p in named.values()))
    for p, view in zip(named.values(), buffer.split([p.numel() for p in named.values()])):
        p.grad = view.view_as(p)
    kept = {name: p.grad for name, p in named.items()}
    opt = distributed(named, gradzip.parse(spec))
    for step in range(STEPS):
        buffer.zero_()
        backward(named, rank, step)
        opt.synchronize()
    parts = buffer.split([p.numel() for p in named.values()])
    averages = {name: part.view_as(p).clone() for (name, p), part in zip(named.items(), parts)}
    return averages, all(p.grad is kept[name] for name, p in named.items())


@scenario
def one_after_the_other(spec, rank):
    """Models and optimizers that come and go, one compressor: for how many parameters it keeps something after each."""
    compressor, kept = gradzip.parse(spec), []
    gc.freeze()  # what is there already need not be looked through again and again
    for _ in range(3):
        named = parameters()
        opt = distributed(named, compressor)
        backward(named, rank, 0)
        opt.step()
        kept.append(sum(len(part.states) for part in getattr(compressor, "parts", [compressor])))
        opt._grad_accs.clear()  # its hooks, and with them the circle that holds it
        del named, opt
        gc.collect()
    return kept


def message(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@scenario
def misused(spec, rank, compression=None):
    """What Horovod's optimizer says, and goes on after."""
    named = parameters()
    opt = distributed(named, compression or gradzip.parse(spec))
    backward(named, rank, 0)
    messages = [message(opt.zero_grad), message(lambda: backward(named, rank, 1))]
    opt.synchronize()
    opt.zero_grad()
    backward(named, rank, 2)
    opt.step()
    return messages, {name: p.detach().clone() for name, p in named.items()}


@scenario
def refused(spec, rank):
    """What is no instance, and gradients that are no real numbers: in the backward pass, and nothing waits for it."""
    named = parameters({"z": (48, 48)})
    opt = distributed(named, type(gradzip.parse(spec)))
    of_class = message(lambda: backward(named, rank, 0))
    opt._grad_accs.clear()
    named = {"z": torch.nn.Parameter(torch.zeros(48, 48, dtype=torch.complex64))}
    distributed(named, gradzip.parse(spec))
    return of_class, message(lambda: named["z"].real.sum().backward())


def table_gradient(rank, step):
    """(indices, what they are multiplied by)"""
    return torch.tensor([rank, 5, 199, 5]), gradient("table", rank, step, (4, 16))


@scenario
def sparse(spec, rank):
    """An embedding's sparse gradients and a dense one: the averages, made dense and not, and the dense bytes seen."""
    results = []
    for as_dense in (True, False):
        named = {"table": torch.nn.Parameter(torch.zeros(200, 16)), **parameters({"w": SHAPES["w"]})}
        compressor = gradzip.parse(spec)
        opt = distributed(named, compressor, sparse_as_dense=as_dense)
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
    """With GradScaler: scales, parameters and states after every step, and the last averages, unscaled."""
    named = parameters()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    compressor = gradzip.parse(spec).follow(scaler)
    opt = distributed(named, compressor)
    scales, after, states = [], [], []
    for step in range(AMP_STEPS):
        opt.zero_grad()
        scales.append(scaler.get_scale())
        spoilt = ["v"] if step == OVERFLOWS and rank == hvd.size() - 1 else []
        backward(named, rank, step, scaler.scale, spoilt)
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
    """A network under bfloat16 autocast, the backward pass and all: this rank's own gradients in every step, and the
    last averages."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.ReLU(), torch.nn.Linear(64, 48))
    named, own = dict(network.named_parameters()), []
    for name, p in named.items():
        p.register_hook(lambda grad, name=name: own[-1].__setitem__(name, grad.clone()))
    opt = distributed(named, gradzip.parse(spec))
    for step in range(STEPS):
        own.append({})
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            network(gradient("x", rank, step, (16, 48))).float().square().mean().backward()
            opt.synchronize()
    return own, grads(named)


def main():
    folder, *names = sys.argv[1:]
    hvd.init(process_sets=[ALONE] if int(os.environ.get("HOROVOD_SIZE", 1)) > 1 else [])
    torch.set_num_threads(1)
    results = {name: SCENARIOS[name](hvd.rank()) for name in names or SCENARIOS}
    results["stock_misused"] = misused(None, hvd.rank(), hvd.Compression.none)
    torch.save(results, Path(folder) / f"{hvd.rank()}.pt")


if __name__ == "__main__":
    main()
