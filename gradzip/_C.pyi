from typing import Any

# The kernels of csrc/kernels.h, over addresses and sizes; only gradzip.ops calls them, and it checks the arguments.
def __getattr__(name: str) -> Any: ...
