"""Measure the cost and the error of a method on gradients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..averaging.routine import averaged, no_autocast
from ..collectives import AllFinite, AllToAll, Collective, Gather, RingSum, ToHost
from ..collectives.routines import Done, advance
from ..collectives.traffic import sent_nbytes
from ..cost import Compressed
from ..engines import local
from ..methods.base.compressor import Compressor
from .clock import Clock, now


@dataclass(frozen=True)
class Measurement:
    """The cost and the error of a method on one gradient.

    compressed: rounds and times: the least of the timed steps.
    error: |x - decoded| / |x| of one step without a residual (α of HPDC 2020). 0 for a gradient of zeros, and for one
        that bypasses compression.
    """

    compressed: Compressed
    error: float


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
    simulate_all = ranks > 1 and any(method.asymmetric for method in methods.values())
    group = [compressor.clone() for _ in range(ranks if simulate_all else 1)]
    steps: dict[str, list[Compressed]] = {name: [] for name in grads}
    for _ in range(1 + 2 * math.ceil(repeats / 2)):
        for name, grad in grads.items():
            steps[name].append(_step(group, grad, name, ranks, clock)[0])
    for member in group:
        for part in member.parts:
            part.memory.drop_rank_local()
    measured = {}
    for name, grad in grads.items():
        decoded = grad if methods[name].bypasses(grad) else _step(group, grad, name, ranks, clock)[1]
        norm = float(torch.linalg.vector_norm(grad.double()))
        error = float(torch.linalg.vector_norm(grad.double() - decoded.double())) / norm if norm else 0.0
        measured[name] = Measurement(_mean_of(steps[name][1:]), error)
    return measured


def _step(group: Sequence[Compressor], grad: Tensor, name: str, ranks: int, clock: Clock) -> tuple[Compressed, Tensor]:
    """One step of one gradient. Returns its cost on rank 0, and the average."""
    with no_autocast(grad.device):
        return _timed_step(group, grad, name, ranks, clock)


def _timed_step(
    group: Sequence[Compressor], grad: Tensor, name: str, ranks: int, clock: Clock
) -> tuple[Compressed, Tensor]:
    grads = [grad.clone() for _ in group]
    routines = [
        averaged(compressor, own, name, rank, ranks) for rank, (compressor, own) in enumerate(zip(group, grads))
    ]
    rounds: list[tuple[str, float]] = []
    seconds: list[float] = []  # before, between and after the rounds
    results: list[Any] = [None] * len(group)
    while True:
        start = clock(grad.device)
        collectives = [advance(routines[0], results[0])]
        seconds.append(clock(grad.device) - start)
        collectives += [advance(routine, result) for routine, result in zip(routines[1:], results[1:])]
        if isinstance(collectives[0], Done):
            return Compressed(tuple(rounds), seconds[0], sum(seconds[1:])), grads[0]
        if not isinstance(collectives[0], (AllFinite, ToHost)):
            rounds.append(_round(collectives[0], rounds, ranks))
        start = clock(grad.device)
        results = local.run(collectives) if len(group) == ranks else [_answer(collectives[0], ranks)]
        if isinstance(collectives[0], RingSum):  # compresses while it communicates
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


def _answer(collective: Collective, ranks: int) -> Any:
    """The result of a collective in which all ranks send the same."""
    if isinstance(collective, Gather):
        return [collective.tensor] * ranks
    if isinstance(collective, (AllFinite, ToHost)):
        return local.run([collective])[0]
    if isinstance(collective, (AllToAll, RingSum)):
        kind = type(collective).__name__
        raise TypeError(f"measure_method: got a {kind} from a method whose `asymmetric` is False, expected True")
    return collective.tensor


def _mean_of(steps: Sequence[Compressed]) -> Compressed:
    """The cost of a layer from several steps: the mean of even and odd steps, which differ in methods such as ACP-SGD.

    Each of the two counts with its least times and its mean bytes.
    """

    def mean(values: Sequence[float], least: bool = True) -> float:
        return statistics.fmean(min(v) if least else statistics.fmean(v) for v in (values[0::2], values[1::2]))

    last = [kind for kind, _ in steps[-1].rounds]
    alike = [step for step in steps if [kind for kind, _ in step.rounds] == last]
    if len(alike) < len(steps):  # the rounds have changed, as after a warm-up: the last step counts
        alike = [alike[-1]] * 2
    rounds = tuple((kind, mean([step.rounds[i][1] for step in alike], least=False)) for i, kind in enumerate(last))
    return Compressed(rounds, mean([s.encode for s in alike]), mean([s.decode for s in alike]))
