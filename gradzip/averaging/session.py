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

import gc
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import engines
from ..collectives import Mean, ToHost
from ..collectives.engine import Engine, send_overflows
from ..collectives.fusion import Round
from ..collectives.ranges import Range
from ..collectives.routines import Routine
from ..memory.names import prefixes, renamed
from ..memory.verdict import Verdict, read_later
from ..methods.base.compressor import Compressor
from ..methods.base.exempt import check_exempt
from ..methods.base.group import Group, Inspected
from ..methods.spec import unparse
from ..ops import groups as kernels
from ..ops import replays
from ..ops import tensors as ops
from . import handshake, optimizer_hooks
from .buckets import Bucket, Plan

_log = logging.getLogger("gradzip")

# By part of a compressor, the sessions that have it.
_sessions: Any = WeakIdKeyDictionary()


@dataclass
class _Late:
    """What a device tells of a step.

    Attributes:
        names: of the averages that each magnitude of the verdict is of.
        tells: groups that are told the largest of some magnitudes, by their range.
        inspected: payloads that the device has checked.
        skip: of the optimizers.
        scale: returns the loss scale of the step.
    """

    verdict: Verdict | None = None
    names: list[Sequence[str]] = field(default_factory=list)
    tells: list[tuple[Group, Callable[[float], None], int, int]] = field(default_factory=list)
    inspected: list[Inspected] = field(default_factory=list)
    skip: optimizer_hooks.Skip | None = None
    scale: Callable[[], float] = float

    @property
    def number(self) -> Tensor:
        assert self.verdict is not None
        return self.verdict.number

    @property
    def magnitudes(self) -> list[float]:
        assert self.verdict is not None
        return self.verdict.magnitudes

    @property
    def culprits(self) -> list[str]:
        """The names of the averages that are not finite."""
        found = [names for names, most in zip(self.names, self.magnitudes) if not math.isfinite(most)]
        exact = [names for names in found if len(names) == 1]
        return list(dict.fromkeys(itertools.chain.from_iterable(exact or found)))

    def raise_fault(self) -> None:
        """Raise PayloadError if a payload is corrupt."""
        for one in self.inspected:
            one.method.check_inspected(one)


