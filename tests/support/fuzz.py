"""Fuzz every decoder with payloads that a hostile peer could send: real payloads, mutated, with valid checksums.

    python tests/support/fuzz.py --seconds 60        # on a sanitized build, as `make fuzz` does
    python tests/support/fuzz.py build/fuzz/FILE     # decode the payload of a finding again

A decoder must either decode or raise PayloadError, in bounded time and within its memory. The result must not depend
on the instruction set or the number of threads, and allocations are limited by the size of the gradient. Anything else
is a finding. The current case is always in a file, so it survives when a sanitizer aborts the process.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import math
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradzip
import gradzip.ops._native as native
import sanitized
from gradzip import ops
from gradzip.collectives.routines import advance
from gradzip.memory.state import Key
from gradzip.methods.base.gather import GatherCompressor
from gradzip.methods.base.group import averaged
from gradzip.methods.base.registry import registered
from single import decode, encode

FOLDER = sanitized.ROOT / "build" / "fuzz"

# Values of arguments that decide about formats: how elements are marked and coded.
FORMATS = {"theta": ("0.1", "0.3", "0.99"), "bits": ("2", "13", "16"), "budget": ("max", "1500")}


def variants() -> list[str]:
    """Return every method that gathers payloads, with all of its examples, and each of these in other formats."""
    specs: dict[str, str] = {}  # by configuration
    for method in registered().values():
        for spec in method.examples if issubclass(method, GatherCompressor) else ():
            name, _, given = spec.partition(":")
            arguments = dict(argument.split("=") for argument in given.split(",") if argument)
            others = [{**arguments, key: value} for key, values in FORMATS.items() for value in values]
            for changed in (arguments, *others):
                text = f"{name}:{','.join(map('='.join, changed.items()))}".removesuffix(":")
                with contextlib.suppress(ValueError):
                    specs.setdefault(repr(gradzip.parse(text)), text)
    return [*specs.values()]


SPECS = variants()
# One element, fewer bits than a byte, odd sizes, and more than one chunk or block of every format.
SHAPES = [(1, 1), (1, 7), (33, 41), (16, 6, 3, 3), (75, 131)]

MAX_ALLOCATION_MB = 64  # more than 1000 times the largest gradient
DECODE_SECONDS = 20  # thousands of times longer than a decode: a hang, not a slow machine
HEADER, FIELDS = 48, 32


class Case(NamedTuple):
    """A payload to decode, with the method, gradient shape, seed and trial it was generated from."""

    spec: str
    shape: tuple[int, ...]
    seed: int
    trial: int
    payload: bytes

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def to_bytes(self) -> bytes:
        about = self._asdict() | {"payload": len(self.payload)}
        return json.dumps(about).encode() + b"\n" + self.payload

    @classmethod
    def from_bytes(cls, data: bytes) -> Case:
        line, _, rest = data.partition(b"\n")
        about = json.loads(line)
        return cls(**about | {"shape": tuple(about["shape"]), "payload": rest[: about["payload"]]})


class Finding(AssertionError):
    """A decoder violated one of its guarantees."""


# --- payloads


class Corpus:
    """Codecs and real payloads, created on demand.

    Each shape has its own codec, so that the codec's buffers have exactly the size of the gradient and a sanitizer
    sees writes beyond it.
    """

    def __init__(self, parse: Callable[[str], Any] = gradzip.parse) -> None:
        self._parse = parse
        self._codecs: dict[tuple, GatherCompressor] = {}
        self._payloads: dict[tuple, bytes] = {}

    def codec(self, spec: str, shape: tuple[int, ...]) -> GatherCompressor:
        if (spec, shape) not in self._codecs:
            codec = self._parse(spec)
            assert isinstance(codec, GatherCompressor)
            self._codecs[spec, shape] = codec
        return self._codecs[spec, shape]

    def payload(self, spec: str, shape: tuple[int, ...], variant: int) -> bytes:
        key = (spec, shape, variant)
        if key not in self._payloads:
            grad = torch.randn(shape, generator=torch.Generator().manual_seed(variant)) * (variant != 3)
            payload = encode(self.codec(spec, shape), grad, Key(0, variant, "weight", 0))
            self._payloads[key] = payload.numpy().tobytes()
        return self._payloads[key]


def boundary_value(rng: np.random.Generator, nbytes: int, numel: int) -> int:
    """Return a value near a boundary for counts, lengths, offsets or floats."""
    bits = int(rng.integers(1, 17))
    body = nbytes - HEADER
    values = [
        0,
        numel,
        nbytes,
        body,
        body // 4,
        8 * body // bits,
        2 * numel,
        numel * bits // 8,
        *(2**i for i in (7, 8, 15)),
    ]
    values += [2**16, 2**31, 2**32, 2**63, 2**64, 0x7F800000, 0x7FC00000, 0x7F7FFFFF, 0x80000000]  # inf, NaN, max, -0
    return values[rng.integers(len(values))] + int(rng.integers(-2, 3))


def mutate(rng: np.random.Generator, data: bytearray, donor: bytes, numel: int) -> bytearray:
    """Make one change to a payload, behind the header fields that `seal_payloads` rewrites.

    Args:
        donor: another payload, whose tail may replace this one's.
    """
    kind = rng.integers(9)
    # Changes near the beginning hit fields and tables.
    last = max(28, min(len(data), (52, 112, len(data))[rng.integers(3)]))
    at = int(rng.integers(28, last)) if last > 28 else 28
    if kind <= 1 and at < len(data):
        data[at] ^= 1 << int(rng.integers(8))
    elif kind == 2:
        length = int(rng.integers(1, 24))
        data[at : at + length] = rng.integers(0, 256, min(length, len(data) - at), dtype=np.uint8).tobytes()
    elif kind <= 4:
        width = (1, 2, 4, 8)[rng.integers(4)]
        at -= at % width
        value = boundary_value(rng, len(data), numel) % 256**width
        data[at : at + width] = value.to_bytes(width, "little")
    elif kind == 5:
        del data[max(HEADER, at) : (len(data), at + int(rng.integers(1, 40)))[rng.integers(2)]]
    elif kind == 6:
        count = int(rng.integers(1, (17, 200, 16 * numel + 17)[rng.integers(3)]))
        fill = (
            rng.integers(0, 256, count, dtype=np.uint8).tobytes()
            if rng.integers(2)
            else bytes([255 * at % 256]) * count
        )
        data[at:at] = fill
    elif kind == 7:
        # Join this payload's head and the donor's tail, cut at the same or at different positions.
        cut = int(rng.integers(28, len(donor) + 1))
        data[at:] = donor[(at if rng.integers(2) else cut) :]
    else:
        length = int(rng.integers(1, max(2, len(data) // 2)))
        data[at : at + length] = bytes([(0, 255)[rng.integers(2)]]) * min(length, len(data) - at)
    return data


def generate_case(corpus: Corpus, seed: int, trial: int, specs: list[str]) -> Case:
    """Return case number `trial` of a seed."""
    rng = np.random.default_rng([seed, trial])
    spec, shape = specs[trial % len(specs)], SHAPES[rng.integers(len(SHAPES))]
    numel = math.prod(shape)
    data = bytearray(corpus.payload(spec, shape, int(rng.integers(4))))
    donor_shape = SHAPES[rng.integers(len(SHAPES))] if rng.integers(2) else shape
    donor = corpus.payload(specs[rng.integers(len(specs))] if rng.integers(4) == 0 else spec, donor_shape, 1)
    for _ in range(rng.integers(1, 5)):
        data = mutate(rng, data, donor, numel)
    data += bytes(-len(data) % ops.PAYLOAD_ALIGN)
    data += bytes(max(0, HEADER - len(data)))
    payload = torch.frombuffer(data, dtype=torch.uint8)
    codec = corpus.codec(spec, shape)
    # Now and then it declares the size of another gradient.
    declared = boundary_value(rng, len(data), numel) % 2**64 if rng.integers(16) == 0 else numel
    flags = int.from_bytes(data[28:32], "little")
    codec.seal(ops.Seal(payload, declared, bytes(data[FIELDS:HEADER]), flags))
    if rng.integers(32) == 0:  # declares another payload length, after sealing
        struct.pack_into("<Q", data, 16, boundary_value(rng, len(data), numel) % 2**64)
    return Case(spec, shape, seed, trial, bytes(data))


# --- decoding


class Allocations(TorchDispatchMode):
    """Count the bytes of all tensors allocated, also of those already freed."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._seen: set[int] = set()
        self._alive: list[torch.Tensor] = []  # keeps addresses from being reused

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in (*args, *(kwargs or {}).values()):
            if isinstance(x, torch.Tensor):
                self._seen.add(x.untyped_storage().data_ptr())
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self._seen:
                self._seen.add(x.untyped_storage().data_ptr())
                self._alive.append(x)
                self.nbytes += x.untyped_storage().nbytes()
        return result


