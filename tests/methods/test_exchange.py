"""The exchanges of payloads: gather, scatter_reduce and auto."""

import math
from dataclasses import dataclass

import pytest
import torch

import gradzip
import kinds
from gradzip import ops
from gradzip.collectives import AllToAll, Gather, Mean
from gradzip.collectives.fusion import fused
from gradzip.engines.local import drive
from gradzip.memory.state import Key
from gradzip.methods.base.gather import CodedSum, GatherCompressor, scatter_pays
from gradzip.methods.base.group import averaged, plan_groups

SIZES = [1, 2, 3, 4]
SHAPES = [(64, 64), (3, 2000), (1, 1031), (33, 37), (8, 16, 3, 3)]


@dataclass
class Lossless(GatherCompressor):
    """Sends float32 values unchanged."""

    number = 200
    error_feedback: bool = False

    def encode(self, grad, key):
        payload = ops.new_payload(4 * grad.numel())
        payload[ops.HEADER_NBYTES :][: 4 * grad.numel()].view(torch.float32).copy_(grad.reshape(-1))
        flags = 0 if grad.isfinite().all() else ops.NON_FINITE
        return self.seal(ops.Seal(payload, grad.numel(), flags=flags))

    def decode_add(self, payload, out, weight):
        out += weight * payload.body[: 4 * out.numel()].view(torch.float32)


def gradients(size, shape, step=0):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for _ in range(size)]


def partitions(compressor, grad, size):
    """The parts of a gradient that ranks own."""
    (group,) = plan_groups(compressor, [grad], ["w"])
    group.size, group.parts = size, [grad.view(compressor.joined_shape(grad.shape)) if compressor.vectors else grad]
    return [torch.cat([piece.view.reshape(-1) for piece in of_rank]) for of_rank in compressor.partitions(group)]


def collectives(compressor, size, shape, rank=0):
    """The types of collectives that a rank yields, if all ranks have the same gradient."""
    compressor, seen, answer = compressor.clone(), [], None
    routine = averaged(compressor, torch.ones(shape), "w", rank, size)
    while True:
        try:
            collective = routine.send(answer)
        except StopIteration:
            return seen
        seen.append(type(collective))
        if isinstance(collective, AllToAll):
            answer = [collective.parts[rank]] * size
        else:
            parts = partitions(compressor, torch.ones(shape), size)
            payloads = [compressor.encode(part, Key(0, 0, "", 0)) for part in parts]
            answer = payloads if AllToAll in seen else [collective.tensor] * size


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_gather_and_scatter_reduce_agree_for_a_lossless_codec(size, shape, error_feedback):
    gather, scatter = (
        gradzip.LocalGroup(Lossless(exchange=exchange, error_feedback=error_feedback), size)
        for exchange in ("gather", "scatter_reduce")
    )
    for step in range(3):
        grads = gradients(size, shape, step)
        a, b = gather.average(grads, "w"), scatter.average(grads, "w")
        assert all(torch.equal(x, a[0]) for x in (*a, *b))


SCATTERED = [spec for spec in kinds.exchanged() if spec.endswith("exchange=scatter_reduce")]


@pytest.mark.parametrize("spec", SCATTERED)
@pytest.mark.parametrize("size, shape", [*zip(SIZES, SHAPES), (2, SHAPES[4]), (4, SHAPES[1])])
def test_replicas_are_identical_after_a_non_finite_gradient(size, shape, spec):
    group, reference = (gradzip.LocalGroup(gradzip.parse(spec), size) for _ in range(2))
    for step in range(3):
        grads = gradients(size, shape, step)
        if step == 1:
            non_finite = [g.clone() for g in grads]
            non_finite[0].view(-1)[-1] = float("inf")  # in the partition of the last rank
            for average in group.average(non_finite, "w"):
                assert not average.isfinite().all()
        averages = group.average(grads, "w")
        assert all(torch.equal(a, averages[0]) for a in averages)
        assert torch.equal(averages[0], reference.average(grads, "w")[0])


