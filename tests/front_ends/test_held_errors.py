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
from gradzip.methods.base.gather import GatherCompressor
from gradzip.methods.base.group import Group

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")

RANKS = 3
GROUP = SimpleNamespace(size=RANKS, numel=1 << 14, state=SimpleNamespace(step=9))
HELD = kinds.examples(lambda compressor: compressor.undone_on_device and compressor.holds(GROUP))
HELD += ["signsgd:majority=False,residual_decay=0.9", "fft-range:block=50", "acpsgd:residual_decay=0.9"]
HELD += ["dgc:momentum=0,residual_decay=0.9"]
HELD += [f"momentum:inner={inner}" for inner in ("randomk", "onebit", "block-float(bits=4)", "topk,warmup_steps=9")]
# Of methods without residuals of ranks, momenta are overwritten alone.
UNBIASED = ["qsgd", "natural", "block-float(bits=4,error_feedback=owner)", "randomk(error_feedback=False)"]
HELD += [f"momentum:inner={inner}" for inner in UNBIASED]
FLOAT32 = list(HELD)
# Of gradients of another type or other strides, and with another exchange, the error is made again.
REMADE = kinds.examples(lambda compressor: compressor.keeps_residual and compressor.remakes)
HELD += [f"{spec}@{kind}" for spec in REMADE for kind in ("bfloat16", "channels_last")]
SCATTERED = [spec for spec in kinds.with_other_exchanges(REMADE) if "scatter_reduce" in spec]
HELD += [spec for spec in (*SCATTERED, *REMADE) if spec not in HELD]
HELD += [f"momentum:inner={inner}@bfloat16" for inner in ("randomk", "block-float(bits=4)", "powersgd")]
HELD += ["momentum:inner=topk(exchange=scatter_reduce)", "dgc:clip_norm=1@bfloat16"]
HELD += [f"momentum:inner={inner}@{kind}" for inner in UNBIASED for kind in ("bfloat16", "channels_last")]
HELD += [f"momentum:inner={inner}(exchange=scatter_reduce)" for inner in ("qsgd", "natural")]
HELD += [f"momentum:inner={inner}" for inner in ("terngrad(clip=none)", "qsgd(norm=max)")]
HELD += ["topk:select=sampled,residual_decay=0.9"]
# One of each method and way, where it does not matter which elements are sent.
OF_EACH = {spec.partition(":")[0]: spec for spec in reversed(REMADE)}.values()
SCATTERED_OF_EACH = {spec.partition(":")[0]: spec for spec in reversed(SCATTERED)}.values()
SOME = [*FLOAT32, *(f"{spec}@bfloat16" for spec in OF_EACH), *SCATTERED_OF_EACH, "block-float@channels_last", HELD[-1]]
LOW_RANK = [spec for spec in HELD if "acpsgd" in spec or "powersgd" in spec]
MOMENTA = [spec for spec in HELD if spec.startswith("momentum")]
FIELDS = ("residual", "momentum", "velocity")  # that a step overwrites where they are
ADJACENT = {"a.weight": torch.Size((40, 300)), "b.weight": torch.Size((64, 20, 3, 3))}
APART = {"a.weight": ADJACENT["a.weight"], "bias": torch.Size((7,)), "b.weight": ADJACENT["b.weight"]}
HOST = SimpleNamespace(tensor=lambda x: x, uncounted=contextlib.nullcontext)


def on_host(x):
    return getattr(x, "host", x).detach().clone()


