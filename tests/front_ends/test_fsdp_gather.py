"""FSDP2 that gathers rounded weights, in real `torchrun` jobs, against NumPy and training in one process."""

import math
import re
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gradzip
from launch import scenarios, torchrun

if not dist.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)
pytest.importorskip("torch.distributed.fsdp._fully_shard", reason="torch without FSDP2")
from gather_worker import DTYPES, ELASTIC, FEW, FIRST_STEPS, NUMEL, RATE, SPECS, STEPS, Net, loss_of

RANKS = 4
BLOCK = ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"]
MODULES = {
    "": ["embedding.weight", "head.weight", "head.bias"],
    "blocks.0": [f"blocks.0.{name}" for name in BLOCK],
    "blocks.1": [f"blocks.1.{name}" for name in BLOCK],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gather")


@pytest.fixture(scope="module")
def job(folder):
    return scenarios(RANKS, "gather_worker.py", folder, run=torchrun)


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


def assert_close(got, expected, tolerance):
    """All but the few elements that are rounded the other way in a tie."""
    away = (got - expected).abs().flatten()
    most = expected.abs().max()
    assert away.quantile(0.995) <= tolerance * max(1.0, most) and away.max() <= most / 10


def of_ranks(full, numel, ranks):
    """Each rank's shard of a parameter: whole rows, and zeros up to `numel` elements."""
    shards = [chunk.reshape(-1) for chunk in full.chunk(ranks)]
    shards += [full.new_zeros(0)] * (ranks - len(shards))
    return [torch.cat([shard, shard.new_zeros(numel - len(shard))]) for shard in shards]


@dataclass
class Run:
    """What a job trains, and how it gathers."""

    spec: str = SPECS[0]
    exact: list = field(default_factory=lambda: EXACT)
    delta: bool = False
    frozen: str = "none"  # prefix of frozen parameters
    ties: bool = False
    ranks: int = RANKS  # that hold the shards

    @property
    def modules(self):
        return TIED if self.ties else MODULES

    def start(self):
        return {name: p.detach().clone() for name, p in Net(ties=self.ties).named_parameters()}

    def weights(self, parameters, reference=None):
        """The weights that all ranks compute with: from blocks of what a rank has of a module, or of differences."""
        if reference is not None:
            differences = {name: p - reference[name] for name, p in parameters.items()}
            decoded = self.weights(differences)
            return {
                name: p if name in self.exact else reference[name] + decoded[name] for name, p in parameters.items()
            }
        found = {}
        for names in self.modules.values():
            names = [name for name in names if name not in self.exact]
            if not names:
                continue
            numels = [math.ceil(len(parameters[name]) / self.ranks) * parameters[name][0].numel() for name in names]
            shards = [of_ranks(parameters[name], numel, self.ranks) for name, numel in zip(names, numels)]
            rows = [torch.cat([s[r] for s in shards]) for r in range(self.ranks)]
            decoded = [torch.from_numpy(rounded(row, self.spec)) for row in rows]
            of_names = zip(*(d.split(numels) for d in decoded))
            for name, pieces in zip(names, of_names):
                full, (length, row) = parameters[name], (len(parameters[name]), parameters[name][0].numel())
                parts = [p[: len(c) * row] for p, c in zip(pieces, full.chunk(self.ranks))]
                found[name] = torch.cat(parts).view(length, *full.shape[1:]).float()
        return parameters | found

    def steps(self, numbers=range(STEPS), parameters=None, trainers=RANKS):
        """Train in one process: the gradients at the rounded weights, and the update of the others.

        parameters: before the first step. trainers: ranks that have data of their own.
        """
        model, parameters = Net(ties=self.ties), parameters or self.start()
        reference = parameters if self.delta else None
        for step in numbers:
            used = self.weights(parameters, reference)
            reference = used if self.delta else None
            with torch.no_grad():
                for name, weight in used.items():
                    model.get_parameter(name).copy_(weight)
            model.zero_grad()
            sum(loss_of(model, rank, step) / trainers for rank in range(trainers)).backward()
            grads = {n: model.get_parameter(n).grad for n in parameters if not n.startswith(self.frozen)}
            parameters = parameters | {name: parameters[name] - RATE * grad for name, grad in grads.items()}
            yield parameters


TIED = {
    "": [],
    "embedding": ["embedding.weight", "head.bias"],  # and the head
    "blocks.0": MODULES["blocks.0"],
    "blocks.1": MODULES["blocks.1"],
}
EXACT = [name for names in MODULES.values() for name in names if "norm" in name or "bias" in name]
RUNS = {spec: Run(spec) for spec in SPECS} | {
    "exempt": Run(exact=sorted({*EXACT, *MODULES[""]})),
    "keep": Run(),
    "keep and checkpoints": Run(),
    "delta": Run(SPECS[1], delta=True),
    "tied": Run(ties=True),
    "delta, tied": Run(SPECS[1], delta=True, ties=True),
    "frozen": Run(frozen="blocks.0"),
    "keep, frozen": Run(frozen="blocks.0"),
    "replicas": Run(ranks=2),
}


@pytest.mark.parametrize("run", RUNS)
def test_training_is_that_with_rounded_weights(job, run):
    one = RUNS[run]
    expected = list(one.steps())
    for results in job["training"]:
        got = results[run]
        assert sorted(got["exact"]) == sorted(one.exact) and sorted(got["modules"]) == sorted(one.modules)
        numels = {name: list(numels) for name, numels in got["numels"].items()}
        assert numels == {name: parameters for name, parameters in one.modules.items() if parameters}
        assert sorted([*got["rounded"], *got["exact"]]) == sorted(one.start())
        for parameters, reference in zip(got["parameters"], expected, strict=True):
            for name, parameter in parameters.items():
                assert_close(parameter, reference[name], 2e-4 if one.ties else 2e-5)  # whose gradients are larger


@pytest.mark.parametrize("run", [*RUNS, "checkpoints", "bf16", "delta, bf16"])
def test_both_passes_have_the_same_weights_on_all_ranks(job, run):
    first = job["training"][0][run]["seen"]
    both = {(kind, name) for kind in ("forward", "backward") for name in ("blocks.0.up", "blocks.1.down")}
    assert {(kind, name) for kind, name, _ in first} >= both | {("forward", "head")}
    one = RUNS.get(run, Run())
    *_, parameters = [one.start(), *job["training"][0][run]["parameters"]][:STEPS]  # before the last step
    expected = {} if "delta" in run else one.weights(parameters)
    if expected and one.ties:
        expected["head.weight"] = expected.get("embedding.weight")
    for results in job["training"]:
        seen = results[run]["seen"]
        assert len(seen) == len(first)
        in_step = seen[: len(seen) - 5]  # the last forward pass is of an evaluation, after the step
        for kind, name, weight in in_step:
            same = next(w for k, n, w in first if (k, n) == ("forward", name))
            assert torch.equal(weight, same), (kind, name)
            assert weight.dtype == (torch.bfloat16 if "bf16" in run else torch.float32)
            if expected and "bf16" not in run:
                assert_close(weight, expected[f"{name}.weight"], 2e-7)


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


ALIKE = {
    "keep": SPECS[0],
    "keep and checkpoints": "checkpoints",
    "keep and no reshard": SPECS[0],
    "keep, frozen": "frozen",
    "offload": SPECS[0],
    "delta, offload": "delta",
    "prefetch": SPECS[0],
    "keep, prefetch": SPECS[0],
    "delta, prefetch": "delta",
    "delta, evaluated": "delta",
    "asynchronous": SPECS[0],
    "keep, asynchronous": SPECS[0],
    "delta, asynchronous": "delta",
    "number": SPECS[0],
    "keep, number": SPECS[0],
    "delta, number": "delta",
    "delta, inferred": "delta",
    "delta, resumed": "delta",
    "delta, evaluated and resumed": "delta",
}


def assert_alike(got, expected):
    assert len(got["parameters"]) == STEPS and got["parameters"][0].keys() == Run().start().keys()
    for parameters, others in zip(got["parameters"], expected["parameters"]):
        assert all(torch.equal(parameters[name], others[name]) for name in others)


@pytest.mark.parametrize("run", ALIKE)
def test_options_change_no_bit(job, run):
    for results in job["training"]:
        assert_alike(results[run], results[ALIKE[run]])


@pytest.mark.long
def test_compiled_models_have_the_same_bits(job, tmp_path):
    found = scenarios(RANKS, "gather_worker.py", tmp_path, "compiled", run=torchrun)
    for compiled, results in zip(found["compiled"], job["training"], strict=True):
        for run, expected in {"": SPECS[0], "keep": SPECS[0], "delta": "delta"}.items():
            assert_alike(compiled[run], results[expected])


def test_kept_weights_are_gathered_once(job):
    blocks = ["blocks.0", "blocks.1"]
    for results in job["training"]:
        plain, kept = results[SPECS[0]], results["keep"]
        # In the first step, ranks also meet.
        assert plain["sent"][1:] == [nbytes(plain, ["", *blocks, *blocks])] * (STEPS - 1)
        assert kept["sent"][1:] == [nbytes(kept, ["", *blocks])] * (STEPS - 1)
        assert not any(kept["kept"]), "after an evaluation"
        assert kept["kept nbytes"] == [RANKS * nbytes(kept, blocks)] * STEPS
        assert results["keep and no reshard"]["sent"] == kept["sent"]


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
    "frozen again": (EVERY, UNFROZEN),  # the frozen one asks, about those that have gathered, too
    "frozen, written by one rank": (EVERY, EVERY),
    "method": (("blocks.1",), EVERY),  # one of register_fsdp_forward_method, in which modules ask one by one
    "method again": (EVERY, EVERY),
    "method once more": (EVERY, ()),
    "unsharded": (EVERY, EVERY),
    "unsharded again": (EVERY, EVERY),
    "after that": (EVERY, ()),  # after a pass that has failed on one rank
}


