import dataclasses
import functools
import itertools
import math
import struct

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import gradzip
from gradzip import FFTRange, PayloadError, ops
from gradzip.memory.state import Key
from reference import LARGE, as_tensor, checksum, examples, read_fft_payload, same_everywhere

NUMEL = 1500


def seal(payload: torch.Tensor, method: int = 3, numel: int = 77, **what) -> torch.Tensor:
    """Seal one payload, with the fields 0 to 15 unless others are given."""
    what = {"fields": bytes(range(16)), **what}
    return ops.seal_payloads([ops.Seal(payload, numel, **what)], method=method, digest=0xDEADBEEF)[0]


def sealed(section: bytes, **header) -> torch.Tensor:
    payload = ops.new_payload(len(section))
    payload[ops.HEADER_NBYTES : ops.HEADER_NBYTES + len(section)] = as_tensor(section)
    return seal(payload, **header)


EXPECTED = {"method": 3, "digest": 0xDEADBEEF, "numel": 77}


def resealed(data: bytes) -> bytes:
    """Recompute the checksum of modified bytes, as a malicious peer would."""
    return data[:24] + struct.pack("<I", checksum(data)) + data[28:]


@functools.cache
def fft_codec() -> FFTRange:
    return FFTRange(theta=0.8, bits=10)


@functools.cache
def fft_payload() -> bytes:
    """A payload of FFTRange."""
    grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    return fft_codec().encode(grad, Key(0, 0, "weight", 0)).numpy().tobytes()


def decode(data: bytes, codec: FFTRange | None = None, numel: int = NUMEL) -> torch.Tensor:
    (average,) = (codec or fft_codec()).decode([as_tensor(data)], [(numel,)])
    return average.clone()


# --- header


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, 1000])
def test_seal_and_open(nbytes):
    section = bytes(np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8))
    payload = sealed(section, flags=5)
    assert payload.numel() % ops.PAYLOAD_ALIGN == 0 and payload.numel() - 48 - nbytes < 16
    opened = ops.open_payload(payload, **EXPECTED)
    assert (opened.flags, opened.fields) == (5, bytes(range(16)))
    assert opened.body.numpy().tobytes() == section + bytes(payload.numel() - 48 - nbytes)  # padded with zeros
    payload[-1] ^= 1
    assert opened.body.numel() == 0 or opened.body[-1] == payload[-1]  # the same memory


def test_layout():
    """Every field at its offset in csrc/common/payload.h."""
    data = sealed(b"abc", numel=2**40 + 1).numpy().tobytes()
    expected = (b"gz", 2, 3, 0xDEADBEEF, 2**40 + 1, 64)
    assert struct.unpack_from("<2sBBIQQ", data) == expected
    assert struct.unpack_from("<II", data, 24) == (checksum(data), 0)
    assert data[32:48] == bytes(range(16)) and data[48:] == b"abc" + bytes(13)


@pytest.mark.parametrize("nbytes", [48, 64, 8 * 32768 - 16, 8 * 32768, 8 * 32768 + 16, 8 * 65536 + 48, LARGE * 16])
def test_checksum_equals_numpy(nbytes):
    section = np.random.default_rng(nbytes).integers(0, 256, nbytes - 48, dtype=np.uint8)

    def made():
        payload = ops.new_payload(section.size)
        payload[48:] = torch.from_numpy(section)
        return seal(payload)

    payload = same_everywhere(made) if nbytes < 10**6 else made()
    data = payload.numpy().tobytes()
    assert struct.unpack_from("<I", data, 24) == (checksum(data),)
    same_everywhere(lambda: ops.open_payload(payload, **EXPECTED).flags)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"method": 4}, "payload of method number 3, expected 4"),
        ({"digest": 1}, "another configuration .digest deadbeef, expected 00000001"),
        ({"numel": 78}, "payload of a tensor of 77 elements, expected 78"),
    ],
)
def test_a_payload_of_another_codec(change, message):
    with pytest.raises(PayloadError, match=message):
        ops.open_payload(sealed(b"abc"), **{**EXPECTED, **change})


def test_another_version_and_magic():
    data = bytearray(sealed(b"abc").numpy().tobytes())
    with pytest.raises(PayloadError, match="payload of wire format 3, expected 2"):
        ops.open_payload(as_tensor(resealed(bytes(data[:2] + b"\x03" + data[3:]))), **EXPECTED)
    with pytest.raises(PayloadError, match="not a gradzip payload: it begins with b'PK', expected b'gz'"):
        ops.open_payload(as_tensor(resealed(b"PK" + bytes(data[2:]))), **EXPECTED)


