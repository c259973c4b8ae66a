"""The documentation is true: what it names and links to exists, and its tables of methods are those of the code."""

import importlib
import json
import os
import re
import subprocess
import sys

import pytest
import torch

import commands
import gradzip
from benchmarks.training import report
from benchmarks.training.results import Results, Round
from gradzip.methods.base.registry import registered
from paths import ROOT

METHODS = (ROOT / "docs" / "methods.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docker/*.md"), *ROOT.glob("recipes/**/*.md")]


def table(text, header):
    """The cells of the rows of the table whose header starts with `header`."""
    rows = text[text.index(header) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def test_named_tests_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "guarantees.md").read_text())
    assert len(named) > 30
    for path, test in named:
        source = (ROOT / path).read_text()
        assert f"def {test}(" in source if test else "def test_" in source, f"{path}::{test}"


# Run in a fresh process, with stand-ins for other libraries: each name is looked up in a copy of the process that has
# imported gradzip alone.
LOOK_UP = """
import os, sys, types
class StandIn(types.ModuleType):
    __file__ = "stand-in"
    def __getattr__(self, name):
        return type(name, (), {})
for library in ("accelerate", "lightning", "lightning.pytorch", "transformers", "transformers.trainer_utils"):
    sys.modules[library] = StandIn(library)
import gradzip
for name in sys.argv[1:]:
    if not os.fork():
        eval(name)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.mark.parametrize("page", ["README.md", "docs/integrations.md"])
def test_named_functions_are_found_after_import_gradzip(page):
    """What stands in a table or a sentence of a page works as it is written there."""
    named = sorted(set(re.findall(r"(?<![\w./-])gradzip(?:\.[A-Za-z]\w*)+", (ROOT / page).read_text())))
    assert "gradzip.integrations.accelerate.compress" in named and len(named) > 5
    done = subprocess.run([sys.executable, "-c", LOOK_UP, *named], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", gradzip.integrations.__all__)
def test_a_missing_library_is_named_as_it_is_installed(monkeypatch, name):
    libraries = {*gradzip.integrations.__all__, "pytorch_lightning"}
    for module in list(sys.modules):
        if module.partition(".")[0] in libraries or module == f"gradzip.integrations.{name}":
            monkeypatch.delitem(sys.modules, module)
    for library in libraries:
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(vars(gradzip.integrations), name, raising=False)
    with pytest.raises(ModuleNotFoundError) as raised:
        getattr(gradzip.integrations, name)
    assert raised.value.name in {name, f"{name}.pytorch"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_a_target(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_in_lists_are_indented_by_four_spaces(page):
    """With fewer, GitHub shows them within the item, and the website outside."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"(?<=\n\n) {1,3}\S.*|^ {1,3}(?:```|[*-] |\d+\. ).*", text, re.MULTILINE)


def test_the_hosted_workflow_runs_the_two_commands():
    commands.checked_in()  # a source distribution has no workflows
    workflow = ROOT / ".github" / "workflows" / "test.yml"
    block = (ROOT / "README.md").read_text().partition("## Two commands")[2].partition("```sh\n")[2].partition("```")[0]
    lines = [line.partition("#")[0].strip() for line in block.splitlines()]
    assert lines == ["make train", "make test"]
    assert re.findall(r"^ +- run: (.*)$", workflow.read_text(), re.MULTILINE) == lines


@pytest.mark.parametrize("script", ["gpu_check.sh", "shaped_net.sh"])
def test_scripts_have_help(script):
    path = ROOT / "scripts" / script
    # If --help does not stop the script, this stops it early.
    environment = dict(os.environ, PYTHON="false")
    done = subprocess.run(["bash", path, "--help"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\nusage: scripts/{script} " in done.stdout
    assert all(line in path.read_text() for line in done.stdout.splitlines())
    assert "set -" not in done.stdout


@pytest.mark.parametrize(
    "name",
    ["kernels", "sass", "ring.__main__", "scale.__main__", "scale.report", "training.__main__", "training.report"],
)
def test_benchmarks_have_help(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert capsys.readouterr().out.startswith(f"usage: python -m benchmarks.{name.removesuffix('.__main__')} ")


@pytest.mark.parametrize("header", ["| name | class |", "| name on a command line |"])
def test_tables_of_methods_are_complete(header):
    named = {row[0].strip("`"): re.match(r"`(\w+)", row[1])[1] for row in table(METHODS, header)}
    assert named == {name: method.__name__ for name, method in registered().items()}


def test_readme_says_how_many_methods_there_are():
    assert f"[All {len(registered())} methods](docs/methods.md#which-method)" in (ROOT / "README.md").read_text()


def test_compression_ratios_are_those_of_the_code():
    """A gathered payload is sent to all other ranks, an average as partitions to their owners and back."""
    gradient = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    rows = {row[0].strip("`"): row[2:6] for row in table(METHODS, "| name | class |")}
    checked = 0
    for name, (*cells, collective) in rows.items():
        if not re.match(r"\d", cells[0]):
            continue
        # QSGD packs its levels on a device.
        specs = [name, f"{name}:coding=packed"][: 1 + cells[0].count("GPU")]
        ratios = [gradient.nbytes / gradzip.roundtrip(gradzip.parse(spec), gradient)[1] for spec in specs]
        shares = [2 / ranks if collective == "gather" else 1 for ranks in (2, 4, 16)]
        assert cells == ["; GPU ".join(f"{ratio * share:.3g}" for ratio in ratios) for share in shares], name
        checked += 1
    # gradiveq is for convolutions; per-layer, phases, auto, hierarchical and momentum are what they are made of
    assert checked == len(registered()) - 6


def test_training_table_has_speed_ups_over_both_baselines(tmp_path):
    results = Results({"threads": 1, "commit": "1234567"})
    cell, other = ("resnet18", "1gbit", 2), ("resnet18", "1gbit", 4)
    variants = {
        "compute": (100, 0),
        "horovod": (400, 12_000_000),
        "ddp-fp16": (250, 6_000_000),
        "ddp:fft-range:error_feedback=false": (125, 346_000),
    }
    for at in (cell, other):
        results.plan([at], [*variants, "ddp"])
        for variant, (ms, nbytes) in variants.items():
            row = results.row(at, variant)
            row.parameters = 3_000_000
            row.rounds = [Round(i, [ms * speed], 0.0, 0.0, nbytes) for i, speed in enumerate((1, 1, 1.2))]
        results.row(at, "ddp").rounds.append(Round(0, error="aborts"))
    training = {"provenance": results.provenance, "rows": results.reports()}
    main = training | {"rows": [row for row in training["rows"] if row["ranks"] == 2]}
    text = report.block(main)
    assert table(text, "|  | × fp32 | × fp16 |") == [
        ["**ResNet-18**, 3.0 M parameters, 1 Gb/s", "", "", "", ""],
        ["stock Horovod, fp32", "1.00", "0.62", "400", "12.0"],
        ["DDP, torch's `fp16_compress_hook`", "1.60", "1.00", "250", "6.00"],
        ["DDP, `FFTRange(error_feedback=false)`", "3.20", "2.00", "125", "0.35"],
        ["no communication (upper bound)", "4.00", "2.50", "100", "0"],
    ]
    assert "Medians of 3 steps in 3 rounds, of the code of commit 1234567" in text
    assert "by up to 20 % (ResNet-18)" in text
    (tmp_path / "training_x.json").write_text(json.dumps(training))
    page = report.page(tmp_path / "training_x.json")
    assert page.count("## ResNet-18, 4 ranks, 1 Gb/s") == 1 and "\n* threads: 1\n" in page
    rows = table(page, "| variant |")
    assert [row[0] for row in rows][-1] == "stock DDP, fp32" and rows[-1][1].startswith("aborts in 1 of 1 rounds")
    assert rows[2][:5] == ["DDP, `FFTRange(error_feedback=false)`", "125.0 (125.0–140.0)", "80%", "3.20", "2.00"]
