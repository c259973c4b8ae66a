"""Optimizers that DGC refuses, and steps that optimizers skip.

test_horovod.py, test_ddp.py and test_fsdp.py test the refusal in real jobs, test_nonfinite.py the skipped steps.
"""

import copy
import re
import subprocess
import sys
import warnings

import pytest
import torch

import gradzip
from gradzip.averaging import optimizer_hooks
from gradzip.engines.local import drive
from gradzip.methods.base.group import plan_groups

optimizer_hooks.install()
BYPASSED = "dgc:min_numel=10000"


def average(compressor, parameter, frozen=False):
    """Average the gradient 1 as the front ends do it, in a group of one."""
    (group,) = plan_groups(compressor, [parameter], ["p"], frozen=frozen)
    parameter.grad = torch.ones_like(parameter)
    drive([group.average([parameter.grad])])
    optimizer_hooks.register([(group, [parameter])])
    group.end_step(skipped=False)


def plan(parameters):
    """The groups of parameters that are averaged uncompressed, with these, as front ends tell of them."""
    groups = plan_groups(gradzip.NoCompression(), parameters, [str(i) for i in range(len(parameters))])
    return [(group, [parameters[i] for i in group.indices]) for group in groups]


def parameter():
    return torch.nn.Parameter(torch.full((40, 40), 2.0))


REFUSED = {
    "momentum": (torch.optim.SGD, {"momentum": 0.5}),
    "Nesterov": (torch.optim.SGD, {"momentum": 0.5, "nesterov": True}),
    "weight decay": (torch.optim.SGD, {"weight_decay": 0.1}),
    "of Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "of RMSprop": (torch.optim.RMSprop, {"momentum": 0.5}),
}


@pytest.mark.parametrize("spec", ["dgc", BYPASSED, "per-layer:p=dgc", "phases:0=dgc,9=none"])
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("with_closure", [False, True])
def test_momentum_and_weight_decay_of_the_optimizer_are_refused(spec, case, with_closure):
    kind, options = REFUSED[case]
    p, compressor = parameter(), gradzip.parse(spec)
    optimizer = kind([p], lr=0.1, **options)
    (name, value), *_ = options.items()
    message = (
        f"{kind.__name__}: got {name} = {value} for a parameter to which DGC applies momentum 0.9, expected 0: use "
        f"gradzip.optim.DGCSGD, or give its param group {name}=0"
    )
    if with_closure:
        with pytest.raises(ValueError, match=re.escape(message)):
            optimizer.step(lambda: average(compressor, p))
        return
    average(compressor, p)
    for _ in range(2):  # also if it is tried again
        with pytest.raises(ValueError, match=re.escape(message)):
            optimizer.step()
    assert torch.equal(p, parameter())


