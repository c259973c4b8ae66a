"""Scenarios for tests/front_ends/test_nonfinite.py, run by horovodrun or torchrun: `nonfinite_worker.py FOLDER SPEC`.

The results of a method are those of training with and without a step in which one gradient is NaN, by variant.
"""

import contextlib
import copy
import warnings

import torch

import gradzip
from contract import gradient
from harness import UNDER_HOROVOD, Model, data_parallel, job, main

SHAPES = {"b": (48,), "v": (32, 8, 3, 3), "w": (64, 48), "x": (40, 40)}
BAD = "bad"  # the step in which one element of the last rank's gradient of v is NaN
STEPS = [0, 1, 2, BAD, 3, 4, 5]
HOROVOD = ["float32", "clipped", "sum"]
TORCH = ["ddp", "ddp bfloat16", "fsdp", "fsdp bfloat16", "fsdp copied", "fsdp shards"]


def fsdp(model, compressor, shards, **options):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape = (dist.get_world_size() // shards, shards)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"], mp_policy=MixedPrecisionPolicy(**options))
    gradzip.fsdp.compress(model, compressor, mesh["replicate"].get_group())
    return model


def prepare(variant, compressor, shapes=SHAPES, **options):
    """Return the model, and its optimizer, which has these options."""
    adamw = torch.optim.AdamW if compressor.averaged_momentum is None else gradzip.optim.AdamW
    dtype = torch.bfloat16 if variant in ("ddp bfloat16", "fsdp bfloat16", "fsdp copied") else torch.float32
    model, options = Model(shapes, dtype), {"lr": 0.1, "weight_decay": 0.1} | options
    if variant.startswith("fsdp"):
        copied = {"reduce_dtype": torch.float32} if variant == "fsdp copied" else {}
        module = fsdp(model, compressor, 2 if variant == "fsdp shards" else 1, **copied)
        return module, adamw(module.parameters(), **options)
    optimizer = adamw(model.parameters(), **options)
    if variant == "sum":
        import horovod.torch as hvd

        named = model.named_parameters()
        return model, hvd.DistributedOptimizer(optimizer, named, compression=compressor, op=hvd.Sum)
    return data_parallel(model, optimizer, compressor)


def local(tensor):
    return getattr(tensor, "to_local", lambda: tensor)().detach().clone()


def snapshot(module, optimizer, compressor):
    state = [{name: local(v) for name, v in of.items()} for of in optimizer.state_dict()["state"].values()]
    return {
        "parameters": [local(p) for p in module.parameters()],
        "optimizer": state,
        "compressor": copy.deepcopy(compressor.state_dict()),
    }


def train(variant, spec, steps):
    """Return what there is after each step: parameters and states, whether it was skipped, and warnings."""
    compressor = gradzip.parse(spec)
    module, optimizer = prepare(variant, compressor)
    after = []
    for step in steps:
        optimizer.zero_grad()
        gradients = {name: gradient(name, job.rank, step, shape) for name, shape in SHAPES.items()}
        if step == BAD and job.rank == job.size - 1:
            gradients["v"][-1, -1, -1, -1] = torch.nan
        dtype = next(iter(module.parameters())).dtype
        module({name: grad.to(dtype) for name, grad in gradients.items()}).backward()
        with warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as stack:
            warnings.simplefilter("always")
            if variant == "clipped":
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1e3)
                stack.enter_context(optimizer.skip_synchronize())
            optimizer.step()
        messages = [str(w.message) for w in caught if "not finite" in str(w.message)]
        skipped = compressor.last_step_skipped
        after.append(snapshot(module, optimizer, compressor) | {"skipped": skipped, "warnings": messages})
    return after


def of_spec(spec):
    finite = [step for step in STEPS if step != BAD]
    return {
        variant: {"with": train(variant, spec, STEPS), "without": train(variant, spec, finite)}
        for variant in (HOROVOD if UNDER_HOROVOD else TORCH)
    }


if __name__ == "__main__":
    main(of_spec=of_spec)
