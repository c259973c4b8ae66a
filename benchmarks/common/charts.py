"""What charts of several benchmarks have in common. They need matplotlib, which is imported to draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OTHER_COLORS = ("#555555", "#44AA99", "#AA4499", "#999933")  # of what is no method: networks, layers
MOST_SERIES = 6  # of a picture: more cannot be told apart


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
