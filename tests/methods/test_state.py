"""Bucket states: built from the states of parameters, and split again."""

import pytest
import torch

import gradzip
from gradzip.memory.state import BucketState, State, split_partitions

SHAPES = {"a": torch.Size([3, 4]), "b": torch.Size([2, 2, 5]), "c": torch.Size([7, 1])}


def state(name, step=4, **states):
    made = State(name, 1, 3)
    vars(made).update(step=step, residual=torch.randn(SHAPES[name]), **states)
    return made


def test_concatenate_and_split_are_inverse():
    states = {name: state(name, velocity=torch.randn(shape), scattered=True) for name, shape in SHAPES.items()}
    bucket = BucketState.concatenate("a and 2 more", SHAPES, states)
    assert bucket.residual.shape == bucket.velocity.shape == (1, 12 + 20 + 7) and bucket.step == 4 and bucket.scattered
    bucket.rank, bucket.size = 1, 3
    split = bucket.split()
    assert list(split) == list(SHAPES)
    for name, was in states.items():
        assert vars(split[name]).keys() == vars(was).keys()
        assert torch.equal(split[name].residual, was.residual) and torch.equal(split[name].velocity, was.velocity)
        assert (split[name].name, split[name].rank, split[name].size, split[name].step) == (name, 1, 3, 4)
        # A view would save the whole bucket's tensor.
        assert split[name].residual.untyped_storage().nbytes() == 4 * was.residual.numel()
    assert bucket.state_dicts().keys() == SHAPES.keys() and "shapes" not in bucket.state_dicts()["a"]


def test_sums_of_elements_are_added_and_split_in_proportion():
    """And a bucket has the last warm-up of its parameters: counts are those of the oldest one."""
    states = {"a": state("a", square=2.0, payload_nbytes=10), "b": state("b", square=5.5, squares=3, warmup_steps=2)}
    bucket = BucketState.concatenate("a and 2 more", SHAPES, states)
    assert (bucket.square, bucket.payload_nbytes, bucket.squares, bucket.warmup_steps) == (7.5, 10, 3, 2)
    split = bucket.split()
    assert [split[name].square for name in SHAPES] == pytest.approx([7.5 * n / 39 for n in (12, 20, 7)])
    assert [split[name].payload_nbytes for name in SHAPES] == [10 * n // 39 for n in (12, 20, 7)]
    assert all((one.squares, one.warmup_steps) == (3, 2) for one in split.values())


def test_parameters_without_state_count_as_zeros():
    bucket = BucketState.concatenate("a and 2 more", SHAPES, {"b": state("b", step=2), "c": state("c", step=3)})
    assert bucket.step == 3 and torch.equal(bucket.residual[0, :12], torch.zeros(12))
    fresh = BucketState.concatenate("a and 2 more", SHAPES, {})
    assert fresh.step == 0 and fresh.residual is None
    assert all(s.residual is None and s.step == 0 for s in fresh.split().values())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_owner_residuals_are_added_to_residuals(size):
    group = gradzip.LocalGroup(gradzip.TopK(theta=0.7, min_numel=0, exchange="scatter_reduce"), size)
    for _ in range(3):
        group.average([torch.randn(1, 39) for _ in range(size)], "a and 2 more")
    states = [compressor.states["a and 2 more"] for compressor in group.compressors]
    # Not yet applied: the mean residual, and in each partition its owner's residual.
    expected = sum(s.residual for s in states) / size
    expected = expected + torch.cat([s.owner_residual.view(-1) for s in states])
    buckets = []
    for s in states:
        buckets.append(BucketState("a and 2 more", SHAPES))
        vars(buckets[-1]).update(vars(s))
    residuals = [torch.cat([s.residual.view(-1) for s in bucket.split().values()]) for bucket in buckets]
    torch.testing.assert_close(sum(residuals)[None] / size, expected, rtol=1e-6, atol=1e-6)
    assert not any(hasattr(s, "owner_residual") for bucket in buckets for s in bucket.split().values())
    assert split_partitions(states[0].residual, size)[0].shape == states[0].owner_residual.shape  # unchanged
    # The same if parameters with owner residuals are concatenated.
    single = State("a", 1, size)
    single.residual, single.owner_residual = (
        torch.zeros(SHAPES["a"]),
        torch.ones(split_partitions(torch.zeros(3, 4), size)[1].shape),
    )
    residual = BucketState.concatenate("a and 2 more", SHAPES, {"a": single}).residual
    assert residual.sum() == size * single.owner_residual.numel() and not single.residual.any()
