"""What all front ends do alike: connect a group of ranks, plan buckets, and begin, end, skip or drop steps.

A front end knows when gradients come and where averages go. It has a `Session` for each model (under Horovod, for each
optimizer), and reaches engines through it alone:

    name_states, connect    once in a group, on all ranks
    plan                    a bucket that is new or has changed
    start                   a bucket whose gradients are complete: its first collectives
    finish, end             when all buckets have started: all other collectives
    complete, or drop       the averages are in the gradients; or the backward pass has failed
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import engines, ops
from ..collectives import AllFinite
from ..collectives.engine import Engine
from ..collectives.fusion import Round
from ..collectives.routines import Routine
from ..collectives.traffic import Traffic
from ..methods.base.compressor import Compressor
from . import handshake, optimizer_hooks
from .buckets import Bucket, Plan, Unit
from .routine import Averaging, no_autocast


class Session:
    """One model that a front end trains with a compressor.

    Args:
        compressor: several sessions may share it.
        what: the function of the user's, for errors.
    """

    def __init__(self, compressor: Compressor, what: str) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(f"{what}: got {compressor!r}, expected a compressor, such as gradzip.TopK()")
        optimizer_hooks.install()
        self.compressor = compressor
        self.prefix = ""  # of the names of the states
        self.engine: Any = None  # an Engine, once connected
        # Of the current step:
        self.buckets: dict[Any, Bucket] = {}  # in progress, in the order in which they were started
        self.units: dict[Unit, None] = {}  # started so far
        self.waiting: dict[Any, tuple[Routine, AllFinite]] = {}  # routines that only wait for this, until `finish`
        self._averagings: list[tuple[Tensor, Averaging]] = []  # of the parameters whose gradients are averaged
        self._in_step = False

    @property
    def traffic(self) -> Traffic:
        return self.compressor.traffic

    # --- the group

    def name_states(self, named: Mapping[str, Any], word: str, group: str = "") -> None:
        """Choose the prefix of the states' names (`StateNames.prefix`), and free the states of deleted parameters."""
        names = self.compressor.memory.names
        deleted = names.deleted()
        for part in self.compressor.parts:
            part.memory.free(deleted)
        self.prefix = names.prefix(named, word, group)

    def torch_engine(self, group: Any, device: torch.device, shards: Any = None) -> Engine:
        """An engine for a torch process group, to connect. shards: as for `engines.torch_engine`."""
        return engines.torch_engine(group, self.traffic, device, shards)

    def horovod_engine(self, process_set: Any) -> Engine:
        """An engine for a Horovod process set, to connect."""
        return engines.horovod_engine(process_set, self.traffic)

    def connect(self, engine: Engine, named: Mapping[str, Tensor], slot: str, buckets: Any = None) -> list[Any]:
        """Compare the configurations of all ranks, and join their group. Returns the `buckets` of each rank.

        Args:
            named: parameters by name.
            slot: of the comparison.
            buckets: of the front end, in JSON types. They are not compared.

        Raises:
            RuntimeError: names both sides of the first difference; the same on all ranks.
        """
        description = handshake.describe(self.compressor, named.items(), self.prefix, buckets)
        of_ranks = handshake.compare(engine.allgather_bytes(description, slot))
        self.compressor.join_group(engine)
        self.engine = engine
        return of_ranks

    def close(self) -> None:
        """Leave the group: no step follows."""
        if self.engine is not None:
            self.engine.close()

    # --- work on gradients

    @contextlib.contextmanager
    def on_stream_of(self, gradient: Tensor) -> Iterator[None]:
        """Run the block without autograd and autocast, on the compressor's stream of a gradient's device."""
        with no_autocast(gradient.device), self.compressor.streams.on(gradient):
            yield

    @contextlib.contextmanager
    def on_all_streams(self, device: torch.device) -> Iterator[None]:
        """The same on the compressor's streams of all devices."""
        with no_autocast(device), self.compressor.streams.on_all():
            yield

    def plan(self, parameters: list[Tensor], names: list[str], joins_uncompressed: bool = True) -> Plan:
        """Plan a bucket that is new, or whose parameters or methods have changed. Arguments: as for `Plan.of`."""
        self.engine.forget_lengths()
        return Plan.of(self.compressor, parameters, names, self.prefix, joins_uncompressed)

    # --- a step

    def begin(self) -> None:
        """Begin a step, unless it has begun. Until its end, the loss scale stands still."""
        if not self._in_step:
            self._in_step = True
            self.compressor.memory.loss_scale.begin_step()

    def tell_optimizers(self, parameters: Iterable[Tensor], averagings: Iterable[Averaging]) -> None:
        """Have the optimizers of these parameters told, at the end of this step, how it has averaged, or to skip it."""
        self._averagings += zip(parameters, averagings)

    def average(self, unit: Unit, gradients: list[Tensor]) -> Routine:
        """Coroutine that replaces the gradients of a unit, in the order of its parameters, by their averages."""
        self.begin()
        self.units[unit] = None
        return unit.average(gradients, self.engine.rank, self.engine.size)

    def start(
        self, key: Any, units: Sequence[Unit], gradients: Sequence[Tensor] | Mapping[int, Tensor], slot: str
    ) -> None:
        """Run the methods of a bucket to their first collectives, and start those.

        Args:
            key: of the bucket, with which it is found in `buckets`.
            gradients: of the parameters of the bucket's plan, by their numbers in it.
            slot: prefix of the collectives' slots.
        """
        self.launch(
            key,
            {(key, i): self.average(unit, [gradients[j] for j in unit.indices]) for i, unit in enumerate(units)},
            slot,
        )

    def launch(self, key: Any, routines: dict[Any, Routine], slot: str) -> None:
        """The same for routines, by keys of their own."""
        previous = list(self.buckets.values())
        self.buckets[key] = Bucket(routines, Round.first(routines), self.engine, slot)
        if previous and self.engine.in_order:
            previous[-1].gather_partitions()

    def finish(self, slot: str) -> None:
        """Run the routines of all buckets to their ends. Later rounds run for all together. slot: prefix of theirs.

        An error, such as PayloadError, drops the step.
        """
        buckets, self.buckets = list(self.buckets.values()), {}
        try:
            if buckets and self.engine.in_order:
                buckets[-1].gather_partitions()
            following = Round()
            waiting, self.waiting = self.waiting, {}
            for key, (_, check) in waiting.items():
                following.add(key, check)
            routines = {key: routine for bucket in buckets for key, routine in bucket.routines.items()}
            on_device: dict[Any, Any] = {}  # results of routines that do their local work in one call
            overflowed = []
            for bucket in buckets:
                if bucket.send_overflow():
                    overflowed.append(bucket)
                else:
                    self._advance(bucket, following, on_device)
            # Buckets with overflow come last: their second transfers run meanwhile.
            for bucket in overflowed:
                self._advance(bucket, following, on_device)
            following.advance(routines, on_device)
            routines |= {key: routine for key, (routine, _) in waiting.items()}
            self.engine.finish(routines, following, slot)
        except BaseException:
            self.drop()
            raise

    def _advance(self, bucket: Bucket, following: Round, on_device: dict[Any, Any]) -> None:
        """Advance the routines of a bucket, while later ones are in transfer. Those on a device are left to others."""
        results = bucket.results(following)
        if bucket.on_device:
            on_device |= results
        else:
            following.advance(bucket.routines, results)

    @property
    def checks(self) -> bool:
        """Whether a step is skipped if an average is not finite."""
        return self.compressor.memory.checks

    def is_skipped(self, others: Sequence[Tensor] = ()) -> bool:
        """Whether the step is skipped, because an average is not finite.

        others: averages of no unit, and gradients that are not what a unit has left. Waits for the device if there are
        any.
        """
        if not self.checks:
            return False
        return not (all(unit.averaging.finite for unit in self.units) and ops.all_finite(others))

    def end(self, skipped: bool) -> None:
        """Let the method run collectives of its own. skipped: the same on all ranks."""
        if skipped:
            self.compressor.skip_step()
        else:
            self.compressor.end_step(self.engine, self._names())

    def complete(self, skipped: bool) -> None:
        """Complete the step, which can be dropped until then: no collectives follow.

        skipped: as in `end`. If so, all states are rolled back, and optimizers do not step.
        """
        units, averagings, names = list(self.units), self._averagings, self._names()
        self._reset()
        self.compressor.last_step_skipped = skipped
        culprits = [name for unit in units if not unit.averaging.finite for name in unit.averaging.culprits]
        # GradScaler skips steps as a matter of course.
        warns = self.compressor.memory.loss_scale.scaler is None
        for parameter, averaging in averagings:
            optimizer_hooks.register(parameter, averaging)
        parameters = [parameter for parameter, _ in averagings]
        optimizer_hooks.skip(parameters, culprits, warns) if skipped else optimizer_hooks.take(parameters)
        for unit in units:
            unit.averaging.end_step(skipped)
        if not skipped:
            self.compressor.complete_step(names)

    def _names(self) -> list[str]:
        """The names of the states of the parameters that the step has averaged, without frozen ones."""
        return [name for unit in self.units if not unit.averaging.frozen for name in unit.shapes]

    def take_back(self, plan: Plan, averages: Mapping[int, Tensor]) -> None:
        """Add averages that no optimizer gets to the residuals, so that nothing of those is lost.

        Call it after `complete`, on all ranks. averages: by the parameter's number in the plan; the same on all ranks.
        """
        chunks = self.compressor.node_chunks
        for i, average in averages.items():
            method = self.compressor.method_for(plan.names[i], average.shape, plan.prefix)
            taken = average if chunks is None or plan.averagings[i].node_chunks is None else chunks.own(average)
            method.take_back(plan.prefix + plan.names[i], taken, plan.parameters[i].grad is None)

    def drop(self) -> None:
        """Drop the step in progress: its backward pass has failed or was interrupted. All states are rolled back."""
        for bucket in self.buckets.values():
            for routine in bucket.routines.values():
                routine.close()
        for unit in self.units:
            unit.averaging.end_step(skipped=True)
        self._reset()

    def _reset(self) -> None:
        self.buckets, self.units, self.waiting, self._averagings = {}, {}, {}, []
        self._in_step = False


def queue_callback(callback: Callable[[], None]) -> None:
    """Have torch call a function at the end of the current backward pass, behind all that are queued so far."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
