"""One rank of benchmarks/training.py: train some steps with one variant, and write the results."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

RANK = int(os.environ.get("HOROVOD_LOCAL_RANK", os.environ.get("LOCAL_RANK", 0)))
RANKS = int(os.environ.get("HOROVOD_LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", 1)))


def pin() -> None:
    """Give each rank its own cores, if there are enough."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if share := len(cores) // RANKS:
            os.sched_setaffinity(0, cores[RANK * share : (RANK + 1) * share])


if __name__ == "__main__":
    pin()  # before threads start, which inherit it

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.optim import Optimizer  # noqa: E402

import gradzip  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import data  # noqa: E402
from models import MODELS  # noqa: E402


class Exchange(ABC):
    """How gradients are averaged: by a front end, with or without compression.

    Args:
        compressor: of gradzip; None for the front end's own exchange.
        itemsize: bytes for each element in the front end's own exchange.
    """

    def __init__(self, compressor: gradzip.Compressor | None = None, itemsize: int = 4) -> None:
        self.compressor = compressor
        self.itemsize = itemsize

    @abstractmethod
    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Make the model and the optimizer average gradients. Returns what to train in place of them."""

    @abstractmethod
    def gather(self, row: Tensor) -> Tensor:
        """Gather the rows (n) of all ranks: (ranks, n). Blocks until all ranks have called it."""

    @abstractmethod
    def end(self) -> None:
        """Leave the group."""

    def sent(self) -> int | None:
        """Payload bytes that this rank has sent so far; None if nothing counts them."""
        return self.compressor.traffic.bytes_sent if self.compressor else None


class Horovod(Exchange):
    def __init__(self, compressor: gradzip.Compressor | None = None, itemsize: int = 4) -> None:
        import horovod.torch as hvd

        super().__init__(compressor, itemsize)
        self.hvd = hvd
        hvd.init()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        own = self.hvd.Compression.fp16 if self.itemsize == 2 else self.hvd.Compression.none
        self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        names = model.named_parameters()
        return model, self.hvd.DistributedOptimizer(optimizer, names, compression=self.compressor or own)

    def gather(self, row: Tensor) -> Tensor:
        return self.hvd.allgather(row[None], name="benchmark")

    def end(self) -> None:
        self.hvd.shutdown()


class DDP(Exchange):
    def __init__(self, compressor: gradzip.Compressor | None = None, itemsize: int = 4) -> None:
        super().__init__(compressor, itemsize)
        torch.distributed.init_process_group("gloo")

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        model = nn.parallel.DistributedDataParallel(model)
        self.hook(model)
        return model, optimizer

    def hook(self, model: nn.parallel.DistributedDataParallel) -> None:
        if self.compressor:
            from gradzip import ddp

            model.register_comm_hook(
                ddp.HookState(self.compressor, named_parameters=model.module.named_parameters()), ddp.hook
            )
        elif self.itemsize == 2:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.register_comm_hook(None, fp16_compress_hook)

    def gather(self, row: Tensor) -> Tensor:
        rows = [torch.empty_like(row) for _ in range(RANKS)]
        torch.distributed.all_gather(rows, row)
        return torch.stack(rows)

    def end(self) -> None:
        torch.distributed.destroy_process_group()
        os._exit(0)  # now: a torch thread that frees a Python object during shutdown aborts the process


class PowerSGDHook(DDP):
    """PyTorch's powerSGD_hook at rank 4, from step 2, the first that it allows (default: 1000)."""

    def hook(self, model: nn.parallel.DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self.state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)

    def sent(self) -> int | None:
        return 4 * self.state.compression_stats()[2]


class NoExchange(DDP):
    """No exchange of gradients."""

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        return model, optimizer


STOCK: dict[str, Callable[[], Exchange]] = {
    "compute": lambda: NoExchange(itemsize=0),
    "horovod": Horovod,
    "horovod-fp16": lambda: Horovod(itemsize=2),
    "ddp": DDP,
    "ddp-fp16": lambda: DDP(itemsize=2),
    "ddp-powersgd": PowerSGDHook,
}


def exchange(variant: str) -> Exchange:
    """The exchange of a variant: a name in STOCK, horovod:SPEC or ddp:SPEC."""
    if variant in STOCK:
        return STOCK[variant]()
    front, _, spec = variant.partition(":")
    return {"horovod": Horovod, "ddp": DDP}[front](gradzip.parse(spec))


def loopback_bytes() -> int:
    """Bytes that this network namespace's loopback has transmitted."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def measure(args: argparse.Namespace, ranks: Exchange) -> dict[str, object]:
    recipe = MODELS[args.model]
    dataset = recipe.data(args.data)
    torch.manual_seed(args.seed)
    model = recipe.build(*dataset.dimensions)
    torch.manual_seed(args.seed + RANK)  # for dropout masks
    parameters = list(model.parameters())
    # A low learning rate, because there is no warm-up. DGC has its own momentum.
    momentum = 0.0 if isinstance(ranks.compressor, gradzip.DGC) else 0.9
    optimizer = recipe.optimizer(parameters, recipe.lr / 10, momentum)
    model, optimizer = ranks.wrap(model, optimizer)
    # Load batches first, so that no rank waits for another's data.
    shard = data.batches(dataset, batch_size=args.batch_size, rank=RANK, size=RANKS, seed=args.seed)
    batches = list(itertools.islice(shard, args.warmup + args.steps))

    losses: list[float] = []

    def train(inputs: Tensor, labels: Tensor) -> float:
        """Train one step. Returns milliseconds."""
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        elapsed = time.perf_counter() - start
        losses.append(loss.item())
        return 1000 * elapsed

    def counters() -> tuple[int, int | None]:
        ranks.gather(torch.zeros(1))  # a barrier
        return loopback_bytes(), ranks.sent()

    for batch in batches[: args.warmup]:
        train(*batch)
    wire, payload = counters()
    times = [train(*batch) for batch in batches[args.warmup :]]
    wire_after, payload_after = counters()

    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters)).digest()
    digests = ranks.gather(torch.tensor(list(digest), dtype=torch.uint8))
    finite = ranks.gather(torch.tensor([math.isfinite(sum(losses))], dtype=torch.uint8))
    if payload is None or payload_after is None:
        sent = ranks.itemsize * sum(p.numel() for p in parameters)
    else:
        sent = (payload_after - payload) / args.steps
    return {
        "ms": times,
        "wire_bytes": (wire_after - wire) / args.steps / RANKS,
        "payload_bytes": sent,
        "identical": bool((digests == digests[0]).all()),
        "finite": bool(finite.all()),
        "parameters": sum(p.numel() for p in parameters),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data")
    for name in ("batch-size", "warmup", "steps", "threads", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ranks = exchange(args.variant)
    result = measure(args, ranks)
    if RANK == 0:
        args.json.write_text(json.dumps(result))
    ranks.end()


if __name__ == "__main__":
    main()
