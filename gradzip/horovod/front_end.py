"""Horovod's calls of `compress`: which compressor, optimizer and parameter they are about.

`OptimizerContext` has what happens then.
"""

from __future__ import annotations

import math
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from ..averaging.session import Session
from ..methods.base.compressor import Compressor
from .context import InFlightGradient, OptimizerContext
from .owner import find_owner

# By optimizer. Each has one compressor.
_contexts: WeakKeyDictionary[Any, OptimizerContext] = WeakKeyDictionary()

# A backward pass has one thread for each device.
_lock = Lock()


def compress(compressor: Compressor, tensor: Tensor) -> tuple[Tensor, InFlightGradient]:
    """Start averaging a gradient. Returns the tensor for Horovod to all-reduce, and `decompress`'s context."""
    optimizer, parameter = find_owner(tensor)
    # The hooks of a bucket may run on several streams: each call waits for its own, on which Horovod then records the
    # event that it starts after.
    with _lock:
        context = _contexts.get(optimizer)
        if context is None or context.engine.is_stale:
            session = Session(compressor, "compression")
            name_states(session, optimizer)
            context = _contexts[optimizer] = OptimizerContext(optimizer, session)
        with context.session.on_stream_of(tensor):
            context.reset_if_stale(optimizer)
            return context.add(parameter, tensor)


def name_states(session: Session, optimizer: Any) -> None:
    """Choose the names of the states of an optimizer.

    Optimizers of a process set are numbered separately: its ranks may have no other optimizer in common.
    """
    number = optimizer.process_set.process_set_id
    named = {name: parameter for parameter, name in optimizer._parameter_names.items()}
    session.name_states(named, "optimizer", f"process_set{number}." if number else "")


def drop_in_flight(compressor: Compressor) -> None:
    """Drop a compressor's gradients in flight, and the results of handshakes: the group has changed."""
    for optimizer, context in list(_contexts.items()):
        if context.session.compressor is compressor:
            context.session.drop()
            del _contexts[optimizer]


def bucketed(compressor: Compressor, bucket_cap_mb: float = 25.0) -> Compressor:
    """Set the size of the buckets in which gradients are compressed. Returns the compressor itself.

        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(),
            compression=gradzip.horovod.bucketed(gradzip.ACPSGD(), bucket_cap_mb=10),
        )

    A bucket starts when the last of its gradients is computed: large buckets need fewer operations, small ones overlap
    more with the backward pass. A gradient of that size or more is a bucket of its own. Call this before the first step
    of an optimizer. Rank 0's size counts on all ranks. DDP cuts its buckets itself (`bucket_cap_mb` of
    DistributedDataParallel); on a device, consecutive ones are compressed together until they have that size.

    Args:
        bucket_cap_mb: MiB of uncompressed gradients in a bucket. 0: each gradient is a bucket; infinity: all of a dtype
            and device are one. The default is that of DDP, and of Zhang et al., Evaluation and Optimization of
            Gradient Compression for Distributed Deep Learning, ICDCS 2023, section IV-B. Without a call, buckets on a
            device have at least an eighth of the model's parameters.

    Raises:
        ValueError: a size that is not a number >= 0.

    >>> import gradzip
    >>> compressor = gradzip.horovod.bucketed(gradzip.TopK(theta=0.99), bucket_cap_mb=10)
    """
    if not isinstance(compressor, Compressor):
        raise TypeError(f"bucketed: got {compressor!r}, expected a compressor, such as gradzip.TopK()")
    is_number = isinstance(bucket_cap_mb, (int, float)) and not isinstance(bucket_cap_mb, bool)
    if not is_number or math.isnan(bucket_cap_mb) or bucket_cap_mb < 0:
        raise ValueError(f"bucketed: got bucket_cap_mb = {bucket_cap_mb!r}, expected a number >= 0")
    compressor.bucket_cap_mb = float(bucket_cap_mb)
    return compressor
