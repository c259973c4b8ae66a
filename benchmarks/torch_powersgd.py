"""Why jobs with torch's `powerSGD_hook` abort on gloo: its ranks start all-reduces in different orders.

A process group matches operations by their order. torch's hook starts the second and the third all-reduce of a bucket
in callbacks of futures, which run as soon as the one before is done, while the backward pass starts those of later
buckets. Which comes first depends on the speed of a rank. Here rank 1 has more examples, and is slower. A run records
the lengths of the all-reduces of both ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

import gradzip
import gradzip.ddp
from benchmarks.common.arguments import Parser, at_least

EXAMPLES = """\
examples:
  python -m benchmarks.torch_powersgd                     three jobs with torch's hook
  python -m benchmarks.torch_powersgd gradzip --runs 5    five with gradzip's
"""
WIDTHS = (700, 800, 900, 700, 800, 900, 700, 800, 900)
STEPS, BATCH = 20, 16
TIMEOUT = 120  # seconds of a run


def network() -> nn.Module:
    return nn.Sequential(*[m for n, k in itertools.pairwise(WIDTHS) for m in (nn.Linear(n, k), nn.ReLU())])


def train(rank: int, hook: str, port: int, folder: Path) -> None:
    """One rank of a job of two. Writes the length of each all-reduce to a file, as it is started."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    all_reduce = dist.all_reduce
    with open(folder / str(rank), "w") as file:

        def recorded(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            print(tensor.numel(), file=file, flush=True)
            return all_reduce(tensor, *arguments, **options)

        dist.all_reduce = recorded
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=2)
        if hook == "torch":
            state = torch_powersgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            model.register_comm_hook(state, torch_powersgd.powerSGD_hook)
        else:
            model.register_comm_hook(gradzip.ddp.HookState(gradzip.PowerSGD(rank=4)), gradzip.ddp.hook)
        for _ in range(STEPS):
            model(torch.randn(BATCH * (1 + rank), WIDTHS[0])).square().mean().backward()
        dist.destroy_process_group()
    os._exit(0)  # now: a torch thread that frees a Python object during shutdown aborts the process


def run(hook: str) -> str:
    """Run a job. Returns how it ended, in words."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=train, args=(rank, hook, port, Path(folder))) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(TIMEOUT)
            process.kill()
            process.join()
        lengths = [(Path(folder) / str(rank)).read_text().split() for rank in range(2)]
    codes = [process.exitcode for process in ranks]
    ended = f"ended after {len(lengths[0])} all-reduces" if codes == [0, 0] else f"aborted, exit codes {codes}"
    return f"{ended}; {order(*lengths)}"


def order(first: list[str], second: list[str]) -> str:
    """Whether two ranks have started their all-reduces in the same order, in words."""
    different = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), None)
    if different is None:
        return "both ranks in the same order"
    return f"number {different} has {first[different]} elements on rank 0 and {second[different]} on rank 1"


def main() -> None:
    parser = Parser("torch_powersgd", __doc__, EXAMPLES)
    parser.add_argument("hook", nargs="?", choices=("torch", "gradzip"), default="torch", help="default: torch")
    parser.add_argument("--runs", type=at_least(1), default=3, metavar="N", help="jobs (default: 3)")
    args = parser.parse_args()
    for number in range(args.runs):
        print(f"run {number}: {run(args.hook)}", flush=True)


if __name__ == "__main__":
    main()
