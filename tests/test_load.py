"""Many steps of many small parameters, in real jobs: nothing that a step takes is kept.

A few steps by default; `make load` runs 2000.
"""

import json

import pytest

from launch import horovodrun, torchrun

pytest.importorskip("horovod.torch")
from load_worker import PARAMETERS

RANKS = 2
COMPRESSED = PARAMETERS // 2

# What a process may grow by once it is warm: allocators take memory in pieces of some pages and keep them. The least
# that a leak of tensors could be is one payload per gradient and step: more than 500 bytes, of TopK and of ACPSGD,
# times COMPRESSED times 90 steps, 4.3 MiB.
GROWTH = 4 << 20


@pytest.mark.slow
@pytest.mark.parametrize("method", ["topk:theta=0.9", pytest.param("acpsgd", marks=pytest.mark.long)])
@pytest.mark.parametrize("engine", ["horovod", "ddp"])
def test_nothing_is_left_of_a_step(engine, method, tmp_path, pytestconfig):
    steps = pytestconfig.getoption("--load-steps")
    run = horovodrun if engine == "horovod" else torchrun
    job = run(RANKS, "load_worker.py", engine, method, steps, tmp_path, timeout=120 + steps)
    assert job.returncode == 0, job.stdout[-4000:] + job.stderr[-4000:]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for (before, after), parameters, states, counts in results:
        print(engine, method, {what: after[what] - before[what] for what in before})
        assert after["bytes"] - before["bytes"] < GROWTH
        assert after["tensors"] <= before["tensors"]
        # Caches and interned strings come and go; one object for each gradient and step would be COMPRESSED a step.
        assert after["blocks"] - before["blocks"] < COMPRESSED / 20 * steps
        assert after["files"] <= before["files"] and after["threads"] <= before["threads"]
        assert after["under way"] == 0
        # It did what it should: error feedback for half the parameters, in all steps, with the same result everywhere.
        # (DDP's hook may join those of a bucket.)
        assert (states == COMPRESSED if engine == "horovod" else 1 <= states <= COMPRESSED) and counts == [steps]
        assert parameters == results[0][1]
