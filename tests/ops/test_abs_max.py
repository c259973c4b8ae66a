import concurrent.futures
import math
import os

import numpy as np
import pytest
import torch

from gradzip.ops import abs_max, abs_max_columns, signs_decode_add
from reference import LARGE, SIZES, arrays, same_everywhere, sliced


@pytest.mark.parametrize("n", [*SIZES, LARGE])
def test_equals_numpy(n):
    for kind, x in arrays(n).items():
        expected = float(np.max(np.abs(x), initial=0.0))
        tensor = sliced(x)
        got = same_everywhere(lambda tensor=tensor: abs_max(tensor))
        assert got == expected or (math.isnan(got) and math.isnan(expected)), kind


@pytest.mark.parametrize("n", [1, 7, 8, 17, 64, 1000, 32769])
@pytest.mark.parametrize("special", [-5.0, math.inf, -math.inf, math.nan, -math.nan])
def test_finds_the_largest_element_at_any_position(n, special):
    for at in {0, 1, n // 2, n - 2, n - 1} & set(range(n)):
        x = torch.linspace(-1, 1, n)
        x[at] = special
        got = same_everywhere(lambda x=x: abs_max(x))
        assert math.isnan(got) if math.isnan(special) else got == abs(special)


def test_nan_is_larger_than_infinity():
    for x in ([math.nan, math.inf], [math.inf, math.nan], [-math.inf, -math.nan]):
        assert math.isnan(abs_max(torch.tensor(x)))


def test_denormals_and_negative_zero():
    least = float(np.finfo(np.float32).smallest_subnormal)
    assert abs_max(torch.tensor([0.0, -least])) == least
    assert math.copysign(1.0, abs_max(torch.tensor([-0.0]))) == 1.0


def test_any_shape_and_strides():
    x = torch.arange(-24.0, 0.0).view(2, 3, 4)
    assert abs_max(x) == 24
    assert abs_max(x.permute(2, 0, 1)[1:, :, ::2]) == 23
    assert abs_max(torch.tensor(-2.5)) == 2.5


@pytest.mark.parametrize(
    "x, got",
    [
        ([1.0], "list"),
        (np.ones(3), "torch.float64"),
        (None, "NoneType"),
        (torch.ones(3, dtype=torch.float64), "torch.float64"),
        (torch.ones(3, dtype=torch.complex64), "torch.complex64"),
        (torch.ones(3, dtype=torch.int32), "torch.int32"),
    ],
)
def test_wrong_input(x, got):
    with pytest.raises(ValueError, match=f"abs_max: x: got .*{got}.*, expected"):
        abs_max(x)


def test_concurrent_calls():
    x = torch.randn(LARGE, generator=torch.Generator().manual_seed(0))
    x[LARGE // 3] = 99.0
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: abs_max(x), range(40))) == {99.0}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_kernels_survive_fork():
    x = torch.full((LARGE,), 3.0)
    assert abs_max(x) == 3.0  # starts the threads of the pool, which the child does not have
    child = os.fork()
    if child == 0:
        os._exit(0 if abs_max(x) == 3.0 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_worker_threads_flush_denormals_if_the_caller_does():
    """Flushing is a setting of each thread, and the assignment of work to threads is random."""
    threads, packed = torch.get_num_threads(), torch.zeros(1 << 19, dtype=torch.uint8)
    torch.set_num_threads(2)
    try:
        for flush in (False, True) * 5:
            if not torch.set_flush_denormal(flush):
                pytest.skip("this processor does not flush denormals")
            bits = torch.full((8 * packed.numel(),), 1000, dtype=torch.int32)
            signs_decode_add(packed, bits.view(torch.float32), 0.0)
            assert bool((bits == (0 if flush else 1000)).all())
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def test_columns():
    generator = torch.Generator().manual_seed(0)
    matrices = [
        torch.randn(rows, columns, generator=generator)
        for rows in (0, 1, 31, 1003)
        for columns in (0, 1, 3, 4, 5, 16, 33, 100)
    ]
    matrices[9][0, 0] = float("-inf")
    matrices[20][3, 4], matrices[20][5, 4], matrices[20][3, 0] = float("nan"), float("inf"), -1e30
    got = same_everywhere(lambda: [tuple(map(repr, of_matrix.tolist())) for of_matrix in abs_max_columns(matrices)])
    wanted = [np.max(np.abs(m.numpy()), axis=0, initial=0.0).tolist() for m in matrices]
    assert got == [tuple(map(repr, of_matrix)) for of_matrix in wanted]
    assert abs_max_columns([]) == []
    with pytest.raises(ValueError, match=r"abs_max_columns: got torch.float32 of shape \(3,\), expected \(n, r\)"):
        abs_max_columns([torch.ones(2, 2), torch.ones(3)])
