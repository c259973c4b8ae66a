"""State dicts: every method resumes to the bit, or warns of what is dropped. Malformed state dicts are refused."""

import copy
import functools
import operator

import pytest
import torch

import gradzip
import kinds
from gradzip.memory.checkpoint import merge, shard

OF_NODES = ["hierarchical:inner=dgc(theta=0.9)"]
SHAPES = {"w": (64, 48), "v": (40, 3, 3, 3), "bias": (48,)}


def run_steps(group, first, last):
    """Run steps first to last - 1. Returns all averages in order."""
    size, averages = len(group.compressors), []
    for step in range(first, last):
        for i, (name, shape) in enumerate(SHAPES.items()):
            seeds = [100 * step + 10 * i + rank for rank in range(size)]
            grads = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
            averages.append(group.average(grads, name)[0])
    return averages


def all_equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("spec", kinds.params())
def test_another_world_size_keeps_shared_state(spec):
    group, resumed = gradzip.LocalGroup(gradzip.parse(spec), 3), gradzip.LocalGroup(gradzip.parse(spec), 2)
    run_steps(group, 0, 5)
    merged_states = merge([c.state_dict() for c in group.compressors])
    for rank, compressor in enumerate(resumed.compressors):
        with pytest.warns(UserWarning, match="shard: the states of 3 ranks for 2: residuals are dropped"):
            compressor.load_state_dict(shard(merged_states, rank, 2))
    assert all(state.residual is None for c in resumed.compressors for state in c.states.values())
    averages = run_steps(resumed, 5, 8)
    assert all(bool(a.isfinite().all()) for a in averages)
    for name, state in resumed.compressors[0].states.items():
        assert state.step == 8 == resumed.compressors[1].states[name].step or name == "bias"
    if spec in ("powersgd", "acpsgd"):
        fresh = gradzip.LocalGroup(gradzip.parse(spec), 2)
        assert not all_equal(averages[:1], run_steps(fresh, 5, 6)[:1])  # the factors were kept


def test_merge_keeps_rank_local_fields():
    """GradiVeQ: votes depend on rank-local fields."""
    group, resumed = (
        gradzip.LocalGroup(gradzip.parse("gradiveq:warmup_steps=1,sample_steps=3,compress_steps=9"), 3)
        for _ in range(2)
    )
    run_steps(group, 0, 6)
    merged_states = merge([c.state_dict() for c in group.compressors])
    for rank, compressor in enumerate(resumed.compressors):
        compressor.load_state_dict(shard(merged_states, rank, 3))
    saved = [[c.state_dict()["states"]["v"] for c in g.compressors] for g in (group, resumed)]
    of_ranks = [[(state["energy"], state["lost"]) for state in of_group] for of_group in saved]
    assert of_ranks[0] == of_ranks[1]
    assert len(set(of_ranks[0])) == 3


def test_residuals_loaded_by_another_rank_are_dropped():
    group, resumed = (gradzip.LocalGroup(gradzip.TopK(theta=0.9), 2) for _ in range(2))
    run_steps(group, 0, 3)
    for compressor in resumed.compressors:
        compressor.load_state_dict(group.compressors[0].state_dict())
    with pytest.warns(UserWarning, match="rank 0 of 2 was loaded by rank 1 of 2"):
        run_steps(resumed, 3, 4)
    residual = group.compressors[0].states["w"].residual
    # Rank 0 keeps its residual, rank 1 starts without one.
    assert residual.abs().max() > 0
    assert resumed.compressors[0].states["w"].residual.norm() > resumed.compressors[1].states["w"].residual.norm()


def test_malformed_state_dicts_are_refused():
    group = gradzip.LocalGroup(gradzip.PowerSGD(rank=2), 1)
    run_steps(group, 0, 2)
    saved = group.compressors[0].state_dict()
    for key, value in {"step": "two", "residual": [1.0], "q": None}.items():
        malformed = {"method": "PowerSGD", "states": {"w": {**saved["states"]["w"], key: value}}}
        with pytest.raises(ValueError, match=f"PowerSGD.load_state_dict: got {type(value).__name__} as {key} of 'w'"):
            gradzip.PowerSGD(rank=2).load_state_dict(malformed)
    with pytest.raises(ValueError, match="TopK.load_state_dict: got the state of 'PowerSGD', expected that of 'TopK'"):
        gradzip.TopK().load_state_dict(saved)
    with pytest.raises(ValueError, match="got the state of None"):
        gradzip.TopK().load_state_dict({})


