"""One optimizer of Horovod: its buckets, and its gradients in flight.

Horovod calls ``compress(gradient)`` in its backward hook, all-reduces the tensor it returns, and calls ``decompress``
in ``optimizer.synchronize()``, when it has called `compress` for all gradients. Gradients wait until their bucket is
complete. Its collectives are started beside Horovod's, which gets a tensor of one element to all-reduce. The first call
of `decompress` ends the step.

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

from ..averaging.buckets import bucket_nbytes, cut
from ..averaging.group import plan_groups
from ..averaging.session import Session
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
        self._sparse: set[int] = set()  # ids of parameters that Horovod did not call `compress` for in the last step
        self.drop(optimizer)

    def drop(self, optimizer: Any) -> None:
        """Drop the step in progress."""
        self.handles = optimizer._handles
        self._waiting: dict[int, WaitingBucket] = {}  # by the id of each parameter in it
        self.step: InFlightStep | None = None
        self.session.drop()

    # --- compress

    def add(self, parameter: Any, grad: Tensor) -> tuple[Tensor, tuple[InFlightStep, Tensor]]:
        """Start averaging a gradient, and its bucket if it is the last one of that.

        Returns the tensor for Horovod to all-reduce, and the step and gradient.
        """
        step = self.step
        if step is None:
            step = self.step = InFlightStep(self)
            self._plan_step()
        if self.sums:
            step.sums.append(grad)
        if grad.is_cuda:
            self.session.compressor.streams.follow(grad)
        number = id(parameter)
        bucket = self._waiting.get(number)
        wire = None if bucket is None else bucket.wires.pop(number, None)
        alike = (grad.dtype, grad.device, grad.layout) == (parameter.dtype, parameter.device, torch.strided)
        if bucket is not None and wire is not None and alike and parameter.requires_grad:
            bucket.gradients[number] = grad
        else:
            self._sparse.discard(number)
            wire = self._start_alone(parameter, grad)
        if bucket is not None and not bucket.wires:
            self._start(bucket)
        return wire, (step, grad)

    def _plan_step(self) -> None:
        """Plan the buckets of a step: since the last one, parameters may be frozen, and methods may have changed."""
        self._waiting = {}
        for i, bucket in enumerate(self._buckets):
            parameters = [p for p in bucket if p.requires_grad and id(p) not in self._sparse]
            planned = self._planned[i]
            if planned is None or planned.lacked or not planned.plan.fits(self.session.compressor, parameters):
                planned = self._planned[i] = self._plan(parameters)
            self._waiting |= dict.fromkeys(planned.ids, WaitingBucket(planned))

    def _plan(self, parameters: list[Tensor]) -> PlannedBucket:
        plan = self.session.plan(parameters, [self._names[p] for p in parameters])
        return PlannedBucket(plan, self.engine)

    def _start_alone(self, parameter: Any, grad: Tensor) -> Tensor:
        """Start to average a gradient that is in no bucket. Returns the tensor for Horovod to all-reduce."""
        name, frozen = self._names[parameter], not parameter.requires_grad
        with self.session.on_stream_of(grad):
            groups = plan_groups(self.session.compressor, [grad], [name], self.session.prefix, frozen=frozen)
            self.session.start(name, groups, [parameter], [grad], f"{name}.gradzip")
            return self.engine.wire(grad.new_zeros(1))

    def _start(self, bucket: WaitingBucket) -> None:
        """Run the methods of a bucket to their first collectives, and start those."""
        planned, gradients = bucket.planned, list(bucket.gradients.values())
        if len(gradients) < len(planned.ids):  # parameters were frozen since, or have sparse gradients
            planned.lacked = True
            planned = self._plan([p for p in planned.plan.parameters if id(p) in bucket.gradients])
        if gradients:
            plan = planned.plan
            self.engine.count(planned.wires_nbytes)
            with self.session.on_stream_of(gradients[-1]):
                in_order = [bucket.gradients[number] for number in planned.ids]
                self.session.start(plan.names[0], plan.groups, plan.parameters, in_order, f"{plan.names[0]}.gradzip")
        for number in bucket.planned.ids:
            self._waiting.pop(number, None)

    # --- decompress

    def finish(self, device: torch.device) -> None:
        """Run all routines to their ends, and end the step.

        Later rounds run for all gradients together, as fused collectives, and so do rings, which are matched by their
        order alone: that of the parameters, backwards, because the gradients of the last ones were ready first.

        device: of a gradient.
        """
        step, session = self.step, self.session
        assert step is not None
        with session.on_all_streams(device):
            try:
                for bucket in list(dict.fromkeys(self._waiting.values())):
                    self._sparse |= bucket.wires.keys()  # Horovod gathers sparse gradients itself
                    self._start(bucket)
                names = sorted(session.buckets, key=lambda name: (self._order.get(name, -1), name), reverse=True)
                if names:
                    session.buckets = {name: session.buckets[name] for name in names}
                    session.finish(f"{names[0]}.gradzip")
            finally:
                self._waiting, self.step = {}, None
            if step.sums:
                torch._foreach_mul_(step.sums, self.engine.size)  # may overflow even if the averages have not
            session.end(skipped := session.is_skipped(step.sums))
            session.complete(skipped)
        step.is_over = True


class InFlightStep:
    """A step between Horovod's first call of `compress` and its first call of `decompress`."""

    def __init__(self, context: OptimizerContext) -> None:
        self.is_over = False
        self.sums: list[Tensor] = []  # its gradients, with op=Sum
        self._context = ref(context)  # no reference cycle: what is dropped is freed at once

    def finish(self, device: torch.device) -> None:
        """End the step. device: of a gradient, on which the host has waited in Horovod's `synchronize`."""
        context = self._context()
        if context is None or context.step is not self:
            raise RuntimeError("got the result of a step that was dropped: the group has changed, or it has failed")
        context.finish(device)
