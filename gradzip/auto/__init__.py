"""A compressor that measures its job, and chooses a method for each parameter: none, 16 bits or an allowed one.

`method` has the compressor, `search` the steps by which it chooses, `assignments` what it chooses among.
"""

from .method import Auto

__all__ = ["Auto"]
