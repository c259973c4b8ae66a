"""`gradzip.memory_bytes`: what states hold after some steps, from shapes alone."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradzip
import kinds
from benchmarks.device_ops.__main__ import fake_group
from contract import gradient

SHAPES = {"b": (49,), "e": (2049,), "v": (33, 7, 3, 3), "w": (65, 47), "m": (127, 31), "x": (31, 32)}
NUMELS = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
COMPRESSED = NUMELS["v"] + NUMELS["w"] + NUMELS["m"]  # the others have one dimension, or fewer elements than 1024
STEPS = 6


def kept(compressor):
    return sum(part.memory.nbytes for part in compressor.parts)


def most_kept(compressor, size, shapes=SHAPES, dtype=torch.float32, steps=STEPS):
    """The most bytes that the states of each rank have after a step."""
    group = gradzip.LocalGroup(compressor, size)
    most = [0] * len(group.compressors)
    for step in range(steps):
        ranks = range(len(most))
        group.step([{name: gradient(name, rank, step, of).to(dtype) for name, of in shapes.items()} for rank in ranks])
        most = [max(pair) for pair in zip(most, map(kept, group.compressors))]
    return most


def is_exact(compressor):
    """Whether a few steps show the most: not of methods that choose, nor with phases of one step."""
    phases = list(getattr(compressor, "phases", {}))
    exchanges = [getattr(part, "exchange", None) for part in compressor.parts]
    return not isinstance(compressor, gradzip.Auto) and "auto" not in exchanges and phases[2:] == []


SPECS = [spec for spec in [*kinds.ALL, *kinds.exchanged()] if is_exact(gradzip.parse(spec))]


@pytest.mark.parametrize("size", [1, 2, 3, (2, 2)])
@pytest.mark.parametrize("spec", kinds.params(SPECS, [*kinds.SAMPLE, "block-float", "dgc:theta=0.9", "powersgd"]))
def test_it_is_what_the_states_hold(spec, size):
    found = gradzip.memory_bytes(gradzip.parse(spec), SHAPES, size)
    first, *others = most_kept(gradzip.parse(spec), size)
    assert found == first and all(found >= other for other in others)


@pytest.mark.parametrize(
    ("spec", "numel"),
    [
        ("none", 0), ("qsgd", 0), ("topk", COMPRESSED), ("signsgd:error_feedback=False", 0),
        ("momentum:inner=signsgd(majority=False)", 2 * COMPRESSED), ("momentum:inner=qsgd", COMPRESSED),
        ("dgc", 2 * COMPRESSED + NUMELS["b"] + NUMELS["e"] + NUMELS["x"]), ("dgc:momentum=0.0", COMPRESSED),
        ("powersgd:rank=2", COMPRESSED + 2 * (63 + 47 + 31)), ("acpsgd:rank=2,reuse=False", COMPRESSED),
        ("per-layer:^w=topk,^v=dgc", NUMELS["w"] + 2 * NUMELS["v"]), ("topk:min_numel=4000", 0),
    ],
)  # fmt: skip
def test_sizes_by_hand(spec, numel):
    assert gradzip.memory_bytes(gradzip.parse(spec), SHAPES, 3) == 4 * numel


def test_velocities_of_16_bit_gradients_are_float32():
    model = nn.ParameterDict({name: nn.Parameter(torch.empty(shape).bfloat16()) for name, shape in SHAPES.items()})
    found, wide = (gradzip.memory_bytes(gradzip.DGC(), one, 2) for one in (model, SHAPES))
    assert found == most_kept(gradzip.DGC(), 2, dtype=torch.bfloat16)[0] == wide


@pytest.mark.parametrize("places", [2, 4])
@pytest.mark.parametrize("inner", ["acpsgd", "topk", "block-float", "momentum:inner=signsgd(majority=False)"])
def test_nodes_of_several_ranks(inner, places):
    compressor = gradzip.Hierarchical(gradzip.parse(inner))
    found = gradzip.memory_bytes(compressor, SHAPES, (2, places))
    assert found == most_kept(compressor, (2, places))[0]
    alone = gradzip.memory_bytes(gradzip.parse(inner), SHAPES, 2)
    assert found < 1.3 * alone / places
    assert gradzip.memory_bytes(compressor, SHAPES, (1, places)) == 0  # nothing is compressed in one node


def test_phases_keep_what_the_largest_one_keeps():
    phases = {0: gradzip.OneBitSGD(), 3: gradzip.ACPSGD(), 6: gradzip.NoCompression()}
    compressor = gradzip.Phases(phases)
    found = gradzip.memory_bytes(compressor, SHAPES, 2)
    assert found == most_kept(compressor, 2, steps=8)[0] == gradzip.memory_bytes(gradzip.ACPSGD(), SHAPES, 2)
    exempt = gradzip.Phases({0: gradzip.BlockFloat(), 3: gradzip.DGC()}, exempt=["^v"])
    assert gradzip.memory_bytes(exempt, SHAPES, 3) == most_kept(exempt, 3)[0]


def test_auto_counts_all_methods_that_it_compares():
    compressor = gradzip.Auto(allow=["block-float", "acpsgd", "qsgd"])
    found = gradzip.memory_bytes(compressor, SHAPES, 2)
    assert found == sum(gradzip.memory_bytes(part, SHAPES, 2) for part in compressor.parts)
    group = gradzip.LocalGroup(compressor, 2)
    for index in range(4):
        for step in range(3):
            for member in group.compressors:
                member.use(index)
            group.step([{name: gradient(name, r, step, of) for name, of in SHAPES.items()} for r in range(2)])
    assert kept(group.compressors[0]) == found


def test_an_exchange_that_may_change_counts_as_if_it_had():
    auto, scattered, gathered = (gradzip.TopK(exchange=e) for e in ("auto", "scatter_reduce", "gather"))
    assert gradzip.memory_bytes(auto, SHAPES, 3) == gradzip.memory_bytes(scattered, SHAPES, 3)
    assert gradzip.memory_bytes(auto, SHAPES, 2) == gradzip.memory_bytes(gathered, SHAPES, 2)
    assert gradzip.memory_bytes(auto, SHAPES, 3) >= most_kept(auto, 3)[0]


@pytest.mark.parametrize(("samples", "exact"), [(7, True), ("auto", False)])
def test_samples_of_gradiveq(samples, exact):
    compressor = gradzip.GradiVeQ(warmup_steps=1, sample_steps=samples, compress_steps=2, reuse=2, slice_size=500)
    found, (first, second) = gradzip.memory_bytes(compressor, SHAPES, 2), most_kept(compressor, 2, steps=12)
    assert (found == first if exact else found > first) and first >= second


def test_buckets_of_several_sizes():
    """The owner of a partition keeps the residual of a part of each bucket."""
    compressor = gradzip.BlockFloat()
    compressor.bucket_cap_mb = 0.01
    found = gradzip.memory_bytes(compressor, SHAPES, 3)
    assert found == most_kept(compressor, 3)[0] != gradzip.memory_bytes(gradzip.BlockFloat(), SHAPES, 3)


class Net(nn.Module):
    def __init__(self, dtype=torch.float32, device="cpu"):
        super().__init__()
        self.body = nn.Linear(65, 47, dtype=dtype, device=device)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.head = nn.Linear(47, 33, dtype=dtype, device=device)
        self.tied = self.body


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models(dtype):
    """Parameters that are trained count, once. States are float32, but for velocities of what is not compressed."""
    shapes = {name: p.shape for name, p in Net().named_parameters() if p.requires_grad}
    for compressor in (gradzip.TopK(), gradzip.DGC(), gradzip.BlockFloat()):
        expected = most_kept(compressor, 2, shapes, dtype)[0]
        for model in (Net(dtype), Net(dtype, "meta")):
            assert gradzip.memory_bytes(compressor, model, 2) == expected


def test_exempt_parameters_keep_nothing():
    compressor = gradzip.TopK().exempt_modules(Net(), "head")
    assert gradzip.memory_bytes(compressor, Net(), 2) == 4 * 65 * 47 < gradzip.memory_bytes(gradzip.TopK(), Net(), 2)


def test_models_of_ddp_and_fsdp2():
    compressor = gradzip.PerLayer([("^body", gradzip.TopK(min_numel=1))])
    with fake_group(5):
        assert gradzip.memory_bytes(compressor, DistributedDataParallel(Net()), 4) == 4 * 47 * 65
        model = fully_shard(Net(), mesh=init_device_mesh("cpu", (5,)))
        assert gradzip.memory_bytes(compressor, model, 4) == 4 * 10 * 65  # the rows of rank 0


def test_the_compressor_stays_as_it_is():
    group = gradzip.LocalGroup(gradzip.Phases({0: gradzip.TopK(), 2: gradzip.ACPSGD()}), 1)
    (compressor,) = group.compressors
    group.step([{"w": gradient("w", 0, 0)}])
    before = kept(compressor), compressor.step_of("w", torch.Size((64, 48))), compressor.choice_number
    gradzip.memory_bytes(compressor, {"w": (64, 48)}, 8)
    assert before == (kept(compressor), compressor.step_of("w", torch.Size((64, 48))), compressor.choice_number)


def test_bad_input():
    shapes = {"w": (64, 48)}
    for arguments, error, text in (
        (("topk", shapes, 2), TypeError, "memory_bytes: got 'topk', expected a compressor, such as gradzip.TopK()"),
        ((gradzip.TopK(), [(64, 48)], 2), TypeError, "memory_bytes: got shapes of type list, expected the model, or a"),
        ((gradzip.TopK(), {"w": 64}, 2), ValueError, "memory_bytes: got the shape 64 of 'w', expected a tuple of"),
        ((gradzip.TopK(), {"w": (64, -1)}, 2), ValueError, "memory_bytes: got the shape (64, -1) of 'w', expected a"),
        ((gradzip.TopK(), shapes, 0), ValueError, "memory_bytes: got size = 0, expected an integer >= 1, or a pair"),
        ((gradzip.TopK(), shapes, (2, 0)), ValueError, "memory_bytes: got size = (2, 0), expected an integer >= 1"),
        ((gradzip.Hierarchical(gradzip.TopK(), 2), shapes, 3), ValueError, "Hierarchical: got 3 ranks with local_size"),
    ):
        with pytest.raises(error) as caught:
            gradzip.memory_bytes(*arguments)
        assert str(caught.value).startswith(text) and "\n" not in str(caught.value)
