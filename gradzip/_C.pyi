from typing import Any

# One line per kernel in csrc/bindings.cpp; gradzip.ops checks what goes into them.
def __getattr__(name: str) -> Any: ...
