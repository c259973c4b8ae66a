"""BlockFloat: its exchange compared with NumPy, its errors with their bounds, its residuals."""

import itertools

import numpy as np
import pytest
import torch

import gradzip
import philox
from contract import kept_residual
from gradzip import ops
from gradzip.collectives import AllToAll, Gather
from gradzip.collectives.fusion import fused
from gradzip.engines.local import drive
from gradzip.memory.state import Key
from gradzip.methods.base.group import averaged
from reference import U, correlated

SIZES = [1, 2, 3, 4]
FORMATS = [(8, 256), (4, 64)]


def gradients(size, shape, step=0):
    return [correlated(*shape, seed=10 * step + rank) for rank in range(size)]


def in_blocks(x, blocks, block):
    padded = np.zeros(blocks * block, np.float32)
    padded[: x.size] = x
    return padded.reshape(blocks, block)


def encode(x, bits, block, blocks, key):
    """(codes, steps) of a payload of x, as float32. key: None rounds to nearest."""
    top = np.float32(3 if bits == 2 else 2 ** (bits - 1) - 1)
    rows = in_blocks(x, blocks, block)
    largest = np.maximum(np.abs(rows).max(1, keepdims=True), np.float32(2.0**-100))
    limit = top if key is None else top * np.float32(65536)
    inverse = limit / largest
    inverse = np.where(largest * inverse > limit, np.nextafter(inverse, np.float32(0)), inverse)
    if bits == 2:  # -3/2, -1/2, 1/2, 3/2; zero goes up and down in turns
        t = rows * inverse
        up = t > 0
        up[:, ::2] |= t[:, ::2] == 0
        codes = np.float32(-1.5) + (t >= -1) + up + (t >= 1)
    elif key is None:
        codes = np.rint(rows * inverse)
    else:
        draws = philox.words(key, x.size // 2 + 1).astype("<u4").view("<u2")[: x.size]
        codes = np.floor_divide(np.trunc(rows * inverse).astype(np.int64) + in_blocks(draws, blocks, block), 65536)
    return codes.astype(np.float32), largest / top


def decode(codes, steps, n, weight=1.0):
    return (codes * (np.float32(weight) * steps)).reshape(-1)[:n]


class Reference:
    """The method's algorithm in NumPy float32, for one parameter."""

    def __init__(self, bits, block, rounding, error_feedback, size):
        self.bits, self.block, self.size = bits, block, size
        self.rounding, self.error_feedback = rounding, error_feedback
        self.residuals, self.owned = [None] * size, [None] * size

    def encode(self, x, blocks, *key):
        key = Key(0, *key).bits if self.rounding == "stochastic" else None
        return encode(x, self.bits, self.block, blocks, key)

    def average(self, grads, step):
        size, n = self.size, grads[0].size
        blocks = -(-n // (self.block * size))
        corrected = [g if r is None else g + r for g, r in zip(grads, self.residuals)]
        sent = [self.encode(c, blocks * size, step, "w", rank) for rank, c in enumerate(corrected)]
        if self.error_feedback is True or (self.error_feedback and size == 1):  # what it owns, in any case
            self.residuals = [c - decode(*s, n) for c, s in zip(corrected, sent)]
        if size == 1:
            return decode(*sent[0], n)
        result = []
        for owner in range(size):
            rows = slice(owner * blocks, (owner + 1) * blocks)
            numel = min(max(n - owner * blocks * self.block, 0), blocks * self.block)
            partition = self.owned[owner]
            for codes, steps in sent:
                value = decode(codes[rows], steps[rows], numel, 1 / size)
                partition = value if partition is None else partition + value
            average = self.encode(partition, blocks, step, "w[owner]", owner)
            result.append(decode(*average, numel))
            if self.error_feedback:
                self.owned[owner] = partition - result[-1]
        return np.concatenate(result)


@pytest.mark.parametrize("error_feedback", [False, True, "owner"])
@pytest.mark.parametrize(
    "bits, block, rounding",
    [*((*of, rounding) for rounding in ("stochastic", "nearest") for of in FORMATS), (2, 96, "nearest")],
)
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_algorithm_to_the_bit(size, bits, block, error_feedback, rounding):
    method = gradzip.BlockFloat(bits, block, rounding, error_feedback)
    group, reference = gradzip.LocalGroup(method, size), Reference(bits, block, rounding, error_feedback, size)
    for step in range(3):
        grads = gradients(size, (33, 77), step)
        want = reference.average([g.view(-1).numpy() for g in grads], step)
        for average in group.average(grads, "w"):
            assert np.array_equal(average.view(-1).numpy(), want)
    for compressor, residual in zip(group.compressors, reference.residuals):
        state = compressor.states["w"]
        left = state.owner_residual if (size, error_feedback) == (1, "owner") else state.residual
        assert (left is None and residual is None) or np.array_equal(left.view(-1).numpy(), residual)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", SIZES)
def test_error_is_within_a_step_of_each_rounding(size, bits, rounding):
    shape, block, top = (60, 64), 64, 2 ** (bits - 1) - 1
    grads = gradients(size, shape)
    average = gradzip.simulate(gradzip.BlockFloat(bits, block, rounding, error_feedback=False), grads)[0]
    mean = sum(g.double() for g in grads) / size
    steps = [g.double().view(-1, block).abs().amax(1, keepdim=True) / top for g in grads]
    own = sum(steps) / size
    # The average that the owner encodes is off by `own`, and so is its largest magnitude.
    of_average = (mean.view(-1, block).abs().amax(1, keepdim=True) + own) / top * (size > 1)
    bound = own + of_average
    error = (average.double() - mean).view(-1, block)
    part = 0.5 if rounding == "nearest" else 1.0
    assert (error.abs() <= part * bound * (1 + 2.0**-14)).all()
    # Rounding errors of a step are independent and spread over +-1/2 or +-1 steps: their variance is at least 1/12.
    floor = (
        sum(s**2 for s in steps) / size**2 + (size > 1) * (mean.view(-1, block).abs().amax(1, True) / top) ** 2
    ) / 12
    assert error.square().mean() >= 0.8 * floor.mean()


@pytest.mark.parametrize("bits", [4, 8])
def test_unbiased_over_steps(bits):
    """The squared error of the mean over many steps of the same gradients, within five standard errors."""
    size, steps, block = 2, 400, 64
    grads = gradients(size, (32, 64))
    mean = sum(g.double() for g in grads) / size
    group = gradzip.LocalGroup(gradzip.BlockFloat(bits, block, error_feedback=False), size)
    averages = torch.stack([group.average(grads, "w")[0].double() for _ in range(steps)])
    deviation = averages.std(0) / steps**0.5
    step = mean.view(-1, block).abs().amax(1, keepdim=True).expand(-1, block).reshape(mean.shape) / (
        2 ** (bits - 1) - 1
    )
    assert ((averages.mean(0) - mean).abs() <= 5 * deviation + 0.05 * step).all()
    ratio = (averages.mean(0) - mean).square().sum() / deviation.square().sum()
    assert 0.8 < ratio < 1.25  # the errors are noise, with nothing beneath


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", SIZES)
def test_averages_and_residuals_add_up_to_the_gradients(size, bits, rounding):
    """Sum of averages + mean residual + owners' residuals = sum of mean gradients, up to float32 rounding."""
    steps, shape = 20, (37, 65)
    group = gradzip.LocalGroup(gradzip.BlockFloat(bits, 64, rounding), size)
    sent = wanted = torch.zeros(shape, dtype=torch.float64)
    largest = 0.0
    for step in range(steps):
        grads = gradients(size, shape, step)
        average = group.average(grads, "w")[0]
        sent = sent + average.double()
        wanted = wanted + sum(g.double() for g in grads) / size
        largest = max(largest, average.abs().max().item(), *(g.abs().max().item() for g in grads))
    states = [c.states["w"] for c in group.compressors]
    residual = sum(s.residual.double() for s in states).view(shape) / size
    if size > 1:
        owned = torch.cat([s.owner_residual.double() for s in states])
        edges = [min(37 * 65, r * -(-37 * 65 // (64 * size)) * 64) for r in range(size + 1)]
        assert [s.owner_ranges for s in states] == [[edge] for edge in itertools.pairwise(edges)]
        residual = residual + owned.view(shape)
    # A step rounds fewer than ten numbers below 2 * largest.
    bound = steps * 10 * U * 2 * largest
    assert (sent + residual - wanted).abs().max() < bound
    assert residual.abs().max() > 10 * bound  # the residual is not just rounding
    # A residual is bounded: what is left is less than a step of each rounding.
    assert residual.abs().max() < 4 * 2 * largest / (2 ** (bits - 1) - 1)
    # What a checkpoint or a new bucket keeps is all of it.
    kept = sum(kept_residual(c.state_dict()["states"]["w"]).double() for c in group.compressors) / size
    assert (kept - residual).abs().max() < bound


@pytest.mark.parametrize("bits, block", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_bytes_sent(size, bits, block):
    group = gradzip.LocalGroup(gradzip.BlockFloat(bits, block), size)
    group.average(gradients(size, (70, 90)), "w")
    of_partition = -(-70 * 90 // (block * size)) * (4 + block * bits // 8)
    assert group.bytes_sent == (of_partition if size == 1 else (size + 1) * of_partition)


def test_gradients_shorter_than_a_block_or_than_the_ranks():
    for shape in ((1, 1), (1, 3), (2, 20), (1, 300)):
        grads = [torch.full(shape, float(rank)) for rank in range(4)]
        averages = gradzip.simulate(gradzip.BlockFloat(min_numel=0, rounding="nearest"), grads)
        assert all(torch.equal(a, averages[0]) for a in averages)
        assert torch.allclose(averages[0], torch.full(shape, 1.5), rtol=1e-6)


@pytest.mark.parametrize("size", [2, 3])
def test_fused_equals_separate_beside_methods_with_headers(size):
    """Payloads of fixed length have no header to split joined payloads by."""
    methods = {
        "a": gradzip.BlockFloat(),
        "b": gradzip.TopK(theta=0.8, exchange="scatter_reduce"),
        "c": gradzip.BlockFloat(4, 64),
        "d": gradzip.QSGD(),
        "e": gradzip.BlockFloat(),
    }
    shapes = {"a": (64, 64), "b": (33, 129), "c": (70, 40), "d": (50, 50), "e": (40, 41)}
    grads = {name: gradients(size, shape) for name, shape in shapes.items()}
    routines = [
        fused([averaged(methods[n].clone(), g[rank].clone(), n, rank, size) for n, g in grads.items()])
        for rank in range(size)
    ]
    for rank, averages in enumerate(drive(routines)):
        for (name, alone), average in zip(grads.items(), averages):
            assert torch.equal(average, gradzip.simulate(methods[name], alone, name)[rank]), name
    rounds = next(fused([averaged(gradzip.BlockFloat(), torch.ones(64, 64), f"{i}", 0, 2) for i in range(3)]))
    (exchange,) = rounds
    assert isinstance(exchange, AllToAll) and exchange.same_length and len(set(exchange.nbytes)) == 1


def test_different_formats_are_refused():
    """By the lengths, if the ranks have not compared their configurations before the first step."""
    grads = gradients(2, (64, 64))
    for other in (gradzip.BlockFloat(4), gradzip.BlockFloat(8, 128)):
        routines = [
            averaged(method, g.clone(), "w", rank, 2)
            for rank, (method, g) in enumerate(zip((gradzip.BlockFloat(), other), grads))
        ]
        with pytest.raises(gradzip.PayloadError, match="expected .*: give every rank the same arguments"):
            drive(routines)
    gather = Gather(torch.zeros(260, dtype=torch.uint8), same_length=True)
    with pytest.raises(gradzip.PayloadError, match="got 392 bytes from 2 ranks, expected 260 from each"):
        gather.split_by_rank(torch.zeros(392, dtype=torch.uint8), 2)
    assert gradzip.BlockFloat().digest != gradzip.BlockFloat(4).digest


@pytest.mark.parametrize("value, dtype", [(60000.0, torch.float16), (3e38, torch.float32), (3e38, torch.bfloat16)])
def test_averages_near_the_limit_of_the_dtype(value, dtype):
    """The bound from steps alone is above the limit: the decoded magnitudes decide."""
    method, grad = gradzip.BlockFloat(rounding="nearest"), torch.full((40, 40), value, dtype=dtype)
    for average in gradzip.simulate(method, [grad] * 3):
        assert torch.allclose(average, grad, rtol=2.0**-20)
    beyond = gradzip.simulate(method, [grad, torch.full_like(grad, float("inf")), grad])
    assert all(not average.isfinite().any() for average in beyond)


def test_state_moves_with_the_bucket():
    """A residual that a rank keeps as the owner of a partition is not lost when buckets change, or the group."""
    size, shapes = 3, {"a": torch.Size((30, 40)), "b": torch.Size((50, 41))}
    group = gradzip.LocalGroup(gradzip.BlockFloat(4, 64), size)
    group.step([{name: correlated(*shape, seed=rank) for name, shape in shapes.items()} for rank in range(size)])
    states = [c.states["a and 1 more"] for c in group.compressors]
    owned = torch.cat([s.owner_residual for s in states])
    total = sum(s.residual for s in states) + size * owned
    after = torch.zeros(3250)
    for rank, compressor in enumerate(group.compressors):
        compressor.memory.change_group(rank, 2)
        saved = compressor.state_dict()["states"]
        assert saved.keys() == shapes.keys() and not any("owner_residual" in saved[name] for name in shapes)
        after += torch.cat([saved[name]["residual"].view(-1) for name in shapes])
    assert torch.allclose(after, total, rtol=0, atol=8 * U * total.abs().max().item())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_rank_owns_what_it_rounds(bits, dtype):
    """The same bits as with True: a run that is scaled down to one rank loses nothing."""
    groups = [gradzip.LocalGroup(gradzip.BlockFloat(bits, 64, "nearest", ef), 1) for ef in ("owner", True)]
    for step in range(4):
        grads = {"a": correlated(30, 40, seed=step).to(dtype), "b": correlated(50, 41, seed=step + 9).to(dtype)}
        owner, sender = (group.step([grads])[0] for group in groups)
        assert all(torch.equal(owner[name], sender[name]) for name in grads)
    (state,), (other,) = (set(group.compressors[0].states.values()) for group in groups)
    assert state.residual is None and other.residual is not None
    assert torch.equal(state.owner_residual, other.residual)
    shapes = {"a": (30, 40), "b": (50, 41)}
    assert gradzip.memory_bytes(groups[0].compressors[0], shapes, 1) == state.owner_residual.nbytes


def test_the_owners_residual_of_one_rank_goes_on_with_two():
    """It counts once in the mean, whatever the number of ranks."""
    method = gradzip.BlockFloat(2, 64, "nearest", "owner")
    alone = gradzip.LocalGroup(method, 1)
    grad = correlated(30, 40, seed=1)
    lost = (grad - alone.average([grad], "w")[0]).view(-1)
    (compressor,) = alone.compressors
    assert torch.allclose(compressor.states["w"].owner_residual, lost, rtol=0, atol=4 * U * grad.abs().max().item())
    compressor.memory.change_group(0, 2)
    assert torch.allclose(compressor.state_dict()["states"]["w"]["residual"].view(-1) / 2, lost / 2, rtol=0, atol=1e-6)


def test_one_node_rounds_nothing_and_keeps_nothing():
    method = gradzip.Hierarchical(gradzip.BlockFloat(2, 64, "nearest", "owner"))
    group, grads = gradzip.LocalGroup(method, (1, 2)), [correlated(30, 40, seed=seed) for seed in range(2)]
    for average in group.average(grads, "w"):
        torch.testing.assert_close(average, sum(grads) / 2)
    assert all(not compressor.inner.states for compressor in group.compressors)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_the_owner_alone_keeps_a_residual(rounding):
    """Also where others were: of another method, of buckets that change. All but the ranks' own errors is sent."""
    size, shapes = 3, {"a": (30, 40), "b": (50, 41)}
    owner = gradzip.BlockFloat(8, 64, rounding, error_feedback="owner")
    group = gradzip.LocalGroup(gradzip.Phases({0: gradzip.TopK(theta=0.9), 2: owner}), size)
    errors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    largest = 0.0
    for step in range(6):
        grads = [{n: correlated(*shape, seed=10 * step + r) for n, shape in shapes.items()} for r in range(size)]
        buckets = [["a", "b"]] if step < 4 else [["a"], ["b"]]
        for names in buckets:
            averages = group.step([{name: of[name] for name in names} for of in grads])[0]
            for name in names:
                errors[name] += averages[name].double() - sum(of[name].double() for of in grads) / size
                largest = max(largest, averages[name].abs().max().item())
    parts = [compressor.parts[1] for compressor in group.compressors]
    for name in shapes:
        states = [part.states[name] for part in parts]
        assert all(state.residual is None for state in states)
        assert sum(state.owner_residual.numel() for state in states) == errors[name].numel()
        owed = torch.cat([state.owner_residual for state in states]).double()
        # Of four steps, each within a step of the largest magnitude, which the residual of TopK is below, too.
        lost = errors[name].view(-1) + owed
        assert 0 < lost.abs().max() < 4 * 4 * largest / 127


def test_errors():
    for arguments, message in [
        ((3,), "BlockFloat: got bits = 3, expected 2, 4 or 8"),
        ((2,), "BlockFloat: got rounding = 'stochastic' with bits = 2, expected rounding = 'nearest'"),
        ((8, 100), "BlockFloat: got block = 100, expected a multiple of 32 from 32 to 4096"),
        ((8, 256, "nearest", "sender"), "BlockFloat: got error_feedback = 'sender', expected True, False or 'owner'"),
        ((8, 256, "up"), "BlockFloat: got rounding = 'up', expected 'stochastic' or 'nearest'"),
    ]:
        with pytest.raises(ValueError, match=message):
            gradzip.BlockFloat(*arguments)


def test_a_payload_of_the_method_decodes_with_ops():
    x = torch.randn(3, 700)
    average = gradzip.simulate(gradzip.BlockFloat(rounding="nearest"), [x])[0]
    decoded = torch.empty(2100)
    ops.block_float_decode([ops.block_float_encode(x, 8)], decoded, 8)
    assert torch.equal(average.view(-1), decoded)
