"""DDP with compressed gradients, in one file: a small network on scikit-learn's digits.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py

Compression is the line that calls gradzip. On GPUs, each process takes one, and NCCL connects them.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import functional

import gradzip

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
dist.init_process_group("nccl" if cuda else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()

pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
pixels = pixels.float() / 16
test = (pixels[1500:].to(device), labels[1500:].to(device))
train = torch.utils.data.TensorDataset(pixels[:1500], labels[:1500])
sampler = torch.utils.data.DistributedSampler(train, size, rank)
batches = torch.utils.data.DataLoader(train, batch_size=25, sampler=sampler)

network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to(device)
model = torch.nn.parallel.DistributedDataParallel(network)
state = gradzip.ddp.register(model, gradzip.BlockFloat())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in batches:
        loss = functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        accuracy = (network(test[0]).argmax(1) == test[1]).float().mean().item()
    if rank == 0:
        fewer = state.traffic.wire_ratio(size)
        print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}, {fewer:.2f} times fewer bytes sent")

dist.destroy_process_group()
