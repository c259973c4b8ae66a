"""Vector quantization that commutes with the sum: principal components of slices of a convolution's gradient."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..collectives import Broadcast, Gather, Mean, RingSum, ring_segments
from ..collectives.routines import Routine
from ..memory.state import State
from ..ops import tensors as ops
from .base.compressor import Average, Compressor, is_number
from .base.gather import GatherCompressor, from_rank
from .base.group import Group
from .base.registry import register
from .pca import max_dimension, principal_weights

_POSITION = struct.Struct("<QIB3x")  # step, progress in its phase, index of the phase
_PHASES = ("warm-up", "sampling", "compressing")
_SLICE_SIZE = 768  # the paper's, for a 3x3 convolution of 16 by 16 channels
_CHECK_EVERY, _MAX_SAMPLES = 25, 200  # with sample_steps="auto"
# Arguments that are integers, the smallest ones, and what they may be instead.
_LIMITS: tuple[tuple[str, int, Any], ...] = (
    ("slice_size", 1, None), ("reuse", 1, None), ("sample_steps", 2, "auto"), ("compress_steps", 1, ()),
    ("warmup_steps", 0, ()),
)  # fmt: skip
# `sampling` only calls `reduce`: a method that overrides any of these extension points cannot be used for it.
_EXTENSION_POINTS = ("method_for", "max_abs_bound", "apply_averages", "commit")


@register(
    "gradiveq",
    number=32,
    examples=[
        "warmup_steps=0,sample_steps=2,compress_steps=2",
        "warmup_steps=0,sample_steps=2,compress_steps=2,sampling=qsgd(bits=8),exchange=ring",
    ],
)
@dataclass
class GradiVeQ(Compressor):
    """Averages slices of a convolution's gradient in the basis of their principal components.

    The gradient [F, D, *kernel] is laid out with F fastest, then D, width and height, and cut into slices g_n of K
    elements. After `warmup_steps` uncompressed steps, training repeats a cycle: `sample_steps` steps, in which every
    rank samples the averages, and `compress_steps` steps, which average compressed slices:

        compress      g'_n = U^T g_n                            (equation 3), d numbers instead of K
        decompress    g^_n = U mean(g'_n) + (I - U U^T) mu_n    (equations 4 and 5)

    U holds the first d principal components of the samples, with d from equation (6), and mu is the mean of the
    averages. The paper subtracts U^T mu before compression. All ranks know it, so it is not subtracted here, and g' is
    linear in g.

    lambda bounds the loss of the samples, not that of later gradients, which have components that no sample had: the
    number of samples matters more than lambda. docs/methods.md says how much of their energy is lost, and what whole
    runs send.

    Gradients of fewer than three dimensions, such as those of dense layers, bypass compression; `PerLayer` can choose
    another method for them. There is no error feedback: residuals outside of the basis would accumulate until the next
    sampling.

    Args:
        loss: lambda of equation (6), in [0, 1): the fraction of the samples' variance that may be lost. d is also less
            than the number of samples, and leaves out eigenvalues below float32's resolution of their sum (1.2e-7).
        slice_size: K. None chooses F D times the divisor of the kernel's size that gives the size nearest to 768.
            Slices correlate only at multiples of F D (figure 5). The last slice is padded with zeros.
        reuse: number of consecutive slices that share a basis, which is computed from the first of them. None: all
            slices of a gradient. Each slice has its own mu.
        sample_steps: 2 or more, or "auto": rank 0 computes d every 25 samples, and ends the sampling when d has changed
            by at most 1/20 (or by 1) since the last time, or at 200 samples.
        compress_steps: compressed steps in a cycle.
        warmup_steps: uncompressed steps before the first cycle.
        sampling: the method that averages in sampling steps, without error feedback, such as the paper's QSGD(bits=4).
            None does not compress them.
        stop: a rank votes to end the compressed steps when its own gradients have lost at least this fraction of their
            energy (equation (7) over |g_n|^2, each summed over the compressed steps so far). A majority ends them after
            the current step. None never votes. To first order, a projection that loses the fraction l of the energy
            makes the fraction 1 - l of the progress, because <g, U U^T g> = (1 - l) |g|^2. The default, 1/2, drops
            bases that lose more than they keep; a layer that has only such bases is hardly compressed.
        exchange: how compressed steps average. "mean": one all-reduce of all slices, which overlaps with the backward
            pass. "ring": segments of slices go around a ring at the end of the backward pass, and are compressed and
            decompressed while other segments are on the wire (Algorithm 1). The averages differ only by the order in
            which the ranks' numbers are added.

    Payload: 4 d bytes for each slice, and 4 bytes for the vote in each segment. Once per cycle, rank 0 broadcasts U, as
    weights of the samples: 4 (1 + sample_steps^2) bytes for each basis. In the first step of a process and after
    `load_state_dict`, ranks gather a payload header of 48 bytes, to compare their configurations and phases.

    Memory: 4 K sample_steps bytes for each basis, which may be several times the size of the gradient; with "ring", one
    more copy of the gradient.

    Deterministic: products are summed in a fixed order, so all ranks get the same bits of bases and averages. A
    compressed step synchronises a CUDA device, to compute the vote.

    Source: Yu, Lin, Narra, Li, Li, Kim, Schwing, Annavaram, Avestimehr, GradiVeQ: Vector Quantization for
    Bandwidth-Efficient Gradient Aggregation in Distributed CNN Training, NeurIPS 2018.
    """

    number: ClassVar[int]
    loss_scaled: ClassVar = {"samples": 1, "mean": 1, "offset": 1, "energy": 2, "lost": 2}
    rank_local = ("energy", "lost")
    adapts = True
    capture_needs = "another method, such as PowerSGD()"
    vectors = False  # each gradient has slices of its own

    loss: float = 0.01
    slice_size: int | None = None
    reuse: int | None = None
    sample_steps: int | str = 100
    compress_steps: int = 400
    warmup_steps: int = 2500
    # Counted by its own digest.
    sampling: Compressor | None = field(default=None, metadata={"digest": False})
    stop: float | None = 0.5
    # Payloads do not depend on the exchange.
    exchange: str = field(default="mean", kw_only=True, metadata={"digest": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("loss", is_number(self.loss) and 0 <= self.loss < 1, "a number in [0, 1)")
        for name, least, other in _LIMITS:
            value = getattr(self, name)
            valid = (type(value) is int and value >= least) or (other != () and value == other)
            self.check(name, valid, f"an integer >= {least}" if other == () else f"{other!r} or an integer >= {least}")
        self.check("stop", self.stop is None or (is_number(self.stop) and self.stop > 0), "None or a number > 0")
        method = self.sampling
        valid = method is None or (
            isinstance(method, Compressor)
            and not method.error_feedback
            and all(
                getattr(type(method), own) in (getattr(Compressor, own), getattr(GatherCompressor, own))
                for own in _EXTENSION_POINTS
            )
        )
        expected = "None or a method that keeps nothing between steps, such as QSGD(bits=4); on a command line, "
        self.check("sampling", valid, expected + "sampling=qsgd(bits=4)")
        self.check("exchange", self.exchange in ("mean", "ring"), "'mean' or 'ring'")
        self.asymmetric = self.exchange == "ring"
        # At most: the gather of positions, the broadcast of bases, the average.
        self.rounds = 2 + (1 if method is None else method.rounds)
        self._in_step: set[str] = set()  # parameters whose step and phase are known to be equal on all ranks

    def bypasses(self, grad: Tensor) -> bool:
        return grad.dim() < 3 or super().bypasses(grad)

    @property
    def digest(self) -> int:
        sampling = 0 if self.sampling is None else self.sampling.digest
        return super().digest ^ sampling

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        super()._load(state_dict)
        self._in_step.clear()

    def state_shapes(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        slices = self._slices_shape(shape)
        return super().state_shapes(shape) | {"mean": slices, "offset": slices}

    def kept_nbytes(self, group: Group) -> int:
        """At the end of the sampling: the samples, the mean of all slices, and on rank 0 its message with the bases."""
        if not group.compressed:
            return 0
        (shape,) = group.shapes_of_parts
        slices, size = self._slices_shape(shape)
        bases = -(-slices // (self.reuse or slices))
        samples = _MAX_SAMPLES if isinstance(self.sample_steps, str) else self.sample_steps
        message = 1 + bases * max_dimension(samples, size) * samples if group.rank == 0 else 0
        return 4 * (bases * samples * size + slices * size + message)

    def phase(self, state: State) -> str:
        """The phase of a parameter's next step: "warm-up", "sampling" or "compressing"."""
        if state.step < self.warmup_steps:
            return "warm-up"
        return "sampling" if getattr(state, "bases", None) is None else "compressing"

    def reduce(self, group: Group) -> Routine:
        (grad,), state = group.parts, group.state
        if state.name not in self._in_step:
            yield from self._check_position(grad, state)
        if _is_full(state):
            yield from self._broadcast_bases(state)
        phase = self.phase(state)
        if phase == "compressing":
            average = yield from self._average_compressed(grad, state)
            return Average([unflatten(average, grad.shape)])
        if phase == "sampling" and self.sampling is not None:
            if self.sampling.vectors:
                group.parts = [grad.view(self.sampling.joined_shape(grad.shape))]
            average = yield from self.sampling.reduce(group)
            return Average([part.view(grad.shape) for part in average.parts], average.max_abs)
        return Average([(yield Mean(grad))])

    def apply_averages(self, updates: list[tuple[Group, Average]]) -> list[None]:
        for group, average in updates:
            state = group.state
            if getattr(state, "bases", None) is not None:
                state.left -= 1
                if state.left == 0:
                    state.bases = state.offset = state.samples = None
            elif state.step > self.warmup_steps:  # `step` already counts the current one
                self._sample(average.parts[0], state)
        return super().apply_averages(updates)

    def clean(self, state: State) -> None:
        if getattr(state, "samples", None) is not None:
            state.samples[:, state.count :] = 0  # a sample that the step has added

    # --- compressed steps

    def _average_compressed(self, grad: Tensor, state: State) -> Routine:
        """Average a gradient by its coordinates. Returns the average flat, in the order of slices.

        A segment is sent as its coordinates and one more number: the vote in the segment that this rank compresses
        last, and 0 in the others.
        """
        ring = self.exchange == "ring"
        # A ring starts when the slices of all gradients are laid out, so each gradient needs its own memory.
        slices = self._slices(grad, f"slices of {state.name}" if ring else "slices")
        coordinates = sum(len(group) * len(basis) for group, basis in zip(self._groups(slices), state.bases))
        whole = slice(0, len(slices))
        segments = ring_segments(len(slices), state.size, 4 * coordinates / len(slices)) if ring else [whole]
        runs = [self._split_by_basis(segment, state.bases) for segment in segments]
        offset = self._as_slices(state.offset, state)
        shapes = [[(len(basis), rows.stop - rows.start) for rows, basis in of_segment] for of_segment in runs]
        numels = [[*map(math.prod, of_segment), 1] for of_segment in shapes]
        energies: list[Tensor] = []
        votes: list[Tensor] = []

        def encode(i: int) -> Tensor:
            compressed = [compress(slices[rows], basis).reshape(-1) for rows, basis in runs[i]]
            energies.append(self._energies(slices[segments[i]], offset[segments[i]], compressed))
            vote = self._vote(energies, state) if len(energies) == len(segments) else 0.0
            return torch.cat([*compressed, slices.new_tensor([vote])])

        def decode(i: int, mean: Tensor) -> None:
            """Overwrite the segment by its average."""
            *parts, vote = mean.split_with_sizes(numels[i])
            votes.append(vote)
            for part, shape, (rows, basis) in zip(parts, shapes[i], runs[i]):
                torch.add(decompress(part.view(shape), basis), offset[rows], out=slices[rows])

        if ring:
            totals = tuple(map(sum, numels))
            yield RingSum(totals, encode, lambda i, total: decode(i, total / state.size), device=grad.device)
        else:
            decode(0, (yield Mean(encode(0))))
        voted = torch.cat(votes).sum().item() * state.size
        if not math.isfinite(voted):  # with d = 0, there are no coordinates to show that a gradient is not finite
            return torch.full((grad.numel(),), math.nan, dtype=torch.float32, device=grad.device)
        if 2 * round(voted) > state.size:
            state.left = 1
        return slices.view(-1)[: grad.numel()]

    def _split_by_basis(self, rows: slice, bases: list[Tensor]) -> list[tuple[slice, Tensor]]:
        """Split rows into runs that share a basis: (rows of the run, basis)."""
        begin, end = rows.start, rows.stop
        reuse = self.reuse or end
        groups = range(begin // reuse, -(-end // reuse))
        return [(slice(max(begin, g * reuse), min(end, (g + 1) * reuse)), bases[g]) for g in groups]

    def _energies(self, slices: Tensor, offset: Tensor, compressed: list[Tensor]) -> Tensor:
        """|g|^2, |g - offset|^2 and |U^T g|^2 of some slices, in double."""
        rest = self.workspace.empty("rest", tuple(slices.shape), torch.float32, slices.device)
        tensors = [slices, torch.sub(slices, offset, out=rest), torch.cat(compressed)]
        return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in tensors]).square()

    def _vote(self, energies: list[Tensor], state: State) -> float:
        """1 to end the compressed steps, 0 to continue, NaN if this rank's gradient is not finite.

        energies: of all segments. Because U^T offset = 0, the energy lost is |g - U U^T g - offset|^2 =
        |g - offset|^2 - |U^T g|^2, so nothing is decompressed. Synchronises the device.
        """
        energy, missed, found = torch.stack(energies).sum(0).tolist()
        if not math.isfinite(energy):
            return math.nan
        # Both fields are rank-local: if another rank loads the state dict, they are missing.
        state.energy = getattr(state, "energy", 0.0) + energy
        state.lost = getattr(state, "lost", 0.0) + max(0.0, missed - found)
        return float(self.stop is not None and state.lost > 0 and state.lost >= self.stop * state.energy)

    def _slices(self, grad: Tensor, memory: str = "slices") -> Tensor:
        """The slices of a gradient, shape (slices, K). The next call with the same `memory` overwrites them."""
        slices = self.workspace.empty(memory, self._slices_shape(grad.shape), torch.float32, grad.device)
        flat = slices.view(-1)
        unflatten(flat[: grad.numel()], grad.shape).copy_(grad)
        flat[grad.numel() :] = 0
        return slices

    def _slices_shape(self, shape: torch.Size) -> tuple[int, int]:
        numel = shape.numel()
        size = min(self.slice_size, numel) if self.slice_size else best_slice_size(shape)
        return -(-numel // size), size

    def _as_slices(self, flat: Tensor, state: State) -> Tensor:
        """A tensor of the state with the elements of all slices, in the shape of `_slices`."""
        (shape,) = state.shapes.values()
        return flat.view(self._slices_shape(shape))

    def _groups(self, slices: Tensor) -> tuple[Tensor, ...]:
        """Split slices into groups that share a basis."""
        return slices.split(self.reuse or len(slices))

    # --- sampling, and the bases computed from samples

    def _sample(self, average: Tensor, state: State) -> None:
        """Sample the first slice of each group, and update the mean of all slices."""
        slices = self._slices(average)
        first = torch.stack([group[0] for group in self._groups(slices)])
        if getattr(state, "samples", None) is None:
            rows = 2 * _CHECK_EVERY if isinstance(self.sample_steps, str) else self.sample_steps
            state.samples = slices.new_zeros(len(first), rows, slices.shape[1])
            state.count = 0
            state.mean = torch.zeros_like(slices)
        state.samples[:, state.count] = first
        state.count += 1
        # Separate operations round alike on all hardware. The mean of equal gradients is exact, and nothing overflows.
        change = slices.div_(state.count).sub_(self._as_slices(state.mean, state) / state.count)
        state.mean = torch.add(state.mean.view(-1), change.view(-1), out=state.renewed("mean", change))
        if _is_full(state) and state.rank == 0:
            state.learnt = self._encode_bases(state)

    def _encode_bases(self, state: State) -> Tensor:
        """The message that rank 0 broadcasts: 1 if sampling is done, else 0; then each basis, as sample weights."""
        parts, done = [], True
        for centred in self._centred(state):
            weights, stable = principal_weights(centred, self.loss, recent=_CHECK_EVERY)
            parts.append(weights.reshape(-1))
            done = done and stable
        if self.sample_steps != "auto" or state.count >= _MAX_SAMPLES:
            done = True
        return torch.cat([parts[0].new_tensor([done]), *parts])

    def _broadcast_bases(self, state: State) -> Routine:
        """Get the bases from rank 0; or, if sampling is not done, allocate memory for more samples."""
        number, count, size = state.samples.shape
        rank = max_dimension(count, size)
        if state.rank == 0:
            message = state.learnt if getattr(state, "learnt", None) is not None else self._encode_bases(state)
        else:
            message = state.samples.new_zeros(1 + number * rank * count)
        message = yield Broadcast(message)
        state.learnt = None
        if message[0] == 0:
            more = state.samples.new_zeros(number, _CHECK_EVERY, size)
            state.samples = torch.cat([state.samples, more], 1)
            return
        weights = message[1:].view(number, rank, count)
        state.bases, offsets = [], []
        of_groups = self._groups(self._as_slices(state.mean, state))
        for means, part, centred in zip(of_groups, weights, self._centred(state)):
            part = part[(part != 0).any(1)]
            # Samples that are all equal give an empty basis.
            basis = decompress(part.t(), centred).contiguous() if len(part) else centred.new_empty(0, size)
            state.bases.append(basis)
            offsets.append(means - decompress(compress(means, basis), basis))
        state.offset = torch.cat(offsets)
        state.left, state.energy, state.lost = self.compress_steps, 0.0, 0.0
        state.samples = state.mean = None

    def _centred(self, state: State) -> Iterator[Tensor]:
        """For each basis, its samples minus their mean, scaled to a largest magnitude of 1.

        Zeros if the samples are all equal, or if a difference overflows.
        """
        for samples, means in zip(state.samples, self._groups(self._as_slices(state.mean, state))):
            difference = samples - means[0]
            scale = ops.abs_max(difference)
            yield difference.div_(scale) if 0 < scale < math.inf else difference.zero_()

    # --- comparison of steps and phases between ranks

    def _check_position(self, grad: Tensor, state: State) -> Routine:
        """Compare step and phase with those of the other ranks. Raises PayloadError if they differ.

        This runs once per process, and once after a state dict is loaded; later steps cannot differ. The front ends
        compare steps, but these do not determine the phase: votes may end the compressed steps of one run earlier than
        those of another. Ranks with checkpoints of two runs would average coordinates in different bases.
        """
        fields = _POSITION.pack(state.step, _progress(state), _PHASES.index(self.phase(state)))
        number, digest, numel = self.number, self.digest, grad.numel()
        seal = ops.Seal(ops.new_payload(0, grad.device), numel, fields)
        payloads = yield Gather(ops.seal_payloads([seal], method=number, digest=digest)[0])
        try:
            opened = ops.open_payloads(payloads, [numel] * len(payloads), method=number, digest=digest)
            for rank, (_, theirs, _) in enumerate(opened):
                if theirs != fields:
                    here = f"it is in {_describe(theirs)}, this rank in {_describe(fields)}"
                    raise ops.PayloadError(f"{here}: load the same checkpoint on every rank, or none on all", rank)
        except ops.PayloadError as error:
            source = from_rank(error, len(payloads))
            raise ops.PayloadError(f"GradiVeQ, parameter {state.name!r}: {source}") from None
        self._in_step.add(state.name)


def compress(slices: Tensor, basis: Tensor) -> Tensor:
    """U^T g of each slice (equation 3). Linear, so it commutes with the sum over ranks (equation 1).

    Args:
        slices: (m, K), any of the slices that share the basis.
        basis: U^T, (d, K), float32; d may be 0.

    Returns:
        (d, m), a column for each slice.
    """
    if not len(basis):
        return slices.new_empty(0, len(slices))
    # Slices are rows: on a CPU, the bits of one depend on the basis alone, not on which slices a segment of a ring has.
    return ops.low_rank_project(slices, None, basis.t()).t().contiguous()


def decompress(compressed: Tensor, basis: Tensor) -> Tensor:
    """U g' of each slice (equation 5 without its constant). compressed: (d, m). Returns (m, K)."""
    return ops.low_rank_project(basis, None, compressed, transpose=True).t()


def unflatten(flat: Tensor, shape: torch.Size) -> Tensor:
    """View a flat gradient in the paper's layout as [F, D, *kernel].

    In that layout F is the fastest dimension, then D, then the kernel's dimensions from the last to the first (figure
    3a).
    """
    kernel_first = flat.view(*shape[2:], shape[1], shape[0])
    dims = kernel_first.dim()
    return kernel_first.permute(dims - 1, dims - 2, *range(dims - 2))


def best_slice_size(shape: torch.Size) -> int:
    """F D times the divisor of the kernel's size that gives the size nearest to 768; the smaller one of two."""
    kernel, unit = math.prod(shape[2:]), math.prod(shape[:2])
    divisors = [k for k in range(1, kernel + 1) if kernel % k == 0]
    return min((unit * k for k in divisors), key=lambda size: abs(size - _SLICE_SIZE))


def _is_full(state: State) -> bool:
    """Whether the memory allocated for samples is full."""
    samples = getattr(state, "samples", None)
    return samples is not None and state.count == samples.shape[1]


def _progress(state: State) -> int:
    """Progress in the phase: samples taken, or compressed steps left."""
    if getattr(state, "bases", None) is not None:
        return state.left
    return state.count if getattr(state, "samples", None) is not None else 0


def _describe(fields: bytes) -> str:
    step, progress, phase = _POSITION.unpack(fields)
    phase = _PHASES[phase] if phase < len(_PHASES) else "unknown"
    details = {"sampling": f", {progress} taken", "compressing": f", {progress} to go"}
    return f"step {step} ({phase}{details.get(phase, '')})"
