"""`Compressor.exempt_modules`: which parameters it finds, and that they are averaged uncompressed."""

import copy

import pytest
import torch
from torch import nn

import gradzip
import kinds
from contract import gradient


class Tied(nn.Module):
    """A language model whose output layer has the weight of `words`."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(64, 48), nn.LayerNorm(48)
        self.body = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
        self.out = nn.Linear(48, 64, bias=False)
        self.out.weight = self.words.weight
        self.adapter = nn.Linear(48, 48)  # behind the output layer

    def get_output_embeddings(self):
        return self.out


def network():
    return nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.Flatten(), nn.Linear(64, 48))


@pytest.mark.parametrize(
    "model, of, names",
    [
        (Tied(), ["embedding"], ["words.weight"]),
        (Tied(), ["head"], ["words.weight"]),
        (network(), ["head"], ["3.bias", "3.weight"]),
        (network(), ["embedding"], []),
        (network(), ["1d"], ["0.bias", "1.bias", "1.weight", "3.bias"]),
        (network(), [nn.Conv2d, "1d"], ["0.bias", "0.weight", "1.bias", "1.weight", "3.bias"]),
        (torch.compile(Tied(), backend="eager"), [nn.LayerNorm], ["norm.bias", "norm.weight"]),
        (nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 16, 3)), ["head"], ["1.bias", "1.weight"]),
    ],
)
def test_parameters_of_modules(model, of, names):
    compressor = gradzip.TopK().exempt_modules(model, *of)
    assert sorted(compressor.exempted) == names and compressor.clone().exempted == compressor.exempted


def test_several_models_add_up():
    compressor = gradzip.TopK().exempt_modules(network(), "head").exempt_modules(Tied(), "embedding")
    assert compressor.exempted == {"3.bias", "3.weight", "words.weight"}


EVERYTHING = (
    r"^exempt_modules: got exemptions of all parameters that the method compresses, expected some that are compressed: "
    r"exempt fewer kinds, or use NoCompression\(\) to compress none$"
)


@pytest.mark.parametrize(
    "model, of, error, message",
    [
        ("model", ["head"], TypeError, "exempt_modules: got str, expected the model"),
        (network(), ["layernorm"], ValueError, "got 'layernorm', expected '1d', 'embedding', 'head' or classes of mod"),
        (network(), [nn.Linear(2, 2)], ValueError, "expected '1d', 'embedding', 'head' or classes of modules"),
        (network(), ["1d", nn.Conv2d, "head"], ValueError, EVERYTHING),
        (network(), [nn.Conv2d, "head"], ValueError, EVERYTHING),  # biases and norms are left
        (nn.Linear(64, 64), ["head"], ValueError, EVERYTHING),
    ],
)
def test_refuses(model, of, error, message):
    compressor = gradzip.TopK()
    with pytest.raises(error, match=message):
        compressor.exempt_modules(model, *of)
    assert compressor.exempted == set()


def test_a_method_within_another_exempts_nothing():
    inner = gradzip.SignSGD(majority=False).exempt_modules(network(), "1d")
    for outer in (
        gradzip.Momentum,
        gradzip.Hierarchical,
        lambda method: gradzip.Phases({0: gradzip.NoCompression(), 5: method}),
        lambda method: gradzip.PerLayer([("^0", method)]),
    ):
        with pytest.raises(ValueError, match="no exempt parameters: call exempt_modules of the (Mom|Hier|Phas|PerL)"):
            outer(inner)


@pytest.mark.parametrize(
    "spec",
    ["auto", "phases:0=none,5=topk", "per-layer:^0=topk,default=none", "hierarchical:inner=topk"],
)
def test_refuses_to_exempt_everything_call_by_call(spec):
    """All that the method would compress. What earlier calls have exempted stays."""
    compressor = gradzip.parse(spec).exempt_modules(network(), "1d")
    kept = compressor.exempted, compressor.choice_number
    if "per-layer" not in spec:
        compressor.exempt_modules(network(), "head")
        kept = compressor.exempted, compressor.choice_number
    with pytest.raises(ValueError, match=EVERYTHING):
        compressor.exempt_modules(network(), nn.Conv2d)
    assert (compressor.exempted, compressor.choice_number) == kept


@pytest.mark.parametrize(
    "spec, model",
    [
        ("none", network()),
        ("topk:min_numel=100000", network()),  # which compresses nothing anyway
        ("gradiveq", nn.Sequential(nn.Linear(64, 64))),
        ("per-layer:^9=topk,default=none", network()),
        ("topk", nn.Sequential(nn.BatchNorm2d(3000))),
        ("topk", nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64))),  # whose shapes are not known
    ],
)
def test_may_exempt_everything_where_that_changes_nothing(spec, model):
    compressor = gradzip.parse(spec).exempt_modules(model, nn.Linear, nn.Conv2d, nn.BatchNorm2d)
    assert compressor.exempted >= {"0.weight"}


SHAPES = {"0.weight": (32, 16, 3, 3), "0.bias": (32,), "3.weight": (48, 64), "3.bias": (48,)}


def leaves_others(compressor):
    """Whether uncompressed averages stay as they are: DGC applies its momentum to them."""
    return not any(part.changes_uncompressed for part in compressor.parts)


@pytest.mark.parametrize("spec", kinds.params(kinds.examples(leaves_others)))
def test_averages_are_those_without_compression(spec):
    """And all others are those of a model that has no such parameters. Nothing is kept of them."""
    exempt = gradzip.parse(spec).exempt_modules(network(), "head")
    others = [name for name in SHAPES if name not in exempt.exempted]
    assert exempt.selects_by_name and others == ["0.weight", "0.bias"]
    group, plain, without = (
        gradzip.LocalGroup(method, 3) for method in (exempt, gradzip.NoCompression(), gradzip.parse(spec))
    )
    for step in range(4):
        grads = [{name: gradient(name, rank, step, shape) for name, shape in SHAPES.items()} for rank in range(3)]
        own, uncompressed = (
            one.step([{n: g.clone() for n, g in of.items()} for of in grads]) for one in (group, plain)
        )
        compressed = without.step([{name: of[name].clone() for name in others} for of in grads])
        for rank in range(3):
            for name in SHAPES:
                wanted = compressed[rank][name] if name in others else uncompressed[rank][name]
                assert torch.equal(own[rank][name], wanted), (name, step)
    for part in group.compressors[0].parts:
        assert not any(name.startswith("3.") for name in part.memory.by_parameter())


def test_a_residual_is_sent_with_the_next_gradient():
    group = gradzip.LocalGroup(gradzip.TopK(theta=0.9), 2)
    grads = [{"3.weight": gradient("w", rank, 0, (48, 64))} for rank in range(2)]
    sent = group.step(copy.deepcopy(grads))[0]["3.weight"]
    for compressor in group.compressors:
        compressor.exempt_modules(network(), "head")
    total = sent + group.step([{"3.weight": torch.zeros(48, 64)} for _ in range(2)])[0]["3.weight"]
    torch.testing.assert_close(total, sum(of["3.weight"] for of in grads) / 2)
    assert not group.step([{"3.weight": torch.zeros(48, 64)} for _ in range(2)])[0]["3.weight"].any()
