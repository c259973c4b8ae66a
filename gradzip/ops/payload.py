"""The one buffer that a gather-type method puts on the wire for one tensor: header, sections, checksum.

Layout, little-endian (csrc/common/payload.h): magic "gz", version, method number, digest of the codec's configuration
(4 bytes), number of elements (8), size of the payload in bytes (8), checksum (4), flags (1) and slack (3), 16 bytes of
fields of the method; then the method's sections, zero-padded to a multiple of 16 bytes; then 16 * slack zeros.

A payload that is written on CUDA has slack if its length depends on the data: it has room for the longest, so that
nothing waits for the device.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import _native, groups
from .errors import PayloadError
from .range_float import RangeFloat

VERSION = 2
PAYLOAD_ALIGN = 16
NON_FINITE = 1
_HEADER = struct.Struct("<2sBBIQQII16s")
HEADER_NBYTES = _HEADER.size
_MAGIC = int.from_bytes(b"gz", "little")
_INSPECTED = np.dtype(  # struct PayloadInspection
    [
        ("magic", "<u2"), ("version", "u1"), ("method", "u1"), ("digest", "<u4"), ("numel", "<u8"), ("nbytes", "<u8"),
        ("checksum", "<u4"), ("flags", "<u4"), ("fields", "V16"), ("begin", "<u8"), ("total", "<u8"),
    ]
)  # fmt: skip
_SLACK_BIT = 8
_MOST_STREAM = 1 << 28  # bytes: the slack has 24 bits
_INSPECTION = "_gradzip_inspection"  # attribute of a payload that was split off: its inspection
_PARTS = "_gradzip_parts"  # attribute of consecutive payloads on CUDA: views of them, inspected


class Payload(NamedTuple):
    """A payload whose header and checksum are valid."""

    flags: int
    fields: bytes  # 16 bytes of the method
    body: Tensor  # uint8: what follows the header, padding included

    @property
    def wire(self) -> Tensor:
        """The last 8 bytes of the fields, where the payload is: they precede the body."""
        return self.body.as_strided((8,), (1,), self.body.storage_offset() - 8)

    def sections(self, *nbytes: int) -> list[Tensor]:
        """Cut the body into sections of the given sizes.

        Raises PayloadError unless the sections and their padding are the whole body.
        """
        if not 0 <= self.body.numel() - sum(nbytes) < PAYLOAD_ALIGN:
            raise _misfit(self, sum(nbytes))
        return list(self.body[: sum(nbytes)].split_with_sizes(nbytes))


def body_addresses(payloads: Sequence[Payload], nbytes: int | np.ndarray) -> np.ndarray:
    """The addresses of the bodies of payloads, each of which is to hold sections of `nbytes` bytes, and their padding.

    nbytes: of all, or of each: Python's integers, where payloads tell, which do not overflow.

    Raises PayloadError, with its `index`, for the first one that does not.
    """
    bodies = [payload.body for payload in payloads]
    spare = groups.numels(bodies) - nbytes
    valid = (spare >= 0) & (spare < PAYLOAD_ALIGN)
    if False in valid:
        index = int(valid.argmin())
        raise _misfit(payloads[index], np.broadcast_to(nbytes, spare.shape)[index], index)
    return groups.addresses(bodies)


def _misfit(payload: Payload, nbytes: int, index: int | None = None) -> PayloadError:
    got = payload.body.numel()
    return PayloadError(f"corrupt payload: got {got} bytes after the header, expected sections of {nbytes}", index)


class Stream(NamedTuple):
    """The last section of a payload whose length depends on the data."""

    begin: int  # offset behind the header
    nbytes: int | Tensor  # int64 of 1 element on CUDA, which need not be computed yet
    padding_at: int | None = None  # the byte of the fields that is to hold the size of the padding


# --- writing


def new_payload(section_nbytes: int, device: torch.device | None = None) -> Tensor:
    """Return a uint8 buffer for a header and sections of that many bytes, with zero padding."""
    nbytes = _padded(HEADER_NBYTES + section_nbytes)
    payload = torch.empty(nbytes, dtype=torch.uint8, device=device)
    payload[HEADER_NBYTES + section_nbytes :].zero_()
    return payload


def new_payloads(
    section_nbytes: Sequence[int], device: torch.device | None = None, *, streams: bool = False, gaps: bool = False
) -> list[Tensor]:
    """Return a buffer as from `new_payload` for each. They begin as far apart in memory as the longest one is long, and
    zeros follow the others.

    streams: their last sections are streams (`Seal`), behind which `seal_payloads` writes the padding. gaps: there is
    padding between sections, too; all bytes are zeros.
    """
    sizes = [-(-(HEADER_NBYTES + nbytes) // PAYLOAD_ALIGN) * PAYLOAD_ALIGN for nbytes in section_nbytes]
    rows = torch.empty(len(sizes), max(sizes), dtype=torch.uint8, device=device)
    begin = 0 if gaps else min(sizes) if streams else HEADER_NBYTES + min(section_nbytes)
    rows.narrow(1, begin, rows.shape[1] - begin).zero_()
    return list(map(Tensor.__getitem__, rows.unbind(), map(slice, sizes)))


class Seal(NamedTuple):
    """A payload whose sections are in place, and what its header is to say.

    payload: uint8, from `new_payload`. numel: of the gradient. fields: 16 bytes, or 8 if `number` is given, whose wire
    form follows them. magnitudes: float32, as from `abs_max_tensor`; NON_FINITE is added to the flags unless all are at
    most 2^127: an average of larger numbers, which is added up in float32, may overflow. scale: float32 of 1 element;
    replaces the first 4 bytes of the fields. stream: the last section, if it is shorter than the memory for it; what
    follows it becomes zeros. On CUDA these become slack, otherwise they are cut off.

    On CUDA, `magnitudes`, `number`, `scale` and `stream` may be results that are still being computed.
    """

    payload: Tensor
    numel: int
    fields: bytes = bytes(16)
    flags: int = 0
    magnitudes: Tensor | None = None
    number: RangeFloat | None = None
    scale: Tensor | None = None
    stream: Stream | None = None


def seal_payloads(seals: Sequence[Seal], *, method: int, digest: int) -> list[Tensor]:
    """Write the headers of payloads on one device, in one call. Return the payloads. Does not wait for the device."""
    table = _native.Table(f"<Q{HEADER_NBYTES}sQqQQQqq")  # struct PayloadSeal of csrc/common/payload.h
    payloads: list[Tensor] = []
    for payload, numel, fields, flags, magnitudes, number, scale, stream in seals:
        _native.in_place(payload, torch.uint8, "seal_payloads: payload", device=table.device)
        if payload.numel() < HEADER_NBYTES or payload.numel() % PAYLOAD_ALIGN:
            raise ValueError(f"seal_payloads: got {payload.numel()} bytes, expected a payload as new_payload makes it")
        expected = 16 if number is None else 8
        if len(fields) != expected:
            raise ValueError(f"seal_payloads: got {len(fields)} bytes of fields, expected {expected}")
        if magnitudes is not None:
            magnitudes = _native.check(magnitudes, torch.float32, "seal_payloads: magnitudes", device=payload.device)
        if scale is not None:
            scale = _native.check(scale, torch.float32, "seal_payloads: scale", 1, payload.device)
        begin, stream_nbytes, padding_at = 0, None, -1
        if stream is not None:
            begin = HEADER_NBYTES + stream.begin
            padding_at = -1 if stream.padding_at is None else stream.padding_at
            payload, stream_nbytes = _fitted(payload, begin, stream.nbytes)
        words = None if number is None else number._words_on(payload.device)
        header = _HEADER.pack(b"gz", VERSION, method, digest, numel, payload.numel(), 0, flags, fields)
        magnitude_count = 0 if magnitudes is None else magnitudes.numel()
        table.add(payload, header, magnitudes, magnitude_count, words, scale, stream_nbytes, begin, padding_at)
        payloads.append(payload)
    table.run("payload_seal")
    return payloads


def _fitted(payload: Tensor, begin: int, nbytes: int | Tensor) -> tuple[Tensor, Tensor]:
    """The payload without what it does not need, and the size of its stream, int64 of 1 element on its device."""
    room = payload.numel() - begin
    if isinstance(nbytes, Tensor):
        if room > _MOST_STREAM:
            raise ValueError(f"seal_payloads: got room for a stream of {room} bytes, expected at most {_MOST_STREAM}")
        return payload, _native.check(nbytes, torch.int64, "seal_payloads: stream.nbytes", 1, payload.device)
    if not 0 <= nbytes <= room:
        raise ValueError(f"seal_payloads: got a stream of {nbytes} bytes, expected 0 to {room}")
    return payload[: _padded(begin + nbytes)], torch.tensor([nbytes], device=payload.device)


def _padded(nbytes: int) -> int:
    return -(-nbytes // PAYLOAD_ALIGN) * PAYLOAD_ALIGN


# --- inspecting: what the host needs to know


def inspect_payloads(groups: Sequence[Sequence[Tensor]]) -> list[Tensor | None]:
    """Read the headers and compute the checksums of several lists of payloads, without waiting for the device.

    groups: lists of payloads, uint8, contiguous, all on one device. Returns a uint8 table on that device for each list;
    `attach_inspections` wants a copy of it on the CPU. None in place of a table if there is nothing to wait for:
    payloads on the CPU, or inspected ones.
    """
    waiting = [any([p.is_cuda and not hasattr(p, _INSPECTION) for p in group]) for group in groups]
    listed = [payload for group, needed in zip(groups, waiting) if needed for payload in group]
    if not listed:
        return [None] * len(groups)
    sizes = [len(group) * _INSPECTED.itemsize for group, needed in zip(groups, waiting) if needed]
    tables = iter(_table(listed, 1).split_with_sizes(sizes))
    return [next(tables) if needed else None for needed in waiting]


def attach_inspections(payloads: Sequence[Tensor], table: Tensor) -> None:
    """Attach a table of `inspect_payloads`, copied to the CPU: `open_payload` does not wait for the device then."""
    for payload, inspection in zip(payloads, np.frombuffer(table.numpy(), _INSPECTED), strict=True):
        setattr(payload, _INSPECTION, inspection)


class ExpectedPayloads(NamedTuple):
    """Payloads of one codec, and what their headers are to say.

    payloads: uint8, contiguous, all on one device. numels: of their gradients. fields: 16 bytes for each payload, or
    None. known: the bytes of the fields that must be equal, bit i for byte i; others depend on the data.
    """

    payloads: Sequence[Tensor]
    numels: Sequence[int]
    method: int
    digest: int
    fields: Sequence[bytes] | None = None
    known: int = 0xFFFF


def verify_payloads(expected: Sequence[ExpectedPayloads]) -> list[tuple[Tensor, Tensor]]:
    """Check the headers and checksums of several lists of payloads on their device, without waiting for it.

    On CUDA in one launch for 70 payloads. Returns (table, numbers) for each list, on that device, those of all lists
    adjacent in memory:

    numbers: float32, one for each payload: 0 if `open_payload` accepts it, its known fields are as expected, and it
    does not have the flag NON_FINITE; NaN otherwise.

    table: as of `inspect_payloads`. With a copy of it on the CPU, `open_payloads` says what is wrong, without waiting.
    """
    rows, kept = [], [payload for group in expected for payload in group.payloads]
    for payloads, numels, method, digest, fields, known in expected:
        of_group = np.zeros((len(payloads), 6), np.uint64)  # struct PayloadExpectation of csrc/common/payload.h
        of_group[:, 0], of_group[:, 1], of_group[:, 2] = groups.addresses(payloads), groups.numels(payloads), numels
        of_group[:, 3] = digest | method << 32 | (0 if fields is None else known) << 48
        if fields is not None:
            of_group[:, 4:] = np.frombuffer(b"".join(fields), "<u8").reshape(-1, 2)
        rows.append(of_group)
    device = kept[0].device if kept else None
    table = torch.empty(len(kept) * _INSPECTED.itemsize, dtype=torch.uint8, device=device)
    numbers = torch.empty(len(kept), dtype=torch.float32, device=device)
    if kept:
        entries = np.concatenate(rows)
        arguments = (entries.__array_interface__["data"][0], len(kept), table.data_ptr(), numbers.data_ptr())
        _native.run("payload_verify", kept[0], *arguments)
    counts = [len(group.payloads) for group in expected]
    tables = table.split_with_sizes([count * _INSPECTED.itemsize for count in counts])
    return list(zip(tables, numbers.split_with_sizes(counts)))


def _table(buffers: Sequence[Tensor], each: int) -> Tensor:
    """The inspections of `each` consecutive payloads in each buffer."""
    table = torch.empty(len(buffers) * each * _INSPECTED.itemsize, dtype=torch.uint8, device=buffers[0].device)
    listed = array("q")  # struct PayloadBuffer
    for buffer in buffers:
        listed.extend((buffer.data_ptr(), buffer.numel()))
    _native.run("payload_inspect", buffers[0], listed.buffer_info()[0], len(buffers), each, table.data_ptr())
    return table


def _inspect(buffers: Sequence[Tensor], each: int) -> np.ndarray:
    """Inspect payloads; waits for the device, once."""
    return np.frombuffer(_table(buffers, each).cpu().numpy(), _INSPECTED)


def _foreign(row: np.void, nbytes: int) -> str | None:
    """Why `nbytes` bytes, of which this is the inspection, do not begin with a payload; None if they do."""
    if nbytes < HEADER_NBYTES:
        return f"truncated payload: got {nbytes} bytes, expected at least {HEADER_NBYTES}"
    if row["magic"] != _MAGIC:
        return f"not a gradzip payload: it begins with {row['magic'].tobytes()}, expected b'gz'"
    if row["version"] != VERSION:
        return f"payload of wire format {row['version']}, expected {VERSION}: install the same gradzip on every rank"
    return None


# --- reading


def open_payload(payload: Tensor, *, method: int, digest: int, numel: int) -> Payload:
    """Check the header and checksum of a payload against what this rank would have written.

    payload: uint8, exactly one payload. Raises PayloadError if they differ. Waits for the device if the payload is on
    CUDA, unless it comes from `split_payloads`, or has an inspection attached.
    """
    return open_payloads([_native.check(payload, torch.uint8, "payload")], [numel], method=method, digest=digest)[0]


def open_payloads(
    payloads: Sequence[Tensor], numels: Sequence[int], table: Tensor | None = None, *, method: int, digest: int
) -> list[Payload]:
    """`open_payload` of several payloads, by one look at all headers.

    Args:
        numels: of each.
        table: of `inspect_payloads`, copied to the CPU. None: waits for the device, unless they have inspections.

    Raises:
        PayloadError: of the first one that is not as expected; `index` of the exception is its number.
    """
    rows = _inspected(payloads) if table is None else np.frombuffer(table.numpy(), _INSPECTED)
    nbytes = groups.numels(payloads)
    ends = nbytes - PAYLOAD_ALIGN * (rows["flags"] >> _SLACK_BIT).astype(np.int64)
    checksums = (rows["total"] ^ rows["total"] >> 32) & 0xFFFFFFFF
    valid = (rows["magic"] == _MAGIC) & (rows["version"] == VERSION) & (rows["method"] == method)
    valid &= (rows["digest"] == digest) & (rows["numel"] == numels) & (rows["nbytes"] == nbytes)
    valid &= (nbytes % PAYLOAD_ALIGN == 0) & (rows["checksum"] == checksums) & (ends >= HEADER_NBYTES)
    if False in valid:
        i = int(valid.argmin())
        checksum_matches = rows["checksum"][i] == checksums[i]
        raise PayloadError(_fault(rows[i], int(nbytes[i]), method, digest, numels[i], checksum_matches), i)
    bodies = [payload[HEADER_NBYTES:end] for payload, end in zip(payloads, ends.tolist())]
    flags = (rows["flags"] & ((1 << _SLACK_BIT) - 1)).tolist()
    # Without the constructor of NamedTuple, which is a function of Python.
    return [tuple.__new__(Payload, one) for one in zip(flags, rows["fields"].tolist(), bodies)]


def unread_payloads(payloads: Sequence[Tensor], fields: Sequence[bytes]) -> list[Payload]:
    """Payloads whose headers the host does not read, with the fields that are expected of them."""
    return [tuple.__new__(Payload, (0, field, payload[HEADER_NBYTES:])) for payload, field in zip(payloads, fields)]


def _inspected(payloads: Sequence[Tensor]) -> np.ndarray:
    """The inspections of payloads: those attached, and for the others new ones."""
    attached = [getattr(payload, _INSPECTION, None) for payload in payloads]
    missing = [payload for payload, row in zip(payloads, attached) if row is None]
    made = iter(_inspect(missing, 1) if missing else ())
    return np.array([next(made) if row is None else row for row in attached], _INSPECTED)


def _fault(row: np.void, nbytes: int, method: int, digest: int, numel: int, checksum_matches: bool) -> str:
    """What is wrong with a payload of `nbytes` bytes."""
    if foreign := _foreign(row, nbytes):
        return foreign
    if row["method"] != method:
        return f"payload of method number {row['method']}, expected {method}: give every rank the same method"
    if row["digest"] != digest:
        return (
            f"payload made with another configuration (digest {row['digest']:08x}, expected {digest:08x}): "
            "give every rank the same arguments"
        )
    if row["numel"] != numel:
        return f"payload of a tensor of {row['numel']} elements, expected {numel}"
    if row["nbytes"] != nbytes or nbytes % PAYLOAD_ALIGN:
        return f"truncated payload: got {nbytes} bytes, expected {row['nbytes']}"
    if not checksum_matches:
        return "corrupt payload: its checksum does not match its contents"
    return f"corrupt payload: it claims {PAYLOAD_ALIGN * int(row['flags'] >> _SLACK_BIT)} unused bytes of {nbytes}"


def split_payloads(buffer: Tensor, count: int) -> list[Tensor]:
    """Return the `count` consecutive payloads of a gathered buffer, as views.

    buffer: uint8. Raises PayloadError unless they fill the buffer exactly. Waits for the device if the buffer is on
    CUDA, once for all payloads; `open_payload` then need not. What `join_payloads` joined, or `split_all_payloads`
    found, is returned without waiting.
    """
    if (parts := getattr(buffer, _PARTS, None)) is not None and len(parts) == count:
        return list(parts)
    buffer = _native.check(buffer, torch.uint8, "split_payloads: buffer")
    return _split(buffer, _inspect([buffer], count))


def split_all_payloads(buffers: Sequence[Tensor], each: int) -> None:
    """Find the `each` consecutive payloads of each buffer, for `split_payloads`.

    buffers: uint8, on one device. Raises PayloadError as `split_payloads` does. Waits for the device if the buffers are
    on CUDA, once for all.
    """
    if not (buffers and buffers[0].is_cuda):
        return  # `split_payloads` need not wait
    for buffer, rows in zip(buffers, _inspect(buffers, each).reshape(-1, each)):
        setattr(buffer, _PARTS, _split(buffer, rows))


def join_payloads(payloads: Sequence[Tensor], buffer: Tensor | None = None) -> Tensor:
    """Return payloads as one buffer, which `split_payloads` splits into the same tensors again.

    buffer: what holds them already, one after the other.
    """
    joined = torch.cat(list(payloads)) if buffer is None else buffer
    setattr(joined, _PARTS, list(payloads))
    return joined


def _split(buffer: Tensor, rows: np.ndarray) -> list[Tensor]:
    payloads = []
    begin = 0
    for index, row in enumerate(rows):
        left, nbytes = buffer.numel() - begin, int(row["nbytes"])
        if foreign := _foreign(row, left):
            raise PayloadError(foreign)
        if nbytes < HEADER_NBYTES or nbytes % PAYLOAD_ALIGN or nbytes > left:
            raise PayloadError(f"payload {index} of {len(rows)} claims {nbytes} bytes, but {left} are left")
        payloads.append(buffer[begin : begin + nbytes])
        setattr(payloads[-1], _INSPECTION, row)
        begin += nbytes
    if begin != buffer.numel():
        raise PayloadError(f"got {buffer.numel()} bytes, expected {begin} in {len(rows)} payloads")
    return payloads
