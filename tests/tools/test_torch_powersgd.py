"""benchmarks/torch_powersgd.py: the order of the all-reduces of two ranks."""

import pytest

from benchmarks.torch_powersgd import order, run


def test_the_first_difference_is_named():
    assert order(["3", "4"], ["3", "4", "5"]) == "both ranks in the same order"
    assert order(["3", "4", "6"], ["3", "5"]) == "number 1 has 4 elements on rank 0 and 5 on rank 1"


@pytest.mark.long
def test_gradzips_hook_starts_all_operations_in_one_order():
    ended = run("gradzip")
    assert ended.startswith("ended after ") and ended.endswith("; both ranks in the same order")
