"""What the documentation says is so: tests and files that it names exist, and its figures are those measured."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

import gradzip
from gradzip.registry import registered

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docker/*.md")]


def table(text, header):
    """The cells of the rows below a header of so many words."""
    rows = text[text.index(header) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def test_the_tests_that_are_named_exist():
    named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", (ROOT / "docs" / "guarantees.md").read_text())
    assert len(named) > 30
    for path, test in named:
        source = (ROOT / path).read_text()
        assert f"def {test}(" in source if test else "def test_" in source, f"{path}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], link


@pytest.mark.parametrize("script", ["gpu_check.sh", "shaped_net.sh"])
def test_scripts_say_what_they_are_for(script):
    path = ROOT / "scripts" / script
    # Whatever else it would do, it does not get far without a Python.
    environment = dict(os.environ, PYTHON="false")
    done = subprocess.run(["bash", path, "--help"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\nusage: scripts/{script} " in done.stdout
    assert all(line in path.read_text() for line in done.stdout.splitlines())
    assert "set -" not in done.stdout


@pytest.mark.parametrize("header", ["| name | class |", "| name on a command line |"])
def test_tables_of_methods_have_all_of_them(header):
    page = README if header in README else (ROOT / "docs" / "methods.md").read_text()
    named = {row[0].strip("`"): re.match(r"`(\w+)", row[1])[1] for row in table(page, header)}
    assert named == {name: method.__name__ for name, method in registered().items()}


def test_ratios_are_those_of_the_code():
    gradient = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    rows = {row[0].strip("`"): row[2] for row in table(README, "| name | class |")}
    checked = 0
    for name, said in rows.items():
        if re.fullmatch(r"[\d.]+", said):
            _, nbytes = gradzip.roundtrip(gradzip.parse(name), gradient)
            assert f"{gradient.nbytes / nbytes:.3g}" == f"{float(said):.3g}", name
            checked += 1
    assert checked == len(registered()) - 2  # gradiveq is for convolutions, and per-layer is what it is made of


def test_step_times_are_those_measured():
    rows = json.loads((ROOT / "benchmarks" / "results" / "training_cpu.json").read_text())["rows"]
    said = table(README, "| milliseconds a step (MB sent) |")
    variants = ["compute", "horovod", "ddp-fp16", "horovod:powersgd", "horovod:acpsgd", "ddp:acpsgd"]
    assert len(said) == len(variants)
    for variant, (_, *cells) in zip(variants, said):
        for model, cell in zip(["alexnet", "resnet18"], cells):
            (row,) = [r for r in rows if (r["variant"], r["model"], r["rate"]) == (variant, model, "1gbit")]
            assert cell.split()[0] == f"{row['ms']:.0f}"
            if sent := re.search(r"\(([\d.]+)\)", cell):
                assert float(sent[1]) == pytest.approx(row["payload_bytes"] / 1e6, rel=0.01)
