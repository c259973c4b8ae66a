"""Links between the GPUs of a node, by name: what one GPU of a ring sends while it receives as much."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Within:
    """A kind of link within nodes.

    bandwidth: bytes per second of a rank. tree: as for `Link`. source: of the bandwidth.
    """

    bandwidth: float
    tree: bool
    source: str


LINKS = {
    "nvlink": Within(300e9, True, "data sheet of the NVIDIA A100, one direction"),
    "pcie4": Within(16e9, False, "assumed: half of 16 lanes of PCIe 4.0, where GPUs reach each other's memory"),
    "pcie-shm": Within(
        1.4e9,
        False,
        "8 x A40 over host memory and two sockets, fitted to a step (python -m benchmarks.training.public)",
    ),
}
