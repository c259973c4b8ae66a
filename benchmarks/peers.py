"""Train with DDP's hooks that people take, torch's own and an FP8 hook, and with gradzip, on real ranks.

All variants train with the same data, steps, seeds and learning rates, and average one bucket. The loopback counts the
bytes of a rank, headers of TCP included. torch's PowerSGD hook compresses from step 1000 on, by default. Runs that the
file has are not repeated: the same command continues a study.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

from benchmarks.common.arguments import Parser
from benchmarks.common.results import RESULTS, ROOT, Blocks, stored_rows
from benchmarks.common.studies import Rows, block, run_study
from benchmarks.common.tables import markdown, span
from benchmarks.sharded.study import BASELINE, Variants, add_arguments, best_of, study

EXAMPLES = """\
examples:
  python -m benchmarks.peers --network charlm-small --data tinyshakespeare.txt     the study: hours on two cores
  python -m benchmarks.peers --network charlm-small --variant "FP8 hook" --steps 5 --seed 0 --json /tmp/try.json
                                                                                   to try it out
"""
FILE = RESULTS / "peers.json"
PAGE = ROOT / "docs" / "accuracy.md"
START = "<!-- table: python -m benchmarks.peers --write -->\n\n"
LRS = {"adamw": [0.008]}  # the best one of the text study, for the small network
EPOCHS = 5  # 1225 steps

VARIANTS: Variants = {
    BASELINE: {},
    **{name: {"hook": name} for name in ("bf16 hook", "FP8 hook", "PowerSGD hook, defaults")},
    "`BlockFloat()`": {"method": "block-float"},
    "`BlockFloat(error_feedback=False)`": {"method": "block-float:error_feedback=false"},
    '`BlockFloat(error_feedback="owner")`': {"method": "block-float:error_feedback=owner"},
    '`BlockFloat(bits=4, rounding="nearest")`': {"method": "block-float:bits=4,rounding=nearest"},
    "PowerSGD hook, rank 4 from step 2 on": {"hook": "PowerSGD hook"},
    "fp16 hook": {"hook": "fp16 hook"},
}


def tables(rows: Rows) -> Iterator[str]:
    """A table for each network: scores of the variants, and bytes of a step that the loopback counted."""
    header = ["averages", "MB a step", "times fewer bytes", "bits per character", "− float32, %"]
    for network in dict.fromkeys(row["network"] for row in rows):
        of_network = [row for row in rows if row["network"] == network]
        best, about = best_of(of_network, VARIANTS), of_network[0]
        nbytes = {
            variant: statistics.fmean((row["wire"] or 0.0) / row["steps"] for row in of_lr)
            for variant, (_, _, of_lr) in best.items()
        }
        yield (
            f"{network}, {about['optimizer']}, {about['steps']} steps, rate {about['lr']:g}, {about['ranks']} ranks, "
            f"{span(len(of_lr) for _, _, of_lr in best.values())} seeds (`{FILE.name}`):"
        )
        yield ""
        cells = []
        for variant, (score, _, of_lr) in best.items():
            scores, sent = [row["scores"][-1] for row in of_lr], nbytes[variant]
            fewer = f"{nbytes[BASELINE] / sent:.2f}" if sent and BASELINE in best else ""
            worse = f"{100 * (score / best[BASELINE][0] - 1):+.2f}".replace("-", "−") if BASELINE in best else ""
            spread = f"{score:.3f} ({min(scores):.3f}–{max(scores):.3f})"
            cells.append([variant, f"{sent / 1e6:.3f}", fewer, spread, worse if variant != BASELINE else ""])
        yield from markdown(header, cells)
        yield ""


def blocks() -> Blocks:
    """The block of docs/accuracy.md."""
    return {(PAGE, START): block(tables(stored_rows(FILE)))}


def main() -> None:
    parser = Parser("peers", __doc__, EXAMPLES)
    add_arguments(parser, VARIANTS, LRS, EPOCHS)
    run_study(parser, FILE, partial(study, "ddp", VARIANTS, LRS), tables, blocks)


if __name__ == "__main__":
    main()
