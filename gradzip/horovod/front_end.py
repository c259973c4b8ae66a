"""Horovod's calls of `compress`: which compressor, optimizer and parameter they are about.

`OptimizerContext` has what happens then.
"""

from __future__ import annotations

import itertools
import math
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor

from ..averaging import no_autocast
from ..compressor import Compressor
from ..cost import JOINED
from ..streams import home_streams
from .context import InFlightGradient, OptimizerContext
from .owner import find_owner

# As DDP's bucket_cap_mb, and as in Zhang et al., Evaluation and Optimization of Gradient Compression for Distributed
# Deep Learning, ICDCS 2023, section IV-B.
BUCKET_CAP_MB = JOINED["horovod"]["bucket_nbytes"] / 2**20

# A backward pass has one thread for each device.
_lock = Lock()


def front_end(compressor: Compressor) -> FrontEnd:
    """The front end of a compressor."""
    attachments = compressor.memory.attachments
    return attachments.get("horovod") or attachments.setdefault("horovod", FrontEnd())


def bucketed(compressor: Compressor, bucket_cap_mb: float = BUCKET_CAP_MB) -> Compressor:
    """Set the size of the buckets in which Horovod's gradients are compressed. Returns the compressor itself.

        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(),
            compression=gradzip.horovod.bucketed(gradzip.ACPSGD(), bucket_cap_mb=10),
        )

    A bucket starts when the last of its gradients is computed: large buckets need fewer operations, small ones overlap
    more with the backward pass. A gradient of that size or more is a bucket of its own. Call this before the first step
    of an optimizer. Rank 0's size counts on all ranks. DDP cuts its buckets itself (`bucket_cap_mb` of
    DistributedDataParallel).

    Args:
        bucket_cap_mb: MiB of uncompressed gradients in a bucket. 0: each gradient is a bucket; infinity: all of a dtype
            and device are one.

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
    front_end(compressor).bucket_cap_mb = bucket_cap_mb
    return compressor


class FrontEnd:
    """The optimizers that use one compressor. A copy of the compressor starts with a new one of the same buckets."""

    def __init__(self, bucket_cap_mb: float = BUCKET_CAP_MB) -> None:
        self.bucket_cap_mb = bucket_cap_mb
        self._contexts: WeakKeyDictionary[Any, OptimizerContext] = WeakKeyDictionary()
        self._named: dict[str, dict[str, ref[Any]]] = {}  # prefix -> name -> parameter

    def __reduce__(self) -> tuple[Any, ...]:
        return FrontEnd, (self.bucket_cap_mb,)

    def compress(self, compressor: Compressor, tensor: Tensor) -> tuple[Tensor, InFlightGradient]:
        """Start averaging a gradient. Returns the tensor for Horovod to all-reduce, and `decompress`'s context."""
        optimizer, parameter = find_owner(tensor)
        # The hooks of a bucket may run on several streams: each call waits for its own, on which Horovod then records
        # the event that it starts after.
        with _lock, no_autocast(tensor.device), home_streams(compressor.memory.attachments).on(tensor):
            context = self._contexts.get(optimizer)
            if context is None or context.engine.is_stale:
                prefix = self.prefix(compressor, optimizer)
                context = OptimizerContext(optimizer, compressor, prefix, self.bucket_cap_mb * 2**20)
                self._contexts[optimizer] = context
            context.reset_if_stale(optimizer)
            return context.add(parameter, tensor)

    def drop_in_flight(self) -> None:
        """Drop gradients in flight, and the result of the handshake: the group has changed."""
        self._contexts.clear()

    def prefix(self, compressor: Compressor, optimizer: Any) -> str:
        """The prefix that keeps states of equally named parameters of several optimizers apart.

        The first optimizer with a name gets no prefix for it; a later optimizer of the same parameters gets the same
        prefix. A deleted parameter's state is freed; its name stays reserved, because ranks may delete it at different
        times. Optimizers of a process set are numbered separately: its ranks may have no other optimizer in common.
        """
        for known_prefix, known in self._named.items():
            deleted = [known_prefix + name for name, parameter in known.items() if parameter() is None]
            for part in compressor.parts:
                part.memory.free(deleted)
        names = {name: parameter for parameter, name in optimizer._parameter_names.items()}

        def fits(known: dict[str, ref[Any]]) -> bool:
            return all(name not in known or known[name]() is parameter for name, parameter in names.items())

        number = optimizer.process_set.process_set_id
        group = f"process_set{number}." if number else ""
        prefixes = itertools.chain([group], (f"{group}optimizer{i}." for i in itertools.count(1)))
        prefix = next(p for p in prefixes if fits(self._named.get(p, {})))
        self._named.setdefault(prefix, {}).update((name, ref(parameter)) for name, parameter in names.items())
        return prefix
