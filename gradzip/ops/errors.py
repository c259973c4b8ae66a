"""The exception that decoders raise."""

from __future__ import annotations


class PayloadError(ValueError):
    """A payload that is truncated, corrupt, or was written by another method, configuration or version.

    Args:
        index: which one of several payloads, if a function took several.
    """

    def __init__(self, message: str = "", index: int | None = None) -> None:
        super().__init__(message)
        self.index = index
