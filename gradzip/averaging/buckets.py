"""Buckets: which parameters a front end averages together, and the averages in progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from ..collectives import AllToAll, Mean, RingSum, cost
from ..collectives.engine import Engine, Pending, results_of, send_overflows
from ..collectives.fusion import Round
from ..collectives.routines import Routine
from ..methods.base.compressor import Compressor
from ..methods.base.group import plan_groups
from ..ops import tensors as ops

# Buckets of a model on a device, at most. Each takes the host as long to queue, whatever its size. The more there are,
# the less is left to send after the backward pass.
MOST_BUCKETS = 8


def bucket_nbytes(
    cap_mb: float | None, parameters: Iterable[Tensor], default: float = cost.JOINED["horovod"]["bucket_nbytes"]
) -> float:
    """The size of the buckets of a model, in bytes: `cap_mb` MiB, which the user has set, or by default `default`.

    On a device, it is at least an eighth of the parameters by default.
    """
    if cap_mb is not None:
        return cap_mb * 2**20
    return max(default, sum(p.nbytes for p in parameters if ops.on_device(p)) / MOST_BUCKETS)


def cut(parameters: Iterable[Tensor], nbytes: float) -> list[list[Tensor]]:
    """Split parameters into Horovod's buckets of at least `nbytes`, each of one dtype and on one device.

    parameters: in the order of the forward pass, so that the gradients of the first bucket of each dtype and device
    come last. nbytes: as in `cost.cut`. The result depends on the order, dtypes, devices and shapes alone.

    A large gradient does not wait for those of earlier layers, which would fill its bucket with it.
    """
    by_kind: dict[Any, list[tuple[int, Tensor]]] = {}
    for number, parameter in enumerate(parameters):
        by_kind.setdefault(_kind(parameter), []).append((number, parameter))
    buckets = [
        [members[i] for i in bucket]
        for members in by_kind.values()
        for bucket in cost.cut([p.nbytes for _, p in members], nbytes, large_alone=True)
    ]
    return [[parameter for _, parameter in bucket] for bucket in sorted(buckets, key=lambda bucket: bucket[0][0])]


# What tensors that are concatenated have in common.
_kind = attrgetter("dtype", "device")


class Plan:
    """The groups of a bucket of these parameters. Made when the bucket is new, or has changed.

    Args:
        prefix: of the names of the states.
        vectors: as for `plan_groups`.
    """

    def __init__(
        self,
        compressor: Compressor,
        parameters: list[Tensor],
        names: list[str],
        prefix: str,
        vectors: Sequence[int] = (),
    ) -> None:
        self.parameters = parameters
        self.names = names
        self.prefix = prefix
        self.groups = plan_groups(compressor, parameters, names, prefix, vectors=vectors)
        self._compressor = compressor
        self._choice_number = compressor.choice_number
        self._ids, self._kinds = list(map(id, parameters)), list(map(_kind, parameters))

    def fits(self, compressor: Compressor, parameters: list[Tensor]) -> bool:
        """Whether these are the compressor and parameters of the plan, with the same types and methods in charge."""
        return (
            self._compressor is compressor
            and self._choice_number == compressor.choice_number
            and self._ids == list(map(id, parameters))
            and self._kinds == list(map(_kind, parameters))
        )


class Bucket:
    """A bucket whose averages are in progress: its routines, and the first round of their collectives.

    Args:
        routines: by key. They are started here, and so are their first collectives. If the engine matches operations by
            their slots, rings wait for `results`: they are matched by their order, and buckets start in any order.
        first: an empty round.
        slot: prefix of the collectives' slots.
    """

    def __init__(self, routines: dict[Any, Routine], first: Round, engine: Engine, slot: str) -> None:
        first.advance(routines)
        self.routines = routines
        self._engine = engine
        self._slot = slot
        self._rings = {} if engine.in_order else first.take_rings()
        self.on_device = False
        self._launch(first)

    def _launch(self, current: Round) -> None:
        collectives, launch = current.collectives(), self._engine.launch
        self._current = current
        self.pending: list[Pending] = []
        for i, collective in enumerate(collectives):
            if not isinstance(collective, RingSum):
                self.on_device |= collective.tensor.is_cuda
            self.pending.append(launch(collective, f"{self._slot}.{i}"))
        # Partitions of equal lengths: no transfer overflows, no length is waited for, and as many bytes are to follow.
        self.of_partitions = set(map(type, collectives)) in ({AllToAll}, {AllToAll, Mean}) and all(
            [getattr(c, "same_length", True) for c in collectives]
        )

    def gather_partitions(self) -> None:
        """If ranks exchange partitions of equal lengths, wait for them, and start to gather what becomes of them."""
        if self.of_partitions:
            send_overflows(self.pending)
            following = Round(self._current.traffic)
            following.advance(self.routines, self.results(following))
            self._launch(following)

    def results(self, following: Round) -> dict[Any, Any]:
        """The results of the round, by routine, to advance the routines with. Its rings go to `following`."""
        if self._rings:
            following.add(self._rings)
        return self._current.split(results_of(self.pending))
