"""Auto: what it measures, how it chooses, and what happens to the states of parameters that change hands."""

import copy
import logging
import math
import pickle
import random
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradzip
from contract import each, gradient, through_file
from gradzip.advice import auto as search
from gradzip.advice import measure
from gradzip.averaging.handshake import compare, describe
from gradzip.collectives.engine import Engine
from gradzip.methods.base.group import plan_groups
from gradzip.methods.spec import unparse
from launch import SHAPED_NET, assert_done, environment, executable, horovodrun, needs_network, scenarios, torchrun

SIZE = 2
SKIPPED = (2, 6, 12, 20)
BOUND = 24 * 40 * 2**-24 * 50  # 24 steps round some tens of times, numbers below 50
SHAPES = {"w": (64, 48), "v": (32, 8, 3, 3), "b": (48,), "u": (40, 60)}
KEYS = [(name, torch.Size(shape)) for name, shape in SHAPES.items()]
TOPK = "topk:exchange=scatter_reduce,theta=0.9"


def auto(**arguments):
    return gradzip.Auto(**{"allow": ["fp16", "acpsgd", TOPK], "steps": 3} | arguments)


def choose(compressor, index, rank=0, size=2, seconds=()):
    """Choose 0 none, 1 fp16, 2 acpsgd, 3 topk. seconds: of a step with the first methods."""
    compressor.choose(index, dict(enumerate(seconds)), 0.0, rank, size)


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
                choose(compressor, compressor.specs.index(title), rank)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    first, still, other = lines(auto(), "acpsgd", "acpsgd", "fp16")
    assert [level for level, _ in (first, still, other)] == ["WARNING", "INFO", "WARNING"]
    assert first[1].startswith("gradzip.Auto: acpsgd; ms per step: ") and "optimizer" not in first[1]
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
    choose(original, 2, size=1)
    for copied in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert copied.decided and copied.method_for(*KEYS[0]) is copied.parts[2]
    original.use(0)
    assert copy.deepcopy(original).method_for(*KEYS[0]).rank == 4  # a trial is not copied
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
            choose(compressor, number, rank, size)
        for _ in range(4):
            grads = grads_of(step, size)
            average = group.average(grads, "w")[0].double()
            sent, wanted, step = sent + average, wanted + sum(g.double() for g in grads) / size, step + 1
            largest = max(largest, average.abs().max().item())
        states = [[s.memory.states["w"] for s in c.parts if "w" in s.states] for c in group.compressors]
        assert [len(of_rank) for of_rank in states] == [1 if number else len(states[0])] * size
    for compressor in group.compressors:
        choose(compressor, 3, 0, size)
        plan_groups(compressor, [grads[0]], ["w"])
    residuals = [c.parts[3].memory.by_parameter().get("w", {}).get("residual") for c in group.compressors]
    left = sum(r.double() for r in residuals if r is not None) / size
    # Residuals are below 10 times the largest gradient of these steps. Each step rounds some tens of times.
    assert (sent + left - wanted).abs().max() < step * 40 * 2**-24 * 10 * max(largest, 10)


def test_methods_without_error_feedback_send_a_residual_once():
    compressor = auto(allow=["fp16", "acpsgd", "qsgd:bits=8,norm=max,coding=packed"])
    group = gradzip.LocalGroup(compressor, 2)
    for number, unit in ((0, 2**-22), (1, 2**-10), (3, 2**-6)):
        for c in group.compressors:
            choose(c, 2)
        for step in range(3):
            group.average(grads_of(step, 2), "w")
        residual = sum(c.parts[2].memory.piece("w", "residual") for c in group.compressors) / 2
        assert residual.norm() > 1
        for c in group.compressors:
            choose(c, number)
        for step, expected in ((7, sum(grads_of(7, 2)) / 2 + residual), (8, sum(grads_of(8, 2)) / 2)):
            average = group.average(grads_of(step, 2), "w")[0]
            # At least 7 bits for the largest of each 512 elements, which is below 16.
            assert (average - expected).abs().max() <= 16 * unit, (number, step)
        assert not any(c.parts[2].memory.fields("w") for c in group.compressors)
        assert all(c.parts[number].memory.fields("w").get("residual") is None for c in group.compressors)


