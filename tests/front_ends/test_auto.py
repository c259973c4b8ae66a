"""Auto: what it measures, how it chooses, and what happens to the states of parameters that change hands."""

import copy
import logging
import math
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradzip
from contract import each, gradient, through_file
from gradzip.auto import search
from gradzip.auto.assignments import (
    NONE,
    Assignment,
    Measured,
    Option,
    Profile,
    adapt,
    merge_lines,
    mixed,
    proposals,
    to_line,
    uniform,
    with_errors_below,
)
from gradzip.auto.method import PATIENCE
from gradzip.averaging.handshake import compare, describe
from gradzip.averaging.routine import Averaging
from gradzip.collectives.engine import Engine
from gradzip.cost import Compressed, Link, predict, uncompressed
from gradzip.methods.spec import unparse
from launch import SHAPED_NET, environment, horovodrun, needs_network, scenarios, torchrun

SIZE = 2
SKIPPED = (2, 5, 12, 20)
BOUND = 24 * 40 * 2**-24 * 50  # 24 steps round some tens of times, numbers below 50
SHAPES = {"w": (64, 48), "v": (32, 8, 3, 3), "b": (48,), "u": (40, 60)}
KEYS = [(name, torch.Size(shape)) for name, shape in SHAPES.items()]
TOPK = "topk:exchange=scatter_reduce,theta=0.9"


def auto(**arguments):
    return gradzip.Auto(**{"allow": ["fp16", "acpsgd", TOPK], "steps": 3} | arguments)


def everywhere(index, title=""):
    """An assignment with one method for all parameters: 0 none, 1 fp16, 2 acpsgd, 3 topk."""
    return Assignment(title, dict.fromkeys(KEYS, index))


# --- arguments


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"allow": []}, r"got nothing as allow, expected a list of methods, as in allow=\['fp16', 'acpsgd'\]"),
        ({"allow": "acpsgd"}, "got 'acpsgd' as allow, expected a list of methods"),
        ({"allow": 3}, "got 3 as allow, expected a list of methods"),
        ({"allow": ["zip"]}, "unknown compression method 'zip', expected one of: acpsgd"),
        ({"allow": ["topk:theta=2"]}, "got theta = 2"),
        ({"allow": [None]}, "got None, expected a compressor other than PerLayer, Auto, Phases"),
        ({"allow": [gradzip.Auto()]}, "got Auto, expected a compressor other than PerLayer, Auto, Phases"),
        ({"allow": ["per-layer:w=topk"]}, "got PerLayer, expected a compressor other than PerLayer, Auto, Phases"),
        ({"allow": ["none"]}, "got none alone in allow, expected a method that compresses"),
        ({"allow": ["dgc"]}, "got 'dgc' in allow, expected methods whose steps are alike: those of DGC have phases"),
        ({"allow": ["gradiveq"]}, "those of GradiVeQ have phases"),
        ({"allow": ["momentum:inner=topk"]}, "those of Momentum have phases"),
        ({"max_error": 0}, "got max_error = 0, expected a number > 0, or None for any error"),
        ({"max_error": "low"}, "got max_error = 'low', expected a number > 0"),
        ({"every": 9}, "got every = 9, expected an integer >= 10, or 0 for never"),
        ({"every": 10.5}, "got every = 10.5, expected an integer >= 10"),
        ({"steps": 2}, "got steps = 2, expected an integer >= 3"),
        ({"steps": True}, "got steps = True, expected an integer >= 3"),
        ({"optimizer": "lamb"}, "got optimizer = 'lamb', expected one of sgd, adamw, muon; for another one, leave it"),
    ],
)  # fmt: skip
def test_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        gradzip.Auto(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "optimizer, allowed",
    [
        (None, ["fp16", "block-float"]),
        ("sgd", ["fp16", "block-float", "qsgd:coding=packed", "acpsgd"]),
        ("adamw", ["fp16", "block-float"]),
        ("muon", ["fp16", "block-float"]),
    ],
)
def test_the_optimizer_limits_what_is_allowed_by_default(optimizer, allowed):
    compressor = gradzip.Auto(optimizer=optimizer)
    assert compressor.specs == ["none", *allowed]
    assert gradzip.parse(unparse(compressor)) == compressor and compressor.clone().specs == compressor.specs
    assert gradzip.Auto(allow=["acpsgd"], optimizer=optimizer).specs == ["none", "acpsgd"]  # the user knows better


def test_the_choice_is_logged_where_users_see_it(caplog):
    """At the level that Python prints without any configuration, on rank 0; comparisons that change nothing are not."""

    def lines(compressor, *titles, rank=0):
        caplog.clear()
        with caplog.at_level(logging.INFO, "gradzip.auto"):
            for title in titles:
                index = compressor.specs.index(title)
                compressor.choose(everywhere(index, title), [], None, rank, 2)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    first, still, other = lines(auto(), "acpsgd", "acpsgd", "fp16")
    assert [level for level, _ in (first, still, other)] == ["WARNING", "INFO", "WARNING"]
    assert first[1].startswith("gradzip.Auto: acpsgd (") and "optimizer" not in first[1]
    assert other[1].startswith("gradzip.Auto: no longer acpsgd, but no compression pays here: fp16")
    (hinted,) = lines(gradzip.Auto(), "none")
    assert hinted[1].endswith(
        "; only methods for every optimizer were tried: optimizer='sgd' allows qsgd:coding=packed, acpsgd, too"
    )
    assert "were tried" not in lines(gradzip.Auto(optimizer="adamw"), "none")[0][1]
    assert lines(auto(), "acpsgd", rank=1) == []


