"""How a command line names a method and its arguments."""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import fields
from typing import Any

from .compressor import Compressor
from .methods import NoCompression, PerLayer
from .methods.per_layer import Rule
from .registry import registered


def parse(spec: str) -> Compressor:
    """Make a compressor from a command-line spec, such as "fft-range:theta=0.85,bits=10".

    A method as an argument has its own arguments in parentheses: gradiveq:sampling=qsgd(bits=4). So have the methods
    in a list: auto:allow=[fp16,dct-range(theta=0.95)].

    `per-layer` takes rules: a regular expression for the parameter's name and a method. The first match counts;
    `default` is for all other parameters.

    Raises:
        ValueError: unknown method or argument; lists the known ones.

    >>> parse("topk:theta=0.9,bits=8")
    TopK(min_numel=1024, exchange='gather', theta=0.9, select='exact', bits=8, error_feedback=True, seed=0)

    >>> parse("per-layer:^fc=none,conv=topk(theta=0.9,bits=8),default=fp16").rules[0]
    ('^fc', NoCompression(min_numel=1024))
    """
    if not isinstance(spec, str):
        raise TypeError(f"parse: got {spec!r}, expected a string such as 'topk:theta=0.99'")
    name, _, arguments = spec.partition(":")
    method = registered().get(name.strip())
    if method is None:
        raise ValueError(f"unknown compression method {name!r}, {_hint(name)}")
    try:
        return _per_layer(arguments) if method is PerLayer else method(**_arguments(method, arguments))
    except ValueError as error:
        raise ValueError(f"compression {spec!r}: {error}") from None


def unparse(compressor: Compressor) -> str:
    """The spec of a compressor, with the arguments that differ from their defaults. Not for `PerLayer` and schedules.

    >>> unparse(parse("topk:bits=8,theta=0.99"))
    'topk:bits=8'
    """
    kind = type(compressor)
    name = next((name for name, method in registered().items() if method is kind), kind.__name__)
    defaults = {f.name: f.default for f in fields(compressor) if f.init}
    given = {k: getattr(compressor, k) for k, default in defaults.items() if getattr(compressor, k) != default}
    arguments = ",".join(f"{k}={_written(v)}" for k, v in given.items())
    return f"{name}:{arguments}" if arguments else name


def _written(value: Any) -> str:
    if isinstance(value, Compressor):
        name, _, arguments = unparse(value).partition(":")
        return f"{name}({arguments})" if arguments else name
    if isinstance(value, (list, tuple)) and any(isinstance(item, Compressor) for item in value):
        return f"[{','.join(map(_written, value))}]"
    return str(value).removeprefix("torch.")


def _hint(name: str) -> str:
    """Suggest a method for an unknown name: by the class's name, by similar spelling, or for a call."""
    word = re.split(r"[^\w-]", name.strip(), maxsplit=1)[0]
    if word in registered():
        return f"expected arguments after a colon: {word}:argument=value,argument=value"
    spellings = {_letters(text): known for known, method in registered().items() for text in (known, method.__name__)}
    close = difflib.get_close_matches(_letters(word), spellings, 1)
    guess = f"did you mean {spellings[close[0]]!r}? There are" if close else "expected one of"
    return f"{guess}: {', '.join(registered())}"


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _arguments(method: type[Compressor], text: str) -> dict[str, Any]:
    known = [f.name for f in fields(method) if f.init]
    source = f"f({text})"
    try:
        call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        values = {k.arg: _value(k.value, source) for k in call.keywords if k.arg}
        if len(values) < len(call.keywords):
            raise ValueError
    except (SyntaxError, ValueError):
        raise ValueError(f"expected method:argument=value,argument=value with {', '.join(known)}") from None
    for argument in values:
        if argument not in known:
            raise ValueError(f"unknown argument {argument!r}, expected one of: {', '.join(known)}")
    return {k: _called(v) if isinstance(v, ast.Call) else v for k, v in values.items()}


def _per_layer(arguments: str) -> PerLayer:
    if not arguments.strip():
        raise ValueError("got no rules, expected per-layer:pattern=method(argument=value),default=method")
    rules: list[tuple[Rule, Compressor]] = []
    default: Compressor = NoCompression()
    for text in _split(arguments, ","):
        pattern, *method = _split(text, "=")
        name = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", "=".join(method), re.DOTALL)
        if not name:
            raise ValueError(f"got the rule {text!r}, expected pattern=method or pattern=method(argument=value)")
        part = parse(f"{name[1]}:{name[2] or ''}")
        if pattern.strip() == "default":
            default = part
        else:
            rules.append((pattern.strip(), part))
    return PerLayer(rules, default)


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside of brackets. An empty string has no parts."""
    parts, depth = [""] if text.strip() else [], 0
    for character in text:
        if character == separator and depth == 0:
            parts.append("")
            continue
        depth += (character in "([{") - (character in ")]}")
        if parts:
            parts[-1] += character
    return parts


def _value(node: ast.expr, source: str) -> Any:
    if isinstance(node, ast.List):
        # Texts, because Python takes fft-range for a difference.
        texts = [ast.get_source_segment(source, element) or "" for element in node.elts]
        return [_listed(text) if re.match("[a-z]", text) else _value(e, source) for text, e in zip(texts, node.elts)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in registered():
        return node
    if isinstance(node, ast.Name):  # a bare word is a string, or a constant as shells and YAML spell it
        return {"true": True, "false": False, "none": None}.get(node.id.lower(), node.id)
    return ast.literal_eval(node)


def _listed(text: str) -> str:
    """The spec of a method in a list, where its arguments are in parentheses."""
    name, _, arguments = text.removesuffix(")").partition("(")
    return f"{name}:{arguments}" if arguments else name


def _called(node: ast.Call) -> Compressor:
    """The compressor for method(argument=value, ...)."""
    name, arguments = ast.unparse(node).split("(", 1)
    return parse(f"{name}:{arguments[:-1]}")
