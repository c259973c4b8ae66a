"""Measure what the cost model needs: the link, and methods on gradients."""

from .link import measure_link
from .method import Measurement, measure_gradients, measure_method

__all__ = ["Measurement", "measure_gradients", "measure_link", "measure_method"]
