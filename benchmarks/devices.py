"""Write what `gradzip advise` knows of GPUs: what methods take on those that were measured, and data sheets of others.

  python -m benchmarks.devices --write    gradzip/cli/devices.json, from benchmarks/results/gpu_check*.json

For each method:

    element     seconds for each element of a gradient: of its kernels, on 2^27 numbers (KERNELS, and `rank` for the
                payload of each rank of a gather), on each GPU. Of methods whose kernels have no rows, the growth from
                ResNet-50 to GPT-2 of what they add to a step.
    gradient    seconds for each gradient, of host time: what is left of what they add to a step of ResNet-50, without
                checks of finite averages. Of a host that is as busy as its device: others may hide it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.common.arguments import Parser
from benchmarks.common.results import RESULTS, write_json
from gradzip.cli.devices import FILE
from gradzip.cli.models import MODELS

# The runs with kernels, by GPU, and the run with steps.
RUNS = {"h200": "gpu_check.json", "h100": "gpu_check_h100.json"}
STEPS = RUNS["h100"]
UNCHECKED = ", skip_nonfinite(False)"

# Rows of kernels that run once for a gradient, and those that run for the payload of each rank. Names of methods are
# specs without arguments, or specs.
KERNELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "none": ((), ()),
    "block-float": (("block_float_encode 8 bits, error", *["block_float_decode 8 bits"] * 2), ()),
    "block-float:bits=4,rounding=nearest": (
        ("block_float_encode 4 bits, error", *["block_float_decode 4 bits"] * 2),
        (),
    ),
    "fft-range": (("FFTRange encode",), ("FFTRange decode",)),
    "dct-range": (("DCTRange encode",), ("DCTRange decode",)),
    "qsgd": (("quantize_packed 4 bits",), ("quantize_decode_add 4 bits",)),
    "topk": (("topk_abs 1%", "index_code_encode 1%"), ("index_code_decode_add 1%",)),
    "powersgd": (("low-rank step 4096^2 r=4",), ()),
    "acpsgd": (("low-rank step 4096^2 r=4",), ()),
}
# Methods without rows of kernels: the variants of `benchmarks.step` that were measured on two networks. A rank's signs
# are added as fast as the payloads of `Natural`, four in a launch.
STEPPED = {
    "fp16": "fp16 hook", "bf16": "bf16 hook", "PowerSGD hook": "PowerSGD hook",
    "momentum:inner=signsgd(majority=False)": "signsgd" + UNCHECKED,
}  # fmt: skip
SIGNS_RANK = "natural_decode_sum 4 ranks"

# Bytes per second of memory, of NVIDIA's data sheets.
DATA_SHEETS: dict[str, dict[str, Any]] = {
    "h200": {"name": "NVIDIA H200 SXM", "bandwidth": 4.8e12},
    "h100": {"name": "NVIDIA H100 SXM", "bandwidth": 3.35e12},
    "a100": {"name": "NVIDIA A100 80GB SXM", "bandwidth": 2.039e12},
    "a40": {"name": "NVIDIA A40", "bandwidth": 0.696e12},
    "l40s": {"name": "NVIDIA L40S", "bandwidth": 0.864e12},
    "rtx4090": {"name": "NVIDIA GeForce RTX 4090", "bandwidth": 1.008e12},
}


def _kernels(device: str) -> dict[str, float]:
    """Seconds for each element of a gradient, by row, and of a copy."""
    rows = json.loads((RESULTS / RUNS[device]).read_text())["kernels"]["rows"]
    copy = rows[0]["copy_ms"] / 1e3 / 2**27
    return {row["name"]: row["copies"] * copy for row in rows}


def _added(network: str) -> tuple[dict[str, float], int, int]:
    """Seconds that variants add to a step, and the number of gradients and elements of the network."""
    rows = json.loads((RESULTS / STEPS).read_text())["gpt2" if network == "gpt2" else "training"]["rows"]
    parameters = list(MODELS[network]())
    found = {row["variant"]: max(0.0, row["added_ms"] / 1e3) for row in rows}
    return found, len(parameters), sum(p.numel for p in parameters)


def methods() -> dict[str, dict[str, Any]]:
    """What each method takes."""
    kernels = {device: _kernels(device) for device in RUNS}
    (small, gradients, elements), (large, more, larger) = _added("resnet50"), _added("gpt2")
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, element: Mapping[str, float], rank: Mapping[str, float], added: float) -> None:
        left = max(0.0, added - element["h100"] * elements) / gradients
        found[name] = {"gradient": left, "element": dict(element), "rank": dict(rank)}

    for name, (once, each) in KERNELS.items():
        element, rank = ({d: sum(of[row] for row in rows) for d, of in kernels.items()} for rows in (once, each))
        add(name, element, rank, small[name + UNCHECKED])
    for name, variant in STEPPED.items():
        slope = (large[variant] - small[variant] * more / gradients) / (larger - elements * more / gradients)
        signs = kernels["h100"][SIGNS_RANK] / 4 if "signsgd" in name else 0.0
        add(name, {"h100": max(0.0, slope)}, {"h100": signs}, small[variant])
    return found


def content() -> dict[str, Any]:
    """What the package's file has, rounded to three digits."""
    about = json.loads((RESULTS / STEPS).read_text())["about"]

    def rounded(value: Any) -> Any:
        return {name: rounded(of) for name, of in value.items()} if isinstance(value, dict) else float(f"{value:.3g}")

    source = {
        "kernels": {d: f"benchmarks/results/{file}" for d, file in RUNS.items()},
        "bandwidth": "NVIDIA data sheets",
    }
    steps = f"benchmarks/results/{STEPS}: {about['device']}, commit {about['commit']}"
    return {"source": source | {"steps": steps}, "gpus": DATA_SHEETS, "methods": rounded(methods())}


def main() -> None:
    parser = Parser("devices", __doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    options, found = parser.parse_args(), content()
    for name, costs in found["methods"].items():
        print(f"{name:40} {1e6 * costs['gradient']:6.1f} us a gradient, ps an element: {costs['element']}")
    if options.write:
        write_json(FILE, found)


if __name__ == "__main__":
    main()
