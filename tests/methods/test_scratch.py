"""Memory that a step on a CPU takes and frees again."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradzip
import kinds
from gradzip.methods.base.gather import GatherCompressor

SHAPE = (256, 256)
NUMEL = 256 * 256


class Made(TorchDispatchMode):
    """Collects the operations whose results have memory of their own, of at least so many bytes."""

    def __init__(self, nbytes):
        super().__init__()
        self.nbytes, self.names = nbytes, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage.nbytes() >= self.nbytes and storage.data_ptr() not in known:
                self.names.append(function._schema.name)
        return result


def decodes_where_gradients_are(compressor):
    return isinstance(compressor, (GatherCompressor, gradzip.RandomK, gradzip.Cast)) and (
        not isinstance(compressor, gradzip.ATOMO)  # singular vectors, Fourier coefficients and probabilities
        and getattr(compressor, "block", 0) not in (None, 100)  # torch's transforms of whole vectors and odd lengths
    )


def average(compressor, number, ranks):
    """The averages of one step, and the larger operations of it."""
    gradients = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(10 * number + i)) for i in range(ranks)]
    with Made(4 * NUMEL) as made:
        averages = compressor.average(gradients, "weight")
    return averages, [name for name in made.names if name != "aten::clone"]  # `LocalGroup` copies what it is given


@pytest.mark.parametrize("spec", list(kinds.with_other_exchanges(kinds.examples(decodes_where_gradients_are))))
def test_averages_take_no_memory_beside_the_gradients(spec):
    """Also in the first step, which has no residual yet."""
    ranks = 3
    group = gradzip.LocalGroup(gradzip.parse(spec), size=ranks)
    for number in range(3):
        averages, made = average(group, number, ranks)
        assert not made or number < 2, made  # the residual and the one before it
        buffers = [buffer for c in group.compressors for buffer in c.workspace._buffers.items()]
        largest = max((buffer.numel() for (name, *_), buffer in buffers if name == "average"), default=0)
        assert largest <= -(-NUMEL // ranks) + SHAPE[1]  # a partition's
        assert all(torch.equal(averages[0], x) for x in averages)