@pytest.mark.parametrize("payload", [None, b"gz", torch.zeros(64), torch.zeros(64, dtype=torch.int8)])
def test_not_a_buffer(payload):
    with pytest.raises(ValueError, match="payload: got .*, expected"):
        ops.open_payload(payload, **EXPECTED)
    with pytest.raises(ValueError, match="got .*, expected"):
        ops.split_payloads(payload, 1)


def test_sizes_that_are_not_multiples_of_16():
    """The checksum would not cover bytes past the last whole word."""
    with pytest.raises(ValueError, match="got 50.*expected"):
        seal(torch.zeros(50, dtype=torch.uint8))
    data = bytearray(sealed(b"abc").numpy().tobytes() + b"xyz")
    data[16:24] = struct.pack("<Q", len(data))
    data[24:28] = struct.pack("<I", checksum(bytes(data[:64])))
    with pytest.raises(PayloadError):
        ops.open_payload(as_tensor(bytes(data)), **EXPECTED)


@pytest.mark.parametrize("fields", [b"", bytes(15), bytes(17)])
def test_fields_of_another_length(fields):
    with pytest.raises(ValueError, match=f"got {len(fields)}.*expected 16"):
        seal(ops.new_payload(0), fields=fields)


# --- sections of a length that is not known beforehand


@pytest.mark.parametrize("nbytes", [0, 1, 17, 29, 30])
def test_seal_with_a_stream(nbytes):
    """What the payload has room for and does not need is cut off."""
    section = bytes(range(100, 170))
    payload = ops.new_payload(len(section))
    payload[48 : 48 + len(section)] = as_tensor(section)
    stream = ops.Stream(40, nbytes, padding_at=7)
    fitted = seal(payload, stream=stream)
    padding = -(40 + nbytes) % 16
    opened = ops.open_payload(fitted, **EXPECTED)
    assert opened.body.numpy().tobytes() == section[: 40 + nbytes] + bytes(padding)
    assert opened.fields == bytes([*range(7), padding, *range(8, 16)]) and opened.flags == 0


@pytest.mark.parametrize("nbytes", [-1, 41, 2**40])
def test_streams_that_do_not_fit(nbytes):
    with pytest.raises(ValueError, match=f"got a stream of {nbytes} bytes, expected 0 to 40"):
        seal(ops.new_payload(80), stream=ops.Stream(40, nbytes))


def test_seal_with_a_scale():
    payload = seal(ops.new_payload(0), scale=torch.tensor([0.3]))
    assert ops.open_payload(payload, **EXPECTED).fields == struct.pack("<f", 0.3) + bytes(range(4, 16))


def test_slack_is_no_part_of_the_body():
    section = bytes(range(40))
    assert ops.open_payload(sealed(section, flags=5 | 1 << 8), **EXPECTED).body.numpy().tobytes() == section[:32]
    assert ops.open_payload(sealed(section, flags=5 | 3 << 8), **EXPECTED).body.numel() == 0
    assert ops.open_payload(sealed(section, flags=5 | 3 << 8), **EXPECTED).flags == 5
    for slack in (4, 2**24 - 1):
        with pytest.raises(PayloadError, match=f"claims {16 * slack} unused bytes of 96"):
            ops.open_payload(sealed(section, flags=slack << 8), **EXPECTED)


# --- split


@examples
@given(st.lists(st.binary(max_size=70), max_size=6))
def test_split_inverts_concatenation(sections):
    payloads = [sealed(section, method=i) for i, section in enumerate(sections)]
    joined = torch.cat(payloads) if payloads else as_tensor(b"")
    parts = ops.split_payloads(joined, len(payloads))
    assert len(parts) == len(payloads) and all(map(torch.equal, parts, payloads))
    for part in parts:
        assert (part.data_ptr() - joined.data_ptr()) % 16 == 0
    for wrong in {len(payloads) + 1, len(payloads) - 1} - {-1}:
        with pytest.raises(PayloadError):
            ops.split_payloads(joined, wrong)


@pytest.mark.parametrize("claimed", [0, 1, 16, 47, 48 + 8, 65, 80, 2**31, 2**32 + 64, 2**63, 2**64 - 16, 2**64 - 64])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_split_with_hostile_lengths(claimed, which):
    payloads = [bytearray(sealed(b"abc").numpy().tobytes()) for _ in range(3)]
    payloads[which][16:24] = struct.pack("<Q", claimed)
    with pytest.raises(PayloadError):
        ops.split_payloads(as_tensor(b"".join(map(bytes, payloads))), 3)


