"""Measure ring all-reduces: the speed-up by compression, and how much of the compression time is hidden.

Each rank is a process with one thread. It holds random numbers in the shapes of the gradients of ResNet-18's
convolutions. Rings (gradzip.engines.ring) sum them in three ways:

- uncompressed;
- quantized to 4 bits, decoded, added and encoded again at every hop (GradiVeQ paper, figure 2a);
- as coordinates of slices of 768 elements in a subspace of 96 dimensions, which are added as they are (figure 2b).

Rings take turns, because times on shared machines drift, and medians are compared. The subspace ring runs three times
in each turn: whole, without computation, and without communication. `hidden` is the share of the shorter of computation
and communication that adds no time to the whole. Results are checked before anything is timed.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import Parser, at_least, output_file, picture_file
from benchmarks.common.charts import pyplot, save
from benchmarks.common.jobs import JobError, launcher, network, run, shaping_error
from benchmarks.common.results import RESULTS, ROOT, Blocks, provenance, replace_blocks, stored, write_json
from benchmarks.common.tables import goal, markdown
from benchmarks.ring.rank import ONLY_COMPUTED, ONLY_SENT, Span, gradients

# Least speed-up of the subspace ring over the uncompressed one, by bandwidth per rank.
GOALS = {"250mbit": 5.25, "1gbit": 4.0}
LEAST_HIDDEN = 0.9

EXAMPLES = """\
examples:
  python -m benchmarks.ring                                    two ranks, unshaped loopback
  python -m benchmarks.ring --rate 250mbit --rate 1gbit        on two networks (needs root)
  python -m benchmarks.ring --ranks 3 --rounds 9 --json ring.json
  python -m benchmarks.ring --rate 1gbit --picture ring.png    also draw a timeline (needs matplotlib)
  python -m benchmarks.ring --write                            the tables of docs/benchmarks.md; measures nothing
"""
PAGE, FILE = ROOT / "docs" / "benchmarks.md", RESULTS / "ring_cpu.json"
START = "<!-- table of rings: python -m benchmarks.ring --write -->\n\n"


def measure(rate: str, ranks: int, rounds: int, traced: bool) -> dict[str, Any]:
    """Run all ranks on a network with that bandwidth per rank. Returns {"sent", "times", "spans"}. Raises JobError."""
    command = [*network(rate, ranks), *launcher("ddp", ranks), "benchmarks.ring.rank", str(rounds), str(int(traced))]
    (result,) = run(command, threads=1, timeout=600)
    return result


def rows_of(rate: str, raw: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rings on one network, and how much of compression is hidden. Times are medians in milliseconds."""
    ms = {name: 1000 * statistics.median(seconds) for name, seconds in raw["times"].items()}
    rows = [
        {"rate": rate, "ring": name, "ms": ms[name], "speedup": ms["uncompressed"] / ms[name], "megabytes": sent / 1e6,
         "goal": GOALS.get(rate) if name == "subspace" else None}
        for name, sent in raw["sent"].items()
    ]  # fmt: skip
    # Within a turn: a disturbance often affects neighbouring runs alike.
    of_turns = zip(*(raw["times"][name] for name in ("subspace", ONLY_COMPUTED, ONLY_SENT)))
    hidden = statistics.median((c + w - whole) / min(c, w) for whole, c, w in of_turns)
    overlap = {
        "rate": rate, "whole": ms["subspace"], "computation": ms[ONLY_COMPUTED], "communication": ms[ONLY_SENT],
        "hidden": hidden,
    }  # fmt: skip
    return rows, overlap


def tables(rows: list[dict[str, Any]], overlaps: list[dict[str, Any]]) -> str:
    rings = markdown(
        ["rate", "ring", "ms", "speed-up", "MB sent", "goal"],
        (
            [r["rate"], r["ring"], f"{r['ms']:.1f}", f"{r['speedup']:.2f}", f"{r['megabytes']:.2f}",
             goal(r["speedup"], r["goal"])]
            for r in rows
        ),
        left=2,
    )  # fmt: skip
    hidden = markdown(
        ["rate", "subspace, ms", "computed, ms", "sent, ms", "hidden", "goal"],
        (
            [o["rate"], *(f"{o[key]:.1f}" for key in ("whole", "computation", "communication")), f"{o['hidden']:.0%}",
             goal(o["hidden"], LEAST_HIDDEN)]
            for o in overlaps
        ),
    )  # fmt: skip
    return "\n".join([*rings, "", *hidden])


