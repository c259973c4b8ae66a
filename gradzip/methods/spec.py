"""Specs: methods and their arguments as text, for command lines and reports."""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import fields
from typing import Any

from .base.compressor import Compressor
from .base.registry import registered
from .base.rules import Rule
from .hierarchical import Hierarchical
from .momentum import Momentum
from .per_layer import PerLayer
from .phases import Phases


def parse(spec: str) -> Compressor:
    """Make a compressor from a command-line spec, such as "fft-range:theta=0.85,bits=10".

    Methods that are arguments have their own arguments in parentheses: gradiveq:sampling=qsgd(bits=4), and in lists:
    auto:allow=[fp16,dct-range(theta=0.95)].

    `per-layer` takes rules: regular expressions for the parameter's name, and methods. The first match counts;
    `default` is for all other parameters. `phases` takes steps, and the methods that begin there, and after them
    `exempt`, a regular expression, if need be several times. The first argument of
    `hierarchical` is the method between nodes, and that of `momentum` the method for momenta.

    Raises:
        ValueError: unknown method or argument; lists the known ones.

    >>> parse("acpsgd:rank=8,residual_decay=0.9")
    ACPSGD(min_numel=1024, residual_decay=0.9, rank=8, error_feedback=True, seed=0, reuse=True)

    >>> parse("per-layer:^fc=none,conv=topk(theta=0.9,bits=8),default=fp16").rules[0]
    ('^fc', NoCompression(min_numel=1024))

    >>> parse("phases:0=none,1000=acpsgd(rank=4)").phases[0]
    NoCompression(min_numel=1024)

    >>> parse("hierarchical:inner=topk(theta=0.9),local_size=8").local_size
    8
    """
    if not isinstance(spec, str):
        raise TypeError(f"parse: got {spec!r}, expected a string such as 'topk:theta=0.99'")
    name, _, arguments = spec.partition(":")
    method = registered().get(name.strip())
    if method is None:
        raise ValueError(f"unknown compression method {name!r}, {_hint(name)}")
    try:
        if method is PerLayer:
            return _per_layer(_pairs(name, arguments, "rule", "pattern"))
        if method is Phases:
            texts = _split(arguments, ",")
            exempt = [text.partition("=")[2].strip() for text in texts if text.strip().startswith("exempt=")]
            phases = ",".join(text for text in texts if not text.strip().startswith("exempt="))
            return _phases(_pairs(name, phases, "phase", "step"), exempt)
        if method in (Hierarchical, Momentum):
            first, *others = _split(arguments, ",") or [""]
            ((key, inner),) = _pairs(name, first, "argument", "inner")
            if key != "inner":
                raise ValueError(f"got the argument {first!r}, expected inner=method or inner=method(argument=value)")
            return method(inner, **_arguments(method, ",".join(others)))
        return method(**_arguments(method, arguments))
    except ValueError as error:
        raise ValueError(f"compression {spec!r}: {error}") from None


def unparse(compressor: Compressor) -> str:
    """Get the spec of a compressor, with arguments that differ from their defaults. Not for schedules and predicates.

    >>> unparse(parse("topk:bits=8,theta=0.99"))
    'topk:bits=8'
    >>> unparse(parse("phases: 1000 = acpsgd, 0 = none"))
    'phases:0=none,1000=acpsgd'
    """
    kind = type(compressor)
    name = next((name for name, method in registered().items() if method is kind), kind.__name__)
    if isinstance(compressor, (PerLayer, Phases)):
        given: list[tuple[Any, Any]] = list(zip(compressor.configuration, compressor.parts))
        if isinstance(compressor, PerLayer):
            given.append(("default", compressor.default))
        else:
            given += [("exempt", rule) for rule in compressor.configuration[len(compressor.phases) :]]
    else:
        values = {f.name: (getattr(compressor, f.name), f.default) for f in fields(compressor) if f.init}
        given = [(argument, value) for argument, (value, default) in values.items() if value != default]
    arguments = ",".join(f"{argument}={_written(value)}" for argument, value in given)
    return f"{name}:{arguments}" if arguments else name


def _written(value: Any) -> str:
    if isinstance(value, Compressor):
        name, _, arguments = unparse(value).partition(":")
        return f"{name}({arguments})" if arguments else name
    if isinstance(value, (list, tuple)) and any(isinstance(item, Compressor) for item in value):
        return f"[{','.join(map(_written, value))}]"
    return str(value).removeprefix("torch.")


def _hint(name: str) -> str:
    """Suggest a method for an unknown name: by similar spelling, also of the class's name, or for a call."""
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


def _pairs(name: str, arguments: str, what: str, left: str) -> list[tuple[str, Compressor]]:
    """Parse pairs of left=method or left=method(argument=value). what: noun for a pair, for errors."""
    pairs = []
    for text in _split(arguments, ","):
        key, *method = _split(text, "=") or [""]
        match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", "=".join(method), re.DOTALL)
        if not match:
            raise ValueError(f"got the {what} {text!r}, expected {left}=method or {left}=method(argument=value)")
        pairs.append((key.strip(), parse(f"{match[1]}:{match[2] or ''}")))
    if not pairs:
        raise ValueError(f"got no {what}s, expected {name}:{left}=method,{left}=method(argument=value)")
    return pairs


def _per_layer(pairs: list[tuple[str, Compressor]]) -> PerLayer:
    rules: list[tuple[Rule, Compressor]] = [pair for pair in pairs if pair[0] != "default"]
    defaults = [part for pattern, part in pairs if pattern == "default"]
    return PerLayer(rules, *defaults[-1:])


def _phases(pairs: list[tuple[str, Compressor]], exempt: list[str]) -> Phases:
    phases: dict[Any, Compressor] = {}
    for text, part in pairs:
        step = int(text) if re.fullmatch(r"-?[0-9]+", text) else text  # Phases refuses all but numbers from 0 on
        if step in phases:
            raise ValueError(f"got step {step} twice, expected one method for each step")
        phases[step] = part
    return Phases(phases, tuple(exempt))


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
        # Methods as texts, because Python parses fft-range as a difference.
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
