"""What charts of several benchmarks have in common. They need matplotlib, which is imported to draw."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# The colour of each method, in all pictures. The first seven are Okabe and Ito's, which colour-blind people can tell
# apart. Markers and line styles tell variants of a method apart.
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
OTHER_COLORS = ("#555555", "#44AA99", "#AA4499", "#999933")  # of what is no method: networks, layers
MOST_SERIES = 6  # of a picture: more cannot be told apart


def method_color(spec: str) -> str:
    """The colour of a method by its spec, in which arguments do not count; for `phases`, that of the last phase."""
    name, _, arguments = spec.partition(":")
    if name == "phases":
        name = re.split(r"[=(]", re.findall(r"\d+%?=([\w-]+)", arguments)[-1])[0]
    return METHOD_COLORS.get(name, "#555555")


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path, dpi: int = 100) -> None:
    """Write a chart, in the format of the path's suffix. A PNG has 256 colours: a small file."""
    figure.savefig(path, dpi=dpi)
    if path.suffix == ".png":
        from PIL import Image

        with Image.open(path) as image:
            small = image.convert("RGB").quantize(256)
        small.save(path, optimize=True)


def open_frame(axis: Any) -> None:
    """Remove the lines above and to the right of a panel."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
