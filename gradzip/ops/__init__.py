"""Primitives over torch tensors.

The arguments are checked here; C++ kernels (csrc/cpu) compute the result on torch.get_num_threads() threads, or CUDA
kernels (csrc/cuda) if the tensors are on a CUDA device, on its current stream.

All primitives are deterministic: the same input gives the same bits for any number of threads, instruction set or
device. On CUDA they do not wait for the device unless their docstring says so.

In place of tensors they take arrays of NumPy, of CuPy, and of other libraries with ``__dlpack__`` or
``__cuda_array_interface__`` (arrays.py), without a copy. The first array decides what results are: NumPy's or CuPy's
arrays for those of NumPy and CuPy, torch tensors for all others. With CuPy's arrays, work is queued on CuPy's current
stream. Errors call arrays tensors.

>>> import numpy as np
>>> select_threshold(np.array([1, -3, 2], dtype=np.float32), 2)
array(2., dtype=float32)
"""

import torch  # noqa: F401  (for the examples of functions, which run here, too)

from . import tensors
from .arrays import take_arrays as _take_arrays
from .tensors import *  # noqa: F403

__all__ = [name for name in vars(tensors) if not name.startswith("_")]

_take_arrays(globals(), __all__)
