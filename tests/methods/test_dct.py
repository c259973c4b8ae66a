"""DCTRange: its choice of a transform, its coded bitmap, and corrupt payloads.

tests/methods/test_transform_codec.py has what it shares with FFTRange.
"""

import math
import struct

import numpy as np
import pytest
import torch

from gradzip import DCTRange, FFTRange, LocalGroup, PayloadError, TopK, ops, roundtrip
from gradzip.engines.local import drive
from gradzip.memory.state import Key
from gradzip.methods.base.group import averaged
from reference import (
    as_tensor,
    bitmap,
    correlated,
    dct_basis,
    decode_bitmap,
    encode_bitmap,
    padded,
    read_dct_payload,
    resnet20_gradients,
    same_everywhere,
)
from single import decode

KEY = Key(0, 0, "", 0)


def norm(x) -> float:
    return float(torch.as_tensor(x).double().norm())


# --- the transform of a shape


SHAPES = {
    (64, 32, 3, 3): (3, 3),
    (64, 32, 5, 5): (5, 5),
    (16, 16, 7, 7): (7, 7),
    (16, 3, 11, 11): (11, 11),
    (64, 1, 3, 3): (3, 3),  # depthwise
    (64, 32, 1, 7): (7,),
    (64, 32, 7, 1): (7,),
    (64, 32, 2, 9): (2, 9),
    (64, 32, 3): (3,),
    (64, 32, 16): (16,),
    (8, 8, 3, 3, 3): (3, 3, 3),
    (8, 8, 1, 3, 3): (3, 3),
    (64, 64): (),
    (1, 5000): (),
    (64, 32, 1, 1): (),
    (64, 32, 1): (),
    (8, 8, 13, 13): (),  # kernels of more than 128 elements
    (8, 8, 17): (),
    (8, 8, 32): (),
    (4, 4, 1, 20): (),
    (2, 2, 2, 2, 2, 2, 2): (),
}


