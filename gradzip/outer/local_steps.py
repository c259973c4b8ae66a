"""One rank of a job that trains with local steps."""

from __future__ import annotations

import itertools
import json
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..averaging.buckets import Plan, bucket_nbytes, cut
from ..averaging.handshake import differences, digest
from ..averaging.session import Session
from ..collectives import Broadcast
from ..collectives.engine import Engine
from ..collectives.fusion import as_real
from ..collectives.traffic import Traffic
from ..memory.checkpoint import join, split
from ..memory.state_dict import in_line, is_count
from ..methods.base.compressor import Compressor
from ..methods.none import NoCompression
from ..ops import tensors as ops
from .background import Runner, Seconds
from .exchange import Exchanged, OuterLoop, Pending, Worker
from .fragments import Schedule
from .global_copy import MakeOptimizer, nesterov
from .torchft import Replicas

# Of a state dict.
_KEYS = {"steps", "next", "fragments", "exchanges", "equal", "pending", "global", "compressor"}

_OUTSIDE = "LocalSteps: got a group that this rank is not in, expected one that has it"

# The numbers of the LocalSteps of each Horovod process set. In the background, exchanges of several may meet, and
# Horovod matches operations by their names.
_numbers: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()


class LocalSteps(OuterLoop):
    """Trains each rank alone for `every` steps, and then averages what has changed, compressed.

    All ranks keep an equal copy of the parameters, the global one. An exchange gives the average of the differences
    between global and local parameters to an outer optimizer as a gradient:

        after each `every`-th step of `optimizer`:
            d = global - local, averaged over the ranks by the method
            global = outer optimizer's step with gradient d
            local = global

    With `fragments`, layers take turns, evenly spread over `every` steps; with `delay`, an exchange runs in a thread
    while training goes on, and ends `delay` steps later (`blend` says how):

        after the step of a fragment's turn:
            d = global - local, of the fragment; its average begins
        `delay` steps later:
            global = outer optimizer's step with gradient d
            local = global + blend * (local - global)

    The training loop stays as it is: steps of `optimizer` are counted by a hook. Averages are made within
    `optimizer.step()`, or end there, and it raises errors such as `PayloadError`. Steps that a GradScaler skips do not
    count. Under one, a fused optimizer skips on the device: the host waits for that in each step.

    At the start, parameters become those of rank 0. What is no trained parameter, as running statistics of BatchNorm,
    stays as it is on each rank. A rank may take more steps than the others: it waits for them in its exchanges, and
    those that are in `synchronize` take part. The states of the method, such as residuals, are those of the
    differences.

    If an average is not finite, no rank changes the global copy or a state. A rank whose own difference is not finite
    warns, and restarts from the global parameters, with a fresh state of `optimizer`. The others go on.

    Args:
        model: it may be a DDP model whose group is this rank's site; then exchange with `Hierarchical`, or let one
            rank of each site have a LocalSteps. Or a model after fully_shard over the ranks of this site; then each
            rank exchanges its own shards, and `group` is ``mesh["replicate"]``.
        optimizer: any optimizer of torch for parameters of the model, before its first step.
        compressor: the method; default `NoCompression()`.
        every: steps of `optimizer` between two exchanges, the same on all ranks.
        outer: makes the outer optimizer of the list of global parameters (float32). The default is DiLoCo's,
            ``lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)``. None: the global
            parameters become the mean of the local ones, as in local SGD and SparseLoCo.
        fragments: parts of the model, of whole layers and about as many bytes each. Each is exchanged once in `every`
            steps. Layers go one by one to the fragment with the fewest bytes so far: of equal layers, every
            `fragments`-th one. A layer is what the name of a parameter says up to its first number, as blocks.3, or
            the module that has the parameter.
        delay: steps between the start of an exchange and its end, less than every / fragments. A process group gets a
            twin for the exchanges, which ranks make together.
        blend: weight of the local parameters where the global ones are applied, from 0 (the global ones, which drops
            what the last `delay` steps have changed) to 1 (none are applied); alpha of Streaming DiLoCo.
        start: steps of a data-parallel start, in which the DDP model averages gradients, with its hook if it has one.
            After them, it averages nothing, and the first round of local steps begins; 0: at once. None: a DDP model
            goes on averaging, over its site.
        offload: whether the global copy and the state of the outer optimizer are kept in host memory, pinned if a
            parameter is on a CUDA device, instead of on the device. The host waits for each copy between the two.
            Results have the same bits, also on a CPU, where nothing moves: ranks may differ, and are not compared.
        group: the ranks: a torch process group, a DeviceMesh of one dimension, a Horovod process set, or "horovod" for
            all ranks of Horovod; default: the default group of torch. Or a torchft Manager: replicas come and go
            (docs/outer.md).

    Attributes:
        exchanges: applied so far, of fragments.
        seconds: that exchanges took: `exposed`, `hidden` behind steps, `total`.
        start: steps that are left of the data-parallel start.
        is_started: whether this rank has the global parameters of the others; False in elastic Horovod until the state
            is synchronized.

    All ranks of the group must make it together; not so in elastic Horovod, where the state that it is given to makes
    the parameters those of rank 0: ``gradzip.horovod.elastic_state(local_steps=outer)``. Deterministic if the method
    is, whatever an exchange takes.

    Memory: one float32 copy of the parameters, the state of the outer optimizer (one more for its momentum), the
    residuals of the method, and in an exchange the differences. With `offload`, the device has the first two of a
    fragment while the outer optimizer takes a step with it, and otherwise copies of at most two parameters.

    Raises ValueError, and in all ranks alike RuntimeError if ranks have other arguments.

    >>> import gradzip, torch
    >>> model = torch.nn.Linear(64, 64)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> workers = gradzip.outer.LocalWorkers([model], [optimizer], every=2)  # LocalSteps, with one rank in this process
    >>> for _ in range(4):
    ...     model(torch.randn(8, 64)).square().mean().backward()
    ...     optimizer.step()
    >>> workers.exchanges
    2

    Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023, Algorithm 1; with
    error feedback of compressed differences: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo,
    2025, Algorithm 1; with fragments: Douillard et al., Streaming DiLoCo with overlapping communication, 2025,
    Algorithm 2.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compressor: Compressor | None = None,
        *,
        every: int = 30,
        outer: MakeOptimizer | None = nesterov,
        fragments: int = 1,
        delay: int = 0,
        blend: float = 0.0,
        start: int | None = None,
        offload: bool = False,
        group: Any = None,
    ) -> None:
        self.compressor = NoCompression() if compressor is None else compressor
        self._session = Session(self.compressor, "LocalSteps", in_background=delay > 0, waits=True)
        if self.compressor.memory.loss_scale.scaler is not None:
            raise ValueError("LocalSteps: got a compressor that follows a GradScaler, expected one that does not")
        replica = model if start is not None and isinstance(model, DistributedDataParallel) else None
        self._replica = weakref.ref(replica) if replica is not None else lambda: None  # a library may free it
        worker = Worker(model if replica is None else replica.module, optimizer, "LocalSteps")
        super().__init__([worker], Schedule(every, fragments, delay, blend), outer, self.compressor, offload)
        self._shards = worker.shards
        self._shard = "" if self._shards is None else f"shard{self._shards.rank()}of{self._shards.size()}"
        self._session.name_states(worker.parameters, "model", self._shard and f"{self._shard}.")
        self._device = next(iter(worker.trained.values())).device
        self._replicas = Replicas(group, self) if hasattr(group, "start_quorum") else None
        self._elastic = self._has_failed = False  # whether the job is elastic, whether an exchange has failed
        self._slot = "outer."  # prefix of the slots
        self.is_started = True
        self._saved: int | None = None  # digest of the parameters that were saved beside a loaded state
        self._set_start(self._checked_start(start or 0))
        if self._replicas is None:
            self._connect(group)
        elif self._shards is not None:
            raise ValueError("LocalSteps: got a sharded model and a torchft Manager, expected a model on one process")
        self._plans: dict[int, list[Plan]] = {}  # by fragment
        self.seconds = Seconds()
        self._runner: Runner[Exchanged] = Runner(self.seconds, self._device, in_background=delay > 0)
        self._begin()
        if self._replicas is not None:
            self._replicas.join()

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent, and bytes of the differences."""
        return self.compressor.traffic

    def remove(self) -> None:
        try:
            if self._replicas is not None:
                self._replicas.leave()
            super().remove()
        finally:
            self._average_in_ddp(True)
            self._runner.close()
            self._session.close(works=not self._has_failed)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for `load_state_dict` beside those of the model and of `optimizer`.

        The global parameters, the state of the outer optimizer, the steps since the last exchange, and the states of
        the method, such as residuals, which differ between ranks. Waits for an exchange in progress: what it has
        averaged is in the global parameters, and is applied to local ones when it is due.
        """
        self._receive()
        return {
            "shard": self._shard,
            "start": self.start,
            "local": digest(self._workers[0].parameters.values()),
            "steps": self._workers[0].steps,
            "next": self._next,
            "fragments": len(self._fragments),
            "exchanges": self.exchanges,
            "equal": self._equal,
            "pending": None if self._pending is None else self._pending.state_dict(),
            "global": self._global.state_dict(),
            "compressor": self.compressor.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned, on all ranks. Training goes on with the same bits.

        Load the parameters and `optimizer` of each rank beside it, after construction, which gives all ranks the
        parameters of rank 0. The next step warns if the parameters are not those that were saved beside this state.

        Raises:
            ValueError: it is of another model, shard or method, of other fragments, or no state dict, or malformed, or
                has values that are not finite. Nothing has changed then.
        """
        what = "LocalSteps.load_state_dict"
        if not (isinstance(state_dict, Mapping) and state_dict.keys() >= _KEYS):
            got = f"a dict with {sorted(state_dict)}" if isinstance(state_dict, Mapping) else in_line(state_dict)
            raise ValueError(f"{what}: got {got}, expected what state_dict() returned; without one, load nothing")
        for name, ours in (("shard", self._shard), ("fragments", len(self._fragments))):
            if (theirs := state_dict.get(name, ours)) != ours:
                raise ValueError(f"{what}: got a state dict of {name} {theirs!r}, expected {ours!r}: load another one")
        for name in ("steps", "next", "exchanges"):
            if not is_count(state_dict[name]) or (name == "next" and state_dict[name] >= len(self._fragments)):
                raise ValueError(f"{what}: got {name} = {in_line(state_dict[name])}, expected that of state_dict()")
        try:
            pending = None if state_dict["pending"] is None else Pending.of_state_dict(state_dict["pending"])
            self._fragments[0 if pending is None else pending.fragment]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            got = f"got a malformed exchange in progress ({error!r})"
            raise ValueError(f"{what}: {got}, expected what state_dict() returned") from None
        start = self._checked_start(state_dict.get("start", 0))  # earlier versions had none
        self._receive()
        with self.compressor.all_or_nothing():
            self.compressor.load_state_dict(state_dict["compressor"])
            self._global.load_state_dict(state_dict["global"], what)
        self._pending = pending
        self._workers[0].steps, self._next = state_dict["steps"], state_dict["next"]
        self.exchanges, self._equal = state_dict["exchanges"], state_dict["equal"]
        self._saved = state_dict.get("local")
        self._set_start(start)

    def synchronize(self) -> None:
        """`OuterLoop.synchronize`. In a data-parallel start, it changes nothing."""
        if self.start:  # ranks are equal
            self._global.take_over(self._workers[0].parameters)
            self._equal = True
        super().synchronize()

    def _begin(self) -> None:
        super()._begin()
        self._hooks.append(self._workers[0].optimizer.register_step_pre_hook(self._take_over))

    def _take_over(self, *_: Any) -> None:
        """Before a step: take over parameters that have changed since the last exchange without a step."""
        (worker,) = self._workers
        saved, self._saved = self._saved, None
        if saved is not None and saved != digest(worker.parameters.values()):
            warnings.warn(
                "LocalSteps: got other parameters than those that were saved beside the loaded state: training goes on "
                "from them; make LocalSteps first, then load the model, the optimizer and LocalSteps of each rank",
                stacklevel=2,
            )
        if self._equal and self.is_started and self._global.differs(worker.parameters, self._global.tensors):
            warnings.warn(
                "LocalSteps: got parameters that were changed without a step, as by model.load_state_dict: they are "
                "the global ones now; change them alike on all ranks",
                stacklevel=2,
            )
            self._global.take_over(worker.parameters)

    # --- a data-parallel start

    def _checked_start(self, start: int) -> int:
        if not is_count(start):
            raise ValueError(f"LocalSteps: got start = {in_line(start)}, expected an integer >= 0")
        if start and self._replica() is None:
            got = f"start = {start} and a {type(self._workers[0].model).__name__}"
            raise ValueError(f"LocalSteps: got {got}, expected a DDP model, which averages gradients in these steps")
        return start

    def _set_start(self, start: int) -> None:
        self.start = start
        self._average_in_ddp(start > 0)

    def _average_in_ddp(self, enabled: bool) -> None:
        """Have the DDP model average gradients and broadcast buffers, or neither, as in `no_sync()`.

        Unwrapping it would take mixed precision and references of a library away. A communication hook that does
        nothing would still copy gradients to buckets, and broadcast buffers in each step.
        """
        if (replica := self._replica()) is not None:
            replica.require_backward_grad_sync = replica.require_forward_param_sync = enabled

    def _advance(self, worker: Worker) -> None:
        if not self.start:
            super()._advance(worker)
            return
        self.start -= 1
        self._equal = not self.start
        if not self.start:
            self._global.take_over(worker.parameters)
            self._average_in_ddp(False)

    # --- a rank that joins others

    def _shared_state(self) -> dict[str, Any]:
        """The state that a joining rank receives: all that ranks have in common, and this one's training.

        Its tensors go on changing. Waits for an exchange in progress.
        """
        state = self.state_dict()
        common, _ = split(state["compressor"])
        return {"outer": {**state, "compressor": common}, "optimizer": self._workers[0].optimizer.state_dict()}

    def _adopt(self, state: Mapping[str, Any], own: Mapping[str, Any] | None, rank: int, size: int) -> None:
        """Go on where another rank is, from the global parameters.

        Args:
            state: of the other rank, from `_shared_state`.
            own: the rank-local half of the compressor's state (`split`); None: without residuals.
            rank, size: of this rank, in the group in which it goes on.
        """
        compressor = join(state["outer"]["compressor"], own, rank, size)
        pending = state["outer"]["pending"]
        if pending is not None:
            pending = pending | {"diverged": [False]}  # the other one may have
        self.load_state_dict({**state["outer"], "compressor": compressor, "pending": pending})
        (worker,) = self._workers
        worker.optimizer.load_state_dict(state["optimizer"])
        self._global.write(worker.parameters)
        self._equal, self._saved = True, None

    def _forget(self) -> None:
        """Forget the exchange in progress, if there is one, when it has ended: it must not go on in the next group."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.received is None:
            self._wait(pending)
        self._session.drop()

    # --- the group

    def _connect(self, group: Any) -> None:
        """Compare the ranks' configurations, and give all ranks the parameters of rank 0."""
        session = self._session
        if group == "horovod" or hasattr(group, "process_set_id"):
            import horovod.torch as hvd

            if self._shards is not None:
                raise ValueError('LocalSteps: got a sharded model and Horovod, expected group=mesh["replicate"]')
            process_set = hvd.global_process_set if group == "horovod" else group
            if process_set is hvd.global_process_set:
                from ..horovod.elastic import register_handler
                from .elastic import LocalStepsHandler

                register_handler(LocalSteps, LocalStepsHandler)
            self._slot = f"outer{next(_numbers.setdefault(process_set, itertools.count()))}."
            self._elastic = bool(int(os.environ.get("HOROVOD_ELASTIC") or 0))  # as Horovod reads it
            if self._elastic and process_set is not hvd.global_process_set:
                raise ValueError('LocalSteps: got a process set in an elastic job, expected group="horovod"')
            if self._elastic:  # a new worker makes its LocalSteps while the others train
                self.is_started = False
                return
            if not process_set.included():
                raise ValueError(_OUTSIDE)
            engine = session.horovod_engine(process_set)
        else:
            engine = session.torch_engine(_process_group(group, self._shards), self._device, self._shards)
        self._compare(engine)
        if self.schedule.delay:  # in the background, no operation of others may come between
            engine.separate()
        counted, engine.traffic = engine.traffic, Traffic()  # the first values do not count, as with DDP and Horovod
        for part in self._global.parts(self._global.tensors):
            for name, value in part.items():
                first = engine.run(Broadcast(as_real(value)), f"{self._slot}start.{name}")
                as_real(self._global.tensors[name].data).copy_(first)
        engine.traffic = counted

    def _connect_again(self) -> None:
        """In an elastic job, go on with the workers as they are now."""
        import horovod.torch as hvd

        if not self.is_started:
            expected = "expected it in hvd.elastic.run, with gradzip.horovod.elastic_state(local_steps=outer)"
            raise RuntimeError(f"LocalSteps: got a step before the state was synchronized, {expected}")
        engine = self._session.engine
        if engine is None or engine.is_stale:
            self._change_group(self._session.horovod_engine(hvd.global_process_set))

    def _change_group(self, engine: Engine) -> None:
        """Go on in another group, with the residuals."""
        self.compressor.change_group(engine.rank, engine.size)
        self._plans.clear()
        self._compare(engine)

    def _compare(self, engine: Engine) -> None:
        """Compare the ranks' configurations, and go on with this engine."""
        arguments = asdict(self.schedule) | {"outer": self._global.options, "start": self.start}
        of_ranks = self._session.connect(engine, self._workers[0].parameters, f"{self._slot}handshake", arguments)
        self._rank = engine.rank
        of_shards = [of_ranks]
        if self._shards is not None:  # they exchange at the same steps: an exchange tells them which to skip
            own = self._session.torch_engine(self._shards, self._device)
            line = f"{json.dumps(of_ranks)}\n".encode()
            of_shards = [json.loads(theirs) for theirs in own.allgather_bytes(line, "outer.shards")]
        # Behind all collectives: no rank waits for one that fails here.
        _check_equal(of_ranks, "rank")
        for of_rank in zip(*of_shards):
            _check_equal(of_rank, "shard")

    # --- an exchange

    def _average(
        self, fragment: int, differences: list[dict[str, Tensor]], changed: bool, stays: bool
    ) -> Callable[[], Exchanged]:
        exchange = self._exchange if self._replicas is None else self._replicas.exchange
        return self._runner.submit(exchange, fragment, differences[0], changed, stays)

    def _receive(self) -> None:
        if self._replicas is None:
            super()._receive()
        else:
            self._replicas.receive()

    def _apply(self) -> Exchanged:
        exchanged = super()._apply()
        if self._replicas is not None:
            self._replicas.admit()
        return exchanged

    def _exchange(self, *arguments: Any) -> Exchanged:
        """`_exchange_fragment`, whose errors drop the step of the method."""
        try:
            return self._exchange_fragment(*arguments)
        except BaseException:
            self._has_failed = True
            self._session.drop()
            raise

    def _exchange_fragment(self, fragment: int, own: dict[str, Tensor], changed: bool, stays: bool) -> Exchanged:
        if self._elastic:
            self._connect_again()
        session = self._session
        turn = {
            "fragment": fragment,
            "exchange": self.exchanges,
            "global": digest(value for part in self._global.parts(own) for value in part.values()),
        }
        line = json.dumps({"changed": changed, "stays": stays, **turn})
        lines = session.engine.allgather_bytes(f"{line}\n".encode(), f"{self._slot}steps")
        of_ranks = [json.loads(line) for line in lines]
        _check_turns([{name: of_rank[name] for name in turn} for of_rank in of_ranks])
        all_stay = all(of_rank["stays"] for of_rank in of_ranks)
        if not any(of_rank["changed"] for of_rank in of_ranks):
            return Exchanged(False, False, [False], all_stay)
        diverged = session.checks and not ops.all_finite(list(own.values()))
        slot = f"{self._slot}{session.prefix}{fragment}."
        monitor = self.compressor.monitor
        before = {} if monitor is None else {name: difference.clone() for name, difference in own.items()}
        with session.compressor.streams.on_all(self._device):
            session.begin()
            if session.discards:
                raise ValueError("LocalSteps: got an exchange within discarding(), expected it outside: all need it")
            for i, plan in enumerate(self._planned(fragment)):
                session.start(i, plan.groups, plan.parameters, [own[name] for name in plan.names], f"{slot}{i}")
            session.finish(f"{slot}round")
            skipped = bool(session.is_skipped())
            flags = session.engine.sum_over_shards([skipped, diverged])  # a site skips, and restarts, as one
            skipped, diverged = (bool(flag) for flag in flags)
            session.end(skipped)
            if monitor is not None:
                monitor.report(self._report(fragment, before, own))
        return Exchanged(True, skipped, [diverged], all_stay, own)

    def _report(self, fragment: int, own: dict[str, Tensor], averages: dict[str, Tensor]) -> dict[str, float]:
        """What `Monitor` reports of an exchange."""
        product, squares, of_average = (
            sum(float(torch.sum(as_real(a[name]) * as_real(b[name]), dtype=torch.float64)) for name in own)
            for a, b in ((own, averages), (own, own), (averages, averages))
        )
        norms = math.sqrt(squares * of_average)
        return {
            f".difference_norm/fragment{fragment}": math.sqrt(squares),
            f".agreement/fragment{fragment}": product / norms if norms else math.nan,
            "/seconds_exposed": self.seconds.exposed,
            "/seconds_hidden": self.seconds.hidden,
        }

    def _step(self, averages: dict[str, Tensor], skipped: bool) -> None:
        with self.compressor.streams.on_all(self._device):
            self._session.complete(skipped)
        self._global.step(averages)  # its optimizer skips a step that the session has skipped, and warns

    def _planned(self, fragment: int) -> list[Plan]:
        """The plans of all buckets of a fragment; new ones if methods have changed."""
        copies = {self._global.stepped[name]: name for name in self._fragments[fragment]}
        buckets = cut(copies, bucket_nbytes(self.compressor.bucket_cap_mb, copies))
        plans = self._plans.get(fragment)
        if not (plans and all(plan.fits(self.compressor, bucket) for plan, bucket in zip(plans, buckets))):
            plans = [self._session.plan(bucket, [copies[p] for p in bucket]) for bucket in buckets]
            self._plans[fragment] = plans
        return plans


