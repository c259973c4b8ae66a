"""A cost model of a training step with compressed gradients: does compression pay, and which method is fastest?

All times are in seconds, all sizes in bytes. The model is pure arithmetic, and deterministic. It extends equations (1)
to (4) of Wang et al., FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks, HPDC
2020, section 3.3, by

* the costs of collectives in Table II of Zhang et al., Evaluation and Optimization of Gradient Compression for
  Distributed Deep Learning, ICDCS 2023;
* latency;
* the overlap of communication with the backward pass.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..collectives.cost import JOINED, SMALL_BUCKET_NBYTES, Link, cut

__all__ = [
    "JOINED", "SMALL_BUCKET_NBYTES", "Compressed", "Exchange", "Layer", "Link", "Prediction", "Sharded", "Step",
    "between_nodes", "compression_cost", "cut", "exchange", "minimal_ratio", "predict", "predict_sharded",
]  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One parameter. ready: seconds from the start of the step until its gradient is computed."""

    name: str
    shape: tuple[int, ...]
    ready: float

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Step:
    """A training step without communication.

    layers: in the order in which the backward pass produces their gradients.
    seconds: of the whole step: forward and backward pass, optimizer.
    """

    layers: tuple[Layer, ...]
    seconds: float


# An all-reduce is an all-to-all and an all-gather of partitions.
_HALF_ALL_REDUCES = ("all_to_all", "all_gather_partitions")


@dataclass(frozen=True)
class Compressed:
    """The cost of a method on one layer.

    rounds: (kind, bytes) of the consecutive collectives: arguments of `Link.seconds`.
    encode: seconds before the first round.
    decode: seconds between rounds, and after the last one for the payloads of all ranks.
    """

    rounds: tuple[tuple[str, float], ...]
    encode: float = 0.0
    decode: float = 0.0

    @property
    def nbytes(self) -> float:
        """Bytes of all rounds, comparable with those of an all-reduce. Those within nodes do not count."""
        return sum(
            nbytes / 2 if kind.endswith(_HALF_ALL_REDUCES) else nbytes
            for kind, nbytes in self.rounds
            if not kind.startswith("node ")
        )

    @property
    def exchanges_partitions(self) -> bool:
        """Whether the first of several rounds is an all-to-all."""
        return len(self.rounds) > 1 and self.rounds[0][0].endswith("all_to_all")


@dataclass(frozen=True)
class Prediction:
    """The time of a training step with communication: seconds = compute + compression + exposed.

    exposed: time that communication adds, by waiting and by the core time of collectives.
    nbytes: bytes that one rank sends.
    """

    seconds: float
    compute: float
    compression: float
    exposed: float
    nbytes: float


def between_nodes(chunk: Compressed, numel: int, per_node: int) -> Compressed:
    """The cost of `Hierarchical` on a layer.

    The ranks of a node exchange chunks of the gradient, and gather their averages, in float32. Peers average one chunk.

    Args:
        chunk: the cost of its method on one of the `per_node` chunks, among the nodes.
        numel: elements of the layer.
    """
    between = tuple((f"peers {kind}", nbytes) for kind, nbytes in chunk.rounds)
    rounds = (("node all_to_all", 4.0 * numel), *between, ("node all_gather_partitions", 4.0 * numel))
    return Compressed(rounds, chunk.encode, chunk.decode)


# --- a step, by simulation of one rank's training thread and link


def joined(front_end: str, stock: bool) -> dict[str, Any]:
    """What a front end joins by default, and whether its gathers follow: arguments of `predict`.

    front_end: "horovod" or "ddp". stock: whether it runs without gradzip. Horovod has no buckets then.
    """
    if front_end == "ddp":
        return JOINED[front_end] | {"follows": True}
    return JOINED[front_end] | ({"bucket_nbytes": 0.0} if stock else {})


