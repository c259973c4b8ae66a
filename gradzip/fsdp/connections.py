"""The groups of ranks that a custom collective of FSDP2 runs in, connected when it first does."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ..averaging.session import Session
from ..collectives.engine import Engine
from ..collectives.node_chunks import NodeChunks
from ..methods.base.compressor import Compressor
from ..methods.block_float import BlockFloat


def check_method(compressor: Compressor, what: str, exempts: bool = False) -> None:
    """Raise ValueError for what a custom collective of FSDP2 would leave out of a method.

    Args:
        what: the collective.
        exempts: whether it leaves exempt parameters exact.
    """
    for one in (compressor, *compressor.parts):
        if one.exempted and not exempts:
            expected = (
                "expected none: it rounds all parameters of a module; only gradzip.fsdp.quantize(model, gather=method) "
                "leaves exempt weights exact"
            )
            raise ValueError(f"{what}: got a method with exempt parameters, {expected}")
        if isinstance(one, BlockFloat) and one.error_feedback == "owner":
            expected = (
                "expected True or False: it rounds no average, whose error an owner would keep; "
                "gradzip.fsdp.quantize(..., error_feedback=True) keeps those of gradients"
            )
            raise ValueError(f"{what}: got a method with error_feedback='owner', {expected}")


class Connections:
    """The engines of groups. Each compares its ranks' methods once.

    Args:
        what: the collective, in errors.
        named: parameters by name, if ranks are to compare them.
    """

    def __init__(self, compressor: Compressor, what: str, named: Mapping[str, Tensor] | None = None) -> None:
        self._compressor, self._what, self._named = compressor, what, named or {}
        self._sessions: dict[dist.ProcessGroup, Session] = {}
        self._node_chunks: dict[dist.ProcessGroup, NodeChunks | None] = {}

    def engine(self, group: dist.ProcessGroup, device: torch.device) -> Engine:
        """The engine of a group.

        Raises:
            RuntimeError: its ranks use different methods; in the first call.
        """
        if group not in self._sessions:
            session = Session(self._compressor, self._what)
            session.connect(session.torch_engine(group, device), self._named, "handshake")
            self._sessions[group], self._node_chunks[group] = session, self._compressor.node_chunks
        engine: Engine = self._sessions[group].engine
        return engine

    def node_chunks(self, group: dist.ProcessGroup) -> NodeChunks | None:
        """How the ranks of a group that is connected are divided into nodes, for a method that does."""
        return self._node_chunks[group]
