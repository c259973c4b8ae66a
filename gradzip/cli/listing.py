"""`gradzip list`: the methods and their arguments.

List the compression methods, those of other packages included.

examples:
  gradzip list                 the methods with their arguments
  gradzip list topk            formulas, arguments and source of one method
  gradzip list --json | jq '.[] | .name, .arguments'
"""

from __future__ import annotations

import argparse
import inspect
import json
from dataclasses import MISSING, Field, fields
from typing import Any

from gradzip.methods.base.registry import registered
from gradzip.methods.spec import parse

from .command import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="show all about this method")


def run(options: argparse.Namespace) -> None:
    if options.name is not None and options.name not in registered():
        try:
            parse(options.name)
        except ValueError as error:  # suggests names that are alike
            raise CommandError(str(error)) from None
    report = [facts(name) for name in registered() if options.name in (None, name)]
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for method in report:
        arguments = ",".join(n if v is None else f"{n}={v}" for n, v in method["arguments"].items())
        print(f"{method['name']}:{arguments}\n  {method['class']}: {method['summary']}")
    if options.name is not None:
        print(f"\n{inspect.getdoc(registered()[options.name])}")


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
