"""Feeds every decoder what a hostile peer could send: real payloads, mutated, under checksums that hold.

    python tests/fuzz.py --seconds 60        # on a sanitized build, as `make fuzz` does
    python tests/fuzz.py build/fuzz/FILE     # tries the payload of a finding again

A decoder must raise PayloadError or decode: in bounded time, within its memory, to the same bits whatever the
instruction set and the number of threads, and allocate no more than the size of the gradient justifies. Anything else
is a finding. The case at work is always in a file, which outlives a process that a sanitizer ends.
"""

from __future__ import annotations

import argparse
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
from gradzip.averaging import averaged
from gradzip.gather import GatherCompressor
from gradzip.state import Key

FOLDER = sanitized.ROOT / "build" / "fuzz"

# Every method that gathers payloads, with the arguments that lead to other formats.
SPECS = [
    *("fft-range", "fft-range:block=None,bits=16,theta=0.2", "fft-range:block=100,bits=2,value_range=1.0"),
    *("topk:theta=0.9", "topk:theta=0.1", "topk:theta=0.9,bits=2", "topk:theta=0.5,bits=13", "dgc:theta=0.7"),
    *("qsgd", "qsgd:bits=16,bucket=7", "qsgd:coding=packed", "qsgd:bits=5,coding=packed,norm=max"),
    *("terngrad", "terngrad:shared_scale=False", "signsgd", "signsgd:majority=False", "onebit"),
    *("atomo", "atomo:budget=1000", "atomo:atoms=entry,budget=100", "atomo:atoms=entry,budget=l2"),
    *("atomo:atoms=fourier,budget=max", "atomo:atoms=fourier,budget=1500"),
]
# One element, less than a byte of bits, uneven, more than one chunk or block of every format.
SHAPES = [(1, 1), (1, 7), (33, 41), (16, 6, 3, 3), (75, 131)]

LARGEST_MB = 64  # a thousand times the largest gradient
DECODE_SECONDS = 20  # thousands of times what a decode takes: a hang, not a slow machine
HEADER, FIELDS = 48, 32


class Case(NamedTuple):
    """A payload to decode, and where it came from."""

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
    """What a decoder must not do."""


# --- payloads


class Corpus:
    """Codecs and real payloads. A codec for each shape: what it keeps of its memory then has the size of the gradient,
    and whoever writes beyond it is seen."""

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

    def payload(self, spec: str, shape: tuple[int, ...], draw: int) -> bytes:
        key = (spec, shape, draw)
        if key not in self._payloads:
            grad = torch.randn(shape, generator=torch.Generator().manual_seed(draw)) * (draw != 3)
            payload = self.codec(spec, shape).encode(grad, Key(0, draw, "weight", 0))
            self._payloads[key] = payload.numpy().tobytes()
        return self._payloads[key]


