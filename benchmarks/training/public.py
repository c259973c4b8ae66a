"""Compare the cost model with public measurements of GPUs, and with steps of one GPU.

  python -m benchmarks.training.public            print the table
  python -m benchmarks.training.public --write    also write it to docs/advise.md

In each case, the bandwidth of one link is fitted to one measurement, and the others are predicted. Figures of others
are as their sources print them. What a method takes on one GPU is known from its kernels and from ResNet-50
(benchmarks/devices.py); GPT-2 is predicted.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.common.arguments import Parser
from benchmarks.common.results import RESULTS, ROOT, Blocks, ResultsError, replace_blocks
from benchmarks.common.tables import markdown
from benchmarks.devices import KERNELS, STEPS, UNCHECKED
from gradzip.advice.cost import Compressed, Layer, Link, Step, joined, predict
from gradzip.cli import devices
from gradzip.cli.models import MODELS, Parameter, step_of

PAGE = ROOT / "docs" / "advise.md"
START = "<!-- table: python -m benchmarks.training.public --write -->\n\n"
LATENCY = 50e-6

Seconds = Callable[[float], float]  # predicted, at a bandwidth


class Case(NamedTuple):
    """A machine and what was measured on it.

    fitted: (what, seconds, prediction at a bandwidth) of what the bandwidth is fitted to.
    rows: the same of what is predicted.
    """

    machine: str
    source: str
    fitted: tuple[str, float, Seconds]
    rows: list[tuple[str, float, Seconds]]


class Found(NamedTuple):
    """A prediction. bandwidth: that was fitted."""

    machine: str
    source: str
    fitted: str
    bandwidth: float
    what: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def step_seconds(step: Step, link: Link, device: str = "", method: str = "none") -> float:
    """The predicted seconds of a step with DDP, uncompressed or with a hook of 16 bits."""
    kind, nbytes = ("all_reduce", 4) if method == "none" else ("all_reduce_half", 2)
    costs = devices.device(device).costs(method) if device else None
    layers = []
    for layer in step.layers:
        codec = costs.gradient + costs.element * layer.numel if costs else 0.0
        layers.append(Compressed(((kind, float(nbytes * layer.numel)),), codec))
    return predict(step, layers, link, **joined("ddp", stock=True)).seconds


def fit(seconds: Seconds, measured: float) -> float:
    """The bandwidth at which a prediction is what was measured, by bisection."""
    low, high = 1e6, 1e13
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > measured else (low, middle)
    return low


def cases() -> list[Case]:
    return [_a40(), _acp_sgd(), _one_bit_adam(ethernet=True), _one_bit_adam(ethernet=False)]


def _a40() -> Case:
    blocks = [Parameter(f"{i}", (5000, 7500), 1.0) for i in range(32)]  # 1.2 B parameters
    step = step_of(blocks, 1.4)

    def seconds(method: str) -> Seconds:
        return lambda within: step_seconds(step, Link(8, math.inf, LATENCY, per_node=8, within=within), "a40", method)

    return Case(
        "8 x A40, no NVLink", "GaTech-RL2/EgoVerse#667", ("step of 1.2 B parameters, fp32", 6.4, seconds("none")),
        [("the same, bf16 hook", 3.6, seconds("bf16"))],
    )  # fmt: skip


def _acp_sgd() -> Case:
    """The step without communication is that of ACP-SGD, which hides nearly all of its own."""

    def link(bandwidth: float) -> Link:
        return Link(32, bandwidth, LATENCY, per_node=4, within=8e9)

    def seconds(model: str, ms: float) -> Seconds:
        return lambda bandwidth: step_seconds(step_of(list(MODELS[model]()), ms / 1e3), link(bandwidth))

    nbytes = 4 * sum(p.numel for p in MODELS["resnet50"]())
    measured = {"resnet50": (266, 248), "resnet152": (500, 316), "bert-base": (805, 193), "bert-large": (2307, 245)}
    return Case(
        "8 nodes of 4 x RTX 2080 Ti, 10 Gb/s", "Zhang et al., ICDCS 2023, section IV and Table III",
        ("all-reduce of ResNet-50's gradients", 0.169, lambda b: link(b).all_reduce(nbytes)),
        [(f"step of {model}, fp32", ms / 1e3, seconds(model, other)) for model, (ms, other) in measured.items()],
    )  # fmt: skip


def _one_bit_adam(ethernet: bool) -> Case:
    """All-reduces of BERT-large's gradients in float16."""
    nbytes = 2 * sum(p.numel for p in MODELS["bert-large"]())
    ms = {2: 1897.21, 4: 2133.24, 8: 2173.35, 16: 2275.43} if ethernet else {8: 336.40, 4: 297.28, 2: 183.74}
    per_node = 4 if ethernet else 8

    def seconds(nodes: int) -> Seconds:
        def at(bandwidth: float) -> float:
            within = 16e9 if ethernet else 300e9
            link = Link(nodes * per_node, bandwidth, LATENCY, per_node=per_node, within=within, tree=not ethernet)
            return link.all_reduce(nbytes)

        return at

    (first, *others) = [(f"all-reduce of BERT-large in fp16, {n} nodes", t / 1e3, seconds(n)) for n, t in ms.items()]
    machine = "nodes of 4 x V100, Ethernet" if ethernet else "nodes of 8 x V100, NVLink and InfiniBand"
    return Case(machine, "Tang et al., 1-bit Adam, ICML 2021, Table 1", first, others)


