"""A run that is resumed from state dicts goes on with the same bits, for every method and for groups of parameters."""

import pytest
import torch

import gradzip
import kinds
from contract import gradient, through_file

# In one bucket: two matrices, a kernel, a bias, and a matrix that is not the last of its group alone.
SHAPES = {"w0": (64, 48), "v2": (32, 8, 3, 3), "w": (33, 40), "b": (48,), "v3": (40, 41)}
STEPS = 4


def steps(group, first, last, alone=False):
    """The averages of all ranks in some steps, of each gradient `alone` or of all in one bucket."""
    size, every = len(group.compressors), []
    for step in range(first, last):
        grads = [{n: gradient(n, rank, step, shape) for n, shape in SHAPES.items()} for rank in range(size)]
        if alone:
            by_name = {name: group.average([own[name] for own in grads], name) for name in SHAPES}
            every.append([{name: averages[rank] for name, averages in by_name.items()} for rank in range(size)])
        else:
            every.append(group.step(grads))
    return every


@pytest.mark.parametrize("spec", [*kinds.ALL, *(spec for spec in kinds.exchanged() if spec not in kinds.ALL)])
def test_a_resumed_run_has_the_same_bits(spec):
    group, resumed = (gradzip.LocalGroup(gradzip.parse(spec), 3) for _ in range(2))
    steps(group, 0, STEPS)
    saved = [through_file(compressor.state_dict()) for compressor in group.compressors]
    for compressor, state_dict in zip(resumed.compressors, saved):
        compressor.load_state_dict(state_dict)
    for wanted, got in zip(steps(group, STEPS, 2 * STEPS), steps(resumed, STEPS, 2 * STEPS)):
        for name in SHAPES:
            assert all(torch.equal(of_rank[name], wanted[0][name]) for of_rank in (*wanted, *got)), name


@pytest.mark.parametrize("alone", [False, True], ids=["bucket", "alone"])
@pytest.mark.parametrize("spec", kinds.params())
def test_a_merged_checkpoint_has_the_same_bits(spec, alone):
    group, resumed = (gradzip.LocalGroup(gradzip.parse(spec), 3) for _ in range(2))
    steps(group, 0, STEPS, alone)
    merged = through_file(gradzip.checkpoint.merge([compressor.state_dict() for compressor in group.compressors]))
    for rank, compressor in enumerate(resumed.compressors):
        compressor.load_state_dict(gradzip.checkpoint.shard(merged, rank, 3))
    for wanted, got in zip(steps(group, STEPS, 2 * STEPS, alone), steps(resumed, STEPS, 2 * STEPS, alone)):
        assert all(torch.equal(of_rank[name], wanted[0][name]) for of_rank in (*wanted, *got) for name in SHAPES)
