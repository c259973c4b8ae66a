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


def _layer(name: str, shape: tuple[int, ...], uses: int = 1, bias: int = 0) -> Parameters:
    """A weight of this shape, and a bias. uses: products of each element; bias: elements, 0 for none."""
    yield Parameter(f"{name}.weight", shape, math.prod(shape) * uses)
    if bias:
        yield Parameter(f"{name}.bias", (bias,), bias * uses)


# Networks for images of 224 x 224. A convolution uses its weights at each position of its output.


def _resnet(depths: Sequence[int], bottleneck: bool) -> Parameters:
    def convolution(conv: str, norm: str, outputs: int, inputs: int, kernel: int, size: int) -> Parameters:
        yield from _layer(conv, (outputs, inputs, kernel, kernel), uses=size**2)
        yield from _layer(norm, (outputs,), uses=size**2, bias=outputs)

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
    yield from _layer("fc", (1000, channels), bias=1000)


def _plain(convolutions: Sequence[tuple[int, int, int, int, int]], linear: dict[int, tuple[int, int]]) -> Parameters:
    """Convolutions (index, outputs, inputs, kernel, output size) and linear layers of a classifier, by index."""
    for index, outputs, inputs, kernel, size in convolutions:
        yield from _layer(f"features.{index}", (outputs, inputs, kernel, kernel), uses=size**2, bias=outputs)
    for index, (outputs, inputs) in linear.items():
        yield from _layer(f"classifier.{index}", (outputs, inputs), bias=outputs)


_VGG16 = (
    (0, 64, 3, 3, 224), (2, 64, 64, 3, 224), (5, 128, 64, 3, 112), (7, 128, 128, 3, 112), (10, 256, 128, 3, 56),
    (12, 256, 256, 3, 56), (14, 256, 256, 3, 56), (17, 512, 256, 3, 28), (19, 512, 512, 3, 28), (21, 512, 512, 3, 28),
    (24, 512, 512, 3, 14), (26, 512, 512, 3, 14), (28, 512, 512, 3, 14),
)  # fmt: skip
_ALEXNET = (
    (0, 64, 3, 11, 55), (3, 192, 64, 5, 27), (6, 384, 192, 3, 13), (8, 256, 384, 3, 13), (10, 256, 256, 3, 13),
)  # fmt: skip


# All tokens use the same parameters of a transformer, so their number does not change the shares of the work. A lookup
# of an embedding takes almost no work. An embedding that is also the output layer is multiplied for every token.


def _bert(layers: int, width: int) -> Parameters:
    for name, rows in (("word", 30522), ("position", 512), ("token_type", 2)):
        yield Parameter(f"embeddings.{name}_embeddings.weight", (rows, width), width)
    yield from _layer("embeddings.LayerNorm", (width,), bias=width)
    square, norm = (width, width), (width,)
    block: dict[str, tuple[int, ...]] = {f"attention.self.{part}": square for part in ("query", "key", "value")}
    block |= {"attention.output.dense": square, "attention.output.LayerNorm": norm}
    block |= {"intermediate.dense": (4 * width, width), "output.dense": (width, 4 * width), "output.LayerNorm": norm}
    for i in range(layers):
        for name, shape in block.items():
            yield from _layer(f"encoder.layer.{i}.{name}", shape, bias=shape[0])
    yield from _layer("pooler.dense", (width, width), bias=width)


def _gpt2(layers: int, width: int) -> Parameters:
    """Hugging Face's Conv1D keeps matrices as (inputs, outputs)."""
    yield from _layer("wte", (50257, width))
    yield Parameter("wpe.weight", (1024, width), width)
    block: dict[str, tuple[int, ...]] = {"ln_1": (width,), "attn.c_attn": (width, 3 * width)}
    block |= {"attn.c_proj": (width, width), "ln_2": (width,)}
    block |= {"mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
    for i in range(layers):
        for name, shape in block.items():
            yield from _layer(f"h.{i}.{name}", shape, bias=shape[-1])
    yield from _layer("ln_f", (width,), bias=width)


def _llama(layers: int, width: int, hidden: int) -> Parameters:
    yield Parameter("embed_tokens.weight", (32000, width), width)
    block: dict[str, tuple[int, ...]] = {f"self_attn.{part}_proj": (width, width) for part in "qkvo"}
    block |= {"mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width), "mlp.down_proj": (width, hidden)}
    block |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    for i in range(layers):
        for name, shape in block.items():
            yield from _layer(f"layers.{i}.{name}", shape)
    yield from _layer("norm", (width,))
    yield from _layer("lm_head", (32000, width))


# The networks by name.
MODELS: dict[str, Callable[[], Parameters]] = {
    "resnet18": lambda: _resnet((2, 2, 2, 2), bottleneck=False),
    "resnet34": lambda: _resnet((3, 4, 6, 3), bottleneck=False),
    "resnet50": lambda: _resnet((3, 4, 6, 3), bottleneck=True),
    "resnet101": lambda: _resnet((3, 4, 23, 3), bottleneck=True),
    "resnet152": lambda: _resnet((3, 8, 36, 3), bottleneck=True),
    "vgg16": lambda: _plain(_VGG16, {0: (4096, 25088), 3: (4096, 4096), 6: (1000, 4096)}),
    "alexnet": lambda: _plain(_ALEXNET, {1: (4096, 9216), 4: (4096, 4096), 6: (1000, 4096)}),
    "bert-base": lambda: _bert(12, 768),
    "bert-large": lambda: _bert(24, 1024),
    "gpt2": lambda: _gpt2(12, 768),
    "gpt2-medium": lambda: _gpt2(24, 1024),
    "gpt2-xl": lambda: _gpt2(48, 1600),
    "llama-7b": lambda: _llama(32, 4096, 11008),
}
