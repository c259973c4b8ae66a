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
from operator import attrgetter
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor

from ..averaging.buckets import Plan, bucket_nbytes, cut
from ..averaging.session import Session
from ..collectives import Mean
from ..collectives.fusion import as_real
from ..memory.names import original
from ..memory.verdict import Verdict
from ..methods.base.group import plan_groups

_REQUIRES_GRAD = attrgetter("requires_grad")


class PlannedBucket:
    """What happens to the gradients of a bucket, and in a step, those that have come.

    Args:
        engine: of Horovod.
    """

    def __init__(self, plan: Plan, engine: Any) -> None:
        self.plan = plan
        self.lacked = False  # whether a gradient did not come in a step: its parameter has another step number since
        self.ids = list(map(id, plan.parameters))
        # What Horovod all-reduces in place of the gradients: a number of their type each, as its groups hold one type.
        # It is 1, or 0 for a gradient that is none of this step (`OptimizerContext.former`).
        like = as_real(plan.parameters[0].detach()) if self.ids else torch.empty(0, device="cpu")
        self.ones = engine.accepted(like.new_ones(len(self.ids)))
        self.all_wires = list(self.ones.split(1)) if self.ids else []
        # In a step, by the parameter's id:
        self.wires: dict[int, Tensor] = {}  # of the gradients that have to come
        self.gradients: dict[int, Tensor] = {}  # that have come


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
        session.may_hold = not self.sums
        self._names = names = {p: original(name) for p, name in optimizer._parameter_names.items()}
        named = {name: parameter for parameter, name in names.items()}
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer._requires_update]

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
        in_buckets = [name for bucket in cuts for name in bucket]
        others = sorted(named.keys() - in_buckets)
        self._order = {name: i for i, name in enumerate([*others, *in_buckets])}
        self._planned: list[PlannedBucket | None] = [None] * len(cuts)
        self.used: list[Tensor] = []  # parameters that this rank has used since the last step; maybe several times
        # By the parameter's id, its last average and its version: an optimizer may find it in a later step, too.
        self.given: dict[int, tuple[ref[Tensor], int]] = {}
        hooks = [p.register_post_accumulate_grad_hook(self.used.append) for p in parameters if p.requires_grad]
        finalize(self, lambda: [hook.remove() for hook in hooks])
        self._sparse: set[int] = set()  # ids of parameters that Horovod did not call `compress` for in the last step
        self.drop(optimizer)

    def drop(self, optimizer: Any) -> None:
        """Drop the step in progress."""
        self.handles = optimizer._handles
        # Buckets whose gradients have not all come, by the ids of their parameters.
        self.waiting: dict[int, PlannedBucket] = {}
        self.step: InFlightStep | None = None
        self.used.clear()
        self.session.drop()

    # --- compress

    def begin_step(self) -> None:
        """Plan the buckets of a step: since the last one, parameters may be frozen, and methods may have changed."""
        if self.session.groups:
            self.session.drop()  # Horovod's `synchronize` has failed
        self.session.read_late()
        self.step = InFlightStep(self)
        self.waiting = {}
        for i, bucket in enumerate(self._buckets):
            parameters = list(filter(_REQUIRES_GRAD, bucket))
            if self._sparse:
                parameters = [p for p in parameters if id(p) not in self._sparse]
            planned = self._planned[i]
            if planned is None or planned.lacked or not planned.plan.fits(self.session.compressor, parameters):
                planned = self._planned[i] = self._plan(parameters)
            planned.ones.fill_(1)
            planned.wires, planned.gradients = dict(zip(planned.ids, planned.all_wires)), {}
            self.waiting |= dict.fromkeys(planned.ids, planned)

    def _plan(self, parameters: list[Tensor]) -> PlannedBucket:
        plan = self.session.plan(parameters, list(map(self._names.__getitem__, parameters)))
        return PlannedBucket(plan, self.engine)

    def former(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        """A copy of a gradient that is none of this step: zeros that Horovod has made up, or an earlier average.

        None for others, such as one that the user has written to `.grad`, or changed there, and in the first step, in
        which nothing is known.
        """
        if not self.given or gradient.is_sparse or not parameter.requires_grad:
            return None
        if any(used is parameter for used in self.used):
            return None
        average, version = self.given.get(id(parameter), (None, 0))
        stays = average is not None and average() is gradient and gradient._version == version
        return gradient.clone() if stays or not gradient.any() else None

    def start_alone(self, parameter: Any, grad: Tensor) -> Tensor:
        """Start to average a gradient that is in no bucket. Returns the tensor for Horovod to all-reduce."""
        self._sparse.discard(id(parameter))
        name, frozen = self._names[parameter], not parameter.requires_grad
        with self.session.compressor.streams.on(grad):
            groups = plan_groups(self.session.compressor, [grad], [name], self.session.prefix, frozen=frozen)
            self.session.start(name, groups, [parameter], [grad], f"{name}.gradzip")
            wire: Tensor = self.engine.accepted(as_real(grad).new_ones(1))
            self.engine.traffic.count(wire.nbytes, self.engine.wire_shares[Mean])
            return wire

    def start(self, bucket: PlannedBucket) -> None:
        """Run the methods of a bucket to their first collectives, and start those."""
        planned, gradients = bucket, bucket.gradients
        if len(gradients) < len(bucket.ids):  # parameters were frozen since, or have sparse gradients
            bucket.lacked = True
            planned = self._plan([p for p in bucket.plan.parameters if id(p) in gradients])
        if gradients:
            plan, in_order = planned.plan, list(map(gradients.__getitem__, planned.ids))
            self.engine.traffic.count(planned.ones.nbytes, self.engine.wire_shares[Mean])
            with self.session.compressor.streams.on(in_order[-1]):
                self.session.start(plan.names[0], plan.groups, plan.parameters, in_order, f"{plan.names[0]}.gradzip")
        for number in bucket.ids:
            self.waiting.pop(number, None)

    # --- decompress

    def finish(self, device: torch.device) -> None:
        """Run all routines to their ends, and end the step.

        Later rounds run for all gradients together, as fused collectives, and so do rings, which are matched by their
        order alone: that of the parameters, backwards, because the gradients of the last ones were ready first.

        device: of a gradient, on which the host has waited in Horovod's `synchronize`.
        """
        step, session, self._device = self.step, self.session, device
        assert step is not None
        with session.compressor.streams.on_all(device):
            try:
                for bucket in list(dict.fromkeys(self.waiting.values())):
                    self._sparse |= bucket.wires.keys()  # Horovod gathers sparse gradients itself
                    self.start(bucket)
                names = sorted(session.buckets, key=self._order.__getitem__, reverse=True)
                if names:
                    session.buckets = {name: session.buckets[name] for name in names}
                    session.finish(f"{names[0]}.gradzip")
            finally:
                self.waiting, self.step = {}, None
            if step.sums:
                torch._foreach_mul_(step.sums, self.engine.size)  # may overflow even if the averages have not
            session.end(skipped := session.is_skipped(step.sums, doubtful=step.unused))
        step.is_over, step.skipped = True, skipped
        if not step.unused:  # else the last call of `decompress` does it
            self.complete(step)

    def complete(self, step: InFlightStep, last: Tensor | None = None) -> None:
        """Complete a step. Of a parameter that no rank has used, all is as it was before.

        last: the only gradient that Horovod has not written the average to yet; None: it has written none.
        """
        shares = torch.cat([wire for _, _, wire in step.unused.values()]).tolist() if step.unused else []
        discarded = {number for number, share in zip(step.unused, shares) if share == 0}
        for number in discarded:
            gradient, former, _ = step.unused[number]
            gradient.copy_(former)
        with self.session.compressor.streams.on_all(self._device):
            self.session.complete(step.skipped, discarded)
        self.given = {n: (ref(g), g._version + (last is None or g is last)) for n, g in step.gradients.items()}
        self.used.clear()


class InFlightStep:
    """A step between Horovod's first call of `compress` and its first call of `decompress`."""

    def __init__(self, context: OptimizerContext) -> None:
        self.is_over = False
        self.skipped: Verdict | bool = False
        self.sums: list[Tensor] = []  # its gradients, with op=Sum
        self.gradients: dict[int, Tensor] = {}  # by the parameter's id
        # Those among them that are none of this step, their former values, and what Horovod all-reduces.
        self.unused: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.waits = 0  # for how many calls of `decompress`
        self.context = ref(context)  # no reference cycle: what is dropped is freed at once
