"""What all methods share: the coroutine a driver runs, state by parameter name, error feedback, guards."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from . import ops
from .collectives import AllToAll, Gather, Mean, Routine, Traffic

# What one more round costs, as bytes: some tenths of a millisecond at 1 to 10 Gb/s.
ROUND_NBYTES = 1 << 17


class Key(NamedTuple):
    """Names one draw of random numbers. The same key gives the same numbers on every device; nothing else does."""

    seed: int
    step: int
    name: str
    rank: int | str  # "shared" where all ranks must draw alike

    @property
    def bits(self) -> int:
        """64 bits for the counter-based generator (csrc/common/philox.h)."""
        text = f"{self.seed}/{self.step}/{self.rank}/{self.name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class State:
    """What one parameter keeps between steps: its step count, the residual of error feedback, and what its method adds.

    Until a step's average is known to be finite, methods replace attributes and never change a tensor in place: a step
    that ends in a non-finite average is undone by putting the old attributes back.
    """

    def __init__(self, name: str, rank: int = 0, size: int = 1) -> None:
        self.name = name
        self.rank = rank
        self.size = size  # of the group
        self.step = 0
        self.residual: Tensor | None = None
        self.payload: Tensor | None = None  # what this rank sent, until the step is done
        self.loaded = False  # and not yet looked at

    def key(self, seed: int) -> Key:
        return Key(seed, self.step, self.name, self.rank)

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("name", "payload", "loaded") and v is not None}

    def by_parameter(self) -> dict[str, dict[str, Any]]:
        """What is saved, by the names of the parameters that it is about."""
        return {self.name: self.state_dict()}

    if TYPE_CHECKING:  # what methods add

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


class Workspace:
    """Memory that is used again: a fresh large tensor costs a page fault every 4 KiB, several times what the work in
    it costs. Every buffer has a name and grows to the largest size asked for."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = math.prod(shape)
        buffer = self._buffers.get((name, device))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[name, device] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel].view(shape)

    def clear(self) -> None:
        """Gives all memory back."""
        self._buffers.clear()


