"""Write docs/evidence.md's tables: what was trained and timed, from the files of results.

python -m benchmarks.evidence            the tables
python -m benchmarks.evidence --write    write them
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import Parser
from benchmarks.common.results import RESULTS, ROOT, Blocks, ResultsError, replace_blocks, stored_rows
from benchmarks.common.tables import markdown, span
from benchmarks.convergence.recipes import is_text

PAGE = ROOT / "docs" / "evidence.md"
START = "<!-- table of {}: python -m benchmarks.evidence --write -->\n\n"
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon", "sgd": "SGD"}


def content(path: Path) -> Any:
    return json.loads(path.read_text())


def trained() -> Iterator[list[str]]:
    """A row for each network and optimizer: what all its studies have."""
    found: dict[tuple[str, str, str], list[tuple[str, dict, list]]] = {}
    for path in sorted(RESULTS.glob("convergence_*.json")):
        of_file = content(path)
        for name, settings in of_file["recipes"].items():
            runs = [run for run in of_file["runs"] if run["recipe"] == name and run["done"]]
            key = settings["network"], OPTIMIZERS[settings["optimizer"]], settings["data"].removesuffix(".txt")
            found.setdefault(key, []).append((path.stem.removeprefix("convergence_"), settings, runs))
    for (network, optimizer, data), studies in sorted(found.items()):
        seeds = [len({run["seed"] for run in runs}) for *_, runs in studies]
        yield [
            f"{network}, {studies[0][2][0]['parameters'] / 1e6:.2f} M", data, optimizer,
            span(settings["epochs"] * settings["steps"] for _, settings, _ in studies),
            span(settings["workers"] for _, settings, _ in studies), span(seeds),
            f"`{', '.join(dict.fromkeys(name for name, *_ in studies))}`",
        ]  # fmt: skip
    about = [(path, content(path)) for path in sorted(RESULTS.glob("gpu_training*.json"))]
    for path, of_file in about:
        known = of_file["provenance"]
        optimizers = dict.fromkeys(OPTIMIZERS[row["optimizer"]] for row in of_file["rows"])
        yield [
            f"a transformer, {known['parameters'] / 1e6:.0f} M", "sources of Python packages", ", ".join(optimizers),
            str(known["steps"]), str(known["workers"]), "1", f"`{path.stem}`, one {known['device']}",
        ]  # fmt: skip


def of_real_ranks(file: str, front_end: str) -> Iterator[list[str]]:
    """A row for each network and optimizer of a study of real ranks."""
    rows = stored_rows(RESULTS / f"{file}.json")
    for network, optimizer in dict.fromkeys((row["network"], row["optimizer"]) for row in rows):
        own = [row for row in rows if (row["network"], row["optimizer"]) == (network, optimizer)]
        about, seeds = own[0], {(row["variant"], row["seed"]) for row in own}
        data = "tinyshakespeare" if is_text(network) else "cifar10"
        yield [
            f"{network}, with {front_end}", data, OPTIMIZERS[optimizer], str(about["steps"]),
            f"{about['ranks']} real ones", span(Counter(variant for variant, _ in seeds).values()), f"`{file}`",
        ]  # fmt: skip


def timed() -> Iterator[list[str]]:
    """A row for each kind of times: what was measured, on how many ranks, of which commit, and where."""
    for pattern, what in (
        ("training_main_cpu", "steps"),
        ("training_cpu", "steps with all methods"),
        ("training_time_*", "steps of studies"),
        ("training_hosts*_cpu", "steps between two hosts, of one machine"),
        ("scale_cpu", "averages of a bucket"),
    ):
        files = {path.stem: content(path) for path in sorted(RESULTS.glob(f"{pattern}.json"))}
        rows = [row for of_file in files.values() for row in of_file["rows"]]
        abouts = [of_file["provenance"] for of_file in files.values()]
        commits = dict.fromkeys(about.get("commit") or about["commits"][-1] for about in abouts)
        devices = dict.fromkeys(about["device"].split(" @")[0] for about in abouts)
        models = dict.fromkeys(row["model"] for row in rows if "model" in row)
        yield [
            ", ".join([what, *models]), span({row["ranks"] for row in rows}), f"CPU ({', '.join(devices)})",
            ", ".join(commits), f"`{', '.join(files)}`",
        ]  # fmt: skip
    for file, what in (("whole_runs", "whole runs of studies"), ("sharded_steps", "steps of FSDP2")):
        rows = content(RESULTS / f"{file}.json")["rows"]
        commits, devices = (", ".join(dict.fromkeys(row[key] for row in rows)) for key in ("commit", "device"))
        names = dict.fromkeys(row["network"] for row in rows if "network" in row)
        ranks = span({row["ranks"] for row in rows})
        yield [", ".join([what, *names]), ranks, f"CPU ({devices})", commits, f"`{file}`"]
    for path in sorted(RESULTS.glob("gpu_check*.json")):
        of_file = content(path)
        about, checks = of_file["about"], of_file["checks"]
        what = [name for name in ("kernels", "training", "gpt2") if of_file.get(name)]
        nccl = [int(found[1]) for name in checks if (found := re.fullmatch(r"nccl_(\d+)_ranks", name))]
        what = [{"training": "steps of ResNet-50", "gpt2": "steps of GPT-2"}.get(name, name) for name in what]
        what += [f"tests of NCCL, {span(nccl)} ranks on one GPU"] if nccl else []
        where = f"one {about['device']}, {about['started'][:10]}"
        yield [", ".join(what) or "tests", "1", where, about["commit"], f"`{path.stem}`"]


def blocks() -> Blocks:
    """The blocks of docs/evidence.md."""
    tables = {
        "training": markdown(
            ["network, parameters", "data", "optimizer", "steps", "ranks", "seeds", "`convergence_` files"],
            [*trained(), *of_real_ranks("sharded", "FSDP2"), *of_real_ranks("peers", "DDP")], left=7,
        ),
        "times": markdown(["what", "ranks", "where", "commit", "file"], timed(), left=5),
    }  # fmt: skip
    return {(PAGE, START.format(name)): "\n".join(lines) + "\n" for name, lines in tables.items()}


def main() -> None:
    parser = Parser("evidence", __doc__)
    parser.add_argument("--write", action="store_true", help="write the tables of docs/evidence.md")
    if not parser.parse_args().write:
        print(*blocks().values(), sep="\n")
        return
    try:
        replace_blocks(blocks())
    except ResultsError as error:
        parser.fail(str(error))


if __name__ == "__main__":
    main()
