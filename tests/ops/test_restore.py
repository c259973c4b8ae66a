import itertools
import math

import numpy as np
import pytest
import torch

from gradzip.ops import Restoration, restore_unless_finite
from reference import LARGE, Guarded, sliced

NOT_FINITE = [math.inf, -math.inf, math.nan, -math.nan]
FINITE = [0.0, -0.0, 1.0, -3.4028234663852886e38, 1e-45]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
OTHERS = [torch.uint8, torch.bool, torch.int16, torch.int32, torch.int64]


def bytes_of(x):
    """The memory of a tensor, whatever its strides are."""
    flat = x.as_strided((x.numel(),), (1,))
    return (torch.view_as_real(flat).view(-1) if x.is_complex() else flat).view(torch.uint8).numpy().copy()


def random(dtype, n, seed=0):
    """n elements with any bits."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    data = np.random.default_rng([n, seed]).integers(0, 2 if dtype == torch.bool else 256, n * itemsize, np.uint8)
    return sliced(data, offset=0).view(dtype)


@pytest.mark.parametrize("number", [*NOT_FINITE, *FINITE])
@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_targets_are_sources_or_numbers_if_it_is_not_finite(dtype, number):
    fills = [0.0, math.nan, math.inf, 1.5, -0.0] if dtype in FLOATS else [0.0]
    restorations, guards, expected = [], [], []
    for n, offset, fill in itertools.product([0, 1, 3, 8, 31, 33, 1000, 10007], (0, 1, 3), (None, *fills)):
        guards.append(Guarded(n, dtype, offset))
        target = guards[-1].out
        target.copy_(random(dtype, n))
        source = random(dtype, n, 1) if fill is None else None
        restorations.append(Restoration(target, source, 0.0 if fill is None else fill))
        after = torch.full((n,), 0.0 if fill is None else fill, dtype=dtype)
        if dtype.is_complex and fill is not None:
            after = torch.complex(after.real, after.real)
        restored = source if fill is None else after
        expected.append(bytes_of(target if math.isfinite(number) else restored))
    restore_unless_finite(torch.tensor([number]), restorations)
    for restoration, guard, after in zip(restorations, guards, expected):
        assert np.array_equal(bytes_of(restoration.target), after) and guard.intact()


@pytest.mark.parametrize("threads", [1, 2])
def test_large(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, y, z = torch.zeros(LARGE), torch.randn(LARGE), torch.zeros(LARGE, dtype=torch.float16)
        restore_unless_finite(torch.tensor(torch.nan), [Restoration(x, y), Restoration(z, None, 1.5)])
        assert torch.equal(x, y) and bool((z == 1.5).all())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "target",
    [
        torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last),
        torch.randn(7, 9).t(),
        torch.randn(3, 4, 5).permute(2, 0, 1),
        torch.randn(8, 1, 3)[:, :, :].transpose(0, 1),
        torch.randn(()),
        torch.randn(0, 3).t(),
        torch.randn(3, 2, dtype=torch.complex64).t(),
    ],
    ids=lambda x: str(tuple(x.stride())),
)  # fmt: skip
def test_any_dense_strides(target):
    source = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype).copy_(target * 2 + 1)
    expected = source.clone()
    restore_unless_finite(torch.tensor(math.inf), [Restoration(target, source)])
    assert torch.equal(target, expected)
    restore_unless_finite(torch.tensor(math.inf), [Restoration(target, None)])
    assert not target.any()


def test_strides_of_single_elements_do_not_matter():
    target, source = torch.zeros(1, 5), torch.randn(5, 3)[:, :1].contiguous().t()
    assert target.stride() != source.stride()
    restore_unless_finite(torch.tensor(math.nan), [Restoration(target, source)])
    assert torch.equal(target, source)


def test_nothing():
    restore_unless_finite(torch.tensor(math.nan), [])


@pytest.mark.parametrize(
    ("restoration", "says"),
    [
        (Restoration(torch.zeros(4, 4)[:, ::2], None), r"got shape \(4, 2\) and strides \(4, 2\), expected dense"),
        (Restoration(torch.zeros(3).expand(2, 3), None), r"got shape \(2, 3\) and strides \(0, 1\), expected dense"),
        (Restoration(torch.zeros(9).as_strided((3, 3), (2, 2)), None), "expected dense memory"),
        (Restoration([1.0], None), "target: got list, expected a torch tensor"),
        (Restoration(torch.zeros(3, device="meta"), None), "got a tensor on meta, expected one on cpu"),
        (Restoration(torch.zeros(3, dtype=torch.complex64).conj(), None), "lazily conjugated"),
        (Restoration(torch.zeros(3), torch.zeros(4)), r"got torch.float32 of shape \(4,\).*expected .* \(3,\)"),
        (Restoration(torch.zeros(3), torch.zeros(3).double()), "got torch.float64"),
        (Restoration(torch.zeros(3, 4), torch.zeros(4, 3).t()), r"strides \(1, 3\).*expected .* strides \(4, 1\)"),
        (Restoration(torch.zeros(3).cfloat(), torch.zeros(3).cfloat().conj()), "or negated, expected"),
        (Restoration(torch.zeros(3), torch.zeros(3, device="meta")), "on meta, expected .* on cpu"),
        (Restoration(torch.zeros(3, dtype=torch.int32), None, math.nan), "got fill = nan for torch.int32, expected 0"),
    ],
)
def test_wrong_input(restoration, says):
    x = torch.ones(3)
    with pytest.raises(ValueError, match=f"restore_unless_finite.*{says}"):
        restore_unless_finite(torch.tensor(math.nan), [Restoration(x, None), restoration])
    assert bool((x == 1).all())


def test_wrong_number():
    for number in (torch.zeros(2), torch.zeros(1).double(), 1.0):
        with pytest.raises(ValueError, match="restore_unless_finite: number: got .*, expected"):
            restore_unless_finite(number, [])
