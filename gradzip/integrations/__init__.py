"""Adapters for libraries that own the training loop. Each module needs its library, and is imported when it is used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import accelerate, lightning, transformers

__all__ = ["accelerate", "lightning", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module(f".{name}", __name__)
