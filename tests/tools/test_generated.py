"""Generated blocks of pages, and generated pages, are what their commands write from the committed results."""

import importlib
import json
import re
import subprocess

import pytest

from benchmarks import gpu
from benchmarks.common.results import END, RESULTS
from benchmarks.convergence import report as convergence
from benchmarks.training import report as training
from paths import ROOT
from stored import strings

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(r"<!-- tables? ?[^:\n]*: python -m (benchmarks[\w.]*) --write -->\n\n")
MARKS = [(page, mark[0], mark[1]) for page in PAGES for mark in MARK.finditer(page.read_text())]
COUNTED = "benchmarks.device_ops.capture"  # finds its block by steps on a stand-in: test_cuda_graphs.py compares it


@pytest.mark.parametrize("command", sorted({command for *_, command in MARKS} - {COUNTED}))
def test_blocks_are_what_their_command_writes(command):
    module = importlib.import_module(command)
    if not hasattr(module, "blocks"):
        module = importlib.import_module(f"{command}.__main__")
    blocks = module.blocks()
    assert set(blocks) == {(page, mark) for page, mark, of in MARKS if of == command}
    for (page, start), block in blocks.items():
        found = page.read_text().partition(start)[2].partition(END)[0]
        assert found == block, f"{page.name}: run python -m {command} --write"


def test_every_block_has_a_command():
    for page in PAGES:
        text = page.read_text()
        starts, ends = len(MARK.findall(text)), text.count(END)
        assert starts == ends and starts + ends == len(re.findall("^<!--", text, re.MULTILINE)), page.name


def test_pages_of_results_are_what_their_command_writes():
    pages = training.pages() | {convergence.ALL: convergence.page_of_all()}
    assert set(pages) == set(RESULTS.glob("*.md"))
    for path, page in pages.items():
        assert path.read_text() == page, f"{path.name}: run --write of benchmarks.training or benchmarks.convergence"


def test_readme_says_how_the_last_gpu_tests_ended():
    (last, *_) = (run["checks"]["tests_nvcc"]["tests"] for run in gpu.runs() if "tests_nvcc" in run["checks"])
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"In the last run on one GPU, {last['passed']} of {sum(last.values())} GPU tests passed" in text
    (failed, *_) = (
        [name for name, check in run["checks"].items() if check["outcome"] == "failed"]
        for run in gpu.runs()
        if "tests_nvcc" in run["checks"]
    )
    assert failed == ["nccl_4_ranks", "tests_nvcc"] and "and those of NCCL between 4 ranks on it failed" in text


def test_readme_says_how_long_local_steps_were_trained():
    steps = {}
    for line in convergence.CHOSEN[convergence.README, "recommendations"]:
        if line.method.startswith("local("):
            settings = convergence.stored(line.study).recipes[line.recipe]
            steps.setdefault(settings["network"] == "charlm", set()).add(settings["steps"] * settings["epochs"])
    (of_charlm,), others = steps[True], steps[False]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"charlm takes {of_charlm} steps, the others {min(others)} to {max(others)}." in text


def test_the_page_says_where_the_best_rates_of_the_transformer_are():
    text = " ".join(gpu.PAGE.read_text().split())
    assert "no method ends below no compression, each at the best of its rates." in text
    rates = "of 4 bits and of `PowerSGD(rank=32)` is the lowest one tried, that of the recipe the highest"
    assert f"The best rate {rates}" in text
    losses = {}
    for row in json.loads((RESULTS / "gpu_training.json").read_text())["rows"]:
        losses.setdefault(row["variant"], {})[row["lr"]] = row["validation_loss"]
    best = {variant: min(of, key=of.get) for variant, of in losses.items()}
    none = losses["none"][best["none"]]
    assert all(losses[variant][rate] >= none for variant, rate in best.items())
    assert all(best[variant] == min(losses[variant]) for variant in ("4 bits", "PowerSGD(32)"))
    assert best["recipe for AdamW"] == max(losses["recipe for AdamW"])
    readme = " ".join((ROOT / "README.md").read_text().split())
    four, recipe = (f"{100 * (losses[name][best[name]] / none - 1):.1f} %" for name in ("4 bits", "recipe for AdamW"))
    assert f"each method at its best rate: 4 bits end {four} above no compression, the recipe {recipe}" in readme


def test_the_page_of_evidence_names_the_largest_of_what_was_measured():
    text = " ".join((ROOT / "docs" / "evidence.md").read_text().split())
    runs = [(path, run) for path in RESULTS.glob("convergence_*.json") for run in json.loads(path.read_text())["runs"]]
    largest = max(run["parameters"] for _, run in runs)
    on_gpus = [json.loads(path.read_text()) for path in RESULTS.glob("gpu_training*.json")]
    (parameters,), (steps,) = ({of["provenance"][key] for of in on_gpus} for key in ("parameters", "steps"))
    assert f"transformers above {largest / 1e6:.1f} M parameters with more than 1 seed or {steps} steps" in text
    assert f"any network above {parameters / 1e6:.0f} M" in text
    assert {of["provenance"]["seed"] for of in on_gpus} == {0}
    rates = {}
    for path, run in runs:
        if run["done"]:
            rates.setdefault((path, run["recipe"], run["method"]), set()).add(run["lr"])
    assert f"more than {max(map(len, rates.values()))} learning rates" in text
    ranks = {
        name: max(row["ranks"] for path in RESULTS.glob(name) for row in json.loads(path.read_text())["rows"])
        for name in ("training_*_cpu.json", "training_time_*.json", "whole_runs.json", "scale_cpu.json")
    }
    training, averaging = max(list(ranks.values())[:3]), ranks["scale_cpu.json"]
    assert f"more than {training} ranks that train, more than {averaging} that average" in text


COMPUTED = {"wire.json", "decisions.json"}  # from other files


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_say_where_they_come_from(path):
    content = json.loads(path.read_text())
    found = [any(strings(content, keys)) for keys in (("commit", "commits"), ("device", "processor"), ("torch",))]
    assert all(found) != (path.name in COMPUTED)


def test_the_page_of_evidence_names_the_files_that_do_not():
    text = " ".join((ROOT / "docs" / "evidence.md").read_text().split())
    names = " and ".join(f"`{name}`" for name in sorted(COMPUTED, reverse=True))
    assert f"but {names}, which are computed" in text


def is_commit(name):
    """Whether the history of HEAD has it: commits that a rebase left behind are in no clone."""
    done = subprocess.run(["git", "merge-base", "--is-ancestor", name, "HEAD"], cwd=ROOT, capture_output=True)
    return done.returncode == 0


def test_commits_of_results_exist():
    git = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip("no git repository, as in a source distribution: commits cannot be looked up")
    if git.stdout.strip() == "true":
        pytest.skip("a shallow clone has no older commits")
    assert is_commit("HEAD") and not is_commit("0123456")
    named = {
        (path.name, commit.removesuffix("-dirty").removeprefix("before "))
        for path in RESULTS.glob("*.json")
        for commit in strings(json.loads(path.read_text()), ("commit", "methods_commit", "commits"))
    }
    unknown = {(name, commit) for name, commit in named if not is_commit(commit)}
    if unknown == named:
        pytest.skip("a repository with another history, as of an export: it has none of the commits")
    assert not unknown, f"results name commits that this repository lacks: {sorted(unknown)}"
