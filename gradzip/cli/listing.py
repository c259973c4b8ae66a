"""`gradzip list`: the methods, and what each takes."""

from __future__ import annotations

import argparse
import inspect
import json
from dataclasses import MISSING, Field, fields
from typing import Any

from gradzip.methods.base.registry import registered
from gradzip.methods.spec import parse

from .command import CommandError

EXAMPLES = """examples:
  gradzip list                 the methods with their arguments
  gradzip list topk            formulas, arguments and source of one method
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
    if options.name is not None and options.name not in registered():
        try:
            parse(options.name)
        except ValueError as error:  # suggests names that are alike
            raise CommandError(str(error)) from None
    names = list(registered()) if options.name is None else [options.name]
    report = [facts(name) for name in names]
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    for method in report:
        arguments = ",".join(f"{n}={v}" if v is not None else n for n, v in method["arguments"].items())
        print(f"{method['name']}:{arguments}\n  {method['class']}: {method['summary']}")
    if options.name is not None:
        print(f"\n{inspect.getdoc(registered()[options.name])}")
    return 0


def facts(name: str) -> dict[str, Any]:
    """The facts about one method, in JSON types."""
    method = registered()[name]
    return {
        "name": name,
        "class": method.__name__,
        "module": method.__module__,
        "summary": " ".join((inspect.getdoc(method) or "No description.").partition("\n\n")[0].split()),
        # Arguments of all methods come last.
        "arguments": {f.name: _default(f) for f in sorted(fields(method), key=lambda f: bool(f.kw_only)) if f.init},
    }


def _default(argument: Field[Any]) -> str | None:
    """The default value as on a command line; None if the argument has none."""
    if argument.default_factory is not MISSING:
        return repr(argument.default_factory())
    value = argument.default
    if value is MISSING:
        return None
    return value if isinstance(value, str) else repr(value).removeprefix("torch.")
