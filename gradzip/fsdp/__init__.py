"""Front end for FSDP2 (`fully_shard`): compression between replicas, and of the reduce-scatter between shards.

`compress` averages each rank's shard of the gradients over the replicas of that shard, as in hybrid sharding:

    mesh = init_device_mesh("cuda", (nodes, local), mesh_dim_names=("replicate", "shard"))
    for block in model.layers:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    gradzip.fsdp.compress(model, gradzip.ACPSGD(rank=4), mesh["replicate"].get_group())

`quantize` rounds what FSDP itself sends, for jobs without replicas: weights that ranks gather (`all_gather`), and
gradients that they reduce (`reduce_scatter`).
"""

from __future__ import annotations

try:
    from torch.distributed.fsdp import FSDPModule as _FSDPModule  # noqa: F401
except ImportError:
    import torch

    raise ImportError(
        f"gradzip.fsdp: got torch {torch.__version__}, expected one with torch.distributed.fsdp.fully_shard"
    ) from None

from .all_gather import AllGather, all_gather
from .compress import ReplicaAverages, compress
from .quantize import Quantized, quantize
from .reduce_scatter import ReduceScatter, reduce_scatter

__all__ = [
    "AllGather", "Quantized", "ReduceScatter", "ReplicaAverages", "all_gather", "compress", "quantize", "reduce_scatter"
]  # fmt: skip
