"""Ranges of a training step, which `torch.profiler` shows by name.

``gradzip::encode``: methods up to their first collectives. ``gradzip::exchange``: the host waits for collectives.
``gradzip::decode``: methods from there on. ``gradzip::commit``: optimizers are told, and states are completed or rolled
back.
"""

from torch._C._profiler import _RecordFunctionFast

# A context. Unlike `torch.profiler.record_function`, it costs next to nothing while no profiler runs.
Range = _RecordFunctionFast
