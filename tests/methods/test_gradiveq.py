"""GradiVeQ: comparison with the paper's equations in NumPy, phases, checkpoints, and agreement of ranks."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradzip
from contract import through_file
from gradzip import QSGD, Cast, GradiVeQ, LocalGroup
from gradzip.collectives.fusion import fused
from gradzip.engines.local import drive
from gradzip.methods.base.group import averaged
from gradzip.methods.gradiveq import best_slice_size, compress, decompress, unflatten
from gradzip.methods.pca import dimension, principal_weights
from reference import U

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (8, 6, 3, 5)  # F D = 48, kernels of 15 elements
NUMEL = math.prod(SHAPE)


def short(**arguments):
    """GradiVeQ with phases of 2, 4 and 3 steps, which few gradients of these tests end early."""
    phases = {"warmup_steps": 2, "sample_steps": 4, "compress_steps": 3, "stop": 0.9}
    return GradiVeQ(**{**phases, "min_numel": 1, **arguments})


def flat(grad):
    """The layout of figure 3a, one element at a time."""
    filters, depth, _, width = grad.shape
    result = np.empty(grad.size, grad.dtype)
    for f, d, h, w in np.ndindex(*grad.shape):
        result[((h * width + w) * depth + d) * filters + f] = grad[f, d, h, w]
    return result


class Reference:
    """The paper's algorithm in float64, on sums instead of averages: equations (3) to (6) as printed."""

    def __init__(self, method, shape):
        self.method, self.shape = method, shape
        self.size = min(method.slice_size, math.prod(shape)) if method.slice_size else best_slice_size(shape)
        self.step, self.left, self.samples = 0, 0, []

    def slices(self, grad):
        x = flat(grad)
        return np.pad(x, (0, -len(x) % self.size)).reshape(-1, self.size)

    def average(self, grads):
        n = len(grads)
        of_ranks = [self.slices(g.double().numpy()) for g in grads]
        total = sum(of_ranks)
        reuse = self.method.reuse or len(total)
        self.step += 1
        if self.left:
            self.left -= 1
            result = np.empty_like(total)
            for m, mu in enumerate(self.means):
                basis = self.bases[m // reuse]
                compressed = sum(basis.T @ (rank[m] - mu / n) for rank in of_ranks)
                result[m] = basis @ compressed + mu
            self.floats = sum(self.bases[m // reuse].shape[1] for m in range(len(total)))
            return result.reshape(-1)[: math.prod(self.shape)] / n
        if self.step > self.method.warmup_steps:
            self.samples.append(total)
        if len(self.samples) == self.method.sample_steps:
            samples = np.stack(self.samples)
            self.means, self.bases, self.samples = samples.mean(0), [], []
            for first in range(0, len(total), reuse):
                centred = samples[:, first] - self.means[first]
                eigenvalues = np.linalg.svd(centred, compute_uv=False) ** 2
                d = numpy_dimension(eigenvalues, self.method.loss)
                self.bases.append(np.linalg.svd(centred)[2][:d].T)
            self.left = self.method.compress_steps
        return total.reshape(-1)[: math.prod(self.shape)] / n


def numpy_dimension(eigenvalues, loss):
    sums = [eigenvalues[:d].sum() for d in range(len(eigenvalues) + 1)]
    return next(d for d, part in enumerate(sums) if part >= (1 - loss) * sums[-1])


def gradients(step, size, shape=SHAPE, slice_size=None, noise=1e-3, seed=0):
    """One gradient for each rank. Each slice is a mean, plus a vector in a space of 4 dimensions, plus noise.

    The standard deviation halves from each of the 4 dimensions to the next.
    """
    slice_size = slice_size or best_slice_size(shape)
    numel = math.prod(shape)
    number = -(-numel // slice_size)
    fixed = torch.Generator().manual_seed(seed)
    mean = torch.randn(number, slice_size, generator=fixed)
    directions = torch.linalg.qr(torch.randn(slice_size, 4, generator=fixed))[0].t() * math.sqrt(slice_size)
    grads = []
    for rank in range(size):
        own = torch.Generator().manual_seed(1000 * seed + 10 * step + rank + 1)
        weights = torch.randn(number, 4, generator=own) / 2.0 ** torch.arange(4)
        x = mean + weights @ directions + noise * torch.randn(number, slice_size, generator=own)
        grads.append(unflatten(x.view(-1)[:numel], torch.Size(shape)).contiguous())
    return grads


def state_of(group, rank=0, name="w"):
    return group.compressors[rank].states[name]


def lost(group, rank=0):
    """The fraction of energy that a rank's own gradients have lost since the last sampling."""
    return state_of(group, rank).lost / state_of(group, rank).energy


def phases(group, steps, size, **arguments):
    """Run some steps. Returns the phase after each, asserted to be the same on all ranks."""
    seen = []
    for step in range(steps):
        group.average(gradients(step, size, **arguments), "w")
        seen.append({c.phase(c.states["w"]) for c in group.compressors})
    assert all(len(of_ranks) == 1 for of_ranks in seen)
    return [of_ranks.pop() for of_ranks in seen]


# --- layout, slices, dimension


@pytest.mark.parametrize("shape", [SHAPE, (1, 1, 2, 3), (5, 1, 1, 1), (3, 4, 7, 1)])
def test_layout_is_that_of_figure_3a(shape):
    grad = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    vector = torch.from_numpy(flat(grad.numpy()))
    assert torch.equal(unflatten(vector, torch.Size(shape)), grad)
    # F is the fastest dimension, then D.
    filters = shape[0]
    assert torch.equal(vector[:filters], grad[:, 0, 0, 0])
    assert shape[1] == 1 or torch.equal(vector[filters : 2 * filters], grad[:, 1, 0, 0])


@pytest.mark.parametrize(
    "shape, size",
    [
        ((16, 16, 3, 3), 768),  # the paper's example
        ((16, 3, 3, 3), 432),
        ((32, 16, 3, 3), 512),
        ((32, 32, 3, 3), 1024),
        ((64, 3, 3, 3), 576),
        ((64, 64, 3, 3), 4096),
        ((512, 512, 3, 3), 512 * 512),
        ((96, 3, 11, 11), 288),
        ((128, 64, 1, 1), 8192),
        ((64, 4, 7), 256),
        ((8, 4, 3, 3, 3), 864),
    ],
)
def test_best_slice_size(shape, size):
    assert best_slice_size(torch.Size(shape)) == size
    assert size % (shape[0] * shape[1]) == 0 and math.prod(shape) % size == 0


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]) | st.floats(1e-3, 10), min_size=1, max_size=40),
    st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.99]),
)
@settings(deadline=None)
def test_dimension_is_equation_6(values, loss):
    eigenvalues = np.sort(np.array(values))[::-1].copy()
    expected = numpy_dimension(eigenvalues, loss)
    got = dimension(torch.from_numpy(eigenvalues), loss)
    # They may differ only if all sums in between are at the limit, up to rounding.
    for d in (min(got, expected), max(got, expected) - 1) if got != expected else ():
        assert abs(eigenvalues[:d].sum() - (1 - loss) * eigenvalues.sum()) < 1e-13 * eigenvalues.sum()