@dataclass
class Compressor(ABC):
    """A gradient compression method: its hyper-parameters, and what it keeps for each parameter.

    Subclasses are dataclasses of their hyper-parameters and define `reduce`. Hand one to
    ``hvd.DistributedOptimizer(..., compression=)``, to `gradzip.LocalGroup`, or drive `average` yourself.
    """

    _: KW_ONLY
    min_numel: int = 1024

    # How many collectives a compressed gradient needs at most, one after the other.
    rounds = 1

    # Whether it sees several gradients as one long vector, where a front end has several at once.
    flat = False

    # Methods that have it declare it as a hyper-parameter. (A ClassVar here would fix its place among the arguments.)
    error_feedback = False

    # What of a state is in units of the gradient, and grows and shrinks with a loss scale.
    in_gradient_units: ClassVar[tuple[str, ...]] = ("residual", "owner_residual")

    # What of a state is this rank's own. The rest is the same on all.
    of_this_rank: ClassVar[tuple[str, ...]] = ("residual", "owner_residual")

    # And what of that belongs to the shard that this rank owns in a group of this size.
    of_this_shard: ClassVar[tuple[str, ...]] = ("owner_residual",)

    def __post_init__(self) -> None:
        if not (isinstance(self.min_numel, int) and self.min_numel >= 0):
            raise ValueError(f"{type(self).__name__}: got min_numel = {self.min_numel!r}, expected an integer >= 0")
        for f in fields(self):
            value = getattr(self, f.name)
            # What a shell or a file calls false is a text, and true.
            if f.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{type(self).__name__}: got {f.name} = {value!r}, expected True or False")
            if f.name == "seed" and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{type(self).__name__}: got seed = {value!r}, expected an integer")
        self.states: dict[str, State] = {}
        self.traffic = Traffic()
        self._workspace = Workspace()
        self._scaler: Any = None
        self._undo: dict[str, dict[str, Any]] = {}
        self._horovod: Any = None
        self._models: list[Any] = []  # of DDP, that it serves

    @abstractmethod
    def reduce(self, grad: Tensor, state: State) -> Routine:
        """Averages `grad` over the group: the method itself, as a coroutine over collectives.

        grad: the gradient as `correct` returned it, in its own shape, contiguous float32. Returns the average in any
        shape of as many elements, or whatever `largest` and `settle` take for one.
        """

    def sent(self, state: State) -> Tensor:
        """What peers saw of this rank's gradient in the step just done (for error feedback)."""
        raise TypeError(f"{type(self).__name__} has no error feedback")

    def correct(self, grad: Tensor, state: State) -> Tensor:
        """The gradient with what earlier steps left to be sent: what `reduce` is given. grad: contiguous float32, which
        may be changed, and returned."""
        return grad if state.residual is None else grad.add_(state.residual)

    def largest(self, average: Any, limit: float) -> float:
        """The largest magnitude in an average; not finite where one of its elements is not. The same number on all
        ranks, and where it is at most `limit` any upper bound will do."""
        return ops.abs_max(average)

    def settle(self, grad: Tensor, corrected: Tensor, average: Any, state: State) -> None:
        """The end of a step that all ranks know to be good: writes the average to `grad`, whose memory `corrected` may
        be, and what is left to be sent to the state."""
        if self.error_feedback:
            self.keep(corrected, state)
        grad.copy_(average.view(grad.shape))
        if self.error_feedback:
            self.subtract_sent(state)

    def keep(self, corrected: Tensor, state: State) -> None:
        """Error feedback, before the gradient's memory is written to: takes over what was to be sent."""
        state.residual = (torch.empty_like(corrected) if state.residual is None else state.residual).copy_(corrected)

    def subtract_sent(self, state: State) -> None:
        """Error feedback, after that: takes what was sent out of what was to be sent."""
        assert state.residual is not None
        state.residual.sub_(self.sent(state).view(state.residual.shape))

    def follow(self, scaler: Any) -> Compressor:
        """Mixed precision: gradients come multiplied by ``scaler.get_scale()``, and what is kept of them is multiplied
        by as much whenever that changes. scaler: a torch.amp.GradScaler. Returns the compressor itself.

        It skips the step of an optimizer that has one gradient that is not finite. So that no other parameter loses
        what it sent then, all keep a copy of what they had before, and the front ends have them go back to it.

        >>> import gradzip, torch
        >>> compressor = gradzip.TopK(theta=0.99).follow(torch.amp.GradScaler("cpu"))
        """
        if isinstance(scaler, type) or not callable(getattr(scaler, "get_scale", None)):
            raise ValueError(f"follow: got {scaler!r}, expected a torch.amp.GradScaler, as in follow(scaler)")
        self._scaler = scaler
        return self

    @property
    def loss_scale(self) -> float:
        """What gradients come multiplied by."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def rescale(self, state: State) -> None:
        """Brings what a state keeps to the present loss scale."""
        scale = self.loss_scale
        factor = scale / getattr(state, "loss_scale", scale)
        if factor != 1.0:
            self.scale(state, factor)
        if self.follows or factor != 1.0:
            state.loss_scale = scale

    def scale(self, state: State, factor: float) -> None:
        """Multiplies what a state keeps of gradients."""
        for name in self.in_gradient_units:
            if (kept := getattr(state, name, None)) is not None:
                kept.mul_(factor)

    @property
    def follows(self) -> bool:
        """Whether gradients come multiplied by a loss scale."""
        return self._scaler is not None

    def remember(self, state: State, before: Mapping[str, Any]) -> None:
        """Under a loss scale, keeps what a state was before the step that it is about to end."""
        if self.follows:
            kept = self.in_gradient_units  # changed in place
            self._undo[state.name] = {k: v.clone() if k in kept and v is not None else v for k, v in before.items()}

    def take_back(self, name: str) -> None:
        """Undoes the last step of a parameter, which the optimizer skips."""
        if (before := self._undo.pop(name, None)) is not None:
            vars(self.states[name]).clear()
            vars(self.states[name]).update(before)

    def shapes(self, grad: Tensor) -> dict[str, tuple[int, ...]]:
        """What shapes the tensors of a gradient's state have."""
        return {"residual": tuple(grad.shape)}

    def adopt(self, state: State, grad: Tensor, rank: int, size: int) -> None:
        """Fits a loaded state to the gradient, and to this rank of a group of `size`."""
        for name, shape in self.shapes(grad).items():
            kept = getattr(state, name, None)
            got = tuple(kept.shape) if isinstance(kept, Tensor) else type(kept).__name__
            if kept is not None and got != shape:
                raise ValueError(
                    f"{type(self).__name__}, parameter {state.name!r}: got a state whose {name} has the shape "
                    f"{got}, expected {shape}; load the state of the same model and the same arguments"
                )
        for name, kept in vars(state).items():
            if isinstance(kept, Tensor):
                setattr(state, name, kept.to(grad.device))
            elif isinstance(kept, list):
                setattr(state, name, [part.to(grad.device) for part in kept])
        own = [name for name in self.of_this_rank if isinstance(getattr(state, name, None), Tensor)]
        if own and (state.rank, state.size) != (rank, size):
            warnings.warn(
                f"the state of rank {state.rank} of {state.size} was loaded by rank {rank} of {size}: what that rank "
                "had not sent yet is dropped",
                stacklevel=2,
            )
            for name in own:
                setattr(state, name, None)
        state.loaded = False

    def place(self, state: State, rank: int, size: int) -> None:
        """Says of which rank of a group of what size a state is: who owns another shard now has nothing left of it."""
        if (state.rank, state.size) != (rank, size):
            for name in self.of_this_shard:
                if hasattr(state, name):
                    setattr(state, name, None)
        state.rank, state.size = rank, size

    def move(self, rank: int, size: int) -> None:
        """Goes on as another rank, or in a group of another size: what this rank has not sent yet stays its own."""
        for state in self.states.values():
            self.place(state, rank, size)

    @property
    def parts(self) -> list[Compressor]:
        """The compressors that may be in charge of parameters."""
        return [self]

    @property
    def looks_at_names(self) -> bool:
        """Whether a parameter's name decides which one is in charge of it."""
        return False

    def part(self, name: str, shape: torch.Size) -> Compressor:
        """The compressor in charge of a parameter."""
        return self

    def bypasses(self, grad: Tensor) -> bool:
        """Whether a gradient goes uncompressed: small and 1-D parameters are not worth it."""
        return grad.dim() < 2 or grad.numel() < max(1, self.min_numel)

    def average(self, grad: Tensor, name: str, rank: int = 0, size: int = 1) -> Routine:
        """Coroutine that replaces `grad` by its average over the group, and returns it.

        grad: any shape, strides and floating-point dtype, which it keeps. name: the parameter's, the same on all ranks.
        rank, size: this rank's number and the group's size.
        A non-finite gradient on any rank makes the average non-finite on all, and leaves all state as it was.
        """
        if not grad.is_floating_point() or grad.is_sparse:
            raise ValueError(f"gradient of {name!r}: got {grad.layout} {grad.dtype}, expected a dense float tensor")
        self.traffic.bytes_dense += grad.numel() * grad.element_size()
        self._undo.pop(name, None)
        if self.bypasses(grad):
            average = yield Mean(grad.contiguous())
            return grad if average.data_ptr() == grad.data_ptr() else grad.copy_(average)
        state = self.states.get(name)
        if state is None:
            state = self.states[name] = State(name)
        if state.loaded:
            self.adopt(state, grad, rank, size)
        if state.residual is not None and state.residual.shape != grad.shape:
            raise ValueError(
                f"{type(self).__name__}, parameter {name!r}: got a gradient of shape {tuple(grad.shape)}, expected "
                f"{tuple(state.residual.shape)} as in the step before; give each parameter a name of its own"
            )
        self.place(state, rank, size)
        self.rescale(state)
        before = copy.copy(vars(state))
        # The gradient is going to be replaced: where it is float32, the residual is added in place.
        corrected = self.correct(grad.float().contiguous(), state)
        average = yield from self.reduce(corrected, state)
        # Every rank sees the same average, so all ranks keep their state, or all ranks undo. In the gradient's own
        # type: what is finite in float32 may not be in float16.
        limit = torch.finfo(grad.dtype).max
        if self.largest(average, limit) <= limit:
            self.remember(state, before)
            state.step += 1
            self.settle(grad, corrected, average, state)
            state.payload = None
            return grad
        vars(state).clear()
        vars(state).update(before)
        return grad.fill_(math.nan)

    def clone(self) -> Compressor:
        """Same hyper-parameters, no state."""
        return self._clone_with()

    def _clone_with(self, **parts: Any) -> Compressor:
        """A clone; parts: clones of the compressors among the hyper-parameters."""
        clone = replace(self, **parts)
        clone._scaler = self._scaler
        return clone

    @property
    def front_end(self) -> Any:
        """What Horovod's calls lead to."""
        if self._horovod is None:
            from .horovod import FrontEnd  # upwards, and only here: what is handed to Horovod leads to its front end

            self._horovod = FrontEnd(self)
        return self._horovod

    @property
    def digest(self) -> int:
        """32 bits of the configuration: what two ranks must have in common to understand each other."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("digest", True)}
        # A schedule is the same when its class is: its repr may hold an address.
        plain = {k: type(v).__qualname__ if callable(v) else repr(v) for k, v in values.items()}
        return zlib.crc32(f"{type(self).__name__}{sorted(plain.items())}".encode())

    def state_dict(self) -> dict[str, Any]:
        """All states as plain tensors and numbers; ``torch.load(weights_only=True)`` reads it."""
        return {
            "method": type(self).__name__,
            "of_this_rank": list(self.of_this_rank),
            "states": {name: v for state in self.states.values() for name, v in state.by_parameter().items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned; ValueError for another method's, or for what is none.

        What was this rank's own is kept where the same rank of a group of the same size goes on, and dropped with a
        warning elsewhere; `gradzip.checkpoint` puts all ranks' into one file. Shapes are checked at the first step.
        """
        what = f"{type(self).__name__}.load_state_dict"
        if "ranks" in state_dict:
            raise ValueError(f"{what}: got all ranks' states, expected gradzip.checkpoint.shard(states, rank, size)")
        if state_dict.get("method") != type(self).__name__:
            raise ValueError(
                f"{what}: got the state of {state_dict.get('method')!r}, expected that of {type(self).__name__!r}"
            )
        states = {}
        for name, values in state_dict["states"].items():
            state = states[name] = State(name)
            for key, value in values.items():
                kind = type(vars(state)[key]) if key in ("step", "rank", "size") else (Tensor, int, float)
                tensors = isinstance(value, list) and all(isinstance(part, Tensor) for part in value)
                if not tensors and not isinstance(value, kind):
                    raise ValueError(
                        f"{what}: got {type(value).__name__} as {key} of {name!r}, expected a tensor or number"
                    )
            vars(state).update(copy.deepcopy(dict(values)), loaded=True)
        self.states = states

    # Horovod calls these two on the object it is given as `compression`.

    def compress(self, *tensor: Tensor) -> tuple[Tensor, Any]:
        if not tensor:  # it is called on the class, as Horovod's own compressions are
            raise TypeError("compression: got a class, expected an instance of it, as in compression=gradzip.TopK()")
        return self.front_end.compress(*tensor)

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else ctx.finish(tensor)


