"""Gradients on a device that hold the error of a step until it is known whether it is skipped. On the stand-in."""

import contextlib
import math
import shutil
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import gradzip
import gradzip.ddp
import kinds
from benchmarks.device_ops import __main__ as device_ops
from benchmarks.device_ops.__main__ import Counts, fake_group, noise
from benchmarks.device_ops.stand_in import stand_in
from gradzip.memory.verdict import read_all
from gradzip.methods.base.group import Group

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")

RANKS = 3
GROUP = SimpleNamespace(size=RANKS, numel=1 << 14, state=None)
HELD = kinds.examples(lambda compressor: compressor.undone_on_device and compressor.holds(GROUP))
HELD += ["signsgd:majority=False,residual_decay=0.9", "fft-range:block=50", "acpsgd:residual_decay=0.9"]
LOW_RANK = [spec for spec in HELD if hasattr(gradzip.parse(spec), "rank")]
ADJACENT = {"a.weight": torch.Size((40, 300)), "b.weight": torch.Size((64, 20, 3, 3))}
APART = {"a.weight": ADJACENT["a.weight"], "bias": torch.Size((7,)), "b.weight": ADJACENT["b.weight"]}
HOST = SimpleNamespace(tensor=lambda x: x, uncounted=contextlib.nullcontext)


def on_host(x):
    return getattr(x, "host", x).detach().clone()


class Job:
    """Steps of one rank under DDP, whose gradients all ranks have.

    Args:
        device: the stand-in, or `HOST`.
        apart: whether each gradient is a bucket.
    """

    def __init__(self, compressor, device, shapes=APART, apart=False, settles=True):
        self.compressor = gradzip.parse(compressor) if isinstance(compressor, str) else compressor
        self.device, self.shapes, self.held = device, shapes, []
        self.named = {n: torch.nn.Parameter(torch.empty(s, device="meta")) for n, s in shapes.items()}
        self.buckets = [[name] for name in shapes] if apart else [list(shapes)]
        self.state = gradzip.ddp.HookState(
            self.compressor, named_parameters=self.named.items(), find_unused_parameters=False
        )
        self.state._session.settles = settles

    def start(self, number, change=lambda gradients: None, buckets=None, dtype=torch.float32):
        """Call the hook for some buckets; by default, for all. Returns the averages by name."""
        gradients = {name: noise(s.numel(), number).view(s).clone() for name, s in self.shapes.items()}
        change(gradients)
        found, settle = {}, Group.settle

        def held(group, *arguments):
            self.held += group.names
            return settle(group, *arguments)

        with mock.patch.object(Group, "settle", held):
            for i, names in enumerate(self.buckets[:buckets]):
                parameters = [self.named[name] for name in names]
                buffer = self.device.tensor(torch.cat([gradients[name].view(-1) for name in names]).to(dtype))
                bucket = device_ops.grad_bucket(i, parameters, buffer, i == len(self.buckets) - 1)
                gradzip.ddp.hook(self.state, bucket)
                found |= zip(names, bucket.gradients())
        return {name: on_host(average) for name, average in found.items()}

    def residuals(self):
        return {name: on_host(s.residual) for name, s in self.compressor.states.items() if s.residual is not None}


@pytest.fixture
def device():
    future = mock.patch("gradzip.ddp.Future", device_ops.future)
    with fake_group(RANKS), future, stand_in() as device, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield device
        read_all()


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def broken(gradients):
    gradients["a.weight"].view(-1)[7] = math.nan  # in the first partition, which all ranks of the stand-in have


@pytest.mark.parametrize("shapes", [ADJACENT, APART], ids=["adjacent", "apart"])
@pytest.mark.parametrize("spec", HELD)
def test_averages_and_residuals_are_those_of_the_cpu(spec, shapes, device):
    there, here = Job(spec, device, shapes), Job(spec, HOST, shapes)
    waits = {"powersgd:rank=3,warm_start=False": 4}.get(
        spec, 2 if spec.startswith("acpsgd") else 1
    )  # factors are drawn
    for number in range(4):
        with device.counting() as counts:
            averages = there.start(number)
        assert counts.syncs == 0 or number < waits, counts.waits
        assert equal(averages, here.start(number)) and equal(there.residuals(), here.residuals()), number
        assert any(residual.any() for residual in there.residuals().values())
    assert set(there.held) == ADJACENT.keys() and not here.held


@pytest.mark.parametrize("spec", HELD)
def test_gradients_of_horovod_have_memory_of_their_own(spec, device):
    found = []
    for own in (device, HOST):
        compressor = gradzip.parse(spec)
        run = device_ops.horovod_steps(compressor, APART, RANKS, own)
        for number in range(3):
            gradients = {name: own.tensor(noise(s.numel(), number).view(s).clone()) for name, s in APART.items()}
            run(gradients, Counts())
        residuals = {name: on_host(state.residual) for name, state in compressor.states.items()}
        found.append({name: on_host(gradient) for name, gradient in gradients.items()} | residuals)
    assert equal(*found)


