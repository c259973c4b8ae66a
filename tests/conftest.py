import collections
import functools
import itertools
import os

import pytest
import torch

import gradzip.ops._native as native
import records
import simt_build
import turns
from paths import ROOT

MOST_WORKERS = 8  # each takes memory for a torch of its own
FEW_CASES = 8  # of a test, that `make test` runs all


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run slow, low-yield tests, and all tests of tooling")
    parser.addoption(
        "--load-steps", type=int, default=120, help="steps of tests/front_ends/test_load.py (make load: 2000)"
    )


def pytest_configure(config):
    if is_worker(config):
        config.facts = config.workerinput["facts"]
        cores, workers = len(os.sched_getaffinity(0)), config.workerinput["workercount"]
        share = max(1, cores // workers)
        torch.set_num_threads(share)
        os.environ.setdefault("MAX_JOBS", str(share))  # compilers that a test runs at a time (setup.py)
    else:
        given = config.args_source != pytest.Config.ArgsSource.TESTPATHS
        # Of the parameters of a test, so many together have each of their combinations in some case; 0: all cases run.
        together = 0 if given else 2 if config.getoption("--long") else 1
        config.facts = records.load() | {"together": together, "as_committed": records.as_committed(), "given": given}
        config.pluginmanager.register(Recorder(config.facts))


def is_worker(config):
    """Return whether this process is a worker of pytest-xdist. Otherwise it runs all tests, or hands them out."""
    return hasattr(config, "workerinput")


class Recorder:
    """Hands out the records of earlier runs (records.py), and updates them at the end of this one."""

    def __init__(self, facts):
        self.facts = facts
        self.seconds, self.passed = collections.Counter(), {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["facts"] = self.facts

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        digest = dict(report.user_properties).get("covers")
        if digest and (report.when == "call" or not report.passed):
            earlier = digest if self.facts["as_committed"] else self.facts["passed"].get(report.nodeid)
            self.passed[report.nodeid] = digest if report.passed else earlier if report.skipped else None

    def pytest_sessionfinish(self):
        records.save(self.seconds, self.passed)


def why_not(config, nodeid, digest):
    """Return why a test of tooling need not run, or None. digest: of the test and what it covers."""
    passed, is_long = config.facts["passed"].get(nodeid), config.getoption("--long")
    if passed is None and config.facts["as_committed"] and not is_long:
        return "as committed, and new on this machine: --long runs it"
    if passed == digest and not (is_long and config.facts["given"]):
        return "unchanged since it passed on this machine: --long and its path run it"
    return None


@pytest.hookimpl(trylast=True)  # after pytest has put tests with the same fixtures side by side
def pytest_collection_modifyitems(config, items):
    for item in items:
        # Tests of tooling: their module says which files they cover, COVERS = ["scripts/x.sh", ...].
        if covers := getattr(getattr(item, "module", None), "COVERS", None):
            digest = records.digest(item.path, *covers)
            item.user_properties.append(("covers", digest))
            if reason := why_not(config, item.nodeid, digest):
                item.add_marker(pytest.mark.skip(reason=reason))
    chosen = [item for item in items if config.getoption("--long") or not item.get_closest_marker("long")]
    if config.facts["together"]:
        chosen = sampled(chosen, config.facts["together"])
    config.hook.pytest_deselected(items=[*set(items).difference(chosen)])  # not skipped: there are thousands
    items[:] = chosen
    if is_worker(config):
        seconds = collections.Counter()
        for item in items:
            known = config.facts["seconds"]
            seconds[unit(item.nodeid)] += known.get(item.nodeid, not known)
        items.sort(key=lambda item: -int(seconds[unit(item.nodeid)]))  # stable: the tests of a file stay together


def sampled(items, together):
    """Return the items without some cases of tests with many.

    Those left have each combination of values of so many parameters of a test.
    """
    tests = collections.defaultdict(list)
    for item in items:
        tests[item.path, getattr(item, "originalname", item.name)].append(item)
    chosen = set()
    for cases in tests.values():
        if len(cases) <= FEW_CASES:
            chosen.update(cases)
            continue
        values = {item: combinations(item.callspec.params, together) for item in cases}
        missing = set().union(*values.values())
        while missing:
            item = max(cases, key=lambda item: len(values[item] & missing))  # the first one, of several
            chosen.add(item)
            missing -= values[item]
    return [item for item in items if item in chosen]


def combinations(params, together):
    """Return the values of all sets of so many parameters."""
    named = sorted((name, repr(value)) for name, value in params.items())
    return set(itertools.combinations(named, min(together, len(named))))


@pytest.fixture
def unless_passed(request):
    """Skip a test that has passed with the same inputs, unless --long: call it with them (`simt_build.Parts`)."""

    def check(parts):
        digest = simt_build.digest([*parts, request.node.path])
        request.node.user_properties.append(("covers", digest))
        if reason := why_not(request.config, request.node.nodeid, digest):
            pytest.skip(reason)

    return check


@functools.cache
def text_of(path):
    return (ROOT / path).read_text()


def unit(nodeid):
    """Return a name of what one worker runs as a whole: a test, or a file whose tests share fixtures."""
    path = nodeid.partition("::")[0]
    return path if 'scope="module"' in text_of(path) else nodeid


def may_start_jobs(unit):
    text = text_of(unit.partition("::")[0])
    return "from launch import" in text and "\nMOSTLY_WAIT = True" not in text


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out units in the order of `pytest_collection_modifyitems`, but jobs not to workers that would wait."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return unit(nodeid)

        def _assign_work_unit(self, node):
            others = (units for other, units in self.assigned_work.items() if other is not node)
            if sum(any(map(may_start_jobs, units)) for units in others) >= turns.AT_A_TIME:
                starts_none = next((name for name in self.workqueue if not may_start_jobs(name)), None)
                self.workqueue.move_to_end(starts_none or next(iter(self.workqueue)), last=False)
            super()._assign_work_unit(node)

        def mark_test_complete(self, node, item_index, duration=0):
            super().mark_test_complete(node, item_index, duration)
            # Forget a finished unit. The base class goes through all units that it has assigned for each test.
            finished = unit(self.registered_collections[node][item_index])
            if all(self.assigned_work[node][finished].values()):
                del self.assigned_work[node][finished]

        def remove_node(self, node):
            """Of a worker that has died, the base class would hand out the test again in which it did."""
            units = self.assigned_work[node]
            died_in = next((test for tests in units.values() for test, ended in tests.items() if not ended), None)
            if died_in is None:
                return super().remove_node(node)
            units[unit(died_in)][died_in] = True
            del self.assigned_work[node]
            self.workqueue.update({name: tests for name, tests in units.items() if not all(tests.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return died_in

    config.option.loadscopereorder = False
    return Scheduler(config, log)


@pytest.fixture(scope="session", autouse=True)
def _jobs_take_turns(request, tmp_path_factory):
    if is_worker(request.config):
        turns.share(tmp_path_factory.getbasetemp().parent)


def pytest_runtest_setup(item):
    turns.needed = not getattr(item.module, "MOSTLY_WAIT", False)


def pytest_runtest_logreport(report):
    turns.end()


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