class Session:
    """One model that a front end trains with a compressor.

    Args:
        compressor: several sessions may share it, unless one is in the background.
        what: the function of the user's, for errors.
        in_background: whether its steps run in a thread of their own.
        waits: whether its steps wait for a device to know if they are skipped.

    Attributes:
        may_hold: whether gradients on a device may hold errors until `is_skipped`: nothing needs averages before, and
            what that says of this rank is final.
    """

    may_hold = False

    def __init__(self, compressor: Compressor, what: str, in_background: bool = False, waits: bool = False) -> None:
        check_compressor(compressor, what)
        optimizer_hooks.install()
        self.compressor, self.what, self.in_background = compressor, what, in_background
        self._waits = waits
        self.prefix = ""  # of the names of the states
        self._prefixes = "model", ""  # of which it is one: arguments of `prefixes`
        self._named: set[str] = set()  # the names in `name_states`, with those of parameters that are not trained
        self.engine: Any = None  # an Engine, once connected
        self._compares = False  # whether ranks compare in each step if averages are going to be thrown away
        self._seen: Any = None  # the number of the compressor's choice in the last step: loading changes it
        self._skipped_at: float | None = None  # the loss scale of the last step, if that was skipped
        self._late: _Late | None = None  # what a device has to tell of the last step, until it is read
        self._replays: dict[torch.device, Tensor] = {}  # by device: how many captured steps it has replayed
        # Of the current step:
        self.buckets: dict[Any, Bucket] = {}  # in progress, in the order in which they were started
        self.groups: dict[Group, None] = {}  # started so far
        self._told: list[tuple[Group, list[Tensor]]] = []  # groups, and the parameters whose optimizers are told
        self._telling: _Late | None = None  # what a device has to tell of it
        self._is_captured = False  # whether it is captured as a CUDA graph
        self.discards = False  # whether its averages are going to be thrown away
        self._may_hold = False  # whether gradients may hold errors
        self._announced = 0.0  # the share of the ranks that have announced it
        self._in_step = False

    # --- the group

    def name_states(self, named: Mapping[str, Any], word: str, group: str = "") -> None:
        """Choose the prefix of the states' names, until ranks agree on one, and free the states of deleted parameters.

        The first model with a name gets no prefix for it; a later model of the same parameters gets the same prefix.

        Args:
            named: parameters by name.
            word, group: of the prefixes (`prefixes`).
        """
        names, self._prefixes, self._named = self.compressor.memory.names, (word, group), set(named)
        self._free_deleted()
        if group in names.taken(named):
            gc.collect()  # models that nothing refers to any more
            self._free_deleted()
        taken = names.taken(named)
        self.prefix = next(prefix for prefix in prefixes(word, group) if prefix not in taken)
        names.add(self.prefix, named)

    def _free_deleted(self) -> None:
        # States that were loaded since are for other parameters.
        loaded = self.compressor.loaded_names
        deleted = set(self.compressor.memory.names.pop_deleted()) - loaded
        self.compressor.rename_states(dict.fromkeys(deleted))

    def torch_engine(self, group: Any, device: torch.device, shards: Any = None) -> Engine:
        """An engine for a torch process group, to connect. shards: as for `engines.torch_engine`."""
        return engines.torch_engine(group, self.compressor.traffic, device, shards)

    def horovod_engine(self, process_set: Any) -> Engine:
        """An engine for a Horovod process set, to connect."""
        return engines.horovod_engine(process_set, self.compressor.traffic)

    def connect(self, engine: Engine, named: Mapping[str, Tensor], slot: str, buckets: Any = None) -> list[Any]:
        """Compare the configurations of all ranks, and join their group. Returns the `buckets` of each rank.

        Args:
            named: parameters by name.
            slot: of the comparison.
            buckets: of the front end, in JSON types. They are not compared.

        Raises:
            RuntimeError: names both sides of the first difference; the same on all ranks.
            ValueError: another session has the compressor, and one of both is in the background. Or exempt parameters
                are not those of the model, or are all that the method compresses, on all ranks.
        """
        self._share_compressor()
        self._claim_loaded(named)
        names = self.compressor.memory.names
        taken = [prefix for prefix in names.taken(named) if prefix != self.prefix]
        # A collective of the ranks that hold other shards, before an error may end some of them.
        # Frozen parameters count: they may be trained later, and are gathered by FSDP2.
        compressed = engine.sum_over_shards(self.compressor.count_compressed(named, self.prefix))
        description = handshake.describe(self.compressor, named.items(), self.prefix, taken, buckets, compressed)
        of_ranks = handshake.compare(engine.allgather_bytes(description, slot))
        # Ranks may have made and deleted other models. Rank 0's prefix counts, if it is free on all.
        taken = [prefix for of_rank in of_ranks for prefix in of_rank["taken"]]
        candidates = itertools.chain([of_ranks[0]["prefix"]], prefixes(*self._prefixes))
        prefix = next(prefix for prefix in candidates if prefix not in taken)
        if prefix != self.prefix:
            names.move(named, self.prefix, prefix)
            self.compressor.rename_states({self.prefix + name: prefix + name for name in named})
            self.prefix = prefix
        stray = next((of_rank["stray"] for of_rank in of_ranks if of_rank["stray"] is not None), None)
        if stray is not None:
            raise ValueError(
                f"{self.what}: got the exempt parameter {stray!r}, expected names such as {min(named, default='')!r}: "
                "give exempt_modules the model whose gradients are averaged"
            )
        check_exempt(self.what, *map(sum, zip(*(of_rank["compressed"] for of_rank in of_ranks))))
        self.compressor.join_group(engine)
        # Other ranks may have counted fewer replays. No draws repeat, nor do they in a resumed job: the step number in
        # their keys counts captured steps.
        for number in self._replays.values():
            number.zero_()
        self.engine, self._compares = engine, self.compressor.announcement is not None
        self._log_method(named)
        return [of_rank["buckets"] for of_rank in of_ranks]

    def _log_method(self, named: Mapping[str, Tensor]) -> None:
        """Log, on rank 0, which share of a model is compressed; of a sharded one, of its own shards."""
        rank, shards = self.engine.rank, self.engine.shards
        if rank or (shards and shards.rank()) or not (named and _log.isEnabledFor(logging.INFO)):
            return
        # Local shards do not say whether they are trained.
        trained = {name: p for name, p in named.items() if p.requires_grad} or named
        compressed = [p.numel() for name, p in trained.items() if self.compressor.is_compressed(name, p, self.prefix)]
        share = sum(compressed) / max(1, sum(p.numel() for p in trained.values()))
        parameters = f"{len(compressed)} of {len(trained)} parameters, {100 * share:.1f} % of the elements"
        _log.info("%s, by %s", parameters, unparse(self.compressor))

    def _claim_loaded(self, named: Mapping[str, Tensor]) -> None:
        """Give loaded states the names of this model's, if they differ by a prefix: as of a model within another."""
        loaded = self.compressor.loaded_names
        if loaded and loaded.isdisjoint(self.compressor.memory.names.names()):
            group = self._prefixes[1]  # stays
            theirs = {name.removeprefix(group) for name in loaded}
            found = renamed(theirs, {self.prefix.removeprefix(group) + name for name in {*self._named, *named}})
            self.compressor.rename_states({group + name: group + own for name, own in found.items()})

    def _share_compressor(self) -> None:
        """Refuse to share a part of the compressor with another session, if one of both is in the background."""
        if self._rival() is not None:
            gc.collect()  # one that nothing refers to any more: when it is freed differs between ranks
        if (other := self._rival()) is not None:
            in_thread = self if self.in_background else other
            raise ValueError(
                f"{self.what}: got a compressor that {other.what} has, too, expected one of its own: {in_thread.what} "
                "runs it in a thread (delay > 0)"
            )
        for part in self.compressor.parts:
            _sessions.setdefault(part, WeakSet()).add(self)

    def _rival(self) -> Session | None:
        """Another session that has a part of the compressor, if one of both is in the background."""
        return next((other for other in self._others() if self.in_background or other.in_background), None)

    def _others(self) -> set[Session]:
        """The other sessions that have a part of the compressor."""
        return {other for part in self.compressor.parts for other in _sessions.get(part, ())} - {self}

    def close(self, works: bool = True) -> None:
        """Leave the group: no step follows. works: whether the group does."""
        for part in self.compressor.parts:
            _sessions.get(part, set()).discard(self)
        if self.engine is not None and works:
            self.engine.close()

    def plan(self, parameters: list[Tensor], names: list[str], vectors: Sequence[int] = ()) -> Plan:
        """Plan a bucket that is new, or whose parameters or methods have changed. Arguments: as for `Plan`."""
        self.engine.forget_lengths()
        return Plan(self.compressor, parameters, names, self.prefix, vectors)

    # --- a step

    def begin(self) -> None:
        """Begin a step, unless it has begun. Until its end, the loss scale stands still."""
        if not self._in_step:
            self.read_late()
            announcement = self.compressor.announcement
            self.discards = announcement is not None and announcement.depth > 0
            if self.discards:
                self._check_announcement()
            self._may_hold = self.may_hold and self.checks
            self._in_step = True
            self.compressor.memory.loss_scale.begin_step()

    def start(
        self,
        key: Any,
        groups: Sequence[Group],
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor] | Mapping[int, Tensor],
        slot: str,
    ) -> None:
        """Run the methods of a bucket to their first collectives, and start those.

        Args:
            key: of the bucket, with which it is found in `buckets`.
            parameters, gradients: of the bucket's plan, by their numbers in it.
            slot: prefix of the collectives' slots.
        """
        if not self._in_step:
            self.begin()
        routines, rank, size = {}, self.engine.rank, self.engine.size
        for i, group in enumerate(groups):
            self._told.append((group, list(map(parameters.__getitem__, group.indices))))
            self.groups[group] = None
            own = list(map(gradients.__getitem__, group.indices))
            routines[key, i] = group.average(own, rank, size, self.discards, self._may_hold)
            if group.device not in self._replays and group.gradients[0].is_cuda:
                self._count_replays(group)
        self.launch(key, routines, slot)

    def launch(self, key: Any, routines: dict[Any, Routine], slot: str) -> None:
        """The same for routines, by keys of their own."""
        previous = list(self.buckets.values())
        replays.current.numbers = self._replays
        try:
            self.buckets[key] = Bucket(routines, Round(self.compressor.traffic), self.engine, slot)
            if previous and self.engine.in_order and previous[-1].of_partitions:
                previous[-1].gather_partitions()
        finally:
            replays.current.numbers = None

    def _count_replays(self, group: Group) -> None:
        """Count the replays of captured steps on the device of a group from now on."""
        if not ops.is_capturing(group.gradients[0]):  # in the memory of the graph, a number would begin anew in each
            self._replays[group.device] = torch.zeros(1, dtype=torch.int64, device=group.device)

    def finish(self, slot: str) -> None:
        """Run the routines of all buckets to their ends. Later rounds run for all together. slot: prefix of theirs.

        An error, such as PayloadError, drops the step.
        """
        if self._compares and self.groups:
            self.launch("discards", {("discards", 0): self._compare_discards()}, f"{slot}.discards")
        buckets, self.buckets = list(self.buckets.values()), {}
        replays.current.numbers = self._replays
        try:
            if buckets and self.engine.in_order:
                buckets[-1].gather_partitions()
            following = Round(self.compressor.traffic)
            routines: dict[Any, Routine] = {}
            on_device: dict[Any, Any] = {}  # results of routines that do their local work in one call
            overflowed: set[Bucket] = set()
            for bucket in buckets:
                # Buckets with overflow come last: their second transfers run meanwhile.
                if bucket not in overflowed and send_overflows(bucket.pending):
                    overflowed.add(bucket)
                    buckets.append(bucket)
                    continue
                routines |= bucket.routines
                results = bucket.results(following)
                if bucket.on_device:
                    on_device |= results
                else:  # while later ones are in transfer
                    following.advance(bucket.routines, results)
            if on_device:
                following.advance(routines, on_device)
            self.engine.finish(routines, following, slot)
            self._check_discards()
        except BaseException:
            self.drop()
            raise
        finally:
            replays.current.numbers = None

    def _check_announcement(self) -> None:
        """Raise RuntimeError if averages may not be thrown away. The same on all ranks, but for which passes it is."""
        if self.engine is not None and not self._compares:
            got = "got a first call of discarding() after the first step, expected it before that, on all ranks"
            raise RuntimeError(f"{self.what}: {got}")
        if self._others():
            gc.collect()  # those that nothing refers to any more
        if other := next(iter(self._others()), None):
            got = f"got discarding() of a compressor that another {other.what} has, too, expected one of its own"
            raise RuntimeError(f"{self.what}: {got}: it announces the averages of all")

    def _compare_discards(self) -> Routine:
        """Coroutine: find out how many ranks have announced to throw the averages away."""
        own = torch.full((1,), float(self.discards), device=next(iter(self.groups)).device)
        self._announced = float((yield ToHost((yield Mean(own)))))

    def _check_discards(self) -> None:
        """Raise RuntimeError, on all ranks, unless all or none have announced to throw the averages away."""
        if not self._compares:
            return
        announced, shards = self.engine.sum_over_shards([self._announced, 1.0])
        if announced not in (0.0, shards):
            got = f"got a backward pass within discarding() on {announced / shards:.0%} of the ranks"
            raise RuntimeError(f"{self.what}: {got}, expected it on all or none: announce the same passes")

    @property
    def checks(self) -> bool:
        """Whether a step is skipped if an average is not finite."""
        return self.compressor.memory.checks

    def is_skipped(
        self,
        others: Sequence[Tensor] = (),
        agree: Callable[[Tensor], Tensor] | None = None,
        fills: bool = True,
        doubtful: Collection[int] = (),
    ) -> Verdict | bool:
        """Whether the step is skipped, because an average is not finite. If so, all averages on a device become NaN.

        A device tells it in a `Verdict`, for which the host does not wait, unless the method needs to know. Groups
        whose gradients hold errors get their residuals and averages here.

        Args:
            others: averages of no group, and gradients that are not what a group has left.
            agree: from this rank's number, as of a `Verdict`, to that of all ranks that skip together.
            fills: whether others become NaN, too: optimizers of theirs are told.
            doubtful: parameters, by `id`, that `complete` may get as discarded.

        Raises:
            PayloadError: if the host waits: a payload is corrupt. Otherwise the next step raises it.
        """
        groups = list(self.groups)
        if not self.compressor.memory.checks:
            self._mark_corrupt(groups)
            return False
        skipped = not all(map(attrgetter("finite"), groups))
        if not skipped:
            skipped = not ops.all_finite([x for x in others if not x.is_cuda])
        held = [group for group in groups if group.commits_late]
        watched = [group for group in groups if not (group.commits_late or group.shows_averages)]
        late, averages = self._watch(watched, others)
        numbers = _largest(averages)
        for group in groups:
            if group.numbers:
                numbers += group.numbers
                length = sum(map(Tensor.numel, group.numbers))
                late.names += group.shown if group.shows_averages else [group.names] * length
                late.inspected += group.inspected
        if not numbers and agree is None:
            return skipped
        magnitudes, number = _joined(numbers or [torch.zeros(1, device=self.engine.device)], skipped)
        if held:
            self._commit_held(held, number, doubtful)
            late.names += [()] * skipped  # the NaN that stands for a CPU's averages
            written: list[Tensor] = []
            for group in held:
                if not group.shows_averages:
                    first = len(late.names)
                    late.names += zip(group.names)
                    if group.told_later is not None:
                        late.tells.append((group, group.told_later, first, len(late.names)))
                    written += group.gradients
            if written:
                magnitudes, number = _joined([magnitudes, *_largest(written)], False)
        if agree is not None:
            number = agree(number)
            magnitudes = torch.cat([magnitudes, number])
        if not number.is_cuda:
            return not math.isfinite(number)
        filled = averages if fills else averages[: len(averages) - sum(x.is_cuda for x in others)]
        filled += [x for group in groups if group.commits_late or group.shows_averages for x in group.gradients]
        _restore(number, filled)
        verdict = Verdict(number, magnitudes)
        self._is_captured = verdict.is_captured
        if not verdict.is_captured:  # what a replay finds out, nobody reads
            late.verdict, self._telling = verdict, late
        if self.compressor.undone_on_device and not self._waits:
            return verdict
        if skipped := bool(verdict):
            try:
                late.raise_fault()
            except BaseException:
                self.drop()
                raise
        return skipped

    def _commit_held(self, held: Sequence[Group], number: Tensor, doubtful: Collection[int]) -> None:
        """Update the states of groups that hold their errors, if a number is finite; then write their averages."""
        told = self._told if doubtful else ()
        in_doubt = {group for group, parameters in told if any(id(p) in doubtful for p in parameters)}
        replays.current.numbers = self._replays
        try:
            routines = {group: group.commit_held(number, group in in_doubt) for group in held}
            Round(self.compressor.traffic).advance(routines)
        except BaseException:
            self.drop()
            raise
        finally:
            replays.current.numbers = None

    def _mark_corrupt(self, groups: Sequence[Group]) -> None:
        """Where no step is skipped: make averages NaN of whose group a payload is not sound, and restore its state."""
        late = _Late()
        numbers: list[Tensor] = []
        for group in groups:
            if group.numbers:
                _, number = _joined(group.numbers, False)
                _restore(number, group.gradients)
                pairs = group.changed() or []
                _restore(number, [now for now, _ in pairs], [former for _, former in pairs])
                numbers.append(number)
                late.inspected += group.inspected
        self._is_captured = any(ops.is_capturing(group.gradients[0]) for group in groups if group.gradients)
        if numbers and not self._is_captured:
            magnitudes, number = _joined(numbers, False)
            late.verdict, self._telling = Verdict(number, magnitudes), late

    def _watch(self, groups: Sequence[Group], others: Sequence[Tensor]) -> tuple[_Late, list[Tensor]]:
        """What a device is going to tell of the averages of groups, and the averages and others that it has."""
        late = _Late()
        averages: list[Tensor] = []
        for group in groups:
            if group.gradients and group.gradients[0].is_cuda:
                first = len(averages)
                late.names += zip(group.names)
                averages += group.gradients
                if group.told_later is not None:
                    late.tells.append((group, group.told_later, first, len(averages)))
        averages += [x for x in others if x.is_cuda]
        late.names += [()] * (len(averages) - len(late.names))
        return late, averages

    def end(self, skipped: Verdict | bool) -> None:
        """Let the method run collectives of its own. skipped: the same on all ranks."""
        if self.discards or skipped is True:
            self.compressor.skip_step()
        else:
            self.compressor.end_step(self.engine, self._names())

    def complete(self, skipped: Verdict | bool, discarded: Collection[int] = ()) -> None:
        """Complete the step, which can be dropped until then: no collectives follow.

        skipped: as in `end`. If so, states are restored, and optimizers do not step. A step of which a device tells
            counts.
        discarded: parameters, by `id`, whose averages nobody gets: their gradients and states stay as they were. The
            same on all ranks.
        """
        with Range("gradzip::commit"):
            groups, told, names, discards = list(self.groups), self._told, self._names(), self.discards
            kept: dict[Group, dict[str, Tensor | None]] = {}
            for group, parameters in told if discarded else ():
                kept[group] = {name: p.grad for name, p in zip(group.names, parameters) if id(p) in discarded}
                if len(kept[group]) == len(group.names):  # it has had no step
                    names = [name for name in names if name not in kept[group]]
            rolls_back = discards or skipped is True
            if is_captured := self._is_captured and not rolls_back:
                self._check_stays(groups)
            telling = self._telling
            self._late = telling or self._late  # which is unread if a CUDA graph is captured
            self._reset()
            self.compressor.last_verdict = skipped
            optimizer_hooks.register(told)
            verdict = skipped if isinstance(skipped, Verdict) else None
            for group, parameters_kept in kept.items() if not rolls_back else ():
                group.keep(parameters_kept)
            restores = verdict is not None and not rolls_back and self._restore(groups, verdict)
            if is_captured:
                _copy_back(groups)
                for number in self._replays.values():
                    number.add_(1)
                restores = True  # the former tensors have the new values
            scale = self.compressor.memory.loss_scale
            if self._late is not None and self._late is telling:
                not_counted = groups if rolls_back else [g for g, names in kept.items() if len(names) == len(g.names)]
                self._late.tells = [tell for tell in self._late.tells if tell[0] not in not_counted]
            if verdict is not None:
                skip = optimizer_hooks.skip_if(told, verdict, None if is_captured else self.read_late)
                if telling is not None:
                    telling.skip, telling.scale = skip, scale.later()
            elif skipped:
                culprits = [name for group in groups if not group.finite for name in group.culprits]
                culprits = culprits or (self._late.culprits if self._late is not None else [])
                held = itertools.chain.from_iterable(parameters for _, parameters in told)
                optimizer_hooks.skip(held, culprits, self._warns(scale.value))
            if self._late is not None and not self.in_background:  # another thread's step may be in progress
                read_later(self)
            for group in groups:
                group.end_step(rolls_back or restores, counts=restores)
            if not rolls_back:
                if verdict is None:
                    self._skipped_at = None
                    optimizer_hooks.take(told)
                self.compressor.complete_step(names)
                if self._seen != self.compressor.choice_number:
                    self._seen = self.compressor.choice_number
                    self._warn_of_other_names()

    def _check_stays(self, groups: Sequence[Group]) -> None:
        """Drop the step and raise RuntimeError if what it has changed in a state cannot be copied to where it was."""
        for group in groups:
            changed = group.changed()
            if changed is None or any(former is None for _, former in changed):
                self.drop()
                got = f"got a step to capture in which the state of {group.name!r} gets or loses tensors"
                raise RuntimeError(
                    f"{self.what}: {got}, expected one that changes their elements: run steps of the method before"
                )

    def _restore(self, groups: Sequence[Group], verdict: Verdict) -> bool:
        """Undo the step on the device, if it is skipped. Returns whether the host has to do it instead.

        In its first steps, a method may add tensors to its states, without which they are others: the host waits then.
        """
        pairs: list[tuple[Tensor, Tensor | None]] = []
        for group in groups:
            if group.before is not None:
                changed = group.changed()
                if changed is None:
                    return bool(verdict)
                pairs += changed
        _restore(verdict.number, [now for now, _ in pairs], [former for _, former in pairs])
        return False

    def _warns(self, scale: float) -> bool:
        """Whether to warn of a step that is skipped. scale: the loss scale of the step."""
        # A GradScaler skips steps as a matter of course, and lowers its scale. It does not see parameters that are in
        # none of its optimizers.
        former, self._skipped_at = self._skipped_at, scale
        return self.compressor.memory.loss_scale.scaler is None or scale == former

    @property
    def is_readable(self) -> bool:
        """Whether `read_late` does not wait for the device."""
        return self._late is None or self._late.verdict is None or self._late.verdict.is_known

    def read_late(self) -> None:
        """Learn what the device has found out about the last step, warn, and raise its PayloadError."""
        if self._late is None or ops.is_capturing(self._late.number):
            return
        late, self._late = self._late, None
        if late.skip is not None:
            late.skip.is_read = True
        for _, tell, first, end in late.tells:
            tell(max(late.magnitudes[first:end], default=0.0))
        if not late.verdict:
            self._skipped_at = None
            return
        if late.skip is not None:
            late.skip.names, late.skip.warns = late.culprits, self._warns(late.scale())
            late.skip.found_out()
        late.raise_fault()

    def _warn_of_other_names(self) -> None:
        """Warn of loaded states that no parameter has."""
        known = self.compressor.memory.names.names()
        others = sorted(self.compressor.loaded_names - known)
        if known and others:
            warnings.warn(
                f"{self.what}: got states of {others[0]!r} (of {len(others)} names) that no parameter has, expected "
                f"names such as {min(known)!r}: load the states of this model, by the names that it had then",
                stacklevel=2,
            )

    def _names(self) -> list[str]:
        """The names of the states of the parameters that the step has averaged, without frozen ones."""
        names: list[str] = []
        for group in self.groups:
            if not group.frozen:
                names += group.names
        return names

    def drop(self) -> None:
        """Drop the step in progress: its backward pass has failed or was interrupted. All states are rolled back."""
        for bucket in self.buckets.values():
            for routine in bucket.routines.values():
                routine.close()
        for group in self.groups:
            group.end_step(skipped=True)
        self._reset()

    def _reset(self) -> None:
        self.buckets, self.groups, self._told, self._telling, self._is_captured = {}, {}, [], None, False
        self._in_step = self.discards = False


