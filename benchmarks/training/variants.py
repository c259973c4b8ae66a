"""The variants of benchmarks/training by name, and what people call them."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from dataclasses import MISSING, fields

import gradzip
from benchmarks.common.local_steps import local_steps
from gradzip.methods.base.registry import registered
from gradzip.methods.spec import unparse

STOCK = {
    "compute": "no communication (upper bound)",
    "horovod": "stock Horovod, fp32",
    "horovod-fp16": "Horovod, `Compression.fp16`",
    "ddp": "stock DDP, fp32",
    "ddp-fp16": "DDP, torch's `fp16_compress_hook`",
    "ddp-powersgd": "DDP, torch's `powerSGD_hook`, rank 4",
}
FLOORS = {  # what a front end costs by itself: it averages no gradients
    "horovod-noop": "Horovod, one element of each gradient",
    "ddp-noop": "DDP, a hook that does nothing",
    "fsdp-noop": "FSDP2, shards alone",
}
COMPUTE, FP32, FP16 = "compute", "horovod", "ddp-fp16"  # what other variants are compared with
MODELS = {"alexnet": "AlexNet", "resnet18": "ResNet-18"}  # what people call them, if not by the name
FRONT_ENDS = {"horovod": "Horovod", "ddp": "DDP"}  # each with a launcher of its own
FSDP = "fsdp"  # FSDP2, which torchrun starts, too; without SPEC, its own averages over the replicas


def _required(method: type[gradzip.Compressor]) -> bool:
    """Whether a method has an argument without a default."""
    return any(f.init and f.default is MISSING and f.default_factory is MISSING for f in fields(method))


# Every registered method but `none`, which is stock Horovod, and those that are made of methods to be named.
# ATOMO: by entries, because the singular values of AlexNet's dense layers take 25 s a step.
# GradiVeQ compresses after some steps of sampling. With 8 samples instead of 100 it has fewer components, and sends
# less, than in real training.
ARGUMENTS = {
    "atomo": "atoms=entry", "dct-range": "theta=0.95", "gradiveq": "warmup_steps=0,sample_steps=8,stop=none",
    "qsgd": "coding=packed",
}  # fmt: skip
METHODS = tuple(
    f"{name}:{ARGUMENTS.get(name, '')}".removesuffix(":")
    for name, method in registered().items()
    if name != "none" and not _required(method)
)
DDP_METHODS = ("acpsgd", "auto", "dct-range:theta=0.95", "fft-range", "qsgd:coding=packed", "signsgd", "topk")
FLOOR_METHODS = ("acpsgd", "powersgd", "signsgd", "topk", "block-float", "qsgd", "dct-range", "fft-range")
QUICK = (
    "compute", "horovod", "ddp", "ddp-fp16", "horovod:acpsgd", "horovod:fft-range", "horovod:signsgd", "ddp:acpsgd",
)  # fmt: skip

FFT = "fft-range:error_feedback=false"  # as measured: once the default
SUMMARY = {  # columns of the table in docs/benchmarks.md, lines of its picture: the fastest of these variants
    "fp32": ("horovod", "ddp"),
    "fp16": ("horovod-fp16", "ddp-fp16"),
    "torch's PowerSGD": ("ddp-powersgd",),
    "`ACPSGD()`": ("horovod:acpsgd", "ddp:acpsgd"),
    "`FFTRange(error_feedback=false)`": ("horovod:" + FFT, "ddp:" + FFT),
    "`QSGD(coding=packed)`": ("horovod:qsgd:coding=packed", "ddp:qsgd:coding=packed"),
    "`Auto()`": ("horovod:auto", "ddp:auto"),
    "no communication": ("compute",),
}

SHORTHANDS = {
    "stock": tuple(STOCK),
    "methods": tuple(f"horovod:{spec}" for spec in METHODS),
    "ddp-methods": tuple(f"ddp:{spec}" for spec in DDP_METHODS),
}
SHORTHANDS["all"] = tuple(itertools.chain(*SHORTHANDS.values()))
SHORTHANDS["floor"] = (
    COMPUTE, *(name for front in FRONT_ENDS for name in (f"{front}-noop", *(f"{front}:{s}" for s in FLOOR_METHODS))),
)  # fmt: skip

MOST_WARMUP = 200  # steps before the timed ones that a variant may need


def variant(text: str) -> str:
    """Check a variant or shorthand of a command line. Raises ArgumentTypeError."""
    if text in SHORTHANDS or text in STOCK or text in FLOORS or text == FSDP:
        return text
    front, _, spec = text.partition(":")
    try:
        local, spec = local_steps(text) if front.startswith("local") else (None, spec)
        if not local and front not in (*FRONT_ENDS, FSDP):
            names = ", ".join([*SHORTHANDS, *STOCK, *FLOORS, FSDP])
            raise argparse.ArgumentTypeError(
                f"got {text!r}, expected {names}, horovod:SPEC, ddp:SPEC, fsdp:SPEC or local(every=30):SPEC"
            )
        gradzip.parse(spec)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if least_warmup(text) > MOST_WARMUP:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, which compresses after {least_warmup(text) - 1} steps, expected at most {MOST_WARMUP - 1}; "
            "try gradiveq:warmup_steps=0,sample_steps=8"
        )
    return text


def expanded(texts: Iterable[str]) -> list[str]:
    """Variants without shorthands, each once."""
    return list(dict.fromkeys(itertools.chain(*(SHORTHANDS.get(text, (text,)) for text in texts))))


def front_end(variant: str) -> str:
    """The launcher that runs a variant: "horovod" or "ddp"."""
    return "horovod" if variant.startswith("horovod") else "ddp"


def floor(variant: str) -> str:
    """The variant of the same front end that averages no gradients."""
    return "fsdp-noop" if variant.startswith(FSDP) else f"{front_end(variant)}-noop"


def averages(variant: str) -> bool:
    """Whether a variant averages gradients: replicas are equal then."""
    return variant != COMPUTE and variant not in FLOORS


def compression(variant: str) -> str | None:
    """The spec that does in gradzip what the variant does in each step; None if there is none."""
    if variant.startswith("local"):
        return None
    if ":" in variant:
        return variant.partition(":")[2]
    return {"horovod": "none", "ddp": "none", "fsdp": "none", "horovod-fp16": "fp16", "ddp-fp16": "fp16"}.get(variant)


def least_warmup(variant: str) -> int:
    """Untimed steps until a variant does in every step what it will do in all later ones."""
    if variant == "ddp-powersgd":
        return 3  # the third step is the first that it compresses
    local, _ = local_steps(variant)
    if local:
        return local.every  # the first exchange
    if ":" not in variant:
        return 1
    compressor = gradzip.parse(variant.partition(":")[2])
    begin = max(compressor.phases) if isinstance(compressor, gradzip.Phases) else 0  # of the last phase
    needed = [begin + 1]
    for method in compressor.parts:
        if isinstance(method, gradzip.GradiVeQ):
            samples = 200 if method.sample_steps == "auto" else int(method.sample_steps)  # the most that "auto" takes
            needed.append(begin + method.warmup_steps + samples + 1)
        elif isinstance(method, gradzip.DGC):
            needed.append(begin + method.warmup_steps + 1)
    return max(needed)


def label(variant: str) -> str:
    """Name a variant for people, in Markdown."""
    if named := (STOCK | FLOORS).get(variant):
        return named
    local, spec = local_steps(variant)
    if local:
        return f"every {local.every} steps, `{unparse(gradzip.parse(spec))}`"
    if variant == FSDP:
        return "torch's FSDP2 with replicas, fp32"
    front, _, spec = variant.partition(":")
    arguments = spec.partition(":")[2].replace(",", ", ")
    return f"{FRONT_ENDS.get(front, 'FSDP2')}, `{type(gradzip.parse(spec)).__name__}({arguments})`"


def bandwidth(rate: str) -> str:
    """Spell a rate: 1gbit becomes 1 Gb/s."""
    for unit, spelled in {"gbit": " Gb/s", "mbit": " Mb/s", "kbit": " kb/s"}.items():
        if rate.endswith(unit):
            return rate.removesuffix(unit) + spelled
    return "unshaped loopback"
