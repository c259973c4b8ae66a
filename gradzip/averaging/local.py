"""n workers in one process, without a network: for tests, convergence studies and reference results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives.fusion import fused
from ..engines.local import drive
from ..methods.base.compressor import Compressor
from ..methods.base.group import Group
from ..ops.arrays import takes_arrays
from . import optimizer_hooks
from .buckets import Plan, bucket_nbytes, cut
from .session import Session, check_compressor


@dataclass
class Worker:
    """What `Compressor.join_group` sees of a worker in a LocalGroup."""

    rank: int
    size: int
    local_size: int

    def node_size(self, what: str) -> int:
        return self.local_size

    def set_nodes(self, node_size: int) -> None:
        self.local_size = node_size


def workers_of(size: int | tuple[int, int], what: str) -> list[Worker]:
    """The workers of a group. size: as of `LocalGroup`. what: the function of the user's, for errors.

    Raises:
        ValueError: the size is neither a number nor a pair of numbers.
    """
    shape = size if isinstance(size, tuple) else (size, 1)
    if len(shape) != 2 or not all(isinstance(n, int) and n >= 1 for n in shape):
        raise ValueError(f"{what}: got size = {size!r}, expected an integer >= 1, or a pair (nodes, workers)")
    return [Worker(rank, math.prod(shape), shape[1]) for rank in range(math.prod(shape))]


class LocalGroup:
    """A group of `size` workers in one process, each with its own clone of the compressor and its state.

    Args:
        size: the number of workers, each a node of its own; or (nodes, workers on each node).

    >>> import gradzip, torch
    >>> group = gradzip.LocalGroup(gradzip.NoCompression(), size=2)
    >>> group.average([torch.tensor([1.0]), torch.tensor([2.0])], name="weight")[0]
    tensor([1.5000])
    >>> group.bytes_sent
    4
    """

    def __init__(self, compressor: Compressor, size: int | tuple[int, int]) -> None:
        check_compressor(compressor, "LocalGroup")
        workers = workers_of(size, "LocalGroup")
        self.compressors = [compressor.clone() for _ in workers]
        for own, worker in zip(self.compressors, workers):
            own.join_group(worker)
        self._node_size = workers[0].local_size
        self._parameters: dict[int, dict[str, Tensor]] = {}  # by part and name: tensors of their shapes and types
        self._plans: dict[tuple[int, int], list[Plan]] = {}  # of the buckets, by rank and part
        self._sessions = [Session(compressor, "LocalGroup", waits=True) for compressor in self.compressors]
        self._groups: list[Group] = []  # of rank 0 in the last step

    @property
    def bytes_sent(self) -> int:
        """Bytes that a rank has handed to collectives so far, of the rank with most, without those within nodes."""
        return max(c.traffic.bytes_sent for c in self.compressors)

    @property
    def bytes_wire(self) -> float:
        """Bytes that a rank has sent to others so far (`Traffic.bytes_wire`), of the rank that sent most."""
        return max(c.traffic.bytes_wire for c in self.compressors)

    def average(self, grads: Sequence[Tensor], name: str) -> list[Tensor]:
        """Average the ranks' gradients in one step of the parameter `name`, which counts if the average is finite.

        Args:
            grads: one gradient per rank, of equal shapes and dtypes. They are not changed.

        Returns each rank's average: identical tensors.
        """
        if others := [type(g).__name__ for g in grads if not isinstance(g, Tensor)]:
            raise TypeError(f"LocalGroup.average: got a gradient of type {others[0]}, expected tensors")
        return [average[name] for average in self.step([{name: grad} for grad in grads])]

    def step(self, gradients: Sequence[Mapping[str, Tensor]], part: int = 0) -> list[dict[str, Tensor]]:
        """Average all gradients of a step of training, in buckets and groups as under Horovod.

        The step counts if all averages are finite: otherwise it changes no state (`Compressor.skip_nonfinite`).

        Args:
            gradients: by name, for each rank, in the order of `model.parameters()`. They are not changed. Without
                those of frozen parameters.
            part: number of the part of the model that these are the gradients of. Each has buckets of its own.

        Returns each rank's averages by name: identical tensors.
        """
        if len(gradients) != len(self.compressors):
            raise ValueError(f"LocalGroup: got {len(gradients)} gradients, expected {len(self.compressors)}")
        kinds = [{name: (grad.dtype, tuple(grad.shape)) for name, grad in of_rank.items()} for of_rank in gradients]
        for name in dict.fromkeys(name for kind in kinds for name in kind):
            if len({kind.get(name) for kind in kinds}) > 1:
                got = ", ".join(" ".join(map(str, kind.get(name, ["none"]))) for kind in kinds)
                raise ValueError(f"LocalGroup: got gradients {name!r} of {got}, expected equal types and shapes")
        averages = [{name: grad.detach().clone().resolve_conj() for name, grad in of.items()} for of in gradients]
        routines = []
        for rank, (session, own) in enumerate(zip(self._sessions, averages)):
            session.begin()
            session.groups = dict.fromkeys(self._planned(rank, own, part))
            of_rank = [
                group.average([own[name] for name in group.names], rank, len(averages), session.discards)
                for group in session.groups
            ]
            routines.append(fused(of_rank, session.compressor.traffic))
        self._groups = list(self._sessions[0].groups)
        try:
            drive(routines, [compressor.traffic for compressor in self.compressors], self._node_size)
        except BaseException:
            for session in self._sessions:
                session.drop()
            raise
        for session in self._sessions:
            session.end(skipped := session.is_skipped())
            session.complete(skipped)
        return averages

    def tell_optimizers(self, parameters: Mapping[str, Tensor]) -> None:
        """Tell the optimizers of these parameters how the last step averaged their gradients, as front ends do.

        `gradzip.optim.AdamW` needs to know it with `Momentum`. Optimizers that do not fit a method raise ValueError.

        Args:
            parameters: by name, as in `step`. Their gradients are not set.
        """
        optimizer_hooks.register(
            (group, [parameters[name] for name in group.names if name in parameters]) for group in self._groups
        )

    def _planned(self, rank: int, gradients: Mapping[str, Tensor], part: int) -> list[Group]:
        """The groups of a rank in a step: planned again only if they change."""
        compressor = self.compressors[rank]
        parameters = self._parameters.setdefault(part, {})
        for name, grad in gradients.items():
            known = parameters.get(name)
            if known is None or (known.shape, known.dtype, known.device) != (grad.shape, grad.dtype, grad.device):
                parameters[name] = torch.empty((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
        named = {id(parameter): name for name, parameter in parameters.items()}
        buckets = cut(parameters.values(), bucket_nbytes(compressor.bucket_cap_mb, parameters.values()))
        buckets = [present for bucket in buckets if (present := [p for p in bucket if named[id(p)] in gradients])]
        plans = self._plans.get((rank, part), [])
        if len(plans) != len(buckets) or not all(plan.fits(compressor, bucket) for plan, bucket in zip(plans, buckets)):
            plans = [Plan(compressor, bucket, [named[id(p)] for p in bucket], "") for bucket in buckets]
            self._plans[rank, part] = plans
        return [group for plan in plans for group in plan.groups]


@takes_arrays
def simulate(compressor: Compressor, grads: Sequence[Tensor], name: str = "gradient") -> list[Tensor]:
    """One step of a fresh `LocalGroup`. Takes and returns arrays of other libraries as `gradzip.ops` does."""
    return LocalGroup(compressor, len(grads)).average(grads, name)


@takes_arrays
def roundtrip(compressor: Compressor, grad: Tensor, name: str = "gradient") -> tuple[Tensor, int]:
    """Compress and decompress a gradient: one step of one fresh rank.

    Returns (what peers would see of the gradient, bytes sent). Takes and returns arrays of other libraries as
    `gradzip.ops` does.
    """
    group = LocalGroup(compressor, 1)
    return group.average([grad], name)[0], group.bytes_sent
