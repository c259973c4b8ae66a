"""torchtitan 0.3 with compression between the replicas of hybrid sharding (HSDP): `--module compressed`.

    PYTHONPATH=recipes/torchtitan torchrun ... -m torchtitan.train --module compressed --config llama3_debugmodel \\
        --parallelism.data_parallel_replicate_degree 2 --compression acpsgd:rank=4

torchtitan builds and trains the model. FSDP shards it within each replica, and gradzip averages between replicas.
"""

import copy
from dataclasses import dataclass, fields, replace

from torch.distributed.fsdp import FSDPModule
from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

import gradzip


class CompressedTrainer(Trainer):
    """torchtitan's Trainer, with a compressor between replicas, whose states are in its checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        compression: str = "block-float"
        """The method, as `gradzip.parse` reads it."""

    def __init__(self, config):
        spec, compressor = config.model_spec, gradzip.parse(config.compression)
        self._replicas = None

        def parallelize(model, *, parallel_dims, **options):
            self._replicas = parallel_dims.get_mesh("dp_replicate")
            return shard(spec.parallelize_fn, model, parallel_dims=parallel_dims, **options)

        config.model_spec = replace(spec, parallelize_fn=parallelize)
        config.training.disable_cuda_graphs = True  # a graph cannot hold what gradzip does on the host
        config.parallelism.spmd_backend = "partial_dtensor"  # others give FSDP one mesh of replicas and shards
        super().__init__(config)
        if self._replicas is not None:  # None in a job that makes a seed checkpoint
            (model,) = self.model_parts
            # Now: torchtitan replaces the parameters that it shards, when it allocates them.
            averages = gradzip.fsdp.compress(model, compressor, self._replicas.get_group())
            self.checkpointer.states["compression"] = averages


def shard(parallelize, model, *, parallel_dims, **options):
    """Shard a model within each replica, for averages between replicas by `gradzip.fsdp.compress`.

    Args:
        parallelize: the `parallelize_fn` of torchtitan's ModelSpec.
        options: its other arguments.
    """
    replicas = parallel_dims.get_mesh("dp_replicate").size()
    model = parallelize(model, parallel_dims=within_replica(parallel_dims), **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # torchtitan adds gradients: its loss is divided by the tokens of all ranks
            module.set_gradient_divide_factor(1 / replicas)
    return model


def within_replica(parallel_dims):
    """The same meshes, without the one of replicas: FSDP shall not average over it."""
    within = copy.copy(parallel_dims)
    within.dp_replicate = 1
    meshes = parallel_dims._single_axis_meshes
    within._single_axis_meshes = {name: mesh for name, mesh in meshes.items() if name != "dp_replicate"}
    return within


def compressed(config):
    """A config of torchtitan with the field `compression`."""
    return CompressedTrainer.Config(**{field.name: getattr(config, field.name) for field in fields(config)})


def llama3_debugmodel():
    return compressed(config_registry.llama3_debugmodel())


def llama3_8b():
    return compressed(config_registry.llama3_8b())
