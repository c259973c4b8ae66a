"""`Momentum` against its formulas in plain torch: what is lost, the warm-up, checkpoints, steps that are not finite."""

import dataclasses
import math

import pytest
import torch

import gradzip
import kinds
from contract import SHAPES, assert_equal_states, gradient, kept_residual, through_file
from gradzip import LocalGroup, Momentum, SignSGD, TopK
from gradzip.methods.spec import unparse

SIZES = [1, 2, 3, 4]


def grads_of(step, size, name="w", scale=1.0):
    return [scale * gradient(name, rank, step) for rank in range(size)]


def average(group, step, name="w"):
    averages = group.average(grads_of(step, len(group.compressors), name), name)
    assert all(torch.equal(one, averages[0]) for one in averages)
    return averages[0]


def momenta(group, name="w"):
    return [compressor.memory.piece(name, "momentum") for compressor in group.compressors]


class Reference:
    """The docstring's formulas for signs with a scale and error feedback, in float64."""

    def __init__(self, size, beta, warmup):
        self.size, self.beta, self.warmup, self.step = size, beta, warmup, 0
        self.momentum, self.residuals = 0.0, [0.0] * size

    def average(self, grads):
        grads, self.step = [grad.double() for grad in grads], self.step + 1
        if self.step <= self.warmup:
            mean = sum(grads) / self.size
            self.momentum = self.beta * self.momentum + mean
            return mean
        offers = [self.beta * self.momentum + grad + r for grad, r in zip(grads, self.residuals)]
        sent = [offer.sign() * offer.abs().mean() for offer in offers]
        self.residuals = [offer - one for offer, one in zip(offers, sent)]
        previous, self.momentum = self.momentum, sum(sent) / self.size
        return self.momentum - self.beta * previous


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("beta, warmup", [(0.9, 3), (0.5, 0), (0.0, 1)])
def test_follows_its_formulas(size, beta, warmup):
    group = LocalGroup(Momentum(SignSGD(majority=False), beta, warmup), size)
    reference = Reference(size, beta, warmup)
    for step in range(12):
        expected = reference.average(grads_of(step, size))
        # Rounding in float32 does not change a sign here: the smallest offer is far above it.
        torch.testing.assert_close(average(group, step).double(), expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(momenta(group)[0].double(), reference.momentum, rtol=0, atol=2e-5)
    for compressor, residual in zip(group.compressors, reference.residuals):
        torch.testing.assert_close(compressor.memory.piece("w", "residual").double(), residual, rtol=0, atol=2e-5)


def alone(compressor):
    return compressor.parts == [compressor] and compressor.averaged_momentum is None


WITH_FEEDBACK = kinds.examples(lambda c: alone(c) and c.keeps_residual and not c.optimizer_momentum)
LOSSLESS = [spec for spec in WITH_FEEDBACK if gradzip.parse(spec).residual_decay == 1]
UNBIASED = kinds.examples(lambda c: alone(c) and c.unbiased and not isinstance(c, gradzip.NoCompression))


def group_of(inner, size, beta=0.9, warmup=2):
    return LocalGroup(Momentum(gradzip.parse(inner), beta, warmup), size)


@pytest.mark.parametrize("inner", LOSSLESS)
@pytest.mark.parametrize("size", [1, 3])
def test_nothing_is_lost(inner, size):
    """Sum of averages + mean residual = sum of mean gradients, so their momenta add up to the same, too.

    The momentum that an optimizer computes of the averages is the shared one.
    """
    beta, steps = 0.9, 25
    group = group_of(inner, size, beta, 4)
    exact = given = own = 0.0
    for step in range(steps):
        grads = grads_of(step, size)
        handed = average(group, step).double()
        exact, given = exact + sum(grad.double() for grad in grads) / size, given + handed
        own = beta * own + handed
        torch.testing.assert_close(momenta(group)[0].double(), own, rtol=0, atol=1e-4)
    saved = [compressor.state_dict()["states"]["w"] for compressor in group.compressors]
    residual = sum(kept_residual(fields).double() for fields in saved) / size
    largest = max(residual.abs().max().item(), momenta(group)[0].abs().max().item())
    bound = steps * 80 * 2**-24 * largest
    assert residual.abs().max() > 10 * bound
    assert (given + residual - exact).abs().max() < bound


@pytest.mark.parametrize("inner", WITH_FEEDBACK + UNBIASED)
def test_replicas_have_the_same_momentum(inner):
    group = group_of(inner, 3)
    for step in range(6):
        average(group, step), average(group, step, "v")
        if group.compressors[0].states:
            names = group.compressors[0].states
            assert all(torch.equal(m, momenta(group, name)[0]) for name in names for m in momenta(group, name))


def test_warm_up_is_exact_and_counts_the_steps_of_each_parameter():
    group, plain = LocalGroup(Momentum(TopK(theta=0.9), warmup_steps=3), 3), LocalGroup(gradzip.NoCompression(), 3)
    for step in range(5):
        exact = plain.average(grads_of(step, 3), "w")[0]
        assert torch.equal(average(group, step), exact) == (step < 3)
    late = plain.average(grads_of(9, 3, "v"), "v")[0]
    assert torch.equal(average(group, 9, "v"), late)  # a parameter that is trained later has a warm-up of its own


def test_the_state_of_another_inner_method_is_refused():
    saved = Momentum(TopK(theta=0.9)).state_dict()
    with pytest.raises(
        ValueError, match=r"Momentum.load_state_dict: got the state of 'TopK', expected that of 'SignSGD'"
    ):
        Momentum(SignSGD()).load_state_dict(saved)
    del saved["inner"]  # as it was saved before
    Momentum(SignSGD()).load_state_dict(saved)


def test_small_gradients_keep_no_momentum():
    group = LocalGroup(Momentum(SignSGD(), warmup_steps=1), 2)
    for step in range(3):
        torch.testing.assert_close(average(group, step, "b"), sum(grads_of(step, 2, "b")) / 2)
    assert not group.compressors[0].states


@pytest.mark.parametrize("inner", WITH_FEEDBACK)
@pytest.mark.parametrize("last", [2, 5])
def test_a_checkpoint_continues_to_the_bit(inner, last):
    """In the warm-up and after it; momenta are stored once for all ranks."""
    group, other = (group_of(inner, 2, warmup=3) for _ in range(2))
    for step in range(last):
        average(group, step)
    merged = gradzip.checkpoint.merge([compressor.state_dict() for compressor in group.compressors])
    assert "momentum" in merged["common"]["states"]["w"] and "momentum" not in merged["ranks"][0]["states"]["w"]
    for rank, compressor in enumerate(other.compressors):
        compressor.load_state_dict(gradzip.checkpoint.shard(through_file(merged), rank, 2))
    for step in range(last, last + 3):
        assert torch.equal(average(other, step), average(group, step))
    for a, b in zip(group.compressors, other.compressors):
        assert_equal_states(a.state_dict(), b.state_dict())


@pytest.mark.parametrize("spec", gradzip.Momentum.examples)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("when", [1, 4])
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing(spec, bad, when):
    """Neither momenta nor residuals of any parameter, nor the end of the warm-up."""
    group, spared = LocalGroup(gradzip.parse(spec), 3), LocalGroup(gradzip.parse(spec), 3)
    for step in range(6):
        of_ranks = [{name: gradient(name, rank, step) for name in SHAPES} for rank in range(3)]
        if step == when:
            before = [compressor.state_dict() for compressor in group.compressors]
            spoilt = [{name: grad.clone() for name, grad in of.items()} for of in of_ranks]
            spoilt[2]["v"][3, 4] = bad
            before = [through_file(one) for one in before]
            assert not group.step(spoilt)[0]["v"].isfinite().all()
            for was, compressor in zip(before, group.compressors):
                assert_equal_states(was, compressor.state_dict())
        expected = spared.step(of_ranks)
        for got, wanted in zip(group.step(of_ranks), expected):
            assert all(torch.equal(got[name], wanted[name]) for name in SHAPES)


def test_a_momentum_that_would_overflow_skips_the_step():
    """float16: 1.9 times the bound of the momentum is above 65504; float32 in the warm-up: the momentum is."""
    group = LocalGroup(Momentum(SignSGD(majority=False)), 2)
    ones = torch.ones(64, 48)
    assert group.average([(30000 * ones).half()] * 2, "w")[0].isfinite().all()
    assert not group.average([(30000 * ones).half()] * 2, "w")[0].isfinite().all()
    group = LocalGroup(Momentum(SignSGD(majority=False), warmup_steps=9), 2)
    finite = [group.average([1e38 * ones] * 2, "w")[0].isfinite().all().item() for _ in range(6)]
    assert finite == [True] * 3 + [False] * 3  # the momentum is 1, 1.9, 2.71 times 1e38; 3.439e38 is above 3.403e38


def test_a_residual_moves_to_and_from_other_methods():
    """Residuals have the unit of gradients: under Phases, nothing is lost."""
    phases = gradzip.Phases({0: TopK(theta=0.9), 3: Momentum(SignSGD(), warmup_steps=2), 9: gradzip.OneBitSGD()})
    group, exact, given = LocalGroup(phases, 2), 0.0, 0.0
    for step in range(14):
        exact = exact + sum(grad.double() for grad in grads_of(step, 2)) / 2
        given = given + average(group, step).double()
        if step == 4:  # the warm-up sends what TopK has left
            torch.testing.assert_close(given, exact, rtol=0, atol=1e-5)
    residual = sum(c.parts[2].memory.piece("w", "residual").double() for c in group.compressors) / 2
    assert residual.abs().max() > 0.1
    torch.testing.assert_close(given + residual, exact, rtol=0, atol=1e-4)


def test_chunks_of_a_node_end_their_warm_up_together():
    """Other ranks have other chunks, of which one may be 0: optimizers must be told the same on all ranks."""
    group = LocalGroup(gradzip.Hierarchical(Momentum(SignSGD(majority=False), warmup_steps=3)), size=(2, 2))
    for step in range(6):
        gradient = torch.randn(128, 64)
        gradient[64:] *= step > 3
        group.average([gradient] * 4, "w")
        states = [compressor.inner.memory.find("w") for compressor in group.compressors]
        told = {compressor.inner.compresses_momentum(s) for compressor, s in zip(group.compressors, states)}
        assert told == {step >= 2}


# --- warmup_steps="auto"

LAST = 40


def auto(inner=None, beta2=0.8):
    return Momentum(inner or SignSGD(majority=False), warmup_steps="auto", beta2=beta2)


def settling(step, size, names=tuple(SHAPES), scale=1.0):
    """Gradients of all ranks: those of w fall, the others stay as large as they are."""
    factors = dict.fromkeys(names, scale) | {"w": scale * (1 + 2 * math.exp(-step / 3))}
    return [{name: factors[name] * gradient(name, rank, step) for name in names} for rank in range(size)]


def expected_end(steps, beta2, names=("v", "w")):
    """The docstring's rule from the second moments of all elements, in float64: the last step of the warm-up.

    steps: the gradients of all ranks, of each step.
    """
    sums, v = [], 0.0  # ||v|| after each step, not corrected for its bias
    for t, grads in enumerate(steps, start=1):
        squares = [(sum(of[name].double() for of in grads) / len(grads)).square().flatten() for name in names]
        v = beta2 * v + (1 - beta2) * torch.cat(squares)
        sums.append(v.sum().item())
        weights = [beta2**k for k in range(t)]  # of ||v|| of k steps ago, whose bias is 1 - beta2^(t - k)
        total = sum(weight * (1 - beta2 ** (t - k)) for k, weight in enumerate(weights))
        formerly = sum(weight * sums[t - 1 - k] for k, weight in enumerate(weights)) / total
        if t >= 2 / (1 - beta2) - 1e-9 and 0.96 < (sums[-1] / (1 - beta2**t)) / formerly < 1 / 0.96:
            return t
    raise AssertionError("does not settle")


def ends(group):
    """After how many steps warm-ups have ended, by parameter: the same on all ranks."""
    per_rank = []
    for compressor in group.compressors:
        states = [state for part in compressor.parts for state in part.states.values()]
        per_rank.append({name: getattr(s, "warmup_steps", None) for s in states for name in s.shapes})
    assert all(of_rank == per_rank[0] for of_rank in per_rank)
    return per_rank[0]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("inner", [SignSGD(majority=False), TopK(theta=0.9)])
@pytest.mark.parametrize("beta2", [0.5, 0.8])
def test_warm_up_ends_when_the_second_moment_has_settled(inner, size, beta2):
    """For all compressed parameters in one step, also in buckets that are compressed as one (TopK)."""
    last = expected_end([settling(step, size) for step in range(LAST)], beta2)
    assert 2 / (1 - beta2) + 3 < last < LAST - 3  # w falls for longer than the shortest warm-up
    group, plain = LocalGroup(auto(inner, beta2), size), LocalGroup(gradzip.NoCompression(), size)
    for step in range(LAST):
        grads = settling(step, size)
        got, exact = group.step(grads)[0], plain.step(grads)[0]
        assert [torch.equal(got[name], exact[name]) for name in SHAPES] == [True, step < last, step < last]
        assert ends(group) == dict.fromkeys(("v", "w"), last if step + 1 >= last else None)


def test_gradients_that_are_zero_do_not_end_the_warm_up():
    group = LocalGroup(auto(), 2)
    for _ in range(20):
        group.step([{"w": torch.zeros(64, 48)}] * 2)
    assert ends(group) == {"w": None}
    for step in range(LAST):  # and then as if they had been the first ones
        group.step(settling(step, 2))
    assert ends(group)["w"] is not None


def test_late_parameters_have_a_warm_up_of_their_own():
    group, last = LocalGroup(auto(), 2), expected_end([settling(step, 2) for step in range(LAST)], 0.8)
    for step in range(LAST):
        group.step(settling(step, 2))
    for step in range(LAST, LAST + 15):
        group.step(with_late(step))
    late = expected_end([with_late(step) for step in range(LAST, LAST + 15)], 0.8, ("late",))
    assert ends(group) == {"v": last, "w": last, "late": late} and late < last


def with_late(step):
    return [{**of, "late": gradient("late", rank, step, (40, 40))} for rank, of in enumerate(settling(step, 2))]


def test_steps_that_are_skipped_and_loss_scales_do_not_change_the_end():
    class Scaler:
        scale = 1024.0

        def get_scale(self):
            return self.scale

    scaler = Scaler()
    group, last = LocalGroup(auto().follow(scaler), 2), expected_end([settling(step, 2) for step in range(LAST)], 0.8)
    for step in range(LAST):
        if step % 4 == 3:
            bad = settling(step, 2, scale=scaler.scale)
            bad[1]["v"][0, 0, 0, 0] = math.nan
            before = through_file(group.compressors[0].state_dict())
            group.step(bad)
            assert_equal_states(before, group.compressors[0].state_dict())
            scaler.scale /= 2
        group.step(settling(step, 2, scale=scaler.scale))
        assert ends(group) == dict.fromkeys(("v", "w"), last if step + 1 >= last else None)


@pytest.mark.parametrize("inner", [SignSGD(majority=False), TopK(theta=0.9)])
@pytest.mark.parametrize("when", [5, 30])
def test_a_checkpoint_continues_the_warm_up(inner, when):
    group, other = LocalGroup(auto(inner), 2), LocalGroup(auto(inner), 2)
    for step in range(when):
        group.step(settling(step, 2))
    merged = gradzip.checkpoint.merge([compressor.state_dict() for compressor in group.compressors])
    for rank, compressor in enumerate(other.compressors):
        compressor.load_state_dict(gradzip.checkpoint.shard(through_file(merged), rank, 2))
    for step in range(when, LAST):
        group.step(settling(step, 2)), other.step(settling(step, 2))
        assert ends(group) == ends(other)
    assert None not in ends(group).values()


@pytest.mark.parametrize(("spec", "first"), [("phases:0=none,3=", 3), ("per-layer:default=none,[vw]=", 0)])
def test_warm_ups_end_in_methods_that_are_made_of_it(spec, first):
    method = gradzip.parse(f"{spec}momentum(inner=signsgd(majority=False),warmup_steps=auto,beta2=0.8)")
    group, last = LocalGroup(method, 2), expected_end([settling(step, 2) for step in range(first, LAST)], 0.8)
    for step in range(LAST):
        group.step(settling(step, 2))
    assert {name: end for name, end in ends(group).items() if name != "b"} == {"v": last, "w": last}


def test_between_nodes_and_in_a_layer():
    """`Hierarchical` and `PerLayer` are made of it as of any method."""
    inner = Momentum(SignSGD(majority=False), warmup_steps=1)
    group = LocalGroup(gradzip.Hierarchical(inner), (2, 2))
    peers = LocalGroup(inner, 2)  # of the second place: the lower half of the rows
    for step in range(4):
        grads = grads_of(step, 4)
        nodes = [(grads[0] + grads[1]) / 2, (grads[2] + grads[3]) / 2]
        expected = peers.average([node[32:] for node in nodes], "w")[0]
        torch.testing.assert_close(group.average(grads, "w")[0][32:], expected, rtol=0, atol=1e-5)
    layers = LocalGroup(gradzip.PerLayer([("^w", inner)]), 2)
    average(layers, 0), average(layers, 0, "v")
    assert [*layers.compressors[0].parts[0].states] == ["w"]


# --- arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Momentum("topk"), "got 'topk', expected a method that is not made of others"),
        (lambda: Momentum(TopK), "got <class .*TopK'>, expected a method"),
        (lambda: Momentum(Momentum(TopK())), "got Momentum, expected a method that is not made of others"),
        (lambda: Momentum(gradzip.Hierarchical(TopK())), "got Hierarchical, expected a method"),
        (lambda: Momentum(gradzip.Auto()), "got Auto, expected a method"),
        (lambda: Momentum(gradzip.NoCompression()), r"got NoCompression\(.*\), which compresses nothing"),
        (lambda: Momentum(gradzip.DGC()), r"got DGC\(.*\), which has momentum of its own, expected a method without"),
        (lambda: Momentum(SignSGD(error_feedback=False)), r"got SignSGD\(.*\), which is biased and has no error feedb"),
        (lambda: Momentum(gradzip.FFTRange(error_feedback=False)), "got FFTRange.*biased and has no error feedback"),
        (lambda: Momentum(gradzip.Cast()), "got Cast.*expected a method with error feedback, as SignSGD"),
        (lambda: Momentum(gradzip.TernGrad()), "got TernGrad.*biased"),
        (lambda: Momentum(gradzip.GradiVeQ()), "got GradiVeQ.*biased"),
        (lambda: Momentum(TopK(), beta=1.0), r"got beta = 1.0, expected a number in \[0, 1\)"),
        (lambda: Momentum(TopK(), beta="0.9"), "got beta = '0.9'"),
        (lambda: Momentum(TopK(), warmup_steps=-1), "got warmup_steps = -1, expected an integer >= 0"),
        (lambda: Momentum(TopK(), warmup_steps=1.5), "got warmup_steps = 1.5"),
        (
            lambda: Momentum(TopK(), warmup_steps="late"),
            "got warmup_steps = 'late', expected an integer >= 0 or 'auto'",
        ),
        (lambda: Momentum(TopK(), beta2=1), r"got beta2 = 1, expected a number in \[0, 1\)"),
        (lambda: gradzip.Hierarchical(auto()), "got Momentum.*, expected a method whose collectives do not depend on"),
        (lambda: gradzip.parse("momentum"), "got no arguments, expected momentum:inner=method"),
        (lambda: gradzip.parse("momentum:beta=0.9"), "got the argument 'beta=0.9', expected inner=method"),
        (lambda: gradzip.parse("momentum:outer=topk"), "got the argument 'outer=topk', expected inner=method"),
        (lambda: gradzip.parse("momentum:inner=topk,steps=3"), "unknown argument 'steps', expected one of: .*inner"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("spec", UNBIASED)
def test_methods_that_say_so_are_unbiased(spec):
    """Many draws, projected on fixed directions: their mean is within five standard errors of the gradient's."""
    x, draws, method = gradient("w", 0, 0), 400, gradzip.parse(spec)
    generator = torch.Generator().manual_seed(5)
    directions = torch.stack([x, x.sign(), torch.randn(x.shape, generator=generator)]).double().view(3, -1)
    seen = torch.stack([gradzip.roundtrip(_seeded(method, seed), x)[0] for seed in range(draws)]).double()
    projected = (seen - x).view(draws, -1) @ directions.T
    rounding = 2**-24 * directions.norm(dim=1) * x.norm()
    assert (projected.mean(0).abs() <= 5 * projected.std(0) / math.sqrt(draws) + rounding).all()


def _seeded(method, seed):
    return dataclasses.replace(method, seed=seed) if "seed" in vars(method) else method


def test_specs_and_what_ranks_compare():
    made = gradzip.parse("momentum:inner=dct-range(theta=0.95),beta=0.8,warmup_steps=150")
    assert made == Momentum(gradzip.DCTRange(theta=0.95), 0.8, 150)
    assert unparse(made) == "momentum:inner=dct-range(theta=0.95),beta=0.8,warmup_steps=150"
    assert gradzip.parse("phases:0=none,9=momentum(inner=topk(bits=4),beta=0.8)").parts[1].inner.bits == 4
    base = Momentum(TopK())
    others = [Momentum(TopK(), beta=0.8), Momentum(TopK(), warmup_steps=1), Momentum(TopK(theta=0.9)), TopK()]
    assert len({one.digest for one in [base, *others]}) == 5 and base.clone().digest == base.digest
    assert gradzip.parse("momentum:inner=topk,warmup_steps=auto,beta2=0.8") == auto(TopK())
    assert unparse(auto(TopK())) == "momentum:inner=topk,warmup_steps=auto,beta2=0.8"
    assert auto().digest != auto(beta2=0.9).digest and base.digest == Momentum(TopK(), beta2=0.9).digest
    assert Momentum(TopK(exchange="scatter_reduce")).exchange == "scatter_reduce"
