"""benchmarks.peers: hooks of DDP and gradzip, trained on real ranks, in a study that continues."""

import json
import subprocess

import pytest

from benchmarks import peers
from benchmarks.common.jobs import has_own_net
from launch import python

NUMEL = 284_544  # parameters of charlm-small
STEPS = 4
NBYTES = {
    peers.BASELINE: 4, "bf16 hook": 2, "FP8 hook": 132 / 128, "PowerSGD hook, defaults": 4, "`BlockFloat()`": 260 / 256,
}  # of an element, in the first steps  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The rows of a study of two ranks, by variant, and what it printed."""
    file = tmp_path_factory.mktemp("peers") / "peers.json"
    options = [f"--variant={variant}" for variant in NBYTES]
    options += [f"--steps={STEPS}", "--ranks=2", "--network=charlm-small", "--seed=0", "--json", file]
    done = subprocess.run([*python(), "-m", "benchmarks.peers", *options], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return {row["variant"]: row for row in json.loads(file.read_text())["rows"]}, done.stdout


@pytest.mark.long
def test_all_variants_train(study):
    """Ranks that end with other parameters than rank 0 raise an error."""
    rows, shown = study
    assert rows.keys() == NBYTES.keys()
    own = rows[peers.BASELINE]["scores"][-1]
    for row in rows.values():
        assert row["steps"] == STEPS and row["scores"][-1] == pytest.approx(own, rel=0.03)
    assert own < 7.5  # of 8 bits that guessing costs
    assert "charlm-small, adamw, 4 steps, rate 0.008, 2 ranks, 1 seeds" in shown


@pytest.mark.long
@pytest.mark.skipif(not has_own_net(), reason="other programs use the same loopback")
def test_bytes_are_those_of_the_collectives(study):
    """An all-reduce, or an all-to-all and an all-gather, of two ranks: each sends all elements once."""
    rows, _ = study
    for variant, nbytes in NBYTES.items():
        sent = rows[variant]["wire"] / STEPS
        assert nbytes * NUMEL < sent < 1.06 * nbytes * NUMEL, variant
