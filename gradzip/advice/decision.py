"""Whether to compress: the predicted gain of the fastest method, against the margin of error of predicted gains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FP32, FP16 = "none", "fp16"

# Margin of error: in the measured training steps that the margin is taken from, 19 of 20 methods that are predicted to
# gain lose less than this against their predicted gain. `python -m benchmarks.training.decisions` computes it.
MARGIN = 0.21

# Use fp16 in place of fp32 only if it is faster by this share: it costs next to nothing, but it can overflow.
FP16_PAYS = 0.02


@dataclass(frozen=True)
class Decision:
    """What to use.

    stock: fp32 or fp16: the faster one, or fp32 if fp16 is hardly faster.
    fastest: the fastest of the methods that may be used; None if there are none.
    gain: the share of the faster of fp32's and fp16's step that `fastest` saves. 0 without one; negative if slower.
    margin: the gain must exceed it.
    """

    stock: str
    fastest: str | None
    gain: float
    margin: float

    @property
    def compresses(self) -> bool:
        return self.gain > self.margin

    @property
    def chosen(self) -> str:
        return self.fastest if self.fastest and self.compresses else self.stock


def decide(seconds: Mapping[str, float], allowed: Iterable[str] | None = None, margin: float = MARGIN) -> Decision:
    """Choose among methods by their predicted steps.

    Args:
        seconds: of a step, by method. `FP32` or `FP16` is among them.
        allowed: the methods that may be used beside those two. None: all.
        margin: of error, as a share of a step.

    >>> decide({"none": 0.5, "fp16": 0.4, "acpsgd": 0.2, "topk": 0.3}).chosen
    'acpsgd'
    >>> decide({"none": 0.5, "fp16": 0.4, "acpsgd": 0.2, "topk": 0.36}, allowed=["topk"]).chosen
    'fp16'
    """
    stock = min((name for name in (FP32, FP16) if name in seconds), key=seconds.__getitem__)
    least = seconds[stock]
    if FP32 in seconds and (1 - FP16_PAYS) * seconds[FP32] <= least:
        stock = FP32
    methods = [name for name in (seconds if allowed is None else allowed) if name not in (FP32, FP16)]
    fastest = min(methods, key=seconds.__getitem__, default=None)
    gain = 0.0 if fastest is None else 1 - seconds[fastest] / least
    return Decision(stock, fastest, gain, margin)
