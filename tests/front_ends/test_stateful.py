"""Front ends under random actions: steps, failures, loads, changes of the model (tests/support/stateful.py)."""

import pytest
import torch.distributed as dist

import stateful

SECONDS = 8  # for each front end
# Cases that failed once.
FOUND = [
    # DDP discarded an average, and with it what was sent of residuals.
    "acpsgd | | step:none wrap:unused unused:first.a:all step:none",
    # FSDP2 added an average to a gradient that was not finite, and did not skip the step.
    "none | | overflow:first.a:1:nan:averaged step:zeros",
    # Optimizers skipped a step because of a parameter that was frozen since the last one.
    "topk | scaled | overflow:first.a:0:inf:local freeze:first.a step:none unfreeze step:none",
    # The momentum of a parameter that no rank has used was another one than the optimizer's.
    "momentum:inner=signsgd(majority=False),warmup_steps=2 | scaled | step:none step:none step:zeros wrap:unused "
    "unused:first.a:all step:none unused:second.c:0 overflow:first.a:1:nan:local resume step:none",
    # Optimizers skipped a step because of a parameter that was frozen between two others that overflowed.
    "topk | scaled | overflow:first.b:1:inf:averaged freeze:first.a overflow:first.b:0:inf:averaged step:none",
    # States whose names had a prefix more were foreign, if there was one of a parameter that is frozen.
    "topk | | step:zeros freeze:second.d resume:net.",
    # Steps whose names had a prefix more began anew, if the method of their phase keeps no states.
    "phases:0=momentum(inner=signsgd(majority=False),warmup_steps=1),2=none | | "
    "step:none step:none step:none resume:net.",
    # A parameter that no rank used lost what was its owner's, if the partitions had changed.
    "topk:theta=0.9,exchange=scatter_reduce | scaled small_buckets two_passes | unused:first.a:1:once wrap:views "
    "unused:first.a:all:once",
    # A backward pass that failed between the rounds of a method changed what the method had assigned so far.
    "block-float | | step:none fail:end",
]
ENGINES = ["ddp", *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp", "horovod"))]


def check(engine, **arguments):
    if engine == "horovod":
        pytest.importorskip("horovod.torch")
    elif not dist.is_available():
        pytest.skip("torch without torch.distributed")
    count, actions, failed, output = stateful.run(engine, **arguments)
    assert failed is None, f"{output[:6000]}\nfailed: --engine {engine} --case '{failed}'"
    return count, actions


@pytest.mark.parametrize("engine", ENGINES)
def test_cases_that_failed_once(engine):
    count, _ = check(engine, cases=FOUND)
    assert count == len(FOUND)


@pytest.mark.long
@pytest.mark.parametrize("engine", stateful.ENGINES)
def test_random_actions(engine):
    """The same cases in each run; `make stateful` tries others."""
    count, actions = check(engine, seconds=SECONDS, seed=0)
    print(f"{engine}: {count} cases, {actions}")
    assert count and actions["step"]
