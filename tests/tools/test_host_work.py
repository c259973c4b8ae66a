"""How many Python functions gradzip calls in a step on a device, counted on a stand-in: at most those stored."""

import functools
import platform
import shutil
import sys
import weakref

import pytest
import torch

import gradzip
import kinds
from benchmarks import host_work
from benchmarks.common.results import stored
from benchmarks.host_work import (
    COUNTED,
    FRONT_ENDS,
    GOALS,
    GROWTH,
    MODEL,
    RECORD,
    SIZES,
    STORED,
    goal,
    load,
)
from gradzip import _C
from gradzip.averaging import optimizer_hooks
from gradzip.averaging.buckets import cut
from gradzip.averaging.optimizer_hooks import Skip
from gradzip.cli import models
from gradzip.collectives import cost
from gradzip.methods.base.registry import registered

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")

CELLS = load(STORED)
SPECS = host_work.default_specs()
FEW, MANY = SIZES
# By default, a method of each kind, and the two that do least.
USUAL = {"none", "fp16", *{kinds.kind(spec): spec for spec in (*reversed(SPECS), "topk", "signsgd")}.values()}


def growth(spec):
    """The stored calls with many ranks, as a multiple of those with few: under the front end where that is more."""
    return max(CELLS[spec, front_end, MANY].calls / CELLS[spec, front_end, FEW].calls for front_end in FRONT_ENDS)


def calls(compressor, front_end, size=FEW):
    """The calls of a step."""
    return host_work.count(compressor, MODEL, size, front_end).calls.total() / COUNTED


@functools.cache
def slack():
    """Other versions of Python and torch make other calls of their own."""
    with stored(STORED) as document:
        recorded = document["provenance"]
    return 1 if (recorded["python"], recorded["torch"]) == (platform.python_version(), torch.__version__) else 1.05


def check(count, most, spec):
    """Fail if there are more calls than `most`."""
    assert count <= most, (
        f"{spec}: got {count:g} calls, expected at most {most:g}; to see which, run python -m benchmarks.host_work "
        f"{spec!r} --top; if they are worth it, record them: {RECORD} {spec!r}, then --write"
    )


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("spec", kinds.params(SPECS, USUAL))
def test_calls_are_at_most_those_stored(spec, front_end):
    check(calls(gradzip.parse(spec), front_end), slack() * CELLS[spec, front_end, FEW].calls, spec)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("spec", kinds.params([spec for spec in SPECS if growth(spec) <= GROWTH], ["powersgd"]))
def test_calls_do_not_grow_with_the_ranks(spec, front_end):
    check(calls(gradzip.parse(spec), front_end, MANY), slack() * GROWTH * CELLS[spec, front_end, FEW].calls, spec)


def test_calls_of_other_methods_grow_less_than_the_ranks():
    """`pytest -rP` shows which: they decode the payloads of one rank after the other."""
    for spec in SPECS:
        ratio = growth(spec)
        if ratio > GROWTH:
            print(f"{spec}: {ratio:.2f} times as many calls with {MANY} ranks as with {FEW}")
            assert ratio < MANY / FEW


def test_the_pending_step_of_another_model_costs_no_calls(monkeypatch):
    parameter = torch.nn.Parameter(torch.ones(1))
    alone = calls(gradzip.NoCompression(), "ddp")
    pending = Skip(parameters={id(parameter): weakref.ref(parameter)})
    monkeypatch.setitem(optimizer_hooks._verdicts, id(parameter), pending)
    assert calls(gradzip.NoCompression(), "ddp") == alone
    assert optimizer_hooks._verdicts == {id(parameter): pending}


# --- what is printed


def test_goals():
    assert [goal(spec) for spec in ("none", "randomk:theta=0.9", "qsgd", "momentum:inner=acpsgd")] == [
        500,
        900,
        1200,
        1200,
    ]
    named = {name for names, _ in GOALS for name in names}
    assert named <= set(registered())


# --- the counter


def helper():
    pass


class Slower(gradzip.NoCompression):
    """Calls a function more for each gradient."""

    def complete_step(self, names):
        for _ in names:
            helper()


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_call_more_for_each_gradient_exceeds_the_ceiling(front_end):
    host = host_work.count(Slower(), MODEL, FEW, front_end)
    shapes, _ = host_work.shapes_of(MODEL)
    assert host.calls[helper.__code__] == COUNTED * len(shapes) == COUNTED * 161
    most = calls(gradzip.NoCompression(), front_end)
    assert host.calls.total() == COUNTED * (most + len(shapes))
    check(most, most, "none")
    with pytest.raises(AssertionError, match=r"got \d+ calls, expected at most \d+; .* record them"):
        check(host.calls.total() / COUNTED, most, "none")


@pytest.mark.parametrize(("front_end", "opcodes"), [("ddp", True), ("horovod", False)])
def test_two_runs_have_equal_counts(front_end, opcodes):
    """Also if one of them counts bytecodes."""
    first, second = (
        host_work.count(gradzip.parse("none"), MODEL, FEW, front_end, opcodes=on) for on in (False, opcodes)
    )
    assert first.calls == second.calls and first.torch_ops == second.torch_ops
    assert not first.bytecodes
    if opcodes:
        assert second.bytecodes.keys() == second.calls.keys()
        assert all(second.bytecodes[code] >= n for code, n in second.calls.items())


def test_nothing_stays_patched():
    attributes = [_C, torch.Tensor, torch.cuda, torch.futures.Future, torch.autograd.Variable]
    before = [dict(vars(holder)) for holder in attributes]
    threads = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), host_work.stand_in() as host:
        assert host.run(lambda x: (x.is_cuda, x.is_cpu, x.device.type), torch.ones(3)) == (True, False, "cuda")
        assert torch.ones(3).is_cpu
        host.run(lambda: 1 / 0)
    assert [dict(vars(holder)) for holder in attributes] == before
    assert torch.get_num_threads() == threads and sys.getprofile() is None and torch.ones(3).is_cpu


# --- smaller gradients


def sizes(shapes):
    return [torch.empty(shape, device="meta") for shape in shapes]


@pytest.fixture(scope="module")
def networks():
    """The gradients of the network, those that are counted, and the share of their bytes."""
    shapes, share = host_work.shapes_of(MODEL)
    return sizes(p.shape for p in models.MODELS[MODEL]()), sizes(shapes.values()), share


@pytest.mark.parametrize("spec", SPECS)
def test_as_many_gradients_are_compressed(networks, spec):
    whole, small, _ = networks
    compressed = [[not gradzip.parse(spec).bypasses(gradient) for gradient in of] for of in (whole, small)]
    assert compressed[0] == compressed[1]


def test_horovod_has_as_many_buckets(networks, monkeypatch):
    whole, small, share = networks
    expected = len(cut(whole, host_work.BUCKET))
    monkeypatch.setattr(cost, "SMALL_BUCKET_NBYTES", share * cost.SMALL_BUCKET_NBYTES)
    assert len(cut(small, share * host_work.BUCKET)) == expected > 2