class Job:
    """Steps of one rank under DDP, whose gradients all ranks have.

    Args:
        device: the stand-in, or `HOST`.
        compressor: or a spec, "spec@bfloat16" for gradients of that type, "spec@channels_last" for their strides.
        apart: whether each gradient is a bucket.
    """

    def __init__(self, compressor, device, shapes=APART, apart=False, may_hold=True):
        spec, _, kind = compressor.partition("@") if isinstance(compressor, str) else ("", "", "")
        self.compressor = gradzip.parse(spec) if spec else compressor
        if "scatter" in spec:  # ranks of the stand-in own partitions of one size
            shapes = {n: torch.Size((-(-s[0] // 48) * 48, *s[1:])) if len(s) > 1 else s for n, s in shapes.items()}
        self.device, self.shapes, self.held = device, shapes, []
        self.dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        self.named = {n: torch.nn.Parameter(torch.empty(s, device="meta")) for n, s in shapes.items()}
        if kind == "channels_last":
            self.named["b.weight"].data = self.named["b.weight"].to(memory_format=torch.channels_last)
        self.buckets = [[name] for name in shapes] if apart else [list(shapes)]
        self.state = gradzip.ddp.HookState(
            self.compressor, named_parameters=self.named.items(), find_unused_parameters=False
        )
        self.state._session.may_hold = may_hold

    def start(self, number, change=lambda gradients: None, buckets=None):
        """Call the hook for some buckets; by default, for all. Returns the averages by name."""
        gradients = {name: noise(s.numel(), number).view(s).clone() for name, s in self.shapes.items()}
        change(gradients)
        found, commit = {}, Group.commit_held

        def held(group, *arguments):
            self.held += group.names
            return commit(group, *arguments)

        with mock.patch.object(Group, "commit_held", held):
            for i, names in enumerate(self.buckets[:buckets]):
                parameters = [self.named[name] for name in names]
                buffer = self.device.tensor(torch.cat([gradients[name].view(-1) for name in names]).to(self.dtype))
                bucket = device_ops.grad_bucket(i, parameters, buffer, i == len(self.buckets) - 1)
                gradzip.ddp.hook(self.state, bucket)
                found |= zip(names, bucket.gradients())
        return {name: on_host(average).float() for name, average in found.items()}

    def tensors(self):
        """Those of the states that a step overwrites where they are."""
        fields = [
            (name, field, getattr(s, field, None)) for name, s in self.compressor.states.items() for field in FIELDS
        ]
        return {(name, field): x for name, field, x in fields if x is not None}

    def states(self):
        return {key: on_host(x) for key, x in self.tensors().items()}


@pytest.fixture
def device():
    future = mock.patch("gradzip.ddp.Future", device_ops.future)
    with fake_group(RANKS), future, stand_in() as device, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield device
        read_all()


def equal(one, other):
    """To the bit, with the signs of zeros."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)) for name in one
    )


def broken(gradients):
    gradients["a.weight"].view(-1)[7] = math.nan  # in the first partition, which all ranks of the stand-in have


@pytest.mark.parametrize("shapes", [ADJACENT, APART], ids=["adjacent", "apart"])
@pytest.mark.parametrize("spec", HELD)
def test_averages_and_states_are_those_of_the_cpu(spec, shapes, device):
    there, here = Job(spec, device, shapes), Job(spec, HOST, shapes)
    waits = 2 if "acpsgd" in spec else 1  # steps that draw factors
    waits = 4 if "warm_start=False" in spec or "sampled" in spec else waits
    for number in range(4):
        with device.counting() as counts:
            averages = there.start(number)
        assert counts.syncs == 0 or number < waits, counts.waits
        assert equal(averages, here.start(number)) and equal(there.states(), here.states()), number
    assert all(x.any() for x in there.states().values())
    assert set(there.held) == ADJACENT.keys() and not here.held


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", ["qsgd", "qsgd:coding=always_elias", "natural"])
def test_averages_of_a_vector_in_partitions_are_those_of_the_cpu(spec, kind, device):
    """One call decodes them, but Elias codes. There is no error to hold."""
    codes, spec = "elias" in spec, f"{spec}{',' if ':' in spec else ':'}exchange=scatter_reduce"
    there, here = Job(f"{spec}@{kind}", device), Job(f"{spec}@{kind}", HOST)
    for number in range(3):
        with device.counting() as counts:
            averages = there.start(number)
        assert equal(averages, here.start(number)) and (counts.syncs == 0 or number == 0 or codes)
        decoded = counts.names["quantize_decode_sum"] + counts.names["natural_decode_sum"]
        assert codes or decoded == 2 * len(there.compressor.states)  # the owner's payloads, and those of all averages


@pytest.mark.parametrize("spec", FLOAT32)
def test_gradients_of_horovod_have_memory_of_their_own(spec, device):
    found = []
    for own in (device, HOST):
        compressor = gradzip.parse(spec)
        run = device_ops.horovod_steps(compressor, APART, RANKS, own)
        for number in range(3):
            gradients = {name: own.tensor(noise(s.numel(), number).view(s).clone()) for name, s in APART.items()}
            run(gradients, Counts())
        states = [getattr(state, field, None) for state in compressor.states.values() for field in FIELDS]
        tensors = [*gradients.values(), *(x for x in states if x is not None)]
        found.append(dict(enumerate(map(on_host, tensors))))
    assert equal(*found)


@pytest.mark.parametrize("shapes", [ADJACENT, APART], ids=["adjacent", "apart"])
@pytest.mark.parametrize("spec", SOME)
def test_a_skipped_step_does_not_touch_the_states(spec, shapes, device):
    """The first step, or a later one. All is as if second tensors had been beside the first."""
    jobs = [Job(spec, device, shapes, may_hold=may_hold) for may_hold in (True, False)]
    for number, change in enumerate([broken, dict, dict, broken, dict]):
        before, tensors = jobs[0].states(), jobs[0].tensors()
        averages, expected = (job.start(number, change) for job in jobs)
        assert all(job.compressor.last_step_skipped == (change is broken) for job in jobs)
        assert all(torch.equal(averages[n], expected[n]) or expected[n].isnan().all() for n in expected)
        if number:
            assert equal(jobs[0].states(), jobs[1].states())
        if number > 1:
            assert jobs[0].tensors().keys() == tensors.keys()
            assert all(x is tensors[key] for key, x in jobs[0].tensors().items())
        if change is broken:
            assert all(average.isnan().all() for average in averages.values())
            after = jobs[0].states()
            assert equal(after, before) if number else not any(x.any() for x in after.values())
    assert jobs[0].held and not jobs[1].held


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", LOW_RANK)
def test_factors_show_what_is_not_finite(spec, value, device):
    """Those of both turns, where the other factor is 0, and where `orthogonalize_` has replaced NaN."""

    def broken(gradients):
        gradients["a.weight"][3, 5] = value

    job, before = Job(spec, device), {}
    rank = getattr(job.compressor, "inner", job.compressor).rank
    for number in range(8):
        if number in (4, 7):
            state = job.compressor.states["a.weight and 1 more"]
            for field, row in {"q": 5, "next_q": 5, "next_p": 3}.items():
                if hasattr(state, field):
                    getattr(state, field).host.view(-1, rank)[row] = 0.0
        averages = job.start(number, broken if number in (4, 7) else dict)
        assert job.compressor.last_step_skipped == (number in (4, 7))
        if number in (4, 7):
            assert equal(job.states(), before) and all(average.isnan().all() for average in averages.values())
        before = job.states()


@pytest.mark.parametrize("spec", SOME)
def test_a_backward_pass_that_fails_leaves_states_as_they_were(spec, device):
    """Between two buckets; and when all averages are known but not written."""
    job, other = Job(spec, device, apart=True), Job(spec, device, apart=True)
    for number in range(2):
        job.start(number), other.start(number)
    before = job.states()
    job.start(2, buckets=2)
    assert job.state._session.groups
    job.state._drop()
    assert equal(job.states(), before)
    with mock.patch.object(job.state, "_end", side_effect=RuntimeError), pytest.raises(RuntimeError):
        job.start(3)
    assert equal(job.states(), before)
    assert equal(job.start(4), other.start(4)) and equal(job.states(), other.states())


@pytest.mark.parametrize("spec", SOME)
def test_a_discarded_parameter_keeps_its_state(spec, device):
    jobs = [Job(spec, device, may_hold=may_hold) for may_hold in (True, False)]

    def found():
        pieces = [job.compressor.memory.piece("a.weight", field) for job in jobs for field in FIELDS]
        return [on_host(x) for x in pieces if x is not None]

    for number in range(3):
        if number == 2:
            before = found()
            for job in jobs:
                job.state._discarded.add(id(job.named["a.weight"]))
        for job in jobs:
            job.start(number)
        assert equal(jobs[0].states(), jobs[1].states())
    after = found()
    assert all(map(torch.equal, before, after)) and all(x.any() for x in after)
    assert jobs[0].held and not jobs[1].held


@pytest.mark.parametrize("value", [3e38, 1e38, 1e33])
@pytest.mark.parametrize("spec", SOME)
def test_averages_that_may_overflow(spec, value, device):
    """If the step is skipped, states stay. What a device decodes after that is finite.

    Whether it is does not depend on what this rank's gradients hold: a monitor may watch one rank alone.
    """

    def large(gradients):
        gradients["a.weight"].fill_(value)
        gradients["a.weight"].view(-1)[::3] *= -1

    job, watched = Job(spec, device), Job(spec, device)
    watched.compressor.monitor = mock.Mock(begin=lambda group: None)
    for number in range(2):
        job.start(number), watched.start(number)
    before = job.states()
    averages = job.start(2, large)
    watched.start(2, large)
    assert job.held and not watched.held
    assert job.compressor.last_step_skipped == watched.compressor.last_step_skipped
    if job.compressor.last_step_skipped:
        assert equal(job.states(), before) and value > 1e33
    else:
        assert all(average.isfinite().all() for average in averages.values())
        assert all(x.isfinite().all() for x in job.states().values())


@pytest.mark.parametrize("spec", MOMENTA)
def test_an_average_may_overflow_where_both_momenta_are_finite(spec, device):
    """m' = -1.5e38, and m = 3e38. If the difference overflows, the step is skipped, and states stay."""
    job = Job(spec, device)
    for number in range(2):
        job.start(number)
    for (_, field), x in job.tensors().items():
        x.host.fill_(3e38 if field == "momentum" else -3e38 * job.compressor.beta)
    before = job.states()

    def opposite(gradients):
        gradients["a.weight"].fill_(-1.5e38)

    averages = job.start(2, opposite)
    if 1.5e38 + job.compressor.beta * 3e38 < torch.finfo(torch.float32).max:
        assert not job.compressor.last_step_skipped
        assert all(average.isfinite().all() for average in averages.values())
    else:
        assert job.compressor.last_step_skipped and all(average.isnan().all() for average in averages.values())
        assert equal(job.states(), before)


@pytest.mark.parametrize("kind", ["", "@bfloat16"])
def test_an_average_of_momenta_fits_the_type_of_the_gradients(kind, device):
    """m' = -1.7e38, and beta m = 1.7e38: their difference is finite in float32, and not in bfloat16."""
    job = Job(f"momentum:inner=topk(theta=0.0){kind}", device)
    for number in range(2):
        job.start(number)
    for (_, field), x in job.tensors().items():
        x.host.fill_(1.7e38 / 0.9 if field == "momentum" else -3.4e38)
    before = job.states()
    averages = job.start(2, lambda gradients: [x.zero_() for x in gradients.values()])
    if job.compressor.last_step_skipped:
        assert equal(job.states(), before) and all(average.isnan().all() for average in averages.values())
    else:
        assert all(average.isfinite().all() for average in averages.values())


@pytest.mark.parametrize("spec", MOMENTA)
def test_zeros_have_the_signs_that_a_rank_with_a_monitor_sees(spec, device):
    """From the first step on, in which there is no momentum before."""
    job, watched = Job(spec, device), Job(spec, device)
    watched.compressor.monitor = mock.Mock(begin=lambda group: None)
    for number in range(3):
        averages, expected = (
            j.start(number, lambda g: [x.view(-1)[::3].fill_(-0.0) for x in g.values()]) for j in (job, watched)
        )
        assert equal(averages, expected), number
    assert job.held and not watched.held


@pytest.mark.parametrize("kind", ["", "@bfloat16", "@channels_last"])
@pytest.mark.parametrize("inner", ["natural", "qsgd"])
def test_a_payload_of_another_rank_that_is_not_finite_changes_no_momentum(inner, kind, device):
    """As where that rank has had a NaN."""
    job = Job(f"momentum:inner={inner}{kind}", device)
    for number in range(2):
        job.start(number)
    before = job.states()
    opened = GatherCompressor.opened

    def with_nan(method, payloads, contents, group):
        content = contents[0][0]
        nan = device.tensor(torch.full((content.numel,), math.nan))
        return opened(method, [*payloads[:-1], method.encode(nan, content.key)], contents, group)

    with mock.patch.object(GatherCompressor, "opened", with_nan):
        averages = job.start(2)
    assert job.compressor.last_step_skipped and equal(job.states(), before)
    assert all(average.isnan().all() for name, average in averages.items() if name != "bias")
    job.start(3)
    assert not job.compressor.last_step_skipped and not equal(job.states(), before)


@pytest.mark.parametrize(("value", "skipped"), [(3e37, True), (1e36, False)])
@pytest.mark.parametrize("inner", ["qsgd", "qsgd(exchange=scatter_reduce)"])
def test_norms_may_be_above_all_elements(inner, value, skipped, device):
    """Of 512 elements of 3e37, the norm is 6.8e38: their levels are multiples of the largest float32 number / 7."""
    job = Job(f"momentum:inner={inner}", device)
    for number in range(2):
        job.start(number)
    before = job.states()
    job.start(2, lambda gradients: gradients["a.weight"].fill_(value))
    assert job.compressor.last_step_skipped == skipped and equal(job.states(), before) == skipped
    assert all(x.isfinite().all() for x in job.states().values())


def test_a_large_momentum_fades(device):
    """It is of a step that was not skipped, so that none after it is."""
    job = Job("momentum:inner=topk(theta=0.0),warmup_steps=0", device)
    for number, value in enumerate((1.6e38, 0.0, 0.0)):
        job.start(number, lambda gradients, value=value: [x.fill_(value) for x in gradients.values()])
        assert not job.compressor.last_step_skipped and job.held
    most = max(x.max() for (_, field), x in job.states().items() if field == "momentum")
    assert most == pytest.approx(1.6e38 * 0.9**2)


def test_a_step_whose_average_is_0_does_not_count_for_the_warm_up(device):
    jobs = [Job("momentum:inner=topk,warmup_steps=3", device, may_hold=may_hold) for may_hold in (True, False)]
    for number in range(3):
        for job in jobs:
            job.start(number, lambda gradients, keep=number != 1: [x.mul_(keep) for x in gradients.values()])
        assert equal(jobs[0].states(), jobs[1].states())
    read_all()
    assert [job.compressor.states["a.weight and 1 more"].unused for job in jobs] == [1, 1]
    assert len(jobs[0].held) == 6 and not jobs[1].held


def test_a_residual_of_an_earlier_phase_is_sent_in_the_warm_up(device):
    """Also after a step that is skipped."""
    spec = "phases:0=topk,2=momentum(inner=topk,warmup_steps=2)"
    jobs = [Job(spec, device, may_hold=may_hold) for may_hold in (True, False)]
    for number in range(5):
        averages, expected = (job.start(number, broken if number == 2 else dict) for job in jobs)
        assert number == 2 or equal(averages, expected)
    assert len(jobs[0].held) == 10 and not jobs[1].held


@pytest.mark.parametrize("spec", SOME)
def test_the_default_dtype_does_not_matter(spec, device):
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        job = Job(spec, device)
        torch.set_default_dtype(dtype)
        try:
            averages = [job.start(number) for number in range(3)]
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(averages[-1] | job.states())
    assert equal(*found[:2]) and equal(*found[1:])


def test_what_does_not_hold_errors(device):
    watched = gradzip.TopK()
    watched.monitor = mock.Mock(begin=lambda group: None)
    for compressor in (
        watched,
        gradzip.TopK().skip_nonfinite(False),
        gradzip.TopK(error_feedback=False),
    ):
        job = Job(compressor, device)
        job.start(0)
        assert not job.held
    job = Job(gradzip.TopK(), device)
    job.dtype = torch.float16
    job.start(0)
    assert not job.held
