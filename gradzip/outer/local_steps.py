"""One rank of a job that trains with local steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import ops
from ..averaging.buckets import Plan, cut
from ..averaging.session import Session
from ..collectives import Broadcast
from ..collectives.traffic import Traffic
from ..methods.base.compressor import Compressor
from ..methods.none import NoCompression
from .exchange import Exchanged, OuterLoop, Worker
from .global_copy import MakeOptimizer, nesterov


class LocalSteps(OuterLoop):
    """Trains each rank alone for `every` steps, and then averages what has changed, compressed.

    All ranks keep an equal copy of the parameters, the global one. An exchange gives the average of the differences
    between global and local parameters to an outer optimizer as a gradient:

        after each `every`-th step of `optimizer`:
            d = global - local, averaged over the ranks by the method
            global = outer optimizer's step with gradient d
            local = global

    The training loop stays as it is: steps of `optimizer` are counted by a hook. Steps that a GradScaler skips do not
    count. Averages are made within `optimizer.step()`, which raises errors such as `PayloadError`.

    At the start, parameters become those of rank 0. What is no trained parameter, as running statistics of BatchNorm,
    stays as it is on each rank. A rank may take more steps than the others: it waits for them in its exchanges, and
    those that are in `synchronize` take part. The states of the method, such as residuals, are those of the
    differences.

    If an average is not finite, no rank changes the global copy or a state. A rank whose own difference is not finite
    warns, and restarts from the global parameters, with a fresh state of `optimizer`. The others go on.

    Args:
        model: it may be a DDP model whose group is this rank's site; then exchange with `Hierarchical`, or let one
            rank of each site have a LocalSteps.
        optimizer: any optimizer of torch for parameters of the model, before its first step.
        compressor: the method; default `NoCompression()`.
        every: steps of `optimizer` between two exchanges, the same on all ranks.
        outer: makes the outer optimizer of the list of global parameters (float32). The default is DiLoCo's,
            ``lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)``. None: the global
            parameters become the mean of the local ones, as in local SGD and SparseLoCo.
        group: the ranks: a torch process group, a DeviceMesh of one dimension, a Horovod process set, or "horovod" for
            all ranks of Horovod; default: the default group of torch.

    All ranks of the group must make it together. Deterministic if the method is.

    Memory: one float32 copy of the parameters, the state of the outer optimizer (one more for its momentum), the
    residuals of the method, and in an exchange the differences.

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
    2025, Algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compressor: Compressor | None = None,
        *,
        every: int = 30,
        outer: MakeOptimizer | None = nesterov,
        group: Any = None,
    ) -> None:
        self.compressor = NoCompression() if compressor is None else compressor
        if isinstance(compressor, Compressor) and compressor.memory.loss_scale.scaler is not None:
            raise ValueError(
                "LocalSteps: got a compressor that follows a GradScaler, expected one that does not: differences of "
                "parameters are not scaled"
            )
        self._session = Session(self.compressor, "LocalSteps")
        worker = Worker(model, optimizer, "LocalSteps")
        super().__init__([worker], every, "LocalSteps")
        self._session.name_states(worker.parameters, "model")
        self._connect(group, worker.parameters)
        self._plans: list[Plan] = []
        self._begin(outer)

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent, and bytes of the differences."""
        return self.compressor.traffic

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for `load_state_dict` beside those of the model and of `optimizer`.

        The global parameters, the state of the outer optimizer, the steps since the last exchange, and the states of
        the method, such as residuals, which differ between ranks.
        """
        return {
            "steps": self._workers[0].steps,
            "equal": self._equal,
            "exchanges": self.exchanges,
            "global": self._global.state_dict(),
            "compressor": self.compressor.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned, on all ranks. Training goes on with the same bits.

        Raises:
            ValueError: it is of another model or method.
        """
        self.compressor.load_state_dict(state_dict["compressor"])
        self._global.load_state_dict(state_dict["global"], "LocalSteps.load_state_dict")
        self._workers[0].steps, self.exchanges = state_dict["steps"], state_dict["exchanges"]
        self._equal = state_dict["equal"]

    # --- the group

    def _connect(self, group: Any, parameters: Mapping[str, Tensor]) -> None:
        """Compare the ranks' configurations, and give all ranks the parameters of rank 0."""
        session = self._session
        if group == "horovod" or hasattr(group, "process_set_id"):
            import horovod.torch as hvd

            engine = session.horovod_engine(hvd.global_process_set if group == "horovod" else group)
        else:
            device = next(iter(parameters.values())).device
            engine = session.torch_engine(_process_group(group), device)
        of_ranks = session.connect(engine, parameters, "outer.handshake", {"every": self.every})
        for rank, theirs in enumerate(of_ranks):
            if theirs != of_ranks[0]:
                raise RuntimeError(
                    f"LocalSteps: rank {rank} has every = {theirs['every']}, rank 0 every = {of_ranks[0]['every']}; "
                    "give all ranks the same number"
                )
        counted, engine.traffic = engine.traffic, Traffic()  # the first values do not count, as with DDP and Horovod
        for name, parameter in parameters.items():
            parameter.data.copy_(engine.run(Broadcast(parameter.detach()), f"outer.start.{name}"))
        engine.traffic = counted

    # --- an exchange

    @property
    def _rank(self) -> int:
        rank: int = self._session.engine.rank
        return rank

    def _average(self, differences: list[dict[str, Tensor]], stays: bool) -> Exchanged:
        session, (own,) = self._session, differences
        lines = session.engine.allgather_bytes(f"{not self._equal:d} {stays:d}\n".encode(), "outer.steps")
        of_ranks = [tuple(map(int, line.split())) for line in lines]
        all_stay = all(stay for _, stay in of_ranks)
        if not any(changed for changed, _ in of_ranks):
            return Exchanged(None, False, [False], all_stay)
        diverged = session.checks and not ops.all_finite(list(own.values()))
        with session.on_all_streams(next(iter(own.values())).device):
            session.begin()
            for i, plan in enumerate(self._planned()):
                session.tell_optimizers(plan.parameters, plan.averagings)
                session.start(i, plan.units, [own[name] for name in plan.names], f"outer.{session.prefix}{i}")
            session.finish(f"outer.{session.prefix}round")
            skipped = session.is_skipped()
            session.end(skipped)
        return Exchanged(own, skipped, [diverged], all_stay)

    def _step(self, averages: dict[str, Tensor], skipped: bool) -> None:
        with self._session.on_all_streams(next(iter(averages.values())).device):
            self._session.complete(skipped)
        self._global.step(averages)  # its optimizer skips a step that the session has skipped, and warns

    def _planned(self) -> list[Plan]:
        """The plans of all buckets of the global copy; new ones if methods have changed."""
        names = {id(copy): name for name, copy in self._global.tensors.items()}
        buckets = cut(self._global.tensors.values(), self.compressor.bucket_cap_mb * 2**20)
        if not (self._plans and all(p.fits(self.compressor, bucket) for p, bucket in zip(self._plans, buckets))):
            self._plans = [self._session.plan(bucket, [names[id(p)] for p in bucket]) for bucket in buckets]
        return self._plans


def _process_group(group: Any) -> dist.ProcessGroup:
    """A torch process group of what the user has passed."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "LocalSteps: got group = None, but torch.distributed is not initialized; call "
                'torch.distributed.init_process_group first, or pass group="horovod"'
            )
        default: Any = dist.group.WORLD
        return default
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(
                f"LocalSteps: got a DeviceMesh of {group.ndim} dimensions as the group, expected one of 1, as "
                'mesh["replicate"]'
            )
        of_mesh: dist.ProcessGroup = group.get_group()
        return of_mesh
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"LocalSteps: got {group!r} as the group, expected a process group, a DeviceMesh, a Horovod process set or "
            '"horovod"'
        )
    return group