def test_partitions():
    """Whole rows of a matrix, if it has as many as there are ranks; of a vector, as many elements as there are."""
    x = torch.arange(70.0).view(7, 10)
    rows, vector = gradzip.OneBitSGD(min_numel=0), gradzip.TopK(min_numel=0)
    assert [part.numel() for part in partitions(rows, x, 3)] == [30, 20, 20]
    assert [part.numel() for part in partitions(vector, x, 3)] == [24, 23, 23]
    assert [part.numel() for part in partitions(rows, x, 8)] == [9] * 6 + [8] * 2
    for method in (rows, vector):
        for size in range(1, 12):
            assert torch.equal(torch.cat(partitions(method, x, size)), x.view(-1))
    # Of several gradients, a rank has a part of each.
    (group,) = plan_groups(rows, [x, x], ["a", "b"])
    group.size, group.parts = 3, [x, x]
    ranges = [[piece[:2] for piece in of_rank] for of_rank in rows.partitions(group)]
    assert ranges == [[(0, 30), (70, 100)], [(30, 50), (100, 120)], [(50, 70), (120, 140)]]


@pytest.mark.parametrize("method", [gradzip.Natural(), gradzip.QSGD(coding="packed")], ids=["natural", "qsgd"])
def test_a_vector_in_parts_is_decoded_as_its_parts(method):
    x = torch.randn(1000)
    for size in (1, 3, 7):
        cut = x.tensor_split(size)
        payloads = method.encode_lists([[part] for part in cut], [Key(0, 0, "w", i) for i in range(len(cut))])
        opened = method.open_all(payloads, list(map(torch.Tensor.numel, cut)), size)
        together, apart = torch.ones(1000), torch.ones(1000)
        method.sum_all([CodedSum([together], opened, 0.3, add=True, parts=size)])
        for out, payload in zip(apart.tensor_split(size), opened):
            method.sum_all([CodedSum([out], [payload], 0.3, add=True)])
        assert torch.equal(together, apart) and together.unique().numel() > 4
        opened[-1].body[:16] = 255
        with pytest.raises(gradzip.PayloadError) as refused:
            method.sum_all([CodedSum([together], opened, 0.3, add=True, parts=size)])
        assert refused.value.index == size - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "method",
    [gradzip.Natural(), gradzip.QSGD(coding="packed", bucket=99), gradzip.QSGD()],
    ids=["natural", "qsgd", "elias"],
)
def test_vectors_are_encoded_as_each_alone(method, dtype):
    """Also 16-bit, short and empty ones; that of one which is not finite is a header, and the others are whole."""
    x = torch.randn(1000).to(dtype)
    x[400] = math.nan
    for cut in (x.tensor_split(3), x[:5].tensor_split(7), [x[:0]], [x[400:401]]):
        keys = [Key(0, 0, "w", i) for i in range(len(cut))]
        together = method.encode_lists([[part] for part in cut], keys)
        for part, key, payload in zip(cut, keys, together, strict=True):
            assert torch.equal(payload, method.encode(part, key))
            (opened,) = method.open_all([payload], [part.numel()], 1)
            finite = bool(part.isfinite().all())
            assert opened.flags == (0 if finite else ops.NON_FINITE)
            assert (opened.body.numel() == 0) == (not finite or part.numel() == 0)


def test_bytes_sent_are_all_shards_and_the_average_of_one():
    size, shape = 4, (400, 250)
    grads = gradients(size, shape)
    group = gradzip.LocalGroup(gradzip.TopK(exchange="scatter_reduce"), size)
    group.average(grads, "w")
    partition = max(
        gradzip.roundtrip(gradzip.TopK(), s.view(1, -1))[1] for g in grads for s in partitions(gradzip.TopK(), g, size)
    )
    assert 4.8 * partition < group.bytes_sent <= 5.2 * partition
    # A rank receives 2 (p - 1) / p payloads rather than p - 1: partitions to average, and averaged partitions.
    payload = gradzip.roundtrip(gradzip.TopK(), grads[0])[1]
    received = (size - 1) * 2 * partition
    assert received < 0.6 * (size - 1) * payload


