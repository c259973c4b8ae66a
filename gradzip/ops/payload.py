"""The one buffer a gather-type method puts on the wire for one tensor: header, checks, checksum.

Layout, little-endian (csrc/common/payload.h): magic "gz", version, method number, digest of the codec's configuration
(4 bytes), number of elements (8), bytes of the payload (8), checksum (4), flags (4), 16 bytes of the method's own; then
the method's sections, zero-padded to a multiple of 16 bytes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import _native

if TYPE_CHECKING:
    from .range_float import RangeFloat

VERSION = 1
PAYLOAD_ALIGN = 16
NON_FINITE = 1
_HEADER = struct.Struct("<2sBBIQQII16s")
HEADER_NBYTES = _HEADER.size
_TABLE = struct.Struct(f"<{HEADER_NBYTES}sQQ")  # struct PayloadInspection of csrc/common/payload.h
_SEEN = "_gradzip_seen"  # attribute of a payload in a device's memory: its _Inspection


class PayloadError(ValueError):
    """A payload that is truncated, corrupt, or was written by another method, configuration or version."""


class Header(NamedTuple):
    version: int
    method: int
    digest: int
    numel: int
    nbytes: int
    checksum: int
    flags: int
    fields: bytes


class Payload(NamedTuple):
    """A payload whose header was found right."""

    flags: int
    fields: bytes  # 16 bytes of the method's own
    body: Tensor  # uint8: what follows the header, padding included

    def sections(self, *nbytes: int) -> list[Tensor]:
        """The body cut into sections of those lengths; PayloadError unless they and their padding are all of it."""
        if not 0 <= self.body.numel() - sum(nbytes) < PAYLOAD_ALIGN:
            raise PayloadError(
                f"corrupt payload: got {self.body.numel()} bytes after the header, expected sections of {sum(nbytes)}"
            )
        return list(self.body[: sum(nbytes)].split(nbytes))


def new_payload(section_nbytes: int, device: torch.device | None = None) -> Tensor:
    """uint8 buffer for a header and sections of that many bytes, padding included and zero."""
    nbytes = -(-(HEADER_NBYTES + section_nbytes) // PAYLOAD_ALIGN) * PAYLOAD_ALIGN
    payload = torch.empty(nbytes, dtype=torch.uint8, device=device)
    payload[HEADER_NBYTES + section_nbytes :].zero_()
    return payload


def _checksum(payload: Tensor) -> int:
    return _native.kernels().payload_checksum(payload.data_ptr(), payload.numel(), _native.threads())


def seal(
    payload: Tensor,
    *,
    method: int,
    digest: int,
    numel: int,
    fields: bytes,
    flags: int = 0,
    magnitudes: Tensor | None = None,
    number: RangeFloat | None = None,
) -> Tensor:
    """Writes the header of a payload whose sections are in place; returns the payload.

    fields: 16 bytes, or 8 where `number` is given, whose wire form follows them. magnitudes: float32, as from
    `abs_max_tensor`; unless all are finite, the flags say that the gradient is not. On CUDA, `magnitudes` and `number`
    may be results that are not there yet: nothing waits for them.
    """
    _native.in_place(payload, torch.uint8, "seal: payload")
    if payload.numel() < HEADER_NBYTES or payload.numel() % PAYLOAD_ALIGN:
        raise ValueError(f"seal: got {payload.numel()} bytes, expected a payload as new_payload makes it")
    expected = 16 if number is None else 8
    if len(fields) != expected:
        raise ValueError(f"seal: got {len(fields)} bytes of fields, expected {expected}")
    if _native.on_cuda(payload):
        device = payload.device
        header = bytearray(_HEADER.pack(b"gz", VERSION, method, digest, numel, payload.numel(), 0, flags, fields))
        host = torch.frombuffer(header, dtype=torch.uint8)
        if magnitudes is None:
            magnitudes = torch.empty(0, dtype=torch.float32, device=device)
        magnitudes = _native.check(magnitudes, torch.float32, "seal: magnitudes", device=device)
        words = None if number is None else number._words_on(device)
        _native.launch(
            "payload_seal",
            device,
            payload.data_ptr(),
            payload.numel(),
            host.data_ptr(),
            magnitudes.data_ptr(),
            magnitudes.numel(),
            0 if words is None else words.data_ptr(),
            workspace_for=payload.numel(),
        )
        return payload
    if magnitudes is not None and not magnitudes.isfinite().all():
        flags |= NON_FINITE
    if number is not None:
        fields += number.to_wire()
    memory = payload[:HEADER_NBYTES].numpy().data
    _HEADER.pack_into(memory, 0, b"gz", VERSION, method, digest, numel, payload.numel(), 0, flags, fields)
    checksum = _checksum(payload)
    _HEADER.pack_into(memory, 0, b"gz", VERSION, method, digest, numel, payload.numel(), checksum, flags, fields)
    return payload


class _Inspection(NamedTuple):
    """What the host knows of a payload in a device's memory."""

    header: bytes
    checksum: int  # of what is there, where the header makes sense


