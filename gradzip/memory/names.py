"""Names of states: one compressor may serve several models, whose parameters may have equal names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any
from weakref import ref


class StateNames:
    """The parameters that a compressor serves, by the prefix and the name under which their states are kept.

    A copy of the compressor starts with none.
    """

    def __init__(self) -> None:
        self._models: dict[str, dict[str, ref[Any]]] = {}  # prefix -> name -> parameter

    def __reduce__(self) -> tuple[type[StateNames], tuple[()]]:
        return StateNames, ()  # a copy serves other parameters

    def prefix(self, named: Mapping[str, Any], word: str, group: str = "") -> str:
        """The prefix for the states of a model, whose parameters are recorded under it.

        The first model with a name gets no prefix for it; a later model of the same parameters gets the same prefix.
        The name of a deleted parameter stays reserved, because ranks may delete it at different times.

        Args:
            named: parameters by name.
            word: for the prefixes of further models: "model" gives "model1.", "model2." and so on.
            group: start of all prefixes. Models of different groups are numbered separately: a rank may be in one only.
        """

        def fits(known: Mapping[str, ref[Any]]) -> bool:
            return all(name not in known or known[name]() is parameter for name, parameter in named.items())

        candidates = itertools.chain([group], (f"{group}{word}{i}." for i in itertools.count(1)))
        prefix = next(p for p in candidates if fits(self._models.get(p, {})))
        self.add(prefix, named)
        return prefix

    def add(self, prefix: str, named: Mapping[str, Any]) -> None:
        """Record further parameters of a model."""
        self._models.setdefault(prefix, {}).update((name, ref(parameter)) for name, parameter in named.items())

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

    def deleted(self) -> list[str]:
        """The names of the states of parameters that no longer exist."""
        models = self._models.items()
        return [prefix + name for prefix, named in models for name, parameter in named.items() if parameter() is None]