def _largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest magnitudes of tensors, in vectors of those that follow each other on a device."""
    runs = itertools.groupby(tensors, Tensor.get_device)
    return [ops.largest_magnitudes(list(of_device)) for _, of_device in runs]


def _joined(numbers: Sequence[Tensor], skipped: bool) -> tuple[Tensor, Tensor]:
    """Numbers as one vector, on the device of the first; and a float32 number that is finite if all are.

    skipped: whether that is to be NaN anyway.
    """
    device = numbers[0].device
    on_one = [x if x.device == device else x.to(device, non_blocking=True) for x in numbers]
    magnitudes = torch.cat(on_one) if len(on_one) > 1 else on_one[0]
    if skipped:
        magnitudes = torch.cat([magnitudes, magnitudes.new_full((1,), math.nan)])
    largest = magnitudes.amax().view(1)
    return magnitudes, largest if largest.dtype == torch.float32 else largest.mul(0).float()


def _copy_back(groups: Sequence[Group]) -> None:
    """Copy what a captured step has changed in states to where it was, for replays to find it there."""
    pairs: list[tuple[Any, Any]] = [pair for group in groups for pair in group.changed() or ()]
    if pairs:
        changed, former = map(list, zip(*pairs))
        torch._foreach_copy_(former, changed)


def _restore(number: Tensor, targets: Sequence[Tensor], formers: Sequence[Tensor | None] | None = None) -> None:
    """Overwrite tensors by others, None by zeros, unless a number is finite. Without others, by NaN."""
    by_kind: dict[Any, tuple[list[Tensor], list[Tensor | None]]] = {}
    for target, former in zip(targets, itertools.repeat(None) if formers is None else formers):
        if formers is None and not target.is_contiguous():
            target.copy_(torch.where(number.to(target.device).isfinite(), target, math.nan))
            continue
        of_kind = by_kind.setdefault((target.get_device(), formers is None and target.dtype), ([], []))
        of_kind[0].append(target)
        of_kind[1].append(former)
    for some, their_formers in by_kind.values():
        there = number if some[0].device == number.device else number.to(some[0].device, non_blocking=True)
        kernels.restore_unless_finite(there, some, their_formers, math.nan if formers is None else 0.0)


def check_compressor(compressor: Compressor, what: str) -> None:
    """Raise TypeError for what is not a compressor. what: the function of the user's, for errors."""
    if not isinstance(compressor, Compressor):
        raise TypeError(f"{what}: got {compressor!r}, expected a compressor, such as gradzip.TopK()")


def queue_callback(callback: Callable[[], None]) -> None:
    """Have torch call a function at the end of the current backward pass, behind all that are queued so far."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
