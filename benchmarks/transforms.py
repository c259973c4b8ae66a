"""Compare orthonormal transforms of real gradients: relative error against bytes, of values and indices.

The gradients of one worker are captured while the networks of examples/ train (common/gradients.py). Each layer is
transformed, its largest coefficients are kept, and their values become range floats. The error is exact; the bytes are
those of the values and of coded indices, without a header. Errors are interpolated at equal bits per element.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

import data
import gradzip
from benchmarks.common.arguments import Parser, at_least, output_file, picture_file
from benchmarks.common.charts import OTHER_COLORS, pyplot, save
from benchmarks.common.gradients import CAPTURES, QUICK, gradient_files, load_data
from benchmarks.common.palette import METHOD_COLORS
from benchmarks.common.progress import tenths
from benchmarks.common.results import RESULTS, ROOT, Blocks, provenance, replace_blocks, stored, write_json
from benchmarks.common.tables import markdown
from gradzip import ops
from gradzip.methods.base.transform import transform_shape

THETAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995)
BITS = (3, 4, 5, 6, 7, 8, 10, 12)
RATES = (0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # bits per element
PLANE = 1024  # blocks in a tile: a plane is a segment of the index code
INDEX_CODES = ("bitmap", "rice 512", "rice 1024", "rice 2048", "entropy")
RICE = "rice 1024"  # the code of all comparisons
BITS_OF_SWEEP = 6  # best for a layer, see docs/transforms.md
SAMPLE = 1 << 18  # elements: of larger layers, the first output channels stand for all

EXAMPLES = """\
examples:
  python -m benchmarks.transforms --quick                      two networks, a few steps, digits: a minute
  python -m benchmarks.transforms --data cifar-10-batches-bin --text shakespeare.txt --cache gradients \\
      --json benchmarks/results/transforms.json --picture docs/images/transforms.png
  python -m benchmarks.transforms --write                      the table of docs/transforms.md; measures nothing
"""
PAGE, FILE = ROOT / "docs" / "transforms.md", RESULTS / "transforms.json"
START = "<!-- table: python -m benchmarks.transforms --write -->\n\n"


# Transforms: each returns panels (rows, length) of coefficients, and what it leaves as it is in a last panel (m, 1).


@dataclass(frozen=True)
class Transform:
    """An orthonormal transform of a layer's gradient.

    Args:
        panels: gradient -> coefficients, as matrices of one block a row. Complex ones are kept and dropped as pairs.
        flat: ignores layers, so that all layers as one vector are transformed as one vector.
        fits: whether it differs from its neighbours on a layer of this shape.
    """

    name: str
    panels: Callable[[Tensor], list[Tensor]]
    flat: bool = False
    fits: Callable[[torch.Size], bool] = lambda shape: True


def rows_of(x: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The blocks of a flattened tensor, (rows, length), and its tail, (m, 1). A small tensor has shorter blocks."""
    x = x.reshape(-1)
    while length > x.numel():
        length //= 2
    whole = x.numel() // length * length
    return x[:whole].view(-1, length), x[whole:].view(-1, 1)


def dct(x: Tensor) -> Tensor:
    """The orthonormal DCT-II of the rows of x."""
    n = x.shape[-1]
    k = torch.arange(n, dtype=torch.float64)
    if n <= 64:
        matrix = torch.cos(math.pi / n * torch.outer(k, k + 0.5)) * math.sqrt(2 / n)
        matrix[0] /= math.sqrt(2)
        return x @ matrix.t().float()
    reordered = torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], -1)
    turn = torch.polar(torch.full_like(k, math.sqrt(2 / n)), -math.pi / (2 * n) * k)
    turn[0] /= math.sqrt(2)
    return (torch.fft.fft(reordered) * turn.to(torch.complex64)).real


def dct_axes(x: Tensor, axes: int) -> Tensor:
    """The separable DCT-II along the last axes."""
    for axis in range(-axes, 0):
        x = dct(x.transpose(axis, -1)).transpose(axis, -1)
    return x


