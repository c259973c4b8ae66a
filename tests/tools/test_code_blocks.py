"""The code blocks of the documentation run: those of Python on two ranks, and commands as far as their own parsers."""

import argparse
import ast
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest

import gradzip
import gradzip.cli
from benchmarks.common.results import RESULTS
from code_blocks import PAGES, code_blocks, python_blocks
from launch import horovodrun, torchrun
from paths import ROOT
from stored import strings

COVERS = [
    "*.md", "docs/*.md", "docker/*.md", "recipes/*.md", "Makefile", "gradzip/**/*.py", "benchmarks/**/*.py",
    "examples/*.py", "benchmarks/results/*.json", "tests/tools/code_blocks_worker.py", "tests/support/code_blocks.py",
]  # fmt: skip
SHELL = "sh", "console"
# Programs of others: their words are not checked, but for files of the repository.
OTHERS = {
    "accelerate", "torchft_lighthouse", "pip", "docker", "apt", "buildah", "mkdir", "ssh-keygen", "ruff", "mypy",
    "pytest", "clang-format", "echo", "sed", "python",
}  # fmt: skip
OWN_FILES = re.compile(r"(?:scripts|docker|examples|recipes|benchmarks)/[\w/]+\.\w+")
# What `text` blocks have, where it is not a method's spec: another test reads it, or it is a file of the reader.
TEXTS = {"docs/design.md": "order of imports", "docker/README.md": "/etc/hosts", "docs/advise.md": "an answer"}

PLACES = {"NODE": "0"}  # what a reader fills in


class Parsed(Exception):
    """A parser has accepted a command line."""


@pytest.fixture(autouse=True)
def _stop_after_parsing(monkeypatch, tmp_path):
    """Commands end with `Parsed` when they have parsed their command line."""
    monkeypatch.chdir(tmp_path)
    parse_args = argparse.ArgumentParser.parse_args

    def parse(self, args=None, namespace=None):
        raise Parsed(parse_args(self, args, namespace))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)


def commands_of(block):
    """The commands of a block, as words. Of a console, those after `$ `."""
    text = re.sub(r"\$\([^)]*\)", "OUTPUT", block.text.replace("\\\n", " "))
    lines = text.splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        for command in re.split(r" && ", line):
            if words := shlex.split(command, comments=True):
                yield words


def parse(run, *words):
    """Have a command parse its words. Return the options, None of `--help`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*words])
        with pytest.raises((Parsed, SystemExit)) as found:
            run()
    if isinstance(found.value, Parsed):
        return found.value.args[0]
    assert found.value.code == 0
    return None


def check(words):
    """Check a command line, and the one that it starts."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):  # variables before the command
        words = words[1:]
    program, *arguments = words
    for file in OWN_FILES.findall(" ".join(words)):
        assert (ROOT / file).exists(), f"no such file: {file}"
    program = program.removeprefix(".venv/bin/")
    if program == "make":
        # As a reader types it: a make that runs these tests would hand down its options and its ARGS.
        own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "ARGS"}
        done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            check(shlex.split(line))
    elif program == "gradzip":
        parse(lambda: gradzip.cli.main(arguments))
    elif program == "horovodrun":
        launch = pytest.importorskip("horovod.runner.launch")
        check(parse(launch.parse_args, *words).command)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        options = parse(get_args_parser().parse_args, program, *(PLACES.get(word, word) for word in arguments))
        if not options.module and "/" in options.training_script:  # else the reader's own, or a library's
            check([*([] if options.no_python else ["python"]), options.training_script, *options.training_script_args])
    elif program == "scripts/shaped_net.sh":
        check(arguments[arguments.index("--") + 1 :])
    elif program == "python" and arguments[0] == "-m":
        check_module(*arguments[1:])
    elif program == "python" and arguments[0] != "setup.py":
        parse(lambda: runpy.run_path(str(ROOT / arguments[0]), run_name="__main__"), *arguments)
    else:
        assert program in OTHERS or program.startswith("scripts/"), f"not checked: {shlex.join(words)}"


def check_module(name, *arguments):
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    parse(module.main, name, *arguments)


BLOCKS = code_blocks()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in SHELL], ids=str)
def test_commands_are_understood(block):
    found = list(commands_of(block))
    assert found
    if block.language == "sh":
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    for words in found:
        check(words)


INLINE = [
    (page.name, code)
    for page in PAGES
    if page.name != "CHANGELOG.md"  # older names
    for code in dict.fromkeys(re.findall(r"`((?:gradzip|make|python -m benchmarks)[. ][^`]*)`", page.read_text()))
    if not re.search(r"[A-Z]{4,}(?! ?=)|…|\.\.\.", re.sub(r"ARGS=|SECONDS=|ENGINE=", "", code))  # `make TARGET`
    and not code.startswith("gradzip.")
]


@pytest.mark.parametrize(("page", "code"), INLINE, ids=[f"{page}: {code[:40]}" for page, code in INLINE])
def test_inline_commands_are_understood(page, code):
    words = shlex.split(code.replace("\n", " "))
    if words[:2] == ["gradzip", "advise"] and "--model" not in words:  # the sentence is about one of its options
        words += ["--model", "resnet50"]
    check(words)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_commands_of_results_are_understood(file, tmp_path):
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)  # for --json
    for command in dict.fromkeys(strings(json.loads(file.read_text()), ("command", "commands"))):
        assert command.startswith("python -m benchmarks."), command
        check(shlex.split(command))


def test_a_wrong_command_is_found(capsys):
    for line in (
        "make no-such-target", "make train ARGS=--no-such-option", "gradzip advise --bandwith 1gbit", "no-such-program",
        "python -m benchmarks.kernels --no-such-option", "torchrun --nproc-per-node 2 examples/train.py --epochs many",
        "horovodrun -np 2 python examples/missing.py", "docker build -f docker/missing.file",
    ):  # fmt: skip
        with pytest.raises((SystemExit, AssertionError)):
            check(shlex.split(line))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "text"], ids=str)
def test_specs_are_understood(block):
    if block.page not in TEXTS:
        assert isinstance(gradzip.parse(block.text.strip()), gradzip.Compressor)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "diff"], ids=str)
def test_pairs_are_python_before_and_after(block):
    """Their functions are looked up by test_docs.py."""
    lines = block.text.splitlines()
    for side in "-+":
        ast.parse("\n".join(line[1:] for line in lines if line[0] in f" {side}"))
    assert any(line[0] == "+" and "gradzip." in line for line in lines) and {line[0] for line in lines} <= {*" +-"}


def test_every_block_has_a_language_that_is_checked():
    known = {*SHELL, "python", "text", "toml", "yaml", "diff"}  # toml: of a reader's own package; yaml: of Accelerate
    assert len(BLOCKS) > 40
    assert not [str(block) for block in BLOCKS if block.language not in known]


@pytest.mark.parametrize(("run", "horovod"), [(horovodrun, True), (torchrun, False)], ids=["horovodrun", "torchrun"])
def test_blocks_of_python_run(tmp_path, run, horovod):
    if horovod:
        pytest.importorskip("horovod.torch")
    pytest.importorskip("tensorboard")
    done = run(2, "code_blocks_worker.py", tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((tmp_path / "ran.json").read_text()) == [str(block) for block in python_blocks(horovod)] != []