@contextlib.contextmanager
def as_written(device: torch.device) -> Iterator[None]:
    """Methods compute as they say, whatever the backward pass was called in: autocast would change their types."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextlib.contextmanager
def blaming(who: str) -> Iterator[None]:
    """Says in a PayloadError whose payload it was."""
    try:
        yield
    except ops.PayloadError as error:
        raise ops.PayloadError(f"{who}: {error}") from None


@dataclass
class GatherCompressor(Compressor):
    """A method that is a stateless codec.

    exchange: how its payloads reach all p ranks.
    "gather": encode, gather, decode every rank's payload in rank order. A rank receives p - 1 payloads.
    "scatter_reduce": every rank encodes a shard for each rank (a block of rows; a piece of the flat gradient where
    there are fewer rows than ranks), and sends each to its owner, who decodes and averages what it gets, encodes that
    again, and all gather the results. A rank receives 2 (p - 1) / p payloads, in two rounds, and the average is
    compressed twice: where there is error feedback, the owner keeps what its encoding left out for the next step.
    "auto": gather, until scatter_reduce would have saved a parameter more than `ROUND_NBYTES` in a step, which is (p -
    1)(1 - 2 / p) payloads; scatter_reduce from then on.
    """

    # Payloads are the same whichever way they travel.
    exchange: str = field(default="gather", kw_only=True, metadata={"digest": False})

    method: ClassVar[int]  # number in the payload header; never reused
    seed = 0  # methods that draw declare it as a hyper-parameter

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exchange not in ("gather", "scatter_reduce", "auto"):
            raise ValueError(
                f"{type(self).__name__}: got exchange = {self.exchange!r}, expected 'gather', 'scatter_reduce' or "
                "'auto'"
            )
        self.rounds = 1 if self.exchange == "gather" else 2

    @abstractmethod
    def encode(self, grad: Tensor, key: Key) -> Tensor:
        """The sealed payload (uint8) of a gradient (contiguous float32)."""

    def encode_average(self, average: Tensor, key: Key) -> Tensor:
        """The same of a shard's average, which its owner sends to all ranks."""
        return self.encode(average, key)

    @abstractmethod
    def decode_add(self, payload: ops.Payload, out: Tensor, weight: float) -> None:
        """out += weight * what the payload holds; `out` as `accumulator` made it. PayloadError for anything that
        `encode` of this codec cannot have written."""

    def accumulator(self, numel: int, device: torch.device) -> Tensor:
        """Zeros to which payloads of a gradient of so many elements are added."""
        return self._workspace.empty("average", (numel,), torch.float32, device).zero_()

    def finish(self, out: Tensor, numel: int) -> Tensor:
        """The gradient (float32, flat) that an accumulator stands for. The next call may use its memory again."""
        return out

    def seal(
        self,
        payload: Tensor,
        numel: int,
        finite: bool | Tensor,
        fields: bytes,
        number: ops.RangeFloat | None = None,
    ) -> Tensor:
        """Writes the header of a payload whose body is in place.

        finite: whether the gradient was, or the magnitudes (float32) that must be; fields: 16 bytes, or 8 before a
        `number`.
        """
        magnitudes = finite if isinstance(finite, Tensor) else None
        return ops.seal_payload(
            payload,
            method=self.method,
            digest=self.digest,
            numel=numel,
            flags=0 if magnitudes is not None or finite else ops.NON_FINITE,
            magnitudes=magnitudes,
            fields=fields,
            number=number,
        )

    def non_finite(self, grad: Tensor) -> Tensor:
        """The payload of a gradient that holds an inf or a NaN: a header that says so."""
        return self.seal(ops.new_payload(0, grad.device), grad.numel(), False, bytes(16))

    def open(self, payload: Tensor, numel: int) -> ops.Payload:
        """A payload of this codec's, its header checked; PayloadError."""
        return ops.open_payload(payload, method=self.method, digest=self.digest, numel=numel)

    def decode(self, payloads: list[Tensor], numel: int) -> Tensor:
        """The average of the payloads, added up in order: float32, flat, in memory that the next call uses again."""
        out = self.accumulator(numel, payloads[0].device)
        for rank, buffer in enumerate(payloads):
            with blaming(f"from rank {rank} of {len(payloads)}"):
                payload = self.open(buffer, numel)
                if payload.flags & ops.NON_FINITE:
                    out.fill_(math.nan)
                else:
                    self.decode_add(payload, out, 1.0 / len(payloads))
        return self.finish(out, numel)

    def reduce(self, grad: Tensor, state: State) -> Routine:
        state.scattered = self._scatters(grad.numel(), state)
        with blaming(f"{type(self).__name__}, parameter {state.name!r}"):
            if state.scattered:
                return (yield from self._scatter_reduce(grad, state))
            state.payload = self.encode(grad, state.key(self.seed))
            payloads = yield Gather(state.payload)
            # All ranks see the same lengths, and decide alike.
            state.payload_nbytes = sum(p.numel() for p in payloads) // len(payloads)
            return self.decode(payloads, grad.numel())

    def _scatters(self, numel: int, state: State) -> bool:
        if self.exchange == "gather" or not 1 < state.size <= numel:
            return False
        if self.exchange == "scatter_reduce" or getattr(state, "scattered", False):
            return True
        p = state.size
        return (p - 1) * (p - 2) * getattr(state, "payload_nbytes", 0) > p * ROUND_NBYTES

    def _scatter_reduce(self, grad: Tensor, state: State) -> Routine:
        shards = split_shards(grad, state.size)
        key = state.key(self.seed)
        payloads = [self.encode(shard, key._replace(name=f"{key.name}[{i}]")) for i, shard in enumerate(shards)]
        state.payload = torch.cat(payloads)
        mine = shards[state.rank]
        received = yield AllToAll(state.payload, tuple(p.numel() for p in payloads))
        average = self.decode(received, mine.numel()).view(mine.shape).clone()
        if (left := getattr(state, "owner_residual", None)) is not None:
            average.add_(left)
        payload = self.encode_average(average, key._replace(name=f"{key.name}[owner]"))
        if self.error_feedback:
            state.owner_residual = average.sub_(self.decode([payload], mine.numel()).view(mine.shape))
        payloads = yield Gather(payload)
        result = grad.new_empty(grad.numel())
        for part, shard, payload in zip(result.split([s.numel() for s in shards]), shards, payloads):
            part.copy_(self.decode([payload], shard.numel()).view(-1))
        return result

    def sent(self, state: State) -> Tensor:
        assert state.residual is not None
        parts = self.sent_parts(state)
        if len(parts) == 1:
            return self.decode([parts[0][0]], state.residual.numel())
        return torch.cat([self.decode([payload], part.numel()).clone() for payload, part in parts])

    def sent_parts(self, state: State) -> list[tuple[Tensor, Tensor]]:
        """(payload, part of the residual, flat) for each payload that this rank has sent in the step just done."""
        assert state.payload is not None and state.residual is not None
        shards = split_shards(state.residual, state.size if state.scattered else 1)
        return [(p, s.view(-1)) for p, s in zip(ops.split_payloads(state.payload, len(shards)), shards)]


def split_shards(grad: Tensor, size: int) -> list[Tensor]:
    """Views that make up a contiguous tensor, in order, one for each of `size` ranks: blocks of whole rows where there
    are enough, so that methods that look at matrices see matrices."""
    if size == 1:
        return [grad]
    rows = grad if grad.dim() > 1 and grad.shape[0] >= size else grad.view(-1)
    return list(rows.tensor_split(size))