def predict(
    step: Step,
    layers: Sequence[Compressed],
    link: Link,
    *,
    bucket_nbytes: float = 0.0,
    fusion_nbytes: float = 0.0,
    follows: bool = False,
) -> Prediction:
    """Predict a training step by simulation.

    The training thread computes and compresses one gradient after the other. When the last layer of a bucket is
    compressed, the thread starts the bucket's first round. The link carries one collective at a time, in the order in
    which they were started, during the backward pass, and takes core time from it. After the backward pass, the thread
    waits for the results and decodes them, in the same order. Later rounds run for all layers together. The optimizer
    runs last: it is what the step does after its last gradient.

    Args:
        layers: the cost of each of the step's layers.
        bucket_nbytes: join the collectives of consecutive layers until their float32 gradients have that many bytes.
            0: one collective for each layer.
        fusion_nbytes: the engine joins collectives of the same kind that wait for the link, up to that many bytes, as
            Horovod does. 0: the engine joins none.
        follows: whether the second round of a bucket that exchanges partitions starts with the next bucket, as with
            DDP. The thread waits for the partitions first.

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
    simulation = _Simulation(link, fusion_nbytes)
    started: list[tuple[list[_Transfer], list[Compressed]]] = []  # transfers, and what is decoded after them
    later: list[tuple[Compressed, int]] = []  # and the number of its first round that runs for all together
    ready = 0.0
    last_bucket: tuple[list[_Transfer], list[Compressed]] = ([], [])

    def end_bucket(transfers: list[_Transfer], members: list[Compressed]) -> None:
        """Start the second rounds of a bucket, if they follow."""
        following = [m for m in members if follows and m.exchanges_partitions]
        if following:
            simulation.wait(transfers)
            second = simulation.start(m.rounds[1] for m in following)
            started.append((second, [m for m in following if len(m.rounds) == 2]))
        later.extend((m, 2 if follows and m.exchanges_partitions else 1) for m in members)

    for bucket in _buckets(pairs, bucket_nbytes, fusion_nbytes):
        for layer, compressed in bucket:
            simulation.work(layer.ready - ready + compressed.encode)
            ready = layer.ready
        members = [compressed for _, compressed in bucket]
        transfers = simulation.start(m.rounds[0] for m in members if m.rounds)
        started.append((transfers, [m for m in members if len(m.rounds) <= 1]))
        end_bucket(*last_bucket)
        last_bucket = transfers, members
    end_bucket(*last_bucket)
    for transfers, members in started:
        simulation.wait(transfers)
        simulation.work(sum(m.decode for m in members))
    for number in range(1, max((len(m.rounds) for m in layers), default=0)):
        members = [m for m, first in later if first <= number < len(m.rounds)]
        simulation.wait(simulation.start(m.rounds[number] for m in members))
        simulation.work(sum(m.decode for m in members if len(m.rounds) == number + 1))
    simulation.work(step.seconds - last)
    compression = sum(m.encode + m.decode for m in layers)
    exposed = max(0.0, simulation.now - step.seconds - compression)  # not below 0 by rounding
    nbytes = sum(link.sent_nbytes(kind, n) for m in layers for kind, n in m.rounds)
    return Prediction(step.seconds + compression + exposed, step.seconds, compression, exposed, nbytes)


def _buckets(
    pairs: Sequence[tuple[Layer, Compressed]], nbytes: float, fusion_nbytes: float
) -> list[list[tuple[Layer, Compressed]]]:
    """The layers whose first rounds start together, in the order in which they are ready."""
    sizes = [4 * layer.numel for layer, _ in pairs]
    if not fusion_nbytes:
        return [[pairs[i] for i in bucket] for bucket in cut(sizes, nbytes, large_alone=False)]
    backwards = cut(reversed(sizes), nbytes, large_alone=True)
    return [[pairs[-1 - i] for i in reversed(bucket)] for bucket in reversed(backwards)]


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


# --- a step of FSDP2


@dataclass(frozen=True)
class Sharded:
    """What FSDP2 sends in a step, for each parameter, and what encoding and decoding take.

    gather: bytes that an all-gather has of the parameter in the forward pass. regather: in the backward pass; 0 if the
        forward pass's is kept.
    scatter: (kind, bytes of its gradient) of the consecutive collectives: FSDP's own reduce-scatter, which adds on the
        way; or an all-to-all of encoded gradients, after one within nodes with `Hierarchical`.
    seconds: to encode and decode, for each parameter.
    """

    gather: float
    regather: float
    scatter: tuple[tuple[str, float], ...]
    seconds: float = 0.0


def predict_sharded(step: Step, sharded: Sharded, link: Link, modules: int = 24, overlaps: bool = True) -> Prediction:
    """Predict a step of FSDP2 over all ranks of a link, whose modules are alike.

    While a module computes, the next one's parameters are gathered, and the last one's gradients reduced. So each pass
    takes as long as the slower one of computation and communication, and one module's share of the other. The forward
    pass is a third of the step. Bytes of collectives within nodes do not count.

    Args:
        modules: that are sharded on their own, as the blocks of a transformer.
        overlaps: whether FSDP2 communicates while it computes: it does on a GPU, and waits on a CPU.
    """
    parameters = sum(layer.numel for layer in step.layers)

    def seconds(*collectives: tuple[str, float]) -> float:
        at_once = (link.seconds(kind, n * parameters / modules) + link.operation for kind, n in collectives if n)
        return modules * sum(at_once)

    gathers = [("all_gather_partitions", n) for n in (sharded.gather, sharded.regather)]
    gather, regather = map(seconds, gathers)
    scatter = seconds(*sharded.scatter)
    codec = sharded.seconds * parameters
    forward, backward = step.seconds / 3, 2 * step.seconds / 3

    def slower(computation: float, communication: float) -> float:
        shown = 1 / modules if overlaps else 1.0  # of the faster one
        return max(computation, communication) + shown * min(computation, communication)

    whole = slower(forward, gather) + slower(backward, regather + scatter)
    crossing = [(kind, n) for kind, n in (*gathers, *sharded.scatter) if not kind.startswith("node ")]
    sent = parameters * sum(link.sent_nbytes(kind, n) for kind, n in crossing)
    return Prediction(whole + codec, step.seconds, codec, whole - step.seconds, sent)


# --- local steps: ranks train alone for some steps between two exchanges, as with `gradzip.outer.LocalSteps`


@dataclass(frozen=True)
class Exchange:
    """An exchange of parameter differences.

    step_seconds: of a training step without communication.
    seconds: of the exchange: compression, and collectives that nothing hides.
    nbytes: bytes that one rank sends in it.
    """

    step_seconds: float
    seconds: float
    nbytes: float

    def every(self, share: float = 0.9) -> int:
        """The least number of steps between two exchanges at which computation is `share` of the time.

        Raises:
            ValueError: `share` is not in (0, 1).

        >>> Exchange(step_seconds=0.1, seconds=1.0, nbytes=1e8).every(0.9)
        90
        """
        if not 0 < share < 1:
            raise ValueError(f"Exchange.every: got share = {share!r}, expected a number in (0, 1)")
        # Rounding must not add a step.
        return max(1, math.ceil(share / (1 - share) * self.seconds / self.step_seconds * (1 - 1e-12)))

    @property
    def hidden_by(self) -> int:
        """The least number of steps that take as long as the exchange: as many hide one in the background."""
        return max(1, math.ceil(self.seconds / self.step_seconds))


def exchange(step: Step, layers: Sequence[Compressed], link: Link) -> Exchange:
    """Predict an exchange of the differences of all layers, with one collective of each kind of each round.

    Args:
        layers: the cost of each of the step's layers; a difference has the shape of a gradient.

    Raises:
        ValueError: the number of `layers` differs from that of the step, or a step takes no time.
    """
    if len(layers) != len(step.layers) or not step.seconds > 0:
        raise ValueError(
            f"exchange: got {len(layers)} compressed layers and a step of {step.seconds} s, expected one for each of "
            f"{len(step.layers)} and a step > 0 s"
        )
    sizes: Counter[tuple[int, str]] = Counter()
    for layer in layers:
        for number, (kind, nbytes) in enumerate(layer.rounds):
            sizes[number, kind] += nbytes  # type: ignore[assignment]
    seconds = sum(layer.encode + layer.decode for layer in layers)
    if link.ranks > 1:
        seconds += sum(link.operation + link.seconds(kind, nbytes) for (_, kind), nbytes in sizes.items())
    return Exchange(step.seconds, seconds, sum(link.sent_nbytes(kind, n) for (_, kind), n in sizes.items()))


# --- the compression ratio above which compression pays, without overlap


def compression_cost(
    nbytes: float,
    *,
    conversion: float = math.inf,
    transform: float = math.inf,
    packing: float = math.inf,
    selection: float = math.inf,
) -> float:
    """Seconds to compress a message of `nbytes`. Arguments: throughputs of the primitives in bytes per second.

    M (2 / T_m + 1 / T_f + 1 / T_p + 1 / T_s), equation (1) of HPDC 2020: precision conversion runs twice.
    """
    return nbytes * (2 / conversion + 1 / transform + 1 / packing + 1 / selection)


def minimal_ratio(link: Link, nbytes: float, seconds: float, kind: str = "all_reduce") -> float:
    """The compression ratio k above which compression pays, without overlap; infinity if it never does.

    Compression pays if compressing, decompressing and sending M / k bytes take less time than an all-reduce of M bytes.
    With two ranks, an all-reduce, no latency and `seconds` twice `compression_cost`, this is equation (4) of HPDC 2020:
    k > 1 / (1 - 2 T_comm (2 / T_m + 1 / T_f + 1 / T_p + 1 / T_s)).

    Args:
        nbytes: M, the size of the uncompressed gradient.
        seconds: time to compress and decompress the gradient.
        kind: the collective of the compressed gradient, as for `Link.seconds`.

    >>> link = Link(ranks=2, bandwidth=1.25e9, latency=0.0)  # 10 Gb/s
    >>> cost = compression_cost(1e9, conversion=35e9, transform=20e9, packing=10e9, selection=10e9)
    >>> round(minimal_ratio(link, 1e9, 2 * cost), 2)
    4.31
    """
    saved = link.all_reduce(nbytes) - seconds - link.messages(kind) * link.latency
    return replace(link, latency=0.0).seconds(kind, nbytes) / saved if saved > 0 else math.inf