@pytest.mark.parametrize("number", [0, 1])
def test_residual_survives_a_gradient_that_is_not_finite(number):
    group = gradzip.LocalGroup(auto(), 2)
    for c in group.compressors:
        choose(c, 2)
    for step in range(3):
        group.average(grads_of(step, 2), "w")
    residual = sum(c.parts[2].memory.piece("w", "residual").clone() for c in group.compressors) / 2
    for c in group.compressors:
        choose(c, number)
    spoilt = grads_of(5, 2)
    spoilt[1][3, 4] = math.inf
    assert not group.average(spoilt, "w")[0].isfinite().all()
    average = group.average(grads_of(6, 2), "w")[0]
    assert (average - sum(grads_of(6, 2)) / 2 - residual).abs().max() < 16 * 2**-10


def test_methods_on_trial_leave_the_residual_alone():
    tried, through = (gradzip.LocalGroup(auto(), 2) for _ in range(2))
    for group in (tried, through):
        for c in group.compressors:
            choose(c, 3)
        for step in range(3):
            group.average(grads_of(step, 2), "w")
    for number in (0, 1, 2):
        for c in tried.compressors:
            c.use(number)
        for step in range(2):
            tried.average(grads_of(10 + step, 2), "w")
    for c in tried.compressors:
        c.use(3)
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
            choose(c, number) if settle else c.use(number)
        grads = grads_of(step, 2)
        expected = plain.average(grads, "w")[0]
        # Powers of two multiply exactly.
        assert torch.equal(scaled.average([g * scale for g in grads], "w")[0] / scale, expected), step


# --- state dicts


def test_state_dict_has_the_choice():
    group, resumed = gradzip.LocalGroup(auto(), 2), gradzip.LocalGroup(auto(), 2)
    for rank, c in enumerate(group.compressors):
        choose(c, 3, rank, seconds=[1.0, 0.5])

    def average(group, step):
        return [group.average(grads_of(step, 2, name), name)[0] for name in SHAPES]

    for step in range(3):
        average(group, step)
    merged = through_file(gradzip.checkpoint.merge([c.state_dict() for c in group.compressors]))
    for rank, c in enumerate(resumed.compressors):
        c.load_state_dict(gradzip.checkpoint.shard(merged, rank, 2))
        assert c.decided and c.method_for(*KEYS[0]) is c.parts[3] and c.seconds == {0: 1.0, 1: 0.5}
        assert c.choice == {"w": TOPK, "v": TOPK, "b": "none", "u": TOPK}
    for step in range(3, 6):
        assert all(torch.equal(a, b) for a, b in zip(average(group, step), average(resumed, step)))


def test_a_choice_for_each_parameter_is_made_again():
    """As in state dicts of gradzip 0.2. Their residuals are sent."""
    group = gradzip.LocalGroup(auto(), 1)
    compressor = group.compressors[0]
    choose(compressor, 2)
    group.average(grads_of(0, 1), "w")
    residual = compressor.parts[2].memory.piece("w", "residual").clone()
    choice = {"size": 2, "steps": 5, "methods": compressor.specs, "parameters": [["w", [64, 48]]], "chosen": 0}
    saved = compressor.state_dict() | {"auto": choice | {"candidates": [["mixed", 0.1, [2]]]}}
    compressor.load_state_dict(through_file(saved))
    assert not compressor.decided and compressor.method_for(*KEYS[0]) is compressor.parts[0]
    average = group.average(grads_of(1, 1), "w")[0]
    assert (average - grads_of(1, 1)[0] - residual).abs().max() < 16 * 2**-22


def test_undecided_state_dict_measures_again():
    saved = auto().state_dict()
    resumed = auto()
    choose(resumed, 2)
    resumed.load_state_dict(through_file(saved))
    assert not resumed.decided and set(resumed.choice.values()) <= {"none"}


