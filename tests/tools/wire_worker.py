"""Scenario for test_wire.py: bytes on the wire of the methods that README recommends, with real ranks under DDP."""

import functools
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import gradzip
from harness import main, scenario
from paths import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.convergence import wire
from benchmarks.convergence.report import CHOSEN, README, Table, stored
from models import MODELS

BEFORE = 2  # steps of each phase before those that are counted, in which ranks agree, and DDP cuts its buckets anew
COUNTED = 4  # even: steps of ACP-SGD differ


class Sampled(NamedTuple):
    """A run with GradiVeQ whose samples are gathered."""

    method: str
    network: str
    steps: int


SAMPLED = Sampled("gradiveq:warmup_steps=2,sample_steps=30,compress_steps=6,sampling=qsgd(bits=4)", "resnet8", 38)


def gradients_of(sampled):
    """Random numbers, the same on all ranks."""
    torch.manual_seed(0)
    return {name: torch.randn(p.shape) for name, p in MODELS[sampled.network].build(3, 10).named_parameters()}


class Given(torch.nn.Module):
    """A network whose loss has given gradients."""

    def __init__(self, gradients):
        super().__init__()
        self.names = {name.replace(".", "/"): gradient for name, gradient in gradients.items()}
        for name, gradient in self.names.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros_like(gradient)))

    def forward(self, scale):
        return sum((scale * gradient * getattr(self, name)).sum() for name, gradient in self.names.items())


def loopback():
    """Bytes that the loopback has sent so far, of one rank."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8]) / dist.get_world_size()


def counted(step, traffic):
    """Run the steps of a phase. Returns what a step sends: by the count of the compressor, and of the loopback.

    The loopback sends more than that, and most on a busy machine: it is counted as in the step that has least of it.
    """
    for _ in range(BEFORE):
        step()
    sent, more = [], []
    for _ in range(COUNTED):
        dist.barrier()
        before = traffic.bytes_wire, loopback()
        dist.barrier()
        step()
        dist.barrier()
        sent.append(traffic.bytes_wire - before[0])
        more.append(loopback() - before[1] - sent[-1])
    mean = sum(sent) / len(sent)
    return [mean, mean + min(more)]


def recommended():
    """The rows of README's table, by title: the table of the study, and the row there."""
    for line in CHOSEN[README, "recommendations"]:
        table = Table(stored(line.study), line.recipe)
        yield line.title, table, next(row for row in table.rows if row.method == line.method)


@scenario
def rows():
    """By title, the counts of a row's phases: of those that average gradients, then of the exchange of local steps."""
    found = {}
    for title, table, row in recommended():
        settings = table.settings
        phases = wire.phases(row.method, settings["steps"], settings["epochs"])
        specs = (tuple(wire.text(phase.method) for phase in of_kind) for of_kind in phases)
        found[title] = of_row(settings["network"], row.records[0].parameters, *specs, wire.exempt_of(row.method))
    return found


@scenario
def samples():
    """What the steps of `SAMPLED` send: by the count of the compressor, and of the loopback."""
    torch.manual_seed(0)
    model = Given(gradients_of(SAMPLED))
    module = torch.nn.parallel.DistributedDataParallel(model)
    made = gradzip.parse(SAMPLED.method)
    gradzip.ddp.register(module, made)
    step, _ = steps(model, module)
    dist.barrier()
    before = loopback()
    for _ in range(SAMPLED.steps):
        step()
    dist.barrier()
    return made.traffic.bytes_wire, loopback() - before


def steps(model, module, lr=0.0):
    """Return what runs a step of plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step():
        module(1.0).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


@functools.cache
def of_row(network, number, methods, differences, exempt):
    torch.manual_seed(0)
    gradients = wire.parameters(network, number)
    found = []
    if methods:
        made = gradzip.parse(methods[0])
        if len(methods) > 1:
            begins = range(0, len(methods) * (BEFORE + COUNTED), BEFORE + COUNTED)
            made = gradzip.Phases(dict(zip(begins, map(gradzip.parse, methods))), exempt=exempt)
        model = Given(gradients)
        module = torch.nn.parallel.DistributedDataParallel(model)
        gradzip.ddp.register(module, made)
        step, _ = steps(model, module)
        found += [counted(step, made.traffic) for _ in methods]
    for method in differences:
        model = Given(gradients)
        step, optimizer = steps(model, model, lr=1.0)
        outer = gradzip.outer.LocalSteps(model, optimizer, gradzip.parse(method), every=1)
        found.append(counted(step, outer.compressor.traffic))
        outer.remove()
    return found


if __name__ == "__main__":
    main()
