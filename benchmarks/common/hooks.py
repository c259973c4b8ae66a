"""Hooks of DDP that gradzip's are compared with: torch's own, and the FP8 hook that people write themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

BLOCK = 128  # elements with one scale
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def _powersgd(model: DistributedDataParallel, **options: int) -> None:
    model.register_comm_hook(torch_powersgd.PowerSGDState(None, **options), torch_powersgd.powerSGD_hook)


# By the name of a row: what registers the hook.
HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "fp16 hook": lambda model: model.register_comm_hook(None, fp16_compress_hook),
    "bf16 hook": lambda model: model.register_comm_hook(None, bf16_compress_hook),
    "PowerSGD hook": lambda model: _powersgd(model, matrix_approximation_rank=4, start_powerSGD_iter=2),
    # Without annotations, which torch compares with classes, not with their names.
    "FP8 hook": lambda model: model.register_comm_hook(None, lambda group, bucket: fp8_hook(group, bucket)),
}

# Those that are trained on CPUs. DDP refuses torch's bf16 hook by its name there, but gloo adds in bfloat16, too.
TRAINED = HOOKS | {
    "bf16 hook": lambda model: model.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket)),
    "PowerSGD hook, defaults": _powersgd,  # rank 1, from step 1000 on
}


def fp8_hook(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket in FP8 (E4M3), with a scale for each 128 elements, and without error feedback.

    An all-to-all of encoded parts, which their owners add in float32, encode again, and all-gather.
    """
    group = group or dist.group.WORLD
    size, flat = dist.get_world_size(group), bucket.buffer()
    part = -(-flat.numel() // (size * BLOCK)) * BLOCK
    padded = torch.nn.functional.pad(flat, (0, size * part - flat.numel()))
    sent = _encode(padded)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    own = _encode(_decode(received).view(size, part).sum(0).div_(size))
    gathered = own.new_empty(size * own.shape[0], own.shape[1])
    work = dist.all_gather(list(gathered.chunk(size)), own, group=group, async_op=True)

    def decode(_: Future[object]) -> Tensor:
        return flat.copy_(_decode(gathered)[: flat.numel()])

    future: Future[Tensor] = work.get_future().then(decode)
    return future


def _encode(x: Tensor) -> Tensor:
    """Return a row of bytes for each block: its scale (float32), and its elements."""
    blocks = x.float().view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).div_(LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return torch.cat([scales.view(torch.uint8), (blocks / scales).to(torch.float8_e4m3fn).view(torch.uint8)], 1)


def _decode(rows: Tensor) -> Tensor:
    scales, elements = rows[:, :4].contiguous().view(torch.float32), rows[:, 4:].contiguous()
    return (elements.view(torch.float8_e4m3fn).float() * scales).flatten()
