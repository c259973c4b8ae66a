"""Front end for FSDP2 (`fully_shard`): compression between replicas, and of the reduce-scatter between shards.

`compress` averages each rank's shard of the gradients over the replicas of that shard, as in hybrid sharding:

    mesh = init_device_mesh("cuda", (nodes, local), mesh_dim_names=("replicate", "shard"))
    for block in model.layers:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    gradzip.fsdp.compress(model, gradzip.ACPSGD(rank=4), mesh["replicate"].get_group())

`reduce_scatter` quantizes the reduce-scatter itself, for jobs without replicas.
"""

from __future__ import annotations

try:
    from torch.distributed.fsdp import FSDPModule as _FSDPModule  # noqa: F401
except ImportError:
    import torch

    raise ImportError(
        f"gradzip.fsdp: got torch {torch.__version__}, expected one with torch.distributed.fsdp.fully_shard"
    ) from None

from .compress import ReplicaAverages, compress
from .reduce_scatter import ReduceScatter, reduce_scatter

__all__ = ["ReduceScatter", "ReplicaAverages", "compress", "reduce_scatter"]
