"""A compressor that measures its job, and chooses a method: none, 16 bits or an allowed one.

`method` has the compressor, `search` the steps by which it chooses.
"""

from .method import Auto

__all__ = ["Auto"]
