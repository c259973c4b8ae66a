"""Real jobs for test_convergence_benchmark.py, run by horovodrun: `convergence_worker.py FOLDER METHOD ...`.

Each method trains a network as a user's script does. Only network, data and learning rate are those of the benchmark.
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import horovod.torch as hvd
import torch

import gradzip
from paths import ROOT

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "examples"))

import data
from benchmarks.convergence.recipes import Run, load_data
from models import MODELS
from train import cross_entropy, learning_rate

RUN = Run(  # 16 steps an epoch
    "images", "none", 0.05, seed=3, network="cnn", epochs=2, workers=2, batch_size=8, share=0.2, optimizer="sgd",
    betas=(),
)  # fmt: skip


def trained(run):
    """The parameters at the end."""
    dataset = load_data(run, None)
    steps = run.epochs * (len(dataset) // (hvd.size() * run.batch_size))
    torch.manual_seed(run.seed)
    network = MODELS[run.network].build(*dataset.dimensions)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), run.lr, momentum=0.9, weight_decay=5e-4),
        named_parameters=network.named_parameters(),
        compression=gradzip.parse(run.method),
    )
    shard = data.batches(dataset, batch_size=run.batch_size, rank=hvd.rank(), size=hvd.size(), seed=run.seed)
    for step, (inputs, targets) in enumerate(itertools.islice(shard, steps)):
        optimizer.param_groups[0]["lr"] = learning_rate(run.lr, step, steps)
        optimizer.zero_grad()
        cross_entropy(network(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach() for parameter in network.parameters()]


def main():
    folder, *methods = sys.argv[1:]
    hvd.init()
    torch.set_num_threads(1)
    results = {method: trained(replace(RUN, method=method)) for method in methods}
    torch.save(results, Path(folder) / f"{hvd.rank()}.pt")


if __name__ == "__main__":
    main()