def test_choice_among_other_methods_is_refused():
    saved = auto()
    choose(saved, 2)
    with pytest.raises(ValueError, match=r"got the states of 4 compressors, expected 3"):
        auto(allow=["fp16", TOPK]).load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"got a choice among \[.*'acpsgd', .*\], expected .*'acpsgd:rank=2'"):
        auto(allow=["fp16", "acpsgd:rank=2", TOPK]).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"chosen": 5},
        {"chosen": None},
        {"seconds": 3},
        {"seconds": [1.0]},
        {"seconds": ["x"] * 4},
        {"size": None},
        {"parameters": 3},
    ],
)
def test_malformed_choices_are_refused(change):
    saved = auto()
    choose(saved, 2)
    state_dict = saved.state_dict()
    with pytest.raises(ValueError, match=r"Auto.load_state_dict: got a malformed choice \(.*\), expected a saved one"):
        auto().load_state_dict(state_dict | {"auto": state_dict["auto"] | change})


def test_handshake_names_different_choices():
    compressors = [auto(), auto()]
    choose(compressors[1], 2)
    named = [(name, torch.zeros(shape)) for name, shape in SHAPES.items()]
    for compressor in compressors:
        for name, tensor in named:
            plan_groups(compressor, [tensor], [name])
    with pytest.raises(RuntimeError, match="parameter 'w': rank 1 has chosen acpsgd for it, rank 0 none; load the"):
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
            end = seconds()
            steps.send((engine, None if end is None else (0.0, end)))
        except StopIteration as stop:
            return stop.value, count
    raise AssertionError(f"not done after {limit} steps")


def test_methods_are_timed_in_turns(engine):
    compressor = auto()
    times, seen = [1.0, 1.1, 2.1], []

    def seconds():
        seen.append(compressor.current)
        # Warm-up is slow, one step is lost, and one has an outlier.
        return {1: 9.0, 2: 9.0, 3: None, 5: 50.0}.get(len(seen), times[seen[-1]])

    (_, found), count = drive(search.time_methods(compressor, [0, 1, 2], 2), engine, seconds)
    assert search.noise_of(found) == 0
    turn = search.WARM_UP + search.TIMED
    assert search.means(found) == dict(enumerate(times))
    assert seen == [0] * (turn + 1) + [1] * turn + [2] * turn + [0] * turn + [1] * turn  # 2 is too slow for more
    assert count == len(seen)


def test_a_device_is_waited_for_once_in_a_turn(engine, monkeypatch):
    """Steps are timed by events of the device: the host waits for them when all steps of the turn have been queued."""
    queued, waited = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == "current"
            queued.append(self)
            self.at = 2000.0 * len(queued)  # milliseconds

        def synchronize(self):
            waited.append(len(queued))

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    compressor = auto()
    steps, device = search.time_methods(compressor, [0, 1], 1), torch.device("cuda", 0)
    next(steps)
    turn = search.WARM_UP + search.TIMED
    start = measure.moment(device)
    with pytest.raises(StopIteration) as stop:
        for _ in range(2 * turn):
            end = measure.moment(device)
            steps.send((engine, (start, end)))
            start = end
    assert stop.value.value[1] == {0: [2.0], 1: [2.0]}
    assert waited == [1 + turn] * search.TIMED + [1 + 2 * turn] * search.TIMED


@pytest.mark.parametrize(
    "times, margin, best",
    [
        ((1.0, 0.99, 0.985), search.PAYS, 0),  # less than 2 % is not worth it
        ((1.0, 0.97, 0.96), search.PAYS, 1),
        ((1.0, 0.97, 0.95), search.PAYS, 2),
        ((1.0, 1.2, 0.97), search.PAYS, 2),
        ((1.0, 1.2, 0.99), search.PAYS, 0),
        ((1.0, 1.2), search.PAYS, 0),
        ((1.0, 0.95, 0.91, 0.92), 0.1, 0),
        ((1.0, 0.95, 0.89, 0.92), 0.1, 1),
        ((1.0, 0.95, 0.85, 0.84), 0.1, 2),
        ((1.0, 0.95, 0.85, 0.84), 0.005, 3),
    ],
)
def test_the_first_within_the_margin_is_chosen(times, margin, best):
    """Whatever the order in which methods were tried."""
    seconds = list(enumerate(times))
    for order in (seconds, seconds[::-1]):
        assert search.fastest(dict(order), margin) == best