def test_ranks_agree_on_when_to_gather_differences(job):
    first = job["agreement"][0]
    reference = first["first"]["parameters"]
    of_modules = {**job["training"][0]["delta"], "exact": EXACT}
    for name, (asked, gathered) in PASSES.items():
        used = Run(SPECS[1]).weights(first[name]["parameters"], reference)
        names = {parameter for module in gathered for parameter in MODULES[module]}
        reference = {parameter: (used if parameter in names else reference)[parameter] for parameter in reference}
        for results in job["agreement"]:
            got = results[name]
            assert got["sent"] == len(asked) + nbytes(of_modules, gathered, SPECS[1]), name
            for layer, weight in got["seen"].items():
                assert torch.equal(weight, first[name]["seen"][layer])
                assert_close(weight, reference[f"{layer}.weight"], 1e-5)
    before, after = (first[name]["parameters"]["blocks.0.up.weight"] for name in ("evaluation again", "one rank alone"))
    assert (before != after).any() and (before == after).any()


def test_others_than_the_saved_weights_are_found(job):
    for results in job["loaded"]:
        (saved, _), (same, _), (others, parameters) = (results[name] for name in ("saved", "same", "others"))
        for layer, weight in saved.items():
            assert torch.equal(same[layer], weight)
            if layer != "head":  # a block has elements of the head and of the embedding, which are larger
                assert (others[layer] - 0.5 * parameters[f"{layer}.weight"]).abs().max() < 0.1 * weight.abs().max()


