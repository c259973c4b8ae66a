"""A cost model of a training step with compressed gradients: does compression pay, and which method is fastest?

All times are in seconds, all sizes in bytes. The model is pure arithmetic, and deterministic. It extends equations (1)
to (4) of Wang et al., FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks, HPDC
2020, section 3.3, by

* the costs of collectives in Table II of Zhang et al., Evaluation and Optimization of Gradient Compression for
  Distributed Deep Learning, ICDCS 2023;
* latency;
* the overlap of communication with the backward pass.
"""

from .link import Link
from .local_steps import Exchange, exchange
from .ratio import compression_cost, minimal_ratio
from .simulation import JOINED, SMALL_BUCKET_NBYTES, cut, predict
from .step import Compressed, Layer, Prediction, Step

__all__ = [
    "JOINED", "SMALL_BUCKET_NBYTES", "Compressed", "Exchange", "Layer", "Link", "Prediction", "Step",
    "compression_cost", "cut", "exchange", "minimal_ratio", "predict",
]  # fmt: skip
