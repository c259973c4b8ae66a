"""Optimizers for compressed momenta, for gradients that have momentum already, and Muon."""

from .adamw import AdamW
from .dgc_sgd import DGCSGD
from .muon import Muon

__all__ = ["DGCSGD", "AdamW", "Muon"]