def test_split_of_truncated_and_extended_buffers():
    joined = torch.cat([sealed(b"abc"), sealed(b"defg")])
    for data in (joined[:-16], joined[:-1], joined[:64], joined[:-64], joined[16:], joined[:0]):
        with pytest.raises(PayloadError):
            ops.split_payloads(data, 2)
    with pytest.raises(PayloadError, match="got 144 bytes, expected 128 in 2 payloads"):
        ops.split_payloads(torch.cat([joined, joined.new_zeros(16)]), 2)


@examples
@given(data=st.binary(max_size=300), count=st.integers(0, 5))
def test_split_of_any_bytes(data, count):
    try:
        parts = ops.split_payloads(as_tensor(data), count)
    except PayloadError:
        return
    assert b"".join(part.numpy().tobytes() for part in parts) == data


# --- a real payload


def test_a_real_payload_decodes():
    grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    expected, nbytes = gradzip.roundtrip(fft_codec(), grad.view(30, 50))
    assert torch.equal(decode(fft_payload()), expected.view(-1)) and nbytes == len(fft_payload())


def test_every_flipped_bit_is_detected():
    data = fft_payload()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError):
            ops.open_payload(as_tensor(changed), method=FFTRange.number, digest=fft_codec().digest, numel=NUMEL)


def test_a_wrong_payload_names_the_rank():
    payloads = [as_tensor(fft_payload()) for _ in range(3)]
    payloads[1][100] ^= 4
    with pytest.raises(PayloadError, match="from rank 1 of 3: corrupt payload: its checksum does not match"):
        fft_codec().decode(payloads, [(NUMEL,)])


@pytest.mark.parametrize("change", [-1, -16, -48, 1, 16])
def test_truncated_and_extended(change):
    data = fft_payload()[:change] if change < 0 else fft_payload() + bytes(change)
    with pytest.raises(PayloadError, match=f"truncated payload: got {len(data)} bytes, expected {len(fft_payload())}"):
        decode(data)
    # A consistent size in the header does not make it valid.
    data = data[:16] + struct.pack("<Q", len(data)) + data[24:]
    with pytest.raises(PayloadError):
        decode(data)
    if change % 16 == 0:
        with pytest.raises(PayloadError, match="corrupt (payload|bitmap): .* bytes"):
            decode(resealed(data))


@pytest.mark.parametrize("nbytes", [0, 1, 16, 47])
def test_less_than_a_header(nbytes):
    with pytest.raises(PayloadError, match=f"truncated payload: got {nbytes} bytes, expected at least 48"):
        decode(fft_payload()[:nbytes])


@pytest.mark.parametrize("numel", [1, NUMEL - 1, NUMEL + 1, 2 * NUMEL])
def test_a_tensor_of_another_size(numel):
    with pytest.raises(PayloadError, match=f"payload of a tensor of {NUMEL} elements, expected {numel}"):
        decode(fft_payload(), numel=numel)


@pytest.mark.parametrize(
    "change",
    [
        {"theta": 0.81},
        {"theta": gradzip.StepSchedule({0: 0.8})},
        {"bits": 11},
        {"mantissa": 5},
        {"value_range": 1.0},
        {"block": None},
        {"block": 1000},
        {"rounding": "stochastic"},
        {"seed": 1},
        {"min_numel": 0},
    ],
    ids=str,
)
def test_another_configuration(change):
    """Ranks configured differently fail at the first step."""
    with pytest.raises(PayloadError, match="made with another configuration"):
        decode(fft_payload(), dataclasses.replace(fft_codec(), **change))


def test_ranks_configured_differently_get_an_error():
    group = gradzip.LocalGroup(FFTRange(), 2)
    group.compressors[1] = FFTRange(bits=8)
    with pytest.raises(PayloadError, match="FFTRange, parameter 'conv1.weight': from rank [01] of 2: .*configuration"):
        group.average([torch.ones(64, 64)] * 2, "conv1.weight")


@examples
@given(st.data())
def test_mutated_payloads_are_refused_or_decode_alike(data):
    original = fft_payload()
    changed = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        what = data.draw(st.sampled_from(["set", "insert", "delete", "swap"]))
        if what == "set":
            changed[at] = data.draw(st.integers(0, 255))
        elif what == "insert":
            changed[at:at] = data.draw(st.binary(max_size=20))
        elif what == "delete":
            del changed[at : at + data.draw(st.integers(1, 20))]
        else:
            changed[at : at + 16] = changed[at : at + 16][::-1]
        if not changed:
            break
    try:
        result = decode(bytes(changed))
    except PayloadError:
        return
    assert torch.equal(result, decode(original))


