"""The exception that decoders raise."""

from __future__ import annotations


class PayloadError(ValueError):
    """A payload that is truncated, corrupt, or was written by another method, configuration or version."""
