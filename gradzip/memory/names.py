"""Names of states: one compressor may serve several models, whose parameters may have equal names."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class StateNames:
    """The parameters that a compressor serves, by the prefix and the name under which their states are kept.

    A copy of the compressor starts with none.
    """

    def __init__(self) -> None:
        self._models: dict[str, dict[str, ref[Any]]] = {}  # prefix -> name -> parameter

    def __reduce__(self) -> tuple[type[StateNames], tuple[()]]:
        return StateNames, ()  # a copy serves other parameters

    def taken(self, named: Mapping[str, Any]) -> list[str]:
        """The prefixes under which other parameters have one of these names.

        named: parameters by name.
        """

        def has_another(known: Mapping[str, ref[Any]], name: str, parameter: Any) -> bool:
            other = known[name]() if name in known else None
            return other is not None and other is not parameter

        return [prefix for prefix, of in self._models.items() if any(has_another(of, *pair) for pair in named.items())]

    def add(self, prefix: str, named: Mapping[str, Any]) -> None:
        """Record further parameters of a model."""
        self._models.setdefault(prefix, {}).update((name, ref(parameter)) for name, parameter in named.items())

    def move(self, names: Iterable[str], prefix: str, to: str) -> None:
        """Record the parameters of a model under another prefix."""
        known = self._models[prefix]
        self._models.setdefault(to, {}).update({name: known.pop(name) for name in names if name in known})

    def add_number(self, prefix: str, parameter: Any, placeholder: Any) -> str:
        """Record a parameter that has no name, and return its number as its name.

        placeholder: an object that was recorded in place of the first parameter.
        """
        known = self._models[prefix]
        name = next((name for name, other in known.items() if other() is placeholder), str(len(known)))
        self.add(prefix, {name: parameter})
        return name

    def find(self, parameter: Any) -> tuple[str, str] | None:
        """The prefix and the name of a parameter, if it was recorded."""
        for prefix, named in self._models.items():
            for name, known in named.items():
                if known() is parameter:
                    return prefix, name
        return None

    def names(self) -> set[str]:
        """The names of the states of all parameters so far."""
        return {prefix + name for prefix, named in self._models.items() for name in named}

    def pop_deleted(self) -> list[str]:
        """Forget the parameters that no longer exist. Returns the names of their states."""
        deleted: list[str] = []
        for prefix, named in self._models.items():
            gone = [name for name, parameter in named.items() if parameter() is None]
            deleted += [prefix + name for name in gone]
            for name in gone:
                del named[name]
        return deleted


def prefixes(word: str, group: str = "") -> Iterator[str]:
    """The prefixes of the states of a compressor's models, in the order in which models get them.

    Args:
        word: for all but the first: "model" gives "model1.", "model2." and so on.
        group: start of all prefixes. Models of different groups are numbered separately: a rank may be in one only.
    """
    return itertools.chain([group], (f"{group}{word}{i}." for i in itertools.count(1)))


def original(name: str) -> str:
    """The name of a parameter in the model that `torch.compile` has compiled."""
    return name.replace("_orig_mod.", "")


def bare(model: nn.Module) -> nn.Module:
    """The model that `torch.compile` has compiled, or the model itself."""
    original: nn.Module = getattr(model, "_orig_mod", model)
    return original


def innermost(model: nn.Module) -> nn.Module:
    """The model that DDP and `torch.compile` have wrapped, or the model itself."""
    inner = model.module if isinstance(model, DistributedDataParallel) else bare(model)
    return model if inner is model else innermost(inner)


def moved(known: Iterable[str], names: Mapping[str, str | None]) -> set[str]:
    """Known names, of which some become others, by name; None: they are known no longer."""
    return {to for name in known if (to := names.get(name, name)) is not None}


def renamed(loaded: Collection[str], names: Set[str]) -> dict[str, str]:
    """The names of a model's states, by the names of loaded states: these have a prefix more, or less, for all.

    None if that is not so, or not in one way alone.
    """
    found: set[tuple[tuple[str, str], ...]] = set()
    first = min(loaded)
    for name in names:
        more, less = first.removesuffix(name), name.removesuffix(first)
        pairs: dict[str, str] = {}
        if more != first and more.endswith("."):
            pairs = {other: other.removeprefix(more) for other in loaded if other.startswith(more)}
        elif less != name and less.endswith("."):
            pairs = {other: less + other for other in loaded}
        if len(pairs) == len(loaded) and names >= set(pairs.values()):
            found.add(tuple(sorted(pairs.items())))
    return dict(found.pop()) if len(found) == 1 else {}
