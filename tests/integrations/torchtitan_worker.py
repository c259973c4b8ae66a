"""One rank of two replicas of two shards: gradients of torchtitan's HSDP, and of recipes/torchtitan with methods.

Arguments: a folder, and methods. Writes RANK.json: method -> the largest relative error of a gradient, and bytes sent.

torchtitan runs on GPUs. Here its device is the CPU; causal attention of torch stands for FlexAttention, which has no
backward pass on CPUs; and its kernels for experts, which need Triton, are missing.
"""

import json
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torchtitan.tools.utils as utils
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from paths import ROOT

sys.path.insert(0, str(ROOT / "recipes" / "torchtitan"))
utils.device_type, utils.device_module = "cpu", torch.cpu
KERNELS = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
KERNELS.__getattr__ = lambda name: None
sys.modules[KERNELS.__name__] = KERNELS

import compressed  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

import gradzip  # noqa: E402

BATCH, LENGTH = 2, 32


def causal_attention(q, k, v, *, scale, enable_gqa, **_):
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


FlexAttention._compiled_flex_attn = staticmethod(causal_attention)


def parallel_dims():
    dims = ParallelDims(
        dp_replicate=2, dp_shard=2, cp=1, tp=1, pp=1, ep=1, world_size=4, spmd_backend="partial_dtensor"
    )
    dims.build_mesh()
    return dims


def build(config, parallelize):
    """The model as torchtitan's Trainer builds it."""
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model = parallelize(
        model, parallel_dims=parallel_dims(), training=config.training, parallelism=config.parallelism,
        compile_config=config.compile, ac_config=None, dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not scale in a sum
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def gradients(model):
    """This rank's shards of the gradients of a batch of its own."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, 2000, (BATCH, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH).contiguous()
    outputs = model(tokens[:, :-1], attention_masks=model.get_attention_masks(positions), positions=positions)
    loss = cross_entropy(outputs.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")
    (loss / (dist.get_world_size() * BATCH * LENGTH)).backward()  # as torchtitan's, by the tokens of all ranks
    return [parameter.grad.to_local() for parameter in model.parameters()]


def main():
    folder, *methods = sys.argv[1:]
    dist.init_process_group("gloo")
    config = compressed.llama3_debugmodel()
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.model_spec.model.update_from_config(config=config)
    parallelize = config.model_spec.parallelize_fn
    wanted, results = gradients(build(config, parallelize)), {}
    for method in methods:
        model = build(config, lambda model, **options: compressed.shard(parallelize, model, **options))
        compressor = gradzip.parse(method)
        gradzip.fsdp.compress(model, compressor, parallel_dims().get_mesh("dp_replicate").get_group())
        errors = [((a - b).norm() / a.norm()).item() for a, b in zip(wanted, gradients(model)) if a.numel()]
        results[method] = {"errors": errors, "bytes_sent": compressor.traffic.bytes_sent}
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # now: a torch thread that frees a Python object during shutdown aborts the process


if __name__ == "__main__":
    main()
