"""`gradzip.Monitor`: what it reports, that it changes nothing, and that it costs nothing when nothing is watched."""

import copy
import math
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gradzip
from contract import SHAPES, assert_equal_states, gradient
from gradzip.methods.base.group import averaged
from kinds import params
from launch import horovodrun, scenarios, torchrun


class Record:
    """A writer that keeps what it gets: {tag: {step: value}}."""

    def __init__(self):
        self.values = {}

    def __call__(self, tag, value, step):
        self.values.setdefault(tag, {})[step] = value

    def steps(self, tag):
        return list(self.values.get(tag, {}))


def watched(spec, size=2, **options):
    """A group of `size` ranks whose first one is watched; the monitor; and its record."""
    group = gradzip.LocalGroup(gradzip.parse(spec), size)
    record = Record()
    monitor = gradzip.Monitor(record, **options)
    assert monitor.watch(group.compressors[0]) is group.compressors[0]
    return group, monitor, record


def train(group, steps, names=SHAPES, first=0):
    """The last averages of some steps."""
    ranks = range(len(group.compressors))
    for step in range(first, first + steps):
        averages = {name: group.average([gradient(name, r, step) for r in ranks], name)[0] for name in names}
    return averages


def test_error_feedback_of_top_k():
    group, _, record = watched("topk:theta=0.9", every=3)
    residual = np.zeros(SHAPES["w"], dtype=np.float64)
    for step in range(7):
        group.average([gradient("w", r, step) for r in range(2)], "w")
        wanted = residual + gradient("w", 0, step).numpy()
        smallest = np.sort(np.abs(wanted).ravel())[-round(0.1 * wanted.size)]
        residual = np.where(np.abs(wanted) >= smallest, 0, wanted)
        if step % 3 == 0:
            assert record.values["gradzip.residual_norm/w"][step] == pytest.approx(np.linalg.norm(residual), rel=1e-5)
            expected = np.linalg.norm(residual) / np.linalg.norm(wanted)
            assert record.values["gradzip.error/w"][step] == pytest.approx(expected, rel=1e-5)
    assert record.steps("gradzip.error/w") == [0, 3, 6]


def test_totals_are_those_of_the_traffic():
    group, monitor, record = watched("qsgd", every=2)
    traffic = group.compressors[0].traffic
    sent = []
    for step in range(5):
        before = traffic.bytes_sent
        train(group, 1, first=step)
        sent.append(traffic.bytes_sent - before)
    assert monitor.steps == 4
    assert record.values["gradzip/bytes_sent"] == {0: sent[0], 2: sent[2]}  # step 4 is not over
    assert record.values["gradzip/bytes_wire"] == record.values["gradzip/bytes_sent"]  # to one of two ranks, each
    dense = sum(4 * math.prod(shape) for shape in SHAPES.values())
    assert record.values["gradzip/ratio"] == {step: dense / sent[step] for step in (0, 2)}
    assert all(0 < seconds < 60 for seconds in record.values["gradzip/compression_seconds"].values())
    errors = [record.values[f"gradzip.error/{name}"][2] for name in ("v", "w")]
    assert min(errors) < record.values["gradzip/error"][2] < max(errors)
    ratios = [record.values[f"gradzip.ratio/{name}"][2] for name in ("v", "w")]
    assert min(ratios) > record.values["gradzip/ratio"][2]  # "b" is not compressed
    assert not any("/b" in tag for tag in record.values if not tag.startswith("gradzip/bytes_"))


@pytest.mark.parametrize("spec", ["momentum:inner=acpsgd", "per-layer:w=topk,v=dgc", "qsgd"])
def test_memory_is_what_was_known_before(spec):
    group, _, record = watched(spec, every=3)
    train(group, 5)
    expected = gradzip.memory_bytes(gradzip.parse(spec), SHAPES, 2)
    assert record.values["gradzip/memory_bytes"][3] == expected and (spec == "qsgd") == (expected == 0)


