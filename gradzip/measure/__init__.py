"""Measure what the cost model needs: the link, methods on a gradient, and a training step."""

from .link import measure_link
from .method import Measurement, measure_gradients, measure_method
from .step import measure_step

__all__ = ["Measurement", "measure_gradients", "measure_link", "measure_method", "measure_step"]
