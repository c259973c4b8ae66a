"""Horovod's calls of `compress` and `decompress`: which compressor, optimizer and parameter they are about.

`OptimizerContext` has what happens then. Horovod calls both for each gradient: here, function calls count.
"""

from __future__ import annotations

import math
import sys
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..averaging.session import Session, check_compressor
from ..memory.names import original
from ..methods.base.compressor import Compressor
from .context import InFlightStep, OptimizerContext
from .owner import find_owner

# By optimizer. Each has one compressor.
_contexts: dict[ref[Any], OptimizerContext] = {}

# A backward pass has one thread for each device.
_lock = Lock()


def compress(compressor: Compressor, *tensor: Tensor) -> tuple[Tensor, tuple[InFlightStep, Tensor]]:
    """Start averaging a gradient. Returns the tensor for Horovod to all-reduce, and `decompress`'s context."""
    if not tensor:  # called on the class, as Horovod calls its own compressions
        raise TypeError("compression: got a class, expected an instance of it, as in compression=gradzip.TopK()")
    (gradient,) = tensor
    # Guess Horovod's variables, and verify.
    caller = sys._getframe(1).f_locals
    optimizer: Any = caller.get("self")
    parameter = caller.get("p")
    if parameter is None or parameter.grad is not gradient:
        optimizer, parameter = find_owner(gradient)
    if gradient.is_conj():  # Horovod writes averages by `set_`, which would leave them conjugated
        parameter.grad = gradient = gradient.resolve_conj()
    with _lock:
        context = _contexts.get(ref(optimizer))
        if context is None or context.step is None or context.handles is not optimizer._handles:
            context = _begin_step(compressor, optimizer, context)
        step: Any = context.step
        if context.sums:
            step.sums.append(gradient)
        if gradient.is_cuda:
            home = compressor.streams.homes.get(gradient.device)
            if home is None or torch.cuda.current_stream(gradient.device) != home:
                compressor.streams.follow(gradient)
        number = id(parameter)
        step.gradients[number] = gradient
        step.waits += 1
        # Its hook was called just before Horovod's, unless Horovod has waited for others.
        used = context.used and context.used[-1] is parameter
        former = None if used else context.former(parameter, gradient)
        bucket = context.waiting.get(number)
        wire = None if bucket is None else bucket.wires.pop(number, None)
        alike = (gradient.dtype, gradient.device, gradient.layout) == (parameter.dtype, parameter.device, torch.strided)
        if bucket is not None and wire is not None and alike and parameter.requires_grad:
            bucket.gradients[number] = gradient
        else:
            wire = context.start_alone(parameter, gradient)
        if former is not None:
            step.unused[number] = gradient, former, wire.zero_()
        if bucket is not None and not bucket.wires:
            context.start(bucket)
        return wire, (step, gradient)


def decompress(compressor: Compressor, reduced: Tensor, of_compress: tuple[InFlightStep, Tensor] | None) -> Tensor:
    """A gradient's average (or sum), in its memory. of_compress: what `compress` returned for it."""
    if of_compress is None:
        return reduced
    step, gradient = of_compress
    if not step.is_over:
        context = step.context()
        if context is None or context.step is not step:
            raise RuntimeError("got the result of a step that was dropped: the group has changed, or it has failed")
        context.finish(reduced.device)
    step.waits -= 1
    if step.unused and not step.waits and (context := step.context()):
        context.complete(step, gradient)
    return gradient


def _begin_step(compressor: Compressor, optimizer: Any, context: OptimizerContext | None) -> OptimizerContext:
    """Begin a step of an optimizer, unless it has begun. Returns its context, a new one if there is none yet."""
    if context is not None and optimizer._handles is not context.handles:
        context.drop(optimizer)  # it drops its gradients when it loads a state dict, maybe on one rank only
    if context is None or (context.step is None and context.engine.is_stale):
        session = Session(compressor, "compression")
        name_states(session, optimizer)
        context = _contexts[ref(optimizer, _forget)] = OptimizerContext(optimizer, session)
    if context.step is None:
        context.begin_step()
    return context


def _forget(optimizer: ref[Any]) -> None:
    _contexts.pop(optimizer, None)


def name_states(session: Session, optimizer: Any) -> None:
    """Choose the names of the states of an optimizer.

    Optimizers of a process set are numbered separately: its ranks may have no other optimizer in common.
    """
    number = optimizer.process_set.process_set_id
    named = {original(name): parameter for parameter, name in optimizer._parameter_names.items()}
    session.name_states(named, "optimizer", f"process_set{number}." if number else "")


def drop_in_flight(compressor: Compressor) -> None:
    """Drop a compressor's gradients in flight, and the results of handshakes: the group has changed."""
    for optimizer, context in list(_contexts.items()):
        if context.session.compressor is compressor:
            context.session.drop()
            _forget(optimizer)


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
    check_compressor(compressor, "bucketed")
    is_number = isinstance(bucket_cap_mb, (int, float)) and not isinstance(bucket_cap_mb, bool)
    if not is_number or math.isnan(bucket_cap_mb) or bucket_cap_mb < 0:
        raise ValueError(f"bucketed: got bucket_cap_mb = {bucket_cap_mb!r}, expected a number >= 0")
    compressor.bucket_cap_mb = float(bucket_cap_mb)
    return compressor