@pytest.mark.parametrize("shapes", [ADJACENT, APART], ids=["adjacent", "apart"])
@pytest.mark.parametrize("spec", HELD)
def test_a_skipped_step_does_not_touch_the_residual(spec, shapes, device):
    """The first step, or a later one. All is as if a second residual had been beside the first."""
    jobs = [Job(spec, device, shapes, settles=settles) for settles in (True, False)]
    for number, change in enumerate([broken, dict, dict, broken, dict]):
        before, tensors = jobs[0].residuals(), [state.residual for state in jobs[0].compressor.states.values()]
        averages, expected = (job.start(number, change) for job in jobs)
        assert all(job.compressor.last_step_skipped == (change is broken) for job in jobs)
        assert all(torch.equal(averages[n], expected[n]) or expected[n].isnan().all() for n in expected)
        if number:
            assert equal(jobs[0].residuals(), jobs[1].residuals())
            assert [state.residual for state in jobs[0].compressor.states.values()] == tensors or number == 1
        if change is broken:
            assert all(average.isnan().all() for average in averages.values())
            after = jobs[0].residuals()
            assert equal(after, before) if number else not any(residual.any() for residual in after.values())
    assert jobs[0].held and not jobs[1].held


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", LOW_RANK)
def test_factors_show_what_is_not_finite(spec, value, device):
    """Those of both turns, where the other factor is 0, and where `orthogonalize_` has replaced NaN."""

    def broken(gradients):
        gradients["a.weight"][3, 5] = value

    job, before = Job(spec, device), {}
    for number in range(8):
        if number in (4, 7):
            state = job.compressor.states["a.weight and 1 more"]
            for field, row in {"q": 5, "next_q": 5, "next_p": 3}.items():
                if hasattr(state, field):
                    getattr(state, field).host.view(-1, job.compressor.rank)[row] = 0.0
        averages = job.start(number, broken if number in (4, 7) else dict)
        assert job.compressor.last_step_skipped == (number in (4, 7))
        if number in (4, 7):
            assert equal(job.residuals(), before) and all(average.isnan().all() for average in averages.values())
        before = job.residuals()


@pytest.mark.parametrize("spec", HELD)
def test_a_backward_pass_that_fails_leaves_residuals_as_they_were(spec, device):
    """Between two buckets; and when all averages are known but not written."""
    job, other = Job(spec, device, apart=True), Job(spec, device, apart=True)
    for number in range(2):
        job.start(number), other.start(number)
    before = job.residuals()
    job.start(2, buckets=2)
    assert job.state._session.groups
    job.state._drop()
    assert equal(job.residuals(), before)
    with mock.patch.object(job.state, "_end", side_effect=RuntimeError), pytest.raises(RuntimeError):
        job.start(3)
    assert equal(job.residuals(), before)
    assert equal(job.start(4), other.start(4)) and equal(job.residuals(), other.residuals())


@pytest.mark.parametrize("spec", HELD)
def test_a_discarded_parameter_keeps_its_residual(spec, device):
    jobs = [Job(spec, device, settles=settles) for settles in (True, False)]
    for number in range(3):
        before = [job.compressor.memory.piece("a.weight", "residual") for job in jobs] if number else None
        before = before and [on_host(x) for x in before]
        for job in jobs:
            if number == 2:
                job.state._discarded.add(id(job.named["a.weight"]))
            job.start(number)
        assert equal(jobs[0].residuals(), jobs[1].residuals())
    after = [on_host(job.compressor.memory.piece("a.weight", "residual")) for job in jobs]
    assert all(map(torch.equal, before, after)) and after[0].any()
    assert jobs[0].held and not jobs[1].held


@pytest.mark.parametrize("value", [3e38, 1e38, 1e33])
@pytest.mark.parametrize("spec", HELD)
def test_averages_that_may_overflow(spec, value, device):
    """If the step is skipped, the residual stays. What a device decodes after that is finite."""

    def large(gradients):
        gradients["a.weight"].fill_(value)
        gradients["a.weight"].view(-1)[::3] *= -1

    job = Job(spec, device)
    for number in range(2):
        job.start(number)
    before = job.residuals()
    averages = job.start(2, large)
    if job.compressor.last_step_skipped:
        assert equal(job.residuals(), before) and value > 1e33
    else:
        assert all(average.isfinite().all() for average in averages.values())
        assert all(residual.isfinite().all() for residual in job.residuals().values())


def test_what_does_not_hold_errors(device):
    watched = gradzip.TopK()
    watched.monitor = mock.Mock(begin=lambda group: None)
    for compressor in (
        watched,
        gradzip.TopK().skip_nonfinite(False),
        gradzip.TopK(error_feedback=False),
        gradzip.DGC(),
    ):
        job = Job(compressor, device)
        job.start(0)
        assert not job.held
    job = Job("topk", device)
    job.start(0, dtype=torch.bfloat16)
    assert not job.held