def test_dimension_ignores_rounding():
    assert dimension(torch.zeros(5, dtype=torch.float64), 0.1) == 0
    assert dimension(torch.tensor([1.0, 1e-8, -1e-17], dtype=torch.float64), 0.0) == 1
    assert dimension(torch.tensor([1.0, 1e-5, 0.0], dtype=torch.float64), 0.0) == 2


@pytest.mark.parametrize("count, size", [(4, 300), (30, 400), (60, 31)])
@pytest.mark.parametrize("decay", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("loss", [0.0, 0.01, 0.3])
def test_principal_weights_lose_at_most_the_allowed_variance(count, size, decay, loss):
    generator = torch.Generator().manual_seed(count)
    width = decay ** torch.arange(size)
    samples = torch.randn(count, size, generator=generator) * width + 3
    centred = samples - samples.mean(0)
    weights, _ = principal_weights(centred, loss, recent=25)
    assert weights.shape == (min(count - 1, size), count)
    basis = (weights.double() @ centred.double())[(weights != 0).any(1)]
    d = len(basis)
    # The weights of a row have the norm 1 / sigma and are rounded to float32; `dimension` limits sigma from below.
    sigma = torch.linalg.svdvals(centred.double())
    assert (basis @ basis.t() - torch.eye(d)).abs().max() <= 8 * U * sigma.square().sum().sqrt() / sigma[d - 1]
    energy = sigma.square()
    lost = (centred.double() - centred.double() @ basis.t() @ basis).square().sum()
    floor = count * 2.0**-23  # eigenvalues that count as 0
    assert lost <= (loss + floor + 1e-6) * energy.sum()
    assert abs(lost - energy[d:].sum()) <= 1e-5 * energy.sum()  # as the exact components
    if loss:
        assert energy[d - 1 :].sum() > loss * energy.sum() * (1 - 1e-9)


# --- linearity


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_compression_commutes_with_the_sum(ranks):
    """Equation (1). The error of a float32 sum of K products in any order is at most K u times the sum of magnitudes.

    The same holds for sums over ranks.
    """
    size, d, number = 700, 9, 5
    basis = torch.linalg.qr(torch.randn(size, d))[0].t().contiguous()
    of_ranks = [torch.randn(number, size) * 10.0**rank for rank in range(ranks)]
    of_sum = compress(sum(of_ranks), basis)
    sum_of = sum(compress(slices, basis) for slices in of_ranks)
    magnitudes = basis.abs() @ sum(slices.abs() for slices in of_ranks).t()
    assert of_sum.shape == (d, number)
    assert ((of_sum - sum_of).abs() <= 2 * (size + ranks) * U * magnitudes).all()
    exact = basis.double() @ sum(slices.double() for slices in of_ranks).t()
    assert ((of_sum - exact).abs() <= (size + ranks) * U * magnitudes).all()
    # Segments, as on a ring, give the same bits.
    parts = [compress(part, basis) for part in sum(of_ranks).split(2)]
    assert torch.equal(torch.cat(parts, 1), of_sum)
    whole = decompress(of_sum, basis)
    assert torch.equal(torch.cat([decompress(part, basis) for part in of_sum.split(2, 1)]), whole)
    assert ((whole - of_sum.double().t() @ basis.double()).abs() <= d * U * (of_sum.abs().t() @ basis.abs())).all()


# --- averages


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "shape, arguments",
    [
        (SHAPE, {}),
        (SHAPE, {"reuse": 1, "slice_size": 144}),
        (SHAPE, {"reuse": 2, "slice_size": 144}),
        (SHAPE, {"slice_size": 100}),  # the last of 8 slices has 20 elements
        (SHAPE, {"slice_size": 500, "reuse": 1}),  # the last slice has its own basis
        (SHAPE, {"slice_size": 10**6}),
        ((16, 16, 3, 3), {"loss": 0.2}),
        ((16, 8, 1, 1), {"loss": 0}),
    ],
)
def test_averages_equal_the_papers_algorithm(shape, arguments, size):
    """Two cycles equal the paper's, up to the error of the basis.

    That error is the rounding u of the samples, divided by the gap of eigenvalues: 3/4 of an eigenvalue, of which the
    smallest is 1/64. The factor 100 leaves room for all other rounding.
    """
    method = short(**{"loss": 0.01, **arguments})
    group, reference = LocalGroup(method, size), Reference(method, shape)
    lossy = 0
    for step in range(2 + 2 * (4 + 3)):
        grads = gradients(step, size, shape, reference.size)
        sent, compressing = group.bytes_sent, reference.left
        expected = reference.average(grads)
        averages = group.average(grads, "w")
        assert all(torch.equal(average, averages[0]) for average in averages)
        error = np.abs(flat(averages[0].numpy()) - expected).max()
        assert error <= 100 * U * 64 * np.abs(expected).max()
        sent = group.bytes_sent - sent
        if compressing:
            first = compressing == method.compress_steps
            groups = -(-math.prod(shape) // reference.size)
            groups = -(-groups // (method.reuse or groups))
            broadcast = 4 * (1 + groups * min(3, reference.size) * 4)
            assert sent == 4 * (reference.floats + 1) + first * broadcast
            lossy += np.abs(flat(sum(grads).numpy() / size) - expected).max() > 1e-2
        else:
            assert sent == 4 * math.prod(shape) + 48 * (step == 0)
    # At most 3 of 4 dimensions are kept.
    assert lossy == 6


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "arguments",
    [
        {},  # one segment
        {"slice_size": 144, "reuse": 2},  # segments of more than one basis
        {"slice_size": 50, "reuse": 4, "loss": 0.0},
        {"slice_size": 100, "stop": 1e-9},  # votes end compression after its first step
    ],
)
def test_ring_gives_the_same_average(arguments, size):
    """Equal to the bit for two ranks, because a sum of two numbers has one order.

    For n ranks, two sums of coordinates c differ by 2 (n - 1) u mean |c|, and the division rounds both once. The
    products of d <= 3 coordinates with the orthonormal basis have errors of d u |c|, with |c| <= |g|. Adding the mean
    rounds both once more.
    """
    group, ring = (LocalGroup(short(exchange=exchange, **arguments), size) for exchange in ("mean", "ring"))
    slices = Reference(group.compressors[0], SHAPE).slices
    segments = min(size, len(slices(np.zeros(SHAPE))))
    differ = compressed = 0
    for step in range(2 + 2 * (4 + 3)):
        grads = gradients(step, size, slice_size=arguments.get("slice_size"))
        sent = ring.bytes_sent - group.bytes_sent
        wanted = group.average(grads, "w")[0]
        averages = ring.average(grads, "w")
        assert all(torch.equal(average, averages[0]) for average in averages)
        assert vars(state_of(ring)).get("left") == vars(state_of(group)).get("left")
        assert len({c.phase(c.states["w"]) for g in (group, ring) for c in g.compressors}) == 1
        if size <= 2:
            assert torch.equal(averages[0], wanted)
        norms = np.mean([np.linalg.norm(slices(g.double().numpy()), axis=1) for g in grads], axis=0)
        error = (averages[0] - wanted).abs().max().item()
        assert error <= 1.01 * U * (2 * (size + 3) * norms.max() + 2 * wanted.abs().max().item())
        differ += error > 0
        if (sent := ring.bytes_sent - group.bytes_sent - sent) or (segments == 1 and error):
            compressed += 1
            assert sent == 4 * (segments - 1)  # each segment has a number for the vote
    assert compressed == (0 if segments == 1 else 2 if "stop" in arguments else 6)
    assert bool(differ) == (size > 2 and segments > 1)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_slices_in_a_small_subspace_are_exact(size):
    """Samples span all 4 dimensions: exact up to the samples' rounding over the smallest standard deviation."""
    group = LocalGroup(short(loss=0.0, sample_steps=8, compress_steps=20, warmup_steps=0), size)
    for step in range(28):
        grads = gradients(step, size, noise=0.0)
        average = group.average(grads, "w")[0]
        mean = sum(g.double() for g in grads) / size
        assert (average - mean).abs().max() <= 200 * U * 8 * mean.abs().max()
    assert len(state_of(group).bases or []) == 0
    group = LocalGroup(short(loss=0.0, sample_steps=8, compress_steps=20, warmup_steps=0), size)
    phases(group, 9, size, noise=0.0)
    assert [len(basis) for basis in state_of(group).bases] == [4]


def test_dimension_is_less_than_the_number_of_samples():
    for samples in (2, 3, 7):
        group = LocalGroup(short(loss=0.0, sample_steps=samples, warmup_steps=0, stop=None), 1)
        for _ in range(samples + 1):
            group.average([torch.randn(SHAPE)], "w")
        assert [basis.shape for basis in state_of(group).bases] == [(samples - 1, 720)]


# --- phases


@pytest.mark.parametrize("size", [1, 2, 3])
def test_phases(size):
    seen = phases(LocalGroup(short(), size), 17, size)
    # `phases` gives the phase of the next step. Bases are computed at the beginning of the first compressed step.
    cycle = ["sampling"] * 5 + ["compressing"] * 2
    assert seen == ["warm-up", *cycle, *cycle, *cycle][:17]
    assert phases(LocalGroup(short(warmup_steps=0, compress_steps=1), size), 9, size) == ["sampling"] * 9


@pytest.mark.parametrize("arguments", [{}, {"exchange": "ring", "slice_size": 720 // 5}], ids=["mean", "ring"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_majority_vote_ends_compression(size, arguments):
    slices = {"slice_size": arguments.get("slice_size")}
    for votes in range(size + 1):
        group = LocalGroup(short(sample_steps=6, compress_steps=5, stop=0.5, loss=0.0, **arguments), size)
        phases(group, 9, size, **slices)
        assert state_of(group).left == 4
        grads = gradients(9, size, **slices)
        for rank in range(votes):
            grads[rank] = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank)) * 20
        group.average(grads, "w")
        losses = [lost(group, rank) for rank in range(size)]
        assert all(loss > 0.9 if rank < votes else loss < 1e-3 for rank, loss in enumerate(losses)), losses
        stopped = 2 * votes > size
        phase = "sampling" if stopped else "compressing"
        assert [c.phase(c.states["w"]) for c in group.compressors] == [phase] * size
        # A full sampling phase follows.
        rest = phases(group, 7, size, **slices)
        assert rest == (["sampling"] * 6 + ["compressing"] if stopped else ["compressing"] * 2 + ["sampling"] * 5)


def test_stop_none_never_ends_compression():
    group = LocalGroup(short(compress_steps=3, stop=None), 1)
    phases(group, 6, 1)
    for _ in range(2):
        group.average([100 * torch.randn(SHAPE)], "w")
        assert group.compressors[0].phase(state_of(group)) == "compressing" and lost(group) > 0.9


@pytest.mark.parametrize("exchange", ["mean", "ring"])
def test_monitored_loss_is_equation_7(exchange):
    size = 2
    method = short(loss=0.2, slice_size=144, reuse=2, stop=None, exchange=exchange)
    group, reference = LocalGroup(method, size), Reference(method, SHAPE)
    missed, energy = [0.0] * size, [0.0] * size
    for step in range(8):
        grads = gradients(step, size, slice_size=144)
        compressing = reference.left
        reference.average(grads)
        group.average(grads, "w")
        for rank, grad in enumerate(grads if compressing else []):
            slices = reference.slices(grad.double().numpy())
            energy[rank] += (slices**2).sum()
            for m, mu in enumerate(reference.means):
                basis = reference.bases[m // 2]
                kept = basis @ (basis.T @ (slices[m] - mu / size)) + mu / size
                missed[rank] += ((slices[m] - kept) ** 2).sum()
    for rank in range(size):
        assert lost(group, rank) == pytest.approx(missed[rank] / energy[rank], rel=1e-4)
        assert 0.01 < lost(group, rank) < 0.5


def num_samples_taken(make, most=210):
    group = LocalGroup(short(warmup_steps=0, sample_steps="auto", loss=0.01), 2)
    for step in range(most):
        group.average([make(step), make(step + 1000)], "w")
        if getattr(state_of(group), "bases", None) is not None:
            assert torch.equal(state_of(group, 0).bases[0], state_of(group, 1).bases[0])
            return step
    raise AssertionError("never done")


def test_auto_sampling_ends_when_the_dimension_is_stable():
    assert num_samples_taken(lambda step: gradients(step, 1)[0]) == 50
    # The dimension of white noise grows with the number of samples.
    noise = torch.Generator().manual_seed(3)
    assert num_samples_taken(lambda step: torch.randn(SHAPE, generator=noise)) == 200


# --- sampling through another method


@pytest.mark.parametrize(
    "sampling", [QSGD(bits=4), QSGD(bits=8, exchange="scatter_reduce"), gradzip.TernGrad(), Cast()], ids=str
)
def test_sampling_through_another_method(sampling):
    method = short(sampling=sampling)
    assert method.rounds == 2 + sampling.rounds
    group, alone = LocalGroup(method, 3), LocalGroup(dataclasses.replace(sampling, min_numel=1), 3)
    for step in range(6):
        grads = gradients(step, 3)
        average = group.average(grads, "w")[0]
        if step < 2:
            assert torch.equal(average, sum(grads[1:], grads[0]) / 3)
        # Random keys use the step, as if the method had averaged all steps.
        expected = alone.average(grads, "w")[0]
        if step >= 2:
            assert torch.equal(average, expected)
            samples = state_of(group).samples[0, step - 2]
            assert torch.equal(samples, torch.from_numpy(flat(expected.numpy())))
    before = group.bytes_sent
    group.average(gradients(6, 3), "w")
    assert group.bytes_sent - before < NUMEL / 2


def test_clone_and_digest_cover_the_sampling_method():
    method = short(sampling=QSGD(bits=4))
    clone = method.clone()
    assert clone == method and clone.digest == method.digest and clone.sampling is not method.sampling
    others = [short(), short(sampling=QSGD(bits=5)), short(loss=0.5), short(sampling=Cast()), short(stop=None)]
    assert len({c.digest for c in [method, *others]}) == 6
    # Exchanges do not count.
    assert short(sampling=QSGD(exchange="auto"), exchange="ring").digest == method.digest


def test_parse():
    spec = "gradiveq:loss=0.05,sample_steps=auto,reuse=2,sampling=qsgd(bits=8,norm=max)"
    method = GradiVeQ(loss=0.05, sample_steps="auto", reuse=2, sampling=QSGD(bits=8, norm="max"))
    assert gradzip.parse(spec) == method
    rules = gradzip.parse(f"per-layer:conv={spec.replace(':', '(', 1)}),default=fp16").rules
    assert rules == [("conv", method)]
    for wrong, message in (
        ("sampling=qsgd", "got sampling = 'qsgd', expected None or a method that keeps nothing"),
        ("sampling=qsgd(bits=99)", "got bits = 99"),
        ("sampling=zip()", "expected method:argument=value"),
    ):
        with pytest.raises(ValueError, match=message):
            gradzip.parse(f"gradiveq:{wrong}")


# --- state


def resumed(method, dicts):
    group = LocalGroup(method, len(dicts))
    for compressor, state_dict in zip(group.compressors, dicts):
        compressor.load_state_dict(through_file(state_dict))
    return group


@pytest.mark.parametrize("sampling, exchange", [(None, "mean"), (QSGD(bits=4), "ring")], ids=str)
def test_checkpoint_in_every_phase_changes_no_bit(sampling, exchange):
    method, size, steps = short(sampling=sampling, slice_size=144, reuse=2, exchange=exchange), 2, 16
    through = LocalGroup(method, size)
    expected, dicts = [], []
    for step in range(steps):
        dicts.append(through_file([c.state_dict() for c in through.compressors]))
        expected.append(through.average(gradients(step, size), "w")[0])
    for stop in range(steps):
        for of_ranks in (dicts[stop], dicts[stop][::-1]):  # in any order of the ranks
            group = resumed(method, of_ranks)
            for step in range(stop, steps):
                assert torch.equal(group.average(gradients(step, size), "w")[0], expected[step]), (stop, step)


@pytest.mark.parametrize("ours, theirs", list(itertools.permutations([0, 1, 3, 6, 7], 2)))
def test_ranks_in_different_steps_are_an_error(ours, theirs):
    method = short()
    group = LocalGroup(method, 1)
    dicts = []
    for step in range(8):
        dicts.append(through_file(group.compressors[0].state_dict()))
        group.average(gradients(step, 1), "w")
    names = {0: "step 0 (warm-up)", 1: "step 1 (warm-up)", 3: "step 3 (sampling, 1 taken)",
             6: "step 6 (sampling, 4 taken)", 7: "step 7 (compressing, 2 to go)"}  # fmt: skip
    group = resumed(method, [dicts[ours], dicts[ours], dicts[theirs]])
    with pytest.raises(gradzip.PayloadError) as error:
        group.average(gradients(ours, 3), "w")
    text = f"it is in {names[theirs]}, this rank in {names[ours]}: load the same checkpoint on every rank"
    assert "GradiVeQ, parameter 'w': from rank 2 of 3: " + text in str(error.value)
    # The other ranks raise, too.
    routines = [averaged(c, g, "w", r, 3) for r, (c, g) in enumerate(zip(group.compressors, gradients(0, 3)))]
    answers = [next(routine).tensor for routine in routines]
    for routine in routines:
        with pytest.raises(gradzip.PayloadError, match="load the same checkpoint"):
            routine.send(list(answers))


def test_different_configurations_are_an_error_in_the_first_step():
    group = LocalGroup(short(), 2)
    group.compressors[1] = short(loss=0.2)
    with pytest.raises(gradzip.PayloadError, match="parameter 'w': from rank 1 of 2: .*another configuration"):
        group.average(gradients(0, 2), "w")


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"sampling": QSGD(bits=4)}, {"exchange": "ring"}, {"exchange": "ring", "slice_size": 144, "reuse": 1}],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 3])
def test_non_finite_gradient_changes_no_state_in_any_phase(bad, arguments, size):
    method, steps = short(**arguments), 16
    reference = LocalGroup(method, size)
    expected = [reference.average(gradients(step, size), "w")[0] for step in range(steps)]
    group = LocalGroup(method, size)
    for step in range(steps):
        non_finite = gradients(50 + step, size)
        non_finite[-1][1, 2, 0, 3] = bad
        before = {k: v for k, v in vars(state_of(group)).items() if k != "payload"} if step else None
        for average in group.average(non_finite, "w"):
            assert not average.isfinite().any() if step > 6 and step % 7 in (6, 0, 1) else not average.isfinite().all()
        if step:
            after = {k: v for k, v in vars(state_of(group)).items() if k != "payload"}
            assert before.keys() == after.keys() and all(before[k] is after[k] for k in before)
        assert torch.equal(group.average(gradients(step, size), "w")[0], expected[step])


