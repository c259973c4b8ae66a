"""`gradzip.recipes`: the phases that follow from a training run, and what they leave out.

tests/front_ends/test_momentum_jobs.py trains late rows of embeddings with it in real jobs.
"""

import pytest
import torch
from torch import nn

import gradzip
from contract import assert_equal_states, gradient, through_file


class Tied(nn.Module):
    """The output layer has the weight of `words`, and two embeddings share another."""

    def __init__(self):
        super().__init__()
        self.head, self.words = nn.Linear(16, 512, bias=False), nn.Embedding(512, 16)
        self.words.weight = self.head.weight
        self.places, self.pieces = nn.Embedding(512, 16), nn.Embedding(512, 16)
        self.pieces.weight = self.places.weight


def bare(size=512):
    return nn.Sequential(nn.Embedding(size, 16), nn.Linear(16, size))


@pytest.mark.parametrize(
    "steps, beta2, starts",
    [
        (980, 0.95, [0, 156, 196]),
        (20_000, 0.95, [0, 3960, 4000]),
        (20_000, 0.999, [0, 2000, 4000]),
        (3000, 0.999, [0, 1000]),  # integers from the first step on
        (2000, 0.999, [0, 1000]),
        (10, 0.8, [0, 5]),
    ],
)
def test_phases_follow_from_the_steps_and_beta2(steps, beta2, starts):
    method, optimizer = gradzip.recipes.adamw(bare(), steps, 0.004, (0.8, beta2), weight_decay=0.1)
    assert list(method.phases) == starts and method.parts[-1].averaged_momentum == 0.8
    options = {"lr": 0.004, "betas": (0.8, beta2), "weight_decay": 0.1}
    assert optimizer.param_groups[0].items() >= options.items()


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match=r"got total_steps = 1999 with betas = \(0.9, 0.999\), expected at least 2000"):
        gradzip.recipes.adamw(bare(), 1999, betas=(0.9, 0.999))


@pytest.mark.parametrize(
    "model, name, others",
    [(bare(), "0.weight", ["1.weight", "10.weight"]), (Tied(), "places.weight", ["head.weight", "fireplaces.weight"]),
     (nn.ModuleDict({"bag": nn.EmbeddingBag(512, 16)}), "bag.weight", ["bag_weight"])],
)  # fmt: skip
def test_embeddings_are_not_given_to_momentum(model, name, others):
    """Whatever the model is a part of."""
    method, _ = gradzip.recipes.adamw(model, 100, betas=(0.9, 0.8))
    method.load_state_dict(method.state_dict() | {"steps": dict.fromkeys([name, f"model.{name}", *others], 50)})
    shape = torch.Size((512, 16))
    for known in (name, f"model.{name}"):
        assert method.method_for(known, shape) is method.parts[-2]
    for other in others:
        assert method.method_for(other, shape) is method.parts[-1]


def test_params_are_those_of_the_optimizer():
    model = bare()
    groups = [{"params": [model[0].weight], "weight_decay": 0.0}, {"params": model[1].parameters()}]
    _, optimizer = gradzip.recipes.adamw(model, 100, params=groups)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]


class Job:
    """A model that two ranks train with the recipe: 40 steps, of which integers take from 4 on, and momenta from 8."""

    def __init__(self):
        self.model = bare()
        method, self.optimizer = gradzip.recipes.adamw(self.model, 40, lr=0.01, betas=(0.9, 0.5))
        self.group = gradzip.LocalGroup(method, 2)

    def train(self, first, last):
        named = dict(self.model.named_parameters())
        for step in range(first, last):
            grads = [{n: gradient(n, rank, step, p.shape) for n, p in named.items()} for rank in range(2)]
            for name, average in self.group.step(grads)[0].items():
                named[name].grad = average
            self.group.tell_optimizers(named)
            self.optimizer.step()

    def state_dicts(self):
        compressors = [compressor.state_dict() for compressor in self.group.compressors]
        return through_file([self.model.state_dict(), self.optimizer.state_dict(), *compressors])

    def load(self, saved):
        for one, state_dict in zip([self.model, self.optimizer, *self.group.compressors], saved, strict=True):
            one.load_state_dict(state_dict)


@pytest.mark.parametrize("saved_after", [2, 4, 6, 8, 11])
def test_a_resumed_run_has_the_same_bits(saved_after):
    job, resumed = Job(), Job()
    job.train(0, saved_after)
    resumed.load(job.state_dicts())
    for one in (job, resumed):
        one.train(saved_after, 14)
    assert_equal_states(job.state_dicts(), resumed.state_dicts())
