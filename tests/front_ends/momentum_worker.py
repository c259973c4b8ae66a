"""Scenarios for tests/front_ends/test_momentum_jobs.py, run by horovodrun or torchrun: AdamW and `Momentum`."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradzip
from contract import SHAPES as FEW
from contract import gradient
from harness import UNDER_HOROVOD, Model, data_parallel, gather, job, main, message, on_request, scenario
from nonfinite_worker import SHAPES, fsdp, local, prepare, snapshot, train

WARMUP, STEPS = 3, 6
SPECS = [f"momentum:inner={inner},warmup_steps={WARMUP}" for inner in ("signsgd(majority=False)", "topk(theta=0.9)")]
VARIANTS = {"horovod": ["float32"], "torch": ["ddp", "fsdp", "fsdp shards"]}
ROWS, LATE_STEPS = 128, 60  # of an embedding, half of which comes after a fifth of the steps
EVERY = 2  # steps between the exchanges of two sites
AUTO, BETAS, AUTO_STEPS = "momentum:inner=signsgd(majority=False),warmup_steps=auto,beta2=0.5", (0.9, 0.5), 14


def settling(name, rank, step):
    """A gradient: that of the first half of w is large at first. The second shard alone would settle earlier."""
    grad = gradient(name, rank, step)
    if name == "w":
        grad[:32] *= 1 + 3 * 0.5**step
    return grad


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


@scenario
def loaded_on_one_rank():
    """Rank 0 loads a state of torch's AdamW and broadcasts it, as Horovod's examples do. No warm-up is needed then."""
    import horovod.torch as hvd

    model, gradients = Model(SHAPES), {name: gradient(name, job.rank, 0, shape) for name, shape in SHAPES.items()}
    compressor = gradzip.Momentum(gradzip.SignSGD(majority=False))
    _, optimizer = data_parallel(model, gradzip.optim.AdamW(model.parameters(), weight_decay=0.0), compressor)
    if job.rank == 0:
        other = Model(SHAPES)
        other(gradients).backward()
        theirs = torch.optim.AdamW(other.parameters(), weight_decay=0.0)
        theirs.step()
        optimizer.load_state_dict(theirs.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model(gradients).backward()
    optimizer.step()
    return snapshot(model, optimizer, compressor)


@scenario
def auto():
    """For each variant: after how many steps the warm-up of each compressed parameter has ended, after each step."""
    found = {}
    for variant in VARIANTS["horovod" if UNDER_HOROVOD else "torch"]:
        compressor = gradzip.parse(AUTO)
        module, optimizer = prepare(variant, compressor, FEW, betas=BETAS)
        found[variant] = []
        for step in range(AUTO_STEPS):
            optimizer.zero_grad()
            module({name: settling(name, job.rank, step) for name in FEW}).backward()
            optimizer.step()
            ended = [fields.get("warmup_steps") for fields in compressor.memory.by_parameter().values()]
            learnt = [int(state["exp_avg_sq_step"]) for state in optimizer.state_dict()["state"].values()]
            found[variant].append((ended, learnt))
    return found


def train_late_rows(variant, compressed):
    """Train an embedding, half of whose rows have their first gradients after the warm-up, on the rank's tokens.

    Returns how far each row of each rank's shard has moved, the bytes that this rank has sent, and the parameters.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(ROWS, 16), torch.nn.Linear(16, 128))
    method, optimizer = gradzip.recipes.adamw(model, LATE_STEPS, 0.01, (0.9, 0.8))
    method = method if compressed else gradzip.NoCompression()
    if variant.startswith("fsdp"):
        module = fsdp(model, method, 2 if variant == "fsdp shards" else 1)
        optimizer = gradzip.optim.AdamW(module.parameters(), 0.01, (0.9, 0.8))
    else:
        module, optimizer = data_parallel(model, optimizer, method)
    start, targets = local(model[0].weight), torch.arange(ROWS) % 128
    generator = torch.Generator().manual_seed(job.rank)
    for step in range(LATE_STEPS):
        tokens = torch.randint(0, ROWS // 2 if step < LATE_STEPS // 5 else ROWS, (64,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(tokens), targets[tokens]).backward()
        optimizer.step()
    return {
        "moved": gather((local(model[0].weight) - start).norm(dim=1)),
        "sent": method.traffic.bytes_sent,
        "parameters": [local(p) for p in model.parameters()],
    }


@scenario
def late_rows():
    variants = VARIANTS["horovod" if UNDER_HOROVOD else "torch"]
    return {variant: [train_late_rows(variant, compressed) for compressed in (False, True)] for variant in variants}


@on_request
def unused():
    """Under DDP, w is used by no rank in a step: the shared momenta, and those of AdamW, after each step, by case."""
    found = {}
    for inner in ("signsgd(majority=False)", "topk(theta=0.9)"):
        for to_none in (True, False):
            compressor = gradzip.parse(f"momentum:inner={inner},warmup_steps=2")
            model = Model(FEW)
            optimizer = gradzip.optim.AdamW(model.parameters(), lr=0.1)
            module = DistributedDataParallel(model, find_unused_parameters=True)
            state = gradzip.ddp.HookState(compressor, named_parameters=model.named_parameters())
            module.register_comm_hook(state, gradzip.ddp.hook)
            after = found[f"{inner}, {to_none}"] = []
            for step in range(7):
                optimizer.zero_grad(set_to_none=to_none)
                skip = "w" if step in (1, 4) else ""
                module({name: gradient(name, job.rank, step) for name in FEW if name != skip}).backward()
                optimizer.step()
                shared = {name: compressor.memory.piece(name, "momentum").clone() for name in ("v", "w")}
                own = {name: optimizer.state[model.get_parameter(name)]["exp_avg"].clone() for name in ("v", "w")}
                after.append((shared, own))
    return found


@on_request
def two_levels():
    """Two sites of two ranks: momenta are averaged in each site, differences between sites. Parameters of each step."""
    site = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][job.rank // 2]
    model = Model(SHAPES)
    optimizer = gradzip.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    replica = DistributedDataParallel(model, process_group=site)
    state = gradzip.ddp.HookState(gradzip.parse(SPECS[0]), site, named_parameters=model.named_parameters())
    replica.register_comm_hook(state, gradzip.ddp.hook)
    gradzip.outer.LocalSteps(replica, optimizer, every=EVERY)
    after = []
    for step in range(EVERY * 4):
        optimizer.zero_grad()
        replica({name: gradient(name, job.rank, step, shape) for name, shape in SHAPES.items()}).backward()
        optimizer.step()
        after.append([p.detach().clone() for p in model.parameters()])
    return after


def of_spec(spec):
    variants = VARIANTS["horovod" if UNDER_HOROVOD else "torch"]
    return {variant: train(variant, spec, range(STEPS)) for variant in variants}


if __name__ == "__main__":
    main(of_spec=of_spec)
