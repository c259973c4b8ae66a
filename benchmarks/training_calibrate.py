"""What a cost model needs to predict the steps of benchmarks/training.py: profiles of models, links, codecs.

All times are in seconds. The names are those of the classes of gradzip.cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

import gradzip
from gradzip import measure
from gradzip.engines.base import Engine
from training_variants import least_warmup


def profile(network: nn.Module, step: Callable[[], object]) -> dict[str, Any]:
    """The fields of a gradzip.cost.Step. step: trains a step without communication."""
    return asdict(measure.measure_step(network, step))


def link(engine: Engine) -> dict[str, Any]:
    """The fields of a gradzip.cost.Link. All ranks must call it."""
    return asdict(measure.measure_link(engine))


def codec(spec: str, gradients: Mapping[str, Tensor], ranks: int) -> list[dict[str, Any]]:
    """What a method does to each layer: the fields of a gradzip.cost.Compressed, and the error."""
    steps = max(4, least_warmup(f"ddp:{spec}") + 2)
    measured = measure.measure_gradients(gradzip.parse(spec), gradients, ranks, repeats=steps)
    return [{"name": name, **asdict(found.compressed), "error": found.error} for name, found in measured.items()]
