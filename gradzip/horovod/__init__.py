"""Front end for stock Horovod: `hvd.DistributedOptimizer(..., compression=gradzip.FFTRange())`.

`gradzip.horovod.Compression` has every method as an attribute, as `hvd.Compression` has its own:
``gradzip.horovod.Compression.fft_range(theta=0.85)``. `gradzip.horovod.elastic_state` is `hvd.elastic.TorchState` with
the compressors' states. Both import Horovod when they are first used.
`gradzip.horovod.bucketed` sets the size of its buckets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..methods.base.compressor import Compressor
from .front_end import bucketed, compress, decompress

if TYPE_CHECKING:
    from .elastic import elastic_state

__all__ = ["Compression", "bucketed", "elastic_state"]

Compressor.compress, Compressor.decompress = compress, decompress


def __getattr__(name: str) -> Any:
    if name == "elastic_state":
        from .elastic import elastic_state

        return elastic_state
    if name != "Compression":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import horovod.torch as hvd

    from ..methods.base.registry import registered

    # .none and .fp16 stay Horovod's own.
    names = {key.replace("-", "_"): method for key, method in registered().items()}
    members = {key: method for key, method in names.items() if not hasattr(hvd.Compression, key)}
    globals()[name] = type(name, (hvd.Compression,), members)
    return globals()[name]
