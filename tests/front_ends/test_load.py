"""Real jobs of many steps with many small parameters: steps must not leak memory, files or threads.

By default, a job takes 120 steps; `make load` runs 2000.
"""

import pytest

from launch import horovodrun, scenarios, torchrun

pytest.importorskip("horovod.torch")
from load_worker import PARAMETERS

RANKS = 2
COMPRESSED = PARAMETERS // 2

# Limit on the growth of a warm process. Allocators take memory in blocks of several pages and keep them. The smallest
# leak of tensors would be one payload per gradient and step: more than 500 bytes with TopK and ACPSGD. In 90 steps of
# COMPRESSED gradients, that would be 4.3 MiB.
GROWTH = 4 << 20


@pytest.mark.slow
@pytest.mark.parametrize("method", ["topk:theta=0.9", pytest.param("acpsgd", marks=pytest.mark.long)])
@pytest.mark.parametrize("engine", ["ddp", pytest.param("horovod", marks=pytest.mark.long)])
def test_steps_leak_nothing(engine, method, tmp_path, monkeypatch, pytestconfig):
    steps = pytestconfig.getoption("--load-steps")
    monkeypatch.setenv("STEPS", str(steps))
    monkeypatch.setenv("METHOD", method)
    run = horovodrun if engine == "horovod" else torchrun
    results = scenarios(RANKS, "load_worker.py", tmp_path, run=run, timeout=120 + steps)["trained"]
    for (before, after), parameters, states, counts in results:
        print(engine, method, {resource: after[resource] - before[resource] for resource in before})
        assert after["bytes"] - before["bytes"] < GROWTH
        assert after["tensors"] <= before["tensors"]
        # Caches and interned strings vary. A leak of one object per gradient would be COMPRESSED objects per step.
        assert after["blocks"] - before["blocks"] < COMPRESSED / 20 * steps
        assert after["files"] <= before["files"] and after["threads"] <= before["threads"]
        assert after["under way"] == 0
        # Error feedback was active for half the parameters, in all steps, and all ranks have the same result.
        assert states == COMPRESSED and counts == [steps]
        assert parameters == results[0][1]