def _inspect(buffer: Tensor, count: int) -> list[_Inspection]:
    """Of `count` payloads one behind the other; waits for the device, once."""
    table = torch.empty((count, _TABLE.size), dtype=torch.uint8, device=buffer.device)
    _native.launch("payload_inspect", buffer.device, buffer.data_ptr(), buffer.numel(), count, table.data_ptr())
    rows = [_TABLE.unpack(row.tobytes()) for row in table.cpu().numpy()]
    return [_Inspection(header, (total ^ total >> 32) & 0xFFFFFFFF) for header, _, total in rows]


def _read_header(payload: Tensor, seen: _Inspection | None) -> Header:
    if payload.numel() < HEADER_NBYTES:
        raise PayloadError(f"truncated payload: got {payload.numel()} bytes, expected at least {HEADER_NBYTES}")
    magic, *rest = _HEADER.unpack(seen.header if seen else payload[:HEADER_NBYTES].numpy().tobytes())
    header = Header(*rest)
    if magic != b"gz":
        raise PayloadError(f"not a gradzip payload: it begins with {magic!r}, expected b'gz'")
    if header.version != VERSION:
        raise PayloadError(
            f"payload of wire format {header.version}, expected {VERSION}: install the same gradzip on every rank"
        )
    return header


def open_payload(payload: Tensor, *, method: int, digest: int, numel: int) -> Payload:
    """A payload (uint8), its header checked against what this rank would have written; PayloadError.

    Waits for the device where the payload is on one, unless `split_payloads` has.
    """
    seen = getattr(payload, _SEEN, None)
    payload = _native.check(payload, torch.uint8, "payload")
    if seen is None and _native.on_cuda(payload):
        seen = _inspect(payload, 1)[0]
    header = _read_header(payload, seen)
    if header.method != method:
        raise PayloadError(
            f"payload of method number {header.method}, expected {method}: give every rank the same method"
        )
    if header.digest != digest:
        raise PayloadError(
            f"payload made with another configuration (digest {header.digest:08x}, expected {digest:08x}): "
            "give every rank the same arguments"
        )
    if header.numel != numel:
        raise PayloadError(f"payload of a tensor of {header.numel} elements, expected {numel}")
    if header.nbytes != payload.numel() or header.nbytes % PAYLOAD_ALIGN:
        raise PayloadError(f"truncated payload: got {payload.numel()} bytes, expected {header.nbytes}")
    if header.checksum != (seen.checksum if seen else _checksum(payload)):
        raise PayloadError("corrupt payload: its checksum does not match its contents")
    return Payload(header.flags, header.fields, payload[HEADER_NBYTES:])


def split_payloads(buffer: Tensor, count: int) -> list[Tensor]:
    """The `count` payloads that lie one behind the other in a gathered buffer (uint8), as views; PayloadError.

    Waits for the device where the buffer is on one: that once, for the lengths and all else that is to be known.
    """
    buffer = _native.check(buffer, torch.uint8, "split_payloads: buffer")
    seen = _inspect(buffer, count) if _native.on_cuda(buffer) else [None] * count
    payloads = []
    begin = 0
    for index in range(count):
        nbytes = _read_header(buffer[begin:], seen[index]).nbytes
        if nbytes < HEADER_NBYTES or nbytes % PAYLOAD_ALIGN or nbytes > buffer.numel() - begin:
            raise PayloadError(
                f"payload {index} of {count} claims {nbytes} bytes, but {buffer.numel() - begin} are left"
            )
        payload = buffer[begin : begin + nbytes]
        if seen[index] is not None:
            setattr(payload, _SEEN, seen[index])
        payloads.append(payload)
        begin += nbytes
    if begin != buffer.numel():
        raise PayloadError(f"got {buffer.numel()} bytes, expected {begin} in {count} payloads")
    return payloads


def first_payload(buffer: Tensor) -> Tensor:
    """The payload at the beginning of a buffer (uint8) that may be longer, as a view; PayloadError.

    Waits for the device where the buffer is on one.
    """
    buffer = _native.check(buffer, torch.uint8, "first_payload: buffer")
    nbytes = _read_header(buffer, _inspect(buffer, 1)[0] if _native.on_cuda(buffer) else None).nbytes
    if nbytes > buffer.numel():
        raise PayloadError(f"truncated payload: got {buffer.numel()} bytes, expected {nbytes}")
    return buffer[:nbytes]
