"""Prediction of a training step, by a simulation of one rank's training thread and link."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .buckets import cut
from .link import Link
from .step import Compressed, Layer, Prediction, Step

# What front ends join by default, as arguments of `predict`.
JOINED: dict[str, dict[str, float]] = {
    "ddp": {"bucket_nbytes": 25 << 20},
    "horovod": {"bucket_nbytes": 25 << 20, "fusion_nbytes": 128 << 20},
}


def predict(
    step: Step,
    layers: Sequence[Compressed],
    link: Link,
    *,
    bucket_nbytes: float | None = None,
    fusion_nbytes: float | None = None,
) -> Prediction:
    """Predict a training step by simulation.

    The training thread computes gradients and compresses them, one after the other. It starts the first round of a
    bucket when its last layer is compressed. The link carries collectives in the order in which they start, one at a
    time, while the backward pass goes on, and takes core time from it. After the backward pass, the thread decodes
    results in the same order, and waits where they are not there. Later rounds follow, for all layers together, as both
    front ends run them. (DDP gathers `BlockFloat`'s shards earlier, which is not predicted.) The optimizer, which is
    what the step does after its last gradient, comes last.

    Args:
        layers: what happens to each of the step's layers.
        bucket_nbytes: join the collectives of consecutive layers until their float32 gradients have that many bytes.
            None: one collective for each layer.
        fusion_nbytes: the engine joins equal kinds of collectives that wait for the link at the same time, up to that
            many bytes, as Horovod does. Layers that need a single all-reduce are in no bucket then (those of ACP-SGD
            are, but that they are joined is the same). None: it does not join them.

    Buckets are those of `cut`: without fusion, as DDP's, from the first gradient on; with fusion, as Horovod's, from
    the last one backwards.

    Raises:
        ValueError: `layers` has another length than the step, or the step ends before a gradient is ready.
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
    """The numbers of the layers whose first rounds are started together, in ascending order."""
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
    """A collective that was started."""

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
        self._running: list[_Transfer] = []  # one collective, maybe joined from several
        self._end = 0.0  # of what is running
        self._taken = 0.0  # share of the core that it takes

    def work(self, seconds: float) -> None:
        """Let the thread work, in seconds of a core of its own, while the link goes on."""
        while True:
            speed = (1 - self._background) * (1 - self._taken if self._running else 1)
            if not self._running or seconds <= (self._end - self.now) * speed:
                self.now += seconds / speed if seconds else 0.0
                return
            seconds -= (self._end - self.now) * speed
            self._complete()

    def start(self, collectives: Iterable[tuple[str, float]]) -> list[_Transfer]:
        """Start collectives, joined into one of each kind."""
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
        """Let the thread wait until transfers are done."""
        for transfer in transfers:
            while not transfer.done:
                self._complete()

    def _complete(self) -> None:
        """Go to the end of what is running, and start what waits."""
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
