"""Predict a training step by simulating one rank's training thread and link."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .link import Link
from .step import Compressed, Layer, Prediction, Step

# How much front ends join by default: arguments of `predict`.
JOINED: dict[str, dict[str, float]] = {
    "ddp": {"bucket_nbytes": 25 << 20},
    "horovod": {"bucket_nbytes": 25 << 20, "fusion_nbytes": 128 << 20},
}

# Size of DDP's first bucket, so that communication starts early, and of Horovod's last one, so that little is left to
# send after the backward pass.
SMALL_BUCKET_NBYTES = 1 << 20


def cut(sizes: Iterable[int], nbytes: float, *, large_alone: bool) -> list[list[int]]:
    """Split gradients into buckets of at least `nbytes`, as front ends do. Returns the indices of each bucket.

    Args:
        sizes: bytes of each gradient.
        nbytes: size of a bucket. The first one is full at `SMALL_BUCKET_NBYTES`, if that is less. 0 makes one bucket
            for each gradient; infinity makes one bucket of all after the first one.
        large_alone: whether a gradient of `nbytes` or more is a bucket of its own, as with Horovod. DDP adds it to the
            gradients before it.

    >>> cut([1 << 20] * 6, 2 << 20, large_alone=True)
    [[0], [1, 2], [3, 4], [5]]
    >>> cut([1000, 4 << 20, 1000], 2 << 20, large_alone=True), cut([1000, 4 << 20, 1000], 2 << 20, large_alone=False)
    ([[0], [1], [2]], [[0, 1], [2]])
    """
    buckets: list[list[int]] = []
    missing = 0.0  # bytes until the bucket is full
    for number, size in enumerate(sizes):
        if missing <= 0 or (large_alone and size >= nbytes):
            missing = nbytes if buckets else min(nbytes, SMALL_BUCKET_NBYTES)
            buckets.append([])
        buckets[-1].append(number)
        missing -= size
    return buckets


def predict(
    step: Step,
    layers: Sequence[Compressed],
    link: Link,
    *,
    bucket_nbytes: float | None = None,
    fusion_nbytes: float | None = None,
) -> Prediction:
    """Predict a training step by simulation.

    The training thread computes and compresses one gradient after the other. When the last layer of a bucket is
    compressed, the thread starts the bucket's first round. The link carries one collective at a time, in the order in
    which they were started, during the backward pass, and takes core time from it. After the backward pass, the thread
    waits for the results and decodes them, in the same order. Later rounds run for all layers together. The optimizer
    runs last: it is what the step does after its last gradient.

    Not modelled: DDP starts the second round of `BlockFloat` during the backward pass.

    Args:
        layers: the cost of each of the step's layers.
        bucket_nbytes: join the collectives of consecutive layers until their float32 gradients have that many bytes.
            None: one collective for each layer.
        fusion_nbytes: the engine joins collectives of the same kind that wait for the link, up to that many bytes, as
            Horovod does. A layer that needs a single all-reduce is in no bucket then. None: the engine joins none.

    Buckets are those of `cut`. Without fusion they start at the first gradient, as DDP's; with fusion at the last one,
    as Horovod's.

    Raises:
        ValueError: the number of `layers` differs from that of the step, or a gradient is ready after the step's end.
    """
    if len(layers) != len(step.layers):
        raise ValueError(f"predict: got {len(layers)} compressed layers, expected one for each of {len(step.layers)}")
    pairs = sorted(zip(step.layers, layers), key=lambda pair: pair[0].ready)
    first, last = (pairs[0][0].ready, pairs[-1][0].ready) if pairs else (0.0, 0.0)
    if not 0 <= first <= last <= step.seconds:
        raise ValueError(
            f"predict: got gradients that are ready from {first} to {last} s, expected times within the step of "
            f"{step.seconds} s"
        )
    simulation = _Simulation(link, fusion_nbytes or 0.0)
    started: list[tuple[list[_Transfer], list[Compressed]]] = []
    ready = 0.0
    last_of = {bucket[-1]: bucket for bucket in _buckets(pairs, bucket_nbytes, fusion_nbytes)}
    for i, (layer, compressed) in enumerate(pairs):
        simulation.work(layer.ready - ready + compressed.encode)
        ready = layer.ready
        if i in last_of:
            members = [pairs[j][1] for j in last_of[i]]
            started.append((simulation.start(m.rounds[0] for m in members if m.rounds), members))
    for transfers, members in started:
        simulation.wait(transfers)
        simulation.work(sum(m.decode for m in members if len(m.rounds) <= 1))
    for number in itertools.count(1):
        members = [m for m in layers if len(m.rounds) > number]
        if not members:
            break
        simulation.wait(simulation.start(m.rounds[number] for m in members))
        simulation.work(sum(m.decode for m in members if len(m.rounds) == number + 1))
    simulation.work(step.seconds - last)
    compression = sum(m.encode + m.decode for m in layers)
    exposed = max(0.0, simulation.now - step.seconds - compression)  # not below 0 by rounding
    nbytes = sum(link.sent_nbytes(kind, n) for m in layers for kind, n in m.rounds)
    return Prediction(step.seconds + compression + exposed, step.seconds, compression, exposed, nbytes)


def _buckets(
    pairs: Sequence[tuple[Layer, Compressed]], nbytes: float | None, fusion_nbytes: float | None
) -> list[list[int]]:
    """The indices of the layers whose first rounds start together, in ascending order."""
    if nbytes is None:
        return [[i] for i in range(len(pairs))]
    sizes = [4 * layer.numel for layer, _ in pairs]
    if not fusion_nbytes:
        return cut(sizes, nbytes, large_alone=False)
    backwards = cut(reversed(sizes), nbytes, large_alone=True)
    alone = {i for i, (_, compressed) in enumerate(pairs) if _is_one_all_reduce(compressed)}
    waiting = [[i for j in reversed(bucket) if (i := len(pairs) - 1 - j) not in alone] for bucket in backwards]
    return [[i] for i in alone] + [bucket for bucket in waiting if bucket]


def _is_one_all_reduce(compressed: Compressed) -> bool:
    return len(compressed.rounds) == 1 and compressed.rounds[0][0].startswith("all_reduce")


@dataclass(eq=False)
class _Transfer:
    """A collective on the link, or waiting for it."""

    kind: str
    nbytes: float
    done: bool = False


class _Simulation:
    """The training thread and the link of one rank. All ranks do the same at the same time."""

    def __init__(self, link: Link, fusion_nbytes: float) -> None:
        self.now = 0.0  # of the training thread
        self._link = link
        self._fusion_nbytes = fusion_nbytes
        self._background = link.background if link.ranks > 1 else 0.0
        self._waiting: deque[_Transfer] = deque()
        self._running: list[_Transfer] = []  # on the link: one collective, or several that the engine has joined
        self._end = 0.0  # time at which the link is free
        self._taken = 0.0  # share of the core that the running collective takes

    def work(self, seconds: float) -> None:
        """Advance the thread by `seconds` of core time. The link goes on meanwhile."""
        while True:
            speed = (1 - self._background) * (1 - self._taken if self._running else 1)
            if not self._running or seconds <= (self._end - self.now) * speed:
                self.now += seconds / speed if seconds else 0.0
                return
            seconds -= (self._end - self.now) * speed
            self._complete()

    def start(self, collectives: Iterable[tuple[str, float]]) -> list[_Transfer]:
        """Start (kind, bytes) collectives, joined into one of each kind."""
        totals: dict[str, float] = {}
        for kind, nbytes in collectives:
            totals[kind] = totals.get(kind, 0.0) + nbytes
        if self._link.ranks == 1:
            return []
        transfers = [_Transfer(kind, nbytes) for kind, nbytes in totals.items()]
        for transfer in transfers:
            self.work(self._link.operation)
            self._waiting.append(transfer)
            if not self._running:
                self._start_next()
        return transfers

    def wait(self, transfers: Iterable[_Transfer]) -> None:
        """Advance the thread to the end of the transfers."""
        for transfer in transfers:
            while not transfer.done:
                self._complete()

    def _complete(self) -> None:
        """Advance to the end of the running transfers; start the next ones."""
        self.now = self._end
        for transfer in self._running:
            transfer.done = True
        self._running = []
        if self._waiting:
            self._start_next()

    def _start_next(self) -> None:
        first = self._waiting.popleft()
        self._running, nbytes = [first], first.nbytes
        for other in list(self._waiting):
            if other.kind == first.kind and nbytes + other.nbytes <= self._fusion_nbytes:
                self._waiting.remove(other)
                self._running.append(other)
                nbytes += other.nbytes
        core = self._link.core_seconds(first.kind, nbytes)
        seconds = max(self._link.seconds(first.kind, nbytes), core)
        self._taken = core / seconds if seconds else 0.0
        self._end = self.now + seconds
