"""`gradzip list`: the methods, and what each takes."""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import textwrap
from dataclasses import MISSING, Field, fields, replace
from typing import Any

import torch

import gradzip
from gradzip.averaging.routine import averaged
from gradzip.collectives import Collective
from gradzip.engines.local import drive
from gradzip.methods.base.compressor import Compressor
from gradzip.methods.base.registry import registered
from gradzip.methods.spec import parse
from gradzip.watch.replay import recorded

from .command import CommandError

Facts = dict[str, Any]

EXAMPLES = """examples:
  gradzip list                 one line for each method
  gradzip list topk            its formulas, arguments and source
  gradzip list --json | jq '.[] | .name, .arguments'
"""


def add(commands: Any) -> None:
    """Add `gradzip list`."""
    parser = commands.add_parser(
        "list",
        help="the methods and their arguments",
        description="List the compression methods, those of other packages included.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="show all about this method")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    names = list(registered()) if options.name is None else [_known(options.name)]
    report = [facts(name) for name in names]
    if options.json:
        print(json.dumps(report, indent=2))
    elif options.name is None:
        print("\n".join(line for method in report for line in _lines(method)))
    else:
        print("\n".join(_details(report[0])))
    return 0


def facts(name: str) -> Facts:
    """The facts about one method, in JSON types."""
    method = registered()[name]
    summary, *_ = _paragraphs(method)
    source = next((p.removeprefix("Source: ") for p in _paragraphs(method) if p.startswith("Source: ")), None)
    return {
        "name": name,
        "class": method.__name__,
        "module": method.__module__,
        "summary": summary,
        "collectives": _collectives(method),
        # Arguments of all methods come last.
        "arguments": {f.name: _default(f) for f in sorted(fields(method), key=lambda f: bool(f.kw_only)) if f.init},
        "payload": getattr(method, "number", None),
        "source": source,
    }


def _known(name: str) -> str:
    if name not in registered():
        try:
            parse(name)
        except ValueError as error:  # suggests names that are alike
            raise CommandError(str(error)) from None
    return name


def _collectives(method: type[Compressor]) -> list[str] | None:
    """Find the collectives of a method by running some steps of two ranks. None for methods made of methods."""
    try:
        compressor = parse(method.examples[0])
        if compressor.parts[0] is not compressor:
            return None
        default: dict[str, Any] = {f.name: f.default for f in fields(compressor) if f.name == "exchange"}
        return _of_steps(replace(compressor, **default))
    except Exception:  # methods of other packages may fail in any way, and without kernels all fail
        return []


def _of_steps(compressor: Compressor) -> list[str]:
    """Kinds of collectives in order, each as often as in the step with most of that kind."""
    ranks = [compressor.clone() for _ in range(2)]
    generator = torch.Generator(device="cpu").manual_seed(0)
    most: dict[str, int] = {}
    for _ in range(6):
        kinds: list[str] = []
        gradient = torch.randn(32, 8, 3, 3, generator=generator, device="cpu")

        def record(collective: Collective, kinds: list[str] = kinds) -> None:
            kinds.append(type(collective).__name__)

        routines = [averaged(c, gradient.clone(), "gradient", rank, 2) for rank, c in enumerate(ranks)]
        drive([recorded(routines[0], record), routines[1]])
        for kind in kinds:
            most[kind] = max(most.get(kind, 0), kinds.count(kind))
    return [kind for kind, number in most.items() for _ in range(number)]


def _default(argument: Field[Any]) -> str | None:
    """The default value as on a command line; None if the argument has none."""
    if argument.default_factory is not MISSING:
        return repr(argument.default_factory())
    if argument.default is MISSING:
        return None
    value = argument.default
    return value if isinstance(value, str) else repr(value).removeprefix("torch.")


def _paragraphs(method: type[Compressor]) -> list[str]:
    return [" ".join(p.split()) for p in (inspect.getdoc(method) or "No description.").split("\n\n")]


def _lines(method: Facts) -> list[str]:
    """A method in a few lines of text, as wide as the terminal."""
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    title = f"{method['name']}  {method['class']}" + (f", payload {n}" if (n := method["payload"]) else "")
    rows = [
        ("arguments", _signature(method, ", ")),
        ("collectives", _names(method["collectives"])),
        ("source", method["source"] or ""),
    ]
    lines = [title, *_wrapped(method["summary"], width, "  ", "  ")]
    for label, text in rows:
        lines += _wrapped(text, width, f"  {label:<12}", " " * 14)
    return [*lines, ""]


def _wrapped(text: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def _details(method: Facts) -> list[str]:
    package = "gradzip" if hasattr(gradzip, method["class"]) else method["module"]
    rows = [
        ("command line", f"{method['name']}:{_signature(method, ',')}"),
        ("Python", f"{package}.{method['class']}"),
        ("collectives", _names(method["collectives"])),
        ("payload", "none" if method["payload"] is None else f"number {method['payload']}"),
    ]
    doc = inspect.getdoc(registered()[method["name"]]) or "No description."
    return [f"{method['name']}  {method['class']}", "", doc, "", *(f"{label:<13} {text}" for label, text in rows)]


def _signature(method: Facts, separator: str) -> str:
    arguments = method["arguments"].items()
    return separator.join(name if default is None else f"{name}={default}" for name, default in arguments)


def _names(collectives: list[str] | None) -> str:
    return "those of its parts" if collectives is None else ", ".join(collectives) or "unknown"
