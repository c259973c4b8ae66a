"""What keeps `torch.cuda.graph` from capturing a step of a method, found on the stand-in for a device. Needs no GPU.

A captured step is replayed without Python: the same launches with the same arguments. Found are:

  what the host reads   It waits for the device, which capture forbids. What the host has not read, no argument of a
                        launch and no choice between launches depends on.
  random keys           Arguments of launches. Unless a kernel also reads how many replays there were, a replay draws
                        the numbers of the captured step again.
  two steps in turns    Every second step queues the same operations: a graph of two steps has both.
  other work            Steps that queue other operations than the step before, or write more or less.

A step has two parts. The hooks queue all work up to the first collective of each bucket. The end of the step is what
follows these collectives.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor

import gradzip
from benchmarks.common.arguments import Parser
from benchmarks.common.results import ResultsError, replace_block
from benchmarks.common.tables import markdown
from benchmarks.device_ops.__main__ import PAGE, SMALLEST, ddp_steps, fake_group, future, noise, shapes_of
from benchmarks.device_ops.stand_in import Counts, StandIn, stand_in
from gradzip.collectives import ToHost
from gradzip.collectives.engine import PendingCopy
from gradzip.memory.verdict import Verdict
from gradzip.methods.base.registry import registered

# Steps before those that are compared: the first one has no residuals, and methods with phases compress then.
WARM_UP, COMPARED = 4, 4

# What a ToHost reads, by the module and the function that asks for it.
READ = {
    "gather.opened": "headers of payloads",
    "compressor.with_max_abs": "magnitudes of averages",
}
FINITE = "whether averages are finite"  # of `Verdict`
BETWEEN = "values that decide what follows"  # without a ToHost
KEYS = "random keys"
OTHER_WORK = "other work in each step"
TWO_STEPS = "two steps in turns"

START = "<!-- table: python -m benchmarks.device_ops.capture --write -->\n\n"
HEADER = ("method", "in the hooks", "at the end of the step")
SIZE = 2  # ranks
# Two matrices. A bias is averaged uncompressed with every method, as `none` averages these.
SHAPES = {name: shape for name, shape in shapes_of(SMALLEST).items() if len(shape) > 1}


@dataclass(frozen=True)
class Obstacles:
    """What keeps the parts of a step from being captured. Nothing does if a part has none."""

    hooks: tuple[str, ...]
    end: tuple[str, ...]


class _Part:
    """What a part of the compared steps does."""

    def __init__(self) -> None:
        self.counts: list[Counts] = []  # of each step
        self.asked: Counter[str] = Counter()  # what is read by a ToHost
        self.verdicts = 0  # that the host reads

    def obstacles(self, copies: int) -> tuple[str, ...]:
        """copies: for ToHosts."""
        found = dict.fromkeys(READ[source] for source in READ if self.asked[source])
        if self.verdicts:
            found[FINITE] = None
        if sum(counts.syncs for counts in self.counts) > copies:
            found[BETWEEN] = None
        if any(counts.repeated for counts in self.counts):
            found[KEYS] = None
        work = [(counts.names, counts.written) for counts in self.counts]  # what is read of a payload depends on values
        if work != work[:1] * COMPARED:
            found[TWO_STEPS if work == work[:2] * (COMPARED // 2) else OTHER_WORK] = None
        return tuple(found)


class _Recorder:
    """Records what the parts of a step do, while `recording`."""

    def __init__(self, device: StandIn) -> None:
        self._device = device
        self.hooks, self.end = _Part(), _Part()
        self._part = self.end
        self._copies = 0

    @contextlib.contextmanager
    def hook(self) -> Iterator[None]:
        """The hooks of a step: in place of `Counts.hook`."""
        before, self._part = self._part, self.hooks
        try:
            with self._device.counting() as counts:
                yield
        finally:
            self._part = before
        self.hooks.counts.append(counts)

    @contextlib.contextmanager
    def step(self) -> Iterator[SimpleNamespace]:
        with self._device.counting() as counts:
            yield SimpleNamespace(hook=self.hook)
        self.end.counts.append(counts)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        made, copied = ToHost.__init__, PendingCopy.result

        def note_read(request: ToHost, *arguments: Any, **named: Any) -> None:
            source = sys._getframe(1).f_code
            name = f"{Path(source.co_filename).stem}.{source.co_name}"
            if name != "fusion._join":  # joined with others, each of which is noted
                assert name in READ, f"{name} asks for a ToHost: say in READ what it reads"
                self._part.asked[name] += 1
            made(request, *arguments, **named)

        def note_copy(pending: PendingCopy) -> Any:
            self._copies += 1
            return copied(pending)

        def note_verdict(verdict: Verdict) -> bool:
            self._part.verdicts += 1
            return not math.isfinite(verdict.number.host)

        with (
            mock.patch.object(ToHost, "__init__", note_read),
            mock.patch.object(PendingCopy, "result", note_copy),
            mock.patch.object(Verdict, "__bool__", note_verdict),
        ):
            yield

    def obstacles(self) -> Obstacles:
        return Obstacles(self.hooks.obstacles(0), self.end.obstacles(self._copies))


def tensors_of(compressor: gradzip.Compressor) -> dict[tuple[str, str], Tensor]:
    """The tensors of all states, by parameter and field."""
    return {
        (name, field): value
        for name, state in compressor.states.items()
        for field, value in vars(state).items()
        if isinstance(value, Tensor)
    }


def obstacles(compressor: gradzip.Compressor) -> Obstacles:
    """What keeps steps under DDP from being captured, once the method compresses."""
    # Methods refuse to be captured that cannot be.
    taken = mock.patch.object(type(compressor), "capture_needs", None)
    with taken, fake_group(SIZE), mock.patch("gradzip.ddp.Future", future), stand_in() as device:
        run = ddp_steps(compressor, SHAPES, SIZE, device)
        recorder = _Recorder(device)

        def step(number: int) -> None:
            gradients = {name: device.tensor(noise(s.numel(), number).view(s)) for name, s in SHAPES.items()}
            with recorder.step() as counts:
                run(gradients, counts)

        for number in range(WARM_UP):
            step(number)
        recorder, before = _Recorder(device), tensors_of(compressor)
        with recorder.recording(), device.capturing():
            for number in range(WARM_UP, WARM_UP + COMPARED):
                step(number)
        after = tensors_of(compressor)
    assert all(after.get(key) is value for key, value in before.items()), "a replay reads states where they were"
    return recorder.obstacles()


def methods() -> Iterator[tuple[str, list[str]]]:
    """Specs of the methods that are not made of others, and whose steps do not depend on values, by name.

    The first one has the default arguments, unless some have no default.
    """
    for name, method in registered().items():
        own = gradzip.parse(method.examples[0])
        if method.__module__.startswith("gradzip.") and own.parts == [own] and not own.adapts:
            default = [name] * all(f.default is not MISSING or not f.init for f in fields(method))
            yield name, list(dict.fromkeys([*default, *method.examples]))


def rows_of(specs: list[str]) -> Iterator[tuple[str, Obstacles]]:
    """The first spec, and others whose obstacles are not those of one before."""
    seen: list[Obstacles] = []
    for spec in specs:
        for checks in (True, False):
            found = obstacles(gradzip.parse(spec).skip_nonfinite(checks))
            if found not in seen:
                seen.append(found)
                yield f"`{spec}`" + (", `skip_nonfinite(False)`" if not checks else ""), found


def lines(rows: Iterable[tuple[str, Obstacles]]) -> list[str]:
    """Rows in Markdown, without a header."""
    cells = ([title, *(", ".join(part) or "nothing" for part in (found.hooks, found.end))] for title, found in rows)
    return list(markdown(HEADER, cells, left=len(HEADER)))[2:]


def block() -> str:
    """The text between the marks of docs/gpu.md: a row for each method, and for arguments that change what is found."""
    rows = [row for _, specs in methods() for row in rows_of(specs)]
    return "".join(f"{line}\n" for line in [*markdown(HEADER, [], left=len(HEADER)), *lines(rows)])


def main() -> None:
    parser = Parser("device_ops.capture", __doc__)
    parser.add_argument("--write", action="store_true", help="write the table of docs/gpu.md")
    args = parser.parse_args()
    found = block()
    print(found, end="")
    if args.write:
        try:
            replace_block(PAGE, START, found)
        except ResultsError as error:
            parser.fail(str(error))


if __name__ == "__main__":
    main()
