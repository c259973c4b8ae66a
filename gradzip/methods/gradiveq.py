"""Vector quantization that commutes with the sum: slices of a convolution's gradient in a basis of few vectors.

Yu, Lin, Narra, Li, Li, Kim, Schwing, Annavaram, Avestimehr, GradiVeQ: Vector Quantization for Bandwidth-Efficient
Gradient Aggregation in Distributed CNN Training, NeurIPS 2018.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops
from ..collectives import Broadcast, Gather, Mean, RingSum, Routine, ring_segments
from ..compressor import Compressor
from ..gather import attribute_payload_errors
from ..registry import register
from ..state import State
from .fft import one_thread

_POSITION = struct.Struct("<QIB3x")  # step, how far its phase has come, the phase
_PHASES = ("warm-up", "sampling", "compressing")
_SLICE = 768  # of a 3x3 convolution of 16 by 16 channels, in the paper
_LOOK_EVERY, _LOOK_MOST = 25, 200  # samples, for "auto"
# Hooks besides `reduce`. A method that overrides one of them cannot serve as `sampling`.
_HOOKS = ("method_for", "add_residual", "max_abs_bound", "apply_average")


@register("gradiveq", number=32, example="warmup_steps=0,sample_steps=2,compress_steps=2")
@dataclass
class GradiVeQ(Compressor):
    """Averages the coordinates of gradient slices in the basis of their principal components.

    The gradient of a convolution, [F, D, *kernel], is laid out so that the F elements of one place are neighbours, then
    along depth, width and height, and cut into slices of K elements. After `warmup_steps` plain averages come, again
    and again, `sample_steps` averages that every rank keeps samples of, and `compress_steps` in which only

        g'_n = U^T g_n    (equation 3; d numbers for K)

    is averaged, and g^ = U mean(g'_n) + (I - U U^T) mu is the result: equations (4) and (5), but that U^T mu, which all
    ranks know, is not subtracted first and added afterwards, so that g' is linear in g. U holds the first d principal
    components of the samples, d by equation (6), and mu is their mean (of averages, where the paper's is one of sums).

    loss: lambda of equation (6), in [0, 1): the fraction of the samples' variance that may be lost. d also stays below
    their number, and leaves out eigenvalues that are rounding (below 1.2e-7 of the sum of all).
    slice_size: K; None takes F D times a divisor of the kernel's size, the one nearest to 768; so K = F D where F D is
    larger, for slices are alike at multiples of F D only (figure 5). Slices need not fit: the last one is padded with
    zeros, which costs d numbers like any other and keeps all of a gradient in one product of matrices.
    reuse: slices, one behind the other, that share the basis of the first of them; None: all of a gradient. mu is each
    slice's own.
    sample_steps: 2 or more, or "auto": every 25 samples rank 0 looks whether d has changed by more than a twentieth
    (and by more than 1) since the last time, and ends the sampling when it has not, or at 200.
    sampling: how sampling steps average: None, plainly, or a method without error feedback, as QSGD(bits=4) in the
    paper. Warm-up is always plain.
    stop: a rank votes for an end of the compressed steps when its own gradients have lost this fraction or more, and a
    majority ends them after the step. The fraction is equation (7) over |g_n|^2, each summed over the compressed steps
    so far, for gradients differ much in size. At 1 zeros would have done as well; None: nobody votes.
    exchange: how compressed steps average. "mean": all is compressed, one all-reduce runs beside the rest of the
    backward pass, all is decompressed. "ring": at the end of the backward pass segments of slices go around a ring, and
    are compressed and decompressed while others are on the wire (Algorithm 1). The averages are the same, but for the
    order in which the ranks' numbers are added up.

    Mind that loss is about the samples. Later gradients have parts that no sample had, the more so the larger K is:
    with 100 samples of CIFAR-10 gradients they lose 0.2 to 0.6 in ResNet-20, but 0.7 to 0.9 where F D > 16384.

    Gradients of fewer than three dimensions, as those of dense layers, go uncompressed; `PerLayer` gives them another
    method. There is no error feedback: what the basis leaves out would pile up until the next sampling.

    What travels: 4 d bytes per slice, and 4 in each segment for the vote. Before that, once, rank 0's U, as
    combinations of samples that all ranks hold: 4 (1 + sample_steps^2) bytes for each basis. In the first step of a
    process (and after `load_state_dict`) a payload header, by which ranks that are in different phases, or configured
    differently, find out. Memory: 4 K sample_steps bytes for each basis: a multiple of the gradient where K is a large
    part of it; on a ring, the gradient's size besides. Products run in one fixed order: all ranks have the same basis
    and the same average, to the bit.
    """

    number: ClassVar[int]
    loss_scaled: ClassVar = {"samples": 1, "mean": 1, "offset": 1, "energy": 2, "lost": 2}
    rank_local = ("energy", "lost")

    loss: float = 0.01
    slice_size: int | None = None
    reuse: int | None = None
    sample_steps: int | str = 100
    compress_steps: int = 400
    warmup_steps: int = 2500
    # Its own digest is part of ours.
    sampling: Compressor | None = field(default=None, metadata={"digest": False})
    stop: float | None = 0.9
    # Coordinates are the same whichever way they travel.
    exchange: str = field(default="mean", kw_only=True, metadata={"digest": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (_is_number(self.loss) and 0 <= self.loss < 1):
            raise ValueError(f"GradiVeQ: got loss = {self.loss!r}, expected a number in [0, 1)")
        limits: list[tuple[str, int, tuple]] = [
            ("slice_size", 1, (None,)),
            ("reuse", 1, (None,)),
            ("sample_steps", 2, ("auto",)),
            ("compress_steps", 1, ()),
            ("warmup_steps", 0, ()),
        ]
        for name, least, others in limits:
            value = getattr(self, name)
            if value not in others and not (type(value) is int and value >= least):
                expected = "".join(f"{other!r} or " for other in others) + f"an integer >= {least}"
                raise ValueError(f"GradiVeQ: got {name} = {value!r}, expected {expected}")
        if self.stop is not None and not (_is_number(self.stop) and self.stop > 0):
            raise ValueError(f"GradiVeQ: got stop = {self.stop!r}, expected None or a number > 0")
        method = self.sampling
        if method is not None and (
            not isinstance(method, Compressor)
            or method.error_feedback
            or any(getattr(type(method), own) is not getattr(Compressor, own) for own in _HOOKS)
        ):
            raise ValueError(
                f"GradiVeQ: got sampling = {method!r}, expected None or a method that keeps nothing between steps, "
                "such as QSGD(bits=4); on a command line, sampling=qsgd(bits=4)"
            )
        if self.exchange not in ("mean", "ring"):
            raise ValueError(f"GradiVeQ: got exchange = {self.exchange!r}, expected 'mean' or 'ring'")
        # At most: whether all agree on where they are, rank 0's basis (or its wish for more samples), the average.
        self.rounds = 2 + (1 if method is None else method.rounds)
        self._agreed: set[str] = set()  # parameters of which it is known that all ranks are in the same step

    def bypasses(self, grad: Tensor) -> bool:
        return grad.dim() < 3 or super().bypasses(grad)

    @property
    def digest(self) -> int:
        sampling = 0 if self.sampling is None else self.sampling.digest
        return super().digest ^ sampling

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._agreed.clear()

    def state_shapes(self, grad: Tensor) -> dict[str, tuple[int, ...]]:
        slices = tuple(self._slices(grad).shape)
        return {"mean": slices, "offset": slices}

    def phase(self, state: State) -> str:
        """What a parameter's next step is part of: "warm-up", "sampling" or "compressing"."""
        if state.step < self.warmup_steps:
            return "warm-up"
        return "sampling" if getattr(state, "bases", None) is None else "compressing"

    def reduce(self, grad: Tensor, state: State) -> Routine:
        if state.name not in self._agreed:
            yield from self._agree(grad, state)
        if _is_full(state):
            yield from self._learn(state)
        phase = self.phase(state)
        if phase == "compressing":
            return (yield from self._average_compressed(grad, state))
        if phase == "sampling" and self.sampling is not None:
            return (yield from self.sampling.reduce(grad, state))
        return (yield Mean(grad))

    def apply_average(self, grad: Tensor, corrected: Tensor, average: Any, state: State) -> None:
        if getattr(state, "bases", None) is not None:
            average = unflatten(average, grad.shape)
            state.left -= 1
            if state.left == 0:
                state.bases = state.offset = state.samples = None
        elif state.step > self.warmup_steps:  # the step just done is counted
            self._sample(average.view(grad.shape), state)
        super().apply_average(grad, corrected, average, state)

    # --- compressed steps

    def _average_compressed(self, grad: Tensor, state: State) -> Routine:
        """Returns the average flat, in the order of slices.

        A segment travels as its coordinates and one number more: in the segment that a rank compresses last, which
        differs from rank to rank, its vote, and 0 in the others.
        """
        ring = self.exchange == "ring"
        # Those of other gradients are laid out before the ring turns.
        slices = self._slices(grad, f"slices of {state.name}" if ring else "slices")
        coordinates = sum(len(group) * len(basis) for group, basis in zip(self._groups(slices), state.bases))
        whole = slice(0, len(slices))
        cut = ring_segments(len(slices), state.size, 4 * coordinates / len(slices)) if ring else [whole]
        segments = [self._runs(rows, state.bases) for rows in cut]
        shapes = [[(len(basis), rows.stop - rows.start) for rows, basis in runs] for runs in segments]
        numels = [[*map(math.prod, of_runs), 1] for of_runs in shapes]
        energies: list[Tensor] = []
        votes: list[Tensor] = []

        def encode(i: int) -> Tensor:
            compressed = [compress(slices[rows], basis).reshape(-1) for rows, basis in segments[i]]
            energies.append(self._energies(slices[cut[i]], state.offset[cut[i]], compressed))
            vote = self._vote(energies, state) if len(energies) == len(segments) else 0.0
            return torch.cat([*compressed, slices.new_tensor([vote])])

        def decode(i: int, mean: Tensor) -> None:
            """Puts the average in the place of the segment."""
            *parts, vote = mean.split(numels[i])
            votes.append(vote)
            for part, shape, (rows, basis) in zip(parts, shapes[i], segments[i]):
                torch.add(decompress(part.view(shape), basis), state.offset[rows], out=slices[rows])

        if ring:
            of_segments = tuple(map(sum, numels))
            yield RingSum(of_segments, encode, lambda i, total: decode(i, total / state.size), device=grad.device)
        else:
            decode(0, (yield Mean(encode(0))))
        voted = torch.cat(votes).sum().item() * state.size
        if not math.isfinite(voted):  # with d = 0 nothing else would tell
            return torch.full((grad.numel(),), math.nan, dtype=torch.float32, device=grad.device)
        if 2 * round(voted) > state.size:
            state.left = 1
        return slices.view(-1)[: grad.numel()]

    def _runs(self, rows: slice, bases: list[Tensor]) -> list[tuple[slice, Tensor]]:
        """Those of the rows that share a basis, and that basis."""
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
        """1 for an end of the compressed steps, else 0; NaN where this rank's gradient is not finite. energies: of all
        segments; waits for the device, once.

        U^T offset = 0, so |g - U U^T g - offset|^2 = |g - offset|^2 - |U^T g|^2: nothing is decompressed.
        """
        energy, missed, found = torch.stack(energies).sum(0).tolist()
        if not math.isfinite(energy):
            return math.nan
        # Nothing of compressed steps before, where what this rank kept was lost.
        state.energy = getattr(state, "energy", 0.0) + energy
        state.lost = getattr(state, "lost", 0.0) + max(0.0, missed - found)
        return float(self.stop is not None and state.lost > 0 and state.lost >= self.stop * state.energy)

    def _slices(self, grad: Tensor, memory: str = "slices") -> Tensor:
        """(slices, K); the next call uses the memory of that name again."""
        size = min(self.slice_size, grad.numel()) if self.slice_size else best_slice_size(grad.shape)
        number = -(-grad.numel() // size)
        slices = self.workspace.empty(memory, (number, size), torch.float32, grad.device)
        flat = slices.view(-1)
        unflatten(flat[: grad.numel()], grad.shape).copy_(grad)
        flat[grad.numel() :] = 0
        return slices

    def _groups(self, slices: Tensor) -> tuple[Tensor, ...]:
        """Those that share a basis."""
        return slices.split(self.reuse or len(slices))

    # --- sampling, and what is learnt from it

    def _sample(self, average: Tensor, state: State) -> None:
        """Keeps the first slice of each group, and the mean of all."""
        slices = self._slices(average)
        first = torch.stack([group[0] for group in self._groups(slices)])
        if getattr(state, "samples", None) is None:
            rows = 2 * _LOOK_EVERY if isinstance(self.sample_steps, str) else self.sample_steps
            state.samples = slices.new_zeros(len(first), rows, slices.shape[1])
            state.count = 0
            state.mean = torch.zeros_like(slices)
        state.samples[:, state.count] = first
        state.count += 1
        # Each operation is rounded by itself, alike on all hardware; a constant gradient is its own mean exactly; and
        # nothing overflows.
        state.mean.add_(slices.div_(state.count).sub_(state.mean / state.count))
        if _is_full(state) and state.rank == 0:
            state.learnt = self._learnt(state)

    def _learnt(self, state: State) -> Tensor:
        """Rank 0's part: 1 if the sampling is done, else 0; then for each basis the weights of the samples."""
        parts, done = [], True
        for centred in self._centred(state):
            weights, stable = principal_weights(centred, self.loss)
            parts.append(weights.reshape(-1))
            done = done and stable
        if self.sample_steps != "auto" or state.count >= _LOOK_MOST:
            done = True
        return torch.cat([parts[0].new_tensor([done]), *parts])

    def _learn(self, state: State) -> Routine:
        """The bases that rank 0 has found, or room for more samples if it wants them."""
        number, count, size = state.samples.shape
        rank = max_dimension(count, size)
        if state.rank == 0:
            message = state.learnt if getattr(state, "learnt", None) is not None else self._learnt(state)
        else:
            message = state.samples.new_zeros(1 + number * rank * count)
        message = yield Broadcast(message)
        state.learnt = None
        if message[0] == 0:
            room = state.samples.new_zeros(number, _LOOK_EVERY, size)
            state.samples = torch.cat([state.samples, room], 1)
            return
        weights = message[1:].view(number, rank, count)
        state.bases, offsets = [], []
        for means, part, centred in zip(self._groups(state.mean), weights, self._centred(state)):
            part = part[(part != 0).any(1)]
            # Slices that are always the same have no direction.
            basis = decompress(part.t(), centred).contiguous() if len(part) else centred.new_empty(0, size)
            state.bases.append(basis)
            offsets.append(means - decompress(compress(means, basis), basis))
        state.offset = torch.cat(offsets)
        state.left, state.energy, state.lost = self.compress_steps, 0.0, 0.0
        state.samples = state.mean = None

    def _centred(self, state: State) -> Iterator[Tensor]:
        """For each basis, its samples minus their mean, scaled to a largest magnitude of 1; zeros where they are all
        the same (or further apart than a float32 can tell)."""
        for samples, means in zip(state.samples, self._groups(state.mean)):
            difference = samples - means[0]
            scale = ops.abs_max(difference)
            yield difference.div_(scale) if 0 < scale < math.inf else difference.zero_()

    # --- whether all ranks are in the same step

    def _agree(self, grad: Tensor, state: State) -> Routine:
        """Compares (step, phase) with the other ranks', at a size that no phase changes; PayloadError.

        Once for each process, and for each state that is loaded: from then on they go through the phases together. The
        front ends compare steps, too, but before the first one only, and know nothing of where in a cycle a vote, which
        is not the same in every run, has put a step: bases of different ages would pass for each other's.
        """
        fields = _POSITION.pack(state.step, _progress(state), _PHASES.index(self.phase(state)))
        number, digest, numel = self.number, self.digest, grad.numel()
        header = ops.new_payload(0, grad.device)
        payloads = yield Gather(ops.seal_payload(header, method=number, digest=digest, numel=numel, fields=fields))
        with attribute_payload_errors(f"GradiVeQ, parameter {state.name!r}"):
            for rank, payload in enumerate(payloads):
                with attribute_payload_errors(f"from rank {rank} of {len(payloads)}"):
                    theirs = ops.open_payload(payload, method=number, digest=digest, numel=numel).fields
                    if theirs != fields:
                        raise ops.PayloadError(
                            f"it is in {_describe(theirs)}, this rank in {_describe(fields)}: load the same "
                            "checkpoint on every rank, or none on all"
                        )
        self._agreed.add(state.name)


def compress(slices: Tensor, basis: Tensor) -> Tensor:
    """U^T g of each slice (equation 3): linear, so that sums of results are results of sums (equation 1).

    slices: (m, K), any part of those that share the basis; basis: (d, K), float32. Returns (d, m), one slice to a
    column.
    """
    return ops.low_rank_project(basis, None, slices.t())


def decompress(compressed: Tensor, basis: Tensor) -> Tensor:
    """U g' of each slice (equation 5, but for its constant). compressed: (d, m). Returns (m, K)."""
    return ops.low_rank_project(basis, None, compressed, transpose=True).t()


def unflatten(flat: Tensor, shape: torch.Size) -> Tensor:
    """The view of shape [F, D, *kernel] of a gradient laid out as the paper does: filters next to each other, then
    depth, then the kernel's dimensions from the last to the first (figure 3a)."""
    kernel_first = flat.view(*shape[2:], shape[1], shape[0])
    dims = kernel_first.dim()
    return kernel_first.permute(dims - 1, dims - 2, *range(dims - 2))


def best_slice_size(shape: torch.Size) -> int:
    """The product of F D and a divisor of the kernel's size that is nearest to 768; the smaller of two."""
    kernel, unit = math.prod(shape[2:]), math.prod(shape[:2])
    divisors = [k for k in range(1, kernel + 1) if kernel % k == 0]
    return min((unit * k for k in divisors), key=lambda size: abs(size - _SLICE))


def max_dimension(samples: int, size: int) -> int:
    """The most directions that samples of so many elements can vary in."""
    return min(samples - 1, size)


def dimension(eigenvalues: Tensor, loss: float) -> int:
    """Equation (6): the smallest d whose first d eigenvalues make up 1 - loss of the sum. eigenvalues: float64,
    descending. Those below float32's resolution of the sum count as 0; 0 where all do."""
    eigenvalues = eigenvalues.clamp(min=0.0)
    eigenvalues = eigenvalues * (eigenvalues > torch.finfo(torch.float32).eps * eigenvalues.sum())
    sums = eigenvalues.cumsum(0)
    return int((sums < (1 - loss) * sums[-1]).sum()) + 1 if sums[-1] > 0 else 0


def principal_weights(centred: Tensor, loss: float) -> tuple[Tensor, bool]:
    """Principal components of samples with mean 0, as weights of the samples; and whether d is stable.

    centred: (n, K), float32, at most 1 in magnitude. Returns (min(n - 1, K), n) float32, rows behind the first d zero:
    weights @ centred is orthonormal, of the largest eigenvalue first. With the samples' Gram matrix, n x n in float64,
    in place of the K x K covariance: its eigenvalues are the same.
    """
    count, size = centred.shape
    gram = torch.zeros(count, count, dtype=torch.float64, device="cpu")
    for part in centred.split(1 << 16, dim=1):
        wide = part.double()
        gram += (wide @ wide.t()).cpu()
    # Threads that wait for each other at every step of a small matrix take many times as long.
    with one_thread():
        eigenvalues, vectors = torch.linalg.eigh(gram)
    eigenvalues, vectors = eigenvalues.flip(0), vectors.flip(1)
    d = min(dimension(eigenvalues, loss), max_dimension(count, size))
    weights = centred.new_zeros(max_dimension(count, size), count)
    weights[:d] = (vectors[:, :d] / eigenvalues[:d].sqrt()).t()
    earlier = count - _LOOK_EVERY
    if earlier < 2:
        return weights, False
    gram = gram[:earlier, :earlier]  # as it was at the last look, about the mean of then
    gram = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()
    with one_thread():
        before = dimension(torch.linalg.eigvalsh(gram).flip(0), loss)
    return weights, abs(d - before) <= max(1, d // 20)


def _is_full(state: State) -> bool:
    """Whether there is a sample in every place that was made for one."""
    samples = getattr(state, "samples", None)
    return samples is not None and state.count == samples.shape[1]


def _progress(state: State) -> int:
    """Samples taken, or compressed steps left: with step and phase, where a parameter is in its cycle."""
    if getattr(state, "bases", None) is not None:
        return state.left
    return state.count if getattr(state, "samples", None) is not None else 0


def _describe(fields: bytes) -> str:
    step, progress, phase = _POSITION.unpack(fields)
    phase = _PHASES[phase] if phase < len(_PHASES) else "unknown"
    details = {"sampling": f", {progress} taken", "compressing": f", {progress} to go"}
    return f"step {step} ({phase}{details.get(phase, '')})"


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
