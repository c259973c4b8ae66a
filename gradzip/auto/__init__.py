"""A compressor that measures, and chooses: uncompressed, in 16 bits, or the fastest of the allowed methods.

`method` is the compressor, `search` what it does over the steps of a training, `plans` what it chooses among.
"""

from .method import Auto

__all__ = ["Auto"]
