"""Data sets for `train.py`: scikit-learn's digits or CIFAR-10, and the sources of torch.nn or any text.

A data set has a `name`, `len()` training examples (called `unit`), `batch()` and `test_batches()` of inputs and
targets, the `dimensions` of networks for it, a default number of `epochs`, and a `measure` of quality.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label, then 1024 red, 1024 green and 1024 blue pixels


class DataError(Exception):
    """The data cannot be used. The message is one line, for the user."""


class Measure(NamedTuple):
    """The quality of a run: value(test accuracy, test loss), shown with `digits` decimals."""

    label: str
    unit: str
    digits: int
    value: Callable[[float, float], float]


@dataclass(frozen=True)
class Images:
    """Images: pixels (n, channels, height, width) uint8 and labels (n,) int64, for training and testing."""

    name: str
    train: tuple
    test: tuple
    epochs: int
    augmented: bool
    num_classes: int = 10

    unit = "images"
    measure = Measure("test accuracy, %", "points of test accuracy", 2, lambda accuracy, loss: 100 * accuracy)

    def __len__(self):
        return len(self.train[1])

    @property
    def dimensions(self):
        """The numbers of input channels and classes."""
        return self.train[0].shape[1], self.num_classes

    @cached_property
    def statistics(self):
        """Mean and standard deviation of each channel, (1, channels, 1, 1) float32."""
        sample = self.train[0][:2000].astype(np.float32)  # a sample, which is enough and cheap
        return sample.mean((0, 2, 3), keepdims=True), sample.std((0, 2, 3), keepdims=True)

    def inputs(self, pixels):
        """The network's inputs: normalised pixels, float32."""
        mean, std = self.statistics
        return torch.from_numpy((pixels - mean) / std)

    def batch(self, chosen, rng):
        """The chosen training images and their labels. rng: for augmentation."""
        pixels, labels = (array[chosen] for array in self.train)
        if self.augmented:
            pixels = augment(pixels, rng)
        return self.inputs(pixels), torch.from_numpy(labels)

    def test_batches(self, rank, size, batch_size=250):
        """This rank's share of the test images and labels, in batches."""
        pixels, labels = (array[rank::size] for array in self.test)
        for i in range(0, len(labels), batch_size):
            part = slice(i, i + batch_size)
            yield self.inputs(pixels[part]), torch.from_numpy(labels[part])


@dataclass(frozen=True)
class Text:
    """Text for a character language model: bytes (n,) uint8, for training and testing. A character is a byte."""

    name: str
    train: np.ndarray
    test: np.ndarray
    context: int = 128  # characters in a sequence
    epochs: int = 1
    vocabulary: int = 256

    unit = "sequences"
    measure = Measure("bits per character", "bits per character", 3, lambda accuracy, loss: loss / math.log(2))

    def __len__(self):
        return len(self.train) // self.context - 1

    @property
    def dimensions(self):
        """The sizes of the vocabulary and of a sequence."""
        return self.vocabulary, self.context

    def sequences(self, text, starts):
        """Sequences of characters and their next characters, both (n, context) int64."""
        characters = torch.from_numpy(text[starts[:, None] + np.arange(self.context + 1)].astype(np.int64))
        return characters[:, :-1], characters[:, 1:]

    def batch(self, chosen, rng):
        """The chosen training sequences, shifted by a random offset: every epoch cuts the text differently."""
        return self.sequences(self.train, chosen * self.context + rng.integers(self.context, size=len(chosen)))

    def test_batches(self, rank, size, batch_size=50):
        """This rank's share of the test text, in batches of sequences."""
        starts = np.arange(0, len(self.test) - self.context, self.context)[rank::size]
        for i in range(0, len(starts), batch_size):
            yield self.sequences(self.test, starts[i : i + batch_size])


def images(folder=None):
    """Load CIFAR-10 from `folder`, or the digits if it is None. Raises DataError."""
    return digits() if folder is None else cifar10(Path(folder))


