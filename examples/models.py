"""Networks for `train.py`. `charlm` takes text; the others take images of 8x8 pixels or more."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import data
import gradzip


def cnn(in_channels, num_classes):
    """Three convolutions and a hidden layer: 0.19 M parameters, 131 k of them in one matrix."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128), nn.ReLU(),
        nn.Linear(128, num_classes),
    )  # fmt: skip


def alexnet(in_channels, num_classes):
    """AlexNet's five convolutions and three dense layers at 32x32 scale: 27.4 M parameters, 25 M of them dense.

    Batch normalisation replaces local response normalisation, so that it learns in hundreds of steps, not thousands.
    """

    def convolution(channels, new_channels):
        return (nn.Conv2d(channels, new_channels, 3, padding=1, bias=False), nn.BatchNorm2d(new_channels), nn.ReLU())

    return nn.Sequential(
        *convolution(in_channels, 64), nn.MaxPool2d(2),
        *convolution(64, 192), nn.MaxPool2d(2),
        *convolution(192, 384),
        *convolution(384, 256),
        *convolution(256, 256), nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Dropout(), nn.Linear(256 * 4 * 4, 4096), nn.ReLU(),
        nn.Dropout(), nn.Linear(4096, 2048), nn.ReLU(),
        nn.Linear(2048, num_classes),
    )  # fmt: skip


class PadShortcut(nn.Module):
    """Shortcut without parameters (He et al., option A): drop every other pixel, fill new channels with zeros."""

    def __init__(self, new_channels):
        super().__init__()
        self.new_channels = new_channels

    def forward(self, x):
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut. `stride` 2 halves the image."""

    def __init__(self, in_channels, channels, stride, project):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip
        if in_channels == channels:
            self.shortcut = nn.Identity()
        elif project:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )
        else:
            self.shortcut = PadShortcut(channels - in_channels)

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(in_channels, num_classes, widths, depth, project):
    """CIFAR network of He et al.: a 3x3 stem, one stage of `depth` blocks per width, global average pooling."""
    layers = [nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    channels = widths[0]
    for width in widths:
        for _ in range(depth):
            layers.append(BasicBlock(channels, width, 1 if width == channels else 2, project))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def resnet20(in_channels, num_classes):
    """ResNet-20: 0.27 M parameters."""
    return resnet(in_channels, num_classes, widths=(16, 32, 64), depth=3, project=False)


def resnet8(in_channels, num_classes):
    """ResNet-20 with one block in each stage instead of three: layers of the same shapes, 0.08 M parameters."""
    return resnet(in_channels, num_classes, widths=(16, 32, 64), depth=1, project=False)


def resnet18(in_channels, num_classes):
    """ResNet-18 with the CIFAR stem: 11.2 M parameters."""
    return resnet(in_channels, num_classes, widths=(64, 128, 256, 512), depth=2, project=True)


class DecoderBlock(nn.Module):
    """Causal self-attention and a two-layer perceptron, each with a pre-normalization and a residual connection."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        # Every block starts as the identity: the model learns in hundreds of steps, and at higher learning rates.
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.mlp[-1].weight)

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class CharLM(nn.Module):
    """A decoder-only transformer: characters (n, length) int64 to logits of the next ones (n, length, vocabulary).

    Vaswani et al. 2017, with pre-normalization (Radford et al. 2019) and learned positions.
    """

    def __init__(self, vocabulary, context, width=192, depth=4, heads=6):
        super().__init__()
        self.characters, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, characters):
        x = self.characters(characters) + self.positions.weight[: characters.shape[1]]
        return self.head(self.blocks(x))


def charlm(vocabulary, context):
    """Four blocks of width 192: 1.9 M parameters."""
    return CharLM(vocabulary, context)


def charlm_small(vocabulary, context):
    """Two blocks of width 96: 0.28 M parameters."""
    return CharLM(vocabulary, context, width=96, depth=2, heads=3)


def sgd(parameters, lr, momentum=0.9):
    return torch.optim.SGD(parameters, lr, momentum, weight_decay=5e-4)


def adamw(parameters, lr, momentum=0.9, beta2=0.95, kind=torch.optim.AdamW):
    return kind(parameters, lr, betas=(momentum, beta2), weight_decay=0.1)


def muon(groups, lr, momentum=0.95, beta2=0.95):
    return gradzip.optim.Muon(groups, lr, momentum, betas=(0.9, beta2), weight_decay=0.1)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw, "muon": muon}


def split(network):
    """Param groups of Muon: matrices, except embeddings and the last layer, and all else for AdamW."""
    layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
    matrices = [layer.weight for layer in layers[:-1]]
    known = set(matrices)
    return [{"params": matrices}, {"params": [p for p in network.parameters() if p not in known], "adamw": True}]


def make_optimizer(name, network, lr, method=None, **options):
    """The optimizer of this name. options: momentum, and beta2 of AdamW and of Muon's AdamW.

    A method that applies momentum to gradients, as DGC, replaces that of the optimizer. With one that compresses
    momenta, AdamW holds its second moment still.
    """
    parameters = split(network) if name == "muon" else network.parameters()
    if name == "adamw" and method and any(part.averaged_momentum is not None for part in method.parts):
        return adamw(parameters, lr, kind=gradzip.optim.AdamW, **options)
    momentum = max((part.optimizer_momentum for part in method.parts), default=0.0) if method else 0.0
    if not momentum:
        return OPTIMIZERS[name](parameters, lr, **options)
    if name == "sgd":
        return gradzip.optim.DGCSGD(parameters, lr, momentum, weight_decay=5e-4)
    return OPTIMIZERS[name](parameters, lr, **options | {"momentum": 0.0})


class Recipe(NamedTuple):
    """How to build a network from its data set's dimensions, its data, optimizer and learning rate."""

    build: Callable[[int, int], nn.Module]
    data: Callable
    optimizer: str  # a name in OPTIMIZERS
    lr: float  # peak

    def make_optimizer(self, network, lr, method=None, **options):
        """The network's own optimizer. Arguments: `make_optimizer`."""
        return make_optimizer(self.optimizer, network, lr, method, **options)


MODELS = {
    "cnn": Recipe(cnn, data.images, "sgd", 0.05),
    "resnet8": Recipe(resnet8, data.images, "sgd", 0.1),
    "resnet20": Recipe(resnet20, data.images, "sgd", 0.1),
    "resnet18": Recipe(resnet18, data.images, "sgd", 0.02),
    "alexnet": Recipe(alexnet, data.images, "sgd", 0.01),
    "charlm": Recipe(charlm, data.text, "adamw", 0.002),
    "charlm-small": Recipe(charlm_small, data.text, "adamw", 0.002),
}
