"""Groups and single gradients agree: compressing gradients together does not mix them."""

import dataclasses

import numpy as np
import pytest
import torch

import gradzip
import kinds
from contract import Expected, gradient
from gradzip.memory.state import Key
from gradzip.methods.base.group import plan_groups
from gradzip.ops.groups import keys_of
from single import decode, encode

SHAPES = {"a": (64, 48), "k": (32, 8, 3, 3), "c": (33, 41), "d": (1, 1031), "e": (40, 40)}
STEPS = 5


def grads_of(rank, step):
    return {name: gradient(name, rank, step, shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("exchange", ["gather", "scatter_reduce"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("spec", ["signsgd", "signsgd:majority=False", "signsgd:error_feedback=False", "onebit"])
def test_signs_of_a_group_are_those_of_each_gradient(spec, size, exchange):
    """With an odd number of ranks and no zeros, no coins decide. Residuals are equal, too."""
    method = dataclasses.replace(gradzip.parse(spec), exchange=exchange)
    together, alone = (gradzip.LocalGroup(method, size) for _ in range(2))
    assert_equal_steps(together, alone, size)
    assert together.bytes_sent < alone.bytes_sent  # one header
    assert_equal_residuals(together, alone)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("spec", kinds.examples(lambda c: isinstance(c, (gradzip.PowerSGD, gradzip.ACPSGD))))
def test_factors_of_a_group_are_those_of_each_matrix(spec, size):
    """Random factors have the keys of the parameters."""
    together, alone = (gradzip.LocalGroup(gradzip.parse(spec), size) for _ in range(2))
    assert_equal_steps(together, alone, size)
    assert together.bytes_sent == alone.bytes_sent
    assert_equal_residuals(together, alone)


def assert_equal_steps(together, alone, size):
    """Average steps of all gradients together, and of each alone: the averages are equal."""
    for step in range(STEPS):
        grads = [grads_of(rank, step) for rank in range(size)]
        averages = together.step(grads)
        for name in SHAPES:
            wanted = alone.average([of[name] for of in grads], name)
            assert all(torch.equal(of_rank[name], wanted[0]) for of_rank in averages), (name, step)


def assert_equal_residuals(together, alone):
    for one, other in zip(together.compressors, alone.compressors):
        saved, wanted = one.state_dict()["states"], other.state_dict()["states"]
        assert saved.keys() == wanted.keys()
        for name, fields in wanted.items():
            for field, value in fields.items():
                if isinstance(value, torch.Tensor) and field != "owner_residual":
                    assert torch.equal(saved[name][field], value), (name, field)


class GivenBits:
    """A key of the generator in place of a `Key`."""

    def __init__(self, bits):
        self.bits = bits

    def _replace(self, **_):
        return self


@pytest.mark.parametrize(
    "spec", ["terngrad:shared_scale=False", "terngrad:clip=none", "signsgd:majority=False", "onebit"]
)
def test_payloads_of_a_group_decode_as_those_of_each_gradient_with_its_key(spec):
    """With random signs of zeros, and draws of each element."""
    codec, key, grads = gradzip.parse(spec), Key(3, 7, "group", 1), grads_of(0, 0)
    grads["e"][3:20] = 0
    together = codec.decode([codec.encode_all([*grads.values()], key)], [*SHAPES.values()])
    together = dict(zip(SHAPES, (average.clone() for average in together)))
    keys = dict(zip(SHAPES, map(int, keys_of([key.bits], [len(SHAPES)]))))
    assert keys["a"] == key.bits and len(set(keys.values())) == len(SHAPES)
    for name, grad in grads.items():
        payload = encode(codec, grad, GivenBits(keys[name]))
        assert torch.equal(together[name], decode(codec, [payload], grad.shape)), name
    # The draws of a gradient are not those of the first one of the group.
    if spec != "onebit":  # which decodes zeros as means of the others
        assert not torch.equal(together["e"], decode(codec, [encode(codec, grads["e"], key)], SHAPES["e"]))


@pytest.mark.parametrize("size", [2, 3])
def test_shared_scales_of_a_group_are_those_of_each_gradient(size):
    """An average of TernGrad is a multiple of the gradient's own scale, the largest of all ranks."""
    group = gradzip.LocalGroup(gradzip.TernGrad(clip=None), size)
    factors = dict(zip(SHAPES, (1.0, 1e-3, 50.0, 7.0, 1e4)))
    grads = [{name: factors[name] * grad for name, grad in grads_of(rank, 0).items()} for rank in range(size)]
    for name, average in group.step(grads)[0].items():
        scale = max(of[name].abs().max().item() for of in grads)
        levels = average.double().numpy() * size / scale
        np.testing.assert_allclose(levels, levels.round(), rtol=0, atol=1e-6 * size)
        assert levels.round().any() and np.abs(levels).max() <= size + 1e-5


@pytest.mark.parametrize(
    "spec",
    kinds.params([spec for spec in [*kinds.ALL, *kinds.exchanged()] if not spec.startswith(("auto", "hierarchical"))]),
)
def test_groups_that_change_take_their_states_along(spec):
    """As the states of single parameters, which the reference concatenates and splits."""
    size, every = 3, [*SHAPES]
    reference, group = Expected(spec, size=size), gradzip.LocalGroup(gradzip.parse(spec), size)
    for step, names in enumerate([every, every, ["a", "c", "d"], ["k", "e"], every, every]):
        grads = {name: [gradient(name, rank, step, SHAPES[name]) for rank in range(size)] for name in names}
        wanted = reference.average(grads, [names])
        for averages in group.step([{name: grads[name][rank] for name in names} for rank in range(size)]):
            for name in names:
                assert torch.equal(averages[name], wanted[name]), (name, step)


@pytest.mark.parametrize("spec", kinds.params())
def test_a_gradient_that_is_not_finite_undoes_the_step_of_its_group_alone(spec):
    """Without skipping, groups of other parameters count."""
    compressor = gradzip.parse(spec).skip_nonfinite(False)
    group = gradzip.LocalGroup(compressor, 2)
    group.step([grads_of(rank, 0) for rank in range(2)])
    before = {name: group.compressors[0].step_of(name, torch.Size(shape)) for name, shape in SHAPES.items()}
    grads = [grads_of(rank, 1) for rank in range(2)]
    grads[1]["c"][5, 5] = float("inf")
    averages = group.step(grads)[0]
    likes = [torch.empty(shape) for shape in SHAPES.values()]
    for one in plan_groups(gradzip.parse(spec), likes, list(SHAPES)):
        if not one.compressed:
            continue
        for name in one.names:
            counts = group.compressors[0].step_of(name, torch.Size(SHAPES[name])) - before[name]
            if "c" in one.names:
                assert averages[name].isnan().all() and (counts == 0 or spec.startswith("phases"))
            else:
                assert averages[name].isfinite().all() and counts == 1
