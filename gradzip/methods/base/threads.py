"""The number of threads that torch uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU operations in one thread.

    This is faster for decompositions of small matrices, where threads synchronise in every step. It also fixes the
    order of additions where an operation splits its work by the number of threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