def digits():
    """Load 1797 handwritten digits of 8x8 pixels: 1297 for training, 500 for testing, in a fixed split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "the digits come with scikit-learn, which is not installed: "
            "pip install scikit-learn, or give CIFAR-10 with --data DIR"
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    pixels = pixels.astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = labels.astype(np.int64)
    # The file is ordered by writer: shuffle it, with a fixed seed, before the split.
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:1297], order[1297:]
    return Images("digits", (pixels[train], labels[train]), (pixels[test], labels[test]), epochs=20, augmented=False)


def cifar10(folder):
    """Load CIFAR-10's binary version. Files may hold fewer than 10 000 records. Raises DataError."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected one with CIFAR-10's binary version (data_batch_1.bin ...)")
    parts = [read_records(folder / f"data_batch_{i}.bin") for i in range(1, 6)]
    train = tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Images("cifar10", train, read_records(folder / "test_batch.bin"), epochs=10, augmented=True)


def read_records(path):
    """Read one file of CIFAR-10's binary version: pixels (n, 3, 32, 32) uint8, labels (n,) int64. Raises DataError."""
    try:
        raw = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a file of CIFAR-10's binary version") from None
    if raw.size == 0 or raw.size % CIFAR10_RECORD:
        raise DataError(
            f"{path}: got {raw.size} bytes, expected a multiple of {CIFAR10_RECORD} "
            "(1 label byte + 3072 pixel bytes a record); fetch the file again"
        )
    records = raw.reshape(-1, CIFAR10_RECORD)
    labels = records[:, 0].astype(np.int64)
    if labels.max() > 9:
        raise DataError(
            f"{path}: got label {labels.max()} in record {labels.argmax()}, expected 0 to 9; "
            "is this CIFAR-10's binary version?"
        )
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def text(file=None):
    """Load a text file, by default the sources of torch.nn. The last tenth is for testing. Raises DataError."""
    if file is None:
        name, raw = torch_sources()
    else:
        name = Path(file).name
        try:
            raw = np.fromfile(file, dtype=np.uint8)
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}; expected a text file") from None
    split = len(raw) - len(raw) // 10
    if len(raw) - split <= Text.context:
        raise DataError(
            f"{name}: got {len(raw)} bytes, expected at least {10 * (Text.context + 1)} (a tenth is for testing, in "
            f"sequences of {Text.context} characters); give a longer text with --data FILE"
        )
    return Text(name, raw[:split], raw[split:])


def torch_sources():
    """Name and bytes of the sources of torch.nn, 2 MB, which depend on the version of torch in the name."""
    sources = sorted(Path(torch.nn.__file__).parent.rglob("*.py"))
    raw = b"".join(source.read_bytes() for source in sources)
    return f"torch.nn {torch.__version__.partition('+')[0]}", np.frombuffer(raw, dtype=np.uint8)


def batches(dataset, *, batch_size, rank, size, seed):
    """Yield batches (inputs, targets) for one rank, without end.

    All ranks draw the same order for an epoch and take disjoint parts of each step's examples. An incomplete last step
    is dropped. The result depends on the arguments alone.
    """
    per_step = size * batch_size
    step = 0
    for epoch in itertools.count():
        order = np.random.default_rng((seed, epoch)).permutation(len(dataset))
        order = order[: len(order) // per_step * per_step].reshape(-1, size, batch_size)
        for chosen in order[:, rank]:
            yield dataset.batch(chosen, np.random.default_rng((seed, rank, step)))
            step += 1


def augment(pixels, rng, border=4):
    """Shift each image by up to `border` pixels, padded with black, and mirror half of them. Returns a new array."""
    n, channels, height, width = pixels.shape
    padded = np.pad(pixels, ((0, 0), (0, 0), (border, border), (border, border)))
    rows = rng.integers(2 * border + 1, size=(n, 1)) + np.arange(height)
    columns = rng.integers(2 * border + 1, size=(n, 1)) + np.arange(width)
    mirrored = rng.random(n) < 0.5
    columns[mirrored] = columns[mirrored, ::-1]
    image, channel = np.arange(n)[:, None, None, None], np.arange(channels)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
