"""What benchmarks/scale compares: variants by the specs of their methods, models, links."""

from __future__ import annotations

import gradzip

REDUCED = ("none", "fp16", "block-float", "acpsgd")  # their bytes do not grow with the number of ranks
GATHERED = ("qsgd", "topk", "fft-range", "signsgd")
GATHER, SCATTER, AUTO = "gather", "scatter_reduce", "auto"
VARIANTS = (*REDUCED, *(f"{name}:exchange={exchange}" for name in GATHERED for exchange in (GATHER, SCATTER, AUTO)))
PROJECTED = (*REDUCED, f"qsgd:exchange={GATHER}", f"qsgd:exchange={SCATTER}")

MODELS = {"resnet50": "ResNet-50", "bert-large": "BERT-large", "gpt2-xl": "GPT-2 XL", "llama-7b": "LLaMA 7B"}
GBITS = (10, 100, 400)  # of a rank's link
RANKS = (64, 1024)


def with_exchange(variant: str, exchange: str) -> str:
    """The variant with another exchange."""
    return f"{variant.partition(':exchange=')[0]}:exchange={exchange}"


def label(variant: str) -> str:
    """Name a variant for people."""
    if variant in ("none", "fp16"):
        return {"none": "fp32", "fp16": "fp16"}[variant]
    _, _, exchange = variant.partition(":exchange=")
    return f"{type(gradzip.parse(variant)).__name__}({exchange and f'exchange={exchange!r}'})".replace("'", '"')
