"""What `gradzip advise` says about its predictions, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..auto.studies import OPTIMIZERS, SAFE
from .advice import ENOUGH, Advice, Row
from .decision import FP16, FP32, Decision

SHOWN = 3  # methods that are named as faster ones


def recommendation(advice: Advice, rows: Sequence[Row]) -> Iterator[str]:
    """What to use, why, what it costs in accuracy, and what the advice would be with other optimizers."""
    decision = advice.decide(rows, advice.optimizer)
    yield sentence(rows, decision)
    if decision.compresses:
        yield from _accuracy(advice, decision.chosen)
    yield from _local_steps(advice, rows)
    if advice.named:
        return
    if advice.optimizer is None:
        yield (
            f"Without --optimizer, only {' and '.join(SAFE)} are advised: they are for every optimizer. With "
            f"{'; with '.join(_with_optimizers(advice, rows, decision))}."
        )
        return
    yield from _faster(advice, rows, decision)


def sentence(rows: Sequence[Row], decision: Decision) -> str:
    """The recommendation, in one sentence."""
    by_name = {row.method: row for row in rows}
    row = by_name[decision.chosen]
    if decision.compresses:
        return (
            f"Use {row.method}: {_ms(row.seconds)} a step, {row.times_fp32:.2f} times as fast as fp32 and "
            f"{row.times_fp16:.2f} times as fast as fp16, at {row.share_of_ideal:.0%} of the ideal. It saves "
            f"{decision.gain:.0%} of the faster one's step; the margin of error is {decision.margin:.0%}."
        )
    takes = f"{_ms(row.seconds)} a step, {row.share_of_ideal:.0%} of the ideal"
    name = _name(decision.stock)
    if decision.fastest is None:
        return f"Do not compress: use {name}. It takes {takes}."
    if decision.gain > 0:
        return (
            f"Within the noise: do not compress, use {name}. It takes {takes}; {decision.fastest} saves "
            f"{decision.gain:.1%} of the step, less than the margin of error of {decision.margin:.0%}."
        )
    other = by_name[decision.fastest]
    return (
        f"Do not compress: use {name}. It takes {takes}; {other.method}, the fastest that may be advised, takes "
        f"{_ms(other.seconds)}."
    )


def notes(advice: Advice, cycle_time: str | None, cores: int) -> Iterator[str]:
    """Further remarks. cycle_time: of Horovod, if it is set. cores: of this machine."""
    link, number = advice.link, len(advice.step.layers)
    if link.spread > 0.2:
        yield f"Ranks differ in speed by {link.spread:.0%}; the slowest one counts."
    if variations := advice.variations():
        listed = ", ".join(f"{method} {times:.1f}" for method, times in variations.items())
        yield (
            f"Warning: times varied while they were measured, by factors of {listed}. The fastest count; measure again "
            "when the machine is idle."
        )
    for method, compressor in advice.methods.items():
        if (beta := compressor.averaged_momentum) is not None:
            study = advice.study(method, "adamw")
            trained = f" In the study with AdamW, {study.method} averaged the whole training." if study else ""
            yield (
                f"{method}: the step is one after the warm-up.{trained} The optimizer must have the momentum {beta}, "
                "and AdamW must be gradzip.optim.AdamW."
            )
    few_cores = link.background > 0.02 if link.background else cores <= 4
    if advice.front_end == "horovod" and cycle_time is None and number >= 40 and few_cores:
        yield (
            f"With {number} parameters and few cores, Horovod's cycles cost time: start the job with horovodrun "
            "--cycle-time-ms 20, and measure."
        )


def _accuracy(advice: Advice, method: str) -> Iterator[str]:
    """What a method costs in accuracy, with each of the optimizers."""
    for optimizer in advice.optimizers:
        study, name = advice.study(method, optimizer), OPTIMIZERS[optimizer]
        if study is not None:
            ends = study.difference if study.difference.startswith("as") else f"{study.difference} than fp32"
            advised = "" if study.holds else ". It is not advised with this optimizer"
            yield f"With {name}, {method} ends {ends} ({study.conditions}){advised}."
        elif advice.optimizer is not None:
            yield f"With {name}, no study has measured what {method} costs in accuracy."
    yield "A study is no proof: train your network with and without, and compare."


def _local_steps(advice: Advice, rows: Sequence[Row]) -> Iterator[str]:
    """What local steps need, if no method that may be advised reaches `ENOUGH` with averages of every step."""
    local = advice.local_steps(rows)
    if local is None:
        return
    method, found = local
    yield (
        f"No method that may be advised reaches {ENOUGH:.0%} of the ideal when every step averages. With local steps, "
        f"gradzip.outer.LocalSteps(..., every={found.every(ENOUGH)}) and {_name(method)} do: an exchange sends "
        f"{found.nbytes / 1e6:.2f} MB in {_ms(found.seconds)}, and {found.hidden_by} or more steps could hide it. "
        "Local steps change what is learned: train with and without, and compare."
    )


def _with_optimizers(advice: Advice, rows: Sequence[Row], known: Decision) -> Iterator[str]:
    """For each group of optimizers with the same advice: "--optimizer sgd: use acpsgd, 487 ms a step"."""
    seconds = {row.method: row.seconds for row in rows}
    of: dict[str, list[str]] = {}
    for optimizer in OPTIMIZERS:
        of.setdefault(advice.decide(rows, optimizer).chosen, []).append(optimizer)
    for method, optimizers in of.items():
        what = "the same" if method == known.chosen else f"use {_name(method)}, {_ms(seconds[method])} a step"
        yield f"--optimizer {' or '.join(optimizers)}: {what}"


def _faster(advice: Advice, rows: Sequence[Row], decision: Decision) -> Iterator[str]:
    """The methods that are faster than what is advised, and why they are not advised."""
    assert advice.optimizer is not None
    allowed = {FP32, FP16, *advice.allowed(advice.optimizer)}
    chosen = next(row for row in rows if row.method == decision.chosen)
    faster = [row for row in rows if row.method not in allowed and row.seconds < chosen.seconds]
    if not faster:
        return
    listed = []
    for row in faster[:SHOWN]:
        study = advice.study(row.method, advice.optimizer)
        listed.append(f"{row.method} {_ms(row.seconds)} ({'not measured' if study is None else study.difference})")
    more = f" and {len(faster) - SHOWN} more" if len(faster) > SHOWN else ""
    yield (
        f"Faster, but not advised with {OPTIMIZERS[advice.optimizer]} for their accuracy: {', '.join(listed)}{more}. "
        "--methods compares those that you name."
    )


def _name(method: str) -> str:
    return "fp32" if method == FP32 else method


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"
