"""Arrays of NumPy, of CuPy and of other libraries as arguments of gradzip.ops, `roundtrip` and `simulate`."""

import inspect
import pickle

import numpy as np
import pytest
import torch

import gradzip
from contract import SPECS
from gradzip import ops
from gradzip.ops.arrays import takes_arrays

N = 1000


class Exported:
    """An array of a library that torch does not know: all it has is DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **keywords):
        return self.tensor.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class OnOtherDevice(Exported):
    """It is on a GPU, as it says."""

    def __dlpack_device__(self):
        return (2, 0)


class CudaArray:
    """All it has is the interface of CUDA arrays, as Numba's."""

    def __init__(self, interface):
        self.__cuda_array_interface__ = interface


def arrays(value, to=torch.Tensor.numpy):
    """The same with an array for each tensor, in the same memory."""
    if isinstance(value, torch.Tensor):
        return to(value)
    if isinstance(value, (tuple, list)):
        items = [arrays(item, to) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return value


def same(got, expected):
    """Whether results are NumPy arrays where tensors are expected, with the same bits, and otherwise the same."""
    if isinstance(expected, (tuple, list)):
        return type(got) is type(expected) and len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(expected, torch.Tensor):
        wanted = expected.numpy()
        return (
            type(got) is np.ndarray
            and (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            and (got.tobytes() == wanted.tobytes())
        )
    return type(got) is type(expected) and got == expected


def calls():
    """Yield (function, arguments): all kinds of parameters and results that primitives have."""
    x = torch.randn(N)
    m, e, q = torch.randn(30, 20), torch.randn(30, 20), torch.randn(20, 2)
    values, bits = ops.compact(x, 0.5)
    indices, _ = ops.topk_abs(x, 50)
    codes, norms = ops.quantize(x, 4)
    number = ops.RangeFloat.fit(x, 10)
    signs = [ops.pack_signs(torch.randn(N)) for _ in range(3)]
    packed = torch.empty(ops.packed_nbytes(N, 4), dtype=torch.uint8)
    payload = ops.block_float_encode(x, 8)
    yield ops.abs_max, (x,)
    yield ops.abs_max_all, ([x, m],)
    yield ops.all_finite, ([x, m],)
    yield ops.select, (x, 7)
    yield ops.select_threshold, (x, 7)
    yield ops.topk_abs, (x, 7)
    yield ops.compact, (x, 0.5)
    yield ops.compact, (x, ops.select_threshold(x, 7))
    yield ops.compact_values, (torch.complex(x, -x), bits, len(values))
    yield ops.expand, (values, bits, N)
    yield ops.quantize, (x, 4)
    yield ops.quantize_packed, (x, 4, 512, "max", 3, packed, torch.empty(2))
    yield ops.dequantize, (codes, norms, 4)
    yield ops.pack_bits, (codes, 4)
    yield ops.unpack_bits, (ops.pack_bits(codes, 10), 10, N)
    yield ops.index_code_encode, (indices, N)
    yield ops.index_code_decode_add, (ops.index_code_encode(indices, N), x[:50].clone(), x.clone())
    yield ops.elias_encode, (codes,)
    yield ops.pack_signs_all, ([(x, 3, torch.empty(N // 8, dtype=torch.uint8))],)
    yield ops.majority, (signs, N)
    yield ops.majority_all, ([(signs, N, 5)],)
    yield ops.signs_decode_add_all, ([ops.SignsSum(torch.zeros(N), [(signs[0], 0.5), (signs[1], 0.25)])],)
    yield ops.atom_probabilities, (x.double(), 10)
    yield ops.bernoulli, (x.sigmoid(), 3)
    yield ops.block_float_decode, ([payload], torch.empty(N), 8)
    yield ops.orthogonalize_, (q.clone(),)
    yield ops.orthogonalize_, ([q.clone(), m.clone()],)
    yield ops.low_rank_project, (e, m, q)
    yield ops.transform, (x, ops.Transform.fourier(64))
    yield ops.RangeFloat.encode, (number, x)
    yield ops.RangeFloat.encode_packed, (number, x, torch.empty(ops.packed_nbytes(N, 10), dtype=torch.uint8))
    yield ops.RangeFloat.decode, (number, number.encode(x))
    yield lambda x: ops.RangeFloat.fit(x, 8).to_wire(), (x,)


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (tuple, list)):
        items = [copied(item) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return value


@pytest.mark.parametrize("number", range(len(list(calls()))))
def test_numpy_in_numpy_out(number):
    """Results, and what is written to arguments, have the bits that tensors have."""
    function, arguments = list(calls())[number]
    passed = copied(arguments)
    expected = function(*arguments)
    assert same(function(*arrays(passed)), expected)
    assert same(arrays(passed), arguments)  # `passed` is the memory of the arrays


def test_all_functions_of_tensors_take_arrays():
    functions = {name: getattr(ops, name) for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    assert {name for name, function in functions.items() if not hasattr(function, "__wrapped__")} == {
        "bitmap_code_capacity", "bitmap_nbytes", "block_float_nbytes", "check_block_float", "check_format",
        "check_quantizer", "elias_capacity", "index_code_capacity", "new_payload", "num_buckets", "packed_nbytes",
        "random_indices", "ternary_nbytes", "transform_scratch_numel",
    }  # fmt: skip
    for function in functions.values():
        assert pickle.loads(pickle.dumps(function)) is function


def test_memory_is_shared():
    tensors = []

    @takes_arrays
    def same_memory(first, second, *, third=None):
        tensors.extend((first, *second, third))
        return first, second[0][:5], first.double(), 7, None

    x, y, z = (np.arange(10, dtype=np.float32) for _ in range(3))
    y.flags.writeable = False
    first, part, double, *rest = same_memory(x, [y, "text"], third=z)
    assert [t if t == "text" else t.data_ptr() for t in tensors] == [
        x.ctypes.data,
        y.ctypes.data,
        "text",
        z.ctypes.data,
    ]
    assert first is x, "an argument is returned as it was passed"
    assert part.ctypes.data == y.ctypes.data and part.shape == (5,)
    assert double.dtype == np.float64
    assert rest == [7, None]
    out = np.empty(4, np.uint8)
    assert ops.pack_bits(np.arange(8, dtype=np.int32), 4, out=out) is out
    assert out.tolist() == [0x10, 0x32, 0x54, 0x76]


def test_the_first_array_decides():
    x = torch.randn(N)
    expected = ops.select_threshold(x, 3)
    assert type(ops.select_threshold(x, 3)) is torch.Tensor
    got = ops.select_threshold(Exported(x), 3)
    assert type(got) is torch.Tensor and got == expected, "a library without a name: tensors"
    buffer = torch.empty(ops.packed_nbytes(N, 4), dtype=torch.uint8)
    packed, norms = ops.quantize_packed(x.numpy(), 4, out=buffer)
    assert packed is buffer and type(norms) is np.ndarray
    out = Exported(buffer)
    packed, norms = ops.quantize_packed(x, 4, out=out, norms=np.empty(2, np.float32))
    assert packed is out and type(norms) is np.ndarray


def test_strides_are_those_of_tensors():
    x = np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32)
    for view in (x[:, ::2], x.T):
        whole = np.ascontiguousarray(view)
        assert same(ops.topk_abs(view, 9), ops.topk_abs(torch.from_numpy(whole), 9))
        got = ops.topk_abs(Exported(torch.from_numpy(view)), 9)
        assert same(arrays(got), ops.topk_abs(torch.from_numpy(whole), 9))
        with pytest.raises(ValueError, match="orthogonalize_: got strides .*, expected a contiguous tensor"):
            ops.orthogonalize_(view)
        with pytest.raises(ValueError, match="orthogonalize_: got strides .*, expected a contiguous tensor"):
            ops.orthogonalize_(Exported(torch.from_numpy(view)))


def test_read_only_arrays_are_read():
    """Without torch's warning, which would be an error here."""
    x = np.random.default_rng(0).standard_normal(N).astype(np.float32)
    before = x.copy()
    x.flags.writeable = False
    assert same(ops.topk_abs(x, 9), ops.topk_abs(torch.from_numpy(before), 9))
    assert not x.flags.writeable
    for write in (
        lambda: ops.orthogonalize_(x.reshape(-1, 10)),
        lambda: ops.pack_bits(np.arange(8, dtype=np.int32), 4, out=np.frombuffer(bytes(4), np.uint8)),
        lambda: ops.quantize_decode_add(*ops.quantize_packed(before, 4), x, 4),
        lambda: ops.block_float_encode(before, 8, residual=np.zeros_like(before), error=x),
        lambda: ops.low_rank_subtract(x.reshape(10, -1), np.ones((10, 2), np.float32), np.ones((100, 2), np.float32)),
    ):
        with pytest.raises(ValueError, match="got a read-only array, expected one to write to; pass a copy"):
            write()
    assert np.array_equal(x, before)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros(8), "got torch.float64, expected torch.float32"),
        (np.array(["a", "b"]), "got a numpy.ndarray that torch cannot use"),
        (np.array([None]), "got a numpy.ndarray that torch cannot use"),
        (np.zeros(8, ">f4"), "got a numpy.ndarray that torch cannot use"),
        (np.zeros(8, np.float32)[::-1], "negative"),
        (Exported(torch.zeros(8, dtype=torch.int16)), "got torch.int16, expected torch.float32"),
        (Exported(torch.zeros(8, requires_grad=True)), "got a test_arrays.Exported that torch cannot use"),
    ],
)
def test_errors_are_one_line(array, says):
    with pytest.raises(ValueError) as error:
        ops.abs_max_tensor(array)
    assert says in str(error.value)
    assert "expected" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
@pytest.mark.parametrize(
    "array",
    [
        OnOtherDevice(torch.zeros(8)),
        CudaArray({"shape": (8,), "typestr": "<f4", "data": (0, False), "version": 3}),
        CudaArray({"shape": (8,), "typestr": "<f4", "data": (0, False), "version": 3, "stream": 1}),
    ],
    ids=["dlpack", "interface", "interface with stream"],
)
def test_a_device_that_is_not_there(array):
    with pytest.raises(
        ValueError, match="abs_max_tensor: got a test_arrays.* that torch cannot use .* expected .* a device"
    ):
        ops.abs_max_tensor(array)


def test_lists_with_tensors_first_are_lists_of_tensors():
    with pytest.raises(ValueError, match="got ndarray, expected a torch tensor, or an array with __dlpack__"):
        ops.majority([torch.zeros(1, dtype=torch.uint8), np.zeros(1, np.uint8)], 8)


@pytest.mark.parametrize("spec", SPECS)
def test_roundtrip_and_simulate(spec):
    gradients = torch.randn(3, 64, 48)
    given = gradients.numpy().copy()
    given.flags.writeable = False
    method = gradzip.parse(spec)
    assert same(gradzip.roundtrip(method, given[0]), gradzip.roundtrip(method, gradients[0]))
    assert same(gradzip.simulate(method, list(given)), gradzip.simulate(method, list(gradients)))
    assert np.array_equal(given, gradients.numpy())


def test_other_types_of_gradients():
    for dtype in (np.float16, np.float64):
        gradient = np.random.default_rng(0).standard_normal((64, 48)).astype(dtype)
        sent, _ = gradzip.roundtrip(gradzip.TopK(theta=0.9), gradient)
        assert (sent.dtype, sent.shape) == (dtype, (64, 48))


# On a GPU


@pytest.fixture
def cupy():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return pytest.importorskip("cupy")


@pytest.mark.cuda
def test_cupy_in_cupy_out(cupy):
    x = np.random.default_rng(0).standard_normal(100_003).astype(np.float32)
    indices, values = ops.topk_abs(cupy.asarray(x), 500)
    assert type(indices) is type(values) is cupy.ndarray
    assert same((indices.get(), values.get()), ops.topk_abs(torch.from_numpy(x), 500))
    out = cupy.empty(ops.packed_nbytes(500, 8), np.uint8)
    assert ops.pack_bits(indices, 8, out=out) is out
    sent, nbytes = gradzip.roundtrip(gradzip.TopK(), cupy.asarray(x).reshape(1, -1))
    expected, same_nbytes = gradzip.roundtrip(gradzip.TopK(), torch.from_numpy(x).reshape(1, -1).cuda())
    assert nbytes == same_nbytes and np.array_equal(sent.get(), expected.cpu().numpy())
    with pytest.raises(ValueError, match="got a tensor on cpu, expected one on cuda:0 like the others"):
        ops.pack_bits(indices, 8, out=out.get())


@pytest.mark.cuda
def test_work_is_queued_on_the_current_stream_of_cupy(cupy):
    used = []

    @takes_arrays
    def twice(x, y=None):
        used.append(torch.cuda.current_stream().cuda_stream)
        return x * 2 if y is None else x + y

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.arange(1 << 24, dtype=np.float32)
        doubled = twice(x)
        assert bool((doubled == 2 * x).all())
    mixed = twice(x, torch.ones(1 << 24, device="cuda"))  # on the default stream of both
    stream.synchronize()
    assert float(mixed[5]) == 6
    assert used == [stream.ptr, 0]


@pytest.mark.cuda
def test_cuda_array_interface():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x = torch.randn(N, device="cuda")
    for stream in ({}, {"stream": None}, {"stream": 1}):
        got = ops.select_threshold(CudaArray({**x.__cuda_array_interface__, "version": 3, **stream}), 5)
        assert got.device == x.device and got == ops.select_threshold(x, 5)
