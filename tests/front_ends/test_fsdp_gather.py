"""FSDP2 that gathers rounded weights, in real `torchrun` jobs, against NumPy and training in one process."""

import math
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gradzip
from launch import scenarios, torchrun

if not dist.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)
pytest.importorskip("torch.distributed.fsdp._fully_shard", reason="torch without FSDP2")
from gather_worker import DTYPES, NUMEL, RATE, SPECS, STEPS, Net, loss_of

RANKS = 4
BLOCK = ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"]
MODULES = {
    "": ["embedding.weight", "head.weight", "head.bias"],
    "blocks.0": [f"blocks.0.{name}" for name in BLOCK],
    "blocks.1": [f"blocks.1.{name}" for name in BLOCK],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return scenarios(RANKS, "gather_worker.py", tmp_path_factory.mktemp("gather"), run=torchrun)


def rounded(x, spec):
    """Elements as multiples of the step of their block, in float64."""
    method, x = gradzip.parse(spec), np.asarray(x, dtype=np.float64)
    out = np.empty_like(x)
    for start in range(0, len(x), method.block):
        block = x[start : start + method.block]
        step = np.abs(block).max() / (2 ** (method.bits - 1) - 1)
        out[start : start + method.block] = np.rint(block / step) * step if step else block
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_the_owner_computes_with_what_others_get(job, spec, dtype):
    results = [results[spec, str(dtype)] for results in job["calls"]]
    blocks = -(-NUMEL // gradzip.parse(spec).block)
    for _, out, sent, dense in results:
        assert torch.equal(out.nan_to_num(7.0), results[0][1].nan_to_num(7.0))  # the same bits
        assert out.dtype == dtype and dense == NUMEL * out.element_size()
        assert sent == blocks * (4 + gradzip.parse(spec).block * gradzip.parse(spec).bits // 8)
    for rank, (given, *_) in enumerate(results):
        got = results[0][1][rank * NUMEL : (rank + 1) * NUMEL].double().numpy()
        expected = given.double().numpy()
        finite = np.isfinite(got)
        if dtype == torch.float16 and rank == 1:  # the block of an infinity, and no other
            size = gradzip.parse(spec).block
            assert not finite[700 // size * size : (700 // size + 1) * size].any()
            assert finite.sum() == NUMEL - size
            expected[~finite] = 0.0
        tolerance = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
        away = np.abs(got - rounded(expected, spec))[finite] / np.abs(expected[finite]).max()
        assert np.quantile(away, 0.98) < tolerance  # ties may go the other way
        assert away.max() < tolerance + 1.01 / (2 ** (gradzip.parse(spec).bits - 1) - 1)


def of_ranks(full, numel):
    """Each rank's shard of a parameter: whole rows, and zeros up to `numel` elements."""
    shards = [chunk.reshape(-1) for chunk in full.chunk(RANKS)]
    shards += [full.new_zeros(0)] * (RANKS - len(shards))
    return [torch.cat([shard, shard.new_zeros(numel - len(shard))]) for shard in shards]


def weights(parameters, spec, exact, reference=None):
    """The weights that all ranks compute with: from blocks of what a rank has of a module, or of differences."""
    if reference is not None:
        differences = {name: p - reference[name] for name, p in parameters.items()}
        rounded_ones = weights(differences, spec, exact)
        return {name: p if name in exact else reference[name] + rounded_ones[name] for name, p in parameters.items()}
    found = {}
    for names in MODULES.values():
        names = [name for name in names if name not in exact]
        if not names:
            continue
        numels = [math.ceil(len(parameters[name]) / RANKS) * parameters[name][0].numel() for name in names]
        shards = [of_ranks(parameters[name], numel) for name, numel in zip(names, numels)]
        decoded = [torch.from_numpy(rounded(torch.cat([s[r] for s in shards]), spec)) for r in range(RANKS)]
        of_names = zip(*(d.split(numels) for d in decoded))
        for name, pieces in zip(names, of_names):
            full, (rows, row) = parameters[name], (len(parameters[name]), parameters[name][0].numel())
            parts = [p[: len(c) * row] for p, c in zip(pieces, full.chunk(RANKS))]
            found[name] = torch.cat(parts).view(rows, *full.shape[1:]).float()
    return parameters | found


def start():
    return {name: p.detach().clone() for name, p in Net().named_parameters()}


def steps(spec, exact=(), delta=False):
    """Train in one process: the gradients at the rounded weights, and the update of the others."""
    model, parameters = Net(), start()
    reference = parameters if delta else None
    for step in range(STEPS):
        used = weights(parameters, spec, exact, reference)
        reference = used if delta else None
        with torch.no_grad():
            for name, weight in used.items():
                model.get_parameter(name).copy_(weight)
        model.zero_grad()
        sum(loss_of(model, rank, step) / RANKS for rank in range(RANKS)).backward()
        parameters = {name: p - RATE * model.get_parameter(name).grad for name, p in parameters.items()}
        yield parameters


EXACT = [name for names in MODULES.values() for name in names if "norm" in name or "bias" in name]
RUNS = {spec: (spec, EXACT) for spec in SPECS} | {
    "exempt": (SPECS[0], sorted({*EXACT, *MODULES[""]})),
    "keep": (SPECS[0], EXACT),
    "keep and checkpoints": (SPECS[0], EXACT),
    "delta": (SPECS[1], EXACT),
}


@pytest.mark.parametrize("run", RUNS)
def test_training_is_that_with_rounded_weights(job, run):
    spec, exact = RUNS[run]
    expected = list(steps(spec, exact, delta=run == "delta"))
    for results in job["training"]:
        got = results[run]
        assert sorted(got["exact"]) == sorted(exact) and got["numels"].keys() == MODULES.keys() == {*got["modules"]}
        assert {name: list(numels) for name, numels in got["numels"].items()} == MODULES
        assert sorted([*got["rounded"], *got["exact"]]) == sorted(start())
        for parameters, reference in zip(got["parameters"], expected, strict=True):
            for name, parameter in parameters.items():
                torch.testing.assert_close(parameter, reference[name], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("run", [*RUNS, "checkpoints", "bf16", "delta, bf16"])
def test_both_passes_have_the_same_weights_on_all_ranks(job, run):
    first = job["training"][0][run]["seen"]
    assert {(kind, name) for kind, name, _ in first} >= {
        (kind, name) for kind in ("forward", "backward") for name in ("blocks.0.up", "blocks.1.down", "head")
    }
    *_, parameters = [start(), *job["training"][0][run]["parameters"]][:STEPS]  # before the last step
    spec, exact = RUNS.get(run, (SPECS[0], EXACT))
    expected = weights(parameters, spec, exact) if run != "delta" else {}
    for results in job["training"]:
        seen = results[run]["seen"]
        assert len(seen) == len(first)
        in_step = seen[: len(seen) - 5]  # the last forward pass is of an evaluation, after the step
        for kind, name, weight in in_step:
            same = next(w for k, n, w in first if (k, n) == ("forward", name))
            assert torch.equal(weight, same), (kind, name)
            assert weight.dtype == (torch.bfloat16 if "bf16" in run else torch.float32)
            if expected and "bf16" not in run:
                torch.testing.assert_close(weight, expected[f"{name}.weight"], rtol=1e-6, atol=1e-7)


def nbytes(results, modules, spec=SPECS[0]):
    """What a gather of modules sends: blocks, and exact elements."""
    total, method = 0, gradzip.parse(spec)
    for module in modules:
        numels = results["numels"][module]
        blocks = -(-sum(n for name, n in numels.items() if name not in results["exact"]) // method.block)
        total += blocks * (4 + method.block * method.bits // 8) + 4 * sum(
            n for name, n in numels.items() if name in results["exact"]
        )
    return total


def test_kept_weights_are_gathered_once(job):
    blocks = ["blocks.0", "blocks.1"]
    for results in job["training"]:
        plain, kept = results[SPECS[0]], results["keep"]
        # In the first step, ranks also meet.
        assert plain["sent"][1:] == [nbytes(plain, ["", *blocks, *blocks])] * (STEPS - 1)
        assert kept["sent"][1:] == [nbytes(kept, ["", *blocks])] * (STEPS - 1)
        alike = [("keep", SPECS[0]), ("keep and checkpoints", "checkpoints"), ("keep and no reshard", SPECS[0])]
        for one, other in alike:
            for got, expected in zip(results[one]["parameters"], results[other]["parameters"]):
                assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert not any(kept["kept"]), "after an evaluation"
        assert results["keep and no reshard"]["sent"] == kept["sent"]


@pytest.mark.parametrize("run", ["delta, evaluated", "delta, resumed", "delta, evaluated and resumed"])
def test_a_reference_changes_with_the_parameters_alone_and_is_saved(job, run):
    for results in job["training"]:
        assert results[run]["parameters"][0].keys() == start().keys()
        for got, expected in zip(results[run]["parameters"], results["delta"]["parameters"]):
            assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_differences_are_sent_once_a_step(job):
    blocks = ["blocks.0", "blocks.1"]
    for results in job["training"]:
        delta = results["delta"]
        exact = sum(sum(numels.values()) for numels in delta["numels"].values())
        # In the first step, ranks meet, and gather all weights. In the second, they have changed.
        assert delta["sent"][1:] == [nbytes(delta, ["", *blocks], SPECS[1])] * (STEPS - 1)
        assert 0 < delta["sent"][0] - 4 * exact < 4000


# By forward pass: the modules about which ranks ask each other, and those that gather.
EVERY, UNFROZEN = tuple(MODULES), ("", "blocks.0")
PASSES = {
    "step": ((), EVERY),
    "evaluation": ((), EVERY),  # after a step
    "evaluation again": (EVERY, ()),
    "one rank alone": (EVERY, ("blocks.0",)),
    "swapped": (EVERY, EVERY),
    "swapped back": (EVERY, EVERY),
    "accumulates": (EVERY, ()),
    "accumulates again": (EVERY, ()),
    "accumulates to the end": (EVERY, ()),
    "one of two": ((), EVERY),
    "two of two": (EVERY, ()),
    "frozen": ((), EVERY),
    "frozen again": (("blocks.1",), UNFROZEN),
    "frozen, written by one rank": (("blocks.1",), EVERY),
}


def test_ranks_agree_on_when_to_gather_differences(job):
    first = job["agreement"][0]
    reference = first["first"]["parameters"]
    of_modules = {**job["training"][0]["delta"], "exact": EXACT}
    for name, (asked, gathered) in PASSES.items():
        used = weights(first[name]["parameters"], SPECS[1], EXACT, reference)
        names = {parameter for module in gathered for parameter in MODULES[module]}
        reference = {parameter: (used if parameter in names else reference)[parameter] for parameter in reference}
        for results in job["agreement"]:
            got = results[name]
            assert got["sent"] == len(asked) + nbytes(of_modules, gathered, SPECS[1]), name
            for layer, weight in got["seen"].items():
                assert torch.equal(weight, first[name]["seen"][layer])
                torch.testing.assert_close(weight, reference[f"{layer}.weight"], rtol=1e-5, atol=1e-5)
    before, after = (first[name]["parameters"]["blocks.0.up.weight"] for name in ("evaluation again", "one rank alone"))
    assert (before != after).any() and (before == after).any()


def test_one_shard_sends_nothing(job):
    for results in job["training"]:
        assert results["one shard"]["sent"] == [0] * STEPS


def test_both_directions(job):
    model = Net()
    with torch.no_grad():
        for name, weight in weights(start(), SPECS[0], EXACT).items():
            model.get_parameter(name).copy_(weight)
    sum(loss_of(model, rank, 0) / RANKS for rank in range(RANKS)).backward()
    for modules, grads, gathered, reduced in ((r[0][0], *r[1:]) for r in job["both_directions"]):
        assert modules == list(MODULES) and gathered > 0 and reduced > 0
        for name, grad in grads.items():
            expected = model.get_parameter(name).grad
            assert (grad - expected).abs().max() < 0.1 * expected.abs().max() + 2e-3, name
        assert any(not torch.allclose(grads[name], model.get_parameter(name).grad, atol=1e-6) for name in grads)


ERRORS = {
    "stochastic": r"ValueError: all_gather: got BlockFloat\(.*expected gradzip.BlockFloat\(rounding='nearest'\)",
    "topk": r"ValueError: all_gather: got TopK\(.*expected gradzip.BlockFloat\(rounding='nearest'\)",
    "exempt": r"ValueError: all_gather: got a method with exempt parameters, expected none: gradzip.fsdp.quantize",
    "integers": r"TypeError: all_gather: got weights of torch.int32.*expected float32, bfloat16 or float16",
    "mixed": r"ValueError: quantize: got module '' with parameters of \['torch.bfloat16', 'torch.float32'\], expected",
    "number": r"ValueError: quantize: got module 'blocks.0' with reshard_after_forward as a number of ranks, expected",
    "unsharded": r"ValueError: quantize: got a model without sharded modules, expected one after fully_shard",
    "nothing": r"ValueError: quantize: got no method for the all-gathers, expected one",
    "keep": r"ValueError: quantize: got no method for the all-gathers, expected one",
    "reference": r"ValueError: quantize: got reference='sum' with gather=.*, expected None, or 'delta'",
    "delta and keep": r"ValueError: quantize: got reference='delta' with .* and keep=True, expected None, or 'delta'",
    "foreign": r"ValueError: Quantized.load_state_dict: got the states of \['x'\], expected those of 'rank\dof4'",
    "different": r"RuntimeError: .*bits=[48].*bits=[48]",
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(job, case):
    for results in job["errors"]:
        assert re.match(ERRORS[case], results[case], re.DOTALL), results[case]
