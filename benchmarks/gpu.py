"""Tables of what scripts/gpu_check.sh, benchmarks/step.py and benchmarks/gpu_training.py have measured on a GPU.

A run may have had only some of the steps (`--only`): each table is of the last run that has measured it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.common.arguments import Parser
from benchmarks.common.results import RESULTS, ROOT, Blocks, ResultsError, replace_blocks, stored
from benchmarks.common.tables import goal, markdown
from benchmarks.step import CAPTURED, UNCHECKED

PAGE = ROOT / "docs" / "gpu.md"
START = "<!-- table: python -m benchmarks.gpu --write -->\n\n"
CHECKS = "<!-- table of checks: python -m benchmarks.gpu --write -->\n\n"
TRANSFORMER = "<!-- table of a transformer: python -m benchmarks.gpu --write -->\n\n"
TASKS = {
    "training": "ResNet-50 with {batch_size} images of {image_size} x {image_size}, in float32",
    "gpt2": "GPT-2 (124 M parameters) with {batch_size} x {length} tokens, in bfloat16 autocast",
}
TASKS["training_of_all"] = TASKS["gpt2"]
SLOW = 3  # copies: slower kernels are on the page
EXAMPLES = """\
examples:
  scripts/gpu_check.sh                   on a machine with a GPU: measures, and writes gpu_check.json
  python -m benchmarks.gpu               the tables of benchmarks/results/gpu_check*.json
  python -m benchmarks.gpu --write       the same, to docs/gpu.md
"""


def runs() -> Iterator[dict[str, Any]]:
    """What scripts/gpu_check.sh has stored, the last run first, with the `name` of the file."""
    found = []
    for path in RESULTS.glob("gpu_check*.json"):
        with stored(path) as results:
            found.append({"name": path.name, **results})
    yield from sorted(found, key=lambda run: str(run["about"]["started"]), reverse=True)


def measured(part: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last measurement of "training", "gpt2" or "kernels": about the machine, and the measurement."""
    for run in runs():
        if run.get(part) is not None:
            return run["about"], run[part]
    raise ResultsError(f"{RESULTS}/gpu_check*.json: got no run with {part}, expected one of scripts/gpu_check.sh")


def checks() -> Iterator[str]:
    """The table of what each run has checked."""
    yield from markdown(["run", "GPU, commit", "passed", "failed or stopped"], map(check_cells, runs()), left=4)


def check_cells(run: dict[str, Any]) -> list[str]:
    """A run, with the numbers of its tests."""

    def cell(check: str, of: dict[str, Any]) -> str:
        counts = of["tests"] or {}
        stopped = [of["outcome"]] * (of["outcome"] == "stopped")
        notes = stopped or [f"{count} {outcome}" for outcome, count in sorted(counts.items(), reverse=True)]
        return f"`{check}`" + (f": {', '.join(notes)}" if notes else "")

    def cells(passed: bool) -> str:
        return "; ".join(cell(*of) for of in run["checks"].items() if (of[1]["outcome"] == "passed") == passed)

    about = run["about"]
    return [f"`{run['name']}`", f"{about['device']}, {about['commit']}", cells(True), cells(False)]


def goals() -> str:
    """How many kernels miss a goal, on each device."""
    found = []
    for run in runs():
        if run.get("kernels") is None:
            continue
        rows = run["kernels"]["rows"]
        met = [
            (goal(row["copies"], row["most_copies"], most=True), goal(row["speedup"], row["least_speedup"]))
            for row in rows
        ]
        missed = sum(any(one.startswith("MISSED") for one in both) for both in met)
        with_goal = sum(any(both) for both in met)
        found.append(f"{missed} of {len(rows)} ({with_goal} have one) on the {run['about']['device']}")
    return f"Kernels that miss a goal: {', '.join(found)}."


