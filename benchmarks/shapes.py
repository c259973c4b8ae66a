"""Gradients of well-known models as matrices n x m for low-rank methods: grad.reshape(shape[0], -1)."""

from gradzip.models import MODELS


def matrix_shapes(model: str) -> list[tuple[int, int]]:
    """The shapes (n, m) of the parameters of at least two dimensions. model: a name in gradzip.models.MODELS."""
    return [(p.shape[0], p.numel // p.shape[0]) for p in MODELS[model]() if len(p.shape) > 1]
