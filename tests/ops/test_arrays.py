"""Arrays of NumPy, of CuPy and of other libraries as arguments of gradzip.ops, `roundtrip` and `simulate`."""

import inspect
import pickle

import numpy as np
import pytest
import torch

import gradzip
from gradzip import ops
from gradzip.ops.arrays import takes_arrays
from kinds import params

N = 1000
FORMAT = ops.RangeFloat.fit(torch.linspace(-2, 2, N), 10)


class Exported:
    """An array of a library that torch does not know: all it has is DLPack."""

    def __init__(self, tensor, device=None):
        self.__dlpack__ = tensor.__dlpack__
        self.__dlpack_device__ = tensor.__dlpack_device__ if device is None else lambda: device


class CudaArray:
    """All it has is the interface of CUDA arrays, as Numba's."""

    def __init__(self, interface):
        self.__cuda_array_interface__ = interface


def each(value, function):
    """The same with `function` called on each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [each(item, function) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return value


def arrays(value):
    """The same with a NumPy array for each tensor, in the same memory."""
    return each(value, torch.Tensor.numpy)


def same(got, expected):
    """Whether results are NumPy arrays where tensors are expected, with the same bits, and otherwise the same."""
    if isinstance(expected, (tuple, list)):
        return type(got) is type(expected) and len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(expected, torch.Tensor):
        wanted = expected.numpy()
        equal = type(got) is np.ndarray and (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        return equal and got.tobytes() == wanted.tobytes()
    return type(got) is type(expected) and got == expected


def calls():
    """Yield (function, arguments): all kinds of parameters and results that primitives have."""
    x, m, q = torch.randn(N), torch.randn(30, 20), torch.randn(20, 2)
    values, bits = ops.compact(x, 0.5)
    indices, _ = ops.topk_abs(x, 50)
    signs = [ops.pack_signs(torch.randn(N)) for _ in range(3)]
    packed = torch.empty(ops.packed_nbytes(N, 4), dtype=torch.uint8)
    yield ops.abs_max, (x,)
    yield ops.abs_max_all, ([x, m],)
    yield ops.topk_abs, (x, 7)
    yield ops.compact, (x, ops.select_threshold(x, 7))
    yield ops.compact_values, (torch.complex(x, -x), bits, len(values))
    yield ops.quantize_packed, (x, 4, 512, "max", 3, packed, torch.empty(2))
    yield ops.index_code_decode_add, (ops.index_code_encode(indices, N), x[:50].clone(), x.clone())
    yield ops.pack_signs_all, ([(x, 3, torch.empty(N // 8, dtype=torch.uint8))],)
    yield ops.majority_all, ([(signs, N, 5)],)
    yield ops.signs_decode_add_all, ([ops.WeightedSum(torch.zeros(N), [(signs[0], 0.5), (signs[1], 0.25)])],)
    yield ops.atom_probabilities, (x.double(), 10)
    yield ops.orthogonalize_, ([q.clone(), m.clone()],)
    yield ops.transform_select, (x, ops.Transform.fourier(64), 7)
    yield ops.RangeFloat.encode, (FORMAT, x)
    yield ops.RangeFloat.encode_packed, (FORMAT, x, torch.empty(ops.packed_nbytes(N, 10), dtype=torch.uint8))
    yield ops.RangeFloat.decode, (FORMAT, FORMAT.encode(x))
    yield lambda x: ops.RangeFloat.fit(x, 8).to_wire(), (x,)


@pytest.mark.parametrize("number", range(len(list(calls()))))
def test_numpy_in_numpy_out(number):
    """Results, and what is written to arguments, have the bits that tensors have."""
    function, arguments = list(calls())[number]
    passed = each(arguments, torch.clone)
    expected = function(*arguments)
    assert same(function(*arrays(passed)), expected)
    assert same(arrays(passed), arguments)  # `passed` is the memory of the arrays


def test_all_functions_take_arrays():
    for function in filter(inspect.isfunction, (getattr(ops, name) for name in ops.__all__)):
        assert hasattr(function, "__wrapped__")
        assert pickle.loads(pickle.dumps(function)) is function


def test_memory_is_shared():
    tensors = []

    @takes_arrays
    def same_memory(first, second, *, third=None):
        tensors.extend((first, second[0], third))
        return first, second[0][:5], first.double(), second[1], None

    x, y, z = (np.arange(10, dtype=np.float32) for _ in range(3))
    y.flags.writeable = False
    first, part, double, *rest = same_memory(x, [y, "text"], third=z)
    assert [tensor.data_ptr() for tensor in tensors] == [array.ctypes.data for array in (x, y, z)]
    assert first is x, "an argument is returned as it was passed"
    assert part.ctypes.data == y.ctypes.data and part.shape == (5,)
    assert double.dtype == np.float64 and rest == ["text", None]


def test_the_first_array_decides():
    x = torch.randn(N)
    expected = ops.select_threshold(x, 3)
    got = ops.select_threshold(Exported(x), 3)
    assert type(expected) is type(got) is torch.Tensor and got == expected, "a library without a name: tensors"
    buffer = torch.empty(ops.packed_nbytes(N, 4), dtype=torch.uint8)
    for given, out in ((x.numpy(), buffer), (x, Exported(buffer))):
        norms = np.empty(2, np.float32) if given is x else None
        packed, norms = ops.quantize_packed(given, 4, out=out, norms=norms)
        assert packed is out and type(norms) is np.ndarray


def test_strides_are_those_of_tensors():
    x = np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32)
    for view in (x[:, ::2], x.T):
        expected = ops.topk_abs(torch.from_numpy(np.ascontiguousarray(view)), 9)
        assert same(ops.topk_abs(view, 9), expected)
        assert same(arrays(ops.topk_abs(Exported(torch.from_numpy(view)), 9)), expected)
        for given in (view, Exported(torch.from_numpy(view))):
            with pytest.raises(ValueError, match="orthogonalize_: got strides .*, expected a contiguous tensor"):
                ops.orthogonalize_(given)


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


ON_A_DEVICE = {"shape": (8,), "typestr": "<f4", "data": (0, False), "version": 3}


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
        (Exported(torch.zeros(8), device=(2, 0)), "got a test_arrays.Exported that torch cannot use"),
        (CudaArray(ON_A_DEVICE), "got a test_arrays.CudaArray that torch cannot use"),
        (CudaArray(ON_A_DEVICE | {"stream": 1}), "got a test_arrays.CudaArray that torch cannot use"),
    ],
)
def test_errors_are_one_line(array, says):
    if torch.cuda.is_available() and (isinstance(array, CudaArray) or array.__dlpack_device__()[0] == 2):
        pytest.skip("a CUDA device is here")
    with pytest.raises(ValueError) as error:
        ops.abs_max_tensor(array)
    message = str(error.value)
    assert message.startswith("abs_max") and says in message and "expected" in message and "\n" not in message


def test_lists_with_tensors_first_are_lists_of_tensors():
    with pytest.raises(ValueError, match="got ndarray, expected a torch tensor, or an array with __dlpack__"):
        ops.majority([torch.zeros(1, dtype=torch.uint8), np.zeros(1, np.uint8)], 8)


@pytest.mark.parametrize("spec", params())
def test_roundtrip_and_simulate(spec):
    gradients = torch.randn(3, 64, 48)
    given = gradients.numpy().copy()
    given.flags.writeable = False
    method = gradzip.parse(spec)
    assert same(gradzip.roundtrip(method, given[0]), gradzip.roundtrip(method, gradients[0]))
    assert same(gradzip.simulate(method, list(given)), gradzip.simulate(method, list(gradients)))
    assert np.array_equal(given, gradients.numpy())


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types_of_gradients(dtype):
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
@pytest.mark.parametrize("stream", [{}, {"stream": None}, {"stream": 1}], ids=str)
def test_cuda_array_interface(stream):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x = torch.randn(N, device="cuda")
    got = ops.select_threshold(CudaArray({**x.__cuda_array_interface__, "version": 3, **stream}), 5)
    assert got.device == x.device and got == ops.select_threshold(x, 5)
