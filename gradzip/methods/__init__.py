"""The methods. Each file registers its own; their classes are public in `gradzip`."""

import importlib
import pkgutil

from .base.registry import REGISTRY

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

globals().update({method.__name__: method for method in REGISTRY.values()})
__all__ = sorted(method.__name__ for method in REGISTRY.values())
