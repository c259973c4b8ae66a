"""gradzip.ops and the methods have the same bits on CUDA as on the CPU.

Each test runs twice: on a CUDA device, if there is one, and with the same launchers compiled for the CPU (see
tests/simt), so that everything except the device is tested on every machine.
"""

import contextlib
import importlib.util
import itertools
import math
import shutil
import types

import pytest
import torch

import gradzip
import gradzip.ops._native as native
import kinds
import simt_build
import single
from gradzip import ops
from gradzip.memory.state import Key, Workspace
from gradzip.methods.base.gather import CodedSum, GatherCompressor
from gradzip.methods.base.transform_codec import TransformCodec
from gradzip.ops import groups as kernels

SIZES = [0, 1, 31, 32, 33, 1000, 8193]


class OnDevice:
    """A device for tensors, and a context in which `gradzip.ops` runs the CUDA kernels on them."""

    def __init__(self, device, context):
        self.device = torch.device(device)
        self.context = context

    def __call__(self, function, *arguments, **keywords):
        """Call the function on the device. Return its result on the CPU."""
        with self.context():
            return self.back(function(*map(self.move, arguments), **{k: self.move(v) for k, v in keywords.items()}))

    def same(self, function, *arguments):
        """Assert that the function has the CPU's bits on the device. Return its result."""
        expected = function(*arguments)
        assert bits_equal(self(function, *arguments), expected)
        return expected

    def move(self, value):
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    def back(self, value):
        if isinstance(value, tuple):
            return tuple(map(self.back, value))
        return value.cpu() if isinstance(value, torch.Tensor) else value


@pytest.fixture(scope="module")  # so that one worker runs these tests: another one would wait for the compiler
def simt_module():
    if not shutil.which("g++"):
        pytest.skip("no g++")
    spec = importlib.util.spec_from_file_location("simt_cuda", simt_build.module())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["simt", pytest.param("cuda", marks=pytest.mark.cuda)])
def on_device(request, monkeypatch):
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return OnDevice("cuda", contextlib.nullcontext)
    module = types.SimpleNamespace(cuda=request.getfixturevalue("simt_module"), cuda_built=True)

    @contextlib.contextmanager
    def simulated_device():
        with monkeypatch.context() as patch:
            patch.setattr(native, "_C", module)
            patch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
            patch.setattr(torch.cuda, "device", contextlib.nullcontext)
            patch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            patch.setattr(torch.cuda, "current_device", lambda: None)  # as the index of a tensor on the CPU
            patch.setattr(ops.tensors, "CopyLater", lambda x: types.SimpleNamespace(result=x.clone))
            patch.setattr(Workspace, "empty", lambda self, name, shape, dtype, device: torch.empty(shape, dtype=dtype))
            yield

    return OnDevice("cpu", simulated_device)


