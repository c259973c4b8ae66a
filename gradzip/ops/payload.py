"""The one buffer a gather-type method puts on the wire for one tensor: header, checks, checksum.

Layout, little-endian (csrc/common/payload.h): magic "gz", version, method number, digest of the codec's configuration
(4 bytes), number of elements (8), bytes of the payload (8), checksum (4), flags (4), 16 bytes of the method's own; then
the method's sections, zero-padded to a multiple of 16 bytes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from . import _native

VERSION = 1
PAYLOAD_ALIGN = 16
NON_FINITE = 1
_HEADER = struct.Struct("<2sBBIQQII16s")
HEADER_NBYTES = _HEADER.size


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


def new_payload(section_nbytes: int) -> Tensor:
    """uint8 buffer for a header and sections of that many bytes, padding included and zero."""
    nbytes = -(-(HEADER_NBYTES + section_nbytes) // PAYLOAD_ALIGN) * PAYLOAD_ALIGN
    payload = torch.empty(nbytes, dtype=torch.uint8)
    payload[HEADER_NBYTES + section_nbytes :].zero_()
    return payload


def _checksum(payload: Tensor) -> int:
    return _native.kernels().payload_checksum(payload.data_ptr(), payload.numel(), _native.threads())


def _write_header(payload: Tensor, *values: int | bytes) -> None:
    _HEADER.pack_into(payload[:HEADER_NBYTES].numpy().data, 0, b"gz", VERSION, *values)


def seal(payload: Tensor, *, method: int, digest: int, numel: int, flags: int, fields: bytes) -> Tensor:
    """Writes the header of a payload whose sections are in place; returns the payload."""
    _native.in_place(payload, torch.uint8, "seal: payload")
    if payload.numel() < HEADER_NBYTES or payload.numel() % PAYLOAD_ALIGN:
        raise ValueError(f"seal: got {payload.numel()} bytes, expected a payload as new_payload makes it")
    if len(fields) != 16:
        raise ValueError(f"seal: got {len(fields)} bytes of fields, expected 16")
    _write_header(payload, method, digest, numel, payload.numel(), 0, flags, fields)
    _write_header(payload, method, digest, numel, payload.numel(), _checksum(payload), flags, fields)
    return payload


def _read_header(payload: Tensor) -> Header:
    if payload.numel() < HEADER_NBYTES:
        raise PayloadError(f"truncated payload: got {payload.numel()} bytes, expected at least {HEADER_NBYTES}")
    magic, *rest = _HEADER.unpack(payload[:HEADER_NBYTES].numpy().tobytes())
    header = Header(*rest)
    if magic != b"gz":
        raise PayloadError(f"not a gradzip payload: it begins with {magic!r}, expected b'gz'")
    if header.version != VERSION:
        raise PayloadError(
            f"payload of wire format {header.version}, expected {VERSION}: install the same gradzip on every rank"
        )
    return header


def open_payload(payload: Tensor, *, method: int, digest: int, numel: int) -> Payload:
    """A payload (uint8), its header checked against what this rank would have written; PayloadError."""
    payload = _native.check(payload, torch.uint8, "payload")
    header = _read_header(payload)
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
    if header.checksum != _checksum(payload):
        raise PayloadError("corrupt payload: its checksum does not match its contents")
    return Payload(header.flags, header.fields, payload[HEADER_NBYTES:])


def split_payloads(buffer: Tensor, count: int) -> list[Tensor]:
    """The `count` payloads that lie one behind the other in a gathered buffer (uint8), as views; PayloadError."""
    buffer = _native.check(buffer, torch.uint8, "split_payloads: buffer")
    payloads = []
    begin = 0
    for index in range(count):
        nbytes = _read_header(buffer[begin:]).nbytes
        if nbytes < HEADER_NBYTES or nbytes % PAYLOAD_ALIGN or nbytes > buffer.numel() - begin:
            raise PayloadError(
                f"payload {index} of {count} claims {nbytes} bytes, but {buffer.numel() - begin} are left"
            )
        payloads.append(buffer[begin : begin + nbytes])
        begin += nbytes
    if begin != buffer.numel():
        raise PayloadError(f"got {buffer.numel()} bytes, expected {begin} in {count} payloads")
    return payloads