def test_noise_is_three_deviations_of_a_difference():
    rng = random.Random(0)
    sigma, turns, methods, margins, wrong = 0.05, 4, 4, [], 0
    for _ in range(500):
        times = {i: [rng.gauss(10.0, sigma * 10.0) for _ in range(turns)] for i in range(methods)}
        margins.append(search.noise_of(times))
        wrong += search.fastest(search.means(times), margins[-1]) != 0
    # The deviation of a difference of two means of 4 is sigma / sqrt(2).
    assert sum(margins) / 500 == pytest.approx(3 * sigma / 2**0.5, rel=0.05)
    assert wrong <= 500 * 0.03  # with the usual 2 %, three of four choices would be chance
    assert search.noise_of({0: [1.0], 1: [3.0]}) == 0 and search.noise_of({0: [1.0, 1.0], 1: [2.0]}) == 0


def test_equal_methods_that_drift_are_not_told_apart(engine):
    """Three searches on a machine whose steps differ by a fifth from minute to minute choose alike."""

    def choice(seed):
        rng = random.Random(seed)
        speeds = iter([rng.uniform(0.9, 1.1) for _ in range(200) for _ in range(search.WARM_UP + search.TIMED)])
        steps = search.time_methods(auto(), range(4), search.TURNS)
        (_, times), _ = drive(steps, engine, lambda: next(speeds))
        return search.fastest(search.means(times), max(search.PAYS, search.noise_of(times)))

    assert {choice(seed) for seed in range(3)} == {0}


def test_a_clear_gain_is_chosen_despite_noise(engine):
    rng = random.Random(0)
    speeds = [1.0, 0.9, 0.5, 0.55]
    compressor = auto(every=0)
    steps = search.first_choice(compressor)
    drive(steps, engine, lambda: speeds[compressor.current] * rng.uniform(0.95, 1.05))
    assert 0 < compressor.report["margin"] < 0.15
    assert compressor.decided and compressor.chosen in (2, 3)
    assert compressor.report["ms"].keys() == set(compressor.specs)


@pytest.mark.parametrize("now, chosen", [(1.0, 2), (0.98, 2), (0.96, 1)])
def test_chosen_method_stays_unless_another_is_clearly_faster(engine, now, chosen):
    """Methods that would cost too much to try are not."""
    compressor = auto(every=100, allow=["fp16", "acpsgd"])
    choose(compressor, 2, seconds=(10.0, 1.05, 1.0))
    tried = set()

    def seconds():
        tried.add(compressor.current)
        return {2: 1.0, 1: now}[compressor.current]

    _, count = drive(search.reconsider(compressor), engine, seconds)
    assert tried == {2, 1}
    assert count == 2 * search.TURNS_AGAIN * (search.WARM_UP + search.TIMED)
    assert compressor.current == compressor.chosen == chosen
    assert compressor.steps_since == 0 and compressor.seconds == {0: 10.0, 1: now, 2: 1.0}


def test_look_follows_after_every_steps(engine):
    compressor = auto(every=10, allow=["acpsgd"])
    choose(compressor, 1, seconds=(1.0, 1.0))
    steps, seen = search.run(compressor), []
    next(steps)
    for _ in range(100):
        seen.append(compressor.current)
        steps.send((engine, (0.0, 1.0)))
    turns = ([1] * 6 + [0] * 6) * search.TURNS_AGAIN
    assert seen == (([1] * 10 + turns) * 3)[:100]