def extreme(rng: np.random.Generator, nbytes: int, numel: int) -> int:
    """A number that counts, lengths and offsets are not prepared for."""
    bits = int(rng.integers(1, 17))
    body = nbytes - HEADER
    near = [
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
    near += [2**16, 2**31, 2**32, 2**63, 2**64, 0x7F800000, 0x7FC00000, 0x7F7FFFFF, 0x80000000]  # inf, NaN, max, -0
    return near[rng.integers(len(near))] + int(rng.integers(-2, 3))


def mutate(rng: np.random.Generator, data: bytearray, other: bytes, numel: int) -> bytearray:
    """One change to a payload, anywhere behind what is written anew in the end; `other` is another payload."""
    kind = rng.integers(9)
    # Near the beginning, where the fields and tables are, or anywhere.
    last = max(28, min(len(data), (52, 112, len(data))[rng.integers(3)]))
    at = int(rng.integers(28, last)) if last > 28 else 28
    if kind <= 1 and at < len(data):
        data[at] ^= 1 << int(rng.integers(8))
    elif kind == 2:
        run = int(rng.integers(1, 24))
        data[at : at + run] = rng.integers(0, 256, min(run, len(data) - at), dtype=np.uint8).tobytes()
    elif kind <= 4:
        width = (1, 2, 4, 8)[rng.integers(4)]
        at -= at % width
        value = extreme(rng, len(data), numel) % 256**width
        data[at : at + width] = value.to_bytes(width, "little")
    elif kind == 5:
        del data[max(HEADER, at) : (len(data), at + int(rng.integers(1, 40)))[rng.integers(2)]]
    elif kind == 6:
        more = int(rng.integers(1, (17, 200, 16 * numel + 17)[rng.integers(3)]))
        fill = (
            rng.integers(0, 256, more, dtype=np.uint8).tobytes() if rng.integers(2) else bytes([255 * at % 256]) * more
        )
        data[at:at] = fill
    elif kind == 7:
        # Its head and the other's tail, cut at one place or at two.
        cut = int(rng.integers(28, len(other) + 1))
        data[at:] = other[(at if rng.integers(2) else cut) :]
    else:
        run = int(rng.integers(1, max(2, len(data) // 2)))
        data[at : at + run] = bytes([(0, 255)[rng.integers(2)]]) * min(run, len(data) - at)
    return data


def make_case(corpus: Corpus, seed: int, trial: int, specs: list[str]) -> Case:
    """Case number `trial` of a seed."""
    rng = np.random.default_rng([seed, trial])
    spec, shape = specs[trial % len(specs)], SHAPES[rng.integers(len(SHAPES))]
    numel = math.prod(shape)
    data = bytearray(corpus.payload(spec, shape, int(rng.integers(4))))
    other_shape = SHAPES[rng.integers(len(SHAPES))] if rng.integers(2) else shape
    other = corpus.payload(specs[rng.integers(len(specs))] if rng.integers(4) == 0 else spec, other_shape, 1)
    for _ in range(rng.integers(1, 5)):
        data = mutate(rng, data, other, numel)
    data += bytes(-len(data) % ops.PAYLOAD_ALIGN)
    data += bytes(max(0, HEADER - len(data)))
    payload = torch.frombuffer(data, dtype=torch.uint8)
    codec = corpus.codec(spec, shape)
    header = {"method": codec.number, "digest": codec.digest, "numel": numel}
    if rng.integers(16) == 0:  # of another gradient, by its own account
        header["numel"] = extreme(rng, len(data), numel) % 2**64
    flags = int.from_bytes(data[28:32], "little")
    ops.seal_payload(payload, **header, flags=flags, fields=bytes(data[FIELDS:HEADER]))
    if rng.integers(32) == 0:  # of another length, likewise: the checksum does not cover more than there is
        struct.pack_into("<Q", data, 16, extreme(rng, len(data), numel) % 2**64)
    return Case(spec, shape, seed, trial, bytes(data))


# --- decoding


class Allocations(TorchDispatchMode):
    """Adds up the memory of all tensors that are made, whether or not they live at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._seen: set[int] = set()
        self._alive: list[torch.Tensor] = []  # or an address could come again

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


def allowed_nbytes(case: Case, payloads: int) -> int:
    """What decoding may allocate beyond the accumulators that the codec keeps.

    For each payload a code (int32) and a value (float32) for each element, and what the payload itself holds, once
    more; transforms work on a copy of the spectrum, whose rows are padded: 8 bytes for each of n / 2 + 2 bins, or of
    transforms of length 2 at least.
    """
    return payloads * (8 * case.numel + len(case.payload)) + 16 * case.numel + 1024


def outcome(codec: GatherCompressor, payloads: list[torch.Tensor], numel: int) -> torch.Tensor | str:
    """The average, or why there is none; Finding for anything else."""
    try:
        average = codec.decode(payloads, numel)
    except gradzip.PayloadError as error:
        return str(error)
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {error}, expected a PayloadError or a gradient") from error
    if average.dtype != torch.float32 or average.numel() != numel:
        raise Finding(f"decoded to {average.numel()} elements of {average.dtype}, expected {numel} of float32")
    return average.clone()


def check(corpus: Corpus, case: Case) -> bool:
    """Decodes a case in several ways; whether there is a gradient. Finding for what a decoder must not do."""
    codec, numel = corpus.codec(case.spec, case.shape), case.numel
    whole = torch.frombuffer(bytearray(corpus.payload(case.spec, case.shape, 0)), dtype=torch.uint8)
    # Memory of exactly its size, which ends where a sanitizer watches.
    forged = torch.empty(len(case.payload), dtype=torch.uint8)
    forged.copy_(torch.frombuffer(bytearray(case.payload), dtype=torch.uint8))
    codec.decode([whole], numel)  # so that it has its accumulators
    declared = struct.unpack_from("<Q", case.payload, 8)[0]
    for payloads in ([forged], [whole, forged]):
        with Allocations() as allocations:
            first = outcome(codec, payloads, numel)
        limit = allowed_nbytes(case, len(payloads))
        if allocations.nbytes > limit:
            raise Finding(f"allocated {allocations.nbytes} bytes for {numel} elements, expected at most {limit}")
    if not isinstance(first, str) and declared != numel:
        raise Finding(f"decoded a payload of {declared} elements as one of {numel}")
    level, threads = native.kernels().simd(), torch.get_num_threads()
    try:
        native.kernels().set_simd(native.kernels().simd_levels()[case.trial % len(native.kernels().simd_levels())])
        torch.set_num_threads(1 + case.trial % 3)
        again = outcome(codec, payloads, numel)
    finally:
        native.kernels().set_simd(level)
        torch.set_num_threads(threads)
    same = (
        first == again
        if isinstance(first, str) or isinstance(again, str)
        else torch.equal(*map(bits_of, (first, again)))
    )
    if not same:
        raise Finding(f"got {first} at first, but {again} with other instructions or threads")
    hear(codec, case, forged)
    return not isinstance(first, str)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """For comparison: which NaN it is depends on the order of operands."""
    return x.nan_to_num(nan=1e38).view(torch.int32)


def hear(codec: GatherCompressor, case: Case, forged: torch.Tensor) -> None:
    """A whole step beside a peer that sends the forged payload in every round."""
    if case.trial % 4:
        return
    fresh = codec.clone()
    grad = torch.ones(case.shape) if len(case.shape) > 1 else torch.ones(1, case.numel)
    routine = averaged(fresh, grad, "weight", case.trial // 4 % 2, 2)
    answer = None
    try:
        while True:
            collective = routine.send(answer)
            if not isinstance(collective, gradzip.collectives.Gather):
                return  # it bypasses compression
            pair = [collective.tensor, forged]
            joined = torch.cat(pair if case.trial // 4 % 2 == 0 else pair[::-1])
            answer = collective.split_by_rank(joined, 2)
    except (StopIteration, gradzip.PayloadError):
        return
    except Exception as error:
        raise Finding(f"a step: {type(error).__name__}: {error}, expected a PayloadError or a gradient") from error


# --- running


class Slot:
    """The file that holds the case at work, whatever becomes of this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb+") as file:
            file.truncate(1 << 21)
            self._memory = mmap.mmap(file.fileno(), 0)

    def put(self, case: Case) -> None:
        data = case.to_bytes()
        self._memory[: len(data)] = data


def work(corpus: Corpus, slot: Path, seed: int, seconds: float, trials: int | None, specs: list[str]) -> None:
    """Tries cases until time is over. Ends the process where a decoder does not end."""
    place = Slot(slot)
    begin = said = time.monotonic()
    decoded, trial = 0, 0
    while (now := time.monotonic()) - begin < seconds and trial != trials:
        case = make_case(corpus, seed, trial, specs)
        place.put(case)
        faulthandler.dump_traceback_later(DECODE_SECONDS, exit=True)
        decoded += check(corpus, case)
        faulthandler.cancel_dump_traceback_later()
        trial += 1
        if now - said > 2:
            said = now
            print(f"{now - begin:5.0f} s  {trial} payloads, {decoded} decoded, {trial - decoded} refused", flush=True)
    print(f"{time.monotonic() - begin:.0f} s, seed {seed}: {trial} payloads, {decoded} decoded, "
          f"{trial - decoded} refused, no finding")  # fmt: skip


def fuzz(place: Path, folder: Path, *arguments: str, echo: bool = False) -> tuple[int, str]:
    """Runs `work` on the sanitized build in `place`: (exit status, what it said, and where a finding is)."""
    slot = folder / f"at-work-{os.getpid()}"
    command = [sys.executable, "-u", __file__, "--slot", str(slot), *arguments]
    said = []
    with subprocess.Popen(
        command,
        env=sanitized.environment(place, LARGEST_MB),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            said.append(line)
            if echo:
                print(line, end="", flush=True)
    if process.returncode and slot.exists() and slot.read_bytes()[:1] == b"{":
        case = Case.from_bytes(slot.read_bytes())
        kept = folder / f"finding-{case.seed}-{case.trial}"
        kept.write_bytes(case.to_bytes())
        said.append(
            f"FINDING in {case.spec}, shape {case.shape}, seed {case.seed}, trial {case.trial}; "
            f"again with: python tests/fuzz.py {kept}\n"
        )
        if echo:
            print(said[-1], end="")
    slot.unlink(missing_ok=True)
    return process.returncode, "".join(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", type=Path, help="file of a finding, to be tried again")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--trials", type=int, help="how many payloads at most")
    parser.add_argument("--seed", type=int, help="of the mutations (default: another one in every run)")
    parser.add_argument(
        "--method", action="append", help="only this method, as gradzip.parse takes it; may be repeated"
    )
    parser.add_argument("--slot", type=Path, help=argparse.SUPPRESS)  # the process that does the work
    arguments = parser.parse_args()
    if not arguments.slot:
        if (reason := sanitized.why_not()) is not None:
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
    work(Corpus(), arguments.slot, seed, arguments.seconds, arguments.trials, arguments.method or SPECS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