def _process_group(group: Any, shards: dist.ProcessGroup | None) -> Any:
    """A torch process group of what the user has passed. shards: that of the ranks that hold the shards of a model."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            expected = 'call torch.distributed.init_process_group first, or pass group="horovod"'
            raise ValueError(f"LocalSteps: got group = None, but torch.distributed is not initialized: {expected}")
        group = dist.group.WORLD
    elif hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            expected = 'expected one of 1, as mesh["replicate"]'
            raise ValueError(f"LocalSteps: got a DeviceMesh of {group.ndim} dimensions as the group, {expected}")
        group = group.get_group()
    elif group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns then
        raise ValueError(_OUTSIDE)
    elif not isinstance(group, dist.ProcessGroup):
        expected = 'expected a process group, a DeviceMesh, a Horovod process set or "horovod"'
        raise TypeError(f"LocalSteps: got {group!r} as the group, {expected}")
    if shards is not None:
        both = set(dist.get_process_group_ranks(group)) & set(dist.get_process_group_ranks(shards))
        if len(both) > 1:
            expected = 'expected those that hold the same one, as mesh["replicate"]'
            raise ValueError(f"LocalSteps: ranks {sorted(both)} hold different shards of the model, {expected}")
    return group


def _check_turns(turns: Sequence[dict[str, int]]) -> None:
    """Refuse ranks that are not at the same exchange, or whose global parameters differ."""
    for rank, of_rank in enumerate(turns):
        if of_rank != turns[0]:
            what = "is at exchange {exchange}, of fragment {fragment}, with global parameters of digest {global:x}"
            raise RuntimeError(
                f"LocalSteps: rank {rank} {what.format(**of_rank)}; rank 0 {what.format(**turns[0])}; load the states "
                "of one step on all ranks, or none"
            )


def _check_equal(arguments: Sequence[dict[str, Any]], whose: str) -> None:
    """Refuse arguments that differ. whose: "rank" or "shard"; their numbers are those of the list."""
    for number, of_one in enumerate(arguments):
        for name, theirs, first in differences(of_one, arguments[0], None):
            got = f"{whose} {number} has {name} = {theirs}, {whose} 0 {name} = {first}"
            raise RuntimeError(f"LocalSteps: {got}; give all ranks the same one")