def allowed_nbytes(case: Case, count: int) -> int:
    """Return how much decoding `count` payloads may allocate, besides the accumulators that the codec keeps.

    Per payload: a code (int32) and a value (float32) for each element, and a copy of the payload. Transforms use a copy
    of the spectrum with padded rows: 8 bytes for each of n / 2 + 2 bins, with transforms of length 2 at least.
    """
    return count * (8 * case.numel + len(case.payload)) + 16 * case.numel + 1024


def decode_or_error(
    codec: GatherCompressor, payloads: list[torch.Tensor], shape: tuple[int, ...]
) -> torch.Tensor | str:
    """Return the average, or the PayloadError's message. Raise Finding for anything else."""
    try:
        average = decode(codec, payloads, shape)
    except gradzip.PayloadError as error:
        return str(error)
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {error}, expected a PayloadError or a gradient") from error
    if average.dtype != torch.float32 or average.shape != shape:
        raise Finding(f"decoded to {tuple(average.shape)} of {average.dtype}, expected {shape} of float32")
    return average.clone()


def check(corpus: Corpus, case: Case) -> bool:
    """Decode a case in several ways. Return whether it was decoded. Raise Finding if the decoder is at fault."""
    codec, numel = corpus.codec(case.spec, case.shape), case.numel
    valid = torch.frombuffer(bytearray(corpus.payload(case.spec, case.shape, 0)), dtype=torch.uint8)
    # An allocation of the exact size: a sanitizer sees reads beyond its end.
    forged = torch.empty(len(case.payload), dtype=torch.uint8)
    forged.copy_(torch.frombuffer(bytearray(case.payload), dtype=torch.uint8))
    decode(codec, [valid], case.shape)  # allocates the accumulators
    declared = struct.unpack_from("<Q", case.payload, 8)[0]
    for payloads in ([forged], [valid, forged]):
        with Allocations() as allocations:
            first = decode_or_error(codec, payloads, case.shape)
        limit = allowed_nbytes(case, len(payloads))
        if allocations.nbytes > limit:
            raise Finding(f"allocated {allocations.nbytes} bytes for {numel} elements, expected at most {limit}")
    if not isinstance(first, str) and declared != numel:
        raise Finding(f"decoded a payload of {declared} elements as one of {numel}")
    level, threads = native.kernels().simd(), torch.get_num_threads()
    try:
        native.kernels().set_simd(native.kernels().simd_levels()[case.trial % len(native.kernels().simd_levels())])
        torch.set_num_threads(1 + case.trial % 3)
        repeated = decode_or_error(codec, payloads, case.shape)
    finally:
        native.kernels().set_simd(level)
        torch.set_num_threads(threads)
    same = (
        first == repeated
        if isinstance(first, str) or isinstance(repeated, str)
        else torch.equal(*map(bits_of, (first, repeated)))
    )
    if not same:
        raise Finding(f"got {first} at first, but {repeated} with other instructions or threads")
    check_step(codec, case, forged)
    return not isinstance(first, str)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of x. All NaNs are equal, because a NaN's bits depend on the order of operands."""
    return x.nan_to_num(nan=1e38).view(torch.int32)


