"""recipes/torchtitan on CPUs, as far as torchtitan runs there: gradients against those of its own HSDP."""

import json

import pytest

from integrations import needs_integrations, torchrun
from launch import assert_done

pytestmark = [needs_integrations, pytest.mark.long, pytest.mark.timeout(600)]

RANKS, LAYERS, WEIGHTS_OF_A_LAYER = 4, 6, 7  # of the debug model: norms, attention and feed-forward


def test_gradients_are_those_of_its_own_hybrid_sharding(tmp_path):
    """Uncompressed, to the bit. Integers of 8 bits round to a multiple of 1/127 of the largest number of a block."""
    done = torchrun(RANKS, "torchtitan_worker.py", tmp_path, "none", "block-float")
    assert_done(done)
    for rank in range(RANKS):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        none, block_float = results["none"], results["block-float"]
        assert len(none["errors"]) >= LAYERS * WEIGHTS_OF_A_LAYER and max(none["errors"]) == 0
        assert 0 < max(block_float["errors"]) < 0.02
        assert 2.5 < none["bytes_sent"] / block_float["bytes_sent"] < 4
