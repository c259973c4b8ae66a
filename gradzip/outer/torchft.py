"""Replicas that come and go: exchanges in the quorums of a torchft Manager.

torchft decides who takes part, and sends a joining replica the state of another one. Its process groups lack the
all-gather of bytes that payloads need; the gloo group that they wrap, one for each quorum, has it.

An exchange is applied by all replicas of a group or by none. A replica has the averages first, and votes; once all have
voted, it applies them. A replica that loses the group in between does not know whether others apply them. It learns it
in the next group: from the state of one that has (it then does, too), or because all that are left have the averages
(then they all do). Otherwise the exchange is postponed, and repeated at once if nobody has joined.
"""

from __future__ import annotations

import gc
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..memory.checkpoint import split
from .exchange import Exchanged, Pending

_NOTHING = Exchanged(changed=False, skipped=False, diverged=[False], all_stay=False)


@dataclass
class Attempt:
    """An exchange in a group.

    number: which exchange of which group it is. None other has the same one.
    averages: once this replica has them.
    error: that has ended it.
    launched: what `OuterLoop` knew of it before it was postponed: the exchange, the steps, the next fragment.
    """

    number: str
    stays: bool
    averages: Exchanged | None = None
    error: RuntimeError | None = None
    launched: Any = None


class Replicas:
    """What `LocalSteps` does with a Manager in place of a process group.

    Args:
        manager: a torchft.Manager.
        outer: the LocalSteps. This class works on its parts; that imports this module.
    """

    def __init__(self, manager: Any, outer: Any) -> None:
        if manager._use_async_quorum:
            raise ValueError("LocalSteps: got a Manager with use_async_quorum = True, expected False")
        if not (hasattr(type(manager._pg), "parent") and manager._pg.getBackendName() == "torchft-gloo"):
            expected = "expected one of torchft.ProcessGroupGloo(timeout=...)"
            raise ValueError(f"LocalSteps: got a Manager of {manager._pg!r}, {expected}")
        self._manager = manager
        self._outer = outer
        self._group: Any = None  # the gloo group of the quorum
        self._name = ""  # of the group
        self._attempt: Any = None  # an Attempt that is not yet applied
        self._applied = ""  # the number of the last attempt that was applied
        self._repeats = False  # whether the exchange that was postponed begins again at once
        self._meets = False  # whether the replicas meet once the exchange is applied
        manager.register_state_dict_fn("gradzip.outer", self._load, self._save)

    # --- an exchange

    def exchange(self, fragment: int, own: dict[str, Tensor], changed: bool, stays: bool) -> Exchanged:
        """Exchange a fragment, and vote. If the group is lost, `receive` sees to it; the result says nothing then."""
        attempt = self._attempt = Attempt(f"{self._name}/{self._manager.current_step()}", stays)
        try:
            attempt.averages = self._outer._exchange(fragment, own, changed, stays)
            self._outer._session.engine.allgather_bytes(b"1", "outer.vote")
            return attempt.averages
        except RuntimeError as error:
            if not _is_lost(error):
                raise
            attempt.error = error.with_traceback(None)  # which refers to the group
            return _NOTHING

    def receive(self) -> None:
        """Wait for the exchange in progress, if there is one, in as many groups as it takes."""
        outer = self._outer
        waited = None
        while (pending := outer._pending) is not None and pending.received is None:
            waited, exchanged, attempt = pending, outer._wait(pending), self._attempt
            if attempt.error is None:
                self._apply(pending, exchanged)
                return
            attempt.launched = pending, outer._workers[0].steps, outer._next
            outer._postpone(pending)
            self._lose(attempt.error)
            self.meet()
            if outer._pending is None and self._repeats:
                outer._launch(attempt.stays)
        if outer._pending is None and waited is not None:  # there is nothing to apply
            outer._pending = replace(waited, received=_NOTHING)

    def _apply(self, pending: Pending, exchanged: Exchanged) -> None:
        """The replicas apply an exchange: all do. torchft counts it as a step."""
        if not self._manager.should_commit():
            got = self._manager.num_participants()
            raise RuntimeError(f"LocalSteps: got {got} replicas, expected the Manager's min_replica_size: start more")
        self._applied, self._attempt, self._meets = self._attempt.number, None, True
        self._outer._take(pending, exchanged)

    def admit(self) -> None:
        """After an exchange: let those join that wait for it."""
        if self._meets:
            self._meets = False
            self.meet()

    def leave(self) -> None:
        """Wait for the exchange in progress, and forget it."""
        self._outer._forget()
        self._group = None

    # --- groups

    def join(self) -> None:
        """Take part from now on: wait until the others, if there are any, have completed an exchange."""
        self.meet()
        if self._manager.current_step() == 0:
            self._manager.should_commit()  # in step 0, torchft has all replicas receive the state of one

    def meet(self) -> None:
        """Have the Manager compute a quorum, and go on in its group. Repeats that until the group works."""
        while True:
            self._manager.start_quorum()  # a joining replica receives its state here
            failed = self._manager.errored()
            try:
                if failed is None:
                    self._enter()
                    return
                self._lose(failed.original_exception)
            except RuntimeError as error:
                if not _is_lost(error):
                    raise
                self._lose(error.with_traceback(None))

    def _lose(self, error: Exception) -> None:
        """The group is lost: close it, so that nobody waits in it any more, and ask for another one."""
        session = self._outer._session
        if self._attempt is None or self._attempt.averages is None:
            session.drop()
        self._group = session.engine = None
        self._manager._pg.abort()
        gc.collect()  # gloo closes its connections when the last reference is gone
        self._manager.report_error(error)
        self._manager.should_commit()

    def _enter(self) -> None:
        """Begin in the group of a quorum, if it is another one: settle a lost exchange, and compare configurations."""
        group = self._manager._pg.parent
        if group is self._group:
            return
        outer, attempt = self._outer, self._attempt
        engine = outer._session.torch_engine(group, outer._device)
        state = "none" if attempt is None else "lost" if attempt.averages is None else "held"
        lines = engine.allgather_bytes(f"{uuid.uuid4().hex} {state}\n".encode(), "outer.replicas")
        names, states = zip(*(line.decode().split() for line in lines))
        if set(states) == {"held"}:
            self._apply(self._relaunch(attempt), attempt.averages)
        elif attempt is not None:
            outer._session.drop()
            self._attempt = None
        self._repeats = "none" not in states and set(states) != {"held"}
        outer._change_group(engine)
        self._group, self._name = group, "".join(names)

    def _relaunch(self, attempt: Attempt) -> Pending:
        """Undo that an exchange was postponed."""
        pending, self._outer._workers[0].steps, self._outer._next = attempt.launched
        self._outer._pending = pending
        return pending

    # --- the state that a joining replica receives

    def _save(self) -> dict[str, Any]:
        return {**self._outer._shared_state(), "applied": self._applied}  # the former may apply an exchange

    def _load(self, state: Mapping[str, Any]) -> None:
        outer, attempt, group = self._outer, self._attempt, self._manager._pg.parent
        if attempt is not None and attempt.averages is not None and attempt.number == state["applied"]:
            pending = self._relaunch(attempt)
            self._attempt, self._applied = None, attempt.number
            outer._take(pending, attempt.averages)
            return
        outer._forget()
        self._attempt, self._applied = None, state["applied"]
        outer.compressor.change_group(group.rank(), group.size())
        _, own = split(outer.compressor.state_dict())
        outer._adopt(state, own, group.rank(), group.size())


def _is_lost(error: RuntimeError) -> bool:
    """Whether an error is one of the network. gloo raises no type of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)
