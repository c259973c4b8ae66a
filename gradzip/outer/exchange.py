"""An exchange, from differences to new parameters: what ranks of a job and workers in one process share."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..averaging.local import LocalGroup
from ..memory.names import original
from ..memory.state_dict import in_line, is_count
from ..methods.base.compressor import Compressor
from ..methods.none import NoCompression
from ..ops import tensors as ops
from .fragments import Schedule, cut
from .global_copy import GlobalCopy, MakeOptimizer, nesterov

_counted: WeakSet[torch.optim.Optimizer] = WeakSet()  # those whose steps are counted
_RECEIVED = ("changed", "skipped", "diverged", "all_stay")  # what state dicts have of an `Exchanged`


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, what: str) -> dict[str, Tensor]:
    """The parameters of a model that an optimizer steps, by name, in the order of the model. Tied ones count once.

    Those of FSDP2 are DTensors.

    Raises:
        TypeError, ValueError: one that cannot be trained with local steps; what to do.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what}: got {type(model).__name__} as the model, expected a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{what}: got {type(optimizer).__name__} as the optimizer, expected one of torch.optim")
    if hasattr(optimizer, "_parameter_names") and hasattr(optimizer, "synchronize"):
        raise ValueError(f"{what}: got Horovod's DistributedOptimizer, expected the optimizer in it")
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named: dict[str, Tensor] = {original(name): p for name, p in model.named_parameters() if id(p) in stepped}
    if unknown := len(stepped) - len(named):
        raise ValueError(f"{what}: got an optimizer with {unknown} parameters that are not the model's")
    for name, parameter in named.items():
        is_number = parameter.is_floating_point() or parameter.is_complex()
        if not is_number or torch.finfo(parameter.dtype).bits > 32:  # of the real part
            expected = "expected at most 32 bits, floating-point or complex: call model.float() first"
            raise ValueError(f"{what}: parameter {name!r}: got {parameter.dtype}, {expected}")
    if not named:
        raise ValueError(f"{what}: got an optimizer without parameters, expected those of model.parameters()")
    return named


class Worker:
    """A model that is trained alone between exchanges. Of a sharded one, this is what one rank holds.

    Attributes:
        trained: the parameters that the optimizer steps, by name.
        shards: the process group of the ranks that hold the shards; None: each rank has all of the model.
        steps: of the optimizer, in the current round of exchanges.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, what: str) -> None:
        self.trained = _trained(model, optimizer, what)
        if optimizer in _counted:
            raise ValueError(f"{what}: got an optimizer whose steps another one counts: call remove() of that first")
        self.model = model
        self.optimizer = optimizer
        self.steps = 0
        self._what = what
        meshes: set[Any] = {getattr(parameter, "device_mesh", None) for parameter in self.trained.values()}
        if len(meshes) > 1 or any(mesh is not None and mesh.ndim > 1 for mesh in meshes):
            dimensions = sorted(0 if mesh is None else mesh.ndim for mesh in meshes)
            expected = 'expected one of 1: call fully_shard(model, mesh=mesh["shard"]) on all of the model'
            raise ValueError(f"{what}: got parameters on meshes of {dimensions} dimensions (0: no shards), {expected}")
        (mesh,) = meshes
        self.shards = None if mesh is None or mesh.size() == 1 else mesh.get_group()

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters by name; of sharded ones, the local shards, as plain tensors that share their memory.

        FSDP may replace the memory of shards, so they are looked up whenever they are needed. Shards without elements
        are left out.
        """
        with torch.no_grad():  # where to_local is no operation of autograd's
            local = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in self.trained.items()}
        return local if self.shards is None else {name: shard for name, shard in local.items() if shard.numel()}

    def check_parameters(self) -> None:
        """Refuse parameters that were added to the optimizer: no other worker may have them."""
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if added := len(stepped - {id(p) for p in self.trained.values()}):
            what_to_do = f"call remove() of this one and make a new {self._what} on all ranks"
            raise ValueError(f"{self._what}: got {added} parameters that were added to the optimizer: {what_to_do}")


