"""Local steps whose global copy is in host memory: their bits, and what a device holds, on the stand-in for one."""

import itertools
import shutil
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_map

import gradzip
from benchmarks.device_ops.stand_in import StandInTensor, stand_in
from contract import gradient
from gradzip.memory.verdict import read_all

SHAPES = {"first.matrix": (64, 48), "second.wide": (32, 96), "third.bias": (48,)}
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())
RANKS, STEPS = 2, 13
WHOLE = {"every": 4}
STREAMED = {"every": 4, "fragments": 2, "delay": 1, "blend": 0.5}  # two fragments of 3072 and 3120 elements
OUTER = {
    "nesterov": gradzip.outer.nesterov,
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),  # has states before its first step
    "mean": None,
}
STATES = {"nesterov": 4, "adam": 8, "adagrad": 4, "mean": 0}  # bytes for each parameter, without counters
SCALARS = 64  # bytes: placeholders of parameters, counters

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


class Model(torch.nn.Module):
    """Parameters of these shapes, other ones of each rank. wrap: puts a tensor on the device."""

    def __init__(self, rank, wrap, dtype):
        super().__init__()
        for name, shape in SHAPES.items():
            layer, _, leaf = name.partition(".")
            self.add_module(layer, torch.nn.Module())
            parameter = torch.nn.Parameter(wrap(gradient(name, rank, -1, shape).to(dtype)))
            self.get_submodule(layer).register_parameter(leaf, parameter)


class Job:
    """Workers of a job on a device, or on the CPU."""

    def __init__(self, device, outer, spec="none", dtype=torch.float32, **options):
        self.wrap = (lambda tensor: tensor) if device is None else device.tensor
        self.allocated = None if device is None else device.allocated()
        self.models = [Model(rank, self.wrap, dtype) for rank in range(RANKS)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        self.before = None if device is None else self.allocated.now
        self.group = gradzip.outer.LocalWorkers(
            self.models, self.optimizers, gradzip.parse(spec), outer=OUTER[outer], **options
        )

    def step(self, number):
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers)):
            for name, parameter in model.named_parameters():
                parameter.grad = self.wrap(gradient(name, rank, number, parameter.shape).to(parameter.dtype))
            optimizer.step()
            optimizer.zero_grad()

    @property
    def held(self):
        """Bytes on the device besides parameters."""
        return self.allocated.now - self.before

    def parameters(self):
        return [parameter.detach().cpu().clone() for model in self.models for parameter in model.parameters()]

    def states(self):
        return [x for state in self.group._global.optimizer.state.values() for x in state.values() if x is not None]


def run(device, outer, **options):
    """The parameters of all ranks after each step."""
    job, after = Job(device, outer, **options), []
    for number in range(STEPS):
        if number == STEPS - 2:
            with torch.no_grad():
                job.models[1].first.matrix.mul_(torch.inf)
        with mock.patch("warnings.warn"):  # of a worker that diverges
            job.step(number)
        after += job.parameters()
    with mock.patch("warnings.warn"):
        job.group.synchronize()
    read_all()
    return after + job.parameters()