def bits_equal(got, expected):
    """Return whether results are equal bit for bit. NaNs with the same bits are equal; -0 and 0 are not."""
    if isinstance(expected, tuple):
        return len(got) == len(expected) and all(map(bits_equal, got, expected))
    if not isinstance(expected, torch.Tensor):
        return got == expected or (got != got and expected != expected)
    return (
        got.dtype == expected.dtype
        and got.shape == expected.shape
        and torch.equal(got.contiguous().reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    )


def added(decode_add, *rest):
    """A function that returns what decode_add(*encoded, out, *rest) makes of a copy of its last argument, `out`."""

    def call(*arguments):
        *encoded, out = arguments
        total = out.clone()
        decode_add(*encoded, total, *rest)
        return total

    return call


def inputs(n):
    """Yield gradients of n elements: with ties, not aligned to 16 bytes; of many also dense, and mostly zero."""
    yield torch.randint(-2, 3, (n,)).float()
    yield torch.randn(n + 1)[1:]
    if n >= 1000:
        yield torch.randn(n)
        yield torch.randn(n) * (torch.rand(n) < 0.02)


@pytest.mark.parametrize("n", SIZES)
def test_selection_and_packing(on_device, n):
    for x in inputs(n):
        on_device.same(ops.abs_max, x)
        values, bits = on_device.same(ops.compact, x, 0.5)
        on_device.same(ops.expand, values, bits, n)
        if n == 0:
            continue
        if len(values):
            with pytest.raises(gradzip.PayloadError, match="another number of elements"):
                on_device(ops.expand, values[1:], bits, n)
        for k in {1, math.ceil(n / 7), n}:
            selection = on_device.same(ops.select, x, k)
            on_device.same(ops.select_threshold, x, k)
            bits = on_device.same(ops.bitmap, x, selection)
            for items in (x, torch.complex(x, -x)):
                on_device.same(ops.compact_values, items, bits, k)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits", [2, 7, 10, 16])
def test_range_float_and_bit_streams(on_device, n, bits):
    for x in inputs(n):
        for mantissa, limits in ((None, None), (2, None), (None, (-1.0, 0.5))):
            number = ops.RangeFloat.fit(x, bits, mantissa, limits)
            fitted = on_device(lambda *arguments: ops.RangeFloat.fit(*arguments)._words, x, bits, mantissa, limits)
            assert bits_equal(fitted, number._words)
            wire = torch.frombuffer(bytearray(number.to_wire()), dtype=torch.uint8)
            decode = ops.RangeFloat.decode_packed
            packed = ops.pack_bits(number.encode(x), bits)
            assert bits_equal(on_device.same(decode, wire, packed, bits, n), number.decode(number.encode(x)))
            wire[7] = bits + 1
            assert on_device(decode, wire, packed, bits, n).isnan().all()
            for key in (None, 12345):
                codes = on_device.same(number.encode, x, key)
                packed = ops.pack_bits(codes, bits)
                out = torch.empty_like(packed)
                outside = number.encode_packed(x, out, key)
                assert int(on_device(number.encode_packed, x, out, key)) == outside

                def pack(y, number=number, key=key):
                    buffer = torch.zeros(ops.packed_nbytes(n, bits), dtype=torch.uint8, device=y.device)
                    number.encode_packed(y, buffer, key)
                    return buffer

                assert bits_equal(on_device(pack, x), packed) and bits_equal(out, packed)
            assert bits_equal(on_device(ops.pack_bits, codes, bits), packed)
            assert bits_equal(on_device(ops.unpack_bits, packed, bits, n), codes)
            on_device.same(number.decode, codes)
    if n:
        above = torch.full((n,), number.positive + number.negative + 1, dtype=torch.int32)
        assert on_device(lambda codes: number.decode(codes, wait=False), above).isnan().all()
        with pytest.raises(ValueError, match="got a code above"):
            on_device(number.decode, torch.full((n,), number.positive + number.negative + 1, dtype=torch.int32))


TRANSFORMS = [
    *(ops.Transform.dct(*lengths) for lengths in ((), (3, 3), (2, 3, 4), (16,), (128,))),
    *(ops.Transform.fourier(length) for length in (8, 64, 512)),
    ops.Transform.pairs(),
]


@pytest.mark.parametrize("n", [1, 31, 1000, 8193])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_transforms(on_device, transform, n):
    def same(got, expected):  # but for the sign of zero
        return bits_equal(got + 0.0, expected + 0.0)

    groups = transform.groups(n)
    k = math.ceil(groups / 7)
    number = ops.RangeFloat(9, 4, -2.0, 3.0)
    codes = torch.randint(0, 400, (k * transform.group,), dtype=torch.int32)
    packed, total = ops.pack_bits(codes, 9), torch.randn(n)

    def decode(out, *bitmaps, count=k, add=False):
        some = packed[: ops.packed_nbytes(count * transform.group, 9)].to(out.device)
        parts = [ops.TransformPart(bitmap, some, count, number) for bitmap in bitmaps]
        out = out.clone()
        ops.transform_decode(parts, transform, out, 0.25, add)
        return out

    bitmaps = []
    for x in inputs(n):
        coefficients = ops.transform(x, transform)
        assert same(on_device(ops.transform, x, transform), coefficients)
        back = ops.transform_inverse(coefficients, transform, n)
        assert same(on_device(ops.transform_inverse, coefficients, transform, n), back)
        bitmap, values = ops.transform_select(x, transform, k)
        for room in (0, n + 8192):
            scratch = torch.empty(room)
            select = on_device(lambda x, s: ops.transform_select(x, transform, k, scratch=s), x, scratch)
            assert bits_equal(select[0], bitmap) and same(select[1], values)
        bitmaps.append(bitmap)
    for add in (False, True):
        expected = decode(total, *bitmaps * 5, add=add)  # more parts than are decoded together
        assert same(on_device(decode, total, *bitmaps * 5, add=add), expected)
    assert on_device(decode, total, *bitmaps, count=k - 1).isnan().all()


@pytest.mark.parametrize("n", SIZES)
def test_sparse_indices(on_device, n):
    for x in inputs(n):
        for k in {0, 1, math.ceil(n / 7), n} & set(range(n + 1)):
            indices, values = on_device.same(ops.topk_abs, x, k)
            stream = on_device.same(ops.index_code_encode, indices, n)
            bits = ops.bitmap(x, ops.select(x, k)) if k else torch.zeros(ops.bitmap_nbytes(n), dtype=torch.uint8)
            assert bits_equal(on_device(ops.bitmap_indices, bits, n, k), indices)
            assert bits_equal(on_device(ops.index_code_encode, bits, n), stream)
            assert bits_equal(on_device(ops.index_code_decode, stream, n), indices)

            def write(indices, out):
                return out, ops.index_code_write(indices, n, out)

            written, nbytes = on_device(write, indices, torch.empty_like(stream))
            assert bits_equal(written, stream) and nbytes == stream.numel()
            padded = torch.cat([stream, torch.full((100,), 77, dtype=torch.uint8)])
            assert bits_equal(on_device(lambda s, k=k: ops.index_code_decode(s, n, k), padded), indices)

            decode_add, out = added(ops.index_code_decode_add, 0.3), torch.randn(n)
            on_device.same(decode_add, stream, values, out)
            if n and k:
                damaged = stream.clone()
                damaged[4] ^= 1
                assert on_device(decode_add, damaged, values, out).isnan().all()
                with pytest.raises(gradzip.PayloadError):
                    on_device(ops.index_code_decode, damaged, n)
                assert not on_device(lambda s, k=k: ops.index_code_decode(s, n, k), damaged).any()
        if n:
            with pytest.raises(ValueError, match="not strictly ascending"):
                on_device(ops.index_code_encode, torch.tensor([n], dtype=torch.int32), n)


@pytest.mark.parametrize("n", [*SIZES, 1024, 3001])
def test_bitmap_code(on_device, n):
    for x in inputs(n):
        for p in (x.abs() * 0.2, x.abs(), x.abs() * 2):
            bits = ops.bernoulli(p.nan_to_num(0.5).clamp(0, 1), 7)
            count = ops.bitmap_count(bits, n)
            stream = on_device.same(ops.bitmap_code_encode, bits, n)
            assert bits_equal(on_device(ops.bitmap_code_decode, stream, n, count), bits)
            with_room = torch.cat([stream, torch.full((100,), 255, dtype=torch.uint8)])
            assert bits_equal(on_device(ops.bitmap_code_decode, with_room, n, count), bits)
            with pytest.raises(gradzip.PayloadError):
                ops.bitmap_code_decode(with_room, n, count)
            if n:
                for damaged, claimed in ((stream[:-1], count), (stream, count + 1), (stream, max(0, count - 1))):
                    if (len(damaged), claimed) != (len(stream), count):
                        assert ops.bitmap_count(on_device(ops.bitmap_code_decode, damaged, n, claimed), n) != claimed


def test_bitmap_code_of_all_ranks(on_device):
    """Of corrupt streams, and of these alone, the bitmaps have another number of bits set."""
    n, ranks, corrupt = 3001, 20, (3, 17)
    bits = [ops.bernoulli(torch.full((n,), 0.04 * (1 + i)), i) for i in range(ranks)]
    counts = [ops.bitmap_count(b, n) for b in bits]
    streams = [ops.bitmap_code_encode(b, n)[: -1 if i in corrupt else None] for i, b in enumerate(bits)]

    def decode(*streams):
        return tuple(ops.bitmap_code_decode_all(streams, n, counts)[0])

    for i, (got, wanted) in enumerate(zip(on_device(decode, *streams), bits, strict=True)):
        assert ops.bitmap_count(got, n) != counts[i] if i in corrupt else bits_equal(got, wanted)


@pytest.mark.parametrize("n", [1, 1000, 20000, 65537])
def test_select_sampled(on_device, n):
    for x in inputs(n):
        for k in {1, math.ceil(n / 100), math.ceil(n / 7), n}:
            selection, count = ops.select_sampled(x, k, 99)
            got, found = on_device(ops.select_sampled, x, k, 99)
            assert found == count and bits_equal(got[:4], selection[:4]) and bits_equal(got[8:], selection[8:])


def test_select_sampled_of_vectors(on_device):
    """More than a launch takes, of unequal sizes."""
    xs = [x for n in (33, 20000, 1000, 8193, 70001) for x in inputs(n)]
    ks = [math.ceil(x.numel() / (2 + 7 * i % 40)) for i, x in enumerate(xs)]
    assert len(xs) > 16

    def select(*xs):
        selections, counts = kernels.select_sampled(xs, ks, range(len(xs)))
        values = [torch.empty(count, device=xs[0].device) for count in counts]
        indices = kernels.topk_abs(xs, counts, values, selections)
        return selections.view(torch.int64)[:, 1].clone(), tuple(counts), tuple(indices), tuple(values)

    expected = select(*xs)
    assert bits_equal(on_device(select, *xs), expected)
    for x, k, key, count, indices in zip(xs, ks, range(len(xs)), *expected[1:3]):
        selection, found = ops.select_sampled(x, k, key)
        assert found == count and bits_equal(ops.bitmap_indices(ops.bitmap(x, selection), x.numel(), count), indices)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 16, 32, 65])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (64, 147), (33, 260), (300, 520)])
