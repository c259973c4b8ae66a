"""Error, bytes and time of one step, for each method and layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..advice.measure import measure_method
from ..averaging.local import LocalGroup
from ..memory.state import State
from ..methods.base.compressor import Compressor
from ..watch.replay import cosine, relative_error, replay

BINS = 101  # of a histogram that is drawn
_QUANTILES = 200
_MOST = 1 << 20  # elements that quantiles are computed from


@dataclass(frozen=True)
class Cell:
    """One step of one gradient x with one method, without a residual; or the sum over several gradients.

    Args:
        compressed: whether the method compresses the gradient.
        clamped: share of the coded values that a fixed range has clamped; None for methods without range floats.
        nbytes, dense_nbytes: bytes that a rank sends, headers included; bytes of the gradient.
        lost, whole, sent: |x - x^|^2, |x|^2 and |x^|^2, where x^ is what peers decode.
        first_lost: |x - x^|^2 of a fresh state's first step: not `lost` if the measured step has started from factors,
            or other memory, of earlier steps.
        zeros: number of elements of x^ that are 0.
        encode, decode: seconds in the method's own code before and after the first collective, for one rank's payload:
            as in `Measurement`.
    """

    compressed: bool
    clamped: float | None
    numel: int
    nbytes: int
    dense_nbytes: int
    lost: float
    whole: float
    sent: float
    first_lost: float
    zeros: int
    encode: float
    decode: float

    @property
    def error(self) -> float:
        """alpha = |x - x^| / |x|."""
        return relative_error(self.lost, self.whole)

    @property
    def first_error(self) -> float:
        """The error of a fresh state's first step."""
        return relative_error(self.first_lost, self.whole)

    @property
    def is_warm(self) -> bool:
        """Whether memory of earlier steps has changed the error by more than 1 %."""
        return abs(self.first_error - self.error) > 0.01 * self.first_error

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
    """Compress one gradient. Deterministic except for times. Synchronises a device.

    Args:
        gradient: finite; any shape and floating-point dtype.
        repeats: steps to time, as in `measure_method`.
        warm: steps on the same gradient before the measured one, for methods that remember more than residuals, such
            as factors. Residuals are dropped.
        bins: of the histogram; 0 makes none.
    """
    first = seen = replay(compressor, name, gradient)
    if (state := _warm_state(compressor, name, gradient, warm)) is not None:
        seen = replay(compressor, name, gradient, state)
    lost, whole = seen.energies
    times = measure_method(compressor, gradient, name, ranks=1, repeats=repeats)
    cell = Cell(
        compressed=not compressor.method_for(name, gradient.shape).bypasses(gradient),
        clamped=seen.clamped,
        numel=gradient.numel(),
        nbytes=seen.nbytes,
        dense_nbytes=gradient.nbytes,
        lost=lost,
        whole=whole,
        sent=torch.linalg.vector_norm(seen.sent, dtype=torch.float64).item() ** 2,
        first_lost=first.energies[0],
        zeros=int((seen.sent == 0).sum()),
        encode=times.encode,
        decode=times.decode,
    )
    return cell, Histogram.of(seen.wanted, seen.sent, bins) if bins else None


def total(cells: Sequence[Cell]) -> Cell:
    """The cell of all gradients together. Its clamped share is the mean, weighted by bytes."""
    clamped = [(cell.clamped, cell.nbytes) for cell in cells if cell.clamped is not None]
    sums = {f.name: sum(getattr(cell, f.name) for cell in cells) for f in fields(Cell)[2:]}
    share = sum(c * n for c, n in clamped) / sum(n for _, n in clamped) if clamped else None
    return Cell(any(cell.compressed for cell in cells), share, **sums)


