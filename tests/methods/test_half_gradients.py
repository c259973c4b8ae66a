"""16-bit gradients have the averages of the same numbers in float32, rounded once."""

import pytest
import torch

import gradzip
import kinds
from contract import gradient
from gradzip.engines.local import drive
from gradzip.methods.base.group import averaged
from gradzip.watch.replay import recorded

SHAPES = {"a": (33, 41), "b": (16, 8, 3, 3), "c": (1, 1031)}
NAMES = list(SHAPES)
HALF = [torch.float16, torch.bfloat16]
READERS = kinds.without_residuals(lambda c: c.reads_half and getattr(c, "exchange", None) != "auto")

MOMENTA = ["momentum:inner=topk(theta=0.9),beta=0.5", "momentum:inner=acpsgd"]
OTHERS = [spec for spec in kinds.FIRST if gradzip.parse(spec).keeps_residual]


def grads_of(rank, step, dtype):
    return {name: gradient(name, rank, step, shape).to(dtype) for name, shape in SHAPES.items()}


def compresses(compressor, shape):
    """Whether a gradient of this shape is compressed. Others are averaged in their own type."""
    return not compressor.bypasses(torch.empty(shape))


def adjacent(grads):
    """The same gradients, one after the other in memory."""
    flat = torch.cat([g.reshape(-1) for g in grads.values()])
    pieces = flat.split([g.numel() for g in grads.values()])
    return {name: piece.view(SHAPES[name]) for name, piece in zip(grads, pieces)}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "spec",
    kinds.params([*kinds.with_other_exchanges(READERS), *OTHERS], [*kinds.SAMPLE, "signsgd:error_feedback=False"]),
)
def test_averages_are_those_in_float32_rounded_once(spec, size, dtype):
    """Steps of a group, in one piece of memory or several; one step is skipped. Residuals are equal, too."""
    half, wide = (gradzip.LocalGroup(gradzip.parse(spec), size) for _ in range(2))
    compressed = [name for name in NAMES if compresses(gradzip.parse(spec), SHAPES[name])]
    for step in range(4):
        grads = [grads_of(rank, step, dtype) for rank in range(size)]
        if step == 2:
            grads[-1]["b"].view(-1)[5] = torch.nan
        expected = wide.step([{name: g.float() for name, g in of.items()} for of in grads])
        got = half.step(list(map(adjacent, grads)) if step % 2 else grads)
        for of_rank, wanted in zip(got, expected):
            for name in compressed:
                exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
                torch.testing.assert_close(of_rank[name], wanted[name].to(dtype), **exactly)
            assert of_rank["b"].isnan().all() == (step == 2)
    for one, other in zip(half.compressors, wide.compressors):
        for name, state in one.states.items():
            for field in ("residual", "owner_residual"):
                mine, theirs = (getattr(s, field, None) for s in (state, other.states[name]))
                assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs))


def sent(spec, grads):
    """The tensors that ranks, one for each gradient, give to collectives in a step; and the averages."""
    seen, grads = [], [grad.clone(memory_format=torch.preserve_format) for grad in grads]
    compressors = [gradzip.parse(spec) for _ in grads]

    def note(request):
        if hasattr(request, "tensor"):
            seen.append(request.tensor.clone())

    ranks = range(len(grads))
    drive([recorded(averaged(compressors[r], grads[r], "w", r, len(grads)), note) for r in ranks])
    return seen, grads


@pytest.mark.parametrize("spec", kinds.params(READERS, [*kinds.SAMPLE, "signsgd:error_feedback=False"]))
def test_payloads_are_those_of_the_float32_numbers(spec):
    """Of matrices and kernels, of odd sizes, at odd addresses, and of other strides."""
    compressor, shapes = gradzip.parse(spec), [(33, 41), (1, 1025), (1031, 3), (16, 8, 3, 3), (130, 64)]
    for i, shape in enumerate(shape for shape in shapes if compresses(compressor, shape)):
        for dtype in HALF:
            wide = [gradient("w", rank, i, shape).to(dtype).float() for rank in range(2)]
            payloads, expected = sent(spec, wide)
            for arrange in (torch.clone, misaligned, permuted):
                got, averages = sent(spec, [arrange(grad.to(dtype)) for grad in wide])
                assert len(got) == len(payloads) and all(map(torch.equal, got, payloads))
                assert all(map(torch.equal, averages, [average.to(dtype) for average in expected]))


def misaligned(x):
    """The same numbers, at an address that is a multiple of 2 alone."""
    return torch.cat([x.new_zeros(1), x.view(-1)])[1:].view(x.shape)


def permuted(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("spec", ["block-float", "block-float:error_feedback=False", "qsgd:coding=packed", "natural"])
def test_a_finite_average_that_float16_does_not_hold_skips_the_step(spec):
    group = gradzip.LocalGroup(gradzip.parse(spec), 2)
    grad = torch.full((64, 64), 65504.0).half()
    group.average([grad.clone() * 0, grad.clone() * 0], "w")
    state = group.compressors[0].states.get("w")
    if state is not None and state.residual is not None:
        state.residual.add_(1e6)
    elif spec == "natural":
        grad[0] = 40000.0  # may become 65536
    else:
        return  # no average exceeds the largest gradient
    assert group.average([grad.clone(), grad.clone()], "w")[0].isnan().all()
    assert group.compressors[0].last_step_skipped


def test_a_residual_of_another_method_is_added_in_float32():
    phases = gradzip.Phases({0: gradzip.TopK(theta=0.99), 1: gradzip.BlockFloat(error_feedback=False)})
    half, wide = (gradzip.LocalGroup(phases, 2) for _ in range(2))
    for step in range(3):
        grads = [gradient("w", rank, step, (64, 48)).bfloat16() for rank in range(2)]
        expected = wide.average([g.float() for g in grads], "w")[0]
        assert torch.equal(half.average(grads, "w")[0], expected.bfloat16())
    assert not expected.bfloat16().float().equal(expected)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@pytest.mark.parametrize("spec", ["onebit", "topk", "powersgd", "acpsgd", *MOMENTA])
def test_residuals_are_added_to_gradients_of_any_strides_and_type(spec, dtype):
    """Methods of lists and of vectors; with a momentum, it comes first."""
    permuted, plain = (gradzip.LocalGroup(gradzip.parse(spec), 2) for _ in range(2))
    for step in range(3):
        grads = [grads_of(rank, step, dtype) for rank in range(2)]
        grads = [{"a": of["a"].T.contiguous().T, "b": of["b"].to(memory_format=torch.channels_last)} for of in grads]
        assert not any(g.is_contiguous() for of in grads for g in of.values())
        expected = plain.step([{name: g.float().contiguous() for name, g in of.items()} for of in grads])
        for of_rank, wanted in zip(permuted.step(grads), expected):
            assert all(torch.equal(average, wanted[name].to(dtype)) for name, average in of_rank.items())
    for one, other in zip(permuted.compressors, plain.compressors):
        assert one.states.keys() == other.states.keys() and one.states
        assert all(torch.equal(state.residual, other.states[name].residual) for name, state in one.states.items())
