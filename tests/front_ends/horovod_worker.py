"""Scenarios for tests/front_ends/test_horovod.py, run by horovodrun."""

import copy
from dataclasses import dataclass

import horovod.torch as hvd
import torch

import gradzip
import kinds
from gradzip import _version
from gradzip.horovod.front_end import drop_in_flight
from gradzip.methods.base.compressor import Average
from harness import SIZE, main, message, scenario

FFT = {"theta": 0.5, "bits": 12}
SUBSET = hvd.ProcessSet(range(SIZE - 1))


def gradient(rank, *shape, dtype=torch.float32, index=0):
    """The gradient of a rank, in every scenario and in tests/front_ends/test_horovod.py."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def layers(*shapes, dtype=torch.float32):
    return [(f"layer{i}", torch.nn.Parameter(torch.zeros(*s, dtype=dtype))) for i, s in enumerate(shapes)]


def optimizer(named, compression, **arguments):
    sgd = torch.optim.SGD([p for _, p in named], lr=1.0)
    return hvd.DistributedOptimizer(sgd, named_parameters=named, compression=compression, **arguments)


def backward(named, rank, order=None):
    """Give every parameter `gradient(rank, ...)` in real backward passes, so that hooks are called in this order."""
    for i in order if order is not None else range(len(named)):
        p = named[i][1]
        (p * gradient(rank, *p.shape, dtype=p.dtype, index=i)).sum().backward()


def averaged(named, compression, rank, **arguments):
    """The averages after one synchronize()."""
    opt = optimizer(named, compression, **arguments)
    for _ in range(arguments.get("backward_passes_per_step", 1)):
        backward(named, rank)
    opt.synchronize()
    return [p.grad.clone() for _, p in named]


SHAPES = [(64, 64), (300,), (40, 3, 3, 3), (33, 129), (7,)]


@scenario
def average(rank, size):
    return averaged(layers(*SHAPES), gradzip.FFTRange(**FFT), rank)


@scenario
def summed(rank, size):
    return averaged(layers(*SHAPES), gradzip.FFTRange(**FFT), rank, op=hvd.Sum)


@scenario
def predivided(rank, size):
    return averaged(layers(*SHAPES), gradzip.FFTRange(**FFT), rank, gradient_predivide_factor=2.0)


@scenario
def accumulated(rank, size):
    return averaged(layers(*SHAPES), gradzip.FFTRange(**FFT), rank, backward_passes_per_step=2)


@scenario
def grouped(rank, size):
    return averaged(layers(*SHAPES), gradzip.FFTRange(**FFT), rank, groups=2)


@scenario
def listed_groups(rank, size):
    named = layers(*SHAPES)
    return averaged(named, gradzip.FFTRange(**FFT), rank, groups=[[named[0][1], named[4][1]], [named[3][1]]])


@scenario
def lossless_is_stock(rank, size):
    """NoCompression against hvd.Compression.none and Cast against hvd.Compression.fp16, for every dtype of Horovod.

    The same bits on two ranks. On more, what Horovod fuses decides in which order it adds, and so the rounding. In
    float16 up to rounding, too, because gradzip divides before it adds.
    """

    def alike(shape, dtype, ours, stock):
        a, b = (averaged(layers(shape, dtype=dtype), compression, rank)[0] for compression in (ours, stock))
        half = dtype == torch.float16 or stock is hvd.Compression.fp16
        eps = torch.finfo(torch.float16 if half else dtype).eps
        tolerance = 4 * eps * b.abs().max() if half or size > 2 else 0
        return a.dtype == b.dtype and bool((a - b).abs().max() <= tolerance)

    results = []
    for dtype in (torch.float16, torch.float32, torch.float64):
        for shape in ((40, 40), (300,)):
            results.append(alike(shape, dtype, gradzip.NoCompression(), hvd.Compression.none))
        results.append(alike((40, 40), dtype, gradzip.Cast(), hvd.Compression.fp16))
    return results


@scenario
def large_halves(rank, size):
    """Averages in float16 whose sums overflow, and sums that do not: cast gradients, and uncompressed ones."""
    results = {}
    for value, arguments in ((60000.0, {}), (60000.0, {"gradient_predivide_factor": 2.0}), (20000.0, {"op": hvd.Sum})):
        named = [*layers((64, 64)), ("half", torch.nn.Parameter(torch.zeros(300).half()))]
        opt = optimizer(named, gradzip.Cast(), **arguments)
        for _, p in named:
            (p * value).sum().backward()
        opt.synchronize()
        results[f"{value} {sorted(arguments)}"] = [p.grad / value for _, p in named]
    return results


@scenario
def odd_tensors(rank, size):
    """Shapes, dtypes and strides that gradients may have."""
    torch.manual_seed(0)
    tensors = {
        "scalar": torch.zeros(()),
        "empty": torch.zeros(0, 5),
        "one": torch.zeros(1),
        "row": torch.zeros(1, 2000),
        "half": torch.zeros(50, 50, dtype=torch.float16),
        "bfloat16": torch.zeros(50, 50, dtype=torch.bfloat16),
        "bfloat16_small": torch.zeros(5, dtype=torch.bfloat16),
        "double": torch.zeros(50, 50, dtype=torch.float64),
        "transposed": torch.zeros(60, 50).t(),
        "transposed_small": torch.zeros(6, 5).t(),
        "channels_last": torch.zeros(32, 16, 3, 3).to(memory_format=torch.channels_last),
    }
    named = [(name, torch.nn.Parameter(t)) for name, t in tensors.items()]
    opt = optimizer(named, gradzip.FFTRange(**FFT))
    for index, (_, p) in enumerate(named):
        p.grad = torch.empty_like(p, requires_grad=False).copy_(gradient(rank, *p.shape, index=index))
    opt.synchronize()
    return {name: (p.grad.clone(), list(p.grad.stride()), list(p.stride())) for name, p in named}


@scenario
def channels_last_backward(rank, size):
    conv = torch.nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)
    named = list(conv.named_parameters())
    for _, p in named:
        torch.nn.init.constant_(p, 0.1)
    opt = optimizer(named, gradzip.FFTRange(**FFT))
    x = gradient(rank, 4, 16, 8, 8).to(memory_format=torch.channels_last)
    conv(x).square().sum().backward()
    opt.step()
    return [p.detach().clone() for _, p in named]


@scenario
def sparse(rank, size):
    """Embeddings with sparse gradients: gathered by Horovod, or made dense and compressed."""
    results = {}
    for as_dense in (False, True):
        table = torch.nn.Embedding(200, 16, sparse=True)
        torch.nn.init.zeros_(table.weight)
        opt = optimizer([("table", table.weight)], gradzip.FFTRange(theta=0.0, bits=16), sparse_as_dense=as_dense)
        table(torch.tensor([rank, 5, 199])).sum().backward()
        opt.step()
        results[as_dense] = table.weight.detach().clone()
    return results


@scenario
def clipped(rank, size):
    named = layers((64, 64), (300,))
    opt = optimizer(named, gradzip.FFTRange(**FFT))
    backward(named, rank)
    opt.synchronize()
    norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
    with opt.skip_synchronize():
        opt.step()
    return norm, [p.detach().clone() for _, p in named]


@scenario
def shuffled_hooks(rank, size):
    """Hooks in a different order on each rank, and a parameter that rank 0 does not use."""
    named = layers(*SHAPES)
    opt = optimizer(named, gradzip.FFTRange(**FFT))
    order = torch.randperm(len(named), generator=torch.Generator().manual_seed(rank)).tolist()
    if rank == 0:
        order.remove(3)
    backward(named, rank, order)
    opt.synchronize()
    return [p.grad.clone() for _, p in named]


METHOD_STEPS = 3  # so that velocities, residuals, owner residuals and step counts enter the result


@scenario
def methods(rank, size):
    return {spec: trained(spec, rank) for spec in kinds.SAMPLE}


def trained(spec, rank):
    """Averages of the last step, and bytes sent; hooks in a different order on each rank."""
    named = layers(*SHAPES)
    compressor = gradzip.parse(spec)
    opt = optimizer(named, compressor)
    for step in range(METHOD_STEPS):
        opt.zero_grad()
        order = torch.randperm(len(named), generator=torch.Generator().manual_seed(9 * step + rank)).tolist()
        backward(named, rank, order)
        opt.synchronize()
    return [p.grad.clone() for _, p in named], compressor.traffic.bytes_sent


# Steps of warm-up, sampling and compression, and sampling again, by schedule or by vote.
PHASES = {
    "gradiveq:warmup_steps=1,sample_steps=3,compress_steps=2": 9,
    "gradiveq:warmup_steps=1,sample_steps=3,compress_steps=9,stop=0.01": 7,
    "gradiveq:warmup_steps=0,sample_steps=3,sampling=qsgd(exchange=scatter_reduce),reuse=1,slice_size=120": 5,
}


@scenario
def phases(rank, size):
    """Averages, bytes and phases of a method with phases; hooks in a different order on each rank."""
    results = {}
    for spec, steps in PHASES.items():
        named, compressor = layers(*SHAPES), gradzip.parse(spec)
        opt, results[spec] = optimizer(named, compressor), []
        for step in range(steps):
            opt.zero_grad()
            for i in torch.randperm(len(named), generator=torch.Generator().manual_seed(9 * step + rank)).tolist():
                p = named[i][1]
                (p * gradient(rank, *p.shape, index=10 * step + i)).sum().backward()
            opt.synchronize()
            phase = compressor.phase(compressor.states["layer2"])
            results[spec].append(([p.grad.clone() for _, p in named], compressor.traffic.bytes_sent, phase))
    return results


# Gathers and rings add in a fixed order, so the results equal those of a LocalGroup bit for bit.
CONVOLUTIONS = [(40, 3, 3, 3), (16, 12, 3, 3), (64, 64), (8, 8, 5, 5), (300,)]
RING = (
    "gradiveq:warmup_steps=0,sample_steps=3,compress_steps={},sampling=qsgd(bits=8),stop=None,slice_size=200,"
    "exchange=ring"
)
RINGS = [
    RING.format(4),
    f"per-layer:layer1={RING.replace(':', '(').format(1)}),default={RING.replace(':', '(').format(9)})",
]
RING_STEPS = 9


@scenario
def rings(rank, size):
    """Averages and bytes; hooks in a different order on each rank. Step 4 continues from a checkpoint. Step 5 drops
    gradients in flight, as elastic training does when a worker is lost."""
    results = {}
    for spec in RINGS:
        named, compressor = layers(*CONVOLUTIONS), gradzip.parse(spec)
        opt, results[spec] = optimizer(named, compressor), []
        for step in range(RING_STEPS):
            if step == 4:
                named, again = layers(*CONVOLUTIONS), gradzip.parse(spec)
                again.load_state_dict(compressor.state_dict())
                opt, compressor = optimizer(named, again), again
            if step == 5:
                drop_in_flight(compressor)
            opt.zero_grad()
            sent = compressor.traffic.bytes_sent
            for i in torch.randperm(len(named), generator=torch.Generator().manual_seed(9 * step + rank)).tolist():
                p = named[i][1]
                (p * gradient(rank, *p.shape, index=10 * step + i)).sum().backward()
            opt.synchronize()
            results[spec].append(([p.grad.clone() for _, p in named], compressor.traffic.bytes_sent - sent))
    return results


@scenario
def restarted_on_one_rank(rank, size):
    """Rank 0 loads a checkpoint and the others do not, so they are in different phases."""
    spec = next(iter(PHASES))
    compressor, named = gradzip.parse(spec), layers((40, 3, 3, 3))
    opt = optimizer(named, compressor)
    for _ in range(5):
        opt.zero_grad()
        backward(named, rank)
        opt.synchronize()
    state_dict = compressor.state_dict()
    compressor, named = gradzip.parse(spec), layers((40, 3, 3, 3))
    if rank == 0:
        compressor.load_state_dict(state_dict)
    optimizer(named, compressor)
    return message(lambda: backward(named, rank))


@scenario
def process_set_scatter_reduce(rank, size):
    """A process set of all ranks but the last."""
    named = layers((64, 64), (300,))
    opt = optimizer(named, gradzip.TopK(theta=0.9, exchange="scatter_reduce"), process_set=SUBSET)
    backward(named, rank)
    opt.synchronize()
    return [p.grad.clone() for _, p in named]


@dataclass
class PowerIteration(gradzip.Compressor):
    """Two rounds, where the second needs the result of the first, as in Power-SGD but without compression."""

    rounds = 2

    def reduce(self, group):
        first = yield gradzip.Mean(group.vector.clone())
        second = yield gradzip.Mean(group.vector * first)
        return Average([second])


@scenario
def two_rounds(rank, size):
    """A method with two rounds; hooks in a different order on each rank."""
    named = layers(*SHAPES)
    opt = optimizer(named, PowerIteration())
    order = torch.randperm(len(named), generator=torch.Generator().manual_seed(rank)).tolist()
    for _ in range(3):
        opt.zero_grad()
        backward(named, rank, order)
        opt.synchronize()
    return [p.grad.clone() for _, p in named]


@scenario
def without_names(rank, size):
    named = layers((64, 64), (300,))
    opt = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), compression=gradzip.FFTRange(**FFT))
    backward(named, rank)
    opt.synchronize()
    return [p.grad.clone() for _, p in named]


@scenario
def two_optimizers(rank, size):
    """One compressor for two optimizers, as of a GAN: same names, different shapes. States must not mix."""
    compressor = gradzip.FFTRange(**FFT, error_feedback=True)
    first, second = layers((64, 64)), layers((80, 40))
    opts = [optimizer(first, compressor), optimizer(second, compressor)]
    for _ in range(3):
        for named, opt in zip((first, second), opts):
            opt.zero_grad()
            backward(named, rank)
            opt.step()
    return [p.detach().clone() for _, p in first + second]


@scenario
def process_set(rank, size):
    """A process set of all ranks but the last."""
    named = layers((64, 64), (300,))
    opt = optimizer(named, gradzip.FFTRange(**FFT), process_set=SUBSET)
    backward(named, rank)
    opt.synchronize()
    return [p.grad.clone() for _, p in named]


@scenario
def feedback_steps(rank, size):
    """Ten steps with error feedback and a schedule: last averages and bytes."""
    compressor = gradzip.FFTRange(theta=gradzip.StepSchedule({0: 0.5, 5: 0.9}), error_feedback=True)
    named = layers((64, 64), (300,))
    opt = optimizer(named, compressor)
    for _ in range(10):
        opt.zero_grad()
        backward(named, rank)
        opt.synchronize()
    traffic = compressor.traffic
    return [p.grad.clone() for _, p in named], traffic.bytes_sent, traffic.bytes_dense, traffic.bytes_wire


# Compression, options of the optimizer, and whether a GradScaler is used. Parameters have weight decays of their own.
DECAYS = [0.1, 0.02]
DECAY_STEPS = 10
DECAYED = {
    "bypassed": ("dgc:min_numel=10000", {}, False),
    "compressed": ("dgc:theta=0", {}, False),
    "per layer": ("per-layer:layer0=dgc(theta=0)", {}, False),
    "accumulated": ("dgc:min_numel=10000", {"backward_passes_per_step": 2}, False),
    "summed": ("dgc:min_numel=10000", {"op": hvd.Sum}, False),
    "grouped": ("dgc:min_numel=10000", {"groups": 1}, False),
    "loss scaled": ("dgc:min_numel=10000", {}, True),
}
OVERFLOWS = 3  # the step in which one gradient of the last rank is infinite, under a GradScaler


@scenario
def weight_decay(rank, size):
    """Parameters after steps of DGCSGD with weight decay."""
    return {name: decayed(rank, size, *case) for name, case in DECAYED.items()}


def decayed(rank, size, spec, options, scaled):
    named, compressor = layers((40, 40), (30,)), gradzip.parse(spec)
    for i, (_, p) in enumerate(named):
        p.data.copy_(gradient(99, *p.shape, index=i))
    momenta = [compressor.method_for(name, p.shape).optimizer_momentum for name, p in named]
    groups = [{"params": [p], "momentum": m, "weight_decay": w} for (_, p), m, w in zip(named, momenta, DECAYS)]
    opt = hvd.DistributedOptimizer(
        gradzip.optim.DGCSGD(groups, lr=0.1), named_parameters=named, compression=compressor, **options
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4, enabled=scaled)
    if scaled:
        compressor.follow(scaler)
    for step in range(DECAY_STEPS):
        opt.zero_grad()
        for _ in range(opt.backward_passes_per_step):
            for i, (_, p) in enumerate(named):
                grad = gradient(rank, *p.shape, index=10 * step + i)
                if scaled and (step, rank, i) == (OVERFLOWS, size - 1, 1):
                    grad[0] = float("inf")
                scaler.scale((p * grad).sum()).backward()
        opt.synchronize()
        scaler.unscale_(opt)
        with opt.skip_synchronize():
            scaler.step(opt)
        scaler.update()
    return [p.detach().clone() for _, p in named]


@scenario
def closure_with_weight_decay(rank, size):
    """Parameters after steps with gradients of 0, which Horovod also averages before it calls the closure."""
    named = layers((40, 40), (30,))
    for _, p in named:
        p.data.fill_(1.0)
    sgd = gradzip.optim.DGCSGD([p for _, p in named], lr=0.1, weight_decay=0.1)
    opt = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=gradzip.DGC(theta=0.9))

    def closure():
        opt.zero_grad()
        sum((p * 0).sum() for _, p in named).backward()
        opt.synchronize()
        return 1.5

    losses = []
    for _ in range(DECAY_STEPS):
        opt.zero_grad()  # Horovod would average the last gradients again
        losses.append(opt.step(closure))
    return [p.detach().clone() for _, p in named], losses


# Method: shapes, and the value of the first element of these gradients on the last rank. TernGrad has two rounds.
NON_FINITE = {
    "fft-range:theta=0.5,bits=12,error_feedback=True": ([(64, 64), (300,)], float("inf"), (0, 1)),
    "terngrad": ([(64, 64), (40, 50)], float("nan"), (0,)),
}


@scenario
def non_finite(rank, size):
    """Non-finite gradients in the second of three steps: averages and states after each."""
    results = {}
    for spec, (shapes, value, indices) in NON_FINITE.items():
        named, compressor = layers(*shapes), gradzip.parse(spec)
        opt, results[spec] = optimizer(named, compressor), []
        for step in range(3):
            opt.zero_grad()
            for i, (_, p) in enumerate(named):
                p.grad = gradient(rank, *p.shape, index=i)
                if step == 1 and rank == size - 1 and i in indices:
                    p.grad.view(-1)[0] = value
            opt.synchronize()
            states = copy.deepcopy(compressor.state_dict()["states"])
            results[spec].append(([p.grad.clone() for _, p in named], states))
    return results


@scenario
def compression_class(rank, size):
    c = gradzip.horovod.Compression
    return [
        issubclass(c, hvd.Compression),
        c.none is hvd.Compression.none,
        c.fp16 is hvd.Compression.fp16,
        c.fft_range(theta=0.9) == gradzip.FFTRange(theta=0.9),
    ]


@scenario
def refused(rank, size):
    """Errors that must be raised before a step: Horovod would hang, average parts of gradients, or decay too slowly."""
    compressor = gradzip.FFTRange()
    named = layers((64, 64))

    class OtherOptimizer:
        """Looks like Horovod's optimizer in the call stack, but owns another parameter."""

        def __init__(self):
            self._compression = compressor
            self._parameter_names = {named[0][1]: "layer0"}

        def compress(self, p):
            compressor.compress(p)

    opt = optimizer(named, compressor)
    opt.op = hvd.Adasum
    backward_error = message(lambda: backward(named, rank))

    exempt, others = gradzip.TopK(), layers((64, 64), (64,))
    exempt.exempted = frozenset({"layer0"})
    optimizer(others, exempt)
    exempt_error = message(lambda: backward(others, rank))

    decayed = layers((64, 64))
    sgd = torch.optim.SGD([p for _, p in decayed], lr=1.0, weight_decay=0.5)
    decaying = hvd.DistributedOptimizer(sgd, named_parameters=decayed, compression=gradzip.DGC())
    backward(decayed, rank)
    return {
        "weight decay": (message(decaying.step), decayed[0][1].detach().norm().item()),
        "unknown parameter": message(lambda: OtherOptimizer().compress(torch.zeros(64, 64))),
        "no optimizer": message(lambda: compressor.compress(torch.zeros(64, 64))),
        "adasum": backward_error,
        "exempt": exempt_error,
    }


@scenario
def different_configurations(rank, size):
    """The last rank differs from the others in arguments, method, version, shapes or parameters."""
    last = rank == size - 1
    shape = (64, 64)

    def first_step(compressor, *shapes):
        named = layers(*shapes)
        optimizer(named, compressor)
        return message(lambda: backward(named, rank))

    messages = {
        "arguments": first_step(gradzip.FFTRange(theta=0.9 if last else 0.5), shape),
        "methods": first_step(gradzip.TopK() if last else gradzip.ACPSGD(), shape),
        "shapes": first_step(gradzip.TopK(), shape, (65, 64) if last else shape),
        "parameters": first_step(gradzip.TopK(), *[shape] * (3 if last else 2)),
    }
    version = _version.__version__
    _version.__version__ = "9.9" if last else version
    messages["versions"] = first_step(gradzip.TopK(), shape)
    _version.__version__ = version
    return messages


if __name__ == "__main__":
    main([SUBSET] if SIZE > 1 else [], of_spec=lambda spec: trained(spec, hvd.rank()))
