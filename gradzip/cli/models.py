"""The parameters of well-known networks, from their published architectures, for predictions without the network.

Sources: He et al., Deep Residual Learning, CVPR 2016; Simonyan, Zisserman, Very Deep Convolutional Networks, ICLR 2015;
Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014; Devlin et al., BERT, NAACL 2019;
Radford et al., Language Models are Unsupervised Multitask Learners, 2019; Touvron et al., LLaMA, 2023. Names and shapes
are those of torchvision and of Hugging Face's transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..cost import Layer, Step


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


def _conv(name: str, channels: int, of: int, kernel: int, size: int, bias: bool = False) -> Parameters:
    """A convolution with an output of size x size."""
    shape = (channels, of, kernel, kernel)
    yield Parameter(f"{name}.weight", shape, math.prod(shape) * size**2)
    if bias:
        yield Parameter(f"{name}.bias", (channels,), channels * size**2)


def _norm(name: str, channels: int, positions: int, bias: bool = True) -> Parameters:
    for part in ("weight", "bias") if bias else ("weight",):
        yield Parameter(f"{name}.{part}", (channels,), channels * positions)


def _linear(name: str, outputs: int, inputs: int, bias: bool = True, positions: int = 1) -> Parameters:
    yield Parameter(f"{name}.weight", (outputs, inputs), outputs * inputs * positions)
    if bias:
        yield Parameter(f"{name}.bias", (outputs,), outputs * positions)


def _resnet(depths: Sequence[int], bottleneck: bool) -> Parameters:
    """For images of 224 x 224."""
    yield from _conv("conv1", 64, 3, 7, 112)
    yield from _norm("bn1", 64, 112**2)
    channels = 64
    for stage, depth in enumerate(depths):
        width, size = 64 << stage, 56 >> stage
        outputs = 4 * width if bottleneck else width
        for block in range(depth):
            name = f"layer{stage + 1}.{block}"
            if bottleneck:
                first = size if block or not stage else 2 * size  # the second convolution has the stride
                kernels = [(width, channels, 1, first), (width, width, 3, size), (outputs, width, 1, size)]
            else:
                kernels = [(width, channels, 3, size), (width, width, 3, size)]
            for i, (out, of, kernel, out_size) in enumerate(kernels, 1):
                yield from _conv(f"{name}.conv{i}", out, of, kernel, out_size)
                yield from _norm(f"{name}.bn{i}", out, out_size**2)
            if channels != outputs:
                yield from _conv(f"{name}.downsample.0", outputs, channels, 1, size)
                yield from _norm(f"{name}.downsample.1", outputs, size**2)
            channels = outputs
    yield from _linear("fc", 1000, channels)


def _vgg16() -> Parameters:
    """For images of 224 x 224."""
    channels, index, size = 3, 0, 224
    for stage in ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3):
        for width in stage:
            yield from _conv(f"features.{index}", width, channels, 3, size, bias=True)
            channels, index = width, index + 2
        index, size = index + 1, size // 2
    for name, outputs, inputs in (("0", 4096, 512 * 7 * 7), ("3", 4096, 4096), ("6", 1000, 4096)):
        yield from _linear(f"classifier.{name}", outputs, inputs)


def _alexnet() -> Parameters:
    """For images of 224 x 224."""
    for index, channels, of, kernel, size in (
        (0, 64, 3, 11, 55), (3, 192, 64, 5, 27), (6, 384, 192, 3, 13), (8, 256, 384, 3, 13), (10, 256, 256, 3, 13),
    ):  # fmt: skip
        yield from _conv(f"features.{index}", channels, of, kernel, size, bias=True)
    for name, outputs, inputs in (("1", 4096, 256 * 6 * 6), ("4", 4096, 4096), ("6", 1000, 4096)):
        yield from _linear(f"classifier.{name}", outputs, inputs)


# All tokens use the same parameters of a transformer, so their number does not change the shares of the work. A lookup
# of an embedding takes almost no work. An embedding that is also the output layer is multiplied for every token.


def _bert(layers: int, width: int) -> Parameters:
    for name, rows in (("word", 30522), ("position", 512), ("token_type", 2)):
        yield Parameter(f"embeddings.{name}_embeddings.weight", (rows, width), width)
    yield from _norm("embeddings.LayerNorm", width, 1)
    for i in range(layers):
        name = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            yield from _linear(f"{name}.attention.self.{part}", width, width)
        yield from _linear(f"{name}.attention.output.dense", width, width)
        yield from _norm(f"{name}.attention.output.LayerNorm", width, 1)
        yield from _linear(f"{name}.intermediate.dense", 4 * width, width)
        yield from _linear(f"{name}.output.dense", width, 4 * width)
        yield from _norm(f"{name}.output.LayerNorm", width, 1)
    yield from _linear("pooler.dense", width, width)


def _gpt2(layers: int, width: int) -> Parameters:
    """Hugging Face's Conv1D keeps matrices as (inputs, outputs)."""
    yield Parameter("wte.weight", (50257, width), 50257 * width)
    yield Parameter("wpe.weight", (1024, width), width)
    for i in range(layers):
        name = f"h.{i}"
        yield from _norm(f"{name}.ln_1", width, 1)
        for part, inputs, outputs in (("attn.c_attn", width, 3 * width), ("attn.c_proj", width, width)):
            yield Parameter(f"{name}.{part}.weight", (inputs, outputs), inputs * outputs)
            yield Parameter(f"{name}.{part}.bias", (outputs,), outputs)
        yield from _norm(f"{name}.ln_2", width, 1)
        for part, inputs, outputs in (("mlp.c_fc", width, 4 * width), ("mlp.c_proj", 4 * width, width)):
            yield Parameter(f"{name}.{part}.weight", (inputs, outputs), inputs * outputs)
            yield Parameter(f"{name}.{part}.bias", (outputs,), outputs)
    yield from _norm("ln_f", width, 1)


