"""Scenarios for tests/integrations/test_accelerate.py: `gradzip.integrations.accelerate`."""

import copy
import gc
import warnings
import weakref

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, find_executable_batch_size
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip.integrations.accelerate import Replicas, compress, local_steps
from harness import job, main, message, on_request, scenario

STEPS, SAVED = 6, 3
ROUNDED = "powersgd:rank=2,min_numel=256"
EVERY = 2  # steps between exchanges: the checkpoint comes between two


def network():
    """A network whose parameters and batches are the same in all scenarios."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(48, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 32)
    )


def prepared(steps=STEPS, accumulated=1, scaler=None):
    """What `Accelerator.prepare` returns, on CPUs. Batches have two examples more than a rank's share for each step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    accelerator.scaler = scaler  # which Accelerate makes on GPUs alone
    model = network()
    generator = torch.Generator().manual_seed(1)
    examples = 4 * job.size * steps * accumulated
    data = torch.utils.data.TensorDataset(
        torch.randn(examples, 48, generator=generator), torch.randn(examples, 32, generator=generator)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))


def train(accelerator, model, optimizer, loader, after_step=lambda step: None, first=0):
    """Train as Accelerate's users do. Returns parameters and buffers after each step of the optimizer."""
    after = []
    for x, y in accelerator.skip_first_batches(loader, first):
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            after.append(values(model))
            after_step(first + len(after))
    return after


def values(model):
    return {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}


def train_by_hand(batches, method, accumulated=1, scaler=None):
    """The same with DDP, its hook and torch alone."""
    model = DistributedDataParallel(network())
    gradzip.ddp.register(model, method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    after = []
    for i, (x, y) in enumerate(batches, start=1):
        last = i % accumulated == 0
        model.require_backward_grad_sync = last
        scaler.scale((model(x) - y).square().mean() / accumulated).backward()
        if last:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after.append(values(model))
    return after


@scenario
def averaged():
    """Of training with `compress` and by hand: values after each step, and bytes; also with accumulated gradients."""
    results = {}
    for accumulated in (1, 2):
        accelerator, model, optimizer, loader = prepared(accumulated=accumulated)
        method, by_hand = gradzip.parse(ROUNDED), gradzip.parse(ROUNDED)
        compress(accelerator, model, method)
        after = train(accelerator, model, optimizer, loader)
        results[accumulated] = after, train_by_hand(list(loader), by_hand, accumulated), traffic(method, by_hand)
    return results


def traffic(*methods):
    return [method.traffic.bytes_sent for method in methods]


@scenario
def scaled():
    """The same with a GradScaler, whose scale changes, and an overflow of rank 1 in its second step."""

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    accelerator, model, optimizer, loader = prepared(scaler=scaler())
    batches = [(x, y.clone()) for x, y in loader]
    if job.rank == 1:
        batches[1][1][0, 0] = torch.inf
    by_hand = scaler()
    accelerator.skip_first_batches = lambda loader, first: batches
    compress(accelerator, model, gradzip.parse(ROUNDED))
    after = train(accelerator, model, optimizer, loader)
    return (
        after,
        train_by_hand(batches, gradzip.parse(ROUNDED).follow(by_hand), scaler=by_hand),
        [accelerator.scaler.get_scale(), by_hand.get_scale()],
    )


@scenario
def alone():
    """Values after each step of `local_steps`, and of `gradzip.outer.LocalSteps` without Accelerate."""
    accelerator, model, optimizer, loader = prepared()
    local = local_steps(accelerator, model, optimizer, gradzip.parse(ROUNDED), every=EVERY)
    after = train(accelerator, model, optimizer, loader)
    local.synchronize()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    gradzip.outer.LocalSteps(model, optimizer, gradzip.parse(ROUNDED), every=EVERY)
    by_hand = []
    for x, y in loader:
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        by_hand.append(values(model))
    return after, by_hand, local.outer.exchanges


KINDS = {
    "compress": lambda accelerator, model, optimizer: compress(accelerator, model, gradzip.parse(ROUNDED)),
    "local": lambda *prepared: local_steps(*prepared, gradzip.parse(ROUNDED), every=EVERY),
    "streamed": lambda *prepared: local_steps(*prepared, every=4, fragments=2, delay=1, blend=0.5),
}


@scenario
def uninterrupted(folder):
    """Values after each step, of trainings that save a checkpoint on the way."""
    results = {}
    for kind, start in KINDS.items():
        accelerator, model, optimizer, loader = prepared()
        start(accelerator, model, optimizer)

        def save(step, accelerator=accelerator, kind=kind):
            if step == SAVED:
                accelerator.save_state(folder / kind)

        results[kind] = train(accelerator, model, optimizer, loader, save)
    return results


@on_request
def resumed(folder):
    """Values after each step of the same trainings, from their checkpoints on."""
    results = {}
    for kind, start in KINDS.items():
        accelerator, model, optimizer, loader = prepared()
        start(accelerator, model, optimizer)
        accelerator.load_state(folder / kind)
        results[kind] = train(accelerator, model, optimizer, loader, first=SAVED)
    return results


@on_request
def without_states(folder):
    """Values after each step of the first of them, from its checkpoint on, without residuals."""
    accelerator, model, optimizer, loader = prepared()
    compress(accelerator, model, method := gradzip.parse(ROUNDED))
    accelerator.load_state(folder / "compress")
    method.load_state_dict(gradzip.parse(ROUNDED).state_dict())
    return train(accelerator, model, optimizer, loader, first=SAVED)


@on_request
def on_one_process(folder):
    """What `compress` and `local_steps` return, and what they do with checkpoints of two ranks."""
    accelerator, model, optimizer, loader = prepared()
    method = gradzip.parse(ROUNDED)
    returned = compress(accelerator, model, method)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.load_state(folder / "compress")
    names = sorted(method.state_dict()["states"])
    after = train(accelerator, model, optimizer, loader)
    accelerator, model, optimizer, _ = prepared()
    local = local_steps(accelerator, model, optimizer, gradzip.parse(ROUNDED), every=EVERY)
    local.synchronize()
    return {
        "returned": [returned, local.outer],
        "trained": len(after),
        "warnings": [str(warning.message) for warning in caught],
        "states": names,
        "local": message(accelerator.load_state, folder / "local"),
    }


def sharded():
    """An accelerator as on GPUs, with FSDP2 and replicas, which Accelerate chooses on GPUs alone."""
    accelerator = Accelerator(cpu=True)
    state = accelerator.state
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000, cpu_ram_efficient_loading=False
    )
    state.parallelism_config = Replicas(dp_replicate_size=2, dp_shard_size=2)
    state.device_mesh = state.parallelism_config.get_device_mesh("cpu")
    return accelerator