@pytest.mark.parametrize("block", [None, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transform_by_shape(shape, block):
    lengths = SHAPES[shape] or ((block,) if block else ())
    grad, codec = correlated(*shape), DCTRange(theta=0.5, bits=16, block=block)
    basis = dct_basis(grad.numel(), *lengths)
    coefficients = basis.coefficients(grad.numpy())
    payload = read_dct_payload(codec.encode(grad, KEY))
    assert payload.basis == basis and payload.k == round(grad.numel() / 2)
    mask = basis.largest(coefficients, payload.k)
    assert np.array_equal(payload.mask, mask)
    kept = np.where(mask, coefficients, 0)
    assert norm(payload.coefficients - kept) <= 2.0**-payload.format.mantissa * norm(kept)


def test_a_kernel_of_one_cosine_has_one_coefficient():
    """Of kernel c, coefficient (1, 2): plane 1 * 5 + 2 of its tile, which has 256 kernels of 25 elements."""
    positions = (2 * torch.arange(5) + 1) * (math.pi / 10)
    kernel = positions.cos()[:, None] * (2 * positions).cos()
    grad = torch.zeros(400, 1, 5, 5)
    grad[[3, 255, 256, 399], 0] = kernel * torch.tensor([1.0, -1.0, 2.0, 3.0])[:, None, None]
    payload = read_dct_payload(DCTRange(theta=1 - 4 / grad.numel(), bits=12).encode(grad, KEY))
    plane, second = 7, 256 * 25
    expected = [256 * plane + 3, 256 * plane + 255, second + 144 * plane, second + 144 * plane + 143]
    assert np.flatnonzero(payload.mask).tolist() == expected
    assert payload.coefficients[expected] == pytest.approx([2.5, -2.5, 5.0, 7.5], rel=1e-3)
    approximation, nbytes = roundtrip(DCTRange(theta=1 - 4 / grad.numel(), bits=12), grad)
    assert (approximation - grad).abs().max() < 5e-3
    assert nbytes == 144  # header; 4 codes; 2 bytes for each of 40 segments, and 1 to 2 for the 4 that are not empty


def test_shapes_reach_the_codec_in_every_layout():
    """Kernels are those of the shape, whatever the strides."""
    grad = correlated(32, 24, 3, 3)
    expected, nbytes = roundtrip(DCTRange(), grad)
    strided = torch.empty(32, 24, 3, 6)[..., ::2].copy_(grad)
    for same in (
        grad.to(memory_format=torch.channels_last),
        strided,
        grad.permute(1, 0, 3, 2).contiguous().permute(1, 0, 3, 2),
    ):
        got, other_nbytes = roundtrip(DCTRange(), same)
        assert torch.equal(got, expected) and other_nbytes == nbytes


@pytest.mark.parametrize("size", [2, 3, 5, 9])
def test_partitions_are_transformed_by_their_own_shape(size):
    """Partitions of whole kernels, and flat pieces where there are fewer rows than ranks, which cut kernels."""
    for shape in ((9, 8, 3, 3), (4, 33, 3, 3)):
        grads = [correlated(*shape, seed=r) for r in range(size)]
        codec = DCTRange(theta=0.0, bits=16, min_numel=0, exchange="scatter_reduce")
        averages = LocalGroup(codec, size).average(grads, "w")
        assert all(torch.equal(a, averages[0]) for a in averages)
        mean = torch.stack(grads).double().mean(0)
        assert 1e-6 < norm(averages[0] - mean) / norm(mean) < 1e-3
    sent = read_dct_payload(DCTRange(min_numel=0).encode(torch.randn(100), KEY))
    assert sent.basis.blocks.length == 1


# --- bytes, and error for bytes


@pytest.mark.parametrize("theta", [0.0, 0.3, 0.5, 0.85, 0.99])
@pytest.mark.parametrize("shape", [(32, 32), (33, 63), (13, 7, 3, 5), (150, 20, 3, 3), (20, 7, 11, 11), (1, 70001)])
def test_bitmap_is_coded_in_segments_of_a_plane(shape, theta):
    """The bytes are exactly those of the reference, with segments of whole words that a plane of a tile has."""
    codec, grad = DCTRange(theta=theta), correlated(*shape)
    sent = codec.encode(grad, KEY)
    payload = read_dct_payload(sent)
    assert payload.index == encode_bitmap(payload.mask, payload.basis.segment)
    nbytes = 48 + -(-payload.k * 6 // 8) + len(payload.index)
    assert sent.numel() == padded(nbytes)
    assert len(payload.index) <= -(-grad.numel() // 8) + 2 * -(-grad.numel() // payload.basis.segment)


def test_same_density_costs_the_documented_bytes():
    """0.63 n / 8 at theta = 0.85: 0.61 is the entropy, 0.016 the table of segments."""
    grad = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1))
    payload = read_dct_payload(DCTRange().encode(grad, KEY))
    assert 0.625 < len(payload.index) / (grad.numel() / 8) < 0.635


def test_index_of_real_gradients_is_smaller():
    """The first coefficients of kernels are kept more often. The plain bitmap has n / 8 bytes."""
    coded = plain = same_density = 0
    for grad in resnet20_gradients().values():
        payload = read_dct_payload(DCTRange().encode(grad, KEY))
        assert len(payload.index) < grad.numel() / 8
        coded, plain = coded + len(payload.index), plain + grad.numel() / 8
        shuffled = np.random.default_rng(0).permutation(payload.mask)
        same_density += len(encode_bitmap(shuffled, payload.basis.segment))
    assert coded < 0.8 * plain and coded < 0.995 * same_density


def error_and_bytes(codec) -> tuple[float, int]:
    squares = nbytes = 0
    for grad in resnet20_gradients().values():
        approximation, sent = roundtrip(codec, grad)
        squares += norm(grad - approximation) ** 2
        nbytes += sent
    return math.sqrt(squares), nbytes


# The bounds have half the margin that is measured: 0.57, 0.78 and 0.92 of the error.
@pytest.mark.parametrize("theta, equal, most", [(0.7, 0.6, 0.78), (0.85, 0.82, 0.89), (0.95, 0.946, 0.96)])
def test_error_is_less_than_that_of_fft_at_equal_bytes(theta, equal, most):
    """On real gradients; frequencies of 4096 elements, as in the paper's evaluation."""
    fft_error, fft_nbytes = error_and_bytes(FFTRange(theta=theta, block=4096))
    error, nbytes = error_and_bytes(DCTRange(theta=equal))
    assert 0.95 * fft_nbytes < nbytes <= fft_nbytes
    assert error < most * fft_error


# --- ranks


def conv_payloads(count: int, codec: DCTRange) -> list[torch.Tensor]:
    return [codec.encode(correlated(16, 28, 3, 3, seed=seed), KEY) for seed in range(count)]


def resealed(codec, payload: torch.Tensor, numel: int, fields: bytes) -> torch.Tensor:
    """With a valid checksum, as a malicious peer would send it. fields: all 16 bytes."""
    return codec.seal(ops.Seal(payload.clone(), numel, fields))


def fields_of(payload: torch.Tensor) -> bytes:
    return payload.numpy()[32:48].tobytes()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_another_transform_on_one_rank_is_refused(rank):
    """Its payload is valid by itself: the gradient has another shape there."""
    codec, numel = DCTRange(), 4032
    payloads = conv_payloads(3, codec)
    payloads[rank] = codec.encode(correlated(63, 64), KEY)
    assert decode(codec, [payloads[rank]], (numel,)).isfinite().all()
    with pytest.raises(
        PayloadError, match=f"from rank {max(rank, 1)} of 3: corrupt payload: it claims .*, those before it"
    ):
        decode(codec, payloads, (numel,))


def test_a_rank_of_another_shape_is_named_in_a_step():
    grads = [correlated(16, 28, 3, 3), correlated(63, 64)]
    with pytest.raises(PayloadError, match="DCTRange, parameter 'conv': from rank 1 of 2: .*it claims"):
        drive([averaged(DCTRange(), grad, "conv", rank, 2) for rank, grad in enumerate(grads)])


def test_non_finite_payloads_agree_with_any_transform():
    codec = DCTRange()
    payloads = conv_payloads(2, codec)
    non_finite = codec.encode(torch.full((63, 64), math.nan), KEY)
    for order in ([non_finite, *payloads], [*payloads, non_finite], [non_finite]):
        assert decode(codec, order, (4032,)).isnan().all()


# --- corrupt payloads


def changed(payload: torch.Tensor, fields: dict, body: bytes | None = None) -> torch.Tensor:
    """A payload with other values of some fields, or with another body, and a valid checksum."""
    names = ("k", "height", "width", "depth", "padding", "pbase", "positive", "mantissa", "bits")
    values = dict(zip(names, struct.unpack("<I3BBIHBB", fields_of(payload))))
    own = struct.pack("<I3BBIHBB", *(values | fields).values())
    if body is not None:
        data = payload.numpy()[:48].tobytes() + body + bytes(-len(body) % 16)
        payload = as_tensor(data)
    return resealed(DCTRange(), payload, 4032, own)


CLAIMS = [
    *(({"k": k}, "it claims .* of 4032 coefficients|do not hold|not a bitmap") for k in (0, 1, 604, 606, 4032, 4033)),
    *(({"k": k}, "it claims .* of 4032 coefficients") for k in (2**31, 2**32 - 1)),
    *(({"height": n}, "it claims kernels of .*, which no transform is for") for n in (16, 63, 127, 255)),
    *(({"depth": n}, "it claims kernels of .*, which no transform is for") for n in (15, 16, 255)),
    *(({"padding": n}, "do not hold 605 coefficients") for n in (16, 100, 255)),
    *(({"bits": n}, "it claims .* bits|range float") for n in (0, 5, 7, 10, 255)),
    *(({"mantissa": n}, "mantissa|range float|format") for n in (0, 7, 255)),
    *(({"pbase": n}, "range float|format|corrupt") for n in (0, 2**32 - 1)),
    ({"positive": 2000}, "range float|format|corrupt"),
]


@pytest.mark.parametrize("fields, message", CLAIMS, ids=[str(fields) for fields, _ in CLAIMS])
def test_corrupt_fields_are_refused(fields, message):
    (payload,) = conv_payloads(1, DCTRange())
    assert torch.equal(changed(payload, {}), payload) and read_dct_payload(payload).k == 605
    with pytest.raises(PayloadError, match=f"from rank 1 of 2: corrupt .*({message})"):
        decode(DCTRange(), [payload, changed(payload, fields)], (4032,))


@pytest.mark.parametrize("change", range(-15, 16))
def test_another_padding_is_refused_or_decodes_alike(change):
    """What is left for the bitmap must be all of it."""
    (payload,) = conv_payloads(1, DCTRange())
    padding = fields_of(payload)[7]
    if change and 0 <= padding + change <= 255:
        with pytest.raises(PayloadError):
            decode(DCTRange(), [changed(payload, {"padding": padding + change})], (4032,))


def test_corrupt_bitmaps_are_refused():
    """Of another count, another size, and without an end."""
    (payload,) = conv_payloads(1, DCTRange())
    parsed = read_dct_payload(payload)
    body = payload.numpy()[48:].tobytes()
    codes = body[: -(-605 * 6 // 8)]

    def with_index(index: bytes) -> torch.Tensor:
        return changed(payload, {"padding": -(len(codes) + len(index)) % 16}, codes + index)

    assert torch.equal(with_index(parsed.index), payload)
    fewer, more = parsed.mask.copy(), parsed.mask.copy()
    fewer[np.flatnonzero(parsed.mask)[7]] = False
    more[np.flatnonzero(~parsed.mask)[7]] = True
    segment = parsed.basis.segment
    longer = np.concatenate([parsed.mask, np.zeros(segment, bool)])
    wrong = [encode_bitmap(mask, segment) for mask in (fewer, more, longer)]
    wrong += [parsed.index[:-1], parsed.index[:1], b"", parsed.index + b"\0", parsed.index + bytes(40)]
    wrong += [b"\xff" * len(parsed.index), bytes(len(parsed.index)), bitmap(parsed.mask).tobytes()]
    for index in wrong:
        with pytest.raises(PayloadError, match="corrupt bitmap: got .* bytes that are not a bitmap of 4032 elements"):
            decode(DCTRange(), [with_index(index)], (4032,))
    # Another bitmap with as many bits set is another gradient.
    moved = fewer.copy()
    moved[np.flatnonzero(~parsed.mask)[7]] = True
    assert decode_bitmap(encode_bitmap(moved, segment), 4032, segment) is not None
    got = decode(DCTRange(), [with_index(encode_bitmap(moved, segment))], (4032,))
    assert not torch.equal(got, decode(DCTRange(), [payload], (4032,)))


def test_a_payload_may_claim_any_transform():
    """Also one with elements after its last row, which no gradient of kernels has."""
    (payload,) = conv_payloads(1, DCTRange())
    for lengths in ((5, 5), (7, 3, 2), (11, 11), (256,), ()):
        axes = dict(zip(("height", "width", "depth"), [*(n - 1 for n in lengths), 0, 0, 0]))
        basis = dct_basis(4032, *lengths)
        mask = np.arange(4032) % 7 == 0
        mask[np.flatnonzero(~mask)[: 605 - mask.sum()]] = True
        index = encode_bitmap(mask, basis.segment)
        codes = payload.numpy()[48:].tobytes()[: -(-605 * 6 // 8)]
        padding = -(len(codes) + len(index)) % 16
        forged = changed(payload, axes | {"padding": padding}, codes + index)
        decoded = same_everywhere(lambda forged=forged: decode(DCTRange(), [forged], (4032,)).clone())
        expected = read_dct_payload(forged).elements
        assert norm(decoded.double() - torch.from_numpy(expected)) <= 1e-5 * norm(expected)


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128, 256])
def test_rows_of_gradients_without_kernels(block):
    """`block` is for gradients with structure along their rows."""
    t = torch.arange(40 * 256) % block
    grad = torch.cos((2 * t + 1) * (3 * math.pi / (2 * block))).view(40, 256)
    payload = read_dct_payload(DCTRange(theta=1 - 1 / block, block=block, bits=12).encode(grad, KEY))
    assert payload.basis.blocks.length == block and payload.k == 40 * 256 // block
    assert payload.coefficients[payload.mask] == pytest.approx(math.sqrt(block / 2), rel=1e-3)


def test_matrices_are_as_in_topk():
    """Without a transform, the elements kept are the largest."""
    grad = correlated(70, 90)
    kept, _ = roundtrip(TopK(theta=0.85), grad)
    coded, _ = roundtrip(DCTRange(theta=0.85), grad)
    assert torch.equal(coded != 0, kept != 0)


@pytest.mark.parametrize("block", [1, 2, 4, 7, 24, 512, 1024, 64.0, "64", True])
def test_invalid_block(block):
    with pytest.raises(ValueError, match=r"DCTRange: got block = .*, expected None or one of \(8, 16, .*256\)"):
        DCTRange(block=block)
