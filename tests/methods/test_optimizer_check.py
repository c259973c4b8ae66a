"""Optimizers that DGC refuses. test_horovod.py, test_ddp.py and test_fsdp.py test the refusal in real jobs."""

import re
import subprocess
import sys

import pytest
import torch

import gradzip
from gradzip.averaging import optimizer_check
from gradzip.averaging.routine import Averaging
from gradzip.engines.local import drive

BYPASSED = "dgc:min_numel=10000"


def average(compressor, parameter, frozen=False):
    """Average the gradient 1 as the front ends do it, in a group of one."""
    averaging = Averaging(compressor, "p", parameter, frozen=frozen)
    optimizer_check.register(parameter, averaging)
    parameter.grad = torch.ones_like(parameter)
    drive([averaging.run(parameter.grad)])


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
    "AdaMomentum": (gradzip.optim.AdaMomentum, {"weight_decay": 0.1}),
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
            compressor.end_step(None, ["p"])
        elif how != "frozen":
            compressor = gradzip.parse("none" if how == "another method" else "dgc:momentum=0")
        average(compressor, p, frozen=how == "frozen")
    sgd.step()
    assert not torch.equal(p, before)


@pytest.mark.long
def test_optimizers_have_no_hooks_before_dgc_is_used():
    code = (
        "import torch, torch.optim.optimizer as o, gradzip, gradzip.ddp\n"
        "from gradzip.averaging import optimizer_check\n"
        "from gradzip.averaging.routine import Averaging\n"
        "p = torch.nn.Parameter(torch.zeros(40, 40))\n"
        "optimizer_check.register(p, Averaging(gradzip.TopK(), 'p', p))\n"
        "assert not o._global_optimizer_pre_hooks and not o._global_optimizer_post_hooks\n"
        "for _ in range(2): optimizer_check.register(p, Averaging(gradzip.DGC(), 'p', p))\n"
        "assert len(o._global_optimizer_pre_hooks) == len(o._global_optimizer_post_hooks) == 1\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