def identity(x: Tensor) -> list[Tensor]:
    return [x.reshape(-1, 1)]


def dct_blocks(length: int) -> Callable[[Tensor], list[Tensor]]:
    def panels(x: Tensor) -> list[Tensor]:
        rows, tail = rows_of(x, length)
        return [dct(rows), tail]

    return panels


def hadamard_blocks(length: int) -> Callable[[Tensor], list[Tensor]]:
    def panels(x: Tensor) -> list[Tensor]:
        rows, tail = rows_of(x, length)
        width = 1
        while width < rows.shape[1]:
            pairs = rows.view(-1, rows.shape[1] // (2 * width), 2, width)
            pairs = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
            rows, width = pairs.view(rows.shape) / math.sqrt(2), 2 * width
        return [rows, tail]

    return panels


def fft_blocks(block: int | None) -> Callable[[Tensor], list[Tensor]]:
    """As FFTRange: equal rows, padded with zeros. Scaled so that a bin's energy is that of its mirrored twin, too."""

    def panels(x: Tensor) -> list[Tensor]:
        rows, length = transform_shape(x.numel(), block)
        padded = torch.nn.functional.pad(x.reshape(-1), (0, rows * length - x.numel()))
        bins = torch.fft.rfft(padded.view(rows, length), norm="ortho") * math.sqrt(2)
        bins[:, :: length // 2] /= math.sqrt(2)
        return [bins]

    return panels


def kernel_shape(x: Tensor) -> tuple[int, ...]:
    """The kernel of a convolution; (1,) of a matrix or a 1x1 convolution."""
    kernel = tuple(x.shape[2:])
    return kernel if math.prod(kernel) > 1 else (1,)


def dct_kernels(channels: int = 1) -> Callable[[Tensor], list[Tensor]]:
    """Over kernel positions, and over as many consecutive input channels."""

    def panels(x: Tensor) -> list[Tensor]:
        box = (channels, *kernel_shape(x))
        rows, tail = rows_of(x, math.prod(box))
        return [dct_axes(rows.view(-1, *box), len(box)).reshape(rows.shape), tail]

    return panels


def dct_outputs(channels: int) -> Callable[[Tensor], list[Tensor]]:
    """Over kernel positions, and over as many consecutive output channels."""

    def panels(x: Tensor) -> list[Tensor]:
        kernel = kernel_shape(x)
        whole = x.shape[0] // channels * channels
        body = x[:whole].reshape(-1, channels, x.shape[1], *kernel).transpose(1, 2)
        body = dct_axes(body, 1 + len(kernel)).reshape(-1, channels * math.prod(kernel))
        return [body, x[whole:].reshape(-1, 1)]

    return panels


def dct_squares(side: int) -> Callable[[Tensor], list[Tensor]]:
    """Over squares of matrices."""

    def panels(x: Tensor) -> list[Tensor]:
        x = x.flatten(1)
        down, across = (size // side * side for size in x.shape)
        squares = x[:down, :across].reshape(down // side, side, across // side, side).transpose(1, 2)
        tail = torch.cat([x[:down, across:].reshape(-1), x[down:].reshape(-1)])
        return [dct_axes(squares, 2).reshape(-1, side * side), tail.view(-1, 1)]

    return panels


def is_kernel(shape: torch.Size) -> bool:
    return math.prod(shape[2:]) > 1


def is_matrix(shape: torch.Size) -> bool:
    return not is_kernel(shape)


def transforms() -> Iterator[Transform]:
    yield Transform("identity", identity)
    yield Transform("dct kernel", dct_kernels(), fits=is_kernel)
    for channels in (2, 4, 8):
        yield Transform(f"dct kernel x {channels} inputs", dct_kernels(channels), fits=is_kernel)
    for channels in (2, 8):
        yield Transform(f"dct kernel x {channels} outputs", dct_outputs(channels), fits=is_kernel)
    for length in (8, 16, 36, 64, 256, 1024, 4096):
        yield Transform(f"dct {length}", dct_blocks(length))
    for length in (8, 16, 32, 64, 128, 256, 512, 1024, 4096):
        yield Transform(f"fft {length}", fft_blocks(length), flat=True)
    yield Transform("fft whole", fft_blocks(None), flat=True)
    for length in (8, 64, 256, 1024, 4096):
        yield Transform(f"hadamard {length}", hadamard_blocks(length))
    yield Transform("dct rows", lambda x: [dct(x.flatten(1))], fits=is_matrix)
    yield Transform("dct columns", lambda x: [dct(x.flatten(1).t())], fits=is_matrix)
    yield Transform("dct 8 outputs", dct_outputs(8), fits=is_matrix)
    yield Transform("dct 8x8", dct_squares(8), fits=is_matrix)
    # The 4x4 pixels of each channel that AlexNet's first dense layer reads.
    pixels = lambda x: [dct_axes(x.reshape(-1, 4, 4), 2).reshape(-1, 16)]  # noqa: E731
    yield Transform("dct 4x4 pixels", pixels, fits=lambda shape: shape[1:] == (4096,))


# Coefficients, in the order in which a payload holds them.


@dataclass
class Coefficients:
    """Transformed layers.

    Args:
        values: (n,), float32 or complex64.
        planes: (n,) int32, the number of a value's position in its block.
    """

    values: Tensor
    planes: Tensor


def lay_out(panels: list[Tensor]) -> Coefficients:
    """Tiles of PLANE blocks, in each of them plane after plane."""
    values, planes = [], []
    for panel in panels:
        length = panel.shape[1]
        plane = (torch.arange(length, dtype=torch.int32) * min(length, 64) // length).expand(panel.shape)
        values += [tile.t().reshape(-1) for tile in panel.split(PLANE)]
        planes += [tile.t().reshape(-1) for tile in plane.split(PLANE)]
    return Coefficients(torch.cat(values), torch.cat(planes))


def join(parts: list[Coefficients]) -> Coefficients:
    planes, first = [], 0
    for part in parts:
        planes.append(part.planes + first)
        first += int(part.planes.max()) + 1
    return Coefficients(torch.cat([part.values for part in parts]), torch.cat(planes))


# Bytes


def rice_nbytes(indices: np.ndarray, n: int, segment: int) -> int:
    """Size of a code of ascending indices below n.

    Each segment of positions has the Rice parameter that is best for it, and codes its zeros if they are fewer. It
    takes 2 bytes in a table, and, unless it is empty, a byte for the parameter and whole bytes of code.
    """
    segments = -(-n // segment)
    counts = np.bincount(indices // segment, minlength=segments)
    sizes = rice_bits(indices, segments, segment)
    dense = counts > segment // 2
    if dense.any():
        marks = np.repeat(dense, segment)[:n]
        marks[indices] = False
        sizes = np.where(dense, np.minimum(sizes, rice_bits(np.flatnonzero(marks), segments, segment)), sizes)
    return int(2 * segments + (counts > 0).sum() + (-(-sizes // 8)).sum())


def rice_bits(indices: np.ndarray, segments: int, segment: int) -> np.ndarray:
    """Bits of each segment, with its best parameter."""
    owner = indices // segment
    gaps = np.diff(indices, prepend=-1) - 1
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    gaps[first] = indices[first] % segment
    counts = np.bincount(owner, minlength=segments)
    total = np.bincount(owner, weights=gaps, minlength=segments)
    guess = np.log2(np.maximum(total / np.maximum(counts, 1), 1)).astype(np.int64)
    best = np.full(segments, np.inf)
    for parameter in (guess - 1, guess, guess + 1):
        parameter = np.maximum(parameter, 0)
        unary = np.bincount(owner, weights=gaps >> parameter[owner], minlength=segments)
        best = np.minimum(best, unary + counts * (parameter + 1))
    return np.where(counts > 0, best, 0).astype(np.int64)


def entropy_nbytes(indices: np.ndarray, planes: np.ndarray) -> float:
    """Entropy of the marks of kept values, given the density of each plane."""
    totals = np.bincount(planes)
    share = np.bincount(planes[indices], minlength=len(totals)) / np.maximum(totals, 1)
    share = share[(share > 0) & (share < 1)], totals[(share > 0) & (share < 1)]
    p, n = share
    return float((n * -(p * np.log2(p) + (1 - p) * np.log2(1 - p))).sum() / 8)


def index_nbytes(indices: np.ndarray, coefficients: Coefficients, code: str) -> float:
    n = coefficients.values.numel()
    if code == "bitmap":
        return ops.bitmap_nbytes(n)
    if code == "entropy":
        return entropy_nbytes(indices, coefficients.planes.numpy())
    return rice_nbytes(indices, n, int(code.split()[1]))


# Measurements


@dataclass
class Curve:
    """Points of increasing theta: error[bits] and index bits are (thetas,); `value_bits` times N joins the latter."""

    error: dict[int, list[float]]
    index_bits: dict[str, list[float]]  # for each element of the gradient
    values: list[float]  # real values kept for each element of the gradient

    def at(self, rate: float, bits: int, code: str) -> float:
        """The error at a rate, interpolated between thetas; NaN outside."""
        rates = np.array(self.index_bits[code]) + bits * np.array(self.values)
        errors = np.array(self.error[bits])
        order = np.argsort(rates)
        logs = np.log(rates[order]), np.log(np.maximum(errors[order], 1e-9))
        return float(np.exp(np.interp(math.log(rate), *logs, left=np.nan, right=np.nan)))


def measure(coefficients: Coefficients, numel: int, codes: tuple[str, ...], all_bits: tuple[int, ...]) -> Curve:
    values = coefficients.values
    paired = values.is_complex()
    power = values.abs().contiguous()
    total = float(values.abs().double().square().sum())
    curve = Curve({bits: [] for bits in all_bits}, {code: [] for code in codes}, [])
    for theta in THETAS:
        k = max(1, round((1 - theta) * values.numel()))
        bitmap = ops.bitmap(power, ops.select(power, k))
        kept = ops.compact_values(values.contiguous(), bitmap, k)
        kept = torch.view_as_real(kept).reshape(-1) if paired else kept
        dropped = total - float(kept.double().square().sum())
        for bits in all_bits:
            number = ops.RangeFloat.fit(kept, bits)
            wrong = float((number.decode(number.encode(kept)) - kept).double().square().sum())
            curve.error[bits].append(math.sqrt(max(0.0, dropped + wrong) / total))
        indices = ops.bitmap_indices(bitmap, values.numel(), k).numpy().astype(np.int64)
        for code in codes:
            curve.index_bits[code].append(8 * index_nbytes(indices, coefficients, code) / numel)
        curve.values.append(kept.numel() / numel)
    return curve


# The study


@dataclass(frozen=True)
class Line:
    """What the picture and the table show: a transform with its coding, or a method."""

    label: str
    transform: str
    code: str
    bits: int
    color: str
    style: str  # of matplotlib


LINES = [
    Line("Top-k, 10 bits", "identity", RICE, 10, METHOD_COLORS["topk"], ":"),
    Line("Top-k, 6 bits", "identity", RICE, 6, METHOD_COLORS["topk"], "-"),
    Line("FFT 4096, bitmap, 10 bits", "fft 4096", "bitmap", 10, METHOD_COLORS["fft-range"], ":"),
    Line("FFT 64, 6 bits", "fft 64", RICE, 6, METHOD_COLORS["fft-range"], "-"),
    Line("Hadamard 256, 6 bits", "hadamard 256", RICE, 6, OTHER_COLORS[0], "--"),
    Line("DCT by shape, 6 bits", "dct kernel", RICE, 6, METHOD_COLORS["dct-range"], "-"),
    Line("DCTRange(bits=6), measured", "dct-range:theta=...,bits=6", "", 0, METHOD_COLORS["dct-range"], "o"),
]
PICTURED = [line for line in LINES if not line.transform.startswith("hadamard")]
# Methods of gradzip, measured as they are: with true payloads, headers and all.
METHODS = ["fft-range:theta={},block=4096,bits=10", "topk:theta={},bits=10", "dct-range:theta={},bits=6"]
ALL_LAYERS, ONE_VECTOR = "mean of layers", "one vector"
NETWORKS = {"resnet20": "ResNet-20", "resnet18": "ResNet-18", "alexnet": "AlexNet", "charlm": "charlm"}
SHOWN_RATES = (0.5, 1.0, 2.0)  # in the table


def kind(name: str, shape: torch.Size) -> str:
    if len(shape) > 2:
        return f"convolution {'x'.join(map(str, shape[2:]))}"
    kinds = {"qkv": "attention", "project": "attention", "mlp": "perceptron", "characters": "embedding",
             "positions": "embedding", "head": "head"}  # fmt: skip
    return next((found for word, found in kinds.items() if word in name), "dense")


def sample(gradient: Tensor) -> Tensor:
    """The first output channels, at most about SAMPLE elements."""
    return gradient[: max(8, SAMPLE // gradient[0].numel())]


def mean(curves: list[Curve], bits: int = 0, code: str = "") -> list[float | None]:
    """The mean of the curves' errors at RATES, None where one of them has none."""
    errors = [float(np.mean([curve.at(rate, bits, code) for curve in curves])) for rate in RATES]
    return [None if math.isnan(error) else round(error, 4) for error in errors]


def codings(full: bool) -> Iterator[tuple[str, int]]:
    """Which (index code, bits) to measure. full: all bits with two index codes, and all index codes."""
    for code, bits in itertools.product(INDEX_CODES, BITS):
        if (code, bits) == (RICE, BITS_OF_SWEEP) or (full and (code in ("bitmap", RICE) or bits == BITS_OF_SWEEP)):
            yield code, bits


def study(layers: dict[str, Tensor], transform: Transform) -> Iterator[dict[str, object]]:
    """The rows of a transform: for each index code and number of bits, errors at RATES by kind of layer.

    The mean of all layers takes the identity where the transform does not fit.
    """
    full = transform.name in {line.transform for line in LINES}
    codes, all_bits = (tuple(dict.fromkeys(column)) for column in zip(*codings(full)))
    curves: dict[str, Curve] = {}
    kinds: dict[str, list[Curve]] = {}
    for name, x in layers.items():
        x, fits = sample(x), transform.fits(x.shape)
        curves[name] = measure(lay_out((transform.panels if fits else identity)(x)), x.numel(), codes, all_bits)
        if fits:
            kinds.setdefault(kind(name, x.shape), []).append(curves[name])
    if not (kinds or full):
        return
    whole = measure_whole(layers, transform, all_bits) if full or transform.name == "fft whole" else None
    for code, bits in codings(full):
        errors = {ALL_LAYERS: mean(list(curves.values()), bits, code)}
        if whole and code in whole.index_bits:
            errors[ONE_VECTOR] = mean([whole], bits, code)
        if (code, bits) == (RICE, BITS_OF_SWEEP):
            errors |= {name: mean(members, bits, code) for name, members in kinds.items()}
        yield {"transform": transform.name, "indices": code, "bits": bits, "errors": errors}


def measure_whole(layers: dict[str, Tensor], transform: Transform, all_bits: tuple[int, ...]) -> Curve:
    """All layers as one vector, of which the largest coefficients are kept."""
    numel = sum(x.numel() for x in layers.values())
    if transform.flat:
        coefficients = lay_out(transform.panels(torch.cat([x.reshape(-1) for x in layers.values()])))
    else:
        panels = (transform.panels(x) if transform.fits(x.shape) else identity(x) for x in layers.values())
        coefficients = join([lay_out(part) for part in panels])
    return measure(coefficients, numel, ("bitmap", RICE), all_bits)


def study_method(layers: dict[str, Tensor], method: str) -> Iterator[dict[str, object]]:
    """The rows of a method of gradzip, with each layer compressed by itself."""
    kinds: dict[str, list[Curve]] = {}
    for name, x in layers.items():
        curve = Curve({0: []}, {"": []}, [0.0] * len(THETAS))
        for theta in THETAS:
            seen, nbytes = gradzip.roundtrip(gradzip.parse(method.format(theta)), x)
            curve.error[0].append(float((seen - x).double().norm() / x.double().norm()))
            curve.index_bits[""].append(8 * nbytes / x.numel())
        kinds.setdefault(kind(name, x.shape), []).append(curve)
    errors = {ALL_LAYERS: mean([curve for members in kinds.values() for curve in members])}
    errors |= {name: mean(members) for name, members in kinds.items()}
    yield {"method": method.format("..."), "errors": errors}


def task(file: Path, name: str) -> list[dict[str, object]]:
    """The rows of one gradient, with one transform or method. Runs in a process of its own."""
    torch.set_num_threads(1)
    layers = torch.load(file)
    if name in METHODS:
        return list(study_method(layers, name))
    return list(study(layers, next(transform for transform in transforms() if transform.name == name)))


def study_all(
    gradients: list[dict[str, object]], files: list[Path], jobs: int, report: Callable[[float], None]
) -> None:
    """Add the rows of each gradient, of which there is a file."""
    names = [transform.name for transform in transforms()] + METHODS
    tasks = list(itertools.product(range(len(files)), names))
    # Threads that a fork leaves behind would hang the pool.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.map(task, [files[number] for number, _ in tasks], [name for _, name in tasks])
        for done, ((number, _), rows) in enumerate(zip(tasks, results), 1):
            gradients[number].setdefault("rows", []).extend(rows)
            report(done / len(tasks))


# Output


def errors_of(gradient: dict, line: Line) -> list[float | None]:
    """The mean errors of layers on a line of the picture."""
    for row in gradient["rows"]:
        name = row.get("transform") or row["method"]
        if (name, row.get("indices", ""), row.get("bits", 0)) == (line.transform, line.code, line.bits):
            return row["errors"][ALL_LAYERS]
    raise KeyError(line.label)


def title(gradient: dict) -> str:
    return f"{NETWORKS[gradient['model']]}, step {gradient['step']}"


def table(gradients: list[dict]) -> Iterator[str]:
    """Errors at a few rates: a row for each gradient, a column for each line."""

    def cell(gradient: dict, line: Line) -> str:
        errors = dict(zip(RATES, errors_of(gradient, line)))
        shown = (errors[rate] for rate in SHOWN_RATES)
        return " ".join("–" if error is None else f"{error:.3f}".lstrip("0") for error in shown)

    rows = ([title(gradient), *(cell(gradient, line) for line in LINES)] for gradient in gradients)
    return markdown(["", *(line.label for line in LINES)], rows, left=1 + len(LINES))


def by_network(gradients: list[dict]) -> Iterator[str]:
    """The same with a row for each network: means over its steps, at rates that all of them have."""

    def cell(of_network: list[dict], line: Line) -> str:
        errors = [dict(zip(RATES, errors_of(gradient, line))) for gradient in of_network]
        columns = ([of_step[rate] for of_step in errors] for rate in SHOWN_RATES)
        return " ".join("–" if None in column else f"{fmean(column):.2f}".lstrip("0") for column in columns)

    models = dict.fromkeys(gradient["model"] for gradient in gradients)
    groups = {model: [gradient for gradient in gradients if gradient["model"] == model] for model in models}
    rows = ([NETWORKS[model], *(cell(group, line) for line in LINES)] for model, group in groups.items())
    return markdown(["", *(line.label for line in LINES)], rows, left=1 + len(LINES))


def blocks() -> Blocks:
    """The block of docs/transforms.md, from the stored results."""
    with stored(FILE) as content:
        return {(PAGE, START): "\n".join(by_network(content["gradients"])) + "\n"}


def draw(gradients: list[dict], file: Path) -> None:
    """A panel for each gradient, a row of panels for each network: the mean error of layers against bits."""
    models = {model: list(group) for model, group in itertools.groupby(gradients, lambda gradient: gradient["model"])}
    columns = max(map(len, models.values()))
    size = (3.2 * columns, 2.3 * len(models) + 1.2)
    figure, axes = pyplot().subplots(len(models), columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    for row_of_axes, group in zip(axes, models.values()):
        row_of_axes[0].set_ylabel("relative error")
        for ax in row_of_axes[len(group) :]:
            ax.set_visible(False)
        for ax, gradient in zip(row_of_axes, group):
            for line in PICTURED:
                errors = [math.nan if error is None else error for error in errors_of(gradient, line)]
                ax.plot(RATES, errors, line.style, color=line.color, label=line.label, linewidth=1.5, markersize=4)
            ax.set_title(title(gradient), fontsize=10)
            ax.set_xscale("log", base=2)
            ax.set_xticks([0.25, 0.5, 1, 2], ["¼", "½", "1", "2"])
            ax.set_ylim(0, 1)
            ax.grid(alpha=0.3)
    for ax in axes[-1]:
        ax.set_xlabel("bits per element")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=min(3, 2 * columns), frameon=False)
    figure.suptitle(
        "At equal bytes, a DCT of the kernels has the least error; where there are none, no transform helps"
    )
    figure.tight_layout(rect=(0, 0.5 / size[1], 1, 1))
    save(figure, file)


def main() -> None:
    parser = Parser("transforms", __doc__, EXAMPLES)
    parser.add_argument("--data", metavar="DIR", help="folder with CIFAR-10's binary version (default: digits)")
    parser.add_argument("--text", metavar="FILE", help="text for charlm (default: sources of Python's library)")
    parser.add_argument("--cache", metavar="DIR", type=Path, help="keep gradients here, and find them here")
    parser.add_argument("--json", metavar="PATH", type=output_file, help="write all results to this file")
    parser.add_argument("--picture", metavar="PATH", type=picture_file, help="draw errors (needs matplotlib)")
    parser.add_argument("--jobs", metavar="N", type=at_least(1), default=1, help="processes (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two networks, a few steps")
    parser.add_argument("--write", action="store_true", help="write the table of docs/transforms.md, measure nothing")
    args = parser.parse_args()
    if args.write:
        replace_blocks(blocks())
        return
    torch.set_num_threads(1)
    runs = QUICK if args.quick else CAPTURES
    with contextlib.ExitStack() as stack:
        cache = args.cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            datasets = [load_data(run, args.data, args.text) for run in runs]
            gradients, files = [], []
            for run, dataset in zip(runs, datasets):
                with tenths(f"{NETWORKS[run.model]} on {dataset.name}") as report:
                    for step, file in gradient_files(run, dataset, cache, report).items():
                        gradients.append({"model": run.model, "step": step})
                        files.append(file)
        except (data.DataError, OSError) as error:
            parser.fail(str(error))
        with tenths("transforms") as report:
            study_all(gradients, files, args.jobs, report)
    print(f"Mean relative error of layers at {', '.join(f'{rate:g}' for rate in SHOWN_RATES)} bits per element:\n")
    print(*table(gradients), sep="\n")
    if args.json:
        captures = [{**asdict(run), "data": dataset.name} for run, dataset in zip(runs, datasets)]
        about = {"provenance": provenance(), "captures": captures, "rates": RATES, "thetas": THETAS, "sample": SAMPLE}
        write_json(args.json, {**about, "gradients": gradients})
    if args.picture:
        draw(gradients, args.picture)


if __name__ == "__main__":
    main()
