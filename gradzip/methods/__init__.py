"""The methods by name, and how a command line names one."""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import fields
from typing import Any

from ..compressor import Compressor
from .atomo import ATOMO
from .cast import Cast
from .dgc import DGC
from .fft import FFTRange
from .gradiveq import GradiVeQ
from .lowrank import ACPSGD, PowerSGD
from .none import NoCompression
from .per_layer import PerLayer, Rule
from .quantize import QSGD, TernGrad
from .randomk import RandomK
from .signs import OneBitSGD, SignSGD
from .topk import TopK

REGISTRY: dict[str, type[Compressor]] = {
    "none": NoCompression,
    "fp16": Cast,
    "fft-range": FFTRange,
    "qsgd": QSGD,
    "terngrad": TernGrad,
    "signsgd": SignSGD,
    "onebit": OneBitSGD,
    "atomo": ATOMO,
    "topk": TopK,
    "randomk": RandomK,
    "dgc": DGC,
    "powersgd": PowerSGD,
    "acpsgd": ACPSGD,
    "gradiveq": GradiVeQ,
    "per-layer": PerLayer,
}


def parse(spec: str) -> Compressor:
    """The compressor that a text like "fft-range:theta=0.85,bits=10" describes; ValueError that lists what there is.

    >>> parse("fft-range:theta=0.9,bits=8") == FFTRange(theta=0.9, bits=8)
    True

    A method that is given to a method stands with its arguments in parentheses: gradiveq:sampling=qsgd(bits=4).

    A method for each layer: rules of a regular expression for the parameter's name and a method, its arguments in
    parentheses; the first that fits counts, and `default` is for the rest.

    >>> parse("per-layer:^fc=none,conv=topk(theta=0.9,bits=8),default=fp16").rules[1]
    ('conv', TopK(min_numel=1024, exchange='gather', theta=0.9, select='exact', bits=8, error_feedback=True, seed=0))
    """
    if not isinstance(spec, str):
        raise TypeError(f"parse: got {spec!r}, expected a text such as 'topk:theta=0.99'")
    name, _, arguments = spec.partition(":")
    method = REGISTRY.get(name.strip())
    if method is None:
        raise ValueError(f"unknown compression method {name!r}, {_hint(name)}")
    try:
        return _per_layer(arguments) if method is PerLayer else method(**_arguments(method, arguments))
    except ValueError as error:
        raise ValueError(f"compression {spec!r}: {error}") from None


def _hint(name: str) -> str:
    """What may have been meant by a name that is none: a class's, one that is spelt in another way, or a call."""
    word = re.split(r"[^\w-]", name.strip(), maxsplit=1)[0]
    if word in REGISTRY:
        return f"expected arguments after a colon: {word}:argument=value,argument=value"
    spellings = {_letters(text): known for known, method in REGISTRY.items() for text in (known, method.__name__)}
    close = difflib.get_close_matches(_letters(word), spellings, 1)
    guess = f"did you mean {spellings[close[0]]!r}? There are" if close else "expected one of"
    return f"{guess}: {', '.join(REGISTRY)}"


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _arguments(method: type[Compressor], text: str) -> dict[str, Any]:
    known = [f.name for f in fields(method) if f.init]
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        values = {k.arg: _value(k.value) for k in call.keywords if k.arg}
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
    """Parts between separators that stand in no brackets; none of an empty text."""
    parts, depth = [""] if text.strip() else [], 0
    for character in text:
        if character == separator and depth == 0:
            parts.append("")
            continue
        depth += (character in "([{") - (character in ")]}")
        if parts:
            parts[-1] += character
    return parts


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REGISTRY:
        return node
    if isinstance(node, ast.Name):  # bare words are strings, but for how shells and YAML spell Python's constants
        return {"true": True, "false": False, "none": None}.get(node.id.lower(), node.id)
    return ast.literal_eval(node)


def _called(node: ast.Call) -> Compressor:
    """The method in method(argument=value, ...)."""
    name, arguments = ast.unparse(node).split("(", 1)
    return parse(f"{name}:{arguments[:-1]}")


__all__ = [
    "ACPSGD",
    "ATOMO",
    "DGC",
    "QSGD",
    "REGISTRY",
    "Cast",
    "FFTRange",
    "GradiVeQ",
    "NoCompression",
    "OneBitSGD",
    "PerLayer",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "TernGrad",
    "TopK",
    "parse",
]
