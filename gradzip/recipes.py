"""Recipes: a method and an optimizer that fit each other and the length of a training run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from .memory.names import innermost, original
from .methods.base.exempt import EMBEDDINGS
from .methods.block_float import BlockFloat
from .methods.momentum import Momentum
from .methods.phases import Phases
from .methods.quantize import QSGD
from .methods.signs import SignSGD
from .optim.adamw import AdamW


def adamw(
    model: torch.nn.Module,
    total_steps: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    *,
    params: Iterable[Any] | None = None,
    **options: Any,
) -> tuple[Phases, AdamW]:
    """The method and the optimizer of AdamW with compressed momenta, after a compressed warm-up.

    AdamW's second moment remembers M = 1 / (1 - beta2) steps, and stands still while momenta are compressed:

        warm-up     the first max(total_steps / 5, M) steps: QSGD, and in the last 2 M of them integers of 4 bits, so
                    that the second moment is that of gradients
        momenta     all others: signs of momenta
        embeddings  integers of 4 bits in place of signs: a row whose token comes after the warm-up has no second
                    moment by then, and would never train

    Args:
        model: before or after it is wrapped. The weights of its `Embedding` and `EmbeddingBag` modules are embeddings,
            unless another module shares them: an output layer has gradients for all rows.
        total_steps: of the optimizer.
        lr, betas: of AdamW.
        params: of the optimizer, as param groups; None for all of the model.
        options: others of `gradzip.optim.AdamW`.

    Raises:
        ValueError: there are fewer than 2 M steps.

    >>> import gradzip, torch
    >>> model = torch.nn.Sequential(torch.nn.Embedding(4096, 64), torch.nn.Linear(64, 4096))
    >>> method, optimizer = gradzip.recipes.adamw(model, total_steps=1000, lr=0.004)
    >>> list(method.phases), list(method.exempt)
    ([0, 160, 200], ['(^|\\\\.)0\\\\.weight$'])
    """
    memory = round(1 / (1 - betas[1]))
    if total_steps < 2 * memory:
        raise ValueError(
            f"recipes.adamw: got total_steps = {total_steps} with betas = {betas}, expected at least {2 * memory}: the "
            f"second moment is learnt in the first {memory} or more; lower beta2, or train longer"
        )
    warmup = max(total_steps // 5, memory)
    integers = BlockFloat(bits=4, rounding="nearest")
    phases = {0: QSGD(), max(warmup - 2 * memory, 0): integers, warmup: Momentum(SignSGD(majority=False), betas[0])}
    method = Phases(phases, tuple(rf"(^|\.){re.escape(name)}$" for name in _embeddings(model)))
    return method, AdamW(model.parameters() if params is None else params, lr=lr, betas=betas, **options)


def _embeddings(model: torch.nn.Module) -> list[str]:
    """The names, as front ends have them, of embeddings that no output layer shares: it has gradients for all rows."""
    model = innermost(model)
    weights: dict[bool, set[int]] = {True: set(), False: set()}
    for module in model.modules():
        weights[isinstance(module, EMBEDDINGS)].update(map(id, module.parameters(recurse=False)))
    late = weights[True] - weights[False]
    return [original(name) for name, parameter in model.named_parameters() if id(parameter) in late]
