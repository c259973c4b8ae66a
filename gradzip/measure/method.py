"""Measure what a method does to a gradient."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..averaging import averaged, no_autocast
from ..collectives import AllToAll, Collective, Gather, RingSum, ToHost
from ..compressor import Compressor
from ..cost import Compressed
from ..engines import local
from ..routines import Done, advance
from ..traffic import sent_nbytes
from .clock import now


@dataclass(frozen=True)
class Measurement:
    """What a method does to one gradient.

    compressed: its rounds, and times of steps that nothing disturbed.
    error: |x - decoded| / |x|, of one step without a residual (α of HPDC 2020). 0 for a gradient of zeros, and
        for one that bypasses compression.
    """

    compressed: Compressed
    error: float


def measure_method(
    compressor: Compressor, grad: Tensor, name: str = "gradient", ranks: int = 2, repeats: int = 3
) -> Measurement:
    """Measure the steps of a method on one gradient: `measure_gradients` of a single one.

    Its states stay in the caches between steps, so that the times are the least that training can have.
    """
    return measure_gradients(compressor, {name: grad}, ranks, repeats)[name]


def measure_gradients(
    compressor: Compressor, grads: Mapping[str, Tensor], ranks: int = 2, repeats: int = 3
) -> dict[str, Measurement]:
    """Measure the steps of a method, of which only a copy without states is used, on the gradients of a model.

    All ranks have these gradients, and this rank does its own part only: it encodes once, and decodes what `ranks`
    ranks send. (With `exchange="scatter_reduce"` or "auto" it computes the parts of all ranks, and times its own.) A
    step compresses all gradients, one after the other. The first step is not timed, and at least two are: methods such
    as ACP-SGD alternate. `Phases` stays in its first phase. Bytes and the error are deterministic for a seed. On a CUDA
    device, each part is timed until the device has done its work.

    Args:
        grads: of any shapes and floating-point dtypes, by parameter name; they are not changed.
        ranks: the world size.
        repeats: steps to time, rounded up to an even number.
    """
    methods = {name: compressor.method_for(name, grad.shape) for name, grad in grads.items()}
    alone = ranks == 1 or all(getattr(method, "exchange", "gather") == "gather" for method in methods.values())
    group = [compressor.clone() for _ in range(1 if alone else ranks)]
    steps: dict[str, list[Compressed]] = {name: [] for name in grads}
    for _ in range(1 + 2 * math.ceil(repeats / 2)):
        for name, grad in grads.items():
            steps[name].append(_step(group, grad, name, ranks)[0])
    for member in group:
        drop_residuals(member)
    measured = {}
    for name, grad in grads.items():
        decoded = grad if methods[name].bypasses(grad) else _step(group, grad, name, ranks)[1]
        norm = float(torch.linalg.vector_norm(grad.double()))
        error = float(torch.linalg.vector_norm(grad.double() - decoded.double())) / norm if norm else 0.0
        measured[name] = Measurement(_mean_of(steps[name][1:]), error)
    return measured


def _step(group: Sequence[Compressor], grad: Tensor, name: str, ranks: int) -> tuple[Compressed, Tensor]:
    """One step of one gradient: what it took on rank 0, and the average."""
    with no_autocast(grad.device):
        return _timed_step(group, grad, name, ranks)


def _timed_step(group: Sequence[Compressor], grad: Tensor, name: str, ranks: int) -> tuple[Compressed, Tensor]:
    grads = [grad.clone() for _ in group]
    routines = [
        averaged(compressor, own, name, rank, ranks) for rank, (compressor, own) in enumerate(zip(group, grads))
    ]
    rounds: list[tuple[str, float]] = []
    seconds: list[float] = []  # before, between and after the rounds
    results: list[Any] = [None] * len(group)
    while True:
        start = now(grad.device)
        collectives = [advance(routines[0], results[0])]
        seconds.append(now(grad.device) - start)
        collectives += [advance(routine, result) for routine, result in zip(routines[1:], results[1:])]
        if isinstance(collectives[0], Done):
            return Compressed(tuple(rounds), seconds[0], sum(seconds[1:])), grads[0]
        if not isinstance(collectives[0], ToHost):
            rounds.append(_round(collectives[0], rounds, ranks))
        start = now(grad.device)
        results = local.run(collectives) if len(group) == ranks else [_answer(collectives[0], ranks)]
        if isinstance(collectives[0], RingSum):  # compresses while it communicates
            seconds.append((now(grad.device) - start) / len(group))


def _round(collective: Collective, before: Sequence[tuple[str, float]], ranks: int) -> tuple[str, float]:
    """A round of the cost model, after those before it: what is gathered after an all-to-all are shards."""
    kind, nbytes = _kind(collective), float(sent_nbytes(collective))
    if kind == "all_gather" and any(kind == "all_to_all" for kind, _ in before):
        return "all_gather_shards", nbytes * ranks
    return kind, nbytes


def _kind(collective: Collective) -> str:
    """A collective of the cost model. A broadcast takes at most as long as an all-reduce."""
    if isinstance(collective, (Gather, AllToAll)):
        return "all_gather" if isinstance(collective, Gather) else "all_to_all"
    dtype = collective.dtype if isinstance(collective, RingSum) else collective.tensor.dtype
    return "all_reduce_half" if dtype.itemsize == 2 else "all_reduce"


def _answer(collective: Collective, ranks: int) -> Any:
    """The result of a collective in which all ranks do the same."""
    if isinstance(collective, Gather):
        return [collective.tensor] * ranks
    if isinstance(collective, RingSum):
        for i in range(len(collective.numels)):
            total = collective.encode(i).clone()
            for _ in range(1, ranks):
                total = collective.add(i, total)
            collective.decode(i, total)
        return None
    if isinstance(collective, ToHost):
        return collective.tensor.cpu()
    if isinstance(collective, AllToAll):
        raise TypeError("measure_method: got a method with an AllToAll, expected one with an `exchange` to announce it")
    return collective.tensor


def drop_residuals(compressor: Compressor) -> None:
    """Drop the residuals, and whatever else belongs to one rank, from all states of a compressor."""
    for part in compressor.parts:
        for state in part.states.values():
            for field in part.rank_local:
                vars(state).pop(field, None)
            state.residual = None


def _mean_of(steps: Sequence[Compressed]) -> Compressed:
    """Reduce the same layer's steps to one.

    Methods such as ACP-SGD do different work in even and odd steps. Each of the two halves counts with its least time
    and its mean bytes. The result is the mean of the two halves.
    """

    def mean(values: Sequence[float], least: bool = True) -> float:
        return statistics.fmean(min(v) if least else statistics.fmean(v) for v in (values[0::2], values[1::2]))

    last = [kind for kind, _ in steps[-1].rounds]
    alike = [step for step in steps if [kind for kind, _ in step.rounds] == last]
    if len(alike) < len(steps):  # phases of other rounds, such as a warm-up: the last one counts
        alike = [alike[-1]] * 2
    rounds = tuple((kind, mean([step.rounds[i][1] for step in alike], least=False)) for i, kind in enumerate(last))
    return Compressed(rounds, mean([s.encode for s in alike]), mean([s.decode for s in alike]))
