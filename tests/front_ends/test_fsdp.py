"""The FSDP front end in real `torchrun` jobs, against the same method in LocalGroups of whole shards."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gradzip
from contract import Expected, gradient
from hierarchical_reference import Reference as HierarchicalReference
from launch import scenarios, torchrun
from reference import MomentumSGD

if not dist.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)
pytest.importorskip("torch.distributed.fsdp._fully_shard", reason="torch without FSDP2")
from fsdp_worker import AMP, BASE, CODECS, DIVIDED, DRAWS, EXAMPLES, INNER, METHODS, ROUNDS, SHAPES, STEPS, UNCOMPRESSED

RANKS = 4
ALL = {name: shape for shapes in SHAPES.values() for name, shape in shapes.items()}
FULL = {name: f"{module}.{name}".lstrip(".") for module, shapes in SHAPES.items() for name in shapes}
DEFAULT = ["methods", "divided", "exempted", "nodes", "options", "roots", "one_rank", "interrupted", "checkpointing",
           "overlap", "loss_scale", "distributed_checkpoint", "errors", "quantized", "feedback", "elastic",
           "nodes_of_shards"]  # fmt: skip
LONG = ["more_options", "all_methods", "replicas_only", "shards_only", "native", "clipping", "shared_compressor",
        "momentum", "quantized_training", "auto"]  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return scenarios(RANKS, "fsdp_worker.py", tmp_path_factory.mktemp("fsdp"), *DEFAULT, run=torchrun)


@pytest.fixture(scope="module")
def long_job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    return scenarios(RANKS, "fsdp_worker.py", folder, *LONG, run=torchrun, timeout=280)


@functools.cache
def shard_mean(name, step, replica, shard, shards=2, cast=None):
    """What FSDP reduces the gradients of a replica to, on one rank: whole rows, or None if it has no row."""
    ranks = range(replica * shards, (replica + 1) * shards)
    grads = [gradient(name, rank, step, ALL[name]) for rank in ranks]
    if cast:
        grads = [grad.to(cast).float() for grad in grads]
    chunks = (sum(grads) / shards).chunk(shards)
    return chunks[shard].clone() if shard < len(chunks) else None


class Reference:
    """The averages of one shard: those of LocalGroups of its replicas, with the modules as buckets."""

    def __init__(self, spec, shard, shards=2, prefix="", cast=None, **arguments):
        self.place = shard, shards, cast
        self.replicas = RANKS // shards
        self.groups = Expected(
            spec, (f"shard{shard}of{shards}." if shards > 1 else "") + prefix, self.replicas, **arguments
        )

    def step(self, step, without=(), zero=(), scale=1.0):
        shard, shards, cast = self.place
        grads = {}
        for name, full in FULL.items():
            means = [shard_mean(name, step, replica, shard, shards, cast) for replica in range(self.replicas)]
            if name not in without and means[0] is not None:
                grads[full] = [mean * (0.0 if name in zero else scale) for mean in means]
        buckets = [[FULL[name] for name in shapes if FULL[name] in grads] for shapes in SHAPES.values()]
        averages = self.groups.average(grads, [bucket for bucket in buckets if bucket])
        return {full.rpartition(".")[2]: average for full, average in averages.items()}


def base(shard, **arguments):
    return list(map(Reference(BASE, shard, **arguments).step, range(2)))


def assert_equal(got, expected, exact=True, **tolerances):
    assert got.keys() == expected.keys()
    for name in got:
        if exact:
            assert torch.equal(got[name], expected[name]), name
        else:
            torch.testing.assert_close(got[name], expected[name], **tolerances)


def mean_shard(name, step, shard, shards=2):
    """The shard of the mean over all ranks, in float64."""
    mean = sum(gradient(name, rank, step, ALL[name]).double() for rank in range(RANKS)) / RANKS
    chunks = mean.chunk(shards)
    return chunks[shard] if shard < len(chunks) else None


@pytest.mark.parametrize("spec", METHODS)
def test_averages_are_those_of_local_groups(job, spec):
    for rank, results in enumerate(job["methods"]):
        reference = Reference(spec, rank % 2)
        for step, averages in enumerate(results[spec]["averages"]):
            assert_equal(averages, reference.step(step))


def test_groups_are_smaller_than_modules(job):
    spec, limit = DIVIDED
    for rank, results in enumerate(job["divided"]):
        reference = Reference(spec, rank % 2, most_numel=limit)
        for step, averages in enumerate(results):
            assert_equal(averages, reference.step(step))
        assert max(map(len, reference.groups.groups)) > 1 and len(reference.groups.groups) > len(SHAPES)


def test_replicas_are_identical(job):
    for results in zip(job["methods"][:2], job["methods"][2:]):
        for spec in METHODS:
            for a, b in zip(*(of_rank[spec]["averages"] for of_rank in results)):
                assert_equal(a, b)


def test_uncompressed_averages_are_exact(job):
    """Padding is not sent, and rank 1 has no row of `g`."""
    for rank, results in enumerate(job["methods"]):
        run = results[UNCOMPRESSED]
        for step, averages in enumerate(run["averages"]):
            assert ("g" in averages) == (rank % 2 == 0)
            for name, average in averages.items():
                torch.testing.assert_close(average.double(), mean_shard(name, step, rank % 2), rtol=1e-6, atol=1e-6)
            numel = sum(average.numel() for average in averages.values())
            assert run["dense"][step] == 4 * numel * (step + 1)
            assert run["sent"][step] - run["sent"][0] == 4 * numel * step


def test_full_rank_is_exact(job):
    """ACPSGD with as many ranks as a 24 x 24 shard has rows."""
    for rank, results in enumerate(job["methods"]):
        for step, averages in enumerate(results["acpsgd:rank=24"]["averages"]):
            expected = mean_shard("d", step, rank % 2)
            torch.testing.assert_close(averages["d"].double(), expected, rtol=1e-4, atol=1e-5)


def test_bytes_sent(job):
    for rank, results in enumerate(job["methods"]):
        sent = results[BASE]["sent"]
        reference = Reference(BASE, rank % 2)
        payloads = []
        for step in range(STEPS):
            reference.step(step)
            payloads.append(reference.groups.bytes_sent)
        assert np.diff(sent).tolist() == np.diff(payloads).tolist()


def test_nodes_of_replicas(job):
    """Ranks join the group, so that `Hierarchical` finds its nodes."""
    reference = HierarchicalReference(gradzip.parse(INNER), nodes=2, places=2)
    for step in range(STEPS):
        averages = {}
        for name, shape in ALL.items():
            grads = [gradient(name, rank, step, shape) for rank in range(RANKS)]
            compressed = shape[0] > 1 and len(shape) > 1 and -(-shape[0] // 2) * math.prod(shape[1:]) >= 128
            averages[name] = reference.average(grads, name) if compressed else sum(grads) / RANKS
        assert any((average == 0).any() for average in averages.values())
        for results in job["nodes"]:
            assert_equal(results["averages"][step], averages, exact=False, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("option", ["default", "offload", "discarded"])
def test_options_change_nothing(job, option):
    for rank, results in enumerate(job["options"]):
        for averages, expected in zip(results[option], base(rank % 2), strict=True):
            assert_equal(averages, expected)


def test_accumulation_without_synchronization(job):
    for rank, results in enumerate(job["options"]):
        for averages, expected in zip(results["accumulated"], base(rank % 2), strict=True):
            assert_equal(averages, {name: 2 * average for name, average in expected.items()})


def test_frozen_parameters(job):
    for rank, results in enumerate(job["options"]):
        reference = Reference(BASE, rank % 2)
        assert_equal(results["frozen_later"][0], reference.step(0))
        assert_equal(results["frozen_later"][1], reference.step(1, without=("a",)))


def test_unused_parameters(job):
    for rank, results in enumerate(job["options"]):
        reference = Reference(BASE, rank % 2)
        for step, averages in enumerate(results["unused"]):
            assert_equal(averages, reference.step(step, zero=("e", "b")))


def test_cast_parameters(job):
    """Gradients of bfloat16 parameters, reduced in float32."""
    for rank, results in enumerate(job["options"]):
        reference = Reference(BASE, rank % 2, cast=torch.bfloat16)
        for step, averages in enumerate(results["cast_bf16"]):
            assert_equal(averages, reference.step(step))


def test_blocks_without_a_root(job):
    for rank, results in enumerate(job["roots"]):
        reference = Reference(ROUNDS, rank % 2)
        for step, averages in enumerate(results["averages"]):
            assert_equal(averages, reference.step(step, without=("g", "h")))
        assert results["steps"] == {STEPS}
        assert "got parameter 'h', which is trained and in no module of fully_shard" in results["unfrozen"]


@pytest.mark.parametrize("case", ["hooks", "gradients", "both"])
def test_what_one_rank_has_changes_no_collective(job, case):
    """Hooks see the averages, which are added to gradients of zeros."""
    for rank, results in enumerate(job["one_rank"]):
        reference = Reference(ROUNDS, rank % 2)
        reference.step(0)
        averages, logged = results[case]
        assert_equal(averages, reference.step(1))
        assert_equal(logged, averages if rank == 0 and case != "gradients" else {})


def test_failed_backward_pass_changes_no_state(job):
    for rank, results in enumerate(job["interrupted"]):
        assert "between the blocks" in results["error"]
        reference = Reference(ROUNDS, rank % 2)
        for step, averages in enumerate(results["averages"]):
            assert_equal(averages, reference.step(step))
        assert results["calls"] == ["d", "a"] * 2


def test_activation_checkpointing(job):
    for rank, results in enumerate(job["checkpointing"]):
        for got in ("averages", "within"):
            for averages, expected in zip(results[got], base(rank % 2), strict=True):
                assert_equal(averages, expected)
        assert "use_reentrant=True), where a step has no single end" in results["error"]
        assert "\n" not in results["error"]
        assert_equal(results["after"], base(rank % 2)[1])  # the error changed no state


def test_transfers_run_beside_the_backward_pass(job):
    assert job["overlap"] == [{"default": 1, "added": 1, "offload": 3}] * RANKS  # 3 modules


def test_loss_scale(job):
    for rank, results in enumerate(job["loss_scale"]):
        reference = Reference(BASE, rank % 2)
        assert_equal(results[""][0], reference.step(0, scale=4.0))
        _, steps = results[AMP[1][0]]
        assert set(steps.values()) == {1}  # also of the shards and parameters that did not overflow
        averages, steps = results["after"]
        assert set(steps.values()) == {2}
        # Residuals were multiplied by 1/2: averages of gradients without a scale, times the new scale.
        unscaled = Reference(BASE, rank % 2)
        unscaled.step(0)
        assert_equal(averages, {name: 2 * average for name, average in unscaled.step(2).items()})


def test_a_rank_may_own_nothing_that_is_compressed(job):
    """Of one row, which the first shard has: all other parameters are exempt."""
    for rank, (steps, others) in enumerate(zip(job["exempted"], job["methods"], strict=True)):
        assert len(steps) == STEPS
        for averages, uncompressed in zip(steps, others[UNCOMPRESSED]["averages"], strict=True):
            assert averages.keys() == uncompressed.keys() and ("g" in averages) == (rank % 2 == 0)
            if (compressed := averages.pop("g", None)) is not None:
                assert (compressed == 0).sum() > 0.5 * compressed.numel()
            assert_equal(averages, {name: uncompressed[name] for name in averages})


def test_distributed_checkpoint(job):
    for rank, results in enumerate(job["distributed_checkpoint"]):
        for resumed in ("resumed", "plain"):
            for averages, expected in zip(results[resumed], results["original"], strict=True):
                assert_equal(averages, expected)
        assert results["states"] == [f"shard{rank % 2}of2.{name}" for name in
                                     ("first.a", "first.c", "first.k", "h", "second.d")]  # fmt: skip
        expected = f"expected those of 'shard{rank % 2}of2,replica{rank // 2}of2'"
        assert results["none"].startswith("ValueError: ReplicaAverages.load_state_dict: got None, expected those")
        assert "got the states of ['shard9of9']" in results["other"] and expected in results["other"]


MESSAGES = {
    "bytes": "ValueError: ReplicaAverages.load_state_dict: got 'shard",
    "announced": "RuntimeError: compress: got a backward pass within discarding() on 25% of the ranks",
    "unsharded": "ValueError: compress: got a model with parameters on 0 meshes of [] dimensions",
    "meshes": "ValueError: compress: got a model with parameters on 2 meshes of [1, 1] dimensions",
    "no_group": "TypeError: compress: got None as the group",
    "no_method": "TypeError: compress: got 'topk'",
    "replicated": "ValueError: compress: got module '' on a mesh with a dimension of replicas",
    "no_codec": "expected gradzip.BlockFloat() or gradzip.QSGD(coding='packed')",
    "elias": "expected gradzip.BlockFloat() or gradzip.QSGD(coding='packed')",
    "exempt": "ValueError: reduce_scatter: got a method with exempt parameters, expected none: it rounds all param",
    "exempt within": "ValueError: Hierarchical: got inner = BlockFloat(",
    "exempt, quantized": "ValueError: reduce_scatter: got a method with exempt parameters, expected none: it rounds",
    "owner": "ValueError: reduce_scatter: got a method with error_feedback='owner', expected True or False: it rounds",
    "exempt everything": "ValueError: compress: got exemptions of all parameters that the method compresses, expected",
    "methods": "RuntimeError: rank 1 compresses with TopK(",
    "policies": "RuntimeError: module '': rank 1 of the group has MixedPrecisionPolicy(",
    "modules": "RuntimeError: module '': rank 1 of the group has no fully_shard, rank 0 MixedPrecisionPolicy(",
    "node_size": "ValueError: Hierarchical: got 1 ranks with local_size = 7, expected a multiple of it",
    "uncovered": "ValueError: compress: got parameter 'g', which is trained and in no module of fully_shard",
    "no_pass": "RuntimeError: compress: got gradients outside of a backward pass",
    "weight_decay": "ValueError: SGD: got weight_decay = 0.5 for a parameter to which DGC applies momentum 0.9",
    "unused": "RuntimeError: module 'second': got 2076 elements of gradients, expected 2080",
    "torch": f"RuntimeError: gradzip.fsdp: torch {torch.__version__} has another FSDP2 (no renamed), expected one",
    "wrong_group": "RuntimeError: rank 1 of the group holds shard1of2, rank 0 shard0of2",
    "codecs": "RuntimeError: rank 1 compresses with BlockFloat(",
    "factor": "ValueError: reduce_scatter: got a scaled or an asynchronous operation",
    "outside": "RuntimeError: reduce_scatter: got gradients outside of a backward pass, expected them within backward",
    "no contraction": "ValueError: reduce_scatter: got error feedback with QSGD(",
    "nothing to feed back": "ValueError: quantize: got error_feedback=True without a method for the reduce-scatters",
    "unused, feedback": "RuntimeError: reduce_scatter of 'second': got 1288 elements of gradients, expected 1290; if",
}


@pytest.mark.parametrize("case", MESSAGES)
def test_errors(job, case):
    """All ranks raise the same kind of error, in one line."""
    for of_rank in job["errors"]:
        assert MESSAGES[case] in of_rank[case] and "\n" not in of_rank[case]


# --- the quantized reduce-scatter

NUMEL = 1000  # of a shard


def shards_of(rank):
    return [gradient("x", rank, shard, (NUMEL,)).double().numpy() for shard in range(RANKS)]


def quantizer_steps(spec, x):
    """The distance between levels, for each element of a shard."""
    method = gradzip.parse(spec)
    levels = 2 ** (method.bits - 1) - 1
    size = method.block if isinstance(method, gradzip.BlockFloat) else method.bucket
    steps = np.empty_like(x)
    for start in range(0, len(x), size):
        part = x[start : start + size]
        l2 = isinstance(method, gradzip.QSGD) and method.norm == "l2"
        steps[start : start + size] = (np.linalg.norm(part) if l2 else np.abs(part).max()) / levels
    return steps


def expected_nbytes(spec):
    method = gradzip.parse(spec)
    if isinstance(method, gradzip.BlockFloat):
        return -(-NUMEL // method.block) * (4 + method.block * method.bits // 8)
    nbytes = 4 * -(-NUMEL // method.bucket) + -(-NUMEL * method.bits // 8)
    return -(-nbytes // 4) * 4


@pytest.mark.parametrize("spec", CODECS)
def test_quantized_reduce_scatter(job, spec):
    nearest = "nearest" in spec
    for shard, results in enumerate(job["quantized"]):
        got = results[spec]
        parts = np.stack([shards_of(rank)[shard] for rank in range(RANKS)])
        steps = np.stack([quantizer_steps(spec, part) for part in parts])
        mean, bound = parts.mean(0), steps.mean(0) * (0.5 if nearest else 1.0)
        error = got["first"].double().numpy() - mean
        assert (np.abs(error) <= bound * (1 + 1e-5) + 1e-6).all()
        # The variance of stochastic rounding is step^2 f (1 - f), and independent between ranks and draws.
        fraction = np.mod(parts / steps, 1.0)
        if nearest:
            expected = (np.rint(parts / steps) * steps).mean(0)
            assert np.quantile(np.abs(got["first"].double().numpy() - expected), 0.99) < 1e-6  # float32 ties
        else:
            variance = (steps**2 * fraction * (1 - fraction)).sum() / RANKS**2
            assert 0.75 < (error**2).sum() / variance < 1.33
            of_mean = got["mean"].numpy() - mean
            assert 0.75 < (of_mean**2).sum() / (variance / DRAWS) < 1.33  # unbiased
        assert torch.equal(got["again"], got["first"])
        torch.testing.assert_close(got["sum"], RANKS * got["first"], rtol=1e-6, atol=1e-6)
        assert got["sent"] == RANKS * expected_nbytes(spec)
        assert got["dense"] == 4 * RANKS * NUMEL


@pytest.mark.parametrize("spec", CODECS)
def test_quantized_reduce_scatter_of_bfloat16(job, spec):
    for shard, results in enumerate(job["quantized"]):
        out = results[spec]["bf16"]
        assert out.dtype == torch.bfloat16
        parts = [torch.from_numpy(shards_of(rank)[shard]).bfloat16().double().numpy() for rank in range(RANKS)]
        mean, bound = np.mean(parts, 0), np.mean([quantizer_steps(spec, part) for part in parts], 0)
        assert (np.abs(out.double().numpy() - mean) <= 1.01 * (bound + 2**-8 * np.abs(mean))).all()


@pytest.mark.parametrize("spec", CODECS)
def test_quantized_reduce_scatter_of_gradients_that_are_not_finite(job, spec):
    for shard, results in enumerate(job["quantized"]):
        finite = results[spec]["bad"].isfinite()
        if shard != 1:
            assert finite.all()
        else:
            assert not finite[500]
            if spec.startswith("block-float"):  # only the block
                assert finite.sum() == NUMEL - (64 if "block=64" in spec else 256)
        assert results[spec]["after_bad"].isfinite().all()


# --- its error feedback, and nodes


def rows_of(module, gradients, ranks=RANKS):
    """The gradients of a module as FSDP reduces them: a row for each rank, with the padding of each parameter."""
    rows = [[] for _ in range(ranks)]
    for name, shape in SHAPES[module].items():
        chunks = [chunk.reshape(-1) for chunk in gradients[name].chunk(ranks)]
        numel = -(-shape[0] // ranks) * math.prod(shape[1:])
        for i, row in enumerate(rows):
            own = chunks[i] if i < len(chunks) else torch.zeros(0)
            row += [own, torch.zeros(numel - own.numel())]
    return torch.stack([torch.cat(row) for row in rows]).numpy()


def of_parameters(module, row, rank, ranks=RANKS):
    """A rank's row as gradients by name, without padding."""
    found, start = {}, 0
    for name, shape in SHAPES[module].items():
        chunks = torch.empty(shape).chunk(ranks)
        if rank < len(chunks):
            found[name] = torch.from_numpy(row[start : start + chunks[rank].numel()]).view(chunks[rank].shape)
        start += -(-shape[0] // ranks) * math.prod(shape[1:])
    return found


def nearest(x, bits=4, size=256):
    """The elements of a row as decoded blocks, float32."""
    out, levels = np.empty_like(x), np.float32(2 ** (bits - 1) - 1)
    for start in range(0, len(x), size):
        block = x[start : start + size]
        top = np.abs(block).max()
        out[start : start + size] = np.rint(block * (levels / top)) * (top / levels) if top else 0
    return out


def senders_steps(steps, senders=RANKS, with_feedback=True, ranks=RANKS):
    """The averages of each rank, by step, where each sender rounds what it has with what it lost before; the residuals.

    senders: ranks, or nodes that send the mean of their ranks.
    """
    residuals = {module: np.zeros((senders, *rows_of(module, zeros(), ranks).shape), np.float32) for module in SHAPES}
    averages = []
    for step in steps:
        of_step = [{} for _ in range(ranks)]
        for module, residual in residuals.items():
            of_ranks = [
                {name: gradient(name, rank, step, shape) for name, shape in ALL.items()} for rank in range(ranks)
            ]
            grads = [rows_of(module, of_rank, ranks) for of_rank in of_ranks]
            means = np.stack(grads).reshape(senders, ranks // senders, *grads[0].shape).mean(1, dtype=np.float32)
            corrected = means + residual
            sent = np.stack([[nearest(row) for row in of_sender] for of_sender in corrected])
            if with_feedback:
                residual[:] = corrected - sent
            for rank in range(ranks):
                of_step[rank] |= of_parameters(module, sent.mean(0, dtype=np.float32)[rank], rank, ranks)
        averages.append(of_step)
    return averages, residuals


def zeros():
    return {name: torch.zeros(shape) for name, shape in ALL.items()}


def test_senders_add_what_rounding_has_lost(job):
    averages, residuals = senders_steps(range(STEPS))
    for rank, results in enumerate(job["feedback"]):
        for got, expected in zip(results["averages"], averages, strict=True):
            assert_equal(got, expected[rank], exact=False, rtol=1e-5, atol=1e-6)
        for module, residual in results["residuals"].items():
            np.testing.assert_allclose(residual, residuals[module][rank], rtol=1e-4, atol=1e-5)
            assert residual.any()


@pytest.mark.parametrize("run, gradients", [("stochastic", range(STEPS)), ("twice", [0])])
def test_nothing_is_lost(job, run, gradients):
    """The sum of averages and the mean residual is that of mean gradients."""
    for rank, results in enumerate(job["feedback"]):
        for module in SHAPES:
            times = 2 if run == "twice" and module == "second" else 1
            total = sum(
                rows_of(module, {n: times * gradient(n, r, step, s) for n, s in ALL.items()})[rank] / RANKS
                for r in range(RANKS)
                for step in gradients
            )
            kept = sum(of_rank[f"{run} residuals"][module][rank] for of_rank in job["feedback"]) / RANKS
            expected = of_parameters(module, total - kept.numpy(), rank)
            got = {name: sum(averages[name] for averages in results[run]) for name in expected}
            assert_equal(got, expected, exact=False, rtol=1e-4, atol=1e-5)


def test_parameters_that_are_frozen_for_a_step(job):
    """The parameter begins again without a residual. The others of its module keep theirs."""
    total = {
        name: sum(gradient(name, r, step, shape) / RANKS for r in range(RANKS) for step in range(STEPS))
        for name, shape in SHAPES["first"].items()
    }
    total["a"] = sum(gradient("a", r, 2, ALL["a"]) for r in range(RANKS)) / RANKS
    for rank, results in enumerate(job["feedback"]):
        first, frozen, last = results["thawed"]
        assert "a" not in frozen
        residual = sum(of_rank["thawed residuals"]["first"][rank] for of_rank in job["feedback"]) / RANKS
        expected = of_parameters("first", rows_of("first", total)[rank] - residual.numpy(), rank)
        got = {name: first[name] + frozen[name] + last[name] for name in expected if name != "a"} | {"a": last["a"]}
        assert_equal(got, expected, exact=False, rtol=1e-4, atol=1e-5)


def test_steps_that_fail_or_overflow_on_a_rank_change_no_residual(job):
    for results in job["feedback"]:
        assert "between the blocks" in results["error"]
        for before, after in [
            ("residuals", "overflow"), ("residuals", "failure"), ("replicas", "replicas, overflow"),
        ]:  # fmt: skip
            assert results[before].keys() == SHAPES.keys()
            for module, residual in results[before].items():
                assert residual.any() and torch.equal(residual, results[after][module])


def test_residuals_are_saved_and_follow_the_loss_scale(job):
    for results in job["feedback"]:
        assert_equal(*results["resumed"])
        for averages, expected in zip(results["scaled"], results["averages"], strict=True):
            assert_equal(averages, expected)


def test_ranks_that_join_begin_without_residuals(job):
    """Also those that were there before: residuals are of other shards. Nodes are found again."""
    (first, _), (later, _) = senders_steps(range(2), 3, ranks=3), senders_steps(range(2, 4))
    of_nodes, _ = senders_steps(range(2, 4), 2)
    for rank, results in enumerate(job["elastic"]):
        for few, expected in ((3, later), (2, of_nodes)):
            *before, after = results[few]
            assert len(before) == (rank < few)
            for step, averages in enumerate(before[0] if before else ()):
                for name, average in averages.items():  # with one node, gradients are exact
                    mean = sum(gradient(name, r, step, ALL[name]) for r in range(few)) / few
                    of_shard = first[step][rank][name] if few == 3 else mean.chunk(few)[rank]
                    torch.testing.assert_close(average, of_shard, rtol=1e-5, atol=1e-6)
            for averages, of_ranks in zip(after, expected, strict=True):
                assert_equal(averages, of_ranks[rank], exact=False, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_feedback", [False, True])
def test_nodes_send_the_means_of_their_ranks(job, with_feedback):
    averages, _ = senders_steps(range(STEPS), 2, with_feedback)
    numel = sum(rows_of(module, zeros()).size for module in SHAPES)
    blocks = sum(-(-rows_of(module, zeros()).shape[1] // 256) for module in SHAPES)
    for rank, results in enumerate(job["nodes_of_shards"]):
        got, (sent, in_node) = results[2, with_feedback]
        for of_step, expected in zip(got, averages, strict=True):
            assert_equal(of_step, expected[rank], exact=False, rtol=1e-5, atol=1e-6)
        assert (sent, in_node) == (2 * blocks * (4 + 128), 4 * numel)
        exact, (sent, in_node) = results[4, with_feedback]  # one node
        for step, of_step in enumerate(exact):
            for name, average in of_step.items():
                torch.testing.assert_close(average.double(), mean_shard(name, step, rank, 4), rtol=1e-5, atol=1e-6)
        assert (sent, in_node) == (0, 4 * numel)


# --- longer tests


@pytest.mark.long
@pytest.mark.parametrize("option", ["no_reshard", "hooks", "sums"])
def test_more_options_change_nothing(long_job, option):
    test_options_change_nothing({"options": long_job["more_options"]}, option)


@pytest.mark.long
def test_parameters_frozen_from_the_start(long_job):
    for rank, results in enumerate(long_job["more_options"]):
        reference = Reference(BASE, rank % 2)
        for step, averages in enumerate(results["frozen"]):
            assert_equal(averages, reference.step(step, without=("a", "g")))


@pytest.mark.long
def test_accumulation_with_synchronization(long_job):
    for rank, results in enumerate(long_job["more_options"]):
        first, second = base(rank % 2)
        assert_equal(results["added"][0], {name: first[name] + second[name] for name in first})


@pytest.mark.long
def test_module_that_runs_twice(long_job):
    for rank, results in enumerate(long_job["more_options"]):
        expected = Reference(BASE, rank % 2).step(0)
        twice = {name: 2 * average for name, average in expected.items() if name in SHAPES["second"]}
        assert_equal(results["run_twice"][0], expected | twice)


@pytest.mark.long
@pytest.mark.parametrize("option, dtype", [("reduced_bf16", torch.bfloat16), ("float16", torch.float16)])
def test_reduction_in_low_precision(long_job, option, dtype):
    """The gradients, both sums and the mean are rounded: each to half a unit in the last place."""
    for rank, results in enumerate(long_job["more_options"]):
        for step, averages in enumerate(results[option]):
            for name, average in averages.items():
                error = (average.double() - mean_shard(name, step, rank % 2)).abs()
                largest = max(gradient(name, r, step, ALL[name]).abs().max() for r in range(RANKS))
                assert 0 < error.max() <= 4 * torch.finfo(dtype).eps / 2 * largest


@pytest.mark.long
@pytest.mark.parametrize("spec", EXAMPLES)
def test_every_method(long_job, spec):
    for rank, results in enumerate(long_job["all_methods"]):
        reference = Reference(spec, rank % 2)
        for step, averages in enumerate(results[spec]["averages"]):
            assert_equal(averages, reference.step(step))


@pytest.mark.long
def test_replicas_stay_identical_under_auto(long_job):
    for a, b in zip(long_job["auto"][:2], long_job["auto"][2:]):
        assert a["choice"] == b["choice"] and a["chosen"]
        for averages, others in zip(a["averages"], b["averages"]):
            assert_equal(averages, others)


@pytest.mark.long
def test_replicas_without_shards(long_job):
    """As in data parallelism. Gloo adds four ranks' gradients in another order."""
    for run in long_job["replicas_only"]:
        reference = Reference(BASE, 0, shards=1)
        for step, averages in enumerate(run["averages"]):
            assert_equal(averages, reference.step(step), exact=False, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_shards_without_replicas(long_job):
    for rank, run in enumerate(long_job["shards_only"]):
        reference = Reference(BASE, rank, shards=4)
        for step, averages in enumerate(run["averages"]):
            assert_equal(averages, reference.step(step), exact=False, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_uncompressed_averages_are_those_of_fsdp(long_job, job):
    for native, results in zip(long_job["native"], job["methods"]):
        for averages, expected in zip(results[UNCOMPRESSED]["averages"], native, strict=True):
            assert_equal(averages, expected, exact=False, rtol=1e-6, atol=1e-6)


@pytest.mark.long
def test_clipping(long_job):
    clipping = long_job["clipping"]
    squares = sum(sum(average.double().square().sum() for average in base(shard)[0].values()) for shard in range(2))
    for rank, results in enumerate(clipping):
        torch.testing.assert_close(results["norm"].double(), squares.sqrt(), rtol=1e-5, atol=0)
        factor = 1 / (squares.sqrt().float() + 1e-6)
        expected = {name: factor * average for name, average in base(rank % 2)[0].items()}
        assert_equal(results["clipped"], expected, exact=False, rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_models_that_share_a_compressor(long_job):
    for rank, results in enumerate(long_job["shared_compressor"]):
        first, second, again = results["averages"]
        reference = base(rank % 2)
        assert_equal(first, reference[0])
        assert_equal(second, base(rank % 2, prefix="model1.")[0])
        assert_equal(again, reference[1])
        assert len(results["states"]) == 10


@pytest.mark.long
def test_momentum_of_weight_decay(long_job):
    for rank, results in enumerate(long_job["momentum"]):
        reference = Reference("dgc:theta=0.5,min_numel=256", rank % 2)
        shards = {name: parameter for name, parameter in results["parameters"].items() if parameter.numel()}
        start = {name: torch.ones_like(parameter) for name, parameter in shards.items()}
        sgd = MomentumSGD(start, dict.fromkeys(start, (0.0, 0.9)))
        for step in range(STEPS):
            sgd.step(reference.step(step), 0.1, dict.fromkeys(start, 0.5))
        for name, parameter in shards.items():
            np.testing.assert_allclose(parameter.numpy(), sgd.parameters[name], rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name, shards", [("alone", 4), ("both", 2)])
def test_training_with_a_quantized_reduce_scatter(long_job, name, shards):
    """A step of 8 bits is at most 1/127 of the largest magnitude; blocks of 256 elements cross parameters."""
    for rank, results in enumerate(long_job["quantized_training"]):
        assert 3.5 < results[f"{name}_ratio"] < 1024 / 260
        for step, averages in enumerate(results[name]):
            largest = max(gradient(n, r, step, ALL[n]).abs().max() for n in ALL for r in range(RANKS))
            for parameter, average in averages.items():
                error = (average.double() - mean_shard(parameter, step, rank % shards, shards)).abs().max()
                assert 1e-4 < error < largest / 127
