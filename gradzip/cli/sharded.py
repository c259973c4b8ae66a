"""What `gradzip advise` says of FSDP2: its own collectives in float32 and bfloat16, and both directions quantized."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..advice.advice import BETWEEN, FOUR_BITS, MARGIN, decide, named
from ..advice.cost import Compressed, Link, Prediction, Sharded, Step, predict_sharded

EIGHT_BITS = "block-float"
STOCK = {"none": 4.0, "bf16": 2.0}  # bytes for each parameter and collective, by name in `advice.STOCK`
NAMES = {"none": "FSDP2 in float32", "bf16": "FSDP2 in bfloat16"}
# Both passes need the same weights, so these are rounded to nearest; gradients without a residual at random.
_GATHERS = {EIGHT_BITS: "BlockFloat(bits=8, rounding='nearest')", FOUR_BITS: "BlockFloat(bits=4, rounding='nearest')"}
_REDUCES = {EIGHT_BITS: "BlockFloat(bits=8)", FOUR_BITS: "BlockFloat(bits=4)"}

# Candidates of `gradzip.fsdp.quantize`: methods of the all-gathers and of the reduce-scatter, and another argument.
# Where nodes have several ranks, each is also one with `Hierarchical` for the reduce-scatter: all ranks of a node
# send their integers to other nodes, while FSDP2's own ring leaves each node once.
KEEP, DELTA = "keep=True", "reference='delta'"
QUANTIZED = [
    (None, EIGHT_BITS, None), (EIGHT_BITS, EIGHT_BITS, None), (EIGHT_BITS, EIGHT_BITS, KEEP),
    (EIGHT_BITS, FOUR_BITS, KEEP), (FOUR_BITS, FOUR_BITS, DELTA),
]  # fmt: skip


def call_of(gather: str | None, reduce: str, how: str | None) -> str:
    """The call of `gradzip.fsdp.quantize`, of a candidate."""
    between = reduce.startswith(BETWEEN)
    code = _REDUCES[reduce.removeprefix(BETWEEN)]
    given = [f"gather={_GATHERS[gather]}"] if gather else []
    given += [f"reduce=Hierarchical({code})" if between else f"reduce={code}", *([how] if how else [])]
    return f"gradzip.fsdp.quantize(model, {', '.join(given)})"


@dataclass(frozen=True)
class ShardedAdvice:
    """Predictions of FSDP2's steps over all ranks of a link.

    costs: of integers of 8 and 4 bits, by layer, as `Advice` has them: of one encoding and two decodings. If nodes have
        several ranks, of both between nodes, too.
    modules: that are sharded on their own.
    gloo: ranks are CPUs: FSDP2 waits for each collective, and gloo reduces and scatters by an all-reduce.
    """

    step: Step
    link: Link
    costs: Mapping[str, Sequence[Compressed]]
    modules: int = 24
    gloo: bool = False

    @functools.cached_property
    def candidates(self) -> dict[str, Sharded]:
        """What each way to train sends, by its call."""
        parameters = sum(layer.numel for layer in self.step.layers)
        nbytes = {method: sum(c.nbytes for c in costs) / parameters for method, costs in self.costs.items()}
        codec = {method: sum(c.encode + c.decode for c in costs) / parameters for method, costs in self.costs.items()}
        reduced = "all_reduce" if self.gloo else "reduce_scatter"
        found = {name: Sharded(sent, sent, ((reduced, sent),)) for name, sent in STOCK.items()}
        for gather, scatter, how in QUANTIZED:
            for method in (scatter, f"{BETWEEN}{scatter}"):
                if method not in self.costs:
                    continue
                collectives: tuple[tuple[str, float], ...] = (("all_to_all", nbytes[method]),)
                if method != scatter:
                    collectives = ("node all_to_all", 4.0), ("peers all_to_all", nbytes[method])
                gathered = nbytes[gather] if gather else 4.0
                seconds = codec[method] + (codec[gather] if gather else 0.0)
                found[call_of(gather, method, how)] = Sharded(gathered, 0.0 if how else gathered, collectives, seconds)
        return found

    @functools.cached_property
    def rows(self) -> list[tuple[str, Prediction]]:
        """The predictions by name, the fastest first."""
        about = self.link, self.modules, not self.gloo
        found = {name: predict_sharded(self.step, sent, *about) for name, sent in self.candidates.items()}
        return sorted(found.items(), key=lambda item: item[1].seconds)

    def kept_nbytes(self, name: str) -> int:
        """Bytes that a rank keeps: weights as they were gathered, until the backward pass, or decoded, always."""
        kept = self.candidates[name].gather if KEEP in name else 4.0 if DELTA in name else 0.0
        return round(kept * sum(layer.numel for layer in self.step.layers))

    def table(self) -> list[list[str]]:
        """Header and rows of the predictions."""
        bfloat16 = dict(self.rows)["bf16"].seconds
        table = [["", "ms/step", "× bf16", "codec", "exposed", "MB sent", "MB kept"]]
        for name, row in self.rows:
            table.append([
                NAMES.get(name, _cell(name)), f"{1e3 * row.seconds:.1f}", f"{bfloat16 / row.seconds:.2f}",
                f"{1e3 * row.compression:.1f}", f"{1e3 * row.exposed:.1f}", f"{row.nbytes / 1e6:.0f}",
                f"{self.kept_nbytes(name) / 1e6:.0f}",
            ])  # fmt: skip
        return table

    def sentences(self) -> Iterator[str]:
        """What to use, why, and what is not known."""
        by_name = dict(self.rows)
        decision = decide({name: row.seconds for name, row in self.rows})
        stock, chosen = by_name[decision.stock], by_name[decision.chosen]
        if decision.compresses:
            times = f"{stock.seconds / chosen.seconds:.1f} times as fast as {named(decision.stock)}"
            yield f"Try fsdp.quantize({short(decision.chosen)}): {times}."
            yield (
                f"{decision.chosen} takes {1e3 * chosen.seconds:.0f} ms a step, predicted; {NAMES[decision.stock]} "
                f"takes {1e3 * stock.seconds:.0f} ms."
            )
            yield "What rounded weights cost was studied for two small networks alone: train with and without."
        else:
            ideal = chosen.compute / chosen.seconds
            takes = f"takes {1e3 * chosen.seconds:.0f} ms a step, {ideal:.0%} of the ideal, predicted"
            yield f"Do not compress: {NAMES[decision.stock]} {takes}."
            gain = max(0.0, decision.gain)
            yield f"The fastest of gradzip.fsdp.quantize saves {gain:.0%}; the margin of error is {MARGIN:.0%}."
        if self.link.nodes > 1 and self.link.per_node > 1:
            yield (
                "If the model fits on the GPUs of one node, shard within nodes: no parameter crosses the network then, "
                "and gradzip.fsdp.compress averages the shards between nodes."
            )

    def json(self) -> dict[str, Any]:
        """All results in JSON types."""
        decision = decide({name: row.seconds for name, row in self.rows})
        methods = [{"method": name, **asdict(row), "memory_bytes": self.kept_nbytes(name)} for name, row in self.rows]
        finite = {name: min(getattr(self.link, name), 1e300) for name in ("bandwidth", "within")}
        return {
            "front_end": "fsdp", "link": asdict(self.link) | finite, "step_seconds": self.step.seconds,
            "parameters": sum(layer.numel for layer in self.step.layers), "layers": len(self.step.layers),
            "methods": methods, "advised": decision.chosen, "gain": decision.gain, "margin": decision.margin,
        }  # fmt: skip

    def notes(self) -> Iterator[str]:
        if not self.gloo:
            yield "Predictions of FSDP2 were compared with steps of CPUs alone, which wait for each collective."


def _cell(name: str) -> str:
    """The same in a table, shorter still."""
    return short(name).replace(KEEP, "keep").replace(DELTA, "delta")


def short(name: str) -> str:
    """The arguments of `quantize`, in short."""
    arguments = name.removeprefix("gradzip.fsdp.quantize(model, ").removesuffix(")")
    return re.sub(r"BlockFloat\(bits=(\d)[^)]*\)", r"\1 bits", arguments)
