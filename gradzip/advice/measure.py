"""Measure what the cost model needs: the cost of methods on gradients and layers, and the link of a job."""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllToAll, Collective, Gather, Mean, RingSum, ToHost
from ..collectives.engine import Engine
from ..collectives.routines import Done, advance
from ..collectives.traffic import Traffic, sent_nbytes
from ..engines import local
from ..memory.streams import no_autocast
from ..methods.base.compressor import Compressor
from ..methods.base.group import averaged, plan_groups
from ..ops import tensors as ops
from .cost import Compressed, Layer, Link

Clock = Callable[[torch.device], float]  # waits for the device, and returns seconds


def now(device: torch.device) -> float:
    """Wait for the device, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


Moment = float | torch.cuda.Event


def moment(device: torch.device) -> Moment:
    """Mark a point in the work of a device: what the current stream has to do now, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    """Seconds between two moments of a device. Waits until it has reached the second one."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    end.synchronize()
    return start.elapsed_time(end) / 1e3


# --- methods


@dataclass(frozen=True)
class Measurement(Compressed):
    """The cost of a method on one gradient, the least of the timed steps, and its error.

    error: |x - decoded| / |x| of one step without a residual (α of HPDC 2020). 0 for a gradient of zeros, and for one
        that bypasses compression.
    """

    error: float = 0.0


def measure_method(
    compressor: Compressor, grad: Tensor, name: str = "gradient", ranks: int = 2, repeats: int = 3
) -> Measurement:
    """`measure_gradients` for one gradient. Its state stays in the caches, so times are a lower bound."""
    return measure_gradients(compressor, {name: grad}, ranks, repeats)[name]


def measure_gradients(
    compressor: Compressor, grads: Mapping[str, Tensor], ranks: int = 2, repeats: int = 3, clock: Clock = now
) -> dict[str, Measurement]:
    """Measure steps of a method on the gradients of a model, as one of `ranks` ranks that all have these gradients.

    A step compresses all gradients, one after the other. The rank encodes once, and decodes the payloads of all ranks.
    For `asymmetric` methods, the work of all ranks is done, and that of rank 0 is timed. The first step is not timed.
    `Phases` stays in its first phase. On a CUDA device, each part is timed until the device has done its work.

    The method is cloned: its states are neither used nor changed. Bytes and errors are deterministic for a seed.

    Args:
        grads: of any shapes and floating-point dtypes, by parameter name; not changed.
        ranks: the world size.
        repeats: steps to time, rounded up to an even number, because steps of methods such as ACP-SGD alternate.
        clock: seconds so far, once a device has done its work. One of CPU time does not count what other processes
            take from the cores.
    """
    methods = {name: compressor.method_for(name, grad.shape) for name, grad in grads.items()}
    simulate_all = any(method.asymmetric for method in methods.values())
    group = [compressor.clone() for _ in range(ranks if simulate_all else 1)]
    steps: dict[str, list[Compressed]] = {name: [] for name in grads}
    for _ in range(1 + 2 * math.ceil(repeats / 2)):
        for name, grad in grads.items():
            steps[name].append(_step(group, grad, name, ranks, clock)[0])
    for part in (part for member in group for part in member.parts):
        part.memory.drop_rank_local()
    measured = {}
    for name, grad in grads.items():
        decoded = grad if methods[name].bypasses(grad) else _step(group, grad, name, ranks, clock)[1]
        norm = float(torch.linalg.vector_norm(grad.double()))
        error = float(torch.linalg.vector_norm(grad.double() - decoded.double())) / norm if norm else 0.0
        measured[name] = Measurement(*_mean_of(steps[name][1:]), error)
    return measured


def errors_of(compressor: Compressor, grads: Mapping[str, Tensor]) -> Tensor:
    """The errors |x - decoded| / |x| of the gradients of a bucket, as numbers on their device. Does not wait for it.

    A step averages them together, as in training, as one rank, and without a residual. Three steps come before it, for
    factors of low rank. The method is cloned.

    Shape: one for each gradient, float64. 0 for a gradient of zeros, NaN for one that is not finite.
    """
    own = compressor.clone()
    for remaining in (3, 2, 1, 0):
        if not remaining:
            for part in own.parts:
                part.memory.drop_rank_local()
        decoded = [grad.clone() for grad in grads.values()]
        for group in plan_groups(own, decoded, list(grads)):
            routine, result = group.average([decoded[i] for i in group.indices]), None
            with no_autocast(group.device):
                while not isinstance(item := advance(routine, result), Done):
                    (result,) = local.run([item])
                group.end_step(skipped=not group.finite)
    norms, errors = (
        torch.stack([torch.linalg.vector_norm(x) for x in of])
        for of in (
            (grad.double() for grad in grads.values()),
            (grad.double() - average.double() for grad, average in zip(grads.values(), decoded)),
        )
    )
    return torch.where(norms == 0, norms, errors / norms)


def _step(group: Sequence[Compressor], grad: Tensor, name: str, ranks: int, clock: Clock) -> tuple[Compressed, Tensor]:
    """One step of one gradient. Returns its cost on rank 0, and the average.

    group: of all ranks, or of rank 0 alone, which then gets its own contributions in place of the others'.
    """
    grads = [grad.clone() for _ in group]
    routines = [averaged(member, own, name, rank, ranks) for rank, (member, own) in enumerate(zip(group, grads))]
    rounds: list[tuple[str, float]] = []
    seconds: list[float] = []  # before, between and after the rounds
    results: list[Any] = [None] * len(group)
    with no_autocast(grad.device):
        while True:
            start = clock(grad.device)
            first = advance(routines[0], results[0])
            seconds.append(clock(grad.device) - start)
            others = [advance(routine, result) for routine, result in zip(routines[1:], results[1:])]
            if isinstance(first, Done):
                return Compressed(tuple(rounds), seconds[0], sum(seconds[1:])), grads[0]
            if not isinstance(first, ToHost):
                rounds.append(_round(first, rounds, ranks))
            start = clock(grad.device)
            results = local.run([first, *others] if len(group) == ranks else [first] * ranks)
            if isinstance(first, RingSum):  # compresses while it communicates
                seconds.append((clock(grad.device) - start) / len(group))


def _round(collective: Collective, before: Sequence[tuple[str, float]], ranks: int) -> tuple[str, float]:
    """The (kind, bytes) of a collective for the cost model, given the earlier rounds."""
    kind, nbytes = _kind(collective), float(sent_nbytes(collective))
    if kind == "all_gather" and any(kind == "all_to_all" for kind, _ in before):  # each rank sends its own partition
        return "all_gather_partitions", nbytes * ranks
    return kind, nbytes


def _kind(collective: Collective) -> str:
    """The kind of a collective for the cost model. A broadcast takes at most as long as an all-reduce."""
    if isinstance(collective, (Gather, AllToAll)):
        return "all_gather" if isinstance(collective, Gather) else "all_to_all"
    dtype = collective.dtype if isinstance(collective, RingSum) else collective.tensor.dtype
    return "all_reduce_half" if dtype.itemsize == 2 else "all_reduce"


def _mean_of(steps: Sequence[Compressed]) -> tuple[tuple[tuple[str, float], ...], float, float]:
    """The rounds and times of a layer from several steps: the mean of even and odd ones, which differ in ACP-SGD.

    Each of the two counts with its least times and its mean bytes.
    """
    last = [kind for kind, _ in steps[-1].rounds]
    if any([kind for kind, _ in step.rounds] != last for step in steps):
        steps = [steps[-1]] * 2  # the rounds have changed, as after a warm-up

    def mean(of: Callable[[Sequence[float]], float], values: Sequence[float]) -> float:
        return statistics.fmean([of(values[0::2]), of(values[1::2])])

    sizes = zip(*([nbytes for _, nbytes in step.rounds] for step in steps))
    rounds = tuple((kind, mean(statistics.fmean, nbytes)) for kind, nbytes in zip(last, sizes))
    return rounds, mean(min, [step.encode for step in steps]), mean(min, [step.decode for step in steps])


# --- the layers of a model

# Larger layers are measured at a smaller size, and at a smaller one yet if only their bytes count.
LARGEST = 1 << 21
LARGEST_BYTES = 1 << 16


@dataclass(frozen=True)
class LayerCost(Compressed):
    """The cost of a method on one layer with two ranks. decode_rank: decoding seconds for each further rank."""

    decode_rank: float = 0.0

    def among(self, ranks: int) -> Compressed:
        """The cost in a group of that many ranks."""
        return Compressed(self.rounds, self.encode, self.decode + self.decode_rank * max(0, ranks - 2))


def measure_layers(
    compressor: Compressor, layers: Sequence[Layer], device: torch.device, clock: Clock | None = now
) -> list[LayerCost]:
    """Measure a method on gradients of normally distributed numbers, one for each shape among the layers.

    A layer of more than `LARGEST` elements is measured at two smaller sizes. Times are extrapolated in proportion to
    the number of elements, and bytes by their growth between the two sizes. clock: as for `measure_gradients`; None:
    bytes alone, without times.
    """
    timed, largest = clock is not None, LARGEST_BYTES if clock is None else LARGEST
    clock = clock or (lambda device: 0.0)
    names: dict[tuple[Any, ...], str] = {}  # of a layer of each kind
    keys = []
    for layer in layers:
        method = compressor.method_for(layer.name, torch.Size(layer.shape))
        keys.append((method.bypasses(torch.empty(layer.shape, device="meta")), id(method), layer.shape))
        names.setdefault(keys[-1], layer.name)
    shapes = {name: key[-1] for key, name in names.items() if not key[0]}
    large = {name: _gradient(shape, device, largest) for name, shape in shapes.items()}
    two = measure_gradients(compressor, large, 2, 4 if timed else 2, clock)
    gathered = {name: g for name, g in large.items() if any(kind == "all_gather" for kind, _ in two[name].rounds)}
    four = measure_gradients(compressor, gathered, 4, 2, clock) if timed else {}
    shrunk = {name: _gradient(s, device, largest, 1) for name, s in shapes.items() if math.prod(s) > largest}
    small = measure_gradients(compressor, shrunk, 2, 2, clock)
    found: dict[str, LayerCost] = {}
    for (bypassed, _, shape), name in names.items():
        numel = math.prod(shape)
        if bypassed:
            found[name] = LayerCost((("all_reduce", 4.0 * numel),))
            continue
        rounds, times = two[name].rounds, numel / large[name].numel()
        if name in small:
            numels = shrunk[name].numel(), large[name].numel(), numel
            pairs = zip(small[name].rounds, rounds)
            rounds = tuple((kind, _extrapolated(numels, less, nbytes)) for (_, less), (kind, nbytes) in pairs)
        rank = max(0.0, four[name].decode - two[name].decode) / 2 if name in four else 0.0
        found[name] = LayerCost(rounds, two[name].encode * times, two[name].decode * times, rank * times)
    return [found[names[key]] for key in keys]


def _extrapolated(numels: tuple[int, int, int], small: float, large: float) -> float:
    """Bytes at `numels[2]` elements, from those at `numels[0]` and `numels[1]`.

    a + b n, or a + b sqrt(n) if they grow as slowly as those of low-rank factors.
    """
    power = 1.0 if large / small > (numels[1] / numels[0]) ** 0.75 else 0.5
    x, y, z = (n**power for n in numels)
    return large + (large - small) * (z - y) / (y - x)


def _gradient(shape: tuple[int, ...], device: torch.device, largest: int, more: int = 0) -> Tensor:
    """Random numbers. Rows and columns are halved down to `largest` elements, and then `more` times; kernels stay."""
    halvings = max(0, math.ceil(math.log2(math.prod(shape) / largest) / 2)) + more
    rows, columns = (max(1, n >> halvings) for n in shape[:2])
    generator = torch.Generator().manual_seed(0)
    return torch.randn((rows, columns, *shape[2:]), generator=generator, device="cpu").to(device)


# --- the link

# Bytes of the timed transfers, in growing order. Stop at the first one that takes twice as long as the smallest, and
# TRANSFER_SECONDS longer, or after LINK_SECONDS in all. Many ranks on few cores take as long for the smallest.
SIZES = (*(1 << shift for shift in (16, 18, 20)), *(1 << shift for shift in range(22, 27)))
TRANSFER_SECONDS = 0.05
LINK_SECONDS = 4.0
REPEATS = 4  # timed transfers of each size, after one that is not timed
SLOT = "gradzip.measure"
HALF_NBYTES = 1 << 18  # bytes of the all-reduce of 16-bit numbers


def measure_link(engine: Engine, sizes: Sequence[int] = SIZES) -> Link:
    """Measure the connection of an engine's ranks, in about a second; in seconds if messages take milliseconds.

    All ranks must call it at the same point. All get the same link: each number is that of the slowest rank.

    Runs all-reduces and all-gathers of a few bytes, and all-reduces of growing sizes. The fields of the result:

        latency, operation          Times and core times of the smallest transfers. `operation` is 0 on a device.
        bandwidth, core_per_byte    Growth of times and core times from the first of `sizes` on: engines send smaller
                                    transfers in other, and fewer, messages. `core_per_byte` is 0 on a device.
        background                  Core time of the idle process. 0 on a device.
        half                        Extra core time of an all-reduce of float16 over one of float32.

    Core time is that of the process. If this rank has a core more than torch has threads, it is that of the calling
    thread alone. The engine's traffic does not change. Tensors are on the engine's device, or on the CPU for an engine
    without one, such as Horovod's.

    Args:
        sizes: bytes of the transfers, in growing order.
    """
    if engine.size == 1:
        return Link(1, math.inf, 0.0)
    counted, engine.traffic = engine.traffic, Traffic()
    probe = _Probe(engine, getattr(engine, "device", torch.device("cpu")))
    background = probe.idle_share()
    start = time.perf_counter()
    small = [probe.point(kind, 0, 3 * REPEATS) for kind in ("all_reduce", "all_gather")]
    points = []
    for nbytes in sizes:
        points.append(probe.point("all_reduce", nbytes, REPEATS))
        longer = points[-1].seconds - points[0].seconds
        longer = longer if longer >= points[0].seconds else 0.0
        longer, elapsed = engine.max_over_ranks([longer, time.perf_counter() - start], SLOT)
        if longer >= TRANSFER_SECONDS or elapsed >= LINK_SECONDS:
            break
    link = Link(engine.size, math.inf, 0.0)
    latency = statistics.fmean(point.seconds / link.messages(point.kind) for point in small)
    operation = statistics.fmean(point.core for point in small)
    first, *larger = points if len(points) > 1 else [small[0], *points]
    sent = [link.sent_nbytes(point.kind, point.nbytes - first.nbytes) for point in larger]
    per_byte = _slope(sent, [point.seconds - first.seconds for point in larger])
    core_per_byte = _slope(sent, [point.core - first.core for point in larger])
    whole, halves = (probe.point(kind, HALF_NBYTES, REPEATS) for kind in ("all_reduce", "all_reduce_half"))
    half = max(0.0, halves.process - whole.process) / link.sent_nbytes(whole.kind, whole.nbytes)
    latency, per_byte, operation, core_per_byte, half, background = engine.max_over_ranks(
        [latency, max(per_byte, 1e-15), operation, core_per_byte, half, background], SLOT
    )
    engine.traffic = counted
    return Link(engine.size, 1 / per_byte, latency, operation, core_per_byte, min(background, 0.95), half)


@dataclass(frozen=True)
class _Point:
    """Lower quartiles of the times of some collectives of `nbytes`, in seconds.

    seconds: wall time. core: core time that the training thread loses. process: core time of all threads.
    """

    kind: str
    nbytes: int
    seconds: float
    core: float
    process: float


class _Probe:
    """Runs and times collectives of one engine."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        cores = self._cores()
        spare = cores - torch.get_num_threads()
        self._clock = time.thread_time if spare >= 1 else time.process_time
        # With less than a core for each rank, core time takes longer; with a spare one, other threads cost nothing.
        self._weight = 0.0 if self.device.type != "cpu" else 1 / min(1.0, float(cores))

    def _cores(self) -> Fraction:
        """This rank's share of the cores that it may use. Ranks on one machine divide the cores that they share.

        Exact: twelve sixths as floats are not always two cores.
        """
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        boot = Path("/proc/sys/kernel/random/boot_id")
        machine = boot.read_text().strip() if boot.is_file() else socket.gethostname()
        lines = self.engine.allgather_bytes(json.dumps([machine, list(allowed)]).encode() + b"\n", SLOT)
        ranks = Counter(core for host, cores in map(json.loads, lines) if host == machine for core in cores)
        return sum((Fraction(1, ranks[core]) for core in allowed), Fraction(0))

    def idle_share(self) -> float:
        """Share of a core that this process takes while its main thread sleeps."""

        def once() -> float:
            wall, core = time.perf_counter(), self._clock()
            time.sleep(0.04)
            return (self._clock() - core) / (time.perf_counter() - wall)

        return self._weight * statistics.median(once() for _ in range(3))

    def point(self, kind: str, nbytes: int, repeats: int) -> _Point:
        """Time collectives of one size. 0 bytes: of one element. An all-gather is one of empty payloads."""
        slot = f"{SLOT}.{kind}.{nbytes}"
        collective: Gather | Mean
        if kind == "all_gather":
            empty = ops.Seal(ops.new_payload(0, self.device), 0)
            collective = Gather(ops.seal_payloads([empty], method=0, digest=0)[0])
        else:
            dtype = torch.float16 if kind == "all_reduce_half" else torch.float32
            collective = Mean(torch.ones(max(1, nbytes // dtype.itemsize), dtype=dtype, device=self.device))

        def seconds() -> float:
            start = now(self.device)
            self.engine.run(collective, slot)
            return now(self.device) - start

        def core_seconds(pause: float) -> tuple[float, float]:
            start, process = self._clock(), time.process_time()
            pending = self.engine.launch(collective, slot)
            time.sleep(pause)  # Horovod waits in a busy loop, whose core time is not that of the transfer
            pending.send_overflow()
            pending.result()
            return self._weight * (self._clock() - start), time.process_time() - process

        seconds()
        wall = _lower_quartile([seconds() for _ in range(repeats)])
        core, process = zip(*(core_seconds(1.5 * wall) for _ in range(math.ceil(repeats / 2))))
        return _Point(kind, collective.tensor.nbytes, wall, _lower_quartile(core), _lower_quartile(process))


def _lower_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least-squares slope of a line through the origin, at least 0."""
    return max(0.0, sum(x * y for x, y in zip(xs, ys)) / sum(x * x for x in xs))