def check_step(codec: GatherCompressor, case: Case, forged: torch.Tensor) -> None:
    """Run a whole step with a peer that sends the forged payload in every round."""
    if case.trial % 4:
        return
    clone = codec.clone()
    grad = torch.ones(case.shape) if len(case.shape) > 1 else torch.ones(1, case.numel)
    exchange = averaged(clone, grad, "weight", case.trial // 4 % 2, 2)
    answer = None
    try:
        while True:
            collective = advance(exchange, answer)
            if not isinstance(collective, gradzip.collectives.Gather):
                return  # the step is done, or the gradient bypasses compression
            pair = [collective.tensor, forged]
            gathered = torch.cat(pair if case.trial // 4 % 2 == 0 else pair[::-1])
            answer = collective.split_by_rank(gathered, 2)
    except gradzip.PayloadError:
        return
    except Exception as error:
        raise Finding(f"a step: {type(error).__name__}: {error}, expected a PayloadError or a gradient") from error


# --- running


class Slot:
    """A memory-mapped file that holds the current case and survives an abort of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb+") as file:
            file.truncate(1 << 21)
            self._memory = mmap.mmap(file.fileno(), 0)

    def put(self, case: Case) -> None:
        data = case.to_bytes()
        self._memory[: len(data)] = data


def run_cases(corpus: Corpus, slot: Path, seed: int, seconds: float, trials: int | None, specs: list[str]) -> None:
    """Run cases until `seconds` have passed or `trials` have run. A decoder that hangs ends the process."""
    case_file = Slot(slot)
    with Allocations():
        torch.ones(1).add(1)  # the first use loads parts of torch, which takes seconds on a busy machine
    start = reported = time.monotonic()
    decoded, trial = 0, 0
    while (now := time.monotonic()) - start < seconds and trial != trials:
        case = generate_case(corpus, seed, trial, specs)
        case_file.put(case)
        faulthandler.dump_traceback_later(DECODE_SECONDS, exit=True)
        decoded += check(corpus, case)
        faulthandler.cancel_dump_traceback_later()
        trial += 1
        if now - reported > 2:
            reported = now
            print(f"{now - start:5.0f} s  {trial} payloads, {decoded} decoded, {trial - decoded} refused", flush=True)
    print(f"{time.monotonic() - start:.0f} s, seed {seed}: {trial} payloads, {decoded} decoded, "
          f"{trial - decoded} refused, no finding")  # fmt: skip


def fuzz(package_dir: Path, folder: Path, *arguments: str, echo: bool = False) -> tuple[int, str]:
    """Run `run_cases` in a process on the sanitized build in `package_dir`. Return its exit status and its output.

    The case of a finding is saved in `folder`; the end of the output names the file.
    """
    slot = folder / f"at-work-{os.getpid()}"
    command = [sys.executable, "-u", __file__, "--slot", str(slot), *arguments]
    output = []
    with subprocess.Popen(
        command,
        env=sanitized.environment(package_dir, MAX_ALLOCATION_MB),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            output.append(line)
            if echo:
                print(line, end="", flush=True)
    if process.returncode and slot.exists() and slot.read_bytes()[:1] == b"{":
        case = Case.from_bytes(slot.read_bytes())
        saved = folder / f"finding-{case.seed}-{case.trial}"
        saved.write_bytes(case.to_bytes())
        output.append(
            f"FINDING in {case.spec}, shape {case.shape}, seed {case.seed}, trial {case.trial}; "
            f"again with: python tests/support/fuzz.py {saved}\n"
        )
        if echo:
            print(output[-1], end="")
    slot.unlink(missing_ok=True)
    return process.returncode, "".join(output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", type=Path, help="file of a finding, to be tried again")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--trials", type=int, help="how many payloads at most")
    parser.add_argument("--seed", type=int, help="of the mutations (default: another one in every run)")
    parser.add_argument(
        "--method", action="append", help="only this method, as gradzip.parse takes it; may be repeated"
    )
    parser.add_argument("--slot", type=Path, help=argparse.SUPPRESS)  # passed to the process on the sanitized build
    arguments = parser.parse_args()
    if not arguments.slot:
        if (reason := sanitized.unavailable_reason()) is not None:
            raise SystemExit(f"fuzz: {reason}; it needs a checkout, and g++ with libasan")
        print("building with sanitizers what has changed", flush=True)
        return fuzz(sanitized.build(), FOLDER, *sys.argv[1:], echo=True)[0]
    if arguments.case:
        case = Case.from_bytes(arguments.case.read_bytes())
        Slot(arguments.slot).put(case)
        faulthandler.dump_traceback_later(DECODE_SECONDS, exit=True)
        print(f"{case.spec}, shape {case.shape}: {'decoded' if check(Corpus(), case) else 'refused'}")
        return 0
    seed = int.from_bytes(os.urandom(4), "little") if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    run_cases(Corpus(), arguments.slot, seed, arguments.seconds, arguments.trials, arguments.method or SPECS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