@dataclass(frozen=True)
class Histogram:
    """Counts of a gradient's elements x and of the sent elements x^ in equal bins, and quantiles of the error.

    Args:
        low, high: ends of the first and the last bin, which also count the elements beyond them.
        wanted, sent: numbers of elements of x and of x^ in each bin.
        errors: |x_i - x^_i| at the quantiles 0, 1 / n, ..., 1, ascending.

    Source: Wang et al., HPDC 2020, figure 15.
    """

    low: float
    high: float
    wanted: list[int]
    sent: list[int]
    errors: list[float]

    @classmethod
    def of(cls, wanted: Tensor, sent: Tensor, bins: int) -> Histogram:
        """The histogram of a gradient before and after (float32). 0.1 % of its elements are beyond the range."""
        x, y = wanted.reshape(-1), sent.reshape(-1)
        step = -(-x.numel() // _MOST)
        limit = torch.quantile(x[::step].abs(), 0.999).item() or 1.0
        error = torch.quantile((x - y)[::step].abs(), torch.linspace(0, 1, _QUANTILES + 1, device=x.device))
        return cls(-limit, limit, _counts(x, limit, bins), _counts(y, limit, bins), error.tolist())


def _counts(x: Tensor, limit: float, bins: int) -> list[int]:
    return torch.histc(x.clamp(-limit, limit), bins, -limit, limit).long().tolist()


@dataclass(frozen=True)
class Report:
    """The gradients by layer, the largest first; cells and histograms by layer and method; and totals by method."""

    gradients: dict[str, Tensor]
    totals: dict[str, Cell]
    cells: dict[tuple[str, str], Cell]
    histograms: dict[tuple[str, str], Histogram]

    @property
    def uncompressed(self) -> list[str]:
        """The layers that no method compresses."""
        return [layer for layer in self.gradients if not any(self.cells[layer, m].compressed for m in self.totals)]

    def title(self, layer: str) -> str:
        """The name, shape, type and size of a layer."""
        x = self.gradients[layer]
        kind = "" if x.dtype == torch.float32 else f" {x.dtype}".replace("torch.", "")
        return f"{layer}  {'×'.join(map(str, x.shape)) or 'scalar'}{kind}, {x.numel():,} elements"


def inspect(
    gradients: Mapping[str, Tensor],
    compressors: Mapping[str, Compressor],
    *,
    repeats: int,
    warm: int = 0,
    drawn: int = 0,
) -> Report:
    """Compress every gradient with every method.

    Args:
        gradients: by layer; finite.
        compressors: by the name to show.
        repeats, warm: of `measure`.
        drawn: number of layers to make histograms of: the largest ones that any method compresses.
    """
    cells: dict[tuple[str, str], Cell] = {}
    histograms: dict[tuple[str, str], Histogram] = {}
    ordered = dict(sorted(gradients.items(), key=lambda item: -item[1].numel()))
    for layer, gradient in ordered.items():
        bypassed = all(c.method_for(layer, gradient.shape).bypasses(gradient) for c in compressors.values())
        bins = 0 if bypassed or drawn == 0 else BINS
        drawn -= bins > 0
        for method, compressor in compressors.items():
            cells[layer, method], histogram = measure(
                compressor, layer, gradient, repeats=repeats, warm=warm, bins=bins
            )
            if histogram is not None:
                histograms[layer, method] = histogram
    totals = {method: total([cells[layer, method] for layer in ordered]) for method in compressors}
    return Report(ordered, totals, cells, histograms)


def _warm_state(compressor: Compressor, name: str, gradient: Tensor, steps: int) -> State | None:
    """The state after some steps on the same gradient, without rank-local fields.

    None: there are no steps, the method bypasses the gradient, or it remembers nothing else.
    """
    group = LocalGroup(compressor, 1)
    method = group.compressors[0].method_for(name, gradient.shape)
    if steps == 0 or method.bypasses(gradient):
        return None
    for _ in range(steps):
        group.average([gradient.float()], name)
        method.memory.drop_rank_local()
        if not any(isinstance(value, (Tensor, list)) for value in method.memory.parked[name].values()):
            return None
    return method.memory.begin_step({name: gradient.shape}, method.state_shapes, gradient.device, 0, 1)