ALLOWED = {
    "DGCSGD": (gradzip.optim.DGCSGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "plain SGD": (torch.optim.SGD, {}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {}),
    "decoupled": (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_other_optimizers_are_left_alone(case):
    """They step as without DGC, and have no other state."""
    kind, options = ALLOWED[case]
    p, plain = parameter(), parameter()
    optimizer, without = kind([p], lr=0.1, **options), kind([plain], lr=0.1, **options)
    compressor = gradzip.parse("dgc:theta=0")  # the average is the gradient
    for _ in range(3):
        average(compressor, p)
        plain.grad = torch.ones_like(plain)
        optimizer.step(), without.step()
    assert torch.equal(p, plain) and not torch.equal(p, parameter())
    states = [of.state_dict()["state"].get(0, {}).keys() for of in (optimizer, without)]
    assert states[0] == states[1]


HOWS = [
    "another method",
    "no momentum",
    "not averaged",
    "frozen",
    "compressor deleted",
    "another phase",
    "own group",
]


@pytest.mark.parametrize("how", HOWS)
def test_parameters_that_dgc_does_not_average_may_have_both(how):
    p, compressor = parameter(), gradzip.parse("phases:0=dgc,1=none" if how == "another phase" else BYPASSED)
    sgd = torch.optim.SGD([p], lr=0.1)
    average(compressor, p)
    sgd.step()
    sgd.param_groups[0].update(momentum=0.5, weight_decay=0.1)
    before = p.detach().clone()
    if how == "not averaged":
        p.grad = torch.ones_like(p)
    elif how == "own group":
        other = parameter()
        sgd = torch.optim.SGD([{"params": [other], "momentum": 0.5, "weight_decay": 0.1}, {"params": [p]}], lr=0.1)
        average(compressor, p)
    elif how == "compressor deleted":
        average(compressor, p)
        del compressor
    else:
        if how == "another phase":
            compressor.complete_step(["p"])
        elif how != "frozen":
            compressor = gradzip.parse("none" if how == "another method" else "dgc:momentum=0")
        average(compressor, p, frozen=how == "frozen")
    sgd.step()
    assert not torch.equal(p, before)


def test_optimizers_have_no_hooks_before_a_front_end_is_made():
    code = (
        "import torch, torch.optim.optimizer as o, gradzip, gradzip.ddp\n"
        "from gradzip.averaging.session import Session\n"
        "compressor = gradzip.TopK()\n"
        "assert not o._global_optimizer_pre_hooks and not o._global_optimizer_post_hooks\n"
        "for _ in range(2): Session(compressor, 'test')\n"
        "assert len(o._global_optimizer_pre_hooks) == len(o._global_optimizer_post_hooks) == 1\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


# --- steps to skip

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
    "DGCSGD": lambda p: gradzip.optim.DGCSGD(p, weight_decay=0.1),
}


def states_of(optimizer):
    return copy.deepcopy(list(optimizer.state_dict()["state"].values()))


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_to_skip_changes_neither_parameters_nor_state(kind, with_closure):
    """Nor those of parameters beside it. The gradients are there before and after it, and the next step is as usual."""
    parameters, plain = [parameter(), parameter()], [parameter(), parameter()]
    optimizer, without = OPTIMIZERS[kind](parameters), OPTIMIZERS[kind](plain)

    def step(of, named, value, skips=False):
        def closure():
            for p, factor in zip(named, (1.0, 0.5)):
                p.grad = torch.full_like(p, value * factor)
            if skips:
                optimizer_hooks.skip(named[:1], ["w"], True)
            return torch.tensor(value)

        if with_closure or kind == "LBFGS":
            of.step(closure)
        else:
            closure()
            of.step()

    for value in (1.0, 2.0):
        for of, named in ((optimizer, parameters), (without, plain)):
            step(of, named, value)
        if value == 1.0:
            before, state = [p.detach().clone() for p in parameters], states_of(optimizer)
            with pytest.warns(
                UserWarning, match="got an average gradient of 'w' that is not finite, expected .* skipped"
            ):
                step(optimizer, parameters, torch.nan, skips=True)
            assert all(map(torch.equal, parameters, before))
            assert all(p.grad.isnan().all() for p in parameters)
            for was, now in zip(state, states_of(optimizer), strict=True):
                for name in was.keys() - {"func_evals"}:
                    same = torch.equal if isinstance(was[name], torch.Tensor) else lambda a, b: str(a) == str(b)
                    assert same(was[name], now[name]), name
    assert all(map(torch.equal, parameters, plain))
    assert not any(map(torch.equal, parameters, before))


def test_clipping_and_zeroing_around_a_step_to_skip():
    p, buffer = parameter(), torch.full((40, 40), torch.nan)
    p.grad = buffer
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer_hooks.skip([p], ["w"], False)
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    optimizer.step()
    assert p.grad is buffer  # a gradient in a buffer of the user's stays there
    optimizer.zero_grad(set_to_none=False)
    p.grad += 1
    optimizer.step()
    assert torch.equal(p, parameter() - 0.1)


class Wrapping(torch.optim.SGD):
    """Looks at the gradients before and after the step of the class that it derives from."""

    def step(self, closure=None):
        self.seen = [p.grad is None for p in self.param_groups[0]["params"]]
        super().step(closure)
        self.seen += [p.grad is None for p in self.param_groups[0]["params"]]


def test_a_step_within_a_step_hides_gradients_until_the_outer_one_ends():
    p = parameter()
    optimizer = Wrapping([p], lr=0.1)
    p.grad = torch.full_like(p, torch.nan)
    optimizer_hooks.skip([p], ["w"], False)
    optimizer.step()
    assert optimizer.seen == [True, True] and p.grad.isnan().all() and torch.equal(p, parameter())
    p.grad.fill_(1)
    optimizer.step()
    assert optimizer.seen == [False, False] and torch.equal(p, parameter() - 0.1)


class Failing(Wrapping):
    """Its step fails, outside of the step that it wraps, or within."""

    fails = ""

    def step(self, closure=None):
        if self.fails == "outside":
            raise MemoryError
        return super().step(self.fail if self.fails == "within" else closure)

    def fail(self):
        raise MemoryError


@pytest.mark.parametrize("fails", ["outside", "within"])
@pytest.mark.parametrize("again", ["the same step", "another step"])
def test_a_step_that_fails_is_skipped_if_it_is_tried_again_and_others_are_taken(fails, again):
    p = parameter()
    optimizer = Failing([p], lr=0.1)
    p.grad = bad = torch.full_like(p, torch.nan)
    optimizer_hooks.skip([p], ["p"], warns=False)
    optimizer.fails = fails
    with pytest.raises(MemoryError):
        optimizer.step()
    optimizer.fails = ""
    if again == "the same step":
        optimizer.step()
        assert p.grad is bad and torch.equal(p, parameter())
    else:  # in which the parameter has no gradient
        optimizer.zero_grad()
        optimizer_hooks.take(plan([p]))
        optimizer.step()
        assert p.grad is None and torch.equal(p, parameter())
    p.grad = torch.ones_like(p)
    for step in range(1, 4):
        optimizer.step()
        assert torch.allclose(p, parameter() - 0.1 * step)


def test_a_closure_that_fails_leaves_the_gradients_there():
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.1)
    p.grad = torch.full_like(p, torch.nan)
    optimizer_hooks.skip([p], ["w"], False)

    def fails():
        raise gradzip.PayloadError("this one")

    with pytest.raises(gradzip.PayloadError, match="this one"):
        optimizer.step(fails)
    assert p.grad.isnan().all() and not optimizer_hooks._hidden
    optimizer_hooks.take(plan([p]))


def test_gradscaler_and_other_optimizers_do_not_warn():
    p, other = parameter(), parameter()
    p.grad, other.grad = torch.full_like(p, torch.nan), torch.ones_like(other)
    optimizer_hooks.skip([p], ["w"], False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD([other], lr=0.1).step()
        torch.optim.SGD([p], lr=0.1).step()
    assert torch.equal(p, parameter()) and not torch.equal(other, parameter())


def test_an_optimizer_whose_parameters_were_not_averaged_again_still_skips():
    """Another optimizer's were, as of a discriminator whose loss comes after that of the generator."""
    p, other = parameter(), parameter()
    p.grad, other.grad = torch.full_like(p, torch.nan), torch.ones_like(other)
    optimizer_hooks.skip([p, other], ["p"], False)
    optimizer_hooks.take(plan([other]))
    for of in (p, other):
        torch.optim.SGD([of], lr=0.1).step()
    assert torch.equal(p, parameter()) and not torch.equal(other, parameter())


def test_a_parameter_that_is_frozen_between_two_skipped_steps_does_not_skip_a_third():
    p, frozen = parameter(), parameter()
    optimizer_hooks.skip([p, frozen], ["p"], False)
    optimizer_hooks.skip([p], ["p"], False)  # GradScaler has skipped the optimizer's steps
    optimizer_hooks.take(plan([p]))
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p, frozen], lr=0.1).step()
    assert not torch.equal(p, parameter())
