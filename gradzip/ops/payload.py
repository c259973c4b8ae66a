"""The one buffer that a gather-type method puts on the wire for one tensor: header, sections, checksum.

Layout, little-endian (csrc/common/payload.h): magic "gz", version, method number, digest of the codec's configuration
(4 bytes), number of elements (8), size of the payload in bytes (8), checksum (4), flags (4), 16 bytes of fields of the
method; then the method's sections, zero-padded to a multiple of 16 bytes.
"""

from __future__ import annotations

import struct
from ctypes import addressof, create_string_buffer
from typing import NamedTuple

import torch
from torch import Tensor

from . import _native
from .errors import PayloadError
from .range_float import RangeFloat

VERSION = 2
PAYLOAD_ALIGN = 16
NON_FINITE = 1
_HEADER = struct.Struct("<2sBBIQQII16s")
HEADER_NBYTES = _HEADER.size
_TABLE = struct.Struct(f"<{HEADER_NBYTES}sQQ")  # struct PayloadInspection of csrc/common/payload.h
_INSPECTION = "_gradzip_inspection"  # attribute of a payload on CUDA: its _Inspection


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
    """A payload whose header and checksum are valid."""

    flags: int
    fields: bytes  # 16 bytes of the method
    body: Tensor  # uint8: what follows the header, padding included

    def sections(self, *nbytes: int) -> list[Tensor]:
        """Cut the body into sections of the given sizes.

        Raises PayloadError unless the sections and their padding are the whole body.
        """
        if not 0 <= self.body.numel() - sum(nbytes) < PAYLOAD_ALIGN:
            raise PayloadError(
                f"corrupt payload: got {self.body.numel()} bytes after the header, expected sections of {sum(nbytes)}"
            )
        return list(self.body[: sum(nbytes)].split(nbytes))


