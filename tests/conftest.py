import pytest
import torch

import gradzip.ops._native as native


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run what takes long for what it shows beside the rest")
    parser.addoption("--load-steps", type=int, default=120, help="steps of tests/test_load.py (make load: 2000)")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: make test ARGS=--long"))


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def simd(request):
    """Each instruction set that this processor has."""
    module = native.kernels()
    if request.param not in module.simd_levels():
        pytest.skip(f"this processor has no {request.param}")
    before = module.simd()
    module.set_simd(request.param)
    yield request.param
    module.set_simd(before)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def one_thread():
    """With more, torch adds up products of matrices in more parts; ranks under a launcher have one, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
