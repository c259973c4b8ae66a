"""States of groups: made of what their parameters have, and split into that again."""

import copy
import math
import pickle

import pytest
import torch

import gradzip
from contract import kept_residual
from gradzip.memory.state import State, group_name

SHAPES = {"a": torch.Size([3, 4]), "b": torch.Size([2, 2, 5]), "c": torch.Size([7, 1])}
NUMEL = 12 + 20 + 7


def field_shapes(shape):
    """Of a method with two fields of the elements, and a factor of as many rows as the gradient has columns."""
    return {"residual": tuple(shape), "velocity": tuple(shape), "q": (math.prod(shape[1:]), 2)}


def fields_of(name, step=4, **more):
    shapes = field_shapes(SHAPES[name])
    tensors = {field: torch.randn(shape) for field, shape in shapes.items()}
    return {"rank": 1, "size": 3, "step": step, **tensors, **more}


def made_of(states, shapes=SHAPES):
    return State.of_parameters(shapes, states, field_shapes)


def test_of_parameters_and_by_parameter_are_inverse():
    saved = {name: fields_of(name, scattered=True, momentum_bound=2.5) for name in SHAPES}
    state = made_of(saved)
    assert (state.name, state.numel, state.step) == ("a and 2 more", NUMEL, 4)
    assert (state.scattered, state.momentum_bound) == (True, 2.5)
    assert state.residual.shape == state.velocity.shape == (NUMEL,) and state.q.shape == (2 * (4 + 10 + 1),)
    for field in ("residual", "velocity", "q"):
        flat = torch.cat([fields[field].view(-1) for fields in saved.values()])
        assert torch.equal(getattr(state, field), flat)
    state.rank, state.size = 1, 3
    split = state.by_parameter()
    assert list(split) == list(SHAPES)
    for name, fields in saved.items():
        assert split[name].keys() == fields.keys()
        for field, value in fields.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(split[name][field], value) and split[name][field].shape == value.shape
                # A view would save the whole group's tensor.
                assert split[name][field].untyped_storage().nbytes() == value.nbytes
            else:
                assert split[name][field] == value
        assert torch.equal(state.piece(name, state.residual), fields["residual"])
        assert state.piece(name, state.residual).data_ptr() == state.residual[state.start_of(name) :].data_ptr()
    again = made_of(split)
    assert all(torch.equal(getattr(again, field), getattr(state, field)) for field in ("residual", "velocity", "q"))


@pytest.mark.parametrize("name", SHAPES)
def test_a_single_parameter_has_tensors_of_any_shape(name):
    more = {"samples": torch.randn(2, 3, 5), "bases": [torch.randn(2, 4), torch.randn(1, 4)]}
    saved = fields_of(name, **more)
    state = made_of({name: saved}, {name: SHAPES[name]})
    assert state.name == name and state.residual.shape == (SHAPES[name].numel(),)
    assert torch.equal(state.samples, more["samples"])
    state.rank, state.size = 1, 3
    (split,) = state.by_parameter().values()
    assert split.keys() == saved.keys() and split["residual"].shape == SHAPES[name]
    assert split["bases"] is saved["bases"] and split["q"].shape == saved["q"].shape


def test_several_parameters_need_the_shapes_of_tensors():
    state = made_of({name: fields_of(name) for name in SHAPES})
    state.samples = torch.ones(4)
    with pytest.raises(
        TypeError, match="a and 2 more: got no shapes of the field 'samples', expected them from `state_s"
    ):
        state.by_parameter()


def test_sums_are_those_of_all_parameters():
    """And numbers are those of the parameter that was averaged most often."""
    more = {"a": {"square": 2.0, "payload_nbytes": 10}, "b": {"square": 5.5, "squares": 3, "warmup_steps": 2}, "c": {}}
    state = made_of({name: fields_of(name, step=i, **more[name]) for i, name in enumerate(SHAPES)})
    assert (state.square, state.payload_nbytes, state.squares, state.warmup_steps, state.step) == (7.5, 10, 3, 2, 2)
    split = state.by_parameter()
    assert [split[name]["square"] for name in SHAPES] == [7.5, 0.0, 0.0]
    assert [split[name]["payload_nbytes"] for name in SHAPES] == [10, 0, 0]
    assert all((of["squares"], of["warmup_steps"], of["step"]) == (3, 2, 2) for of in split.values())
    again = made_of(split)
    assert (again.square, again.payload_nbytes) == (7.5, 10)


def test_parameters_without_a_state_count_as_zeros():
    """Where a field has a number for each element. The method begins anew with others, such as a factor."""
    states = {"b": fields_of("b", step=2), "c": fields_of("c", step=3)}
    state = made_of(states)
    assert state.step == 3 and not hasattr(state, "q")
    for field in ("residual", "velocity"):
        wanted = torch.cat([torch.zeros(12), states["b"][field].view(-1), states["c"][field].view(-1)])
        assert torch.equal(getattr(state, field), wanted)
    split = state.by_parameter()
    assert not split["a"]["residual"].any() and split["a"]["residual"].shape == SHAPES["a"]
    fresh = made_of({})
    assert fresh.step == 0 and fresh.residual is None
    assert all(fields.keys() == {"rank", "size", "step"} for fields in fresh.by_parameter().values())