def test_low_rank_passes(on_device, shape, rank):
    m, residual = torch.randn(shape), torch.randn(shape)
    p, q, sent = torch.randn(shape[0], rank), torch.randn(shape[1], rank), torch.randn(shape[0], rank)

    def passes(m, residual, p, q, sent):
        e = residual.clone()
        first = ops.low_rank_project(m, e, q)
        second = ops.low_rank_project(m, None, p, transpose=True)
        results = [first, second, e, ops.low_rank_expand(p, q)]
        for sent_p in (p, sent):
            gradient, residual_out = e.clone(), torch.empty_like(e)
            ops.low_rank_apply_average_all([(gradient, residual_out, sent_p, q, p, q)])
            results += [gradient, residual_out]
        difference = e.clone()
        ops.low_rank_subtract(difference, p, q)
        return (*results, difference)

    got, expected = on_device(passes, m, residual, p, q, sent), passes(m, residual, p, q, sent)
    assert bits_equal(got[2:], expected[2:])
    for got_sum, expected_sum in zip(got[:2], expected[:2]):  # sums of several hundred products, added in another order
        assert torch.allclose(got_sum, expected_sum, rtol=1e-5, atol=1e-4)


def test_orthogonalize(on_device):
    shapes = [(1, 1), (64, 4), (147, 4), (3000, 4), (100, 7), (1500, 32), (40, 40), (3, 5), (0, 2)]
    matrices = [torch.randn(shape) for shape in shapes]
    matrices += [torch.zeros(50, 3), torch.ones(1100, 2), torch.full((9, 2), math.nan)]
    expected = [m.clone() for m in matrices]
    ops.orthogonalize_(expected)

    def orthogonalized(*matrices):
        copies = [m.clone() for m in matrices]
        ops.orthogonalize_(copies)
        return tuple(copies)

    got = on_device(orthogonalized, *matrices)
    for i, (got_matrix, expected_matrix) in enumerate(zip(got, expected)):
        assert torch.allclose(got_matrix, expected_matrix, atol=1e-6), shapes[i : i + 1]
    assert bits_equal(got[:6], tuple(expected[:6]))


