"""Optimizers for compressed momenta, for sparse averages, for gradients that have momentum already, and Muon."""

from .ada_momentum import AdaMomentum
from .adamw import AdamW
from .dgc_sgd import DGCSGD
from .muon import Muon

__all__ = ["DGCSGD", "AdaMomentum", "AdamW", "Muon"]
