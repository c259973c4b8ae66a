"""Scenarios for tests/front_ends/test_complex.py, run by horovodrun or torchrun: models with complex parameters."""

import torch
from torch import nn

import gradzip
from contract import gradient
from harness import UNDER_HOROVOD, job, main, scenario

if UNDER_HOROVOD:
    import horovod.torch as hvd
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

STEPS = 3
METHOD = "topk:theta=0.9"
OPTIONS = [{"op": hvd.Sum}, {"groups": True}] if UNDER_HOROVOD else [{"gradient_as_bucket_view": True}]
RUNS = [*((spec, {}) for spec in (METHOD, "powersgd:rank=2", "dgc:theta=0.9")), *((METHOD, of) for of in OPTIONS)]


class Spectrum(nn.Module):
    """Complex parameters; the gradient of `z` is a conjugate view."""

    def __init__(self):
        super().__init__()
        self.z = nn.Parameter(torch.complex(gradient("re", 0, 0, (48, 40)), gradient("im", 0, 0, (48, 40))))
        self.bias = nn.Parameter(torch.complex(*torch.ones(2, 40)))
        self.scale = nn.Parameter(torch.tensor(1.0 + 2.0j))

    def forward(self, x):
        return ((x.to(torch.complex64) @ self.z.conj() + self.bias) * self.scale).abs().square().mean()


class Model(nn.Module):
    """A real matrix, which is compressed, before complex parameters."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(gradient("w", 0, 0, (64, 48)))
        self.spectrum = Spectrum()

    def forward(self, x):
        return self.spectrum(x @ self.w)


def batch(step):
    return gradient("x", job.rank, step, (8, 64))


def values(model, of):
    return {name: of(p).detach().resolve_conj().clone() for name, p in model.named_parameters() if of(p) is not None}


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def last(model, run, end=lambda: None):
    """The averages of the last of some steps, and this rank's own gradients in all of them."""
    for step in range(STEPS):
        model.zero_grad()
        run(batch(step)).backward()
        end()
    own = []
    for step in range(STEPS):
        alone = Model()
        alone(batch(step)).backward()
        own.append(values(alone, lambda p: p.grad))
    return values(model, lambda p: local(p.grad)), own


@scenario
def averages():
    """`last`, under Horovod or DDP."""
    found = []
    for spec, options in RUNS:
        model = Model()
        if UNDER_HOROVOD:
            if "groups" in options:
                options = {"groups": [list(model.parameters())]}
            sgd = torch.optim.SGD(model.parameters(), lr=0.0)
            named = model.named_parameters()
            optimizer = hvd.DistributedOptimizer(sgd, named, compression=gradzip.parse(spec), **options)
            found.append(last(model, model, optimizer.step))
        else:
            ddp = DistributedDataParallel(model, **options)
            gradzip.ddp.register(ddp, gradzip.parse(spec))
            found.append(last(model, ddp))
    return found


@scenario
def local_steps():
    """Parameters after an exchange whose global ones are the mean of the local ones; and these, of this rank."""
    model, own = Model(), Model()
    optimizer, alone = (torch.optim.SGD(of.parameters(), lr=0.1, momentum=0.9) for of in (model, own))
    group = "horovod" if UNDER_HOROVOD else None
    outer = gradzip.outer.LocalSteps(model, optimizer, gradzip.parse(METHOD), every=2, outer=None, group=group)
    for of, by in ((model, optimizer), (own, alone)):
        for step in range(2):
            by.zero_grad()
            of(batch(step)).backward()
            by.step()
    state = outer.state_dict()
    outer.load_state_dict(state)
    outer.remove()
    return values(model, lambda p: p), values(own, lambda p: p)


if not UNDER_HOROVOD:

    @scenario
    def shards():
        """`last`, with FSDP2 over two ranks and averages over replicas."""
        mesh, model = init_device_mesh("cpu", (job.size // 2, 2), mesh_dim_names=("replicate", "shard")), Model()
        model.spectrum.scale.requires_grad_(False).unsqueeze_(0)  # FSDP2 shards no 0-dim parameters
        fully_shard(model.spectrum, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        gradzip.fsdp.compress(model, gradzip.parse(METHOD), mesh["replicate"].get_group())
        return last(model, model)


if __name__ == "__main__":
    main()
