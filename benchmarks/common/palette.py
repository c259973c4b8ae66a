"""The colour of each method, in all pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable

# The first seven are Okabe and Ito's, which colour-blind people can tell apart. Line styles and markers tell variants
# of a method apart.
METHOD_COLORS = {
    "none": "#000000",
    "acpsgd": "#0072B2",
    "fft-range": "#E69F00",
    "qsgd": "#009E73",
    "topk": "#D55E00",
    "block-float": "#CC79A7",
    "powersgd": "#56B4E9",
    "dct-range": "#332288",
    "fp16": "#8C8C8C",
    "momentum": "#A6611A",
    "onebit": "#7F7F00",
    "signsgd": "#7F7F00",
    "terngrad": "#7FBC41",
}
OTHER = "#555555"
LINE_STYLES = ("-", "--", ":", "-.")


def method_color(spec: str) -> str:
    """The colour of a method by its spec, in which arguments do not count; for `phases`, that of the last phase."""
    name, _, arguments = spec.partition(":")
    if name == "phases":
        name = re.split(r"[=(]", re.findall(r"\d+%?=([\w-]+)", arguments)[-1])[0]
    return METHOD_COLORS.get(name, OTHER)


def line_styles(specs: Iterable[str]) -> list[str]:
    """A line style for each method: those of one colour have different ones, as far as there are."""
    seen: dict[str, int] = {}
    styles = []
    for color in map(method_color, specs):
        styles.append(LINE_STYLES[seen.get(color, 0) % len(LINE_STYLES)])
        seen[color] = seen.get(color, 0) + 1
    return styles
