"""How much memory a method keeps on each rank, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..memory.names import innermost, original
from ..methods.base.compressor import Compressor
from .buckets import Plan, bucket_nbytes, cut
from .local import workers_of
from .session import check_compressor


def memory_bytes(
    compressor: Compressor, shapes: nn.Module | Mapping[str, Sequence[int]], size: int | tuple[int, int]
) -> int:
    """Count the bytes that a method keeps on each rank between steps, before training.

    Counted are the tensors of its states: residuals, also those of owners of partitions, factors, velocities, momenta
    and samples. Parameters that are averaged uncompressed keep nothing, except for the velocities of `DGC`. Nothing is
    allocated, and the compressor does not change.

    It is the largest number of any rank after any step. Where that depends on the training, it is a bound:

        Phases              the phase that keeps most
        Momentum            after the warm-up
        Auto                while all methods are compared, each with its states; later, those of one method
        GradiVeQ            at the end of the sampling; with sample_steps="auto", of 200 samples
        exchange="auto"     after the change to "scatter_reduce"

    Not counted: what a step takes in addition, such as the new residual beside the old one (docs/methods.md); memory
    that a CPU reuses; the tensors of `gradzip.outer.LocalSteps`. Buckets are those of Horovod and `LocalGroup`. Other
    buckets have other partitions, whose owners' residuals may differ by some rows or blocks.

    Args:
        compressor: of the whole model.
        shapes: the model, of which the trained parameters count, as FSDP2 the local shards. Or shapes of trained
            parameters by name, in the order of `model.parameters()`, for float32 gradients.
        size: the number of ranks that average; for `Hierarchical`, (nodes, ranks on each node).

    Raises:
        TypeError, ValueError: an argument is none of these.

    >>> import gradzip
    >>> shapes = {"weight": (1024, 1024), "bias": (1024,)}
    >>> gradzip.memory_bytes(gradzip.TopK(theta=0.99), shapes, size=8)  # of the weight alone
    4194304
    >>> gradzip.memory_bytes(gradzip.Hierarchical(gradzip.ACPSGD(rank=4)), shapes, size=(2, 4))  # of a quarter of it
    1069056
    """
    check_compressor(compressor, "memory_bytes")
    worker, *_ = workers_of(size, "memory_bytes")
    likes = dict(_likes(shapes))
    names = {id(like): name for name, like in likes.items()}
    buckets = cut(likes.values(), bucket_nbytes(compressor.bucket_cap_mb, likes.values()))

    def kept(member: Compressor) -> int:
        member.join_group(worker)
        plans = [Plan(member, bucket, [names[id(like)] for like in bucket], "") for bucket in buckets]
        return sum(group.kept_nbytes(worker.rank, worker.size) for plan in plans for group in plan.groups)

    return max(sum(map(kept, members)) for members in compressor.stages(list(likes)))


def _likes(shapes: nn.Module | Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors without memory, of the shapes and dtypes of the gradients, by name."""
    if isinstance(shapes, nn.Module):
        for name, parameter in innermost(shapes).named_parameters():
            own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if parameter.requires_grad and own.numel():
                yield original(name), torch.empty_like(own, device="meta")
        return
    if not isinstance(shapes, Mapping):
        raise TypeError(
            f"memory_bytes: got shapes of type {type(shapes).__name__}, expected the model, or a dict of shapes by "
            "name, as in {'weight': (1024, 1024)}"
        )
    for name, shape in shapes.items():
        if not (isinstance(shape, (list, tuple)) and all(type(n) is int and n >= 0 for n in shape)):
            raise ValueError(f"memory_bytes: got the shape {shape!r} of {name!r}, expected a tuple of integers >= 0")
        yield name, torch.empty(shape, dtype=torch.float32, device="meta")