def test_front_ends_plan_again_when_the_method_changes():
    compressor = auto()
    numbers = []
    for change in (lambda: compressor.use(2), lambda: compressor.use(0), lambda: choose(compressor, 0)):
        change()
        numbers.append(compressor.choice_number)
    compressor.load_state_dict(compressor.state_dict())
    assert len({*numbers, compressor.choice_number}) == 4
    compressor.use(1)
    number = compressor.choice_number
    compressor.use(1)
    assert compressor.choice_number == number


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
    for _step in range(steps):
        for engine in engines:
            for name in names:
                plan_groups(compressor, [torch.empty(SHAPES[name])], [name])
            compressor.end_step(engine, names)


def test_steps_are_timed_on_the_gradients_device(monkeypatch):
    marked = []
    monkeypatch.setattr(search, "moment", lambda device: marked.append(device) or 0.0)
    compressor, grad = auto(), torch.zeros(64, 48, device="meta")
    (group,) = plan_groups(compressor, [grad], ["w"])
    group.average([grad])
    compressor.end_step(Mirror(0, 1), ["w"])
    assert marked == [grad.device] * 2  # the end of a step, and the start of the next one


def test_one_optimizer_decides_until_it_is_gone():
    compressor, first, second = auto(every=0), Mirror(0, 1), Mirror(0, 1)
    choose(compressor, 2)
    train(compressor, first, second, steps=5)
    assert compressor.decided and compressor.steps_since == 5
    train(compressor, second, steps=search.PATIENCE - 2)
    assert compressor.steps_since == 5
    train(compressor, second, steps=6)
    assert compressor.steps_since == 5 + 6 and compressor.decided


def test_another_group_of_ranks_is_refused():
    compressor = auto()
    train(compressor, Mirror(0, 1))
    words = r"got gradients that the ranks \[0, 2\] average, and others that \[0, 1\] average; give each process set"
    with pytest.raises(RuntimeError, match=words):
        train(compressor, Mirror(0, 2))
    train(compressor, Mirror(0))  # a group of one rank has nothing to decide
    assert not compressor.decided


def test_new_groups_are_measured_anew():
    compressor = auto(every=0)
    choose(compressor, 2)
    train(compressor, Mirror(0, 1), names=["w"])
    assert compressor.decided
    other = auto(every=0)
    other.load_state_dict(compressor.state_dict())
    train(other, Mirror(0, 1, 2), names=["w"])
    assert not other.decided and set(other.choice.values()) == {"none"}


def test_one_rank_decides_at_once(engine):
    compressor = auto()
    plan_groups(compressor, [torch.zeros(64, 48)], ["w"])  # registers the parameter
    compressor.end_step(engine, ["w"])
    assert compressor.decided and compressor.choice == {"w": "none"} and compressor.report["ranks"] == 1
    loaded = auto()
    saved = auto()
    choose(saved, 2)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.method_for(*KEYS[0]) is loaded.parts[2]
    loaded.end_step(engine, ["w"])  # two ranks have become one
    assert loaded.decided and loaded.method_for(*KEYS[0]) is loaded.parts[search.NONE]


def observe(compressor, name, grad):
    (group,) = plan_groups(compressor, [grad], [name])
    group.gradients = [grad]
    compressor.observe(group)


def allowed(compressor, engine, *gradients):
    """The methods that `max_error` allows in a step with these gradients."""
    steps = search.allowed_methods(compressor)
    next(steps)
    for i, grad in enumerate(gradients):
        observe(compressor, str(i), grad)
    with pytest.raises(StopIteration) as stop:
        steps.send((engine, (0.0, 1.0)))
    return stop.value.value


