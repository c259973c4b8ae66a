"""gradzip.optim.Muon against torch's Muon and AdamW, and what optimizers of torch promise."""

import copy

import pytest
import torch

import gradzip

SHAPES = {"tall": (24, 8), "wide": (6, 30), "bias": (7,), "embedding": (9, 4)}
OF_ADAMW = ("bias", "embedding")
STEPS = 6


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in SHAPES.items()}


def groups(named):
    return [
        {"params": [p for name, p in named.items() if name not in OF_ADAMW]},
        {"params": [named[name] for name in OF_ADAMW], "adamw": True},
    ]


def train(named, optimizers, steps=range(STEPS)):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in named.values():
            p.grad = torch.randn(p.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


def assert_equal(ours, theirs):
    for name in SHAPES:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch without Muon")
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_have_the_bits_of_torchs_optimizers(nesterov):
    ours, theirs = parameters(), parameters()
    train(ours, [gradzip.optim.Muon(groups(ours), lr=0.02, nesterov=nesterov)])
    matrices, others = (group["params"] for group in groups(theirs))
    muon = torch.optim.Muon(matrices, lr=0.02, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
    train(theirs, [muon, torch.optim.AdamW(others, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)])
    assert_equal(ours, theirs)


def test_an_update_is_nearly_orthogonal():
    """Singular values of the sum of updates are near 1, before the factor. The iteration ends between 0.6 and 1.3."""
    named = parameters()
    before = named["tall"].detach().clone()
    train(named, [gradzip.optim.Muon(groups(named), lr=1.0, weight_decay=0.0)], steps=[0])
    values = torch.linalg.svdvals((before - named["tall"].detach()) / (0.2 * 24**0.5))
    assert values.min() > 0.6 and values.max() < 1.3


def test_loading_goes_on_with_the_same_bits():
    whole = parameters()
    train(whole, [gradzip.optim.Muon(groups(whole))])
    half = parameters()
    first = gradzip.optim.Muon(groups(half))
    train(half, [first], range(3))
    second = gradzip.optim.Muon(groups(half))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(half, [second], range(3, STEPS))
    assert_equal(half, whole)


def test_groups_have_the_options_of_their_kind():
    """Horovod makes an optimizer again from its param groups."""
    named = parameters()
    optimizer = gradzip.optim.Muon(groups(named), momentum=0.8, betas=(0.7, 0.9))
    for again in (optimizer, gradzip.optim.Muon(optimizer.param_groups), copy.deepcopy(optimizer)):
        matrices, others = again.param_groups
        assert matrices["momentum"] == 0.8 and "betas" not in matrices
        assert others["betas"] == (0.7, 0.9) and "momentum" not in others


def test_momenta_are_compressed_if_they_are_the_optimizers():
    """The first moments are those that `Momentum` keeps, and the second moments of AdamW stand still."""
    named = {"w": torch.zeros(64, 48, requires_grad=True), "e": torch.zeros(48, 32, requires_grad=True)}
    split = [{"params": [named["w"]]}, {"params": [named["e"]], "adamw": True}]
    optimizer = gradzip.optim.Muon(split, momentum=0.9, nesterov=False)
    group = gradzip.LocalGroup(gradzip.Momentum(gradzip.SignSGD(majority=False), beta=0.9, warmup_steps=2), 2)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        grads = [{name: torch.randn(p.shape, generator=generator) for name, p in named.items()} for _ in range(2)]
        for name, average in group.step(grads)[0].items():
            named[name].grad = average
        group.tell_optimizers(named)
        optimizer.step()
    memory = group.compressors[0].memory
    for name, field in (("w", "momentum_buffer"), ("e", "exp_avg")):
        own = optimizer.state[named[name]][field]
        # Momenta are below 8; five steps round a few numbers of that size.
        torch.testing.assert_close(0.1 * memory.piece(name, "momentum"), own, rtol=0, atol=5 * 8 * 2**-24)
    assert optimizer.state[named["e"]]["exp_avg_sq_step"] == 2


def test_state_dicts_of_others_are_refused():
    named = parameters()
    optimizer = gradzip.optim.Muon(groups(named))
    for other in (torch.optim.AdamW(named.values()), gradzip.optim.Muon(groups(named)[::-1])):
        with pytest.raises(
            ValueError, match=r"Muon: got a state dict .* adamw = \[.*\], expected \[False, True\]: load"
        ):
            optimizer.load_state_dict(other.state_dict())


def test_errors():
    vector = torch.zeros(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"Muon: got a parameter of shape \[3\], expected a whole matrix; put it into"):
        gradzip.optim.Muon([vector])
    with pytest.raises(ValueError, match="Muon: got momentum = 1.0, expected a number in"):
        gradzip.optim.Muon([torch.zeros(3, 3)], momentum=1.0)
    with pytest.raises(ValueError, match=r"Muon: got betas = \(0.9, 1.0\)"):
        gradzip.optim.Muon([torch.zeros(3, 3)], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="Muon: got lr = -1, expected a number >= 0"):
        gradzip.optim.Muon([torch.zeros(3, 3)], lr=-1)


def test_a_shard_is_refused():
    dist = pytest.importorskip("torch.distributed.tensor")
    with torch.device("cpu"):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        shard = torch.nn.Parameter(dist.distribute_tensor(torch.zeros(4, 4), mesh))
        with pytest.raises(ValueError, match=r"Muon: got a parameter that is a shard \(DTensor\), expected a whole"):
            gradzip.optim.Muon([shard])
    finally:
        torch.distributed.destroy_process_group()