# --- edge cases


@pytest.mark.parametrize(
    "make",
    [
        lambda step: torch.zeros(SHAPE),
        lambda step: torch.full(SHAPE, 0.1),
        lambda step: torch.full(SHAPE, 0.1) * (step + 1),
        lambda step: torch.full(SHAPE, 1e-42) * step,
        lambda step: torch.full(SHAPE, 1e37) * (-1) ** step,
        lambda step: 1e37 * torch.rand(SHAPE, generator=torch.Generator().manual_seed(step)),
        lambda step: 1e-38 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)),
        lambda step: torch.zeros(SHAPE).index_fill_(0, torch.tensor(step % 3), 1.0),
    ],
)
@pytest.mark.parametrize("arguments", [{}, {"slice_size": 100, "reuse": 3}])
def test_finite_gradients_have_finite_averages(make, arguments):
    group = LocalGroup(short(loss=0.0, warmup_steps=0, **arguments), 1)
    for step in range(14):
        average = group.average([make(step)], "w")[0]
        assert average.isfinite().all(), step


def test_overflow_of_coordinates_is_non_finite():
    """A coordinate may be sqrt(K) times as large as an element."""
    group = LocalGroup(short(warmup_steps=0), 1)
    for step in range(4):
        assert group.average([torch.full(SHAPE, 3e38) * (-1) ** step], "w")[0].isfinite().all()
    assert group.average([torch.full(SHAPE, 3e38)], "w")[0].isnan().all() and state_of(group).step == 4


