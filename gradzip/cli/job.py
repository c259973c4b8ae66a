"""The job that a command is a rank of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..engines.base import Engine
from ..traffic import Traffic
from .error import CommandError


@contextmanager
def job() -> Iterator[tuple[Engine, str]]:
    """The engine of the job that this process is a rank of, and its front end: "horovod" or "ddp".

    Raises:
        CommandError: the process is in no job.
    """
    if "HOROVOD_RANK" in os.environ:
        import horovod.torch as hvd

        from ..engines.horovod import HorovodEngine

        hvd.init()
        try:
            yield HorovodEngine(hvd.global_process_set, Traffic()), "horovod"
        finally:
            hvd.shutdown()
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise CommandError(
            "got --measure outside of a job, expected horovodrun -np 2 gradzip advise --measure ..., or "
            "torchrun --nproc-per-node 2 --no-python gradzip advise --measure ..."
        )
    import torch.distributed as dist

    from ..engines.torch import TorchEngine

    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    try:
        yield TorchEngine(dist.group.WORLD, Traffic(), torch.device("cpu")), "ddp"
    finally:
        dist.destroy_process_group()