def forged(data: bytes, at: int, value: bytes) -> bytes:
    return resealed(data[:at] + value + data[at + len(value) :])


@pytest.mark.parametrize("length", [2, 3, 64, 256])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_forged_transforms(axis, length):
    """FFTRange has one transform for any shape: its payloads name no lengths."""
    with pytest.raises(PayloadError, match=r"it claims kernels of \(.*, which no transform is for"):
        decode(forged(fft_payload(), 36 + axis, bytes([length - 1])))


@examples
@given(st.data())
def test_forged_payloads_are_refused_or_decode_to_numbers(data):
    """Any bytes with a valid checksum: they may change the average, and nothing else."""
    changed = bytearray(fft_payload())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(28, len(changed) - 1) | st.integers(32, 60))
        changed[at] = data.draw(st.integers(0, 255))
    try:
        result = decode(resealed(bytes(changed)))
    except PayloadError:
        return
    assert result.shape == (NUMEL,) and result.dtype == torch.float32
    if not struct.unpack_from("<I", changed, 28)[0] & ops.NON_FINITE:
        opened = read_fft_payload(as_tensor(bytes(changed)), fft_codec().block)
        if np.abs(opened.format.codebook).max() < 1e30:
            assert result.isfinite().all()


def test_several_payloads_are_sealed_as_each_alone():
    own = {"method": 1, "digest": FFTRange().digest}
    sections = [0, 5, 16, 100_000, 1]

    def seals(payloads):
        numbers = [None, torch.tensor([1.0, math.inf]), torch.tensor([2.0]), None, torch.tensor([math.nan])]
        return [
            ops.Seal(p, i, magnitudes=m, scale=m[:1] if m is not None else None)
            for i, (p, m) in enumerate(zip(payloads, numbers))
        ]

    together = ops.new_payloads(sections, gaps=True)
    alone = [ops.new_payload(nbytes) for nbytes in sections]
    sealed = ops.seal_payloads(seals(together), **own)
    assert [p.data_ptr() for p in sealed] == [p.data_ptr() for p in together]  # in place
    longest = max(map(torch.Tensor.numel, together))
    assert all(b.data_ptr() - a.data_ptr() == longest for a, b in itertools.pairwise(together))
    for i, (one, got) in enumerate(zip(seals(alone), sealed)):
        one.payload[ops.HEADER_NBYTES :][: sections[i]] = 0
        assert torch.equal(ops.seal_payloads([one], **own)[0], got)
        opened = ops.open_payload(got, **own, numel=i)
        assert opened.flags == (ops.NON_FINITE if i in (1, 4) else 0)
    assert ops.seal_payloads([], **own) == []
    with pytest.raises(ValueError, match="got a tensor on meta"):
        ops.seal_payloads([*seals(alone)[:1], seals(alone)[1]._replace(payload=alone[1].to("meta"))], **own)


