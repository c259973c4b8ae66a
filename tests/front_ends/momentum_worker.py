"""Scenarios for tests/front_ends/test_momentum_jobs.py, run by horovodrun or torchrun: AdamW and `Momentum`."""

import torch

import gradzip
from contract import gradient
from harness import UNDER_HOROVOD, Model, data_parallel, job, main, message, scenario
from nonfinite_worker import SHAPES, train

WARMUP, STEPS = 3, 6
SPECS = [f"momentum:inner={inner},warmup_steps={WARMUP}" for inner in ("signsgd(majority=False)", "topk(theta=0.9)")]
VARIANTS = {"horovod": ["float32"], "torch": ["ddp", "fsdp", "fsdp shards"]}


@scenario
def refused():
    """The error of the first step of optimizers that do not fit, and how far a parameter has moved by then."""
    found = {}
    for name, kind, warmup in (
        ("torch", torch.optim.AdamW, WARMUP),
        ("momentum", lambda params: gradzip.optim.AdamW(params, betas=(0.8, 0.99)), WARMUP),
        ("at once", gradzip.optim.AdamW, 0),
    ):
        model = Model(SHAPES)
        compressor = gradzip.Momentum(gradzip.SignSGD(), warmup_steps=warmup)
        module, optimizer = data_parallel(model, kind(model.parameters()), compressor)
        module({name: gradient(name, job.rank, 0, shape) for name, shape in SHAPES.items()}).backward()
        moved = sum(p.abs().sum().item() for p in model.parameters())
        found[name] = message(optimizer.step), moved
    return found


def of_spec(spec):
    variants = VARIANTS["horovod" if UNDER_HOROVOD else "torch"]
    return {variant: train(variant, spec, range(STEPS)) for variant in variants}


if __name__ == "__main__":
    main(of_spec=of_spec)
