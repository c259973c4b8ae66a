"""Real images for `train.py`: scikit-learn's digits, or a folder with CIFAR-10's binary version."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label, then 1024 red, 1024 green and 1024 blue pixels


class DataError(Exception):
    """The data cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class Images:
    """Pixels (n, channels, height, width) uint8 and labels (n,) int64, for training and for testing."""

    name: str
    train: tuple
    test: tuple
    augmented: bool
    num_classes: int = 10

    @property
    def channels(self):
        return self.train[0].shape[1]

    @cached_property
    def statistics(self):
        """Mean and standard deviation of each channel, (1, channels, 1, 1) float32."""
        sample = self.train[0][:2000].astype(np.float32)  # enough images to know them well, and cheap
        return sample.mean((0, 2, 3), keepdims=True), sample.std((0, 2, 3), keepdims=True)

    def inputs(self, pixels):
        """The pixels as the network wants them: normalised float32."""
        mean, std = self.statistics
        return torch.from_numpy((pixels - mean) / std)


def load(folder=None):
    """CIFAR-10 from `folder`, or the digits if that is None. Raises DataError."""
    return digits() if folder is None else cifar10(Path(folder))


def digits():
    """1797 handwritten digits of 8x8 pixels: 1297 for training, 500 for testing, always the same ones."""
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
    # The file is ordered by writer, so it is shuffled (with a seed of its own) before it is split.
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:1297], order[1297:]
    return Images("digits", (pixels[train], labels[train]), (pixels[test], labels[test]), augmented=False)


def cifar10(folder):
    """CIFAR-10's binary version. Files may hold fewer records than the original 10 000. Raises DataError."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected one with CIFAR-10's binary version (data_batch_1.bin ...)")
    parts = [read_records(folder / f"data_batch_{i}.bin") for i in range(1, 6)]
    train = tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Images("cifar10", train, read_records(folder / "test_batch.bin"), augmented=True)


def read_records(path):
    """One file of CIFAR-10's binary version: pixels (n, 3, 32, 32) uint8, labels (n,) int64. Raises DataError."""
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


def batches(images, *, batch_size, rank, size, seed):
    """Endless batches (inputs, labels) for one rank.

    All ranks draw the same order for an epoch and take disjoint parts of each step's images; what does not fill
    a step is left out of that epoch. Depends on nothing but the arguments.
    """
    pixels, labels = images.train
    per_step = size * batch_size
    step = 0
    for epoch in itertools.count():
        order = np.random.default_rng((seed, epoch)).permutation(len(labels))
        order = order[: len(order) // per_step * per_step].reshape(-1, size, batch_size)
        for chosen in order[:, rank]:
            batch = pixels[chosen]
            if images.augmented:
                batch = augment(batch, np.random.default_rng((seed, rank, step)))
            yield images.inputs(batch), torch.from_numpy(labels[chosen])
            step += 1


def augment(pixels, rng, border=4):
    """Shift each image by up to `border` pixels (black comes in) and mirror half of them; a new array."""
    n, channels, height, width = pixels.shape
    padded = np.pad(pixels, ((0, 0), (0, 0), (border, border), (border, border)))
    rows = rng.integers(2 * border + 1, size=(n, 1)) + np.arange(height)
    columns = rng.integers(2 * border + 1, size=(n, 1)) + np.arange(width)
    mirrored = rng.random(n) < 0.5
    columns[mirrored] = columns[mirrored, ::-1]
    image, channel = np.arange(n)[:, None, None, None], np.arange(channels)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
