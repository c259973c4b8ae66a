"""What scripts for the ranks of a job share: scenarios, connections, and models whose gradients are given.

A script of scenarios, `worker.py FOLDER [NAME ...]`, ends with `if __name__ == "__main__": main()`. It runs the named
scenarios, all by default, and saves what they return to FOLDER/RANK.pt. `horovodrun`, `torchrun` or `launch.processes`
starts it.
"""

import contextlib
import os
import sys
from datetime import timedelta
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import gradzip
from contract import gradient, kept_residual

UNDER_HOROVOD = "HOROVOD_SIZE" in os.environ  # set before hvd.init()
SIZE = int(os.environ.get("HOROVOD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
if UNDER_HOROVOD:
    import horovod.torch as hvd

SCENARIOS = {}
ON_REQUEST = set()  # names of scenarios that run only if they are named
job = SimpleNamespace()  # of this rank, once it is connected: rank, size, folder


def scenario(function):
    """Register a scenario. Its parameters are any of `rank`, `size`, `folder` and what `main` is given."""
    SCENARIOS[function.__name__] = function
    return function


def on_request(function):
    """Register a scenario that runs only if it is named."""
    ON_REQUEST.add(function.__name__)
    return scenario(function)


def connect(process_sets=(), backend="gloo", **options):
    """Initialize Horovod or torch.distributed. options: of `init_process_group`."""
    torch.set_num_threads(1)
    if UNDER_HOROVOD:
        hvd.init(process_sets=list(process_sets))
        job.rank, job.size = hvd.rank(), hvd.size()
        return
    rendezvous = {}
    if "MASTER_ADDR" not in os.environ:
        store = dist.FileStore(f"{job.folder}/store", SIZE)
        rendezvous = {"store": store, "rank": int(os.environ["RANK"]), "world_size": SIZE}
    dist.init_process_group(backend, timeout=timedelta(seconds=60), **rendezvous, **options)
    job.rank, job.size = dist.get_rank(), dist.get_world_size()


def gather(value):
    """Return the values of all ranks."""
    if UNDER_HOROVOD:
        return hvd.allgather_object(value, name="values")
    values = [None] * job.size
    dist.all_gather_object(values, value)
    return values


def main(process_sets=(), of_spec=None, group=None, **arguments):
    """Run scenarios.

    Args:
        of_spec: what to run with a name that is no scenario's: the spec of a method.
        group: arguments of `connect` for torch.distributed: the backend, and others of `init_process_group`.
        arguments: further parameters of scenarios, as functions to call when ranks are connected.
    """
    folder, *names = sys.argv[1:]
    job.folder = Path(folder)
    connect(process_sets, **(group or {}))
    known = vars(job) | {name: make() for name, make in arguments.items()}
    results = {}
    for name in names or [name for name in SCENARIOS if name not in ON_REQUEST]:
        if function := SCENARIOS.get(name):
            results[name] = function(**{parameter: known[parameter] for parameter in signature(function).parameters})
        else:
            results[name] = of_spec(name)
    torch.save(results, job.folder / f"{job.rank}.pt")
    if UNDER_HOROVOD or "MASTER_ADDR" in os.environ:
        gather(None)  # a rank that leaves earlier ends the job
    if UNDER_HOROVOD:
        hvd.shutdown()  # its thread aborts the process if a connection closes that it still uses
    os._exit(0)  # now: a torch thread that frees a Python object during shutdown aborts the process


def message(function, *arguments):
    """Return the error that a function raises, as text; "" if there is none."""
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def residuals(compressor):
    """This rank's residuals by parameter, without the loss scale, with what it keeps as the owner of a partition."""
    found = {}
    for part in compressor.parts:
        for name, fields in part.memory.by_parameter().items():
            if (residual := kept_residual(fields)) is not None:
                found[name] = found.get(name, 0) + residual / fields.get("loss_scale", 1.0)
    return found


def parameters(shapes, dtype=torch.float32):
    return {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}


def backward(named, rank, step, scale=lambda loss: loss, infinite=(), unused=()):
    """Give each parameter that requires one its gradient. Hooks are called in a different order on each rank.

    Args:
        infinite: names of parameters whose gradients get one infinite element.
        unused: names of parameters that get none.
    """
    order = torch.randperm(len(named), generator=torch.Generator().manual_seed(10 * step + rank)).tolist()
    for name, p in [list(named.items())[i] for i in order]:
        if p.requires_grad and name not in unused:
            grad = gradient(name, rank, step, p.shape)
            if name in infinite:
                grad[-1] = float("inf")
            scale((p * grad).sum()).backward()


class Model(torch.nn.Module):
    """Parameters whose gradients are the argument of `forward`, by name. Those without a gradient are not used."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        for name, parameter in parameters(shapes, dtype).items():
            self.register_parameter(name, parameter)

    def forward(self, gradients):
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters() if name in gradients)


def data_parallel(model, optimizer, compressor, bucket_cap_mb=25):
    """Return the model and the optimizer of a job that averages gradients with a compressor."""
    if UNDER_HOROVOD:
        compressor = gradzip.horovod.bucketed(compressor, bucket_cap_mb)
        named = model.named_parameters()
        return model, hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compressor)
    module = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    state = gradzip.ddp.HookState(compressor, None, model.named_parameters(), find_unused_parameters=False)
    module.register_comm_hook(state, gradzip.ddp.hook)
    return module, optimizer


class Training:
    """A model of these shapes in training, with gradients that depend on name, rank and step (`contract.gradient`)."""

    def __init__(self, compressor, shapes, bucket_cap_mb=25):
        model = Model(shapes)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        self.module, self.optimizer = data_parallel(model, sgd, compressor, bucket_cap_mb)
        self.named = dict(model.named_parameters())

    def step(self, step, scaler=None, infinite=None):
        """Take a step, and return the averages. infinite: the name of a parameter with an infinite gradient."""
        self.optimizer.zero_grad()
        gradients = {name: gradient(name, job.rank, step, p.shape) for name, p in self.named.items()}
        if infinite:
            gradients[infinite][-1] = float("inf")
        scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(self.module(gradients)).backward()
        if UNDER_HOROVOD:
            self.optimizer.synchronize()
        averages = {name: p.grad.clone() for name, p in self.named.items()}
        scaler.unscale_(self.optimizer)
        with self.optimizer.skip_synchronize() if UNDER_HOROVOD else contextlib.nullcontext():
            scaler.step(self.optimizer)
        scaler.update()
        return averages

    def parameters(self):
        return {name: p.detach().clone() for name, p in self.named.items()}
