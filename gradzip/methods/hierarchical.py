"""Full precision between the ranks of a node, compression between nodes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..collectives.node_chunks import NodeChunks
from ..memory.state_dict import in_line, is_count, saved_states
from .base.composite import Composite
from .base.compressor import Compressor
from .base.registry import register


@register("hierarchical", examples=["inner=acpsgd,local_size=1"])
@dataclass
class Hierarchical(Composite):
    """Averages gradients uncompressed within each node, and compressed between nodes.

    For clusters whose links between nodes are slower than those within a node:

    1. The ranks of a node exchange chunks of their gradients in float32, and each averages one chunk: a reduce-scatter.
    2. Ranks with the same place on all nodes (peers) average their chunk by the method `inner`.
    3. The ranks of a node gather the chunks.

    With n ranks on each node, a rank compresses, and keeps states for, 1/n of each gradient. Chunks are blocks of rows
    of a gradient's first dimension; with fewer rows than ranks, pieces of the flat gradient. A gradient is averaged
    uncompressed, in one all-reduce, if `inner` would bypass its chunks (`min_numel` is compared with a chunk), or if
    there is one node. With one rank on each node, `inner` runs unchanged. `Traffic.bytes_in_node` counts the bytes of
    steps 1 and 3, and `Traffic.bytes_sent` all others.

    Args:
        inner: the method between nodes; none that is made of methods, and none whose collectives depend on the data
            (`GradiVeQ`, ``exchange="auto"``, ``warmup_steps="auto"``).
        local_size: ranks on each node, which are numbered node by node. Default: as `horovodrun` and `torchrun` say;
            1 in a `LocalGroup` of one number. On one machine, any divisor of the world size can be tried.

    States belong to a rank's place in its node. States that are loaded at another place are dropped with a warning.
    When the workers of an elastic job change, all states are dropped.

    >>> import gradzip
    >>> group = gradzip.LocalGroup(gradzip.Hierarchical(gradzip.ACPSGD(rank=1)), size=(2, 4))  # 2 nodes of 4 ranks
    >>> averages = group.average([torch.ones(256, 64) * rank for rank in range(8)], "weight")
    >>> traffic = group.compressors[0].traffic
    >>> traffic.bytes_sent, traffic.bytes_in_node  # a factor of 64 rows; the gradient, and a chunk and one flag
    (256, 81924)
    """

    undone_on_device = False

    inner: Compressor
    local_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.local_size
        self.check("local_size", size is None or (is_count(size) and size), "None or an integer >= 1")
        self.set_parts([self.inner])
        if self.inner.adapts:
            raise ValueError(
                f"Hierarchical: got {self.inner!r}, expected a method whose collectives do not depend on the data; "
                "GradiVeQ, exchange='auto' and warmup_steps='auto' do"
            )
        self._place: tuple[int, int] | None = None  # (place, places), once a group is joined
        self._saved_place: tuple[int, int] | None = None  # (place, places) of loaded states, until a group is joined

    def method_for(self, name: str, shape: torch.Size, prefix: str = "") -> Compressor:
        return self.inner

    @property
    def configuration(self) -> int | None:
        return self.local_size

    # --- the group

    def join_group(self, engine: Any) -> None:
        """Find this rank's place in its node, and make the groups of ranks that exchange data.

        Raises:
            ValueError: nodes differ in their numbers of ranks, or ranks are not numbered node by node.
        """
        places = engine.node_size("Hierarchical") if self.local_size is None else self.local_size
        if engine.size % places:
            raise ValueError(
                f"Hierarchical: got {engine.size} ranks with local_size = {places}, expected a multiple of it; start "
                "as many ranks on each node, or pass another local_size"
            )
        self._place = engine.rank % places, places
        self.node_chunks = None
        self.inner.averages_pieces = places > 1
        if places > 1:
            nodes = engine.size // places
            self.node_chunks = NodeChunks(engine.rank // places, nodes, *self._place, self.inner)
            if nodes > 1:
                engine.set_nodes(places)
        self._drop_states_of_other_places()

    def change_group(self, rank: int, size: int) -> None:
        if self.node_chunks is not None:
            self.inner.memory.clear()  # of a place that may be another rank's now
        elif self._saved_place is None:  # else `join_group` sees whether the states fit
            super().change_group(rank, size)

    def _drop_states_of_other_places(self) -> None:
        """Drop loaded states of another place, except for their step counts."""
        saved, self._saved_place = self._saved_place, None
        if saved is None or self._place is None or saved == self._place:
            return
        warnings.warn(
            f"Hierarchical: the states of place {saved[0]} of {saved[1]} on a node were loaded at place "
            f"{self._place[0]} of {self._place[1]}: all but step counts are dropped",
            stacklevel=2,
        )
        memory = self.inner.memory
        by_name = memory.by_parameter()
        memory.parked = {name: {key: of[key] for key in of.keys() & _SHARED} for name, of in by_name.items()}
        memory.states = {}

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """`Compressor.state_dict`. With several ranks on each node, all fields but step counts are rank-local."""
        saved = super().state_dict()
        place, places = self._saved_place or self._place or (0, 1)
        if places > 1:
            (part,) = saved["parts"]
            states = {
                name: fields | {"rank": fields["rank"] * places + place, "size": fields["size"] * places}
                for name, fields in part["states"].items()
            }
            names = {*part["rank_local"], *(field for fields in states.values() for field in fields)}
            saved["parts"] = [part | {"rank_local": sorted(names - _SHARED), "states": states}]
        return saved | {"local_size": places}

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        (part,) = self.saved_parts(state_dict)
        saved, what = saved_states(part, type(self.inner).__name__), "Hierarchical.load_state_dict: got"
        places = state_dict.get("local_size")
        if not (is_count(places) and places):
            raise ValueError(f"{what} local_size = {in_line(places)}, expected an integer >= 1")
        for name, fields in saved.items():
            if not {"rank", "size"} <= fields.keys():
                raise ValueError(f"{what} a state of {name!r} with {sorted(fields)}, expected rank and size, too")
        ranks = {fields["rank"] for fields in saved.values()}
        states = {
            name: {**fields, "rank": fields["rank"] // places, "size": fields["size"] // places}
            for name, fields in saved.items()
        }
        super()._load({**state_dict, "parts": [{**part, "states": states}]})
        self._saved_place = (min(ranks) % places, places) if ranks else None
        if self._place is not None:
            self._drop_states_of_other_places()


# Fields of a state that are the same on all ranks, or are set from the group.
_SHARED = {"step", "rank", "size"}