def test_blocks_that_run_twice_have_the_weights_of_their_forward_pass(job):
    for results in job["checkpoints_twice"]:
        for seen in results.values():
            assert sum(name == "blocks.0.up" for _, name, _ in seen) >= 6  # twice, again twice, and backwards twice
            first = {name: weight for _, name, weight in reversed(seen)}
            assert all(torch.equal(weight, first[name]) for _, name, weight in seen)


def test_one_shard_sends_and_rounds_nothing(job):
    for results in job["one_shard"]:
        (_, exact), *others = results.values()
        assert len(others) == 3
        for sent, weights in others:
            assert sent == 0 and all(torch.equal(weights[name], exact[name]) for name in exact)


@pytest.fixture(scope="module")
def restarted(job, folder):
    """What fewer ranks do after a start of their own, with the checkpoint of all."""
    assert job["saved"]
    return scenarios(FEW, "gather_worker.py", folder, "restarted", run=torchrun)["restarted"]


def assert_changed(run, phases, sizes):
    """The steps of as many ranks as `sizes` says, before an elastic change and after it.

    With differences, the first weights of each phase are exact: ranks gather a reference anew.
    """
    spec, options = ELASTIC[run]
    weights = Run().start()
    for i, (size, got) in enumerate(zip(sizes, phases, strict=True)):
        one = Run(spec, delta="reference" in options, ranks=size)
        used = weights if one.delta else one.weights(weights)
        for layer, seen in got["seen"].items():
            weight = used[f"{layer}.weight"]
            assert torch.equal(seen, weight) if one.delta else assert_close(seen, weight, 2e-7) is None
        numbers = range(i * FIRST_STEPS, (i + 1) * FIRST_STEPS)
        steps = one.steps(numbers, weights, trainers=size)
        for of_step, expected in zip(got["weights"], steps, strict=True):
            for name, weight in of_step.items():
                assert_close(weight, expected[name], 2e-5)
        weights = got["weights"][-1]
        first, *later = got["sent"]
        assert later == [nbytes(got, MODULES, spec)] * (FIRST_STEPS - 1)
        exact = 4 * sum(sum(numels.values()) for numels in got["numels"].values()) if one.delta else later[0]
        assert 0 < first - exact < 4000  # ranks meet


