"""`gradzip.optim.AdamW`: torch's bits while nothing is compressed, its formulas when momenta are, and who it refuses.

tests/front_ends/test_momentum_jobs.py trains with it in real jobs.
"""

import copy
import math
import re
import warnings

import numpy as np
import pytest
import torch

import gradzip
from gradzip import LocalGroup, Momentum, NoCompression, SignSGD, TopK
from gradzip.optim import AdamW

pytestmark = pytest.mark.filterwarnings("ignore:AdamW. got .* without a gradient in the warm-up")

SHAPES = {"w": (64, 48), "v": (32, 8, 3, 3), "b": (48,)}
SEEN = 5  # rows of w that have gradients in the warm-up
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WARMUP = 6
LARGEST = 0.1 / math.sqrt(0.05 * (1 - 0.81 / 0.95))  # update in units of lr, of AdamW with these betas


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    return {n: torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in SHAPES.items()}


def gradients(step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    made["w"][SEEN:] *= step >= WARMUP
    return made


class Job:
    """Parameters that are trained with averages of a LocalGroup."""

    def __init__(self, method, kind=AdamW, size=3, dtype=torch.float32, **options):
        self.size, self.dtype, self.done = size, dtype, 0
        self.parameters = parameters(dtype)
        self.optimizer = kind(self.parameters.values(), **OPTIONS | options)
        self.group = LocalGroup(method, size)
        self.averages = []  # of each step

    def train(self, steps):
        for step in range(self.done, self.done + steps):
            averages = self.group.step([gradients(step, rank, self.dtype) for rank in range(self.size)])[0]
            for name, parameter in self.parameters.items():
                parameter.grad = averages[name]
            self.group.tell_optimizers(self.parameters)
            self.optimizer.step()
            self.averages.append({name: average.clone() for name, average in averages.items()})
        self.done += steps
        return self

    @property
    def states(self):
        return {name: self.optimizer.state[parameter] for name, parameter in self.parameters.items()}

    def values(self):
        return [p.detach().clone() for p in self.parameters.values()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def momentum(beta=0.9, warmup=WARMUP):
    return Momentum(SignSGD(majority=False), beta, warmup)


# --- while nothing is compressed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", [NoCompression(), TopK(theta=0.9), momentum(warmup=99)])
def test_has_the_bits_of_torchs_adamw(method, dtype):
    """Also with a method that compresses gradients: the second moment stands still for `Momentum` alone."""
    plain = method if isinstance(method, TopK) else NoCompression()
    # The warm-up averages in float32; a sum of 2 is exact before it is rounded to 16 bits once, as without it.
    ours, theirs = (Job(m, kind, size=1, dtype=dtype) for m, kind in ((method, AdamW), (plain, torch.optim.AdamW)))
    ours.train(12), theirs.train(12)
    assert equal(ours.values(), theirs.values())
    for a, b in zip(ours.states.values(), theirs.states.values()):
        assert a.keys() - b.keys() == {"exp_avg_sq_step"} and a["exp_avg_sq_step"] == 12
        assert all(torch.equal(a[key], b[key]) for key in b)


def test_parameters_that_bypass_compression_are_torchs_in_all_steps():
    ours, theirs = Job(momentum()).train(20), Job(NoCompression(), torch.optim.AdamW).train(20)
    assert torch.equal(ours.parameters["b"], theirs.parameters["b"]) and ours.states["b"]["exp_avg_sq_step"] == 20


# --- when momenta are compressed


def reference(name, averages, warmup):
    """The docstring's formulas, in float64, from the averages that were handed back."""
    lr, (beta1, beta2), eps, decay = (OPTIONS[key] for key in ("lr", "betas", "eps", "weight_decay"))
    p = parameters()[name].detach().double().numpy()
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, average in enumerate(averages, start=1):
        g = average[name].double().numpy()
        m = beta1 * m + (1 - beta1) * g
        if t <= warmup:
            v = beta2 * v + (1 - beta2) * g**2
        update = m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2 ** min(t, warmup))) + eps)
        if t > warmup:
            update, m = np.clip(update, -LARGEST, LARGEST), np.where(v > 0, m, 0.0)
        p = (1 - lr * decay) * p - lr * np.where(v > 0, update, 0.0)
    return p, m, v


@pytest.mark.parametrize("name", ["w", "v"])
def test_follows_its_formulas(name):
    job = Job(momentum()).train(25)
    p, m, v = reference(name, job.averages, WARMUP)
    state = job.states[name]
    # Averages are up to 50; float32 rounds each of 25 momenta, and an update of at most lr m / sqrt(v).
    np.testing.assert_allclose(state["exp_avg"], m, rtol=0, atol=25 * 50 * 2**-24)
    np.testing.assert_allclose(state["exp_avg_sq"], v, rtol=1e-5, atol=0)
    np.testing.assert_allclose(job.parameters[name].detach(), p, rtol=1e-4, atol=1e-4)
    assert (state["step"].item(), state["exp_avg_sq_step"].item()) == (25, WARMUP)