@dataclass
class Exchanged:
    """What all ranks know after an exchange.

    changed: whether any worker has changed anything.
    skipped: whether an average is not finite.
    diverged: of each worker here, whether its own differences were not finite.
    all_stay: whether all ranks stay in `synchronize`.
    averages: of the differences, by name; none if nothing has changed.
    """

    changed: bool
    skipped: bool
    diverged: list[bool]
    all_stay: bool
    averages: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Pending:
    """An exchange that is not applied yet.

    fragment: its number.
    due: the step of the round after which it is applied.
    blend: as of the schedule; 0 if this rank stays in `synchronize`.
    wait: waits for the averages.
    received: what `wait` has returned. The outer optimizer has taken its step then.
    """

    fragment: int
    due: int
    blend: float
    wait: Callable[[], Exchanged]
    received: Exchanged | None = None

    def state_dict(self) -> dict[str, Any]:
        """What is left to do once it has been received."""
        turn = {name: getattr(self, name) for name in ("fragment", "due", "blend")}
        return turn | {name: getattr(self.received, name) for name in _RECEIVED}

    @classmethod
    def of_state_dict(cls, state: Mapping[str, Any]) -> Pending:
        """What `state_dict` has returned. Raises ValueError, KeyError or TypeError for what it cannot have."""
        turns = is_count(state["fragment"]) and is_count(state["due"]) and 0 <= state["blend"] <= 1
        if not (turns and isinstance(state["diverged"], list)):
            raise ValueError(f"got {in_line(state)}")
        received = Exchanged(**{name: state[name] for name in _RECEIVED})  # the outer optimizer has had the averages
        return cls(state["fragment"], state["due"], state["blend"], lambda: received, received)


