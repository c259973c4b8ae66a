"""States of several parameters as one, and back."""

import pytest
import torch

import gradzip
from gradzip.state import BucketState, State, split_shards

MEMBERS = {"a": torch.Size([3, 4]), "b": torch.Size([2, 2, 5]), "c": torch.Size([7, 1])}


def state(name, step=4, **kept):
    made = State(name, 1, 3)
    vars(made).update(step=step, residual=torch.randn(MEMBERS[name]), **kept)
    return made


def test_there_and_back():
    states = {name: state(name, velocity=torch.randn(shape), scattered=True) for name, shape in MEMBERS.items()}
    joint = BucketState.concatenate("a and 2 more", MEMBERS, states)
    assert joint.residual.shape == joint.velocity.shape == (1, 12 + 20 + 7) and joint.step == 4 and joint.scattered
    joint.rank, joint.size = 1, 3
    back = joint.split()
    assert list(back) == list(MEMBERS)
    for name, was in states.items():
        assert vars(back[name]).keys() == vars(was).keys()
        assert torch.equal(back[name].residual, was.residual) and torch.equal(back[name].velocity, was.velocity)
        assert (back[name].name, back[name].rank, back[name].size, back[name].step) == (name, 1, 3, 4)
        # A file would hold all of the joint tensor otherwise.
        assert back[name].residual.untyped_storage().nbytes() == 4 * was.residual.numel()
    assert joint.state_dicts().keys() == MEMBERS.keys() and "shapes" not in joint.state_dicts()["a"]


def test_members_without_a_state_have_nothing_left_to_send():
    joint = BucketState.concatenate("a and 2 more", MEMBERS, {"b": state("b", step=2), "c": state("c", step=3)})
    assert joint.step == 3 and torch.equal(joint.residual[0, :12], torch.zeros(12))
    fresh = BucketState.concatenate("a and 2 more", MEMBERS, {})
    assert fresh.step == 0 and fresh.residual is None
    assert all(s.residual is None and s.step == 0 for s in fresh.split().values())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_owners_owe_becomes_their_own(size):
    group = gradzip.LocalGroup(gradzip.TopK(theta=0.7, min_numel=0, exchange="scatter_reduce"), size)
    for _ in range(3):
        group.average([torch.randn(1, 39) for _ in range(size)], "a and 2 more")
    kept = [compressor.states["a and 2 more"] for compressor in group.compressors]
    # What is missing from the average: the mean of the residuals, and in each shard, what its owner owes.
    missing = sum(s.residual for s in kept) / size
    missing = missing + torch.cat([s.owner_residual.view(-1) for s in kept])
    joint = []
    for s in kept:
        joint.append(BucketState("a and 2 more", MEMBERS))
        vars(joint[-1]).update(vars(s))
    found = [torch.cat([s.residual.view(-1) for s in j.split().values()]) for j in joint]
    torch.testing.assert_close(sum(found)[None] / size, missing, rtol=1e-6, atol=1e-6)
    assert not any(hasattr(s, "owner_residual") for j in joint for s in j.split().values())
    assert split_shards(kept[0].residual, size)[0].shape == kept[0].owner_residual.shape  # and nothing was taken away
    # The same where single parameters had owners, and are joined.
    single = State("a", 1, size)
    single.residual, single.owner_residual = (
        torch.zeros(MEMBERS["a"]),
        torch.ones(split_shards(torch.zeros(3, 4), size)[1].shape),
    )
    folded = BucketState.concatenate("a and 2 more", MEMBERS, {"a": single}).residual
    assert folded.sum() == size * single.owner_residual.numel() and not single.residual.any()