@pytest.mark.parametrize("spec", params())
def test_averages_and_states_are_those_of_a_run_that_is_not_watched(spec):
    group, _, record = watched(spec, every=2)
    plain = gradzip.LocalGroup(gradzip.parse(spec), 2)
    for name, average in train(group, 6).items():
        assert torch.equal(average, train(plain, 6, [name])[name])
    for a, b in zip(group.compressors, plain.compressors):
        assert_equal_states(a.state_dict(), b.state_dict())
        assert a.traffic.bytes_sent == b.traffic.bytes_sent
    assert record.steps("gradzip/ratio") == [0, 2, 4]


def calls(function):
    """How often each function of gradzip is called while `function` runs, by file and name."""
    counts = {}
    package = str(Path(gradzip.__file__).parent)

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            key = Path(code.co_filename).name, code.co_name
            counts[key] = counts.get(key, 0) + 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts


def test_nothing_is_called_when_nothing_is_watched():
    plain = gradzip.LocalGroup(gradzip.TopK(theta=0.9), 1)
    train(plain, 3)
    off = calls(lambda: train(plain, 1, first=3))
    assert not any(file in ("monitor.py", "replay.py") for file, _ in off)

    group, monitor, _ = watched("topk:theta=0.9", size=1, every=1000)
    train(group, 3)
    assert monitor.steps == 2
    quiet = calls(lambda: train(group, 1, first=3))
    extra = {key: count - off.get(key, 0) for key, count in quiet.items() if count != off.get(key, 0)}
    assert extra == {("monitor.py", "begin"): len(SHAPES), ("monitor.py", "_end_step"): 1}

    monitor.stop()
    assert calls(lambda: train(group, 1, first=4)) == off


def test_components_of_gradiveq():
    group, _, record = watched("gradiveq:warmup_steps=0,sample_steps=4,compress_steps=3,stop=none", every=1)
    train(group, 6, ["v"])
    (basis,) = group.compressors[0].states["v"].bases
    assert record.values["gradzip.components/v"] == {4: len(basis), 5: len(basis)}
    assert 1 <= len(basis) <= 3
    assert [record.values["gradzip.error/v"][step] > 0 for step in range(6)] == [False] * 4 + [True] * 2


def test_clamped_share():
    group, _, record = watched("dct-range:theta=0.75,value_range=1.5,error_feedback=False")
    train(group, 1, ["w"])
    magnitudes = np.sort(np.abs(gradient("w", 0, 0).numpy()).ravel())[::-1][: round(0.25 * 64 * 48)]
    assert record.values["gradzip.clamped/w"][0] == pytest.approx(np.mean(magnitudes > 1.5))


def test_norms_are_without_the_loss_scale():
    group, _, record = watched("topk:theta=0.9")
    scaled, _, of_scaled = watched("topk:theta=0.9")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))
    for compressor in scaled.compressors:
        compressor.follow(scaler)
    train(group, 1, ["w"])
    scaled.average([1024 * gradient("w", r, 0) for r in range(2)], "w")
    assert of_scaled.values == record.values


def test_parts_of_per_layer_report_under_their_names():
    group, _, record = watched("per-layer:^w$=topk(theta=0.9),default=fp16")
    train(group, 1)
    assert record.values["gradzip.error/v"][0] < 0.001 < 0.5 < record.values["gradzip.error/w"][0]


def test_gradients_that_are_not_finite_leave_no_points():
    group, _, record = watched("topk:theta=0.9", every=1)
    train(group, 1)
    bad = gradient("w", 0, 1)
    bad[0, 0] = math.nan
    group.average([bad, gradient("w", 1, 1)], "w")
    train(group, 1, ["v"], first=1)
    train(group, 1, first=2)
    assert record.steps("gradzip.error/w") == [0, 2]
    assert record.steps("gradzip/error") == [0, 1]
    assert all(math.isfinite(value) for of_tag in record.values.values() for value in of_tag.values())