def test_its_momentum_is_the_shared_one():
    """Of Momentum m, (1 - beta) m, although the optimizer has seen the differences alone."""
    job = Job(momentum()).train(40)
    for name in ("w", "v"):
        shared = [compressor.memory.piece(name, "momentum") for compressor in job.group.compressors]
        assert equal(shared, [shared[0]] * 3)
        learnt = job.states[name]["exp_avg_sq"] > 0
        torch.testing.assert_close(job.states[name]["exp_avg"], 0.1 * shared[0] * learnt, rtol=0, atol=1e-5)


def test_the_second_moment_stands_still():
    job = Job(momentum()).train(WARMUP)
    learnt = job.states["w"]["exp_avg_sq"].clone()
    job.train(5)
    assert torch.equal(job.states["w"]["exp_avg_sq"], learnt)


def test_elements_without_a_second_moment_are_only_decayed():
    """Also by the next step of torch's AdamW: of a momentum that is not 0, it would be lr m / eps."""
    job = Job(momentum()).train(WARMUP)
    before = job.parameters["w"].detach().clone()
    job.train(4)
    decayed = before.double() * (1 - OPTIONS["lr"] * OPTIONS["weight_decay"]) ** 4
    assert not job.states["w"]["exp_avg"][SEEN:].any() and job.states["w"]["exp_avg"][:SEEN].all()
    torch.testing.assert_close(job.parameters["w"][SEEN:].detach().double(), decayed[SEEN:], rtol=1e-6, atol=0)
    moved = (job.parameters["w"].detach() - decayed)[:SEEN].abs()
    assert moved.min() > 0 and moved.max() < 1
    of_torch = torch.optim.AdamW(job.parameters.values())
    of_torch.load_state_dict(job.optimizer.state_dict())
    before = job.parameters["w"].detach().clone()
    for name, parameter in job.parameters.items():
        parameter.grad = gradients(0, 0)[name]
    of_torch.step()
    decayed = before.double() * (1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
    torch.testing.assert_close(job.parameters["w"][SEEN:].detach().double(), decayed[SEEN:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("seen", [SEEN, 64])
def test_elements_without_a_second_moment_are_named_once(seen, recwarn):
    warnings.simplefilter("always")
    job = Job(momentum()).train(WARMUP - 1)
    with torch.no_grad():
        job.optimizer.state[job.parameters["w"]]["exp_avg_sq"][SEEN:seen] = 1
    job.train(3)
    messages = [str(w.message) for w in recwarn if "without a gradient" in str(w.message)]
    assert len(messages) == (seen < 64)
    for text in messages:
        what = f"got {(64 - SEEN) * 48} elements without a gradient in the warm-up, of 'w and 1 more' in shape [64, 48]"
        assert text.startswith(f"AdamW: {what}, expected gradients for all")


def test_a_compressor_whose_state_was_not_loaded_is_refused():
    """Its Momentum warms up again, while the second moment stands still since the first warm-up."""
    job = Job(momentum()).train(WARMUP + 2)
    again = Job(momentum())
    again.optimizer.load_state_dict(job.optimizer.state_dict())
    with pytest.raises(
        ValueError, match=r"AdamW: got a second moment of '[wv].*' that stands still.* load the compressor"
    ):
        again.train(1)
    for own, saved in zip(again.group.compressors, job.group.compressors):
        own.load_state_dict(saved.state_dict())
    again.train(1)


def test_no_element_moves_further_than_adamw_can_move_it():
    """Whatever its second moment; the step is reached in the limit, by gradients that grow by beta2 / beta1 a step."""
    job = Job(momentum()).train(WARMUP)
    v = job.states["w"]["exp_avg_sq"]
    v[:2] *= torch.tensor([1e-30, 1e-6])[:, None]
    decay = 1 - OPTIONS["lr"] * OPTIONS["weight_decay"]
    for _ in range(5):
        before = job.parameters["w"].detach().clone()
        job.train(1)
        moved = (job.parameters["w"].detach() - decay * before)[:SEEN].abs() / OPTIONS["lr"]
        assert moved.max() < LARGEST + 1e-4
        assert moved[0].min() > LARGEST - 1e-4 > moved[2:].median()
    growing, lr = (0.95 / 0.9) ** torch.arange(300.0), 1e-3
    one = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([one], lr, (0.9, 0.95), eps=0.0, weight_decay=0.0)
    for g in growing:
        before = one.item()
        one.grad = g.view(1)
        optimizer.step()
    assert (before - one.item()) / lr == pytest.approx(LARGEST, rel=1e-3)


def test_units_that_the_warm_up_hardly_used_do_not_diverge():
    """A ReLU network on digits: many second moments are tiny when they begin to stand still."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    pixels, labels = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    layers = [torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU()]
    network = torch.nn.Sequential(*layers, torch.nn.Linear(128, 10))
    named = dict(network.named_parameters())
    optimizer, group = AdamW(named.values(), lr=0.004, betas=(0.9, 0.95)), LocalGroup(momentum(warmup=60), size=2)

    def loss(examples):
        return torch.nn.functional.cross_entropy(network(pixels[examples]), labels[examples])

    losses = []
    for step in range(120):
        if step in (0, 60):
            losses.append(loss(slice(None)).item())
        batches = [
            torch.randint(len(labels), (32,), generator=torch.Generator().manual_seed(10 * step + r)) for r in (0, 1)
        ]
        taken = [torch.autograd.grad(loss(batch), list(named.values())) for batch in batches]
        for name, average in group.step([dict(zip(named, grads)) for grads in taken])[0].items():
            named[name].grad = average
        group.tell_optimizers(named)
        optimizer.step()
    assert loss(slice(None)).item() < 0.8 * losses[1] < 0.1 * losses[0]


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("when", [3, WARMUP, WARMUP + 4])
def test_a_state_dict_continues_to_the_bit(when, foreign):
    """In the warm-up, between both, and after it; through torch's AdamW, too. Nothing is reset."""
    job = Job(momentum()).train(when)
    other = Job(momentum())
    saved = copy.deepcopy(job.optimizer.state_dict())
    if foreign:
        theirs = torch.optim.AdamW(parameters().values(), lr=1.0)
        theirs.load_state_dict(saved)
        saved = copy.deepcopy(theirs.state_dict())
    other.optimizer.load_state_dict(saved)
    for mine, of_job in zip(other.group.compressors, job.group.compressors):
        mine.load_state_dict(copy.deepcopy(of_job.state_dict()))
    with torch.no_grad():
        for mine, of_job in zip(other.parameters.values(), job.parameters.values()):
            mine.copy_(of_job)
    other.done = when
    assert equal(other.train(6).values(), job.train(6).values())


def test_a_state_of_torchs_adamw_needs_no_warm_up():
    """Its second moment is there: compression may begin at once."""
    job, theirs = Job(momentum(warmup=0)), Job(NoCompression(), torch.optim.AdamW).train(8)
    job.optimizer.load_state_dict(copy.deepcopy(theirs.optimizer.state_dict()))
    learnt = theirs.states["w"]["exp_avg_sq"].clone()
    job.train(3)
    assert torch.equal(job.states["w"]["exp_avg_sq"], learnt)
    assert (job.states["w"]["step"].item(), job.states["w"]["exp_avg_sq_step"].item()) == (11, 8)


def test_learns_again_once_nothing_is_compressed():
    job = Job(gradzip.Phases({0: momentum(), WARMUP + 3: NoCompression()})).train(WARMUP + 3)
    learnt = job.states["w"]["exp_avg_sq"].clone()
    job.train(1)
    assert not torch.equal(job.states["w"]["exp_avg_sq"], learnt)
    assert job.states["w"]["exp_avg_sq_step"] == WARMUP + 1


# --- who is refused


def message(job):
    with pytest.raises(ValueError) as caught:
        job.train(WARMUP + 2)
    return str(caught.value)


PHASES = gradzip.Phases({0: TopK(), 3: NoCompression(), WARMUP: momentum(warmup=0)})


@pytest.mark.parametrize("method", [momentum(warmup=0), momentum(), PHASES], ids=["at once", "warm-up", "phases"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam])
def test_torchs_optimizers_with_a_second_moment_are_refused(kind, method):
    """In the first step, not after the warm-up, and nothing has moved."""
    job = Job(copy.deepcopy(method), kind)
    before = job.values()
    assert message(job) == (
        f"{kind.__name__}: got a parameter whose momentum Momentum compresses, expected an optimizer without a second "
        "moment of gradients, or one that holds it still then: use gradzip.optim.AdamW"
    )
    assert equal(before, job.values())


def test_another_momentum_is_refused():
    words = "for a parameter whose momentum Momentum compresses with beta = {}, expected equal numbers: give Momentum"
    assert message(Job(momentum(beta=0.8))).startswith("AdamW: got betas = (0.9, 0.95) " + words.format(0.8))
    sgd = {"kind": lambda params, **_: torch.optim.SGD(params, lr=0.1, momentum=0.5)}
    assert message(Job(momentum(), **sgd)).startswith("SGD: got momentum = 0.5 " + words.format(0.9))


def test_another_decay_of_the_second_moment_is_refused():
    """If the warm-up ends by it. SGD has none."""
    auto = Momentum(SignSGD(majority=False), warmup_steps="auto", beta2=0.9)
    assert message(Job(auto)) == (
        "AdamW: got betas = (0.9, 0.95) for a parameter whose warm-up Momentum ends by a second moment with beta2 = "
        "0.9, expected equal numbers: give Momentum beta2=0.95"
    )
    Job(auto, lambda params, **_: torch.optim.SGD(params, lr=0.1, momentum=0.9)).train(3)
    Job(Momentum(SignSGD(majority=False), warmup_steps=1, beta2=0.9)).train(3)


def test_both_switch_together_when_the_second_moment_has_settled():
    job = Job(Momentum(SignSGD(majority=False), warmup_steps="auto", beta2=0.5), betas=(0.9, 0.5)).train(30)
    last = job.group.compressors[0].memory.find("w").warmup_steps
    assert 4 <= last < 30
    assert [job.states[name]["exp_avg_sq_step"] for name in SHAPES] == [last, last, 30]


@pytest.mark.parametrize("beta", [0.9, 0.0])
def test_sgd_is_as_without_compression(beta):
    """With the same momentum, or without any; its buffer is the shared momentum."""
    job = Job(momentum(warmup=2), lambda params, **_: torch.optim.SGD(params, lr=0.1, momentum=beta)).train(8)
    if beta:
        shared = job.group.compressors[0].memory.piece("w", "momentum")
        torch.testing.assert_close(job.states["w"]["momentum_buffer"], shared, rtol=0, atol=1e-4)


def test_no_step_before_the_second_moment_is_learnt():
    """Nothing has moved: not even parameters of other groups, which are averaged uncompressed."""
    job = Job(momentum(warmup=0))
    w, v, b = job.parameters.values()
    job.optimizer = AdamW([{"params": [b]}, {"params": [w, v]}], **OPTIONS)
    before = job.values()
    assert message(job) == (
        "AdamW: got a compressed momentum as the first average of 'w and 1 more', expected gradients first, of which "
        "to learn the second moment: give Momentum more warmup_steps, or this parameter another method with PerLayer"
    )
    assert equal(before, job.values())


@pytest.mark.parametrize("warmup", [WARMUP, "auto"])
def test_a_parameter_that_is_used_late_has_a_warm_up_of_its_own(warmup):
    """Front ends average zeros for it until then, of which no second moment can be learnt."""
    method = Momentum(SignSGD(majority=False), warmup_steps=warmup, beta2=0.5)  # remembers two steps
    parameter, used = torch.nn.Parameter(torch.zeros(64, 48)), 30
    optimizer, group = AdamW([parameter], lr=0.01, betas=(0.9, 0.5), weight_decay=0.0), LocalGroup(method, 2)
    for step in range(60):
        grads = [{"w": gradients(WARMUP, rank)["w"] * (step >= used)} for rank in range(2)]
        parameter.grad = group.step(grads)[0]["w"]
        group.tell_optimizers({"w": parameter})
        optimizer.step()
        if step in (used - 1, used + 2):
            assert not method.compresses_momentum(group.compressors[0].states["w"])
    assert group.compressors[0].compresses_momentum(group.compressors[0].states["w"])
    assert parameter.detach().abs().median() > 0.1 and (parameter != 0).all()


def test_counters_are_loaded_as_they_are():
    """torch moves states to the dtype of parameters. bfloat16 has no 257, so that the count stopped at 256."""
    ours, other = (Job(momentum(warmup=999), dtype=torch.bfloat16) for _ in range(2))
    ours.train(1)
    for state in ours.states.values():
        state["step"].fill_(256.0), state["exp_avg_sq_step"].fill_(255.0)
    saved = ours.optimizer.state_dict()
    other.optimizer.load_state_dict(saved)
    for state in other.states.values():
        for name, count in (("step", 256.0), ("exp_avg_sq_step", 255.0)):
            assert state[name].dtype == torch.float32 and state[name] == count
            state[name] += 1  # that of the saved one stays
    assert all(state["step"] == 256 for state in ours.states.values())


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_states_that_it_cannot_continue_are_refused(option):
    theirs = torch.optim.AdamW(parameters().values(), **{option: True})
    with pytest.raises(
        ValueError, match=f"AdamW: got a state dict with {option} = True, expected one of AdamW without"
    ):
        AdamW(parameters().values()).load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match=f"AdamW: got a param group with {option} = True, expected one of AdamW with"):
        AdamW([{"params": list(parameters().values()), option: True}])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lr": -1.0}, "got lr = -1.0, expected a number >= 0"),
        ({"eps": math.nan}, "got eps = nan"),
        ({"betas": (0.9, 1.0)}, "got betas = (0.9, 1.0), expected two numbers in [0, 1)"),
    ],
)
def test_refuses_wrong_options(options, expected):
    with pytest.raises(ValueError, match=re.escape(f"AdamW: {expected}")):
        AdamW(parameters().values(), **options)