def test_per_layer_refuses_auto():
    with pytest.raises(ValueError, match="expected a compressor other than PerLayer, Auto, Phases"):
        gradzip.PerLayer([("w", gradzip.Auto())])


@pytest.mark.parametrize(
    "spec, arguments",
    [
        ("auto", {}),
        ("auto:every=500,max_error=0.5", {"every": 500, "max_error": 0.5}),
        ("auto:allow=[fp16, dct-range(theta=0.95,bits=8), none]",
         {"allow": [gradzip.Cast(), gradzip.DCTRange(0.95, bits=8)]}),
        ("auto:allow=['qsgd:bits=2'],steps=3", {"allow": ("qsgd:bits=2",), "steps": 3}),
        ("auto:allow=[fft-range(value_range=(-1,2))]", {"allow": ["fft-range:value_range=(-1, 2)"]}),
    ],
)  # fmt: skip
def test_parse(spec, arguments):
    assert gradzip.parse(spec) == gradzip.Auto(**arguments)


def test_titles_are_specs_of_equal_methods():
    methods = [gradzip.Cast(torch.bfloat16), gradzip.TopK(0.9, bits=8), gradzip.SignSGD(majority=False)]
    titles = gradzip.Auto(allow=methods).specs
    assert titles == ["none", "fp16:dtype=bfloat16", "topk:theta=0.9,bits=8", "signsgd:majority=False"]
    assert [gradzip.parse(title) for title in titles[1:]] == methods


def test_clone_digest_and_copies():
    original = auto(max_error=0.5)
    clone = original.clone()
    assert clone == original and clone.digest == original.digest
    assert all(a is not b and a == b for a, b in zip(original.parts, clone.parts))
    assert all(part.traffic is clone.traffic for part in clone.parts)
    others = [auto(), auto(max_error=0.4), auto(max_error=0.5, every=50), auto(max_error=0.5, allow=["acpsgd"])]
    assert len({c.digest for c in (original, *others)}) == 5
    original.choose(everywhere(2, "acpsgd"), [], None, 0, 1)
    for copied in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert copied.decided and copied.method_for(*KEYS[0]) is copied.parts[2]
    original.use(everywhere(0))
    assert copy.deepcopy(original).method_for(*KEYS[0]).rank == 4  # a candidate that is tried is not copied
    assert not original.clone().decided


# --- a parameter changes hands