@pytest.mark.parametrize("copied", [gradzip.Compressor.clone, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_are_not_watched(copied):
    record = Record()
    compressor = copied(gradzip.Monitor(record).watch(gradzip.TopK()))
    gradzip.engines.local.drive([averaged(compressor, gradient("w", 0, 0), "w")])
    assert record.values == {}


def test_a_writer_that_fails_does_not_stop_training():
    group, monitor, _ = watched("topk:theta=0.9", every=1)
    plain = gradzip.LocalGroup(gradzip.TopK(theta=0.9), 2)
    monitor._scalar = lambda *_: 1 / 0
    with pytest.warns(UserWarning, match="Monitor: got ZeroDivisionError: division by zero in the report of step 0"):
        train(group, 1)
    averages, expected = train(group, 3, first=1), (train(plain, 4))
    assert all(torch.equal(averages[name], expected[name]) for name in averages)
    monitor.watch(group.compressors[0])  # once more
    assert monitor.watch(group.compressors[0])


def test_bad_arguments():
    with pytest.raises(TypeError, match="Monitor: got the writer 3, expected a SummaryWriter, or a function of tag"):
        gradzip.Monitor(3)
    with pytest.raises(TypeError, match="Monitor: got the writer <class"):
        gradzip.Monitor(Record)
    for every in (0, -1, 2.5, "10"):
        with pytest.raises(ValueError, match="Monitor: got every = .*, expected an integer >= 1"):
            gradzip.Monitor(print, every=every)
    with pytest.raises(TypeError, match="Monitor.watch: got 'topk', expected a compressor"):
        gradzip.Monitor(print).watch("topk")


def test_one_monitor_for_each_compressor():
    monitor, compressor = gradzip.Monitor(print), gradzip.TopK()
    monitor.watch(compressor)
    for other, watched in ((monitor, gradzip.TopK()), (gradzip.Monitor(print), compressor)):
        with pytest.raises(ValueError, match="expected a monitor of its own for each compressor; call stop"):
            other.watch(watched)
    monitor.stop()
    monitor.stop()
    gradzip.Monitor(print).watch(compressor)


def test_steps_can_continue_from_a_checkpoint():
    group, monitor, record = watched("topk", every=10)
    monitor.steps = 119
    train(group, 3)
    assert record.steps("gradzip.error/w") == [120]


@pytest.mark.filterwarnings("default")
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    group, _, record = watched("topk", every=2)
    with SummaryWriter(tmp_path) as writer:
        gradzip.Monitor(writer, every=2, prefix="peer").watch(group.compressors[1])
        train(group, 4)
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = events.Tags()["scalars"]
    assert set(tags) == {tag.replace("gradzip", "peer") for tag in record.values}
    assert [event.step for event in events.Scalars("peer.error/w")] == [0, 2]
    assert 0 < events.Scalars("peer.error/w")[1].value < 1


@pytest.mark.parametrize(
    "run", [pytest.param(horovodrun, marks=pytest.mark.long), torchrun], ids=lambda run: run.__name__
)
def test_jobs(run, tmp_path):
    """Rank 0 alone is watched. Buckets are compressed as one; DDP cuts them anew after the first step."""
    if run is horovodrun:
        pytest.importorskip("horovod.torch")
    results = scenarios(2, "monitor_worker.py", tmp_path, run=run)
    (parameters, reports, steps), (second, *unwatched) = results["watched_on_rank_0"]
    for name, parameter in parameters.items():
        assert torch.equal(parameter, second[name])
        assert torch.equal(parameter, results["not_watched"][0][name])
    assert unwatched == [{}, 0]
    assert steps == 4  # the fifth step is not over
    assert list(reports["gradzip/bytes_sent"]) == [0, 2]
    assert {tag.partition("/")[0] for tag in reports} == {
        "gradzip", "gradzip.error", "gradzip.ratio", "gradzip.residual_norm", "gradzip.clamped"
    }  # fmt: skip
    steps = sorted({step for tag, of_tag in reports.items() if tag.startswith("gradzip.error/") for step in of_tag})
    assert steps == [0, 2, 4]
    assert any(tag.startswith("gradzip.error/") and " more" in tag for tag in reports)
    assert all(0 < error < 1 for tag in reports if "error/" in tag for error in reports[tag].values())
