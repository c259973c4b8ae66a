"""What charts of several benchmarks have in common. They need matplotlib, which is imported to draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Okabe and Ito's palette, which colour-blind people can tell apart. Line styles, markers or hatches repeat it.
COLORS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path, dpi: int = 100) -> None:
    """Write a chart, in the format of the path's suffix. A PNG has 64 colors: enough for lines, and a small file."""
    figure.savefig(path, dpi=dpi)
    if path.suffix == ".png":
        from PIL import Image

        with Image.open(path) as image:
            small = image.convert("RGB").quantize(64)
        small.save(path, optimize=True)


def open_frame(axis: Any) -> None:
    """Remove the lines above and to the right of a panel."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
