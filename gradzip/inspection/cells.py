"""What each method makes of each layer: error, bytes and time of one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compressor import Compressor
from ..engines.local import LocalGroup
from ..measure import measure_method
from ..measure.method import drop_residuals
from ..replay import Replay, cosine, relative_error, replay
from ..state import State
from .histogram import Histogram


@dataclass(frozen=True)
class Cell:
    """One method's first step of one gradient, without a residual, or the sum over several gradients.

    Args:
        compressed: whether the method compresses the gradient, rather than average it as it is.
        nbytes, dense_nbytes: bytes that a rank sends, headers included; bytes of the gradient.
        lost, whole, sent: |x - x^|^2, |x|^2 and |x^|^2.
        zeros: elements of x^ that are 0.
        clamped: share of the coded values that a fixed range has clamped; None for methods without range floats.
        encode, decode: seconds in the method's own code before the first collective, and after it: of one rank's
            payload. The least of the timed steps: of the even and of the odd ones, and the mean of both.
    """

    compressed: bool
    numel: int
    nbytes: int
    dense_nbytes: int
    lost: float
    whole: float
    sent: float
    zeros: int
    clamped: float | None
    encode: float
    decode: float

    @property
    def error(self) -> float:
        """alpha = |x - x^| / |x|."""
        return relative_error(self.lost, self.whole)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between x and x^."""
        return cosine(self.lost, self.whole, self.sent)

    @property
    def ratio(self) -> float:
        return self.dense_nbytes / self.nbytes if self.nbytes else 1.0


def measure(
    compressor: Compressor, name: str, gradient: Tensor, *, repeats: int = 3, warm: int = 0, bins: int = 0
) -> tuple[Cell, Histogram | None]:
    """Compress one gradient.

    Args:
        gradient: finite; any shape and floating-point dtype.
        repeats: steps to time, rounded up to an even number, after one that is not timed.
        warm: steps on the same gradient before the one that is measured, whose residuals are dropped.
        bins: of the histogram; 0 makes none.

    Deterministic but for the times. Synchronises a device.
    """
    seen = replay(compressor, name, gradient, _state_after(compressor, name, gradient, warm))
    lost, whole = seen.energies
    times = measure_method(compressor, gradient, name, ranks=1, repeats=repeats).compressed
    cell = Cell(
        compressed=not compressor.method_for(name, gradient.shape).bypasses(gradient),
        numel=gradient.numel(),
        nbytes=seen.nbytes,
        dense_nbytes=gradient.numel() * gradient.element_size(),
        lost=lost,
        whole=whole,
        sent=torch.linalg.vector_norm(seen.sent, dtype=torch.float64).item() ** 2,
        zeros=int((seen.sent == 0).sum()),
        clamped=seen.clamped,
        encode=times.encode,
        decode=times.decode,
    )
    return cell, _histogram(seen, bins)


def total(cells: Sequence[Cell]) -> Cell:
    """The cell of all gradients together. The clamped share is the mean, weighted by bytes."""
    clamped = [(cell.clamped, cell.nbytes) for cell in cells if cell.clamped is not None]
    return Cell(
        compressed=any(cell.compressed for cell in cells),
        numel=sum(cell.numel for cell in cells),
        nbytes=sum(cell.nbytes for cell in cells),
        dense_nbytes=sum(cell.dense_nbytes for cell in cells),
        lost=math.fsum(cell.lost for cell in cells),
        whole=math.fsum(cell.whole for cell in cells),
        sent=math.fsum(cell.sent for cell in cells),
        zeros=sum(cell.zeros for cell in cells),
        clamped=sum(c * n for c, n in clamped) / sum(n for _, n in clamped) if clamped else None,
        encode=math.fsum(cell.encode for cell in cells),
        decode=math.fsum(cell.decode for cell in cells),
    )


@dataclass(frozen=True)
class Report:
    """Cells by layer and method, the largest layers first; histograms of those that are drawn."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    methods: list[str]
    cells: dict[tuple[str, str], Cell]
    totals: dict[str, Cell]
    histograms: dict[tuple[str, str], Histogram]

    @property
    def layers(self) -> list[str]:
        return list(self.shapes)

    @property
    def uncompressed(self) -> list[str]:
        """The layers that no method compresses."""
        return [layer for layer in self.layers if not any(self.cells[layer, m].compressed for m in self.methods)]


def inspect(
    gradients: Mapping[str, Tensor],
    compressors: Mapping[str, Compressor],
    *,
    repeats: int = 3,
    warm: int = 0,
    drawn: int = 0,
    advance_progress: Callable[[], object] = lambda: None,
) -> Report:
    """Compress every gradient with every method.

    Args:
        gradients: by layer; finite.
        compressors: by the name to show.
        repeats, warm: of `measure`.
        drawn: the number of layers to make histograms of: the largest ones that any method compresses.
        advance_progress: called after each gradient and method, len(gradients) * len(compressors) times.
    """
    order = sorted(gradients, key=lambda layer: -gradients[layer].numel())
    cells: dict[tuple[str, str], Cell] = {}
    histograms: dict[tuple[str, str], Histogram] = {}
    left = drawn
    for layer in order:
        gradient = gradients[layer]
        bypassed = all(c.method_for(layer, gradient.shape).bypasses(gradient) for c in compressors.values())
        bins = 0 if bypassed or left == 0 else 101
        left -= bins > 0
        for method, compressor in compressors.items():
            cells[layer, method], histogram = measure(
                compressor, layer, gradient, repeats=repeats, warm=warm, bins=bins
            )
            if histogram is not None:
                histograms[layer, method] = histogram
            advance_progress()
    return Report(
        shapes={layer: tuple(gradients[layer].shape) for layer in order},
        dtypes={layer: str(gradients[layer].dtype).removeprefix("torch.") for layer in order},
        methods=list(compressors),
        cells=cells,
        totals={method: total([cells[layer, method] for layer in order]) for method in compressors},
        histograms=histograms,
    )


def _histogram(seen: Replay, bins: int) -> Histogram | None:
    return Histogram.of(seen.wanted, seen.sent, bins) if bins else None


def _state_after(compressor: Compressor, name: str, gradient: Tensor, steps: int) -> State | None:
    """The state after some steps on the same gradient, without residuals and whatever else belongs to one rank."""
    group = LocalGroup(compressor, 1)
    method = group.compressors[0].method_for(name, gradient.shape)
    if method.bypasses(gradient):
        return None
    for _ in range(steps):
        group.average([gradient.float()], name)
        drop_residuals(method)
    return method.states.get(name)