@pytest.mark.parametrize("exchange, segments", [("mean", 1), ("ring", 3)])
def test_constant_gradient_has_dimension_0_and_is_exact(exchange, segments):
    group = LocalGroup(short(exchange=exchange, slice_size=144), 3)
    for step in range(14):
        before = group.bytes_sent
        average = group.average([torch.full(SHAPE, 0.1)] * 3, "w")[0]
        assert torch.equal(average, gradzip.simulate(gradzip.NoCompression(), [torch.full(SHAPE, 0.1)] * 3)[0])
        if step in (7, 8):
            assert group.bytes_sent - before == 4 * segments  # votes only


def test_gradient_after_zeros_restarts_sampling():
    """The basis of zeros is empty, so the next gradient is lost, and all ranks vote to sample again."""
    group = LocalGroup(short(compress_steps=100), 2)
    for _ in range(8):
        group.average([torch.zeros(SHAPE)] * 2, "w")
    grads = gradients(0, 2)
    assert group.compressors[0].phase(state_of(group)) == "compressing"
    assert not group.average(grads, "w")[0].any()
    assert group.compressors[0].phase(state_of(group)) == "sampling"
    assert torch.equal(group.average(grads, "w")[0], (grads[0] + grads[1]) / 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_dtypes_and_layouts_in_every_phase(dtype, layout):
    """Averages are those of float32, rounded."""
    group, same = LocalGroup(short(sampling=QSGD(bits=8)), 2), LocalGroup(short(sampling=QSGD(bits=8)), 2)
    for step in range(9):
        grads = [g.to(dtype).to(memory_format=layout) for g in gradients(step, 2)]
        average = group.average(grads, "w")[0]
        assert average.dtype == dtype and average.stride() == grads[0].stride()
        expected = same.average([g.float().contiguous() for g in grads], "w")[0].to(dtype)
        if step >= 2:  # the warm-up averages in the gradient's own type
            assert torch.equal(average, expected)


def test_other_parameters_bypass_compression():
    method = GradiVeQ()
    assert method.bypasses(torch.zeros(1000, 1000)) and method.bypasses(torch.zeros(10**4))
    assert method.bypasses(torch.zeros(4, 4, 3, 3)) and not method.bypasses(torch.zeros(16, 16, 3, 3))
    assert not method.bypasses(torch.zeros(16, 16, 5)) and not method.bypasses(torch.zeros(8, 8, 3, 3, 3))
    group = LocalGroup(short(), 2)
    a, b = torch.randn(60, 70), torch.randn(60, 70)
    assert torch.equal(group.average([a, b], "fc")[0], (a + b) / 2) and group.bytes_sent == 4 * 4200


@pytest.mark.parametrize("shape", [(16, 12, 5), (6, 4, 3, 2, 3)])
def test_1d_and_3d_convolutions(shape):
    group = LocalGroup(short(loss=0.0, warmup_steps=0, sample_steps=8), 2)
    for step in range(10):
        grads = gradients(step, 2, shape, noise=0.0)
        average = group.average(grads, "w")[0]
        torch.testing.assert_close(average, (grads[0] + grads[1]) / 2, rtol=1e-3, atol=1e-3)
    assert len(state_of(group).bases[0]) == 4


@pytest.mark.parametrize("exchange", ["mean", "ring"])
@pytest.mark.parametrize("size", [1, 2])
def test_fused_equals_separate_in_different_phases(size, exchange):
    """At most two ranks: with more, a fused ring adds in another order."""
    shapes = {"a": SHAPE, "b": (16, 8, 3, 3), "fc": (50, 40)}
    method = short(warmup_steps=0, exchange=exchange, slice_size=128)
    compressors = [method.clone() for _ in range(size)]
    alone = {name: LocalGroup(method, size) for name in shapes}
    for step in range(12):
        names = [name for name in shapes if name != "b" or step >= 3]
        grads = {
            n: gradients(step, size, shapes[n]) if n != "fc" else [torch.randn(50, 40) for _ in range(size)]
            for n in names
        }
        routines = [
            fused([averaged(c, grads[n][rank].clone(), n, rank, size) for n in names])
            for rank, c in enumerate(compressors)
        ]
        of_ranks = drive(routines)
        for i, name in enumerate(names):
            expected = alone[name].average(grads[name], name)[0]
            assert all(torch.equal(averages[i], expected) for averages in of_ranks)


# --- invalid arguments


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"loss": 1}, r"GradiVeQ: got loss = 1, expected a number in \[0, 1\)"),
        ({"loss": -0.1}, "got loss = -0.1"),
        ({"loss": float("nan")}, "got loss = nan"),
        ({"loss": True}, "got loss = True"),
        ({"loss": "1%"}, "got loss = '1%'"),
        ({"slice_size": 0}, "got slice_size = 0, expected None or an integer >= 1"),
        ({"slice_size": 76.8}, "got slice_size = 76.8"),
        ({"reuse": 0}, "got reuse = 0, expected None or an integer >= 1"),
        ({"reuse": float("inf")}, "got reuse = inf"),
        ({"sample_steps": 1}, "got sample_steps = 1, expected 'auto' or an integer >= 2"),
        ({"sample_steps": None}, "got sample_steps = None"),
        ({"sample_steps": "many"}, "got sample_steps = 'many'"),
        ({"compress_steps": 0}, "got compress_steps = 0, expected an integer >= 1"),
        ({"compress_steps": True}, "got compress_steps = True"),
        ({"warmup_steps": -1}, "got warmup_steps = -1, expected an integer >= 0"),
        ({"stop": 0}, "got stop = 0, expected None or a number > 0"),
        ({"exchange": "gather"}, "got exchange = 'gather', expected 'mean' or 'ring'"),
        ({"stop": "never"}, "got stop = 'never'"),
        ({"sampling": "qsgd"}, "got sampling = 'qsgd', expected None or a method that keeps nothing between steps"),
        ({"sampling": gradzip.TopK()}, "keeps nothing between steps"),
        ({"sampling": gradzip.DGC()}, "keeps nothing between steps"),
        ({"sampling": GradiVeQ()}, "keeps nothing between steps"),
        ({"sampling": gradzip.PerLayer([("a", gradzip.TopK())])}, "keeps nothing between steps"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        GradiVeQ(**arguments)


def test_positional_arguments_have_the_documented_order():
    assert GradiVeQ(0.02, 500, 3, 50, 200, 10, QSGD()) == GradiVeQ(
        loss=0.02, slice_size=500, reuse=3, sample_steps=50, compress_steps=200, warmup_steps=10, sampling=QSGD()
    )