def test_auto_scatters_when_it_saves_more_than_a_round():
    gather, scatter = [Gather], [AllToAll, Gather]
    auto, shape = Lossless(exchange="auto"), (256, 300)  # 307 kB
    for size in (1, 2, 3, 8):
        group = gradzip.LocalGroup(auto, size)
        for step in range(3):
            group.average(gradients(size, shape), "w")
            # Gathering sends (p - 1) payloads; scattering 2 (p - 1) / p, and p - 1 messages and a collective more. At
            # 1 Gb/s, 50 us a message and 500 us a collective, those are worth 6250 (p - 1) + 62500 bytes.
            saved = (size - 1) * (size - 2) / size * (4 * 256 * 300 + 48)
            expected = step > 0 and saved > 6250 * (size - 1) + 62500
            for compressor in group.compressors:
                assert compressor.states["w"].scattered is expected, (size, step)
        assert expected is (size > 2)
    small = gradzip.LocalGroup(auto, 4)
    for _ in range(3):
        small.average(gradients(4, (64, 64)), "w")
    assert not small.compressors[0].states["w"].scattered
    assert collectives(auto, 4, (64, 64)) == collectives(Lossless(), 4, (64, 64)) == gather
    assert collectives(Lossless(exchange="scatter_reduce"), 4, (64, 64)) == scatter
    assert collectives(Lossless(exchange="scatter_reduce"), 1, (64, 64)) == gather
    assert [Lossless(exchange=e).rounds for e in ("gather", "scatter_reduce", "auto")] == [1, 2, 2]


def test_auto_is_monotone_in_payload_and_never_scatters_between_two():
    for size in range(1, 65):
        decisions = [scatter_pays(1 << shift, size) for shift in range(40)]
        assert decisions == sorted(decisions) and decisions[-1] is (size > 2) and not decisions[0], size


def test_gradients_with_fewer_elements_than_ranks_are_gathered():
    grads = [torch.full((1, 2), float(r)) for r in range(4)]
    averages = gradzip.simulate(Lossless(exchange="scatter_reduce", min_numel=0), grads)
    assert torch.equal(averages[3], torch.full((1, 2), 1.5))


@pytest.mark.parametrize("size", SIZES)
def test_fused_equals_separate(size):
    method = gradzip.TopK(theta=0.8, exchange="scatter_reduce")
    shapes = {"a": (64, 64), "b": (33, 129), "bias": (7,), "c": (16, 16, 3, 3)}
    grads = {name: gradients(size, shape) for name, shape in shapes.items()}
    compressors = [method.clone() for _ in range(size)]
    together = drive(
        [fused([averaged(c, g[r].clone(), n, r, size) for n, g in grads.items()]) for r, c in enumerate(compressors)]
    )
    group = gradzip.LocalGroup(method, size)
    for i, name in enumerate(shapes):
        alone = group.average(grads[name], name)[0]
        assert all(torch.equal(together[rank][i], alone) for rank in range(size))


def test_fused_yields_one_collective_per_round_and_kind():
    methods = [gradzip.TopK(exchange="scatter_reduce"), gradzip.TopK(exchange="scatter_reduce"), gradzip.TopK()]
    routine = fused([averaged(m, torch.ones(64, 64), f"{i}", 0, 1 if i == 2 else 2) for i, m in enumerate(methods)])
    first, gather = next(routine)
    assert isinstance(gather, Gather) and len(ops.split_payloads(gather.tensor, 1)) == 1
    assert isinstance(first, AllToAll) and len(first.nbytes) == 2 and first.tensor.numel() == sum(first.nbytes)
    assert [len(ops.split_payloads(part, 2)) for part in first.parts] == [2, 2]
    (second,) = routine.send([[first.parts[0]] * 2, [gather.tensor]])
    assert isinstance(second, Gather) and len(ops.split_payloads(second.tensor, 2)) == 2


def test_wrong_number_of_parts_is_an_error():
    def wrong():
        yield AllToAll(torch.zeros(3, dtype=torch.uint8), (3,))

    with pytest.raises(RuntimeError, match="an all-to-all of 2 ranks: got \\[1, 1\\] parts, one per rank"):
        drive([wrong(), wrong()])
    with pytest.raises(RuntimeError, match="different collectives: \\['AllToAll', 'Mean'\\]"):
        drive([wrong(), (c for c in [Mean(torch.zeros(1))])])


def test_digest_ignores_the_exchange():
    assert Lossless().digest == Lossless(exchange="auto").digest != Lossless(error_feedback=True).digest