def paths(value, path=()):
    """The keys that lead to each value in a state dict."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*path, key))


def edited(state_dict, path, *values):
    """A state dict with another value at the end of a path, or none."""
    state_dict = copy.deepcopy(state_dict)
    inner = functools.reduce(operator.getitem, path[:-1], state_dict)
    if values:
        inner[path[-1]] = values[0]
    else:
        del inner[path[-1]]
    return state_dict


MALFORMED = [None, True, -1, 1.5, "text", [], {}, [3], {"w": 3}, {3: {}}, torch.zeros(2, 2)]


@pytest.mark.parametrize("spec", kinds.params([*kinds.ALL, *OF_NODES], [*kinds.SAMPLE, *OF_NODES]))
def test_malformed_state_dicts_load_or_raise_value_error(spec):
    """Each value of a state dict missing, or replaced by each of these."""
    group = gradzip.LocalGroup(gradzip.parse(spec), (2, 2) if spec in OF_NODES else 2)
    run_steps(group, 0, 3)
    saved = group.compressors[0].state_dict()
    malformed = [edited(saved, path, *values) for path in paths(saved) for values in [(), *zip(MALFORMED)]]
    refused = 0
    for state_dict in [*malformed, *MALFORMED]:
        compressor = gradzip.parse(spec)
        try:
            compressor.load_state_dict(state_dict)
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            compressor.state_dict()
    assert refused > len(malformed) / 4


LIES = {
    "NaN": lambda x: x * torch.nan,
    "float16": torch.Tensor.half,
    "complex": lambda x: x.to(torch.complex128),
    "sparse": torch.Tensor.to_sparse,
}
LYING_NUMBERS = [
    ("begin", 1),
    ("shapes", 1),
    ("loss_scale", 0),
    ("loss_scale", torch.nan),
    ("payload_nbytes", torch.inf),
]


@pytest.mark.parametrize("spec", kinds.params([*kinds.ALL, *OF_NODES], [*kinds.SAMPLE, *OF_NODES]))
def test_states_that_lie_are_refused_by_name_and_change_nothing(spec):
    group = gradzip.LocalGroup(gradzip.parse(spec), (2, 2) if spec in OF_NODES else 2)
    run_steps(group, 0, 3)
    compressor = group.compressors[0]
    before = compressor.state_dict()
    found = {path: functools.reduce(operator.getitem, path, before) for path in paths(before)}
    states = [path for path in found if path[-1] in SHAPES and isinstance(found[path], dict)]
    lies = [(states[-1], key, value) for key, value in LYING_NUMBERS] if states else []
    for path in states:
        of_path = [(key, value) for key, value in found[path].items() if isinstance(value, torch.Tensor)]
        lies += [(path, key, lie(value)) for key, value in of_path for lie in LIES.values()]
    for path, key, value in lies:
        state_dict = edited(edited(before, path, {}), path, {**found[path], key: value})
        if key == "average_velocity" and value.layout == torch.strided and value.isfinite().all():
            continue  # of the gradients' dtype
        with pytest.raises(ValueError, match=f"load_state_dict: .*{key}.* of {path[-1]!r}"):
            compressor.load_state_dict(state_dict)
        after = compressor.state_dict()
        assert list(paths(after)) == list(found)
        for p, value in found.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(functools.reduce(operator.getitem, p, after), value)


@pytest.mark.parametrize("path, message", [
    (("parts",), "Hierarchical.load_state_dict: got NoneType as parts, expected a list of state dicts"),
    (("parts", 0, "states"), "TopK.load_state_dict: got NoneType as states, expected a dict of them by parameter name"),
    (("parts", 0, "states", "w", "rank"), "Hierarchical.load_state_dict: got a state of 'w' with .*, expected rank"),
])  # fmt: skip
def test_a_missing_part_of_a_state_dict_is_named(path, message):
    group = gradzip.LocalGroup(gradzip.Hierarchical(gradzip.TopK()), (2, 2))
    run_steps(group, 0, 1)
    with pytest.raises(ValueError, match=message):
        gradzip.Hierarchical(gradzip.TopK()).load_state_dict(edited(group.compressors[0].state_dict(), path))


@pytest.mark.parametrize("method", [gradzip.PowerSGD(rank=3), gradzip.PowerSGD(rank=2)], ids=["rank", "shape"])
def test_states_with_other_shapes_are_refused_in_the_first_step(method):
    group = gradzip.LocalGroup(gradzip.PowerSGD(rank=2), 1)
    group.average([torch.randn(64, 48)], "w")
    resumed = gradzip.LocalGroup(method, 1)
    resumed.compressors[0].load_state_dict(group.compressors[0].state_dict())
    columns = 48 if method.rank == 3 else 50
    with pytest.raises(ValueError, match="PowerSGD, parameter 'w': got a state whose .* has the shape .*, expected"):
        resumed.average([torch.randn(64, columns)], "w")


def test_merge_and_shard_errors():
    a, b = gradzip.TopK().state_dict(), gradzip.DGC().state_dict()
    with pytest.raises(ValueError, match="merge: got no state dicts"):
        merge([])
    with pytest.raises(ValueError, match="merge: got a single state dict, expected a list"):
        merge(a)
    with pytest.raises(
        ValueError, match=r"TopK.load_state_dict: got all ranks' states, expected gradzip.checkpoint.sh"
    ):
        gradzip.TopK().load_state_dict(merge([a, a]))
    with pytest.raises(ValueError, match=r"merge: got the states of \['TopK', 'DGC'\], expected those of one method"):
        merge([a, b])
    with pytest.raises(
        ValueError,
        match=r"shard: got a dict of \['method', 'rank_local', 'states'\], expected what gradzip.checkpoint",
    ):
        shard(a, 0, 1)
    with pytest.raises(ValueError, match="shard: got rank = 2 of 2, expected one from 0 to 1"):
        shard(merge([a, a]), 2, 2)


@pytest.mark.parametrize("spec", ["topk", "phases:0=topk,5=qsgd"])
def test_states_of_different_shards_are_not_merged(spec):
    """With FSDP2, names of states begin with the shard's place. One rank's names would not be the other's."""
    saved = []
    for place in ("shard0of2", "shard1of2"):
        group = gradzip.LocalGroup(gradzip.parse(spec), 2)
        group.step([{f"{place}.w": torch.randn(64, 48), f"{place}.bias": torch.randn(48)} for _ in range(2)])
        saved.append([c.state_dict() for c in group.compressors])
    for of_shard in saved:
        assert shard(merge(of_shard), 1, 2).keys() == of_shard[1].keys()
    with pytest.raises(
        ValueError, match=r"got state dicts with shards \['shard0of2', 'shard1of2'\], expected those of o"
    ):
        merge([saved[0][0], saved[1][0]])
