"""Measure the connection of an engine's ranks."""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from .. import ops
from ..collectives import Gather, Mean
from ..collectives.engine import Engine
from ..cost import Link
from .clock import now

# Bytes of the timed transfers, in growing order. Stop at the first one that takes twice as long as the smallest, and
# TRANSFER_SECONDS longer, or after LINK_SECONDS in all. Many ranks on few cores take as long for the smallest.
SIZES = (*(1 << shift for shift in (16, 18, 20)), *(1 << shift for shift in range(22, 27)))
TRANSFER_SECONDS = 0.05
LINK_SECONDS = 4.0
HALF_NBYTES = 1 << 18  # bytes of the all-reduce of 16-bit numbers


def measure_link(
    engine: Engine, sizes: Sequence[int] = SIZES, repeats: int = 4, device: torch.device | None = None
) -> Link:
    """Measure the connection of an engine's ranks, in about a second; in seconds if messages take milliseconds.

    All ranks must call it at the same point. All get the same link: each number is that of the slowest rank.

    Runs all-reduces and all-gathers of a few bytes, and all-reduces of growing sizes. The fields of the result:

        latency, operation          Times and core times of the smallest transfers. `operation` is 0 on a device.
        bandwidth, core_per_byte    Growth of times and core times from the first of `sizes` on: engines send smaller
                                    transfers in other, and fewer, messages. `core_per_byte` is 0 on a device.
        background                  Core time of the idle process. 0 on a device.
        half                        Extra core time of an all-reduce of float16 over one of float32.

    Core time is that of the process. If this rank has a core more than torch has threads, it is that of the calling
    thread alone. The engine's traffic does not change.

    Args:
        sizes: bytes of the transfers, in growing order.
        repeats: timed transfers of each size, after one that is not timed.
        device: of the tensors. None: the engine's device, or the CPU for an engine without one, such as Horovod's.
    """
    if engine.size == 1:
        return Link(1, math.inf, 0.0)
    traffic = engine.traffic.bytes_sent
    own: torch.device = getattr(engine, "device", torch.device("cpu"))
    probe = _Probe(engine, own if device is None else device)
    background = probe.idle_share()
    start = time.perf_counter()
    small = [probe.point(kind, 0, 3 * repeats) for kind in ("all_reduce", "all_gather")]
    points = []
    for nbytes in sizes:
        points.append(probe.point("all_reduce", nbytes, repeats))
        longer = points[-1].seconds - points[0].seconds
        longer, elapsed = probe.max_over_ranks(
            [longer if longer >= points[0].seconds else 0.0, time.perf_counter() - start]
        )
        if longer >= TRANSFER_SECONDS or elapsed >= LINK_SECONDS:
            break
    link = Link(engine.size, math.inf, 0.0)
    latency = statistics.fmean(point.seconds / link.messages(point.kind) for point in small)
    operation = statistics.fmean(point.core for point in small)
    first, *larger = points if len(points) > 1 else [small[0], *points]
    sent = [link.sent_nbytes(point.kind, point.nbytes - first.nbytes) for point in larger]
    per_byte = _slope(sent, [point.seconds - first.seconds for point in larger])
    core_per_byte = _slope(sent, [point.core - first.core for point in larger])
    whole, halves = (probe.point(kind, HALF_NBYTES, repeats) for kind in ("all_reduce", "all_reduce_half"))
    half = max(0.0, halves.process - whole.process) / link.sent_nbytes(whole.kind, whole.nbytes)
    latency, per_byte, operation, core_per_byte, half, background = probe.max_over_ranks(
        [latency, max(per_byte, 1e-15), operation, core_per_byte, half, background]
    )
    engine.traffic.bytes_sent = traffic
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
        self._numbers = itertools.count()
        cores = self._cores()
        spare = cores - torch.get_num_threads()
        self._clock = time.thread_time if spare >= 1 else time.process_time
        # With less than a core for each rank, core time takes longer; with a spare one, other threads cost nothing.
        self._weight = 0.0 if self.device.type != "cpu" else 1 / min(1.0, float(cores))

    def _slot(self) -> str:
        return f"gradzip.measure.{next(self._numbers)}"

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        return self.engine.max_over_ranks(values, self._slot())

    def _cores(self) -> Fraction:
        """This rank's share of the cores that it may use. Ranks on one machine divide the cores that they share.

        Exact: twelve sixths as floats are not always two cores.
        """
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        boot = Path("/proc/sys/kernel/random/boot_id")
        machine = boot.read_text().strip() if boot.is_file() else socket.gethostname()
        lines = self.engine.allgather_bytes(json.dumps([machine, list(allowed)]).encode() + b"\n", self._slot())
        neighbours = [set(cores) for host, cores in map(json.loads, lines) if host == machine]
        shares = (Fraction(1, sum(core in cores for cores in neighbours)) for core in allowed)
        return sum(shares, Fraction(0))

    def idle_share(self) -> float:
        """Share of a core that this process takes while its main thread sleeps."""

        def once() -> float:
            wall, core = time.perf_counter(), self._clock()
            time.sleep(0.04)
            return (self._clock() - core) / (time.perf_counter() - wall)

        return self._weight * statistics.median(once() for _ in range(3))

    def point(self, kind: str, nbytes: int, repeats: int) -> _Point:
        """Time collectives of one size. 0 bytes: of one element, or of an empty payload."""
        slot = f"gradzip.measure.{kind}.{nbytes}"
        tensor: Tensor
        if kind != "all_gather":
            dtype = torch.float16 if kind == "all_reduce_half" else torch.float32
            tensor = torch.ones(max(1, nbytes // dtype.itemsize), dtype=dtype, device=self.device)
        else:
            body = ops.new_payload(max(0, nbytes - ops.HEADER_NBYTES), self.device)
            tensor = ops.seal_payloads([ops.Seal(body, 0)], method=0, digest=0)[0]
        collective = Gather(tensor) if kind == "all_gather" else Mean(tensor)

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
        return _Point(kind, tensor.nbytes, wall, _lower_quartile(core), _lower_quartile(process))


def _lower_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least-squares slope of a line through the origin, at least 0."""
    return max(0.0, sum(x * y for x, y in zip(xs, ys)) / sum(x * x for x in xs))