@pytest.mark.parametrize("options", [{}, {"gaps": True}, {"streams": True}])
def test_what_follows_the_sections_of_payloads_is_zero(options, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *shape, **of_empty: torch.full(shape, 255, **of_empty))
    sections = [34, 5, 33, 48, 16, 0]
    payloads = ops.new_payloads(sections, **options)
    rows = payloads[0].as_strided((len(sections), 96), (96, 1))  # all of their memory
    for nbytes, payload, row in zip(sections, payloads, rows, strict=True):
        end = ops.HEADER_NBYTES + nbytes
        assert payload.data_ptr() == row.data_ptr() and payload.numel() == -(-end // 16) * 16
        assert not row[0 if "gaps" in options else payload.numel() if "streams" in options else end :].any()


# --- verified on the device


def opened(payload, table=None):
    """The opened payload, or the message of the error."""
    try:
        return ops.open_payloads([payload], [77], table, method=3, digest=0xDEADBEEF)[0]
    except PayloadError as error:
        return str(error)


def is_expected(payload, fields=None, known=0xFFFF):
    """What `verify_payloads` is to say of a payload."""
    found = opened(payload)
    if isinstance(found, str) or found.flags & ops.NON_FINITE:
        return False
    return fields is None or all(a == b for i, (a, b) in enumerate(zip(found.fields, fields)) if known >> i & 1)


def check_verified(payloads, fields=None, known=0xFFFF):
    """Compare the numbers and tables with what `open_payloads` says of each payload. Return the numbers."""
    of_all = None if fields is None else [fields] * len(payloads)
    group = ops.ExpectedPayloads(payloads, [77] * len(payloads), 3, 0xDEADBEEF, of_all, known)
    ((table, numbers),) = ops.verify_payloads([group])
    assert numbers.dtype == torch.float32
    assert [str(number) for number in numbers.tolist()] == [
        "0.0" if is_expected(payload, fields, known) else "nan" for payload in payloads
    ]
    assert torch.equal(table, ops.payload._table(payloads, 1))
    for payload, row in zip(payloads, table.split_with_sizes([64] * len(payloads))):
        expected, got = opened(payload), opened(payload, row)
        assert got == expected if isinstance(expected, str) else got[:2] == expected[:2]
    return numbers


def test_every_bit_of_a_payload_is_verified():
    payload = sealed(bytes(range(40)))
    changed = []
    for at, bit in itertools.product(range(payload.numel()), range(8)):
        data = payload.clone()
        data[at] ^= 1 << bit
        changed.append(data)
    assert not check_verified([payload]).any()
    assert check_verified(changed).isnan().all()


@pytest.mark.parametrize("at", range(48))
def test_headers_that_lie_with_the_right_checksum(at):
    payload = sealed(bytes(range(240)))
    changed = []
    for bit in range(8):
        data = bytearray(payload.numpy().tobytes())
        data[at] ^= 1 << bit
        whole = int.from_bytes(data[16:24], "little") == len(data)
        changed.append(as_tensor(resealed(bytes(data)) if whole else bytes(data)))
    numbers = check_verified(changed)
    if at < 28 and at not in range(24, 28):
        assert numbers.isnan().all()
    check_verified(changed, fields=bytes(range(16)))
    check_verified(changed, fields=bytes(range(16)), known=0xAAAA)
    check_verified(changed, fields=bytes(range(16)), known=0)


@pytest.mark.parametrize("nbytes", [0, 1, 16, 47, 48, 63, 64, 79, 96, 97, 112, 1000])
def test_payloads_of_other_lengths_are_not_verified(nbytes):
    payload = sealed(bytes(range(40)))
    cut = torch.cat([payload, torch.zeros(1000, dtype=torch.uint8)])[:nbytes]
    for offset in range(3):
        check_verified([torch.cat([torch.ones(offset, dtype=torch.uint8), cut])[offset:]])


@pytest.mark.parametrize("slack", [0, 1, 5, 6, 15, 16, 17, 2**24 - 1])
def test_slack_is_verified(slack):
    data = bytearray(sealed(bytes(range(240))).numpy().tobytes())
    data[29:32] = slack.to_bytes(3, "little")
    numbers = check_verified([as_tensor(resealed(bytes(data)))])
    assert bool(numbers.isnan()) == (48 + 16 * slack > len(data))


def test_verified_payloads_of_finite_gradients():
    finite, infinite, nan = (
        seal(ops.new_payload(64), magnitudes=torch.tensor([1.0, number])) for number in (2.0, math.inf, math.nan)
    )
    numbers = check_verified([finite, infinite, finite, nan, seal(ops.new_payload(5), flags=6)])
    assert numbers.isnan().tolist() == [False, True, False, True, False]


def test_several_lists_are_verified_as_each_alone():
    rng = np.random.default_rng(0)
    listed = []
    for method, count in enumerate((3, 0, 100, 1, 70)):
        numels = rng.integers(0, 2**40, count).tolist()
        payloads = [
            seal(ops.new_payload(int(n)), method, numel) for n, numel in zip(rng.integers(0, 3000, count), numels)
        ]
        for payload in payloads[::3]:
            payload[int(rng.integers(payload.numel()))] ^= 4
        fields = [bytes(range(16))] * count if method % 2 else None
        listed.append(ops.ExpectedPayloads(payloads, numels, method, 0xDEADBEEF, fields, 0x00FF))
    together = same_everywhere(lambda: [part for pair in ops.verify_payloads(listed) for part in pair])
    alone = [part for group in listed for part in ops.verify_payloads([group])[0]]
    for got, expected in zip(together, alone, strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    for group, table, numbers in zip(listed, together[::2], together[1::2]):
        assert numbers.isnan().tolist() == [i % 3 == 0 for i in range(len(group.payloads))]
        if group.payloads:
            with pytest.raises(PayloadError) as caught:
                ops.open_payloads(group.payloads, group.numels, table, method=group.method, digest=group.digest)
            assert caught.value.index == 0
    assert ops.verify_payloads([]) == []