def predictions() -> list[Found]:
    """All predictions of measurements that nothing was fitted to."""
    found = []
    for case in cases():
        what, measured, at = case.fitted
        bandwidth = fit(at, measured)
        found += [
            Found(case.machine, case.source, what, bandwidth, row, seconds, predicted(bandwidth))
            for row, seconds, predicted in case.rows
        ]
    return found + list(_one_gpu())


def _one_gpu() -> Iterator[Found]:
    """Steps of GPT-2 with methods, on one GPU without a network."""
    rows = {row["variant"]: row for row in json.loads((RESULTS / STEPS).read_text())["gpt2"]["rows"]}
    stock = rows["stock"]["ms"] / 1e3
    layers = [Layer(p.name, p.shape, 0.0) for p in MODELS["gpt2"]()]
    for method in KERNELS:
        row = rows.get(method + UNCHECKED)
        costs = devices.device("h100").costs(method)
        if row is None or costs is None:
            continue
        added = sum(costs.gradient + (costs.element + costs.rank) * layer.numel for layer in layers)
        measured = stock + row["added_ms"] / 1e3
        yield Found("one H100", f"`{STEPS}`", "step of ResNet-50", 0.0, f"GPT-2, {method}", measured, stock + added)


def table() -> Iterator[str]:
    header = ["machine", "fitted to", "link", "predicted", "ms", "measured", "error"]
    rows, shown = [], ""
    for found in predictions():
        new = found.machine + found.fitted != shown
        shown = found.machine + found.fitted
        link = f"{found.bandwidth / 1e9:.2f} GB/s" if found.bandwidth else ""
        rows.append([
            f"{found.machine} ({found.source})" if new else "", found.fitted if new else "", link if new else "",
            found.what, f"{1e3 * found.predicted:.0f}", f"{1e3 * found.measured:.0f}", f"{found.error:+.0%}",
        ])  # fmt: skip
    return markdown(header, rows, left=4)


def blocks() -> Blocks:
    """The block of docs/advise.md."""
    errors = [abs(found.error) for found in predictions()]
    text = (
        f"Of {len(errors)} errors, the median is {statistics.median(errors):.0%} and the largest {max(errors):.0%}.\n"
    )
    return {(PAGE, START): "\n".join(table()) + "\n\n" + text}


def main() -> None:
    parser = Parser("training.public", __doc__)
    parser.add_argument("--write", action="store_true", help="write the table of the page")
    args = parser.parse_args()
    (block,) = blocks().values()
    print(block)
    if args.write:
        try:
            replace_blocks(blocks())
        except ResultsError as error:
            parser.fail(str(error))


if __name__ == "__main__":
    main()