def grads_of(step, size, name="w"):
    return [gradient(name, rank, step, SHAPES[name]) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("numbers", [(3, 2, 3, 0, 2, 0), (2, 0, 3, 2)])
def test_changes_of_methods_conserve_the_sum(size, numbers):
    """Sum of averages + mean residual = sum of mean gradients."""
    group = gradzip.LocalGroup(auto(), size)
    sent, wanted, largest, step = 0.0, 0.0, 0.0, 0
    for number in numbers:
        for rank, compressor in enumerate(group.compressors):
            compressor.choose(everywhere(number), [], None, rank, size)
        for _ in range(4):
            grads = grads_of(step, size)
            average = group.average(grads, "w")[0].double()
            sent, wanted, step = sent + average, wanted + sum(g.double() for g in grads) / size, step + 1
            largest = max(largest, average.abs().max().item())
        states = [[s.memory.states["w"] for s in c.parts if "w" in s.states] for c in group.compressors]
        assert [len(of_rank) for of_rank in states] == [1 if number else len(states[0])] * size
    for compressor in group.compressors:
        compressor.choose(everywhere(3), [], None, 0, size)
        Averaging(compressor, "w", grads[0])
    residuals = [c.parts[3].states["w"].residual for c in group.compressors if "w" in c.parts[3].states]
    left = sum(r.double() for r in residuals if r is not None) / size
    # Residuals are below 10 times the largest gradient of these steps. Each step rounds some tens of times.
    assert (sent + left - wanted).abs().max() < step * 40 * 2**-24 * 10 * max(largest, 10)


def test_methods_without_error_feedback_send_a_residual_once():
    compressor = auto(allow=["fp16", "acpsgd", "qsgd:bits=8,norm=max,coding=packed"])
    group = gradzip.LocalGroup(compressor, 2)
    for number, unit in ((0, 2**-22), (1, 2**-10), (3, 2**-6)):
        for c in group.compressors:
            c.choose(everywhere(2), [], None, 0, 2)
        for step in range(3):
            group.average(grads_of(step, 2), "w")
        residual = sum(c.parts[2].states["w"].residual for c in group.compressors) / 2
        assert residual.norm() > 1
        for c in group.compressors:
            c.choose(everywhere(number), [], None, 0, 2)
        for step, expected in ((7, sum(grads_of(7, 2)) / 2 + residual), (8, sum(grads_of(8, 2)) / 2)):
            average = group.average(grads_of(step, 2), "w")[0]
            # At least 7 bits for the largest of each 512 elements, which is below 16.
            assert (average - expected).abs().max() <= 16 * unit, (number, step)
        assert all("w" not in c.parts[2].states for c in group.compressors)
        assert all(getattr(c.parts[number].states.get("w"), "residual", None) is None for c in group.compressors)


@pytest.mark.parametrize("number", [0, 1])
def test_residual_survives_a_gradient_that_is_not_finite(number):
    group = gradzip.LocalGroup(auto(), 2)
    for c in group.compressors:
        c.choose(everywhere(2), [], None, 0, 2)
    for step in range(3):
        group.average(grads_of(step, 2), "w")
    residual = sum(c.parts[2].states["w"].residual.clone() for c in group.compressors) / 2
    for c in group.compressors:
        c.choose(everywhere(number), [], None, 0, 2)
    spoilt = grads_of(5, 2)
    spoilt[1][3, 4] = math.inf
    assert not group.average(spoilt, "w")[0].isfinite().all()
    average = group.average(grads_of(6, 2), "w")[0]
    assert (average - sum(grads_of(6, 2)) / 2 - residual).abs().max() < 16 * 2**-10


def test_candidates_that_are_tried_leave_the_residual_alone():
    tried, through = (gradzip.LocalGroup(auto(), 2) for _ in range(2))
    for group in (tried, through):
        for c in group.compressors:
            c.choose(everywhere(3), [], None, 0, 2)
        for step in range(3):
            group.average(grads_of(step, 2), "w")
    for number in (0, 1, 2):
        for c in tried.compressors:
            c.use(everywhere(number))
        for step in range(2):
            tried.average(grads_of(10 + step, 2), "w")
    for c in tried.compressors:
        c.use(everywhere(3))
    for step in range(3, 6):
        averages = [group.average(grads_of(step, 2), "w")[0] for group in (tried, through)]
        assert torch.equal(*averages)


def test_residual_moves_between_loss_scales():
    """A state that waits keeps the loss scale of its last step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    scaled, plain = gradzip.LocalGroup(auto(), 2), gradzip.LocalGroup(auto(), 2)
    for c in scaled.compressors:
        c.follow(scaler)
    for step, (settle, number, scale) in enumerate(
        [(True, 2, 1024.0), (True, 2, 512.0), (False, 3, 256.0), (False, 3, 2048.0), (True, 2, 4096.0), (True, 0, 64.0)]
    ):
        scaler.update(scale)
        for c in (*scaled.compressors, *plain.compressors):
            c.choose(everywhere(number), [], None, 0, 2) if settle else c.use(everywhere(number))
        grads = grads_of(step, 2)
        expected = plain.average(grads, "w")[0]
        # Powers of two multiply exactly.
        assert torch.equal(scaled.average([g * scale for g in grads], "w")[0] / scale, expected), step


# --- state dicts


def test_state_dict_has_the_choice():
    group, resumed = gradzip.LocalGroup(auto(), 2), gradzip.LocalGroup(auto(), 2)
    candidates = [everywhere(0, "none"), Assignment("mixed", dict(zip(KEYS, [3, 2, 0, 1])), 0.5)]
    for rank, c in enumerate(group.compressors):
        c.choose(candidates[1], candidates, None, rank, 2)

    def average(group, step):
        return [group.average(grads_of(step, 2, name), name)[0] for name in SHAPES]

    for step in range(3):
        average(group, step)
    merged = through_file(gradzip.checkpoint.merge([c.state_dict() for c in group.compressors]))
    for rank, c in enumerate(resumed.compressors):
        c.load_state_dict(gradzip.checkpoint.shard(merged, rank, 2))
        assert c.decided and c.choice == {"w": TOPK, "v": "acpsgd", "b": "none", "u": "fp16"}
        assert c.candidates == [Assignment("none", candidates[0].methods), candidates[1]]
    for step in range(3, 6):
        assert all(torch.equal(a, b) for a, b in zip(average(group, step), average(resumed, step)))


def test_undecided_state_dict_measures_again():
    saved = auto().state_dict()
    resumed = auto()
    resumed.choose(everywhere(2), [], None, 0, 2)
    resumed.load_state_dict(through_file(saved))
    assert not resumed.decided and set(resumed.choice.values()) <= {"none"}


def test_choice_among_other_methods_is_refused():
    saved = auto()
    saved.choose(everywhere(2), [], None, 0, 2)
    with pytest.raises(ValueError, match=r"got the states of 4 compressors, expected 3"):
        auto(allow=["fp16", TOPK]).load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"got a choice among \[.*'acpsgd', .*\], expected .*'acpsgd:rank=2'"):
        auto(allow=["fp16", "acpsgd:rank=2", TOPK]).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    "change",
    [{"candidates": [["acpsgd", 1.0, [9]]]}, {"chosen": 5}, {"candidates": 3}, {"size": None}, {"parameters": [["w"]]}],
)
def test_malformed_choices_are_refused(change):
    saved = auto()
    saved.choose(everywhere(2), [], None, 0, 2)
    state_dict = saved.state_dict()
    with pytest.raises(ValueError, match=r"Auto.load_state_dict: got a malformed choice \(.*\), expected a saved one"):
        auto().load_state_dict(state_dict | {"auto": state_dict["auto"] | change})


def test_handshake_names_different_choices():
    compressors = [auto(), auto()]
    compressors[1].choose(Assignment("", {KEYS[1]: 2}), [], None, 0, 2)
    named = [(name, torch.zeros(shape)) for name, shape in SHAPES.items()]
    with pytest.raises(RuntimeError, match="parameter 'v': rank 1 has chosen acpsgd for it, rank 0 none; load the"):
        compare([describe(c, named) for c in compressors])
    compare([describe(compressors[1], named)] * 2)


def test_local_groups_never_choose():
    group = gradzip.LocalGroup(gradzip.Auto(), 2)
    for step in range(30):
        grads = grads_of(step, 2)
        assert torch.equal(group.average(grads, "w")[0], sum(grads) / 2)
    assert not group.compressors[0].decided


# --- the search


@pytest.fixture(scope="module")
def engine():
    """A torch engine of one rank, for what a coroutine of the search exchanges."""
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    from gradzip.engines.torch import TorchEngine

    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    return TorchEngine(group, gradzip.Traffic(), torch.device("cpu"))


def drive(steps, engine, seconds, limit=1000):
    """Run a coroutine of the search. seconds(): of the next step. Returns its result and the number of steps."""
    next(steps)
    for count in range(1, limit):
        try:
            steps.send(search.StepEnd(engine, seconds(), {}))
        except StopIteration as stop:
            return stop.value, count
    raise AssertionError(f"not done after {limit} steps")


def test_candidates_are_timed_in_turns(engine):
    compressor = auto()
    candidates = [everywhere(0, "none"), everywhere(1, "fp16"), everywhere(2, "acpsgd")]
    times, seen = {"none": 1.0, "fp16": 1.1, "acpsgd": 2.1}, []

    def seconds():
        seen.append(compressor.current.title)
        # Warm-up is slow, one step is lost, and one has an outlier.
        return {1: 9.0, 2: 9.0, 3: None, 5: 50.0}.get(len(seen), times[seen[-1]])

    (_, noise), count = drive(search.time_candidates(compressor, candidates, 2), engine, seconds)
    assert noise == 0
    turn = search.WARM_UP + search.TIMED
    assert [candidate.seconds for candidate in candidates] == [1.0, 1.1, 2.1]
    expected = ["none"] * (turn + 1) + ["fp16"] * turn + ["acpsgd"] * turn + ["none"] * turn + ["fp16"] * turn
    assert seen == expected and count == len(expected)  # acpsgd is too slow for the second round


@pytest.mark.parametrize(
    "times, best",
    [
        ((1.0, 0.99, 0.985), "none"),  # less than 2 % is not worth it
        ((1.0, 0.97, 0.96), "fp16"),
        ((1.0, 0.97, 0.95), "acpsgd"),
        ((1.0, 1.2, 0.97), "acpsgd"),
        ((1.0, 1.2, 0.99), "none"),
        ((1.0, 1.2, None), "none"),
    ],
)
def test_winner_is_simple_unless_it_pays(times, best):
    candidates = [everywhere(i, title) for i, title in enumerate(("none", "fp16", "acpsgd"))]
    for candidate, seconds in zip(candidates, times):
        candidate.seconds = seconds
    assert search.fastest(candidates, TITLES[:3], search.PAYS).title == best


@pytest.mark.parametrize(
    "times, margin, best",
    [
        ((1.0, 0.95, 0.91, 0.92), 0.1, "none"),
        ((1.0, 0.95, 0.89, 0.92), 0.1, "fp16"),
        ((1.0, 0.95, 0.85, 0.84), 0.1, "acpsgd"),
        ((1.0, 0.95, 0.85, 0.84), 0.005, "mixed"),
        ((1.0, 0.95, None, 0.70), 0.2, "mixed"),
    ],
)
def test_the_first_within_the_margin_is_chosen(times, margin, best):
    """Whatever the order of the candidates, which is that of the model's predictions."""
    candidates = [everywhere(i, title) for i, title in enumerate(("none", "fp16", "acpsgd", "mixed"))]
    for candidate, seconds in zip(candidates, times):
        candidate.seconds = seconds
    for order in (candidates, candidates[::-1]):
        assert search.fastest(order, TITLES, margin).title == best


def test_noise_is_three_deviations_of_a_difference():
    rng = random.Random(0)
    sigma, turns, candidates, margins, wrong = 0.05, 4, 4, [], 0
    for _ in range(500):
        times = [[rng.gauss(seconds, sigma * seconds) for _ in range(turns)] for seconds in [10.0] * candidates]
        margins.append(search.noise_of(times))
        equal = [everywhere(i, title) for i, title in enumerate(("none", "fp16", "acpsgd", "topk"))]
        for candidate, of_turns in zip(equal, times):
            candidate.seconds = sum(of_turns) / turns
        wrong += search.fastest(equal, TITLES, margins[-1]).title != "none"
    # The deviation of a difference of two means of 4 is sigma / sqrt(2).
    assert sum(margins) / 500 == pytest.approx(3 * sigma / 2**0.5, rel=0.05)
    assert wrong <= 500 * 0.03  # with the usual 2 %, three of four choices would be chance
    assert search.noise_of([[1.0], [3.0]]) == 0 and search.noise_of([[1.0, 1.0], [2.0]]) == 0


def test_equal_assignments_that_drift_are_not_told_apart(engine):
    """Three searches on a machine whose steps differ by a fifth from minute to minute choose alike."""

    def choice(seed):
        rng = random.Random(seed)
        candidates = [everywhere(i, title) for i, title in enumerate(TITLES)]
        speeds = iter([rng.uniform(0.9, 1.1) for _ in range(200) for _ in range(search.WARM_UP + search.TIMED)])
        steps = search.time_candidates(auto(), candidates, search.TURNS)
        (_, noise), _ = drive(steps, engine, lambda: next(speeds))
        return search.fastest(candidates, TITLES, max(search.PAYS, noise)).title

    assert {choice(seed) for seed in range(3)} == {"none"}


def test_a_clear_gain_is_chosen_despite_noise(engine):
    rng = random.Random(0)
    times = {"none": 1.0, "fp16": 0.9, "acpsgd": 0.5, "topk": 0.55}
    compressor = auto()
    candidates = [everywhere(i, title) for i, title in enumerate(times)]
    steps = search.time_candidates(compressor, candidates, search.TURNS)
    (_, noise), _ = drive(steps, engine, lambda: times[compressor.current.title] * rng.uniform(0.95, 1.05))
    assert 0 < noise < 0.15
    assert search.fastest(candidates, TITLES, max(search.PAYS, noise)).title in ("acpsgd", "topk")


@pytest.mark.parametrize("now, chosen", [(1.0, "acpsgd"), (0.98, "acpsgd"), (0.96, "fp16")])
def test_chosen_assignment_stays_unless_another_is_clearly_faster(engine, now, chosen):
    """Candidates that would cost too much to try are not."""
    compressor = auto(every=100)
    candidates = [everywhere(i, title) for i, title in enumerate(("none", "fp16", "acpsgd"))]
    for candidate, seconds in zip(candidates, (10.0, 1.05, 1.0)):
        candidate.seconds = seconds
    compressor.choose(candidates[2], candidates, None, 0, 2)
    tried = set()

    def seconds():
        tried.add(compressor.current.title)
        return {"acpsgd": 1.0, "fp16": now}[compressor.current.title]

    _, count = drive(search.reconsider(compressor), engine, seconds)
    assert tried == {"acpsgd", "fp16"}
    assert count == 2 * search.TURNS_AGAIN * (search.WARM_UP + search.TIMED)
    assert compressor.current is compressor.chosen and compressor.current.title == chosen
    assert compressor.steps_since == 0


def test_look_follows_after_every_steps(engine):
    compressor = auto(every=10)
    candidates = [everywhere(0, "none"), everywhere(2, "acpsgd")]
    candidates[0].seconds = candidates[1].seconds = 1.0
    compressor.choose(candidates[1], candidates, None, 0, 2)
    steps, titles = search.run(compressor), []
    next(steps)
    for _ in range(100):
        titles.append(compressor.current.title)
        steps.send(search.StepEnd(engine, 1.0, {}))
    turns = (["acpsgd"] * 6 + ["none"] * 6) * search.TURNS_AGAIN
    assert titles == ((["acpsgd"] * 10 + turns) * 3)[:100]


class Mirror(Engine):
    """Rank 0 of some ranks that all do the same."""

    def __init__(self, *members):
        self.rank, self.size, self.traffic, self._members = 0, len(members), gradzip.Traffic(), members

    @property
    def members(self):
        return self._members

    def launch(self, collective, slot):
        return self

    def send_overflow(self):
        return False

    def result(self):
        return None

    def allgather_bytes(self, data, slot):
        return [data] * self.size


def train(compressor, *engines, steps=1, names=SHAPES):
    """Take steps with optimizers in turns. Nothing is averaged."""
    for step in range(steps):
        for engine in engines:
            for name in names:
                Averaging(compressor, name, torch.empty(SHAPES[name])).run(gradient(name, 0, step, SHAPES[name]))
            compressor.end_step(engine, names)


def test_one_optimizer_decides_until_it_is_gone():
    compressor, first, second = auto(every=0), Mirror(0, 1), Mirror(0, 1)
    compressor.choose(everywhere(2), [], None, 0, 2)
    train(compressor, first, second, steps=5)
    assert compressor.decided and compressor.steps_since == 5
    train(compressor, second, steps=PATIENCE - 2)
    assert compressor.steps_since == 5
    train(compressor, second, steps=6)
    assert compressor.steps_since == 5 + 6 and compressor.decided


def test_a_method_that_cannot_be_measured_is_not_chosen(caplog):
    """The other ranks wait for what this one has measured."""

    class Broken(gradzip.TopK):
        def encode(self, grad, key):
            raise MemoryError("no memory")

    compressor = auto(allow=["fp16", "acpsgd", Broken(0.9)])
    options = search.measure_options(compressor, gradient("w", 0, 0, SHAPES["w"]), "w", 2)
    assert options.keys() == {1, 2} and "no memory" in caplog.text


def test_another_group_of_ranks_is_refused():
    compressor = auto()
    train(compressor, Mirror(0, 1))
    words = r"got gradients that the ranks \[0, 2\] average, and others that \[0, 1\] average; give each process set"
    with pytest.raises(RuntimeError, match=words):
        train(compressor, Mirror(0, 2))
    train(compressor, Mirror(0))  # a group of one rank has nothing to decide
    assert not compressor.decided


def test_new_models_and_groups_are_measured_anew():
    compressor, engine = auto(every=0), Mirror(0, 1)
    compressor.choose(Assignment("acpsgd", {KEYS[0]: 2}), [], None, 0, 2)
    train(compressor, engine, names=["w"])
    assert compressor.decided
    other = auto(every=0)
    other.load_state_dict(compressor.state_dict())
    train(other, Mirror(0, 1), names=["v"])
    assert not other.decided and set(other.choice.values()) == {"none"}
    other.load_state_dict(compressor.state_dict())
    train(other, Mirror(0, 1, 2), names=["w"])
    assert not other.decided


def test_one_rank_decides_at_once(engine):
    compressor = auto()
    gradzip.averaging.routine.averaged(compressor, torch.zeros(64, 48), "w")  # registers the parameter
    compressor.end_step(engine, ["w"])
    assert compressor.decided and compressor.choice == {"w": "none"} and compressor.report["ranks"] == 1
    loaded = auto()
    saved = auto()
    saved.choose(everywhere(2, "acpsgd"), [], None, 0, 2)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.choice["w"] == "acpsgd"
    loaded.end_step(engine, ["w"])  # two ranks have become one
    assert loaded.decided and loaded.method_for(*KEYS[0]) is loaded.parts[NONE]


def test_errors_are_those_of_the_method_and_non_finite_ones_are_never_allowed():
    compressor = auto()
    grad = gradient("w", 0, 0, (64, 48))
    options = search.measure_options(compressor, grad, "w", 2)
    assert options.keys() == {1, 2, 3}
    for index, option in options.items():
        approximation, _ = gradzip.roundtrip(compressor.parts[index], grad, "w")
        error = ((approximation - grad).norm() / grad.norm()).item()
        assert option.error == pytest.approx(error, rel=0.2, abs=1e-5)
    assert search.measure_options(compressor, grad[0], "b", 2) == {}
    measured = {"w": Measured(KEYS[0], 0.0, search.measure_options(compressor, grad * math.nan, "w", 2))}
    agreed = merge_lines([to_line(measured), to_line({"w": Measured(KEYS[0], 0.0, options)})])
    assert with_errors_below(agreed, None)["w"].options == {}


# --- assignments


LINK = Link(ranks=2, bandwidth=1e6, latency=1e-4)


def profile(errors=None, link=LINK):
    """Three layers. fp16 halves bytes at once; acpsgd sends few and takes little time; topk sends fewest, slowly."""
    layers = {}
    for i, (name, shape) in enumerate(KEYS[:3]):
        nbytes = 4 * shape.numel()
        options = {
            1: Option(Compressed((("all_reduce", nbytes / 2),), 1e-6), 1e-4),
            2: Option(Compressed((("all_reduce", nbytes / 40),), 1e-4, 1e-4), 0.9),
            3: Option(Compressed((("all_gather", nbytes / 100),), 1e-2 * (i + 1), 0.0), 0.7),
        }
        layers[name] = Measured((name, tuple(shape)), 0.01 * i, options if len(shape) > 1 else {})
    if errors is not None:
        layers = with_errors_below(layers, errors)
    return Profile(layers, link, None, None)


TITLES = ["none", "fp16", "acpsgd", "topk"]


def test_prediction_is_that_of_the_cost_model():
    p = profile()
    candidate = Assignment("", {("w", (64, 48)): 2})
    compressed = [p.layers["w"].options[2].compressed, *(uncompressed(layer) for layer in p.step.layers[1:])]
    assert p.predict(candidate) == predict(p.step, compressed, LINK).seconds
    assert p.step.seconds == 0.02


def test_all_ranks_agree_on_the_slowest():
    one, two = profile().layers, dict(profile().layers)
    two["w"] = Measured(two["w"].key, 0.5, {2: Option(Compressed((("all_reduce", 1e3),), 3e-3, 1e-5), 0.1)})
    del two["b"]
    lines = [to_line(one), to_line(two)]
    agreed = merge_lines(lines)
    assert agreed == merge_lines(lines[::-1])
    assert list(agreed) == ["v", "w"]  # in the order in which they are ready; b was not seen everywhere
    assert agreed["w"] == Measured(
        ("w", (64, 48)), 0.5, {2: Option(Compressed((("all_reduce", 1e3),), 3e-3, 1e-4), 0.9)}
    )
    assert agreed["v"] == one["v"]


def test_uniform_assignments_fall_back_where_the_error_is_too_large():
    assert set(uniform(profile(), "topk", 3, 1).methods.values()) == {3, NONE}
    assert set(uniform(profile(0.8), "acpsgd", 2, 1).methods.values()) == {1, NONE}
    assert set(uniform(profile(1e-9), "acpsgd", 2, 1).methods.values()) == {NONE}


def test_mixed_assignments_take_the_fastest_method_of_each_layer():
    slow = profile()
    assert mixed(slow, 1.0).methods == {("w", (64, 48)): 2, ("v", (32, 8, 3, 3)): 2, ("b", (48,)): NONE}
    assert set(mixed(profile(link=Link(2, 1e12, 0.0)), 1.0).methods.values()) == {NONE}
    assert set(mixed(profile(0.5), 1.0).methods.values()) == {1, NONE}


def test_proposals_begin_with_the_simple_ones_and_leave_out_slow_and_equal_ones():
    candidates = proposals(profile(), TITLES, 1, 3)
    assert [candidate.title for candidate in candidates] == [
        "none",
        "fp16",
        "acpsgd",
    ]  # mixed is equal; topk is too slow
    assert [candidate.predicted for candidate in candidates] == [
        profile().predict(candidate) for candidate in candidates
    ]
    assert [p.title for p in proposals(profile(link=Link(2, 1e4, 0.0)), TITLES, 1, 3)][2:] == [
        "mixed",
        "topk",
        "acpsgd",
    ]
    assert [p.title for p in proposals(profile(1e-9), TITLES, 1, 3)] == ["none"]
    assert [p.title for p in proposals(profile(link=Link(2, 1e4, 0.0)), TITLES, 1, 1)] == ["none", "fp16", "mixed"]


def test_adapted_assignments_keep_what_is_still_allowed():
    candidate = Assignment("mixed", {KEYS[0]: 2, KEYS[1]: 3, KEYS[2]: NONE}, 0.5)
    assert adapt(candidate, profile().layers, TITLES, 1) == candidate
    assert list(adapt(candidate, profile(0.8).layers, TITLES, 1).methods.values()) == [1, 3, NONE]
    assert list(adapt(candidate, profile(0.8).layers, TITLES, None).methods.values()) == [NONE, 3, NONE]
    forbidden = adapt(candidate, profile(0.8).layers, TITLES, 1)
    assert adapt(forbidden, profile().layers, TITLES, 1).methods == candidate.methods  # allowed again
    candidate = Assignment("acpsgd", {KEYS[0]: 2, KEYS[1]: 1, KEYS[2]: NONE})  # v was not allowed before
    assert list(adapt(candidate, profile().layers, TITLES, 1).methods.values()) == [2, 2, NONE]


# --- jobs of two ranks


@pytest.fixture(scope="module", params=["horovod", "ddp"])
def front_end(request):
    if request.param == "horovod":
        pytest.importorskip("horovod.torch")
    elif not dist.is_available():
        pytest.skip("torch without torch.distributed")
    return request.param


def run_scenarios(front_end, folder, *names):
    run = horovodrun if front_end == "horovod" else torchrun
    return scenarios(SIZE, "auto_worker.py", folder, *names, run=run, timeout=250)


@pytest.fixture(scope="module")
def results(front_end, tmp_path_factory):
    names = ["searched", "changed", "resumed", "synced", "different_choices", "loss_scaled"]
    return run_scenarios(front_end, tmp_path_factory.mktemp(front_end), *names)


def assert_equal_parameters(per_rank):
    for parameters in per_rank[1:]:
        for name, p in parameters.items():
            assert torch.equal(p, per_rank[0][name]), name


def test_all_ranks_choose_alike_and_look_again(results):
    first, second = results["searched"]
    for a, b in zip(first[:1] + first[2:5], second[:1] + second[2:5]):
        assert a == b
    history, lines, choice, report, saved, _ = first
    decided = [step for step, (is_decided, _) in enumerate(history) if is_decided]
    assert decided == list(range(decided[0], len(history)))
    # Each candidate has its turn of six steps. Four uncompressed steps come first: the first turn of `none`.
    titles = [title for _, title in history[: decided[0]]]
    assert titles[:4] == ["none"] * 4
    assert (len(titles) - 4) % (search.WARM_UP + search.TIMED) == 0 and set(titles) == report["ms"].keys()
    assert {"none", "fp16"} <= report["ms"].keys()
    assert choice.keys() == SHAPES.keys() and choice["b"] == "none"
    assert saved["candidates"][saved["chosen"]][0] == report["assignment"]
    assert sum(report["share"].values()) == pytest.approx(1) and sum(report["parameters"].values()) == len(SHAPES)
    assert report["link"]["ranks"] == report["ranks"] == 2
    assert len(lines) >= 2 and all("ms per step" in line and "\n" not in line for line in lines)
    assert second[1] == []  # rank 0 logs
    assert_equal_parameters([r[-1] for r in results["searched"]])


@pytest.fixture(scope="module")
def slow_results(front_end, tmp_path_factory):
    return run_scenarios(front_end, tmp_path_factory.mktemp(f"slow {front_end}"), "nothing_allowed", "two_models")


@pytest.mark.long
def test_nothing_is_compressed_if_no_error_is_allowed(slow_results):
    for decided, choice, times, _ in slow_results["nothing_allowed"]:
        assert decided and set(choice.values()) == {"none"} and times.keys() == {"none"}
    assert_equal_parameters([r[-1] for r in slow_results["nothing_allowed"]])


def test_changes_of_methods_conserve_the_sum_in_jobs(results):
    per_rank = results["changed"]
    steps = len(per_rank[0][0])
    gradients = each(range(steps), lambda n, r, s: gradient(n, r, s, SHAPES[n]), SHAPES)
    for name in SHAPES:
        assert all(torch.equal(a[name], b[name]) for a, b in zip(per_rank[0][0], per_rank[1][0]))
        sent = sum(average[name].double() for average in per_rank[0][0])
        left = [r[name].double() for *_, r in per_rank if r.get(name) is not None]
        wanted = sum(sum(g.double() for g in of_step[name]) / SIZE for of_step in gradients)
        assert (sent + sum(left) / SIZE - wanted).abs().max() < BOUND, name
        assert len(left) == (0 if name == "b" else SIZE) and all(r.abs().max() > 10 * BOUND for r in left)
    for _, owners, _ in per_rank:
        compressed = ["u", "v", "w"]
        assert [o[2:] for o in owners[1:4]] == [[[], compressed], [compressed, []], [["v"], ["u", "w"]]]
        assert [o[2:] for o in owners[4:]] == [[[], []], [["v"], ["u", "w"]]]


def test_choice_from_a_checkpoint_is_in_charge_at_once(results):
    for decided, choice, (straight, continued), steps in results["resumed"]:
        assert decided and choice == {"w": "acpsgd", "v": "acpsgd", "b": "acpsgd", "u": "acpsgd"}
        for a, b in zip(straight, continued):
            assert all(torch.equal(a[name], b[name]) for name in SHAPES)
        assert steps == [8, 8]  # since the choice
    assert_equal_parameters([r[2][1][-1] for r in results["resumed"]])


def test_elastic_state_has_the_choice(results, front_end):
    if front_end == "horovod":
        for choices, counts, _ in results["synced"]:
            assert choices == [dict.fromkeys(SHAPES, "acpsgd")] * 2 and counts == [0, 4]
        assert_equal_parameters([parameters for *_, parameters in results["synced"]])


def test_ranks_with_different_choices_find_out_in_the_first_step(results):
    words = "parameter 'v': rank 1 has chosen acpsgd for it, rank 0 none; load the compressor's state on all"
    assert all(words in text for text in results["different_choices"])


def test_skipped_steps_change_nothing(results):
    for changes, parameters in results["loss_scaled"]:
        assert changes == []
        for steps, of_job in zip((12, 24), parameters):  # the second one has sent all residuals
            kept = [step for step in range(steps) if step not in SKIPPED]
            gradients = each(kept, lambda n, r, s: gradient(n, r, s, SHAPES[n]), SHAPES)
            for name, p in of_job.items():
                wanted = -0.5 * sum(sum(g.double() for g in of_step[name]) / SIZE for of_step in gradients)
                assert (p.double() - wanted).abs().max() < BOUND, name
    for i in range(2):
        assert_equal_parameters([parameters[i] for _, parameters in results["loss_scaled"]])


@pytest.mark.long
def test_two_models_share_a_choice(slow_results):
    for steps, choice, _ in slow_results["two_models"]:
        assert steps >= 4 and choice == slow_results["two_models"][0][1]
    for i in range(2):
        assert_equal_parameters([models[i] for *_, models in slow_results["two_models"]])


@pytest.mark.long
@needs_network
def test_compression_is_chosen_on_a_slow_network(front_end, tmp_path):
    """At 20 Mb/s, the gradients of a step take 0.2 s uncompressed, and those of ACP-SGD 5 ms."""
    python = sys.executable
    launch = {
        "horovod": [str(Path(python).with_name("horovodrun")), "--network-interface", "lo", "-np", "2", python],
        "ddp": [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }[front_end]
    worker = Path(__file__).with_name("auto_worker.py")
    done = subprocess.run(
        ["bash", SHAPED_NET, "20mbit", "2", "--", *launch, worker, tmp_path, "slow_network"],
        env=environment(GLOO_SOCKET_IFNAME="lo"), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    per_rank = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(SIZE)]
    results = [of_rank["slow_network"] for of_rank in per_rank]
    for decided, choice, report, history, _ in results:
        assert decided and choice == {"w": "acpsgd", "b": "none"} and report["assignment"] == "acpsgd"
        assert report["ms"]["acpsgd"] < report["ms"]["fp16"] / 2 < report["ms"]["none"] / 2
        assert 2.5e6 / 2 < report["link"]["bandwidth"] < 2 * 2.5e6
        assert history == results[0][3] and history[-1] == "acpsgd"
    assert_equal_parameters([r[-1] for r in results])