@pytest.mark.parametrize("n", [*SIZES, 40000])
def test_atom_probabilities(on_device, n):
    for x in inputs(n):
        for budget in (0.5, 3, n / 7 + 0.25, n + 1):
            for atoms in (x, x.double()):
                on_device.same(ops.atom_probabilities, atoms, budget)
    falling = 0.9 ** torch.arange(n, dtype=torch.float64)
    on_device.same(ops.atom_probabilities, falling, 40 + n / 2)
    for bad in (math.nan, -math.inf):
        atoms = torch.cat([x, torch.tensor([bad])])
        assert on_device(ops.atom_probabilities, atoms, 3).isnan().all()


@pytest.mark.parametrize("n", [*SIZES, 40000])
def test_random_draws(on_device, n):
    for key, p in enumerate(inputs(n)):
        on_device.same(ops.bernoulli, p, key)
    for k in {0, 1, math.ceil(n / 7), n} & set(range(n + 1)):
        assert bits_equal(on_device(ops.random_indices, n, k, 7, on_device.device), ops.random_indices(n, k, 7))


@pytest.mark.parametrize("n", [*SIZES, 40000])
@pytest.mark.parametrize("norm", ["l2", "max", "l1"])
def test_bucket_norms(on_device, n, norm):
    for x in inputs(n):
        for bucket in (None, 100, 9000):
            on_device.same(ops.bucket_norms, x, bucket, norm)
    x[n // 2 :][:2] = torch.tensor([math.nan, -math.inf])[: n - n // 2]
    on_device.same(ops.bucket_norms, x, None, norm)


def test_two_devices_in_one_call_are_refused():
    here, there = torch.ones(4, 2), torch.ones(4, 2, device="meta")
    with pytest.raises(ValueError, match="got a tensor on meta"):
        ops.orthogonalize_([here, there])
    with pytest.raises(ValueError, match="got a tensor on meta"):
        ops.low_rank_project(here, there, torch.ones(2, 1))


METHODS = [
    gradzip.FFTRange(),
    gradzip.FFTRange(theta=0.5, bits=7, block=None),
    gradzip.FFTRange(theta=0.99, block=64, value_range=0.1, rounding="stochastic"),
    gradzip.FFTRange(mantissa=3, error_feedback=True),
]


def same_contents(got, wanted, codec):
    """Whether payloads differ in their slack only."""
    numel = int.from_bytes(bytes(wanted[8:16].tolist()), "little")
    got, wanted = (ops.open_payload(p, method=codec.number, digest=codec.digest, numel=numel) for p in (got, wanted))
    return got[:2] == wanted[:2] and bits_equal(got.body, wanted.body)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_fft_range_payloads(on_device, method):
    """Payloads from the simulated device equal the CPU's. On a real one, the library's FFT may round differently."""
    for shape in ((40, 50), (33, 31)):
        grad = torch.randn(shape)
        key = Key(0, 3, "w", 1)
        expected = method.clone()
        device_method = method.clone()
        payload = on_device(single.encode, device_method, grad, key)
        wanted = expected.encode(grad, key)
        assert payload.numel() >= wanted.numel() and on_device(ops.on_device, payload)
        if on_device.device.type == "cpu":
            assert same_contents(payload, wanted, method) and device_method.clamped == expected.clamped
            got = on_device(single.decode, device_method, [payload, payload], (grad.numel(),))
            assert bits_equal(got, single.decode(expected, [payload, payload], (grad.numel(),)))
        bad = grad.clone()
        bad[3, 4] = math.inf
        assert on_device(round_trip, device_method, bad, key).isnan().all()


@pytest.mark.parametrize("size", [1, 3])
def test_group_on_the_device(on_device, size):
    grads = [torch.randn(60, 70) for _ in range(size)]
    groups = [gradzip.LocalGroup(gradzip.FFTRange(error_feedback=True), size) for _ in range(2)]
    for _ in range(3):
        with on_device.context():
            got = groups[0].average([on_device.move(g) for g in grads], "w")
        expected = groups[1].average(grads, "w")
        for average, wanted in zip(got, expected):
            assert average.device.type == on_device.device.type
            # The device's FFT rounds differently, so other bins near the threshold may be selected.
            assert torch.allclose(average.cpu(), wanted, atol=0.2)
            if on_device.device.type == "cpu":
                assert bits_equal(average, wanted)


CODECS = kinds.examples(lambda compressor: isinstance(compressor, GatherCompressor))


def uses_library(method):
    """Whether it computes singular values or transforms, which round differently on a device."""
    return isinstance(method, TransformCodec) or getattr(method, "atoms", "entry") != "entry"


@pytest.mark.parametrize("spec", CODECS)
def test_payloads_of_codecs(on_device, spec):
    cpu_method, device_method = gradzip.parse(spec), gradzip.parse(spec)
    for shape in ((40, 50), (8, 6, 3, 3)):
        grad, key = torch.randn(shape), Key(0, 3, "w", 1)
        payload = single.encode(cpu_method, grad, key)
        expected = single.decode(cpu_method, [payload, payload], shape).clone()
        decoded = on_device(lambda p, s: single.decode(device_method, [p, p], s).clone(), payload, shape)
        round_tripped = on_device(lambda g, m, k: round_trip(m, g, k).clone(), grad, device_method, key)
        if on_device.device.type == "cpu" or not uses_library(cpu_method):
            assert bits_equal(decoded, expected)
            assert bits_equal(round_tripped, round_trip(cpu_method, grad, key))
            if getattr(cpu_method, "coding", None) != "elias":  # which is "packed" on a device
                encoded = on_device(single.encode, device_method, grad, key)
                assert same_contents(encoded, payload, cpu_method)
        else:
            assert torch.allclose(decoded, expected, atol=1e-5)
        assert round_tripped.isfinite().all()
        non_finite = grad.clone()
        non_finite[3, 4] = math.inf
        assert on_device(round_trip, device_method, non_finite, key).isnan().all()


@pytest.mark.parametrize("spec", [spec for spec in CODECS if gradzip.parse(spec).vectors])
def test_partitions_are_coded_as_each_alone(on_device, spec):
    """More vectors than a launch takes, of different sizes, and sums of two payloads of each."""
    cpu_method, device_method = gradzip.parse(spec), gradzip.parse(spec)
    if on_device.device.type == "cuda" and uses_library(cpu_method):
        pytest.skip("payloads differ")
    grads = [torch.randn(1 + 61 * i) for i in range(18)]
    keys = [Key(0, 3, f"w[{i}]", 1) for i in range(len(grads))]
    alone = [single.encode(cpu_method, grad, key) for grad, key in zip(grads, keys)]

    def encode(*grads):
        return tuple(device_method.encode_lists([[grad] for grad in grads], keys))

    if getattr(cpu_method, "coding", None) != "elias":  # which is "packed" on a device
        for method, payloads in (
            (cpu_method, cpu_method.encode_lists([[grad] for grad in grads], keys)),
            (device_method, on_device(encode, *grads)),
        ):
            assert all(same_contents(got, wanted, method) for got, wanted in zip(payloads, alone, strict=True))

    def sums(method, payloads):
        outs = [torch.ones(grad.numel(), device=payloads[0].device) for grad in grads]
        twice = [payload for payload in payloads for _ in range(2)]
        opened = method.open_all(twice, [out.numel() for out in outs for _ in range(2)], 2)
        coded = [CodedSum([out], opened[2 * i : 2 * i + 2], 0.3, add=True) for i, out in enumerate(outs)]
        method.sum_all(coded)
        return tuple(outs)

    for i, got in enumerate(on_device(lambda *payloads: sums(device_method, payloads), *alone)):
        opened = cpu_method.open_all([alone[i]] * 2, [grads[i].numel()] * 2, 2)
        expected = torch.ones(grads[i].numel())
        cpu_method.sum_all([CodedSum([expected], opened, 0.3, add=True)])
        assert torch.equal(got, expected)  # but for the signs of zeros
    assert all(map(torch.equal, sums(cpu_method, alone), on_device(lambda *p: sums(device_method, p), *alone)))


def round_trip(method, grad, key):
    return single.decode(method, [single.encode(method, grad, key)], grad.shape)


SAME_BITS = ["randomk:theta=0.9", *(spec for spec in CODECS if not uses_library(gradzip.parse(spec)))]


@pytest.mark.parametrize("spec", kinds.params(SAME_BITS, [spec for spec in SAME_BITS if "chunk=" not in spec]))
def test_groups_of_other_methods(on_device, spec):
    """Averages equal the CPU's. Only torch's division by the number of ranks may round differently on a device."""
    groups = [gradzip.LocalGroup(gradzip.parse(spec), 3) for _ in range(2)]
    for _ in range(3):
        grads = [torch.randn(60, 70) for _ in range(3)]
        with on_device.context():
            got = groups[0].average([on_device.move(g.clone()) for g in grads], "w")
        for average, wanted in zip(map(on_device.back, got), groups[1].average(grads, "w")):
            assert torch.allclose(average, wanted, rtol=1e-6, atol=0)
            assert bits_equal(average, wanted) or on_device.device.type != "cpu"


def test_ternary_scales_that_are_not_finite(on_device):
    """The device shares the scales before the host knows that one is not finite: the average is NaN on all ranks."""
    grads = [torch.randn(60, 70) for _ in range(3)]
    group = gradzip.LocalGroup(gradzip.TernGrad(), 3)
    for bad in (math.inf, -math.inf, math.nan):
        grads[1][5, 5] = bad
        with on_device.context():
            averages = group.average([on_device.move(g.clone()) for g in grads], "w")
        assert all(average.isnan().all() for average in averages)
        assert all(compressor.states["w"].step == 0 for compressor in group.compressors)


def test_verified_payloads(on_device):
    def verify(payloads):
        fields = [bytes(16)] * len(payloads)
        expected = [
            ops.ExpectedPayloads(payloads, [p.numel() for p in payloads], 7, 5, fields, known) for known in (0, 1)
        ]
        return tuple(part for pair in ops.verify_payloads(expected) for part in pair)

    payloads = []
    for i, nbytes in enumerate([0, 16, 1000, 100003, 16384, *range(0, 1500, 16)]):
        payload = ops.new_payload(nbytes)
        payload[48 : 48 + nbytes] = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        sealed, *_ = ops.seal_payloads([ops.Seal(payload, payload.numel())], method=7, digest=5)
        if i % 7 == 1:
            sealed[i % sealed.numel()] ^= 1
        payloads.append(sealed[: sealed.numel() - 16 * (i % 11 == 2)])
    expected = verify(payloads)
    with on_device.context():
        assert bits_equal(on_device.back(verify(list(map(on_device.move, payloads)))), expected)
    assert expected[1].isnan().any() and not expected[1].isnan().all()


def gathered_payloads(on_device):
    """Return three consecutive payloads in one buffer, each payload alone, and their method."""
    method = gradzip.FFTRange()
    payloads = [method.encode(torch.randn(40, 40 + r), Key(0, 0, "w", r)) for r in range(3)]
    return torch.cat(payloads), payloads, method


def test_gathered_payloads_are_opened_with_one_synchronization(on_device, monkeypatch):
    buffer, payloads, method = gathered_payloads(on_device)
    inspections = []
    inspect = ops.payload._inspect
    monkeypatch.setattr(ops.payload, "_inspect", lambda *a: inspections.append(1) or inspect(*a))

    def open_all(buffer):
        return tuple(
            ops.open_payload(p, method=1, digest=method.digest, numel=40 * (40 + r)).body
            for r, p in enumerate(ops.split_payloads(buffer, 3))
        )

    assert bits_equal(on_device(open_all, buffer), tuple(p[ops.HEADER_NBYTES :] for p in payloads))
    assert len(inspections) == 1
    alone = on_device(lambda p: ops.open_payload(p, method=1, digest=method.digest, numel=1600).body, payloads[0])
    assert bits_equal(alone, payloads[0][ops.HEADER_NBYTES :])


@pytest.mark.parametrize(
    "position, byte, message",
    [
        (0, 1, "not a gradzip payload"),
        (2, 9, "wire format 9"),
        (3, 9, "method number 9"),
        (5, 1, "another configuration"),
        (8, 1, "elements, expected"),
        (16, 1, "claims 1 bytes|claims .* bytes, but|truncated"),
        (23, 255, "claims .* bytes, but"),
        (24, 1, "corrupt payload"),
        (40, 1, "corrupt payload"),
        (100, 1, "corrupt payload"),
    ],
)
def test_tampered_payloads_are_refused(on_device, position, byte, message):
    buffer, payloads, method = gathered_payloads(on_device)
    buffer[payloads[0].numel() + position] ^= byte if byte != 9 else int(payloads[1][position]) ^ 9

    def open_second(buffer):
        second = ops.split_payloads(buffer, 3)[1]
        return ops.open_payload(second, method=1, digest=method.digest, numel=1640)

    with pytest.raises(gradzip.PayloadError, match=message) as cpu_error:
        open_second(buffer)
    with pytest.raises(gradzip.PayloadError) as device_error:
        on_device(open_second, buffer)
    assert str(device_error.value) == str(cpu_error.value)


def test_truncated_buffers_are_refused(on_device):
    buffer, payloads, _ = gathered_payloads(on_device)
    for nbytes in (0, 16, 47, payloads[0].numel(), payloads[0].numel() + 48, buffer.numel() - 16):
        with pytest.raises(gradzip.PayloadError) as cpu_error:
            ops.split_payloads(buffer[:nbytes], 3)
        with pytest.raises(gradzip.PayloadError) as device_error:
            on_device(ops.split_payloads, buffer[:nbytes], 3)
        assert str(device_error.value) == str(cpu_error.value)


def test_tensors_of_two_devices_are_refused():
    x = torch.empty(4, device="meta")
    with pytest.raises(ValueError, match="got a tensor on meta, expected one on the CPU or a CUDA device"):
        ops.abs_max(x)
    with pytest.raises(ValueError, match="expected one on cuda:1 like the others"):
        native.check(torch.ones(4), torch.float32, "x", device=torch.device("cuda", 1))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits, bucket, norm", [(2, 64, "max"), (4, 512, "l2"), (9, 100, "l2"), (16, 5000, "max")])
def test_quantization(on_device, n, bits, bucket, norm):
    for x in inputs(n):
        codes, norms = on_device.same(ops.quantize, x, bits, bucket, norm, 7)
        on_device.same(ops.dequantize, codes, norms, bits, bucket)
        packed, of_packed = on_device.same(ops.quantize_packed, x, bits, bucket, norm, 7)
        stream, of_stream = on_device.same(ops.elias_quantize, x, bits, bucket, norm, 7)
        assert bits_equal((of_packed, of_stream), (norms, norms))
        on_device.same(ops.elias_encode, codes)
        assert bits_equal(on_device(ops.elias_decode, stream, n), codes.view(-1))
        start = torch.randn(n)
        for decode_add, body in ((ops.quantize_decode_add, packed), (ops.elias_decode_add, stream)):
            add = added(decode_add, bits, bucket, 0.3)
            on_device.same(add, body, norms, start)
            if n:
                non_finite = norms.clone()
                non_finite[-1] = math.inf
                assert on_device(add, body, non_finite, start)[-1].isnan()

        def encode_rows(x):
            buckets, nbytes = ops.num_buckets(n, bucket), ops.packed_nbytes(n, bits)
            payloads = torch.zeros(3, (4 * buckets + nbytes + 3) // 4 * 4, dtype=torch.uint8, device=x.device)
            ops.quantize_packed_all(torch.stack([x, -x, 3 * x]), bits, bucket, norm, [7, 1 << 63, 9], payloads)
            return payloads

        on_device.same(encode_rows, x)

        def decode_sum(packed, norms, other):
            total = torch.full((n,), 7.0, device=packed.device)
            ops.quantize_decode_sum([(packed, norms), (packed, other)], total, bits, bucket, 0.3)
            return total

        def elias_sum(stream, norms, other):
            total = torch.full((n,), 7.0, device=stream.device)
            ops.elias_decode_sum([(stream, norms), (stream, other)] * 20, total, bits, bucket, 0.3)
            return total

        for sum_of, body in ((decode_sum, packed), (elias_sum, stream)):
            on_device.same(sum_of, body, norms, 3 * norms)
            if n:
                assert on_device(sum_of, body, norms, non_finite)[-1].isnan()
    if n:
        with pytest.raises(ValueError, match="got a level beyond"):
            on_device(ops.dequantize, torch.full((n,), 1 << bits, dtype=torch.int32), norms, bits, bucket)
        with pytest.raises(ValueError, match="got a level beyond 65535"):
            on_device(ops.elias_encode, torch.full((n,), 65536, dtype=torch.int32))
        with pytest.raises(ValueError, match="less than the stream needs"):
            on_device(ops.elias_encode, codes, torch.empty(len(stream) - 1, dtype=torch.uint8))
        with pytest.raises(gradzip.PayloadError, match="not a stream"):
            on_device(ops.elias_decode, stream[:-1], n)
        assert on_device(add, stream[:-1], norms, start).isnan().all()


@pytest.mark.parametrize("n", SIZES)
def test_signs_and_majority(on_device, n):
    ballots = [ops.pack_signs(x, key) for key, x in enumerate(inputs(n))]
    for key, x in enumerate(inputs(n)):
        on_device.same(ops.pack_signs, x, key)

    def vote(*packed):
        return ops.majority(packed, n, 11)

    for voters in (1, 2, 3, 4):
        on_device.same(vote, *ballots[:voters])
    on_device.same(added(ops.signs_decode_add, 0.3), ballots[0], torch.ones(n))


def test_tables(on_device):
    """Several tensors in one call of each kernel."""
    sizes = [33, 0, 8193, 1, 12_000, 7]
    tensors = [torch.randn(n) for n in sizes]
    count = len(sizes)

    def sums(*given):
        xs, starts = given[:count], [x.clone() for x in given[count:]]
        signs = [torch.empty(ops.bitmap_nbytes(x.numel()), dtype=torch.uint8, device=x.device) for x in xs]
        means = [torch.empty(2, device=x.device) for x in xs]
        trits = [torch.empty(ops.ternary_nbytes(x.numel()), dtype=torch.uint8, device=x.device) for x in xs]
        scale = torch.ones(1, device=xs[0].device)
        statistics = ops.pack_signs_all([(x, i, out) for i, (x, out) in enumerate(zip(xs, signs))])
        votes = ops.majority_all([([packed, packed, ~packed], x.numel(), 5) for x, packed in zip(xs, signs)])
        scales = (0.5, -0.25)
        terms = [[(p, scale) for scale in scales] for p in signs]
        ops.signs_decode_add_all([ops.WeightedSum(*one, bool(i % 2)) for i, one in enumerate(zip(starts, terms))])
        largest = ops.one_bit_packed_all([(x.view(1, -1), 7, p, m) for x, p, m in zip(xs, signs, means)])
        ops.one_bit_decode_add_all([ops.WeightedSum(out, [((p, m), 0.3)]) for out, p, m in zip(starts, signs, means)])
        ops.ternary_packed_all([(x, scale, scale, i, p) for i, (x, p) in enumerate(zip(xs, trits))])
        ops.ternary_decode_add_all([ops.WeightedSum(out, [((p, scale), 0.3)] * 2) for out, p in zip(starts, trits)])
        payloads = ops.new_payloads(sizes, xs[0].device, gaps=True)
        ops.seal_payloads([ops.Seal(p, 3, magnitudes=m) for p, m in zip(payloads, statistics)], method=1, digest=2)
        parts = [*statistics, *largest, *ops.abs_max_all(list(xs))]
        counted = [torch.cat([winner, against.to(torch.uint8)]) for winner, against in votes]
        return *starts, *parts, *counted, *signs, *means, *trits, *payloads

    on_device.same(sums, *tensors, *(torch.randn(n) for n in sizes))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (7, 33), (100, 8), (2, 9000)])