def _llama(layers: int, width: int, hidden: int) -> Parameters:
    yield Parameter("embed_tokens.weight", (32000, width), width)
    for i in range(layers):
        name = f"layers.{i}"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield from _linear(f"{name}.self_attn.{part}", width, width, bias=False)
        yield from _linear(f"{name}.mlp.gate_proj", hidden, width, bias=False)
        yield from _linear(f"{name}.mlp.up_proj", hidden, width, bias=False)
        yield from _linear(f"{name}.mlp.down_proj", width, hidden, bias=False)
        yield from _norm(f"{name}.input_layernorm", width, 1, bias=False)
        yield from _norm(f"{name}.post_attention_layernorm", width, 1, bias=False)
    yield from _norm("norm", width, 1, bias=False)
    yield from _linear("lm_head", 32000, width, bias=False)


# The networks by name.
MODELS: dict[str, Callable[[], Parameters]] = {
    "resnet18": lambda: _resnet((2, 2, 2, 2), bottleneck=False),
    "resnet34": lambda: _resnet((3, 4, 6, 3), bottleneck=False),
    "resnet50": lambda: _resnet((3, 4, 6, 3), bottleneck=True),
    "resnet101": lambda: _resnet((3, 4, 23, 3), bottleneck=True),
    "resnet152": lambda: _resnet((3, 8, 36, 3), bottleneck=True),
    "vgg16": _vgg16,
    "alexnet": _alexnet,
    "bert-base": lambda: _bert(12, 768),
    "bert-large": lambda: _bert(24, 1024),
    "gpt2": lambda: _gpt2(12, 768),
    "gpt2-medium": lambda: _gpt2(24, 1024),
    "gpt2-xl": lambda: _gpt2(48, 1600),
    "llama-7b": lambda: _llama(32, 4096, 11008),
}