@on_request
def replicas(folder):
    """With FSDP2, on four ranks: local values after each step, by hand, and resumed from a checkpoint."""

    def start(accelerator):
        model = network()
        del model[1]  # no rank averages its buffers
        method = gradzip.parse(ROUNDED)
        prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        compress(accelerator, prepared[0], method)
        return (*prepared, method)

    def step(model, optimizer, number, backward=torch.Tensor.backward):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        x, y = torch.randn(4, 48, generator=generator), torch.randn(4, 32, generator=generator)
        backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return [parameter.to_local().detach().clone() for parameter in model.parameters()]

    accelerator = sharded()
    model, optimizer, method = start(accelerator)
    after = []
    for number in range(STEPS):
        if number == SAVED:
            accelerator.save_state(folder / "fsdp")
        after.append(step(model, optimizer, number, accelerator.backward))
    by_hand = network()
    del by_hand[1]
    mesh = accelerator.torch_device_mesh
    for module in [by_hand[0], by_hand[2], by_hand]:
        fully_shard(module, mesh=mesh["dp_shard"])
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01)
    same = gradzip.parse(ROUNDED)
    gradzip.fsdp.compress(by_hand, same, mesh["dp_replicate"].get_group())
    after_by_hand = [step(by_hand, optimizer, number) for number in range(STEPS)]

    accelerator = sharded()
    model, optimizer, _ = start(accelerator)
    accelerator.load_state(folder / "fsdp")
    resumed = [step(model, optimizer, number, accelerator.backward) for number in range(SAVED, STEPS)]
    return after, after_by_hand, resumed, traffic(method, same)


@scenario
def again(folder):
    """Models that are alive after a try that ran out of memory, and parts of a checkpoint of the next one; and whether
    local steps begin again with the same model, and a copy of it has no states."""
    found = []
    for kind, start in KINDS.items():
        accelerator, tries, alive = Accelerator(cpu=True), [], []

        @find_executable_batch_size(starting_batch_size=8)
        def train(size, kind=kind, start=start, accelerator=accelerator, tries=tries, alive=alive):
            accelerator.free_memory()
            gc.collect()
            alive.append(sum(model() is not None for model in tries))
            model = network()
            tries.append(weakref.ref(model))
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            start(accelerator, model, optimizer)
            accelerator.backward(model(torch.ones(4, 48)).square().mean())
            optimizer.step()
            if len(tries) == 1:
                raise RuntimeError("CUDA out of memory.")
            accelerator.save_state(folder / f"again {kind}")
            copied = copy.deepcopy(accelerator.unwrap_model(model))
            copied.load_state_dict(accelerator.unwrap_model(model).state_dict())
            if kind != "compress":
                start(accelerator, model, optimizer)
                optimizer.step()

        train()
        states = torch.load(folder / f"again {kind}" / f"gradzip_{job.rank}.pt")["states"]
        found.append((alive, len(states)))
    return found


@scenario
def started():
    """Values after each step of a data-parallel start of all steps, with the method of `compress`."""
    accelerator, model, optimizer, loader = prepared()
    compress(accelerator, model, gradzip.parse(ROUNDED))
    local_steps(accelerator, model, optimizer, every=EVERY, start=STEPS)
    return train(accelerator, model, optimizer, loader)


@scenario
def refused(folder):
    """Errors, by what was wrong."""
    accelerator, model, optimizer, _ = prepared()
    method = gradzip.TopK()
    found = {
        "type": message(compress, accelerator, model, "topk"),
        "accelerator": message(compress, model, model, method),
        "unwrapped": message(compress, accelerator, network(), method),
        "FSDP1": message(
            compress, accelerator, FullyShardedDataParallel(network(), device_id=torch.device("cpu")), method
        ),
    }
    compress(accelerator, model, method)
    found["twice"] = message(compress, accelerator, model, gradzip.TopK())
    accelerator.save_state(folder / "one")
    accelerator, model, optimizer, _ = prepared()
    compress(accelerator, model, gradzip.TopK())
    other = network()
    found["unprepared"] = message(local_steps, accelerator, other, torch.optim.SGD(other.parameters(), 0.1))
    local_steps(accelerator, model, optimizer)
    found["count"] = message(accelerator.load_state, folder / "one")
    for strategy in ("DEEPSPEED", "MEGATRON_LM", "XLA", "FSDP"):  # which need GPUs, or packages, to be chosen
        accelerator.state.distributed_type = DistributedType[strategy]
        found[strategy] = message(compress, accelerator, model, method)
        found[f"local {strategy}"] = message(local_steps, accelerator, model, optimizer)
    return found


if __name__ == "__main__":
    main()