@pytest.mark.parametrize("schedule", [WHOLE, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_has_the_same_bits_on_the_cpu(outer, schedule, dtype):
    with_copy, offloaded = (
        run(None, outer, spec="topk:theta=0.9", dtype=dtype, offload=offload, **schedule) for offload in (False, True)
    )
    for ours, theirs in zip(offloaded, with_copy, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("schedule", [WHOLE, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("outer", OUTER)
def test_it_has_the_same_bits_on_a_device(outer, schedule):
    """The stand-in refuses operations on tensors of the host and of the device."""
    found = []
    for offload, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
        with stand_in() as device:
            found.append(run(device, outer, spec="topk:theta=0.9", dtype=dtype, offload=offload, **schedule))
    for i in range(2):
        for ours, theirs in zip(found[i + 2], found[i], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("outer", ["nesterov", "adam", "mean"])  # the stand-in makes its first states on the device
def test_a_device_holds_neither_the_copy_nor_states_between_exchanges(outer):
    held = {}
    for offload in (False, True):
        with stand_in() as device:
            job = Job(device, outer, offload=offload, **WHOLE)
            made = job.held
            for number in range(STEPS):
                job.step(number)
            held[offload] = made, job.held
            on_device = [isinstance(x, StandInTensor) for x in job.states() if x.dim()]
            assert on_device == [not offload] * len(on_device) and bool(on_device) == bool(STATES[outer])
            read_all()
    (made, in_training), (made_offloaded, in_training_offloaded) = held[False], held[True]
    assert 0 <= made_offloaded <= SCALARS and 0 <= in_training_offloaded <= SCALARS
    assert made >= 4 * NUMEL and in_training >= (4 + STATES[outer]) * NUMEL  # the counts see them


@needs_compiler
def test_a_device_holds_a_fragment_in_a_step_of_the_outer_optimizer():
    with stand_in() as device:
        job = Job(device, "nesterov", offload=True, **STREAMED)
        copy, most = job.group._global, []
        step = copy.step

        def watched(averages):
            before = job.allocated.start()
            step(averages)
            numel = sum(average.numel() for average in averages.values())
            most.append((job.allocated.peak - before) / numel)
            assert numel < NUMEL

        copy.step = watched
        for number in range(STEPS):
            job.step(number)
        parameters = dict(job.models[0].named_parameters())
        for function in (copy.write, copy.differs):
            before = job.allocated.start()
            function(parameters, list(parameters))
            # The next tensor is copied before the last one is freed.
            assert job.allocated.peak - before <= 2 * 4 * max(p.numel() for p in parameters.values()) + SCALARS
        read_all()
    # The parameters, the momentum, and what SGD keeps while it takes a step: Nesterov's gradient, a copy in the first.
    assert most and all(8 <= bytes_ <= 12.1 for bytes_ in most)


@needs_compiler
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("loads", [False, True])
def test_states_are_loaded_to_host_memory(outer, saves, loads):
    """The next steps have the same bits, and the device does not hold the states while they are loaded."""
    with stand_in() as device:
        first, second = (Job(device, outer, offload=offload, **WHOLE) for offload in (saves, loads))
        for number in range(4):
            first.step(number)
        # As torch.load(map_location="cpu") has it.
        saved = tree_map(lambda x: x.cpu() if isinstance(x, StandInTensor) else x, first.group._global.state_dict())
        before = second.allocated.start()
        second.group._global.load_state_dict(saved, "test")
        assert not loads or second.allocated.peak - before <= SCALARS
        second.group._global.write(dict(second.models[0].named_parameters()))
        for ours, theirs in zip(second.models[1].parameters(), first.models[1].parameters()):
            ours.copy_(theirs)
        for number in range(4, 9):
            first.step(number)
            second.step(number)
        for ours, theirs in zip(second.parameters(), first.parameters()):
            assert torch.equal(ours, theirs)
        assert not loads or not any(isinstance(x, StandInTensor) for x in second.states() if x.dim())
        read_all()


class Broken(torch.optim.SGD):
    """An outer optimizer whose step fails after it has changed its parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        raise ZeroDivisionError


@needs_compiler
def test_a_step_that_fails_leaves_nothing_on_the_device():
    with stand_in() as device, mock.patch.dict(OUTER, broken=lambda params: Broken(params, lr=1.0, momentum=0.9)):
        job = Job(device, "broken", offload=True, every=1)
        held = job.held
        with pytest.raises(ZeroDivisionError):
            job.step(0)
        for optimizer in (*job.optimizers, job.group._global.optimizer):
            optimizer.zero_grad()
        job.group.remove()
        assert not any(isinstance(x, StandInTensor) for x in job.states()) and job.held <= held + SCALARS
        read_all()
