"""Front end for local steps: ranks train alone for some steps, and then average what has changed.

`LocalSteps` runs in each rank of a job, `LocalWorkers` runs many workers in one process, for studies.
"""

from .exchange import LocalWorkers
from .global_copy import nesterov
from .local_steps import LocalSteps

__all__ = ["LocalSteps", "LocalWorkers", "nesterov"]