OWNED = {
    "none of it": [],
    "a part of one": [(13, 20)],
    "across parameters": [(5, 35)],
    "all": [(0, NUMEL)],
    "of each parameter": [(3, 6), (17, 22), (34, 37)],
    "next to each other": [(6, 12), (12, 22), (32, 35)],
}


@pytest.mark.parametrize("ranges", OWNED.values(), ids=OWNED)
def test_owner_residuals_are_split_by_elements(ranges):
    state = made_of({name: fields_of(name) for name in SHAPES})
    state.rank, state.size = 1, 3
    owned = torch.randn(sum(stop - start for start, stop in ranges))
    if ranges:
        state.owner_residual, state.owner_ranges = owned, ranges
    whole = torch.zeros(NUMEL)
    whole[[i for start, stop in ranges for i in range(start, stop)]] = owned
    split = state.by_parameter()
    for name, fields in split.items():
        part = state.piece(name, whole).view(-1)
        if "owner_residual" in fields:
            start, own = fields["owner_start"], fields["owner_residual"]
            assert torch.equal(part[start:][: own.numel()], own) and own.untyped_storage().nbytes() == own.nbytes
            part[start:][: own.numel()] = 0
        assert not part.any()  # it was all of it
    again = made_of(split)
    if not ranges:
        assert not hasattr(again, "owner_residual")
        return
    assert torch.equal(again.owner_residual, owned)
    elements = [[i for start, stop in of for i in range(start, stop)] for of in (ranges, again.owner_ranges)]
    assert elements[0] == elements[1]
    # Folded into the residual, in the group or by parameter, it counts once for each rank.
    again.size = 3
    wanted, before = state.residual.clone(), again.residual
    for start, stop in ranges:
        wanted[start:stop] += 3 * state_piece(owned, ranges, start, stop)
    again.fold_owner_residual()
    assert not hasattr(again, "owner_residual") and before is not again.residual
    torch.testing.assert_close(again.residual, wanted, rtol=0, atol=1e-6)
    by_parameter = torch.cat([kept_residual(fields).view(-1) for fields in split.values()])
    torch.testing.assert_close(by_parameter, wanted, rtol=0, atol=1e-6)


def state_piece(owned, ranges, start, stop):
    begin = sum(b - a for a, b in ranges[: ranges.index((start, stop))])
    return owned[begin:][: stop - start]


@pytest.mark.parametrize("spec", ["topk:theta=0.7", "onebit", "signsgd", "block-float:block=32"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_owner_residuals_are_not_lost_when_the_group_changes(spec, size):
    exchange = "" if spec.startswith("block") else f"{',' if ':' in spec else ':'}exchange=scatter_reduce"
    group = gradzip.LocalGroup(gradzip.parse(f"{spec}{exchange}"), size)
    shapes = {"a": (40, 48), "b": (33, 40), "c": (16, 8, 3, 5)}
    exact = given = dict.fromkeys(shapes, 0.0)
    # Groups of all parameters, of one, of others, and of all in another order.
    for names in (["a", "b", "c"], ["a", "b", "c"], ["b"], ["a", "c"], ["c", "b", "a"]):
        grads = [{name: torch.randn(shapes[name]) for name in names} for _ in range(size)]
        averages = group.step(grads)
        exact = {n: exact[n] + sum(of[n].double() for of in grads) / size if n in names else exact[n] for n in shapes}
        given = {n: given[n] + averages[0][n].double() if n in names else given[n] for n in shapes}
        saved = [compressor.state_dict()["states"] for compressor in group.compressors]
        for name in shapes:
            left = sum(kept_residual(of_rank[name]).double() for of_rank in saved) / size
            assert left.norm() > 0.1
            torch.testing.assert_close(given[name] + left, exact[name], rtol=0, atol=2e-5)


def test_a_step_that_is_abandoned_restores_the_fields():
    state = made_of({name: fields_of(name) for name in SHAPES})
    residual, before = state.residual, state.begin()
    state.residual, state.extra = state.renewed("residual", state.residual).zero_(), 1
    state.step += 1
    assert torch.equal(state.by_parameter()["a"]["residual"], residual[:12].view(3, 4))  # saved are those before
    copies = copy.deepcopy(state), pickle.loads(pickle.dumps(state))
    for copied in copies:
        assert torch.equal(copied.residual, residual) and copied.step == 4 and copied.shapes == SHAPES
        assert copied.by_parameter().keys() == SHAPES.keys() and not hasattr(copied, "extra")
    assert state.abandon(before) and not state.abandon(before)
    assert state.residual is residual and state.step == 4 and not hasattr(state, "extra")
    before = state.begin()
    state.residual = state.renewed("residual", state.residual).zero_()
    state.complete(before)
    assert not state.abandon() and not state.residual.any()
    assert state.renewed("residual", state.residual).data_ptr() == residual.data_ptr()  # memory of the former one


def test_names_of_groups():
    assert [group_name(["a"]), group_name(["a", "b"]), group_name(list("abcd"))] == [
        "a",
        "a and 1 more",
        "a and 3 more",
    ]
