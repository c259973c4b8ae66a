"""Bytes that runs of a study send to other ranks, with 4 and 16 ranks, from what they handed to collectives.

Which collectives a run has handed its bytes to is in its record. Of older runs without that, it is counted: some steps
of each phase of the method, with gradients of the network's shapes, in a `LocalGroup`. Payloads of some methods depend
on the gradients, so the rest of the run's own bytes is added: gathered, it goes to all other ranks. Runs of `GradiVeQ`
that compress samples cannot be counted so, as votes end their phases.

  python -m benchmarks.convergence.wire --write    writes benchmarks/results/wire.json, from those of all studies
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import torch

import gradzip
from benchmarks.common.arguments import Parser
from benchmarks.common.local_steps import local_steps
from benchmarks.common.results import RESULTS, ResultsError, write_json
from benchmarks.convergence.handed import Bytes, Counts
from benchmarks.convergence.recipes import compressor, is_text
from benchmarks.convergence.results import Results, Row, rows
from gradzip.methods.spec import unparse
from models import MODELS

FILE = RESULTS / "wire.json"
RANKS = (4, 16)
COUNTED = 4  # ranks of the `LocalGroup`
SAMPLES = re.compile(r"\bgradiveq\b.*\bsampling=")  # methods that hand their samples to collectives of their own
STEPS = 2  # counted of each phase: those of ACP-SGD differ


class Phase(NamedTuple):
    """A part of a run: so many averages of gradients, or of differences, by one method."""

    method: gradzip.Compressor
    times: int


def phases(method: str, per_epoch: int, epochs: int) -> tuple[list[Phase], list[Phase]]:
    """The phases of a run that average gradients, and those that average differences of local steps."""
    steps, (local, _) = per_epoch * epochs, local_steps(method)
    made = compressor(method, steps)
    of_step = dict(made.phases) if isinstance(made, gradzip.Phases) else {0: made}
    for begin, of_phase in list(of_step.items()):
        if isinstance(of_phase, gradzip.Momentum) and of_phase.warmup_steps:
            assert isinstance(of_phase.warmup_steps, int)
            after = replace(of_phase, warmup_steps=0)
            of_step |= {begin: gradzip.NoCompression(), begin + of_phase.warmup_steps: after}
    *_, last = begins = sorted(of_step)
    found = [Phase(of_step[begin], end - begin) for begin, end in pairwise([*begins, steps])]
    if local is None:
        return found, []
    ends = [end for end in range(per_epoch, steps + 1, per_epoch) if end > last]  # an exchange at each, before a test
    exchanges = sum(-(-(end - max(last, end - per_epoch)) // local.every) for end in ends)
    return found[:-1], [Phase(of_step[last], exchanges)]


def exempt_of(method: str) -> tuple[str, ...]:
    """The rules of the parameters that the last phase of a method leaves out."""
    made = compressor(method, 1000)
    return tuple(made.exempt) if isinstance(made, gradzip.Phases) else ()


def parameters(network: str, number: int) -> dict[str, torch.Tensor]:
    """Gradients of a network with so many parameters, by name: random numbers."""
    build = MODELS[network].build
    if is_text(network):
        one, two = (sum(p.numel() for p in build(vocabulary, 128).parameters()) for vocabulary in (1, 2))
        made = build(1 + (number - one) // (two - one), 128)
    else:
        made = build(3, 10)
    found = {name: torch.randn(p.shape) for name, p in made.named_parameters()}
    assert sum(gradient.numel() for gradient in found.values()) == number
    return found


@functools.cache
def counted(network: str, number: int, methods: tuple[str, ...], exempt: tuple[str, ...], ranks: int) -> list[Bytes]:
    """Bytes of a step of each of these methods, the phases of a run."""
    torch.manual_seed(0)
    gradients = parameters(network, number)
    made: gradzip.Compressor = gradzip.parse(methods[0])
    if len(methods) > 1:
        of_step = {STEPS * i: gradzip.parse(method) for i, method in enumerate(methods)}
        made = gradzip.Phases(of_step, exempt=exempt)
    group, found = gradzip.LocalGroup(made, ranks), []
    for _ in methods:
        for clone in group.compressors:
            clone.traffic = Counts()
        for _ in range(STEPS):
            group.step([gradients] * ranks)
        found.append(Bytes.of(group.compressors[0].traffic.handed, ranks, STEPS))
    return found


def on_the_wire(row: Row, settings: Mapping[str, Any], ranks: int, packed: bool = False) -> float:
    """Bytes that a rank sends to others in the run of a method, with so many ranks.

    packed: with QSGD as on a GPU, where its integers are not coded. It is counted in each case.

    Raises:
        ResultsError: the run has not counted what votes of `GradiVeQ` decide.
    """
    if not packed and all(record.handed for record in row.records):
        return fmean(Bytes.of(record.handed, settings["workers"]).on_the_wire(ranks) for record in row.records)
    if SAMPLES.search(row.method):
        raise ResultsError(f"{row.method}: got a run without counts by collective, expected one of today: repeat it")
    network, workers, number = settings["network"], settings["workers"], row.records[0].parameters
    exempt = exempt_of(row.method)
    handed = wire = 0.0
    gathers = False
    for of_kind in phases(row.method, settings["steps"], settings["epochs"]):
        specs = tuple(text(phase.method, packed) for phase in of_kind)
        if not specs:
            continue
        mine, others = (counted(network, number, specs, exempt, size) for size in (workers, COUNTED))
        handed += sum(phase.times * one.handed for phase, one in zip(of_kind, mine))
        wire += sum(phase.times * one.on_the_wire(ranks) for phase, one in zip(of_kind, others))
        gathers |= any(one.of_all > 0.01 * one.handed for one in others)
    share = ranks - 1 if gathers else wire / handed
    return wire if packed else wire + share * (row.payload_bytes[-1] - handed)


def text(method: gradzip.Compressor, packed: bool = False) -> str:
    """A method as `gradzip.parse` reads it: with a schedule of theta, at its first value."""
    if packed and isinstance(method, gradzip.QSGD):
        method = replace(method, coding="packed")
    theta = getattr(method, "theta", None)
    if isinstance(theta, gradzip.StepSchedule):
        method = replace(method, theta=theta(0))
    return unparse(method)


def all_rows() -> Iterator[dict[str, Any]]:
    """The runs of all studies."""
    for path in sorted(RESULTS.glob("convergence_*.json")):
        results = Results({}, path)
        results.resume()
        for name, settings in results.recipes.items():
            for row in rows(results, name) if settings["workers"] > 1 else ():
                if row.payload_bytes:
                    on_a_gpu = re.search(r"\bqsgd\b(?!.*scatter)", row.method) and not SAMPLES.search(row.method)
                    yield {
                        "study": path.name, "recipe": name, "method": row.method,
                        "wire_bytes": {ranks: round(on_the_wire(row, settings, ranks)) for ranks in RANKS},
                        "on_a_gpu": {
                            ranks: round(on_the_wire(row, settings, ranks, packed=True))
                            for ranks in (RANKS if on_a_gpu else ())
                        },
                    }  # fmt: skip


@functools.cache
def stored() -> dict[tuple[str, str, str], dict[str, dict[str, int]]]:
    """What the file has, by the study's file, the recipe and the method."""
    rows = json.loads(FILE.read_text())["rows"]
    return {tuple(row.pop(key) for key in ("study", "recipe", "method")): row for row in rows}  # type: ignore[misc]


def main() -> None:
    parser = Parser("convergence.wire", __doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    args, found = parser.parse_args(), []
    for row in all_rows():
        print(row, flush=True)
        found.append(row)
    if args.write:
        write_json(FILE, {"rows": found})


if __name__ == "__main__":
    main()
