import os
from pathlib import Path

import pytest
import torch

import gradzip.ops._native as native

MOST_WORKERS = 8  # each takes memory for a torch of its own

# Files that import launch.py start jobs of several ranks. One worker runs them all, a job at a time.
JOBS = {path.name for path in Path(__file__).parent.glob("test_*.py") if "\nfrom launch import" in path.read_text()}
# Long tests, independent of each other: handed out one by one, after the jobs, before the other files.
LONG = ["test_docker.py", "test_sanitized.py", "test_fuzz.py", "test_simt.py", "test_races.py", "test_nvrtc_launch.py"]
LONG += ["test_cuda.py"]


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run slow, low-yield tests")
    parser.addoption("--load-steps", type=int, default=120, help="steps of tests/test_load.py (make load: 2000)")


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # a process of pytest-xdist: workers share the cores
        cores, workers = len(os.sched_getaffinity(0)), config.workerinput["workercount"]
        share = max(1, cores // workers)
        torch.set_num_threads(share)
        os.environ.setdefault("MAX_JOBS", str(share))  # compilers that a test runs at a time (setup.py)


@pytest.hookimpl(trylast=True)  # after pytest has put tests with the same fixtures side by side
def pytest_collection_modifyitems(config, items):
    order = {name: number for number, name in enumerate([*sorted(JOBS), *LONG])}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: make test ARGS=--long"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out tests in the order of `pytest_collection_modifyitems`, in units that one worker runs as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            name = Path(path).name
            return "jobs" if name in JOBS else nodeid if name in LONG else path

    config.option.loadscopereorder = False
    return Scheduler(config, log)


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
    """Use one thread, as ranks under a launcher do: with more, torch splits a matrix product into other sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
