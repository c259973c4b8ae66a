"""Parameters that a compressor leaves uncompressed, by the modules that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...memory.names import innermost, original

Kind = str | type[nn.Module]

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
KINDS = ("1d", "embedding", "head")


def exempt_names(model: nn.Module, kinds: Sequence[Kind]) -> tuple[frozenset[str], dict[str, Tensor]]:
    """The names of the trained parameters of some kinds; all trained ones by name, none if one has no shape yet.

    Raises:
        TypeError: model is no module.
        ValueError: an unknown kind.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"exempt_modules: got {type(model).__name__}, expected the model")
    for kind in kinds:
        if not (kind in KINDS or (isinstance(kind, type) and issubclass(kind, nn.Module))):
            raise ValueError(
                f"exempt_modules: got {kind!r}, expected {', '.join(map(repr, KINDS))} or classes of modules"
            )
    model = innermost(model)
    found = {id(parameter) for kind in kinds for parameter in _of_kind(model, kind)}
    trained: dict[str, Tensor] = {original(name): p for name, p in model.named_parameters() if p.requires_grad}
    names = frozenset(name for name, p in trained.items() if id(p) in found)
    return names, {} if any(map(is_lazy, trained.values())) else trained


def check_exempt(what: str, compressed: float, exempt: float) -> None:
    """Raise ValueError if exemptions alone are why nothing is compressed.

    Args:
        what: the function of the user's, for errors.
        compressed, exempt: numbers of parameters, as of `Compressor.count_compressed`.
    """
    if exempt and not compressed:
        raise ValueError(
            f"{what}: got exemptions of all parameters that the method compresses, expected some that are compressed: "
            "exempt fewer kinds, or use NoCompression() to compress none"
        )


def _of_kind(model: nn.Module, kind: Kind) -> Iterator[Tensor]:
    if kind == "1d":
        yield from (parameter for parameter in model.parameters() if parameter.dim() < 2)
    elif kind == "head":
        yield from () if (head := _head(model)) is None else head.parameters()
    else:
        classes = EMBEDDINGS if isinstance(kind, str) else kind
        for module in model.modules():
            if isinstance(module, classes):
                yield from module.parameters(recurse=False)


def _head(model: nn.Module) -> nn.Module | None:
    """The output layer: that of a language model of Transformers, or else the last linear layer or convolution."""
    if (layer := getattr(model, "get_output_embeddings", lambda: None)()) is not None:
        return layer
    return next((module for module in reversed([*model.modules()]) if isinstance(module, _LAYERS)), None)
