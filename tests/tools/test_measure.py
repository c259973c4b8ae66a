"""Measuring methods, links and steps: what is counted, with clocks of the tests' own, and on real jobs."""

import dataclasses
import itertools
import json
import types
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import gradzip
from benchmarks.training.profile import measure_step
from gradzip.advice import measure
from gradzip.advice.cost import Link
from gradzip.advice.measure import _kind
from gradzip.collectives import Gather, Mean
from gradzip.collectives.engine import Engine
from gradzip.collectives.traffic import Traffic
from kinds import FIRST, observed, params
from launch import environment, executable, horovodrun, needs_network, scenarios, shaped, torchrun

SHAPE = (48, 32, 3, 3)


def gradient(shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("spec", params(default=FIRST))
def test_every_method(spec, ranks):
    method = gradzip.parse(spec)
    grad = gradient()
    measured = measure.measure_method(method, grad, name="w", ranks=ranks, repeats=2)
    assert torch.equal(grad, gradient()) and not any(part.states for part in method.parts)
    assert measured.encode > 0 and measured.decode > 0
    assert {kind for kind, _ in measured.rounds} <= {
        "all_reduce",
        "all_reduce_half",
        "all_gather",
        "all_gather_partitions",
        "all_to_all",
    }
    # The bytes that a group of real ranks sends in the second and third step, in which the measured ones are.
    group = gradzip.LocalGroup(method, ranks)
    sent = []
    for _ in range(3):
        group.average([grad] * ranks, "w")
        sent.append(group.bytes_sent)
    if isinstance(method, gradzip.Phases):  # measured in its first phase
        expected = sent[0]
    elif isinstance(method, gradzip.GradiVeQ):  # which compresses after the second step
        expected = sent[2] - sent[1]
    else:
        expected = (sent[2] - sent[0]) / 2
    lengths = [sum(of_step) for of_step in observed(spec).lengths]
    tolerance = min(0.5, max(0.02, 1 - min(lengths) / max(1, *lengths)))  # coded lengths vary, and numbers of atoms
    handed = sum(n / ranks if kind == "all_gather_partitions" else n for kind, n in measured.rounds)
    assert handed == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("spec", params(default=FIRST))
def test_gradients_that_bypass_compression(spec):
    measured = measure.measure_method(gradzip.parse(spec), gradient((100,)))
    assert measured.rounds == (("all_reduce", 400.0),) and measured.error == 0


def test_times_are_those_of_the_clock():
    """With a clock that ticks once for each reading, all parts take a second."""
    ticks = itertools.count()
    grads = {"w": gradient()}
    measured = measure.measure_gradients(gradzip.BlockFloat(), grads, clock=lambda device: float(next(ticks)))["w"]
    assert (measured.encode, measured.decode) == (1.0, 2.0)


def test_gradients_of_a_model():
    """The same bytes and errors as one by one; a method in charge of each."""
    grads = {"a.weight": gradient(), "b.weight": gradient((40, 50)), "b.bias": gradient((50,))}
    method = gradzip.parse("per-layer:^a=topk(theta=0.9),default=acpsgd")
    together = measure.measure_gradients(method, grads)
    for name, grad in grads.items():
        alone = measure.measure_method(method, grad, name)
        assert together[name].error == pytest.approx(alone.error)
        assert together[name].nbytes == alone.nbytes
    kinds = {name: [kind for kind, _ in m.rounds] for name, m in together.items()}
    assert kinds == {"a.weight": ["all_gather"], "b.weight": ["all_reduce"], "b.bias": ["all_reduce"]}
    assert measure.measure_gradients(method, {}) == {}


def test_rounds():
    """Power-SGD sends P, then Q; ACP-SGD one of them, in turn: shapes (48, 4) and (288, 4)."""
    rounds = {name: measure.measure_method(gradzip.parse(name), gradient()).rounds for name in ("powersgd", "acpsgd")}
    assert rounds["powersgd"] == (("all_reduce", 4.0 * 48 * 4), ("all_reduce", 4.0 * 288 * 4))
    assert rounds["acpsgd"] == (("all_reduce", 4.0 * (48 + 288) * 4 / 2),)


def test_rounds_of_shards():
    """Bytes that do not depend on the number of ranks: a step and integers of 8 bits for each of 54 blocks of 256."""
    whole = 54 * (4 + 256)
    for ranks in (2, 3, 6):
        compressed = measure.measure_method(gradzip.BlockFloat(), gradient(), ranks=ranks, repeats=2)
        assert compressed.rounds == (("all_to_all", whole), ("all_gather_partitions", whole))
        assert compressed.nbytes == whole
    spec = "topk:theta=0.9,exchange=scatter_reduce"
    two, four = (measure.measure_method(gradzip.parse(spec), gradient(), ranks=n) for n in (2, 4))
    assert [kind for kind, _ in four.rounds] == ["all_to_all", "all_gather_partitions"]
    assert four.nbytes == pytest.approx(two.nbytes, rel=0.05)  # headers, one for each shard


@pytest.mark.parametrize("error_feedback", [False, True])
def test_error_of_topk_is_what_it_drops(error_feedback):
    grad = gradient()
    dropped = grad.abs().view(-1).sort().values[: round(0.9 * grad.numel())]
    measured = measure.measure_method(gradzip.TopK(theta=0.9, error_feedback=error_feedback), grad)
    assert measured.error == pytest.approx(float(dropped.norm() / grad.norm()), rel=1e-4)


def test_errors_are_those_of_a_first_step():
    for method in (
        gradzip.SignSGD(),
        gradzip.FFTRange(error_feedback=True),
        gradzip.DCTRange(),
        gradzip.DGC(theta=0.9),
    ):
        grad = gradient()
        decoded, _ = gradzip.roundtrip(method, grad)
        expected = float((grad - decoded).norm() / grad.norm())
        assert measure.measure_method(method, grad).error == pytest.approx(expected, rel=1e-3), method
    assert measure.measure_method(gradzip.QSGD(), torch.zeros(64, 64)).error == 0
    # Low-rank methods have found the gradient's span after some steps.
    low_rank = gradient((60, 4)) @ gradient((4, 50))
    assert measure.measure_method(gradzip.ACPSGD(rank=4, min_numel=0), low_rank).error < 1e-3


class Clock:
    """A clock that only moves when told to. It stands for the module `time`."""

    def __init__(self):
        self.wall = self.core = self.thread = 0.0
        self.background = 0.0

    def sleep(self, seconds):
        self.wall += seconds
        self.core += self.background * seconds

    perf_counter = property(lambda self: lambda: self.wall)
    process_time = property(lambda self: lambda: self.core)
    thread_time = property(lambda self: lambda: self.thread)


@pytest.fixture
def clock(monkeypatch):
    """A clock for measurements, on a core of this rank's own."""
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(measure._Probe, "_cores", lambda self: 1.0)
    return clock


class FakeEngine(Engine):
    """p ranks like this one. Collectives take what `link` says, on the fake clock."""

    def __init__(self, clock, link, other=None):
        self.rank, self.size, self.traffic = 0, link.ranks, Traffic(bytes_sent=5)
        self.clock, self.link = clock, link
        self.other = other or (lambda values: values)
        self.largest = 0

    def allgather_bytes(self, data, slot):
        assert data.endswith(b"\n")
        other = json.dumps(self.other(json.loads(data))).encode() + b"\n"
        return [data] + [other] * (self.size - 1)

    def launch(self, collective, slot):
        assert isinstance(collective, (Gather, Mean))
        kind, nbytes = _kind(collective), collective.tensor.nbytes
        self.largest = max(self.largest, nbytes)
        self.traffic.bytes_sent += nbytes
        link = self.link
        self.clock.core += link.operation + link.core_seconds(kind, nbytes)
        end = self.clock.wall + link.seconds(kind, nbytes)

        def result():
            spin = max(0.0, end - self.clock.wall)  # as Horovod waits
            self.clock.wall += spin
            self.clock.core += spin

        return types.SimpleNamespace(send_overflow=lambda: False, result=result)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("bandwidth", [1.25e7, 1.25e8, 1e10])
def test_link_is_found(clock, ranks, bandwidth):
    """Without noise, all parameters are found: the fit is of the same form as the model."""
    true = Link(ranks, bandwidth, 2e-4, operation=1e-4, core_per_byte=2e-10, background=0.05, half=3e-9)
    clock.background = true.background
    engine = FakeEngine(clock, dataclasses.replace(true))
    link = measure.measure_link(engine)
    assert link.ranks == ranks
    # The 4 and 48 bytes of the smallest collectives take their part of the latency.
    assert link.latency == pytest.approx(true.latency, rel=0.02)
    assert link.bandwidth == pytest.approx(true.bandwidth, rel=0.01)
    # Core time is taken over one and a half times the transfer, in which the background takes its share.
    assert link.background == pytest.approx(0.05, rel=1e-6)
    waited = 0.05 * 1.5
    messages = (true.messages("all_reduce") + true.messages("all_gather")) / 2
    assert link.operation == pytest.approx(true.operation + waited * messages * true.latency, rel=0.02)
    assert link.core_per_byte == pytest.approx(true.core_per_byte + waited / bandwidth, rel=0.02)
    # All-reduces of float16 take longer, so the background takes more meanwhile.
    assert link.half == pytest.approx(3e-9 * (1 + waited), rel=0.02)
    assert engine.traffic.bytes_sent == 5
    largest = true.all_reduce(engine.largest)
    # Sizes grow by up to 4, until a transfer has taken long enough.
    assert largest < 4.1 * measure.TRANSFER_SECONDS and clock.wall < 2.2


def test_slowest_rank_counts(clock):
    def slower(values):
        if isinstance(values, list) and len(values) == 6:
            latency, per_byte, *others, _ = values
            return [2 * latency, 3 * per_byte, *others, 0.5]
        return values

    link = measure.measure_link(FakeEngine(clock, Link(2, 1e8, 1e-4), slower))
    assert link.bandwidth == pytest.approx(1e8 / 3, rel=0.01) and link.latency == pytest.approx(2e-4, rel=0.02)
    assert link.background == 0.5


def test_messages_of_larger_transfers_do_not_count_as_bytes(clock):
    """An engine that sends all but the smallest tensors in many messages, as gloo's ring of 16 ranks does."""
    true = Link(16, 1e9, 3e-4, operation=1e-4, core_per_byte=2e-10)
    engine = FakeEngine(clock, true)
    launch = engine.launch

    def with_messages(collective, slot):
        if collective.tensor.nbytes > 1024:
            clock.core += 2e-3
            clock.wall += 0.06
        return launch(collective, slot)

    engine.launch = with_messages
    link = measure.measure_link(engine)
    assert link.bandwidth == pytest.approx(true.bandwidth, rel=0.05)
    assert link.core_per_byte == pytest.approx(true.core_per_byte, rel=0.05)
    assert engine.largest >= 1 << 24 and clock.wall < 2 * measure.LINK_SECONDS


def test_one_size_is_compared_with_the_smallest_transfer(clock):
    link = measure.measure_link(FakeEngine(clock, Link(2, 1e8, 1e-4)), sizes=[1 << 20])
    assert link.bandwidth == pytest.approx(1e8, rel=0.01)


@pytest.mark.parametrize(("cores", "expected"), [(2.0, 0.0), (1.0, 2e-10), (0.5, 4e-10)])
def test_core_time_counts_where_there_is_no_spare_core(monkeypatch, clock, cores, expected):
    monkeypatch.setattr(measure._Probe, "_cores", lambda self: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    link = measure.measure_link(FakeEngine(clock, Link(2, 1e8, 1e-4, core_per_byte=2e-10)))
    assert link.core_per_byte == pytest.approx(expected, rel=0.02, abs=1e-15)


@pytest.mark.parametrize(("ranks", "cores"), [(6, 6), (49, 49), (49, 98), (3, 1)])
def test_shares_of_cores_add_up(monkeypatch, ranks, cores):
    """Whole numbers of cores come out exactly. Six times the float 1 / 6 is less than 1."""
    monkeypatch.setattr(measure.os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    engine = FakeEngine(Clock(), Link(ranks, 1e8, 1e-4))
    assert measure._Probe(engine, torch.device("cpu"))._cores() == Fraction(cores, ranks)


def test_one_rank_is_not_measured():
    engine = FakeEngine(Clock(), Link(1, 1e8, 1e-4))
    assert measure.measure_link(engine).ranks == 1 and engine.largest == 0


@pytest.mark.parametrize(("run", "ranks"), [pytest.param(horovodrun, 2, marks=pytest.mark.long), (torchrun, 3)])
def test_real_jobs(run, ranks, tmp_path):
    links = scenarios(ranks, "measure_worker.py", tmp_path, "link", run=run)["link"]
    assert all(link == links[0] for link in links)
    link = links[0]
    assert link.pop("bytes_sent") == 17
    found = Link(**link)  # checks the ranges
    assert found.ranks == ranks and found.latency > 0 and found.operation > 0
    assert 1e6 < found.bandwidth < 1e12


@pytest.mark.long
@needs_network
def test_shaped_link(tmp_path):
    """A token bucket cannot pass more than its rate, but for one burst of 1 ms."""
    command = [executable(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    worker = Path(__file__).with_name("measure_worker.py")
    job = shaped("100mbit", 2, "--", *command, worker, tmp_path, "link", env=environment(GLOO_SOCKET_IFNAME="lo"))
    assert job.returncode == 0, job.stderr[-2000:]
    link = torch.load(tmp_path / "0.pt")["link"]
    assert 0.5 * 1.25e7 < link["bandwidth"] < 1.05 * 1.25e7


def test_step():
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    layers[1].weight.requires_grad_(False)
    calls = []

    def train():
        calls.append(1)
        model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()

    step = measure_step(model, train, repeats=3)
    assert len(calls) == 5
    assert {layer.name: layer.shape for layer in step.layers} == {
        name: tuple(p.shape) for name, p in model.named_parameters() if name != "1.weight"
    }
    times = [layer.ready for layer in step.layers]
    assert times == sorted(times) and times[0] > 0 and times[-1] <= step.seconds
    assert [layer.name[0] for layer in step.layers] == sorted((layer.name[0] for layer in step.layers), reverse=True)
    train()
    assert not model[0].weight._post_accumulate_grad_hooks


def test_step_without_gradients():
    with pytest.raises(ValueError, match="no parameter gets one gradient a step"):
        measure_step(torch.nn.Linear(2, 2), lambda: None)