def blocks() -> Blocks:
    """The block of docs/benchmarks.md, from the stored results: a row for each network."""
    with stored(FILE) as content:
        rows, overlaps = content["rows"], content["overlaps"]
    found = {(row["rate"], row["ring"]): row for row in rows}
    lines = [
        [
            o["rate"], f"{found[o['rate'], 'uncompressed']['ms']:.0f}",
            *(f"{found[o['rate'], ring]['speedup']:.1f}" for ring in ("QSGD", "subspace")),
            f"{goal(found[o['rate'], 'subspace']['speedup'], GOALS.get(o['rate']))}",
            f"{o['hidden']:.0%}", goal(o["hidden"], LEAST_HIDDEN),
        ]
        for o in overlaps
    ]  # fmt: skip
    header = ["rate", "uncompressed, ms", "QSGD, times as fast", "subspace", "goal", "hidden", "goal"]
    return {(PAGE, START): "\n".join(markdown(header, lines)) + "\n"}


def draw(rate: str, spans_of_rings: dict[str, list], path: Path) -> None:
    """Draw a timeline of the ranks, as in figure 2 of the paper."""
    plt = pyplot()
    colours = {
        "compress": "tab:orange", "decompress": "tab:green", "merge": "tab:purple",
        "download": "tab:blue",
    }  # fmt: skip
    figure, axes = plt.subplots(len(spans_of_rings), 1, figsize=(12, 2.6 * len(spans_of_rings)), squeeze=False)
    for axis, (ring, raw) in zip(axes[:, 0], spans_of_rings.items()):
        spans = [Span(*s) for s in raw]
        start = min(s.begin for s in spans if s.what == "compress")
        ranks = sorted({s.rank for s in spans})
        for rank in ranks:
            for span in on_the_wire(spans, rank, len(ranks)) + [s for s in spans if s.rank == rank]:
                if span.what in colours and not (span.what == "download" and span in spans):
                    y = 2 * rank + (span.what == "download")
                    left, width = 1000 * (span.begin - start), 1000 * (span.end - span.begin)
                    axis.barh(y, width, left=left, color=colours[span.what], edgecolor="white", linewidth=0.4)
        axis.set_yticks([2 * rank + i for rank in ranks for i in (0, 1)])
        axis.set_yticklabels([f"rank {rank}: {row}" for rank in ranks for row in ("computes", "downloads")])
        axis.set_title(f"{ring}, {rate}")
        axis.set_xlabel("ms")
    figure.legend(
        handles=[plt.Rectangle((0, 0), 1, 1, color=c, label=w) for w, c in colours.items()],
        loc="lower center",
        ncols=len(colours),
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    save(figure, path, dpi=120)


def on_the_wire(spans: list[Span], rank: int, size: int) -> list[Span]:
    """When each message to `rank` was on the wire: after it was sent and the one before it had arrived."""
    sent = {s.segment: s.begin for s in spans if s.what == "send" and s.rank == (rank - 1) % size}
    arrived = sorted((s for s in spans if s.what == "download" and s.rank == rank), key=lambda s: s.end)
    result, before = [], -math.inf
    for span in arrived:
        result.append(span._replace(begin=min(span.end, max(before, sent[span.segment]))))
        before = span.end
    return result


def main() -> None:
    parser = Parser("ring", __doc__, EXAMPLES)
    parser.add_argument("--ranks", type=at_least(2), default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=at_least(1), default=7, help="turns of all rings, for the medians (default: %(default)s)"
    )
    parser.add_argument(
        "--rate", action="append", metavar="RATE",
        help="bandwidth of each rank, for example 250mbit; repeat for several (default: unshaped loopback)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="PATH", type=output_file, help="write results and provenance")
    parser.add_argument("--picture", metavar="PATH", type=picture_file, help="draw a timeline, at the last rate")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/benchmarks.md, and time nothing")
    args = parser.parse_args()
    if args.write:
        replace_blocks(blocks())
        return
    rates = args.rate or ["none"]
    for rate in rates:
        if rate != "none" and (reason := shaping_error(rate, args.ranks)):
            parser.error(f"--rate {rate}: {reason}")
    about = {
        **provenance(), "cores": os.cpu_count(), "ranks": args.ranks, "threads": 1, "numel": gradients(0).numel(),
        "rounds": args.rounds,
    }  # fmt: skip
    print("  ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    rows, overlaps = [], []
    for rate in rates:
        try:
            raw = measure(rate, args.ranks, args.rounds, args.picture is not None)
        except JobError as error:
            sys.exit(f"{parser.prog}: error: {rate}: {error}")
        of_rate, overlap = rows_of("unshaped" if rate == "none" else rate, raw)
        rows += of_rate
        overlaps.append(overlap)
    print(tables(rows, overlaps))
    if args.picture:
        draw(rates[-1], raw["spans"], args.picture)
    if args.json:
        write_json(args.json, {"provenance": about, "rows": rows, "overlaps": overlaps})


if __name__ == "__main__":
    main()