def assert_same_phase(got, expected):
    assert got["sent"] == expected["sent"]
    for weights, of_other in zip([got["seen"], *got["weights"]], [expected["seen"], *expected["weights"]], strict=True):
        assert all(torch.equal(weights[name], of_other[name]) for name in of_other)


@pytest.mark.parametrize("run", ELASTIC)
def test_a_rank_that_joins_has_the_weights_of_the_others(job, run):
    """In the same processes, with the same method, on a new mesh."""
    first, *others = (results[run] for results in job["elastic"])
    assert_changed(run, first, [FEW, RANKS])
    for rank, phases in enumerate(others, 1):
        assert len(phases) == 1 + (rank < FEW)
        for got, expected in zip(reversed(phases), reversed(first)):
            assert_same_phase(got, expected)


@pytest.mark.parametrize("run", ELASTIC)
def test_fewer_ranks_continue_from_a_checkpoint(job, restarted, run):
    """References are made anew; what `quantize` has saved is for as many ranks."""
    assert_changed(run, [job["saved"][0][run], restarted[0][run][0]], [RANKS, FEW])
    for rank, results in enumerate(restarted):
        after, refused = results[run]
        assert_same_phase(after, restarted[0][run][0])
        assert f"Missing key in checkpoint state_dict: quantized.rank{rank}of{FEW}" in refused


def test_local_steps_of_sites_that_gather_differences(job):
    first, _ = job["local_steps"][0]
    for results, exchanges in job["local_steps"]:
        assert exchanges == 2
        for step, (seen, parameters) in enumerate(results):
            for layer, weight in seen.items():
                expected = parameters[f"{layer}.weight"]
                assert (weight - expected).abs().max() < 0.02 * expected.abs().max()
                assert step % 2 == 0 or torch.equal(expected, first[step][1][f"{layer}.weight"])  # on both sites


def test_both_directions(job):
    model = Net()
    with torch.no_grad():
        for name, weight in Run().weights(Run().start()).items():
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
    "exempt": r"ValueError: all_gather: got a method with exempt parameters, expected none: it rounds all.*quantize",
    "owner": r"ValueError: all_gather: got a method with error_feedback='owner', expected True or False: it rounds no",
    "owner, quantized": r"ValueError: all_gather: got a method with error_feedback='owner', expected True or False",
    "exempt from reduction": r"ValueError: reduce_scatter: got a method with exempt parameters, expected none",
    "integers": r"TypeError: all_gather: got weights of torch.int32.*expected float32, bfloat16 or float16",
    "gathered float8": r"TypeError: all_gather: got weights of torch.float8_e4m3fn.*expected float32, bfloat16",
    "mixed": r"ValueError: quantize: got module '' with parameters of \['torch.bfloat16', 'torch.float32'\], expected",
    "parameters of integers": r"ValueError: quantize: got module '' with parameters of .*int64.*, expected float32,",
    "parameters of float8": r"ValueError: quantize: got module '' with parameters of .*float8_e4m3fn.*, expected",
    "encoded": r"ValueError: quantize: got module '' whose parameters encode themselves, expected plain ones",
    "several meshes": r"ValueError: quantize: got module '' with parameters on several meshes, expected one mesh",
    "twice": r"ValueError: quantize: got module '', which is quantized already, expected one call",
    "sharded twice": r"\w+Error: .*fully_shard",  # torch's
    "unsharded": r"ValueError: quantize: got a model without sharded modules, expected one after fully_shard",
    "nothing": r"ValueError: quantize: got no method for the all-gathers, expected one",
    "keep": r"ValueError: quantize: got no method for the all-gathers, expected one",
    "reference": r"ValueError: quantize: got reference='sum' with gather=.*, expected None, or 'delta'",
    "delta and keep": r"ValueError: quantize: got reference='delta' with .* and keep=True, expected None, or 'delta'",
    "foreign": r"ValueError: Quantized.load_state_dict: got the states of \['x'\], expected those of 'rank\dof4'",
    "other modules": r"ValueError: Quantized.load_state_dict: got references of the modules \['', 'bl.*, expected \[\]",
    "different": r"RuntimeError: .*bits=[48].*bits=[48]",
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(job, case):
    for results in job["errors"]:
        assert re.match(ERRORS[case], results[case], re.DOTALL), results[case]
        assert "\n" not in results[case] or case == "sharded twice"
