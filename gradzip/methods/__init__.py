"""The methods by name, and how a command line names one."""

from __future__ import annotations

import ast
from dataclasses import fields
from typing import Any

from ..compressor import Compressor
from .atomo import ATOMO
from .cast import Cast
from .fft import FFTRange
from .none import NoCompression
from .quantize import QSGD, TernGrad
from .signs import OneBitSGD, SignSGD

REGISTRY: dict[str, type[Compressor]] = {
    "none": NoCompression,
    "fp16": Cast,
    "fft-range": FFTRange,
    "qsgd": QSGD,
    "terngrad": TernGrad,
    "signsgd": SignSGD,
    "onebit": OneBitSGD,
    "atomo": ATOMO,
}


def parse(spec: str) -> Compressor:
    """The compressor that a text like "fft-range:theta=0.85,bits=10" describes; ValueError that lists what there is.

    >>> parse("fft-range:theta=0.9,bits=8") == FFTRange(theta=0.9, bits=8)
    True
    """
    name, _, arguments = spec.partition(":")
    method = REGISTRY.get(name.strip())
    if method is None:
        raise ValueError(f"unknown compression method {name!r}, expected one of: {', '.join(REGISTRY)}")
    known = [f.name for f in fields(method) if f.init]
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        values = {k.arg: _value(k.value) for k in call.keywords if k.arg}
        if len(values) < len(call.keywords):
            raise ValueError
    except (SyntaxError, ValueError):
        raise ValueError(f"compression {spec!r}: expected method:argument=value,argument=value") from None
    for argument in values:
        if argument not in known:
            raise ValueError(
                f"compression {spec!r}: unknown argument {argument!r}, expected one of: {', '.join(known)}"
            )
    return method(**values)


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)  # bare words are strings


__all__ = [
    "ATOMO",
    "QSGD",
    "REGISTRY",
    "Cast",
    "FFTRange",
    "NoCompression",
    "OneBitSGD",
    "SignSGD",
    "TernGrad",
    "parse",
]
