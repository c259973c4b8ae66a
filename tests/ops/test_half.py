"""Primitives of 16-bit floats: the bits of those of float32 numbers, and results that torch rounds."""

import pytest
import torch

from gradzip import ops
from gradzip.ops import groups
from reference import same_everywhere

HALF = [torch.float16, torch.bfloat16]
N = 70001


def every(dtype):
    """All numbers of a 16-bit type: infinities, NaNs and subnormal numbers, too."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def finite(dtype):
    """Finite numbers of an odd count, whose memory is not aligned."""
    x = every(dtype)
    return x[x.isfinite()][1:]


def same(got, expected):
    return torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", HALF)
def test_readers_see_the_float32_numbers(dtype):
    for x in (every(dtype), finite(dtype), finite(dtype)[:0]):
        wide, residual = x.float(), torch.linspace(-3, 3, x.numel())

        def of(x, residual=residual):
            error = torch.empty(x.numel())
            yield torch.nan_to_num(ops.abs_max_tensor(x), 7.0)  # NaN has other bits
            yield ops.natural_encode(x[x.isfinite()], 5)[0]  # others have any code
            yield torch.nan_to_num(ops.abs_max_columns([x.view(-1, 1)])[0], 7.0)
            yield ops.ternary_packed(x, 20.0, 15.0, 5)
            yield ops.pack_signs(x, 5)
            packed = torch.empty(ops.bitmap_nbytes(x.numel()), dtype=torch.uint8)
            yield torch.nan_to_num(ops.pack_signs_all([(x, 5, packed)])[0], 7.0)
            yield packed
            for k, chunk in ((7, 96), (61, 4096), (4096, 4096)):
                yield ops.chunk_topk(x, k, chunk)[1]
                yield ops.chunk_topk(x[x.isfinite()], k, chunk)[0]  # which NaN is the largest depends on its bits
            for bits, key in ((8, 3), (4, None), (2, None)):
                yield ops.block_float_encode(x, bits, 32, key, residual=residual, error=error)
                yield error.clone()
                yield ops.block_float_encode(x, bits, 4096, key)
            for bits, bucket in ((4, 512), (8, 7), (12, 1 << 17)):
                for norm in ("l2", "max"):
                    yield from ops.quantize_packed(x, bits, bucket, norm, 3)
            for norm in ("l2", "max", "l1"):
                yield ops.bucket_norms(x, 1000, norm)
                yield ops.bucket_norms(x, None, norm)

        got = same_everywhere(lambda x=x: tuple(of(x)))
        assert all(map(same, got, of(wide)))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("numel", [9000, 63487, 300001])
def test_coefficients_are_those_of_the_float32_numbers(numel, dtype):
    """Of tiles and, of many elements, of a sample first; at odd addresses."""
    x = torch.randn(numel + 1, generator=torch.Generator().manual_seed(numel)).to(dtype)[1:]
    for transform in (
        ops.Transform.dct(),
        ops.Transform.dct(3, 3),
        ops.Transform.fourier(64),
        ops.Transform.fourier(8),
    ):
        k = transform.groups(numel) // 9
        scratch = torch.empty(ops.transform_scratch_numel(numel, transform, k, x.device))

        def select(x, transform=transform, k=k, scratch=scratch):
            return ops.transform_select(x, transform, k, scratch=scratch)

        assert all(map(same, same_everywhere(lambda: select(x)), select(x.float())))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rank", [1, 3, 17])
def test_low_rank_products(rank, dtype):
    """Of matrices of several blocks, at odd addresses; averages are rounded once, also with a residual."""
    generator = torch.Generator().manual_seed(rank)
    for rows, columns in ((70, 300), (1, 33), (513, 47), (3, 2500)):
        m = torch.randn(rows * columns + 1, generator=generator).to(dtype)[1:].view(rows, columns)
        p, q = torch.randn(rows, rank, generator=generator), torch.randn(columns, rank, generator=generator)

        def projected(m=m, p=p, q=q):
            return ops.low_rank_project(m, None, q), ops.low_rank_project(m, None, p, transpose=True)

        assert all(map(same, same_everywhere(projected), projected(m.float())))

        def averaged(m=m, p=p, q=q):
            out, of_group, residual = m.clone(), m.clone(), torch.empty(m.shape)
            ops.low_rank_apply_average_all([(out, None, p, q, p, q)])
            update = groups.Update(
                groups.Matrices([m.shape], rank), [of_group], [m.float()], residual, -p, q, p, q, None
            )
            groups.apply_averages([update])
            return out, of_group, residual

        product = ops.low_rank_expand(p, q)
        out, of_group, residual = same_everywhere(averaged)
        assert same(out, product.to(dtype)) and same(of_group, product.to(dtype))
        assert same(residual, m.float() - ops.low_rank_expand(-p, q))


@pytest.mark.parametrize("dtype", HALF)
def test_rows(dtype):
    x = finite(dtype)[:50000].view(10, -1)
    keys = list(range(10))
    assert same(ops.block_float_encode_all(x, 4, 96, keys), ops.block_float_encode_all(x.float(), 4, 96, keys))
    payloads = torch.zeros(2, 10, 4000, dtype=torch.uint8)
    for of, to in zip((x, x.float()), payloads):
        ops.quantize_packed_all(of, 4, 512, "l2", keys, to)
    assert same(*payloads)


@pytest.mark.parametrize("dtype", HALF)
def test_sums_are_rounded_once(dtype):
    """As torch rounds, ties to even: any float32, neighbours of representable numbers, and ties between them."""
    near = finite(dtype).float()
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 16,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    ties = (near[:-1].double() + near[1:].double()).div(2).float()
    x = torch.cat([bits.view(torch.float32), near, near.nextafter(torch.tensor(9e9)), ties])
    x = torch.cat([x[x.isfinite()], torch.tensor([65519.9, 65520.0, 3.4e38, 2**-24, 2**-25, 1.5 * 2**-25])])
    blocks = torch.zeros(len(x), 36, dtype=torch.uint8)
    blocks[:, :4], blocks[:, 4] = x.view(torch.uint8).view(-1, 4), 1  # the first element of a block is its step
    ops.block_float_decode([blocks.view(-1)], got := torch.empty(32 * len(x), dtype=dtype), 8, 32)
    assert same(got[::32].clone(), x.to(dtype))

    xs = [10 * torch.randn(N, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    natural = [ops.natural_encode(x, i)[0] for i, x in enumerate(xs)]
    levels = {(b, n): [ops.quantize_packed(x, b, n, "l2", i) for i, x in enumerate(xs)] for b, n in ((4, 512), (12, 7))}
    rounded = [ops.block_float_encode(x, 8, 256, i) for i, x in enumerate(xs)]
    decoders = {
        ops.signs_decode_add_all: [(ops.pack_signs(x), 0.3) for x in xs],
        ops.one_bit_decode_add_all: [(ops.one_bit_packed(x.view(1, -1)), 0.3) for x in xs],
        ops.ternary_decode_add_all: [((ops.ternary_packed(x, 20.0), 20.0), 0.3) for x in xs],
    }

    def sums(dtype):
        def of(decode, *arguments):
            out = torch.empty(N + 1, dtype=dtype)[1:]
            decode(*arguments[:1], out, *arguments[1:])
            return out

        yield of(ops.natural_decode_sum, natural, 0.3)
        yield of(ops.natural_decode_sum, [], 0.3)
        yield of(ops.block_float_decode_sum, rounded, 8, 256, 0.3)
        yield of(ops.block_float_decode_sum, rounded, 8, 256, 0.3, xs[0])
        for (bits, bucket), terms in levels.items():
            yield of(ops.quantize_decode_sum, terms, bits, bucket, 0.3)
        for decode_all, terms in decoders.items():
            for count in (0, 3):
                out = torch.empty(N + 1, dtype=dtype)[1:]
                decode_all([ops.WeightedSum(out, terms[:count], add=False)])
                yield out

    got = same_everywhere(lambda: tuple(sums(dtype)))
    assert all(same(g, expected.to(dtype)) for g, expected in zip(got, sums(torch.float32), strict=True))


def test_groups_refuse_to_add_to_16_bit_floats():
    x = torch.randn(32)
    packed = ops.pack_signs(x)
    columns = [groups.addresses([packed])[:, None], 0]
    for out in (torch.zeros(32, dtype=torch.float16), torch.zeros(32, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="signs_decode_add: got 16-bit outs, expected torch.float32 to add to"):
            groups.decode_sums("signs_decode_add", [out], True, columns, 1.0, fails=False)
        assert not out.any()
        groups.decode_sums("signs_decode_add", [out], False, columns, 1.0, fails=False)
        assert out.abs().eq(1).all()


def test_sums_that_would_be_rounded_twice_are_refused():
    x, out = torch.randn(32), torch.zeros(32, dtype=torch.bfloat16)
    natural, levels, blocks = ops.natural_encode(x)[0], ops.quantize_packed(x, 4), ops.block_float_encode(x, 8, 32)
    for call in (
        lambda: ops.natural_decode_sum([natural], out, add=True),
        lambda: ops.natural_decode_sum([natural] * 241, out),
        lambda: ops.quantize_decode_sum([levels] * 241, out, 4),
        lambda: ops.quantize_decode_add(*levels, out, 4),
        lambda: ops.block_float_decode_sum([blocks] * 241, out, 8, 32),
        lambda: ops.signs_decode_add(ops.pack_signs(x), out),
        lambda: ops.index_code_decode_add_all([ops.WeightedSum(out, [], add=False)]),
    ):
        with pytest.raises(ValueError, match="out: got torch.bfloat16, expected torch.float32"):
            call()
