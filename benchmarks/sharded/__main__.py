"""Train with FSDP2 whose all-gathers and reduce-scatters are quantized, and compare with FSDP2's own.

Four ranks hold the shards of a network. All variants train with the same data, steps and seeds, and each with several
learning rates. Runs that the file has are not repeated: the same command continues a study.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import data
from benchmarks.common.arguments import Parser
from benchmarks.common.results import RESULTS, ROOT, Blocks, stored_rows
from benchmarks.common.studies import Rows, block, run_study
from benchmarks.common.tables import markdown, span
from benchmarks.convergence.recipes import MUON_LRS, is_text
from benchmarks.sharded.study import BASELINE, RECIPES, Variants, add_arguments, study
from benchmarks.training.averagers import BLOCKS
from models import MODELS

EXAMPLES = """\
examples:
  python -m benchmarks.sharded --data tinyshakespeare.txt                the study: hours on two cores
  python -m benchmarks.sharded --network resnet8 --data cifar-10-batches-bin
  python -m benchmarks.sharded --network charlm-small --steps 5 --seed 0 --lr 0.002 --json /tmp/try.json
                                                                         to try it out

Variants are named by the bits of gathers and reductions.
"""
FILE = RESULTS / "sharded.json"
PAGE = ROOT / "docs" / "accuracy.md"
START = "<!-- table: python -m benchmarks.sharded --write -->\n\n"
LRS = {"adamw": RECIPES["charlm"].lrs, "muon": MUON_LRS, "sgd": RECIPES["resnet8"].lrs}


def _bits(gather: int, reduce: int, **options: Any) -> dict[str, Any]:
    rounded = f"block-float:bits={gather},rounding=nearest"
    return {"gather": rounded, "reduce": f"block-float:bits={reduce}", **options}


VARIANTS: Variants = {
    BASELINE: {},
    **{f"{gather}/{reduce}": _bits(gather, reduce) for gather, reduce in ((8, 8), (8, 4), (4, 4))},
    **{
        f"{gather}/{reduce} delta": _bits(gather, reduce, reference="delta")
        for gather, reduce in ((8, 8), (8, 4), (4, 4))
    },
    "4/4 delta, error feedback": _bits(4, 4, reference="delta", error_feedback=True),
}


def tables(rows: Rows) -> Iterator[str]:
    """A table for each network, optimizer and learning rate: scores of variants, and bytes of a step.

    Bytes are those that a rank sends to others; FSDP2's own are computed.
    """
    for key in dict.fromkeys(map(itemgetter("network", "optimizer", "lr"), rows)):
        found = [row for row in rows if itemgetter("network", "optimizer", "lr")(row) == key]
        of_variants = {name: own for name in VARIANTS if (own := [row for row in found if row["variant"] == name])}
        (network, optimizer, lr), about, text = key, found[0], is_text(key[0])
        measure = data.Text.measure if text else data.Images.measure
        dimensions = (data.Text.vocabulary, data.Text.context) if text else (3, data.Images.num_classes)
        model = MODELS[network].build(*dimensions)
        blocks = [module for module in model.modules() if isinstance(module, BLOCKS)]
        gathered_twice = sum(parameter.numel() for block in blocks for parameter in block.parameters())
        numel = sum(parameter.numel() for parameter in model.parameters())
        # A gather and a reduce-scatter of all weights, and of the blocks a gather in the backward pass.
        whole = 4 * (2 * numel + gathered_twice) * (about["ranks"] - 1) / about["ranks"]
        seeds = span(map(len, of_variants.values()))
        yield (
            f"{network}, {numel / 1e6:.2g} M parameters, {optimizer}, rate {lr:g}, {about['steps']} steps, "
            f"{about['ranks']} ranks, {seeds} seed{'s' * (seeds != '1')} (`{FILE.name}`):"
        )
        yield ""
        scores = {name: [row["scores"][-1] for row in own] for name, own in of_variants.items()}
        means, cells = {name: statistics.fmean(of_seeds) for name, of_seeds in scores.items()}, []
        for variant, own in of_variants.items():
            sent = statistics.fmean(sum(row["sent"].values()) / row["steps"] for row in own)
            mean, exact = means[variant], means.get(BASELINE)
            low, middle, high = (f"{x:.{measure.digits}f}" for x in (min(scores[variant]), mean, max(scores[variant])))
            fewer, difference = "1" if variant == BASELINE else f"{whole / sent:.2f}", ""
            if variant != BASELINE and exact is not None:
                difference = f"{100 * (mean / exact - 1) if text else mean - exact:+.2f}".replace("-", "−")
            cells.append([variant, fewer, f"{middle} ({low}–{high})", difference])
        yield from markdown(
            ["variant", "times fewer bytes", measure.label, f"− float32, {'%' if text else 'points'}"], cells
        )
        yield ""


def blocks() -> Blocks:
    """The block of docs/accuracy.md."""
    return {(PAGE, START): block(tables(stored_rows(FILE)))}


def main() -> None:
    parser = Parser("sharded", __doc__, EXAMPLES)
    add_arguments(parser, VARIANTS, LRS, RECIPES["charlm"].epochs)
    run_study(parser, FILE, partial(study, "fsdp", VARIANTS, LRS), tables, blocks)


if __name__ == "__main__":
    main()
