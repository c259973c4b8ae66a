"""Report every few steps how well gradients are compressed: to TensorBoard, or to a function."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import linalg

from ..averaging.session import check_compressor
from ..collectives.routines import Routine
from ..collectives.traffic import Traffic, sent_nbytes
from ..methods.base.compressor import Compressor
from ..methods.base.group import Group
from .replay import recorded, relative_error, replay_group


class Monitor:
    """Reports every few steps the error, the ratio and the residuals of a compressor.

        compressor = gradzip.TopK(theta=0.99)
        if hvd.rank() == 0:
            gradzip.Monitor(SummaryWriter("runs/topk"), every=100).watch(compressor)

    One line starts it, for Horovod, DDP and the compressors of a `LocalGroup`. It sends nothing to other ranks, and
    does not change averages: watch on one rank, or on all with a writer for each.

    In a reporting step it writes, for each compressed parameter (or bucket, of methods that compress buckets as one):

        error           alpha = |x - x^| / |x|, where x is the gradient plus residual, and x^ what peers decode of it.
                        With error feedback, x - x^ is the new residual. This rank repeats the step as a group of one,
                        on a copy of its state.
        ratio           bytes of the gradient for each byte that this rank has sent
        residual_norm   norm of the residual after the step, without the loss scale; methods with error feedback
        clamped         share of the values that a fixed `value_range` has clamped; `FFTRange` and `DCTRange`
        components      d, the number of principal components, on average over the bases; `GradiVeQ`, when compressing

    For `gradzip.outer.LocalSteps`, an exchange of the whole model is a step. It also writes, for each fragment:

        difference_norm norm of this rank's difference between global and local parameters
        agreement       cosine of that and the average of the ranks: 1 if they all change the same

    and totals since the start, ``gradzip/seconds_exposed`` and ``gradzip/seconds_hidden``, that earlier exchanges took.

    The tags are ``gradzip.error/NAME`` and so on. Values that are not finite are left out. When the next step begins,
    totals of the step follow: ``gradzip/error`` over the compressed parameters, ``gradzip/ratio`` over all
    (`Traffic.wire_ratio`), ``gradzip/bytes_sent``, ``gradzip/bytes_wire`` (`Traffic`),
    ``gradzip/compression_seconds``, and ``gradzip/memory_bytes``, what states keep on this rank
    (`gradzip.memory_bytes` knows that before training).

    In other steps the monitor only notes names. Reporting steps compress twice, take memory for some copies of the
    largest gradient and its state, and synchronise a device.

    If the writer or a report fails (out of memory, for example), the monitor warns once and stops, and training goes
    on: an exception in one rank's backward pass would leave the other ranks waiting.

    Args:
        writer: a TensorBoard SummaryWriter or whatever has add_scalar(tag, value, step), or a function with these
            parameters.
        every: steps between reports. The first step is reported.
        prefix: of the tags. Monitors of several compressors can share a writer if each has its own prefix.

    The steps that were seen are counted in `steps`: set it when training resumes from a checkpoint. A step ends when a
    parameter is averaged again.

    >>> import gradzip, torch
    >>> reports = {}
    >>> group = gradzip.LocalGroup(gradzip.TopK(theta=0.75), size=2)
    >>> _ = Monitor(lambda tag, value, step: reports.update({tag: value})).watch(group.compressors[0])
    >>> _ = group.average([torch.eye(64), torch.eye(64)], "w")
    >>> reports["gradzip.error/w"], reports["gradzip.residual_norm/w"]
    (0.0, 0.0)
    """

    def __init__(self, writer: Any, *, every: int = 100, prefix: str = "gradzip") -> None:
        scalar = getattr(writer, "add_scalar", writer)
        if isinstance(writer, type) or not callable(scalar):
            raise TypeError(
                f"Monitor: got the writer {writer!r}, expected a SummaryWriter, or a function of tag, value and step"
            )
        if not (isinstance(every, int) and every >= 1):
            raise ValueError(f"Monitor: got every = {every!r}, expected an integer >= 1")
        self.every = every
        self.prefix = prefix
        self.steps = 0
        self._scalar: Callable[[str, float, int], object] = scalar
        self._compressor: Compressor | None = None
        self._names: set[str] = set()  # of the parameters that the current step has averaged
        self._before = Traffic()  # at the start of the current step
        self._energies = [0.0, 0.0]  # lost and whole, of the current step
        self._ranks = 1  # that average

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of a compressor is not watched, as its clone is not

    def watch(self, compressor: Compressor) -> Compressor:
        """Report on this compressor from now on. Returns it.

        Pass the compressor of the front end, which may be made of methods. Its clones are not watched.

        Raises:
            ValueError: the monitor watches another compressor, or another monitor this one.
        """
        check_compressor(compressor, "Monitor.watch")
        mine = self._compressor is compressor
        if not mine and (compressor.monitor is not None or self._compressor is not None):
            raise ValueError(
                "Monitor.watch: got a compressor and a monitor of which one is in use, expected a monitor of its own "
                "for each compressor; call stop() first"
            )
        compressor.monitor = self
        self._compressor = compressor
        self._names.clear()
        self._before = replace(compressor.traffic)
        return compressor

    def stop(self) -> None:
        """Stop reporting."""
        if self._compressor is not None:
            self._compressor.monitor = None
            self._compressor = None

    # --- called by Group

    def begin(self, group: Group) -> Callable[[Routine], Routine] | None:
        """Note that the average of a group begins.

        Returns what to wrap its routine by, or None if no report is due.
        """
        if not self._names.isdisjoint(group.names):
            self._end_step()
        self._names.update(group.names)
        self._ranks = group.size
        if self.steps % self.every or not group.compressed or group.node_chunks is not None:
            return None
        # Now and not in the step itself: loaded states are checked, and residuals rescaled, before they are copied.
        state = group.begin()
        try:
            alone = replay_group(group.method, dict(zip(group.names, group.gradients)), state)
            energies = alone.energies
        except Exception as error:  # of any kind, such as out of memory: see the docstring of the class
            self._give_up(error)
            return None
        values = {"error": relative_error(*energies)}
        if alone.clamped is not None:
            values["clamped"] = alone.clamped
        if all(map(math.isfinite, energies)):
            self._energies = [total + own for total, own in zip(self._energies, energies)]
        return lambda routine: self._reported(routine, group, sum(g.nbytes for g in group.gradients), values)

    def _reported(self, routine: Routine, group: Group, nbytes: int, values: dict[str, float]) -> Routine:
        """The same routine, and at its end a report."""
        step, sent, memory = self.steps, list[int](), group.method.memory
        average = yield from recorded(routine, lambda collective: sent.append(sent_nbytes(collective)))
        values["ratio"] = nbytes / sum(sent) if sum(sent) else math.nan
        state = memory.states.get(group.name)
        if state is not None and state.residual is not None:
            values["residual_norm"] = linalg.vector_norm(state.residual).item() / memory.loss_scale.value
        if bases := getattr(state, "bases", None):
            values["components"] = sum(map(len, bases)) / len(bases)
        self._write({f".{measure}/{group.name}": value for measure, value in values.items()}, step)
        return average

    # --- called by front ends

    def report(self, values: dict[str, float]) -> None:
        """Report numbers of the current step, by the ends of their tags, if it is a reporting one."""
        if self.steps % self.every == 0:
            self._write(values, self.steps)

    # --- reports

    def _end_step(self) -> None:
        assert self._compressor is not None
        now, before = self._compressor.traffic, self._before
        if self.steps % self.every == 0:
            step = Traffic(
                now.bytes_sent - before.bytes_sent, now.bytes_dense - before.bytes_dense, now.seconds - before.seconds,
                bytes_wire=now.bytes_wire - before.bytes_wire,
            )  # fmt: skip
            kept = sum(memory.nbytes for memory in {part.memory for part in self._compressor.parts})
            totals = {
                "/ratio": step.wire_ratio(self._ranks), "/bytes_sent": step.bytes_sent, "/bytes_wire": step.bytes_wire,
                "/compression_seconds": step.seconds, "/memory_bytes": kept,
            }  # fmt: skip
            if self._energies[1]:
                totals["/error"] = relative_error(*self._energies)
            self._write(totals, self.steps)
        self.steps += 1
        self._names.clear()
        self._before, self._energies = replace(now), [0.0, 0.0]

    def _write(self, values: dict[str, float], step: int) -> None:
        if self._compressor is None:
            return
        try:
            for tag, value in values.items():
                if math.isfinite(value):
                    self._scalar(f"{self.prefix}{tag}", value, step)
        except Exception as error:  # of the user's own code
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.stop()
        warnings.warn(
            f"Monitor: got {type(error).__name__}: {error} in the report of step {self.steps}, expected none; training "
            "goes on without reports; remove the cause and watch again",
            stacklevel=2,
        )
