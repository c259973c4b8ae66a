"""PerLayer: rules, states and errors."""

import pickle
import re

import pytest
import torch

import gradzip
from gradzip import Cast, FFTRange, LocalGroup, NoCompression, PerLayer, TopK
from gradzip.collectives.fusion import fused
from gradzip.engines.local import drive
from gradzip.methods.base.group import averaged

SHAPES = {"conv1.weight": (16, 8, 3, 3), "fc.weight": (40, 50), "fc.bias": (40,), "other": (64, 64)}


def mixed():
    return PerLayer([(r"^fc\.", NoCompression()), (lambda name, shape: len(shape) == 4, TopK(theta=0.9))], FFTRange())


def gradients(step, size):
    generator = torch.Generator().manual_seed(step)
    return {name: [torch.randn(shape, generator=generator) for _ in range(size)] for name, shape in SHAPES.items()}


def part_of(compressor, name):
    return compressor.method_for(name, torch.Size(SHAPES[name]))


def test_first_matching_rule_applies():
    compressor = mixed()
    kinds = {name: type(part_of(compressor, name)) for name in SHAPES}
    assert kinds == {
        "conv1.weight": TopK, "fc.weight": NoCompression, "fc.bias": NoCompression, "other": FFTRange
    }  # fmt: skip
    both = PerLayer([("weight", Cast()), ("conv", TopK())])
    assert isinstance(part_of(both, "conv1.weight"), Cast)
    assert part_of(both, "other") == NoCompression()
    assert isinstance(PerLayer([(re.compile("CONV", re.I), TopK())]).method_for("conv1", torch.Size([3])), TopK)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_averages_equal_those_of_each_method_alone(size):
    group = LocalGroup(mixed(), size)
    alone = {name: LocalGroup(part_of(mixed(), name), size) for name in SHAPES}
    for step in range(3):
        for name, of_ranks in gradients(step, size).items():
            averages = group.average(of_ranks, name)
            expected = alone[name].average(of_ranks, name)
            assert all(torch.equal(a, w) for a, w in zip(averages, expected))
    assert group.bytes_sent == sum(g.bytes_sent for g in alone.values())
    dense = sum(g.compressors[0].traffic.bytes_dense for g in alone.values())
    assert group.compressors[0].traffic.bytes_dense == dense == 3 * 4 * (1152 + 2000 + 40 + 4096)
    assert set(part_of(group.compressors[0], "conv1.weight").states) == {"conv1.weight"}


def test_fused_equals_separate():
    of_ranks = gradients(0, 2)
    compressors = [mixed().clone() for _ in range(2)]
    together = drive(
        [fused([averaged(c, g[r].clone(), n, r, 2) for n, g in of_ranks.items()]) for r, c in enumerate(compressors)]
    )
    group = LocalGroup(mixed(), 2)
    for i, (name, g) in enumerate(of_ranks.items()):
        assert torch.equal(together[0][i], group.average(g, name)[0])
        assert torch.equal(together[1][i], together[0][i])


def test_states_of_other_parts_are_refused():
    with pytest.raises(ValueError, match="got the states of 3 compressors, expected 2: one for each of its parts"):
        PerLayer([("fc", TopK())]).load_state_dict(mixed().state_dict())
    with pytest.raises(ValueError, match="got the state of 'FFTRange', expected that of 'TopK'"):
        PerLayer([("fc", TopK()), ("a", TopK())], FFTRange()).load_state_dict(
            PerLayer([("fc", FFTRange()), ("a", TopK())], FFTRange()).state_dict()
        )
    with pytest.raises(ValueError, match="got the state of 'TopK', expected that of 'PerLayer'"):
        mixed().load_state_dict(TopK().state_dict())


def test_pickle_keeps_compiled_patterns():
    compressor = PerLayer([(r"^fc\.", TopK(theta=0.9)), (re.compile("conv"), FFTRange())])
    copied = pickle.loads(pickle.dumps(compressor))
    assert copied == compressor and copied.digest == compressor.digest


def test_clone_and_digest():
    compressor = PerLayer([("fc", TopK())], Cast(), min_numel=7)
    clone = compressor.clone()
    assert clone == compressor and clone.digest == compressor.digest
    assert not {id(part) for part in clone.parts} & {id(part) for part in compressor.parts}
    assert all(part.traffic is clone.traffic is not compressor.traffic for part in clone.parts)
    others = [
        PerLayer([("fc", TopK(theta=0.5))], Cast()),
        PerLayer([("cf", TopK())], Cast()),
        PerLayer([("fc", TopK())]),
        PerLayer([("fc", TopK()), ("conv", TopK())], Cast()),
    ]
    assert len({c.digest for c in [compressor, *others]}) == 5
    one, two = (PerLayer([(lambda name, shape: True, TopK())]) for _ in range(2))
    assert one.digest == two.digest


def test_rounds_and_bypass_follow_the_parts():
    assert mixed().rounds == 1
    assert PerLayer([("fc", TopK(exchange="scatter_reduce"))]).rounds == 2
    assert PerLayer([("fc", TopK())]).bypasses(torch.zeros(50))
    assert not PerLayer([("fc", TopK())]).bypasses(torch.zeros(64, 64))
    assert PerLayer([("fc", NoCompression())]).bypasses(torch.zeros(64, 64))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: PerLayer([]), "PerLayer: got no rules, expected a list of "),
        (lambda: PerLayer([("(", TopK())]), "PerLayer: got the regular expression '\\(': missing \\)"),
        (lambda: PerLayer([(3, TopK())]), "got the rule 3, expected a regular expression or predicate"),
        (lambda: PerLayer(["fc"]), "got the rule 'fc', expected "),
        (lambda: PerLayer([("fc", "topk")]), "got 'topk', expected a compressor"),
        (lambda: PerLayer([("fc", TopK())], default=None), "got None, expected a compressor"),
        (lambda: PerLayer([("fc", mixed())]), "expected a compressor other than PerLayer"),
        (lambda: gradzip.parse("per-layer"), "got no rules"),
        (lambda: gradzip.parse("per-layer:default=fp16"), "got no rules"),
        (lambda: gradzip.parse("per-layer:fc"), "got the rule 'fc', expected pattern=method"),
        (lambda: gradzip.parse("per-layer:fc="), "got the rule 'fc=', expected pattern=method"),
        (lambda: gradzip.parse("per-layer:fc=zip"), "unknown compression method 'zip'"),
        (lambda: gradzip.parse("per-layer:fc=topk(theta=2)"), "got theta = 2"),
        (lambda: gradzip.parse("per-layer:fc=topk(theta=0.9"), "expected pattern=method"),
        (lambda: gradzip.parse("per-layer:fc=topk,["), "got the rule '\\['"),
    ],
)
def test_invalid_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "spec, compressor",
    [
        ("per-layer:conv=fft-range,fc=none", PerLayer([("conv", FFTRange()), ("fc", NoCompression())])),
        ("per-layer: conv = topk(theta=0.9, bits=8), default=fp16", PerLayer([("conv", TopK(0.9, bits=8))], Cast())),
        ("per-layer:layer(1|2)=topk,[ab,]{1,3}$=fp16", PerLayer([("layer(1|2)", TopK()), ("[ab,]{1,3}$", Cast())])),
        ("per-layer:.=fft-range(value_range=(-1, 2))", PerLayer([(".", FFTRange(value_range=(-1, 2)))])),
    ],
)  # fmt: skip
def test_parse(spec, compressor):
    assert gradzip.parse(spec) == compressor