def lines() -> Iterator[str]:
    """The lines of all tables, with what they were measured on."""
    for part, what in TASKS.items():
        if not any(run.get(part) for run in runs()):
            continue
        about, steps = measured(part)
        settings = steps["provenance"]
        ranks = settings.get("ranks", 1)
        yield (
            f"{machine(about)}. A training step of {what.format(**settings)}, under DDP with "
            f"{'one rank' if ranks == 1 else f'{ranks} ranks'}, with a fused optimizer; {settings['rounds']} rounds of "
            f"{settings['steps']} steps, in turns. *Unchecked*: with "
            "`skip_nonfinite(False)`. *Host*: ms that the host takes to start a step on an idle device, with its waits:"
        )
        yield ""
        header = ["variant", "ms a step", "20 % to 80 %", "ms more than without a hook", "unchecked: ms more", "host"]
        yield from markdown([*header, "MB handed", "peak of memory, MB more"], step_rows(steps["rows"]))
        yield ""
    about, kernels = measured("kernels")
    numel = kernels["provenance"]["numel"]
    yield (
        f"{machine(about)}. Kernels on {numel} floats ({4 * numel / 2**20:.0f} MiB), of which a copy takes "
        f"{kernels['rows'][0]['copy_ms']:.2f} ms. *Copies* is a kernel's time in copies of its input; *speed-up* is "
        f"over the same in operations of PyTorch. Of {len(kernels['rows'])} kernels, those that take more than "
        f"{SLOW} copies, or longer than PyTorch:"
    )
    yield ""
    slow = [row for row in kernels["rows"] if row["copies"] > SLOW or row["speedup"] < 1]
    yield from markdown(["kernel", "ms", "copies", "speed-up", "over"], map(kernel_cells, slow))
    yield ""
    yield goals()


def transformer() -> Iterator[str]:
    """The lines of the tables of benchmarks/gpu_training.py: of each variant, the rates that were tried."""
    for path in sorted(RESULTS.glob("gpu_training*.json")):
        with stored(path) as results:
            about, rows = results["provenance"], results["rows"]
            order = list(dict.fromkeys(row["variant"] for row in rows))
            tokens = about["steps"] * about["workers"] * about["batch_size"] * about["length"]
            network = f"{about['layers']} layers of {about['width']} ({about['parameters'] / 1e6:.0f} M parameters)"
            yield (
                f"{about['device']}, PyTorch {about['torch']}. {network}, {about['tokens']} byte-pair tokens of Python "
                f"sources, bfloat16 autocast, {about['workers']} simulated workers, {about['steps']} steps "
                f"({tokens / 1e6:.1f} M tokens), seed {about['seed']} (`{path.name}`):"
            )
            yield ""
            header = ["optimizer, method", "rate", "steps of warm-up", "loss on validation text"]
            header += ["highest loss after 15 steps", "times fewer bytes handed", "peak of memory, GB"]
            dense = 4 * about["parameters"] * about["steps"]
            cells = [
                [row["variant"] if row["optimizer"] == "muon" else f"{row['optimizer']}, {row['variant']}",
                 f"{row['lr']:g}", f"{row['warmup'] * about['steps']:.0f}", f"{row['validation_loss']:.3f}",
                 f"{max(row['losses'][15:]):.2f}", f"{dense / row['payload_bytes']:.1f}", f"{row['memory'] / 1e9:.1f}"]
                for row in sorted(rows, key=lambda row: (order.index(row["variant"]), row["lr"]))
            ]  # fmt: skip
            yield from markdown(header, cells)
            yield ""


def machine(about: dict[str, Any]) -> str:
    return f"{about['device']}, driver {about['driver']}, PyTorch {about['torch']}"


def step_rows(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A row for each variant; that with `skip_nonfinite(False)` is in the row of the one without."""
    by_name = {row["variant"]: row for row in rows}
    for name, row in by_name.items():
        if name.endswith(UNCHECKED):
            continue
        unchecked = by_name.get(f"{name}{UNCHECKED}")
        base = by_name[f"stock{CAPTURED}" if name.endswith(CAPTURED) else "stock"]
        yield [
            f"`{name}`", f"{row['ms']:.1f}", f"{row['ms_p20']:.1f} to {row['ms_p80']:.1f}", f"{row['added_ms']:+.1f}",
            f"{unchecked['added_ms']:+.1f}" if unchecked else "", f"{row['host_ms']:.1f}",
            "" if row["nbytes"] is None else f"{row['nbytes'] / 1e6:.2f}",
            f"{(row['memory'] - base['memory']) / 1e6:+.0f}",
        ]  # fmt: skip


def kernel_cells(row: dict[str, Any]) -> list[str]:
    return [row["name"], f"{row['ms']:.2f}", f"{row['copies']:.2f}", f"{row['speedup']:.1f}", f"`{row['peer']}`"]


def blocks() -> Blocks:
    """The blocks of docs/gpu.md."""
    tables = {CHECKS: checks(), START: lines()}
    found = {(PAGE, mark): "\n".join(of) + "\n" for mark, of in tables.items()}
    return found | {(PAGE, TRANSFORMER): "\n".join(transformer())}


def main() -> int:
    parser = Parser("gpu", __doc__, EXAMPLES)
    parser.add_argument("--write", action="store_true", help="write the tables to docs/gpu.md")
    args = parser.parse_args()
    try:
        if args.write:
            replace_blocks(blocks())
        else:
            print(*blocks().values(), end="")
    except ResultsError as error:
        parser.fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