def new_payload(section_nbytes: int, device: torch.device | None = None) -> Tensor:
    """Return a uint8 buffer for a header and sections of that many bytes, with zero padding."""
    nbytes = -(-(HEADER_NBYTES + section_nbytes) // PAYLOAD_ALIGN) * PAYLOAD_ALIGN
    payload = torch.empty(nbytes, dtype=torch.uint8, device=device)
    payload[HEADER_NBYTES + section_nbytes :].zero_()
    return payload


def seal_payload(
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
    """Write the header of a payload whose sections are in place, and return the payload.

    payload: uint8, from `new_payload`, in place. fields: 16 bytes, or 8 if `number` is given, whose wire form follows
    them. magnitudes: float32, as from `abs_max_tensor`; NON_FINITE is added to the flags unless all are finite. Does
    not wait for the device: on CUDA, `magnitudes` and `number` may be results that are still being computed.
    """
    _native.in_place(payload, torch.uint8, "seal_payload: payload")
    if payload.numel() < HEADER_NBYTES or payload.numel() % PAYLOAD_ALIGN:
        raise ValueError(f"seal_payload: got {payload.numel()} bytes, expected a payload as new_payload makes it")
    expected = 16 if number is None else 8
    if len(fields) != expected:
        raise ValueError(f"seal_payload: got {len(fields)} bytes of fields, expected {expected}")
    if magnitudes is not None:
        magnitudes = _native.check(magnitudes, torch.float32, "seal_payload: magnitudes", device=payload.device)
    header = create_string_buffer(HEADER_NBYTES)
    _HEADER.pack_into(header, 0, b"gz", VERSION, method, digest, numel, payload.numel(), 0, flags, fields)
    words = None if number is None else number._words_on(payload.device)
    _native.run(
        "payload_seal",
        payload,
        payload.data_ptr(),
        payload.numel(),
        addressof(header),
        0 if magnitudes is None else magnitudes.data_ptr(),
        0 if magnitudes is None else magnitudes.numel(),
        0 if words is None else words.data_ptr(),
    )
    return payload


class _Inspection(NamedTuple):
    header: bytes
    checksum: int  # of the payload's contents, if the size in the header is valid


def _inspect(buffer: Tensor, count: int) -> list[_Inspection]:
    """Read the headers and compute the checksums of `count` consecutive payloads; waits for the device, once."""
    arguments = (buffer.data_ptr(), buffer.numel(), count)
    if _native.on_cuda(buffer):
        on_device = torch.empty(count * _TABLE.size, dtype=torch.uint8, device=buffer.device)
        _native.run("payload_inspect", buffer, *arguments, on_device.data_ptr())
        table = on_device.cpu().numpy().tobytes()
    else:
        on_host = create_string_buffer(count * _TABLE.size)
        _native.run("payload_inspect", buffer, *arguments, addressof(on_host))
        table = on_host.raw
    rows = _TABLE.iter_unpack(table)
    return [_Inspection(header, (total ^ total >> 32) & 0xFFFFFFFF) for header, _, total in rows]


def _inspect_on_cuda(buffer: Tensor, count: int) -> list[_Inspection] | list[None]:
    """Inspect payloads on CUDA; in host memory, headers are read in place and checksums when a payload is opened."""
    return _inspect(buffer, count) if _native.on_cuda(buffer) else [None] * count


def _read_header(payload: Tensor, inspection: _Inspection | None) -> Header:
    if payload.numel() < HEADER_NBYTES:
        raise PayloadError(f"truncated payload: got {payload.numel()} bytes, expected at least {HEADER_NBYTES}")
    magic, *rest = _HEADER.unpack(inspection.header if inspection else payload[:HEADER_NBYTES].numpy().tobytes())
    header = Header(*rest)
    if magic != b"gz":
        raise PayloadError(f"not a gradzip payload: it begins with {magic!r}, expected b'gz'")
    if header.version != VERSION:
        raise PayloadError(
            f"payload of wire format {header.version}, expected {VERSION}: install the same gradzip on every rank"
        )
    return header


def open_payload(payload: Tensor, *, method: int, digest: int, numel: int) -> Payload:
    """Check the header and checksum of a payload against what this rank would have written.

    payload: uint8, exactly one payload. Raises PayloadError if they differ. Waits for the device if the payload is on
    CUDA, unless it comes from `split_payloads`, which already waited.
    """
    inspection = getattr(payload, _INSPECTION, None)
    payload = _native.check(payload, torch.uint8, "payload")
    if inspection is None:
        inspection = _inspect(payload, 1)[0]
    header = _read_header(payload, inspection)
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
    if header.checksum != inspection.checksum:
        raise PayloadError("corrupt payload: its checksum does not match its contents")
    return Payload(header.flags, header.fields, payload[HEADER_NBYTES:])


def split_payloads(buffer: Tensor, count: int) -> list[Tensor]:
    """Return the `count` consecutive payloads of a gathered buffer, as views.

    buffer: uint8. Raises PayloadError unless they fill the buffer exactly. Waits for the device if the buffer is on
    CUDA, once for all payloads; `open_payload` then need not.
    """
    buffer = _native.check(buffer, torch.uint8, "split_payloads: buffer")
    inspections = _inspect_on_cuda(buffer, count)
    payloads = []
    begin = 0
    for index, inspection in enumerate(inspections):
        nbytes = _read_header(buffer[begin:], inspection).nbytes
        if nbytes < HEADER_NBYTES or nbytes % PAYLOAD_ALIGN or nbytes > buffer.numel() - begin:
            raise PayloadError(
                f"payload {index} of {count} claims {nbytes} bytes, but {buffer.numel() - begin} are left"
            )
        payload = buffer[begin : begin + nbytes]
        if inspection is not None:
            setattr(payload, _INSPECTION, inspection)
        payloads.append(payload)
        begin += nbytes
    if begin != buffer.numel():
        raise PayloadError(f"got {buffer.numel()} bytes, expected {begin} in {count} payloads")
    return payloads


def first_payload(buffer: Tensor) -> Tensor:
    """Return the payload at the beginning of a buffer that may be longer, as a view.

    buffer: uint8. Raises PayloadError if the payload is truncated. Waits for the device if the buffer is on CUDA.
    """
    buffer = _native.check(buffer, torch.uint8, "first_payload: buffer")
    nbytes = _read_header(buffer, _inspect_on_cuda(buffer, 1)[0]).nbytes
    if nbytes > buffer.numel():
        raise PayloadError(f"truncated payload: got {buffer.numel()} bytes, expected {nbytes}")
    return buffer[:nbytes]
