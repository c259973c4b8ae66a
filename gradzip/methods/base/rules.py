"""Rules that select parameters by name or shape."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

Predicate = Callable[[str, torch.Size], bool]
Rule = str | re.Pattern[str] | Predicate


def compiled(rule: Rule, what: str) -> re.Pattern[str] | Predicate:
    """A rule to ask. Raises ValueError for what is none. what: the class that takes it, for errors."""
    if isinstance(rule, (str, re.Pattern)):
        try:
            return re.compile(rule)
        except re.error as error:
            raise ValueError(f"{what}: got the regular expression {rule!r}: {error}") from None
    if not callable(rule):
        raise ValueError(f"{what}: got the rule {rule!r}, expected a regular expression or predicate(name, shape)")
    return rule


def matches(rule: re.Pattern[str] | Predicate, name: str, shape: torch.Size) -> bool:
    return rule.search(name) is not None if isinstance(rule, re.Pattern) else rule(name, shape)


def text(rule: Rule) -> str:
    """A rule's part of the digest. Predicates count by name: their repr may hold an address."""
    if isinstance(rule, str):
        return rule
    return rule.pattern if isinstance(rule, re.Pattern) else getattr(rule, "__qualname__", type(rule).__qualname__)
