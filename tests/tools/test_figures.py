"""Each measured figure in README.md and docs/ has a source, and those that follow from stored results are computed.

A figure is a decimal number, or a number with a unit of what is measured. It has a source if it

* is in a table that a benchmark writes (other tests compare these with the results),
* is in a sentence of `STATED`, which is computed here from benchmarks/results/, or
* is in a block that names its source, or whose introducing paragraph does: a file of results, a command of this
  repository, or a section of the documentation that names one.

`GIVEN` has the numbers that nobody measured: arguments, goals, arithmetic, figures of papers.
"""

import functools
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import figures
from benchmarks.common.results import RESULTS
from figures import GIVEN, STATED
from paths import ROOT

PAGES = {str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}

UNIT = r"(?:×(?! ?\d)|%|(?:ms|µs|s|seconds?|[kM]B|GB|GB/s|points?|nats|bits per \w+|times)\b)"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(
    # no version, section or argument: 2.13, §3.3, β = (0.9, 0.95), 5·10⁻⁴, `theta=0.85`
    rf"(?<![\w.§=·/]){NUMBER}(?:(?:–| to | and | or |, ){NUMBER})* ?{UNIT}|(?<![\w.§=·/(])\d+\.\d+(?![\w.]*\d)(?!, \d)"
)
NO_FIGURE = re.compile(
    r"(?:torch|Lightning|Python|Horovod|NVRTC|section|sections|capability|capabilities|equation|IEEE|β₂ =|θ =|theta =) "
    r"[\d.]+(?: (?:to|and) [\d.]+)?"
)
GENERATED = re.compile(r"<!-- tables?[ :][^>]*-->.*?<!-- end of table -->", re.DOTALL)
CODE = re.compile(r"```.*?```", re.DOTALL)
INLINE = re.compile(r"`[^`]*`")
COMMAND = re.compile(
    r"python -m (benchmarks[\w.]*)|make (bench-\w+)|(?:^|[ `])(examples/train\.py|scripts/\w+\.sh|tests/[\w/]+\.py)"
)


@dataclass
class Block:
    """A paragraph, an item of a list, or a table, without generated tables and code.

    intro: the paragraph before it in its section, of which it is a list or a table.
    """

    text: str
    intro: str
    section: str


def blank(match: re.Match) -> str:
    """As many lines, with nothing in them."""
    return "\n" * match[0].count("\n")


def blocks(page: str) -> Iterator[Block]:
    text = CODE.sub(blank, GENERATED.sub(blank, page))
    section, intro, lines = "", "", []

    def block() -> Iterator[Block]:
        nonlocal intro
        if lines:
            whole = " ".join(line.strip() for line in lines)
            is_part = re.match(r"([*-]|\d+\.|\|) ?", whole) and not whole.startswith("**")
            yield Block(whole, intro if is_part else "", section)
            intro = intro if is_part else whole
            lines.clear()

    for line in text.splitlines():
        if not line.strip() or line.startswith("#") or re.match(r"\s*([*-]|\d+\.) ", line):
            yield from block()
        if line.startswith("#"):
            section, intro = line.lstrip("# "), ""
        elif line.strip():
            lines.append(line)
    yield from block()


def figures_of(text: str) -> list[str]:
    """What looks like a measured figure, outside of inline code."""
    prose = NO_FIGURE.sub(" ", INLINE.sub("`", text))
    return [match[0] for match in FIGURE.finditer(prose)]


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def names_source(text: str, page: Path, follow: bool = True) -> bool:
    """Whether a text names a file of results or a command, or links to a section that does.

    Raises:
        AssertionError: what it names does not exist.
    """
    for name in re.findall(r"(\w+\.json)`|results/(\w+\.(?:json|md))", text):
        file = next(filter(None, name))
        if (RESULTS / file).exists() or (ROOT / "gradzip" / "auto" / file).exists():
            return True
    for module, target, script in COMMAND.findall(text):
        exists = (
            any((ROOT / (module.replace(".", "/") + end)).exists() for end in (".py", "/__main__.py"))
            if module
            else f"\n{target}:" in (ROOT / "Makefile").read_text()
            if target
            else (ROOT / script).exists()
        )
        assert exists, f"no such command: {module or target or script}"
        return True
    return follow and any(
        section_has_source(page.parent / target if target else page, title)
        for target, title in re.findall(r"\]\(([\w/.]*)#([\w-]+)\)", text)
        if not target or target.endswith(".md")
    )


@functools.cache
def section_has_source(page: Path, title: str) -> bool:
    """Whether a section, with its subsections, has a generated table or names a source."""
    lines, depth = [], 0
    for line in page.read_text().splitlines():
        level = len(line) - len(line.lstrip("#"))
        if depth and 0 < level <= depth:
            break
        if level and anchor(line.lstrip("# ")) == title:
            depth = level
        if depth:
            lines.append(line)
    text = "\n".join(lines)
    return bool(GENERATED.search(text)) or names_source(text, page, follow=False)