class OuterLoop(ABC):
    """Counts steps of optimizers, and exchanges fragments when it is their turn.

    An exchange has three parts:

        launch      differences of each worker; their averages begin
        receive     the averages are there: the outer optimizer takes a step with them
        apply       local parameters become the global ones, or a diverged worker restarts

    An exchange that has failed is postponed: what has changed is left to the fragment's next turn.

    Attributes:
        schedule: the turns of the fragments.
        exchanges: applied so far.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        schedule: Schedule,
        outer: MakeOptimizer | None,
        compressor: Compressor,
        offload: bool,
    ) -> None:
        self.schedule = schedule
        self.exchanges = 0
        self._workers = workers
        local = workers[0].parameters
        self._fragments = [  # cut alike on all ranks, whatever shards they hold
            [name for name in names if name in local]
            for names in cut(workers[0].trained, schedule.fragments, schedule.what)
        ]
        self._global = GlobalCopy(local, outer, compressor, schedule.what, offload)
        self._next = 0  # the fragment whose turn is next
        self._pending: Pending | None = None
        self._rank = 0  # of the first worker here
        self._equal = True  # whether all local parameters are the global ones

    def _begin(self) -> None:
        """Make local parameters the global ones, and count steps from now on."""
        for worker in self._workers:
            self._global.write(worker.parameters)
            _counted.add(worker.optimizer)
        self._hooks = [w.optimizer.register_step_post_hook(functools.partial(self._count, w)) for w in self._workers]

    def synchronize(self) -> None:
        """Make the parameters of all workers equal, bit for bit: exchange what has changed since the last exchanges.

        In a job, call it on all ranks, before a test or an export. It waits until all ranks have called it. If an
        average is not finite, it exchanges once more, without what a diverged worker had changed.
        """
        left, retries = len(self._fragments), 1
        while left:
            self._launch(stays=True)
            exchanged = self._apply()
            if not exchanged.all_stay:
                left = len(self._fragments)
            elif exchanged.skipped and retries:
                left, retries = len(self._fragments), retries - 1
            else:
                left -= 1
                if exchanged.skipped:
                    for worker in self._workers:
                        self._global.write(worker.parameters)
        for worker in self._workers:
            worker.steps = 0
        self._next, self._equal = 0, True

    def remove(self) -> None:
        """Stop counting steps: exchange no more. Waits for an exchange in progress, which is not applied."""
        for hook in self._hooks:
            hook.remove()
        for worker in self._workers if self._hooks else ():
            _counted.discard(worker.optimizer)
        self._hooks = []
        try:
            self._receive()
        finally:
            self._pending = None

    @property
    def _steps(self) -> int:
        """The steps of all workers here in the current round."""
        return min(worker.steps for worker in self._workers)

    def _count(self, worker: Worker, *_: Any) -> None:
        """Called after each step of an optimizer."""
        if getattr(worker.optimizer, "found_inf", None):  # a GradScaler had a fused one skip it; waits for the device
            return
        self._advance(worker)

    def _advance(self, worker: Worker) -> None:
        """A worker has taken a step."""
        worker.steps += 1
        self._equal = False
        if self._pending is not None and self._steps >= self._pending.due:
            self._apply()
        if self._steps >= self.schedule.turn(self._next):
            self._launch(stays=False)
            if not self.schedule.delay:
                self._apply()

    def _launch(self, stays: bool) -> None:
        """Begin the exchange of the fragment whose turn it is.

        stays: whether this rank takes part in exchanges until all ranks do.
        """
        for worker in self._workers:
            worker.check_parameters()
        if self._pending is not None:
            self._apply()
        schedule, fragment = self.schedule, self._next
        names = self._fragments[fragment]
        # They may have changed without a step, too: weights were averaged, say.
        changed = not self._equal or (stays and any(self._global.differs(w.parameters, names) for w in self._workers))
        differences = [self._global.differences(worker.parameters, names) for worker in self._workers]
        wait = self._average(fragment, differences, changed, stays)
        self._next = (fragment + 1) % len(self._fragments)
        for worker in self._workers:
            worker.steps = schedule.turn(fragment) % schedule.every
        due = self._workers[0].steps + schedule.delay
        self._pending = Pending(fragment, due, 0.0 if stays else schedule.blend, wait)

    def _postpone(self, pending: Pending) -> None:
        """Forget the exchange in progress. Its fragment is next again, as many steps later as between two turns."""
        self._pending, self._next = None, pending.fragment
        for worker in self._workers:
            worker.steps = self.schedule.turn(pending.fragment - 1)

    def _receive(self) -> None:
        """Wait for the exchange in progress, if there is one. The outer optimizer takes its step."""
        if self._pending is not None and self._pending.received is None:
            self._take(self._pending, self._wait(self._pending))

    def _wait(self, pending: Pending) -> Exchanged:
        """Wait for the exchange in progress. If it has failed, it is postponed, and its error raised once."""
        try:
            return pending.wait()
        except Exception:  # not KeyboardInterrupt: the exchange goes on
            self._postpone(pending)
            raise

    def _take(self, pending: Pending, exchanged: Exchanged) -> None:
        """The averages are there: the outer optimizer takes its step."""
        pending.received = exchanged
        if exchanged.changed:
            self._step(exchanged.averages, exchanged.skipped)

    def _apply(self) -> Exchanged:
        """Complete the exchange in progress."""
        self._receive()
        pending, self._pending = self._pending, None
        assert pending is not None and pending.received is not None
        exchanged = pending.received
        if exchanged.changed:
            for rank, worker in enumerate(self._workers):
                if not exchanged.skipped:
                    self._global.write(worker.parameters, self._fragments[pending.fragment], pending.blend)
                elif exchanged.diverged[rank]:
                    self._global.restart(worker.parameters, worker.optimizer, self._rank + rank)
            self.exchanges += 1
            self._equal = len(self._fragments) == 1 and not (exchanged.skipped or pending.blend)
        return exchanged

    # --- what jobs and workers in one process do differently

    @abstractmethod
    def _average(
        self, fragment: int, differences: list[dict[str, Tensor]], changed: bool, stays: bool
    ) -> Callable[[], Exchanged]:
        """Begin to average the differences of all workers, which it may change. Returns what waits for that.

        changed: whether any worker here has changed parameters.
        """

    @abstractmethod
    def _step(self, averages: dict[str, Tensor], skipped: bool) -> None:
        """Complete the step of the method, and have the outer optimizer take its own, unless it is skipped."""


class LocalWorkers(OuterLoop):
    """The workers of `LocalSteps` in one process: the same bits as in a job of as many ranks.

    An exchange takes place when the last worker has taken the step after which it is due.

    Args:
        models, optimizers: one of each worker, in rank order. All models get the parameters of the first one.
        compressor, outer, offload: as of `LocalSteps`.
        schedule: every, fragments, delay and blend, as of `LocalSteps`.

    The example of `LocalSteps` shows it.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        compressor: Compressor | None = None,
        *,
        outer: MakeOptimizer | None = nesterov,
        offload: bool = False,
        **schedule: Any,
    ) -> None:
        if len(models) != len(optimizers) or not models:
            got = f"{len(models)} models and {len(optimizers)} optimizers"
            raise ValueError(f"LocalWorkers: got {got}, expected one of each worker")
        pairs = [Worker(*pair, "LocalWorkers") for pair in zip(models, optimizers)]
        if any(worker.shards is not None for worker in pairs):
            raise ValueError("LocalWorkers: got sharded parameters, expected whole ones: use LocalSteps in a job")
        compressor = NoCompression() if compressor is None else compressor
        self._group = LocalGroup(compressor, len(models))
        super().__init__(pairs, Schedule(**schedule, what="LocalWorkers"), outer, compressor, offload)
        self._begin()

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that each worker has sent so far."""
        return self._group.bytes_sent

    def _average(
        self, fragment: int, differences: list[dict[str, Tensor]], changed: bool, stays: bool
    ) -> Callable[[], Exchanged]:
        exchanged = Exchanged(changed, False, [], stays)
        if changed:
            exchanged.averages = self._group.step(differences, fragment)[0]
            exchanged.skipped = self._group.compressors[0].last_step_skipped
            exchanged.diverged = [not ops.all_finite(list(of_worker.values())) for of_worker in differences]
        return lambda: exchanged

    def _step(self, averages: dict[str, Tensor], skipped: bool) -> None:
        if not skipped:
            self._group.tell_optimizers(self._global.stepped)
            self._global.step(averages)