def test_one_bit(on_device, shape):
    for x in inputs(shape[0] * shape[1]):
        x = x.view(shape)
        packed, means = on_device.same(ops.one_bit_packed, x, 5)
        decode_add = added(ops.one_bit_decode_add, 0.3)
        on_device.same(decode_add, packed, means, x)
        if x.numel():
            non_finite = means.clone()
            non_finite[-1] = torch.tensor([math.nan, -math.inf])
            assert on_device(decode_add, packed, non_finite, x)[-1].isnan().all()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits, block", [(8, 256), (4, 256), (4, 288), (2, 256), (2, 288)])
def test_block_float(on_device, n, bits, block):
    for x in inputs(n):
        residual = torch.randn(n)
        for key in (None, 7)[: 1 if bits == 2 else 2]:

            def encode(x, residual, key=key):
                error = torch.empty_like(x)
                blocks = -(-n // block) + 1
                payload = ops.block_float_encode(x, bits, block, key, blocks=blocks, residual=residual, error=error)
                return payload, error

            def decode(payload, residual):
                out, total = torch.empty_like(residual), residual.clone()
                ops.block_float_decode([payload], out, bits, block)
                ops.block_float_decode_sum([payload, payload], total, bits, block, 0.3, total)
                return out, total, ops.block_float_max_step([payload], bits, block)

            payload, _ = on_device.same(encode, x, residual)
            on_device.same(decode, payload, residual)
            keys = None if key is None else [key, 1 << 63, 9]
            rows = torch.stack([x, residual, x - residual])
            on_device.same(lambda rows, keys=keys: ops.block_float_encode_all(rows, bits, block, keys), rows)

            def encode_all(rows, residual, keys=keys):
                error = torch.empty_like(rows)
                return ops.block_float_encode_all(rows, bits, block, keys, residual=residual, error=error), error

            on_device.same(encode_all, rows, rows.flip(0))


@pytest.mark.parametrize("n", [*SIZES, 40000])
def test_natural(on_device, n):
    def decode_sum(packed, start):
        total, added = torch.empty_like(start), start.clone()
        ops.natural_decode_sum([packed, packed, packed], total, 0.3)
        ops.natural_decode_sum([packed, packed], added, 0.3, add=True)
        return total, added

    for key, x in enumerate(inputs(n)):
        packed, _ = on_device.same(ops.natural_encode, x, key)
        on_device.same(decode_sum, packed, torch.randn(n))
        if n:
            packed[-2:] = 255
            assert not on_device(decode_sum, packed, x)[0][-1].isfinite()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("k, chunk", [(61, 4096), (7, 96), (256, 256)])
def test_chunk_topk(on_device, n, k, chunk):
    def largest_level(x, records):
        return kernels.chunk_topk([x], [ops.chunk_topk_count(n, k, chunk)], [k], chunk, [records])[1]

    for x in inputs(n):
        for half in (torch.bfloat16, torch.float16):
            on_device.same(ops.chunk_topk, x.to(half), k, chunk)
        _, records = on_device.same(ops.chunk_topk, x, k, chunk)
        if not n:
            continue
        on_device.same(largest_level, x, records)
        if x.isfinite().all():
            on_device.same(ops.chunk_topk_values, records, n, k, chunk)
        records.view(torch.int16)[0] = 0x7FC0  # a level that is not finite
        assert on_device(ops.chunk_topk_values, records, n, k, chunk)[:k].isnan().all()


@pytest.mark.parametrize("n", SIZES)
def test_add_residual(on_device, n):
    for x in inputs(n):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            on_device.same(ops.add_residual, x.to(dtype), torch.randn(n))


@pytest.mark.parametrize("number", [math.nan, -math.inf, 2.0])
@pytest.mark.parametrize("n", SIZES)
def test_restore(on_device, n, number):
    def restored(number, sources):
        targets = [source * 2 + 1 for source in sources]
        targets += [torch.ones_like(source) for source in sources]
        listed = [ops.Restoration(target, source) for target, source in zip(targets, sources)]
        fills = itertools.cycle((0.0, math.nan, 1.5))
        listed += [ops.Restoration(target, None, fill) for target, fill in zip(targets[len(sources) :], fills)]
        ops.restore_unless_finite(number, listed)
        return tuple(targets)

    sources = [x.to(dtype) for x in inputs(n) for dtype in (torch.float32, torch.float16, torch.float64)]
    sources += [torch.randn(n + offset, device=sources[0].device)[offset:] for offset in range(100)]
    sources.append(torch.randn(2, n + 1, 3)[:, :n].contiguous().transpose(0, 2))
    expected = restored(torch.tensor([number]), sources)
    with on_device.context():
        got = restored(on_device.move(torch.tensor([number])), [on_device.move(source) for source in sources])
        assert bits_equal(on_device.back(got), expected)


@pytest.mark.parametrize("n", [*SIZES, 320, 1601])
def test_ternary(on_device, n):
    for x in inputs(n):
        scale, clip = torch.tensor([1.7]), torch.tensor([1.1])
        expected = ops.ternary_packed(x, scale.item(), clip.item(), 3)
        assert bits_equal(on_device(ops.ternary_packed, x, scale, clip, 3), expected)
        assert bits_equal(on_device(ops.ternary_packed, x, scale.item(), clip.item(), 3), expected)
        on_device.same(ops.ternary_packed, x, scale, None, 3)
        on_device.same(ops.ternary_packed, x.bfloat16(), scale, clip, 3)

        decode_add, start = added(ops.ternary_decode_add, 1 / 3), torch.randn(n)
        for value in (0.7, scale, scale.item()):
            on_device.same(decode_add, expected, value, start)
        if n:
            assert on_device(decode_add, expected, torch.tensor([-1.0]), start).isnan().all()
            expected[-1] = 243
            assert on_device(decode_add, expected, scale, start).isnan().any()