def without(text: str, known: list[str]) -> str:
    """A text without the phrases that are known, which it need not have."""
    for phrase in sorted(known, key=len, reverse=True):
        text = text.replace(phrase, "…")
    return text


def plain(text: str) -> str:
    """With one space for all white space, and one kind of minus."""
    return re.sub(r"\s+", " ", text).replace("−", "-")


def sourceless(name: str, text: str, stated: dict[str, list[str]], given: dict[str, list[str]]) -> list[str]:
    """The blocks of a page with figures that have no source."""
    known = [plain(phrase) for phrase in [*stated.get(name, []), *given.get(name, [])]]
    return [
        f"{name}, {block.section}: {found} in: {block.text}"
        for block in blocks(text)
        if (found := figures_of(without(plain(block.text), known)))
        and not any(names_source(part, PAGES[name]) for part in (block.text, block.intro))
    ]


def sentences() -> dict[str, list[str]]:
    """The sentences of `STATED` with their figures, by page."""
    by_page: dict[str, list[str]] = {}
    for page, template, values in STATED:
        by_page.setdefault(page, []).append(template.format(*values()))
    return by_page


@pytest.mark.parametrize(
    ("page", "template", "values"), STATED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_stated_figures_are_those_of_the_results(page: str, template: str, values: Callable[[], tuple]):
    sentence = template.format(*values())
    assert plain(sentence) in plain(PAGES[page].read_text()), f"expected in {page}: {sentence}"


@pytest.mark.parametrize("name", PAGES)
def test_figures_have_a_source(name):
    found = sourceless(name, PAGES[name].read_text(), sentences(), GIVEN)
    assert not found, "name a file of results or a command, or compute it in STATED:\n" + "\n".join(found)


def test_given_numbers_are_on_their_page():
    for name, phrases in GIVEN.items():
        for phrase in phrases:
            assert plain(phrase) in plain(PAGES[name].read_text()), f"{name} has no longer: {phrase}"


# That these tests can fail


@pytest.mark.parametrize(
    "added",
    [
        "It is 3 times as fast.", "It takes 12 ms more.", "A step takes 0.35 of it.", "* It ends 1.4 points behind.",
        "It sends 12.5 MB.", "| a | b |\n|---|---|\n| x | 2.34 |", "It is 4 to 5 % slower.", "About 3 × faster.",
    ],
)  # fmt: skip
def test_a_new_figure_without_source_is_found(added):
    page = "## New\n\n" + added
    assert len(sourceless("README.md", page, {}, {})) == 1
    source = "(`make bench-ring`)"
    sourced = f"Measured {source}:\n\n{added}" if added[0] in "*|" else f"{added} {source}"
    assert not sourceless("README.md", "## New\n\n" + sourced, {}, {})
    assert not sourceless("README.md", page, {"README.md": [plain(added)]}, {})


@pytest.mark.parametrize(
    "source", ["`nothing.json`", "`benchmarks/results/`", "[why](docs/accuracy.md#no-such-section)", "`make test`"]
)
def test_what_names_no_source_is_none(source):
    assert sourceless("README.md", f"## New\n\nIt is 3 times as fast ({source}).", {}, {})


def test_a_changed_result_is_found(monkeypatch):
    changed = json.loads((RESULTS / "convergence_long.json").read_text())
    for run in changed["runs"]:
        run["scores"][-1] += 0.2 * (run["method"] == "none")
    load = figures.load
    monkeypatch.setattr(figures, "load", lambda name: changed if name == "convergence_long.json" else load(name))
    page, template, values = next(stated for stated in STATED if "a ResNet-8 ends at" in stated[1])
    assert plain(template.format(*values())) not in plain(PAGES[page].read_text())


def test_a_changed_figure_is_found():
    for page, template, values in STATED:
        text = plain(PAGES[page].read_text())
        sentence = plain(template.format(*values()))
        number = re.search(r"\d(?=\D*$)", sentence)
        other = sentence[: number.start()] + str((int(number[0]) + 1) % 10) + sentence[number.end() :]
        assert sentence in text and other not in text


# Commits


def commits(value: object) -> Iterator[str]:
    """All commits that a file of results names."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("commit", "methods_commit", "commits"):
                yield from [item] if isinstance(item, str) else item
            else:
                yield from commits(item)
    elif isinstance(value, list):
        for item in value:
            yield from commits(item)


def is_commit(name: str) -> bool:
    done = subprocess.run(["git", "cat-file", "-e", f"{name}^{{commit}}"], cwd=ROOT, capture_output=True)
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
        for commit in commits(json.loads(path.read_text()))
    }
    unknown = {(name, commit) for name, commit in named if not is_commit(commit)}
    if unknown == named:
        pytest.skip("a repository with another history, as of an export: it has none of the commits")
    assert not unknown, f"results name commits that this repository lacks: {sorted(unknown)}"
