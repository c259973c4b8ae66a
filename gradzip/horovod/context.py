"""One optimizer of Horovod: its buckets, and its gradients in flight.

Horovod calls ``compress(gradient)`` in its backward hook, all-reduces the tensor it returns, and calls ``decompress``
in ``optimizer.synchronize()``, when it has called `compress` for all gradients. Where a gradient needs one Mean and
gains nothing from others, that Mean is Horovod's own all-reduce; but in float16, where Horovod's sum could overflow, it
is a collective of its own. All other gradients wait until their bucket is complete. Collectives are started beside
Horovod's, which gets a tensor of one element to all-reduce.

Hooks are called in an order that differs between ranks, and Horovod matches operations by their names. All ranks have
the same buckets, and name operations after parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..averaging.buckets import Bucket, Plan, bucket_nbytes, cut
from ..averaging.group import Group, plan_groups
from ..averaging.session import Session
from ..collectives import AllFinite, Mean
from ..collectives.fusion import Round
from ..collectives.routines import Done, Routine
from .buckets import PlannedBucket, WaitingBucket


class OptimizerContext:
    """One optimizer: its engine, its buckets, and its gradients in flight.

    Rank 0's size of a bucket counts, and its order of the parameters. If ranks take the first steps of several
    optimizers in different orders, the order of the names counts.

    Args:
        session: not connected yet.
    """

    def __init__(self, optimizer: Any, session: Session) -> None:
        import horovod.torch as hvd

        # Horovod's optimizer for Adasum has no `op`.
        op = getattr(optimizer, "op", hvd.Adasum)
        if op not in (hvd.Average, hvd.Sum):
            raise ValueError(
                f"{type(session.compressor).__name__} with op=Adasum: Adasum combines the very gradients that "
                "compression changes; use op=hvd.Average or op=hvd.Sum"
            )
        self.sums = op == hvd.Sum
        self.session = session
        self._names = names = optimizer._parameter_names
        named = {name: parameter for parameter, name in names.items()}
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer._requires_update]
        parameters = [p for p in parameters if p.is_floating_point()]

        def names_in_buckets(parameters: Iterable[Any], nbytes: float) -> list[list[str]]:
            return [[names[p] for p in bucket] for bucket in cut(parameters, nbytes)]

        nbytes = bucket_nbytes(session.compressor.bucket_cap_mb, parameters)
        mine = {"nbytes": nbytes, "names": names_in_buckets(parameters, nbytes)}
        of_ranks = session.connect(session.horovod_engine(optimizer.process_set), named, "gradzip", mine)
        self.engine = session.engine
        self.engine.bucket_nbytes, cuts = of_ranks[0]["nbytes"], of_ranks[0]["names"]
        if len({frozenset(itertools.chain(*plan["names"])) for plan in of_ranks}) > 1:
            # Others have started with another optimizer: this one's order of the parameters on rank 0 is not known.
            cuts = names_in_buckets(sorted(parameters, key=names.__getitem__), self.engine.bucket_nbytes)
        self._buckets = [[named[name] for name in bucket] for bucket in cuts]
        self._order = {name: i for i, name in enumerate(name for bucket in cuts for name in bucket)}
        self._planned: list[PlannedBucket | None] = [None] * len(cuts)
        self._sparse: set[Any] = set()  # parameters that Horovod did not call `compress` for in the last step
        self._drop(optimizer)

    def _drop(self, optimizer: Any) -> None:
        """Forget the gradients in flight."""
        self._handles = optimizer._handles
        self._waiting: dict[Any, WaitingBucket] = {}  # by parameter that has to come
        self._alone: dict[Any, Group] = {}  # by parameter that waits for no other
        self._sums: list[Tensor] = []  # of the current step, with op=Sum
        self._num_in_flight = 0
        self.session.drop()

    def reset_if_stale(self, optimizer: Any) -> None:
        """Drop gradients in flight if the optimizer has: it does when it loads a state dict, maybe on one rank only."""
        if optimizer._handles is not self._handles:
            self._drop(optimizer)

    # --- compress

    def add(self, parameter: Any, grad: Tensor) -> tuple[Tensor, InFlightGradient]:
        """Start averaging a gradient, and its bucket if it is the last one of that.

        Returns the tensor for Horovod to all-reduce, and the context of `decompress`.
        """
        self.session.begin()
        if not self._num_in_flight:
            self._plan_step()
        in_flight = InFlightGradient(self, self._names[parameter], grad)
        bucket = self._waiting.get(parameter)
        if bucket is not None and parameter.requires_grad and _is_like(grad, parameter):
            bucket.add(parameter, grad)
            wire = self.engine.wire(bucket.planned.zeros[parameter])
        else:
            self._sparse.discard(parameter)
            wire = self._start_alone(parameter, grad, in_flight)
            if bucket is not None:
                bucket.missing.discard(parameter)
        if bucket is not None and not bucket.missing:
            self._start(bucket)
        self._num_in_flight += 1
        return wire, in_flight

    def _plan_step(self) -> None:
        """Plan the buckets of a step: since the last one, parameters may be frozen, and methods may have changed."""
        self._waiting, self._alone = {}, {}
        for i, bucket in enumerate(self._buckets):
            parameters = [p for p in bucket if p.requires_grad and p not in self._sparse]
            planned = self._planned[i]
            if planned is None or not planned.plan.fits(self.session.compressor, parameters):
                planned = self._planned[i] = PlannedBucket(self._plan(parameters))
            self._alone |= planned.alone
            if planned.joined:
                self._waiting |= dict.fromkeys(planned.joined, WaitingBucket(planned))

    def _plan(self, parameters: list[Tensor]) -> Plan:
        # Horovod itself joins gradients that are not compressed.
        return self.session.plan(parameters, [self._names[p] for p in parameters], joins_uncompressed=False)

    def _start_alone(self, parameter: Any, grad: Tensor, in_flight: InFlightGradient) -> Tensor:
        """Run the method of one gradient to its first collective. Returns the tensor that Horovod all-reduces."""
        name = in_flight.name
        group = self._alone.get(parameter)
        if group is None or not parameter.requires_grad:
            compressor, prefix, frozen = self.session.compressor, self.session.prefix, not parameter.requires_grad
            (group,) = plan_groups(compressor, [grad], [name], prefix, frozen=frozen)
        self.session.tell_optimizers(group, [parameter])
        routine = self.session.average(group, [grad])
        collective = self.session.advance(routine)
        if isinstance(collective, Mean) and group.rounds == 1 and not collective.divides_first:
            in_flight.routine, in_flight.dtype = routine, collective.tensor.dtype
            return self.engine.wire(collective.addend(self.engine.size))
        first = Round(self.session.traffic)
        first.add(name, collective)
        self.session.buckets[name] = Bucket({name: routine}, first, self.engine, f"{name}.gradzip")
        return self.engine.wire(grad.new_zeros(1))

    def _start(self, bucket: WaitingBucket) -> None:
        """Run the methods of a bucket to their first collectives, and start those."""
        planned, gradients = bucket.planned, bucket.gradients
        if len(gradients) < len(planned.joined):  # parameters were frozen since, or have sparse gradients
            planned = PlannedBucket(self._plan([p for p in planned.joined if p in gradients]), least=1)
        if planned.groups:
            parameters = planned.plan.parameters
            by_number = {i: gradients[p] for i, p in enumerate(parameters) if p in gradients}
            self.session.start(planned.name, planned.groups, parameters, by_number, f"{planned.name}.gradzip")
        for parameter in bucket.planned.joined:
            self._waiting.pop(parameter, None)

    # --- decompress

    def complete(self) -> None:
        """Run all routines to their ends, but for those whose Mean is Horovod's own.

        Later rounds run for all gradients together, as fused collectives, and so do rings, which are matched by their
        order alone: that of the parameters, backwards, because the gradients of the last ones were ready first.
        """
        for bucket in dict.fromkeys(self._waiting.values()):
            self._sparse |= bucket.missing  # Horovod gathers sparse gradients itself
            self._start(bucket)
        started = self.session.buckets
        if started:
            names = sorted(started, key=lambda name: (self._order.get(name, -1), name), reverse=True)
            self.session.buckets = {name: started[name] for name in names}
            self.session.finish(f"{names[0]}.gradzip")

    def finished(self, gradient: InFlightGradient) -> None:
        """Count a finished gradient; after the last one, end the step."""
        self._num_in_flight -= 1
        if self.sums:
            self._sums.append(gradient.grad)  # may overflow even if the average has not
        if self._num_in_flight:
            return
        sums, self._sums = self._sums, []
        self._waiting = {}
        if self.session.waiting:
            self.session.finish("")  # no collectives, which would need names
        self.session.end(skipped := self.session.is_skipped(sums))
        self.session.complete(skipped)


class InFlightGradient:
    """One gradient between Horovod's calls of `compress` and `decompress`, which its average replaces in its memory."""

    def __init__(self, context: OptimizerContext, name: str, grad: Tensor) -> None:
        self.name = name
        self.grad = grad
        self.routine: Routine | None = None  # that waits for Horovod's own all-reduce
        self.dtype: torch.dtype | None = None  # of what the routine is sent
        self._context = ref(context)  # no reference cycle: what is dropped is freed at once

    def finish(self, reduced: Tensor) -> Tensor:
        """The gradient's average (or sum). reduced: what Horovod all-reduced."""
        context = self._context()
        if context is None:
            raise RuntimeError(f"{self.name}: got the result of a step that was dropped when the group changed")
        size = context.engine.size
        # The host has waited for `reduced` in Horovod's `synchronize`.
        with context.session.on_all_streams(reduced.device):
            if self.routine is None:
                context.complete()
            else:
                average = reduced / size if context.sums else reduced
                end = context.session.advance(self.routine, average.to(self.dtype))
                if isinstance(end, AllFinite):  # found out together with others
                    context.session.waiting[self.name] = self.routine, end
                elif not isinstance(end, Done):
                    raise RuntimeError(f"{self.name}: the method asks for a second collective, but declares rounds = 1")
            if context.sums:
                self.grad.mul_(size)
            context.finished(self)
        return self.grad


def _is_like(grad: Tensor, parameter: Tensor) -> bool:
    """Whether a gradient can be in its parameter's bucket."""
    return (grad.dtype, grad.device, grad.layout) == (parameter.dtype, parameter.device, torch.strided)
