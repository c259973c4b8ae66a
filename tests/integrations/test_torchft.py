"""Local steps in the quorums of torchft: real replicas, one of which is killed with SIGKILL and started again."""

import itertools
import json
import os
import signal
import subprocess
import time

import pytest
import torch

import integrations
from contract import gradient
from integrations import BIN
from launch import environment, worker_path
from paths import ROOT

pytestmark = [
    pytest.mark.skipif(
        not (BIN / "torchft_lighthouse").exists(), reason="no torchft in .venv-integrations: make integrations"
    ),
    pytest.mark.long,
    pytest.mark.timeout(600),
]

REPLICAS, KILLED, DIES_AFTER, GOES_ON_FOR, LR = 3, 1, 3, 4, 0.1  # of torchft_worker.py
PORT = 29_000 + os.getpid() % 1000


def start(command, output, **options):
    with open(output, "w") as file:
        return subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, **options
        )


def run(plan, folder):
    """Run a plan of torchft_worker.py. Return the records of each process: {(number, generation): [record, ...]}."""
    variables = environment(
        GLOO_SOCKET_IFNAME="lo", PYTHONPATH=os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
    )
    address = f"127.0.0.1:{PORT}"
    # A replica that sends no heartbeat for two seconds is dead. The others wait for each other for a minute.
    lighthouse = start(
        [BIN / "torchft_lighthouse", "--bind", address, "--min_replicas", 1, "--join_timeout_ms", 60000,
         "--heartbeat_timeout_ms", 2000], folder / "lighthouse.log",
    )  # fmt: skip

    def replica(number, generation):
        command = [*integrations.python(), worker_path("torchft_worker.py"), plan, folder, f"http://{address}"]
        return start([*command, number, generation], folder / f"{number}.{generation}.log", env=variables)

    processes = {(number, 0): replica(number, 0) for number in range(REPLICAS)}
    try:
        deadline = time.monotonic() + 500
        while any(process.poll() is None for process in processes.values()):
            if (KILLED, 1) not in processes and processes[KILLED, 0].poll() is not None:
                processes[KILLED, 1] = replica(KILLED, 1)
            if time.monotonic() > deadline or any(
                process.poll() not in (None, 0, -9) for process in processes.values()
            ):
                break
            time.sleep(0.05)
        codes = {key: process.poll() for key, process in processes.items()}
    finally:
        for process in (*processes.values(), lighthouse):
            process.kill()
            process.wait()
    expected = {(number, 0): 0 for number in range(REPLICAS)} | {(KILLED, 0): -signal.SIGKILL, (KILLED, 1): 0}
    logs = "\n".join((folder / f"{n}.{g}.log").read_text()[-3000:] for n, g in processes)
    assert codes == expected, logs
    return {
        (n, g): [json.loads(line) for line in (folder / f"{n}.{g}.jsonl").read_text().splitlines()]
        for n, g in processes
    }


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    done = {}

    def get(plan):
        if plan not in done:
            folder = tmp_path_factory.mktemp("torchft")
            done[plan] = folder, run(plan, folder)
        return done[plan]

    return get


PLANS = ["collectives", "vote", "residuals", "factors", "streamed"]


@pytest.mark.parametrize("plan", PLANS)
def test_a_killed_replica_is_replaced(jobs, plan):
    """All have the same global parameters and outer states after each exchange, bit for bit, and in the end."""
    _, records = jobs(plan)
    common = {}
    for of_process in records.values():
        for record in of_process:
            if record["event"] == "applied":
                common.setdefault(record["exchanges"], set()).add(record["common"])
    assert all(len(digests) == 1 for digests in common.values()), common
    (joined,) = [record for record in records[KILLED, 1] if record["event"] == "joined"]
    assert joined["equal"] and joined["exchanges"] >= DIES_AFTER
    assert joined["inner"] == (3 if plan not in ("collectives", "vote") else 0)  # momenta of a live replica
    assert sorted(common) == list(range(1, joined["exchanges"] + GOES_ON_FOR + 1))
    ends = [of_process[-1] for key, of_process in records.items() if key != (KILLED, 0)]
    assert {end["event"] for end in ends} == {"end"}
    assert len({(end["exchanges"], end["common"], end["parameters"]) for end in ends}) == 1
    assert all(end["common"] == end["parameters"] for end in ends)


@pytest.mark.parametrize("plan", ["collectives", "vote"])
def test_every_step_of_the_others_counts_once(jobs, plan):
    """The global parameters are where the means of the replicas' steps lead, those of the dead one as far as counted.

    Each exchange subtracts the mean, over its replicas, of LR times the gradients since their last exchange.
    """
    folder, records = jobs(plan)
    first = torch.load(folder / "0.0.pt", weights_only=True)
    got = torch.load(folder / "0.end.pt", weights_only=True)
    expected = [tensor.double() for tensor in first]
    counted = dict.fromkeys(records, 0)
    last = max(r["exchanges"] for of_process in records.values() for r in of_process if r["event"] == "applied")
    for number in range(1, last + 1):
        members = {}  # steps up to which a replica has been counted, and the size of the group
        for key, of_process in records.items():
            for launch, record in itertools.pairwise(of_process):
                if record["event"] == "applied" and record["exchanges"] == number:
                    assert launch["event"] == "launched"
                    members[key] = launch["steps"], launch["size"]
        (size,) = {size for _, size in members.values()}
        if size == len(members) + 1:  # the dead one had sent all
            members[KILLED, 0] = records[KILLED, 0][-1]["steps"], size
            assert plan == "vote" and number == DIES_AFTER + 1
        assert size == len(members)
        for key, (steps, _) in members.items():
            for step in range(counted[key], steps):
                for i, (name, tensor) in enumerate(zip(("matrix", "wide", "bias"), expected)):
                    process = f"{key[0]}.{key[1]}"
                    tensor -= LR / size * gradient(name, process, step, tuple(first[i].shape)).double()
            counted[key] = steps
    for ours, theirs in zip(got, expected):
        # A rounding to float32 in each step and each exchange, of numbers below 16.
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=(max(counted.values()) + 4 * last) * 16 * 2**-24)
    for key, of_process in records.items():
        if key != (KILLED, 0):
            assert counted[key] == of_process[-1]["steps"]
    dead = [record["steps"] for record in records[KILLED, 0] if record["event"] == "launched"]
    assert max(dead) - counted[KILLED, 0] <= 4  # the inner steps since its last exchange