def test_methods_are_allowed_whose_errors_are_small_on_all_gradients(engine, caplog):
    class Broken(gradzip.TopK):
        def encode_lists(self, lists, keys):
            raise MemoryError("no memory")

    grad, zeros = gradient("w", 0, 0, (64, 48)), torch.zeros(40, 60)
    compressor = auto()
    assert list(drive(search.time_methods(compressor, [0], 1), engine, lambda: 1.0)[0][1]) == [0]
    errors = [(gradzip.roundtrip(part, grad, "w")[0] - grad).norm() / grad.norm() for part in compressor.parts]
    for limit in (1e-9, 1e-2, 0.8, 10.0):
        expected = [i for i, error in enumerate(errors) if error <= limit]
        assert allowed(auto(max_error=limit), engine, zeros, grad, grad[0]) == expected, errors
    assert allowed(auto(max_error=1e-9), engine, zeros) == [0, 1, 2, 3]
    assert allowed(auto(max_error=10.0), engine, zeros, grad * math.nan) == [0]
    broken = auto(max_error=10.0, allow=["fp16", Broken(0.9)])
    assert allowed(broken, engine, grad) == [0, 1] and "no memory" in caplog.text


def test_a_chosen_method_whose_error_grows_gives_way(engine):
    compressor = auto(max_error=0.1, every=100)
    choose(compressor, 2, seconds=(1.0, 0.9, 0.5, 0.4))
    steps = search.reconsider(compressor)
    next(steps)
    observe(compressor, "w", gradient("w", 0, 0, (64, 48)))
    with pytest.raises(StopIteration):
        while True:
            steps.send((engine, (0.0, [1.0, 0.9, 0.5, 0.4][compressor.current])))
    assert compressor.chosen == 1


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
    # Each method has its turn of six steps. Three uncompressed steps come first.
    used = [method for _, method in history[: decided[0]]]
    assert used[:3] == ["none"] * 3
    assert (len(used) - 3) % (search.WARM_UP + search.TIMED) == 0
    assert set(used) == report["ms"].keys() == set(saved["methods"])
    assert choice.keys() == SHAPES.keys() and choice["b"] == "none"
    assert set(choice.values()) <= {"none", report["method"]}
    assert saved["methods"][saved["chosen"]] == report["method"] and report["ranks"] == 2
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
        assert [o[2:] for o in owners[1:]] == [[[], compressed], [compressed, []], [[], []], [[], compressed]]


def test_choice_from_a_checkpoint_is_in_charge_at_once(results):
    for decided, choice, (straight, continued), steps in results["resumed"]:
        assert decided and choice == {"w": "acpsgd", "v": "acpsgd", "b": "none", "u": "acpsgd"}
        for a, b in zip(straight, continued):
            assert all(torch.equal(a[name], b[name]) for name in SHAPES)
        assert steps == [8, 8]  # since the choice
    assert_equal_parameters([r[2][1][-1] for r in results["resumed"]])


def test_elastic_state_has_the_choice(results, front_end):
    if front_end == "horovod":
        for choices, counts, _ in results["synced"]:
            assert choices == ["acpsgd"] * 2 and counts == [0, 4]
        assert_equal_parameters([parameters for *_, parameters in results["synced"]])


def test_ranks_with_different_choices_find_out_in_the_first_step(results):
    words = "parameter 'w': rank 1 has chosen acpsgd for it, rank 0 none; load the compressor's state on all"
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
    python = executable()
    launch = {
        "horovod": [python.with_name("horovodrun"), "--network-interface", "lo", "-np", "2", python],
        "ddp": [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }[front_end]
    worker = Path(__file__).with_name("auto_worker.py")
    done = subprocess.run(
        ["bash", SHAPED_NET, "20mbit", "2", "--", *launch, worker, tmp_path, "slow_network"],
        env=environment(GLOO_SOCKET_IFNAME="lo"), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert_done(done)
    per_rank = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(SIZE)]
    results = [of_rank["slow_network"] for of_rank in per_rank]
    for decided, choice, report, history, _ in results:
        assert decided and choice == {"w": "acpsgd", "b": "none"} and report["method"] == "acpsgd"
        assert report["ms"]["acpsgd"] < report["ms"]["fp16"] / 2 < report["ms"]["none"] / 2
        assert history == results[0][3] and history[-1] == "acpsgd"
    assert_equal_parameters([r[-1] for r in results])
