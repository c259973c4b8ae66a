"""The parameters of well-known networks, from their published architectures, for predictions without the network.

Sources: He et al., Deep Residual Learning, CVPR 2016; Devlin et al., BERT, NAACL 2019; Radford et al., Language Models
are Unsupervised Multitask Learners, 2019; Touvron et al., LLaMA, 2023. Names and shapes are those of torchvision and of
Hugging Face's transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..advice.cost import Layer, Step


@dataclass(frozen=True)
class Parameter:
    """A parameter. work: multiplications of a forward pass that use it, for one sample, on any common scale."""

    name: str
    shape: tuple[int, ...]
    work: float

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


Parameters = Iterator[Parameter]


def step_of(parameters: Sequence[Parameter], seconds: float) -> Step:
    """Estimate a training step. Gradients are ready in reverse order of the parameters.

    The forward pass takes the first third of the step. The time of the backward pass is divided among the parameters by
    their work. Other operations and the optimizer are neglected.

    Args:
        parameters: in the order of the forward pass.
        seconds: of the whole step.
    """
    total = sum(p.work for p in parameters) or 1.0
    layers, done = [], 0.0
    for parameter in reversed(parameters):
        done += parameter.work
        layers.append(Layer(parameter.name, parameter.shape, min(seconds, seconds * (1 + 2 * done / total) / 3)))
    return Step(tuple(layers), seconds)


def _layers(shapes: Mapping[str, tuple[int, ...]], prefix: str = "", uses: int = 1, bias: int | None = 0) -> Parameters:
    """A weight of each shape, and a bias as long as its axis `bias`; None: no bias. uses: products of each element."""
    for name, shape in shapes.items():
        yield Parameter(f"{prefix}{name}.weight", shape, math.prod(shape) * uses)
        if bias is not None:
            yield Parameter(f"{prefix}{name}.bias", (shape[bias],), shape[bias] * uses)


# Networks for images of 224 x 224. A convolution uses its weights at each position of its output.


def _resnet(depths: Sequence[int], bottleneck: bool) -> Parameters:
    def convolution(conv: str, norm: str, outputs: int, inputs: int, kernel: int, size: int) -> Parameters:
        yield from _layers({conv: (outputs, inputs, kernel, kernel)}, uses=size**2, bias=None)
        yield from _layers({norm: (outputs,)}, uses=size**2)

    yield from convolution("conv1", "bn1", 64, 3, 7, 112)
    channels = 64
    for stage, depth in enumerate(depths):
        width, size = 64 << stage, 56 >> stage
        outputs = 4 * width if bottleneck else width
        for block in range(depth):
            name = f"layer{stage + 1}.{block}"
            first = 2 * size if stage and not block else size  # the second convolution of a bottleneck has the stride
            kernels = [(width, channels, 3, size), (width, width, 3, size)]
            if bottleneck:
                kernels = [(width, channels, 1, first), kernels[1], (outputs, width, 1, size)]
            for i, kernel in enumerate(kernels, 1):
                yield from convolution(f"{name}.conv{i}", f"{name}.bn{i}", *kernel)
            if channels != outputs:
                yield from convolution(f"{name}.downsample.0", f"{name}.downsample.1", outputs, channels, 1, size)
            channels = outputs
    yield from _layers({"fc": (1000, channels)})


# All tokens use the same parameters of a transformer, so their number does not change the shares of the work. A lookup
# of an embedding counts as no work. An embedding that is also the output layer is multiplied for every token.


def _bert(layers: int, width: int) -> Parameters:
    square, norm = (width, width), (width,)
    block = {
        "attention.self.query": square, "attention.self.key": square, "attention.self.value": square,
        "attention.output.dense": square, "attention.output.LayerNorm": norm,
        "intermediate.dense": (4 * width, width), "output.dense": (width, 4 * width), "output.LayerNorm": norm,
    }  # fmt: skip
    rows = {"word": 30522, "position": 512, "token_type": 2}
    yield from _layers({f"embeddings.{n}_embeddings": (rows[n], width) for n in rows}, uses=0, bias=None)
    yield from _layers({"embeddings.LayerNorm": norm})
    for i in range(layers):
        yield from _layers(block, f"encoder.layer.{i}.")
    yield from _layers({"pooler.dense": square})


def _gpt2(layers: int, width: int) -> Parameters:
    """Hugging Face's Conv1D keeps matrices as (inputs, outputs)."""
    norm = (width,)
    block = {
        "ln_1": norm, "attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width),
        "ln_2": norm, "mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width),
    }  # fmt: skip
    yield from _layers({"wte": (50257, width)}, bias=None)
    yield from _layers({"wpe": (1024, width)}, uses=0, bias=None)
    for i in range(layers):
        yield from _layers(block, f"h.{i}.", bias=-1)
    yield from _layers({"ln_f": norm})


def _lora(layers: int, width: int, rank: int) -> Parameters:
    """LoRA (Hu et al., ICLR 2022) of the queries and values of a Llama, as PEFT names it. The rest is frozen.

    Gradients of all blocks pass through the same frozen weights.
    """
    for i in range(layers):
        for name in ("q_proj", "v_proj"):
            adapters = {"lora_A.default": (rank, width), "lora_B.default": (width, rank)}
            yield from _layers(adapters, f"layers.{i}.self_attn.{name}.", bias=None)


def _llama(layers: int, width: int, hidden: int) -> Parameters:
    square, norm = (width, width), (width,)
    block = {
        "self_attn.q_proj": square, "self_attn.k_proj": square, "self_attn.v_proj": square, "self_attn.o_proj": square,
        "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width), "mlp.down_proj": (width, hidden),
        "input_layernorm": norm, "post_attention_layernorm": norm,
    }  # fmt: skip
    yield from _layers({"embed_tokens": (32000, width)}, uses=0, bias=None)
    for i in range(layers):
        yield from _layers(block, f"layers.{i}.", bias=None)
    yield from _layers({"norm": norm, "lm_head": (32000, width)}, bias=None)


# The networks by name.
MODELS: dict[str, Callable[[], Parameters]] = {
    "resnet18": lambda: _resnet((2, 2, 2, 2), bottleneck=False),
    "resnet34": lambda: _resnet((3, 4, 6, 3), bottleneck=False),
    "resnet50": lambda: _resnet((3, 4, 6, 3), bottleneck=True),
    "resnet101": lambda: _resnet((3, 4, 23, 3), bottleneck=True),
    "resnet152": lambda: _resnet((3, 8, 36, 3), bottleneck=True),
    "bert-base": lambda: _bert(12, 768),
    "bert-large": lambda: _bert(24, 1024),
    "gpt2": lambda: _gpt2(12, 768),
    "gpt2-medium": lambda: _gpt2(24, 1024),
    "gpt2-xl": lambda: _gpt2(48, 1600),
    "llama-7b": lambda: _llama(32, 4096, 11008),
    "llama-7b-lora": lambda: _lora(32, 4096, 8),
}
