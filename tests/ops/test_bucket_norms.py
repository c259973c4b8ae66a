import numpy as np
import pytest
import torch

from gradzip.ops import bucket_norms
from reference import FLT_MAX, LARGE, SIZES, arrays, same_everywhere, sliced

ORDER = {"l2": 2, "max": np.inf, "l1": 1}


@pytest.mark.parametrize("norm", ORDER)
@pytest.mark.parametrize("n", [*SIZES, LARGE])
def test_norms(n, norm):
    for name in ("normal", "zeros", "one-hot", "denormal", "infinite", "NaN"):
        array = arrays(n)[name]
        x = sliced(array)
        finite = np.nan_to_num(array, nan=0.0, posinf=FLT_MAX, neginf=-FLT_MAX).astype(np.float64)
        for bucket in (None, 1, 7, 512, 40000) if n < 1000 else (None, 512, 40000):
            got = same_everywhere(lambda x=x, bucket=bucket: bucket_norms(x, bucket, norm))
            step = bucket or max(1, n)
            want = [np.linalg.norm(finite[i : i + step], ORDER[norm]) for i in range(0, n, step)]
            # Summed in double, rounded once.
            np.testing.assert_allclose(got.numpy(), np.minimum(want, FLT_MAX), rtol=2**-23, atol=2.0**-150)


def test_errors():
    for arguments, message in [
        ((torch.ones(3).double(),), "got torch.float64, expected torch.float32"),
        ((torch.ones(3), 0), "got bucket = 0, expected None or an integer >= 1"),
        ((torch.ones(3), 1, "l3"), "got norm = 'l3', expected 'l2', 'max' or 'l1'"),
    ]:
        with pytest.raises(ValueError, match=message):
            bucket_norms(*arguments)
