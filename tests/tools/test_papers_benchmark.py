"""The arithmetic of benchmarks/papers against closed forms, its results file, and the page that it writes."""

import json
import math
import sys

import numpy as np
import pytest
import torch

import data
import gradzip
from benchmarks import gradiveq_bases
from benchmarks.common.results import RESULTS, ResultsError, to_json
from benchmarks.papers import __main__ as papers
from benchmarks.papers import accuracy, acp, atomo, capture, fft, gradiveq
from benchmarks.papers.results import Results, Row, Study, block, rounded, table

STORED = RESULTS / "papers.json"


# ACP-SGD


@pytest.mark.parametrize(
    ("model", "parameters", "numbers"),
    [
        # Rows + columns of all matrices, times the rank; and biases, norms and what is too small, as they are.
        ("resnet50", 25_557_032, 4 * (27_560 + 54_931) + 54_120),
        ("resnet152", 60_192_808, 4 * (76_712 + 169_619) + 152_424),
        ("bert-base", 110_106_428, 32 * 201_530 + 158_012),
        ("bert-large", 336_226_108, 32 * 479_546 + 360_252),
    ],
)
def test_table_1(model, parameters, numbers):
    shapes, network = acp.shapes_of(model), acp.TABLE_1[model]
    assert sum(map(math.prod, shapes)) == parameters
    assert round(parameters / 1e6, 1) == network.parameters
    ratio = acp.powersgd_ratio(shapes, network.rank)
    assert ratio == pytest.approx(parameters / numbers, rel=1e-12)
    # The paper cuts BERT-Base's 16.67 to 16, and rounds the others.
    assert (math.floor if model == "bert-base" else round)(ratio) == network.ratio


def test_acpsgd_sends_half_of_the_factors():
    shapes = acp.shapes_of("bert-large")
    assert acp.acpsgd_ratio(shapes, 256) == pytest.approx(336_226_108 / (256 * 479_546 / 2 + 360_252))
    p, q = (sum(acp.sent(acp.shapes_of("resnet50"), 4, factor)) for factor in (0, 1))
    assert (p, q) == (4 * 27_560 + 54_120, 4 * 54_931 + 54_120)
    assert (round(4 * p / acp.MIB, 2), round(4 * q / acp.MIB, 2)) == (0.63, 1.04)


@pytest.mark.parametrize(("sizes", "number"), [([], 0), ([1], 1), ([25], 1), ([1, 25], 2), ([25, 1], 1), ([9] * 6, 2)])
def test_buffers_fill_from_the_last_gradient(sizes, number):
    assert acp.num_buffers(sizes, 25) == number


def test_best_error_is_that_of_the_left_out_singular_values():
    gradient = torch.zeros(2, 3, 4, 1, 1)
    for i, sigma in enumerate((3.0, 2.0, 1.0)):
        gradient[:, i, i] = sigma
    assert acp.best_error({"x": gradient}, 1) == pytest.approx(math.sqrt(5 / 14))
    assert acp.best_error({"x": gradient}, 3) == 0


def test_low_rank_methods_follow_a_constant_gradient():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(40, 2, generator=generator), torch.randn(2, 90, generator=generator)
    series = {"x": (left @ right).view(1, 40, 10, 3, 3).repeat(12, 1, 1, 1, 1)}
    fit = acp.follow(gradzip.ACPSGD(rank=2, error_feedback=False), series)
    assert fit.error < 1e-5
    assert fit.nbytes == 4 * 2 * (40 + 90) / 2
    rough = acp.follow(gradzip.ACPSGD(rank=1, error_feedback=False), series)
    assert (1 - 1e-5) * acp.best_error(series, 1) <= rough.error < 1
    # The sum of all averages misses one residual with error feedback, and all of what is left out without it.
    assert acp.follow(gradzip.ACPSGD(rank=1), series).drift < 0.5 * rough.drift


# FFT


def snapshot(workers=2):
    generator = torch.Generator().manual_seed(1)
    shapes = {"0.weight": (8, 16, 3, 3), "0.bias": (8,), "1.weight": (64, 40)}
    return {name: torch.randn(workers, *shape, generator=generator) for name, shape in shapes.items()}


def test_topk_errors_are_those_of_the_smallest_elements():
    gradients = snapshot()

    def expected(x):
        energies = np.sort(np.square(x.double().numpy().reshape(-1)))
        return math.sqrt(energies[: len(energies) - round(0.15 * len(energies))].sum() / energies.sum())

    layers = [gradients["0.weight"][0], gradients["1.weight"][0]]
    assert fft.errors_of(fft.LAYER_TOPK, gradients, 0.85) == pytest.approx(list(map(expected, layers)))
    vector = torch.cat([x[0].reshape(-1) for x in gradients.values()])
    assert fft.errors_of(fft.TOPK, gradients, 0.85) == pytest.approx([expected(vector)])


def test_fft_errors_are_those_of_the_smallest_frequencies():
    gradients = {"0.weight": snapshot()["1.weight"]}
    x = gradients["0.weight"][0].double().numpy().reshape(-1)
    energies = np.sort(np.square(np.abs(np.fft.fft(x, norm="ortho"))))
    dropped = math.sqrt(energies[: round(0.85 * len(energies))].sum() / energies.sum())
    (error,) = fft.errors_of(fft.ONE_FFT, gradients, 0.85)
    # One frequency more or less, because gradzip pairs the first with the last one; and 10-bit floats.
    assert error == pytest.approx(dropped, rel=0.005)


def test_alpha_of_one_worker_is_its_error():
    gradients = snapshot()
    layers = fft.layers_of(gradients)
    lost = sum(fft.energy(x - gradzip.roundtrip(fft.fft(0.85), x)[0]) for x in layers)
    expected = math.sqrt(lost / sum(map(fft.energy, layers)))
    assert fft.alpha_of(gradients, 1) == pytest.approx(expected, rel=1e-6)
    # Of independent gradients, the errors of two average out as the gradients do.
    assert fft.alpha_of(gradients, 2) == pytest.approx(expected, rel=0.1)
    # As in the paper's example: if gradients nearly cancel, a frequency that one of them keeps is more than their mean.
    opposite = {name: torch.stack([x[0], -x[0] + 0.01 * x[1]]) for name, x in gradients.items()}
    assert fft.alpha_of(opposite, 2) > 1


def test_number_formats():
    x = torch.tensor([1.0, -0.4, 0.25, 0.75])
    assert fft.uniform_levels(x, 9).tolist() == pytest.approx([1.0, -102 / 255, 64 / 255, 191 / 255])
    tiny = torch.tensor([1.0, -0.5, 0.25, 0.125]) * 2**-30
    assert torch.equal(fft.scaled_cast(tiny, torch.float8_e4m3fn), tiny)
    assert fft.cast(tiny, torch.float8_e4m3fn).abs().max() == 0


@pytest.mark.parametrize(("draw", "hit"), [(torch.randn, True), (torch.rand, False)])
def test_normality(draw, hit):
    layer = draw(1, 100, 1000, generator=torch.Generator().manual_seed(0))
    (row,) = fft.normality({0: {"x": layer}}, {})
    assert row.hit is hit


# GradiVeQ


def test_layout_is_that_of_figure_3():
    series = torch.arange(2 * 3 * 4 * 2 * 2.0).view(2, 3, 4, 2, 2)
    expected = [series[1, f, d, h, w] for h in range(2) for w in range(2) for d in range(4) for f in range(3)]
    assert gradiveq.flat(series)[1].tolist() == expected


def test_losses_are_those_of_projections():
    generator = torch.Generator().manual_seed(0)
    slices = torch.randn(7, 5, 12, generator=generator, dtype=torch.float64)
    eigenvalues, components = gradiveq.spectrum(slices[:, 0])
    centred = slices[:, 0] - slices[:, 0].mean(0)
    wanted = np.linalg.eigvalsh((centred.t() @ centred).numpy())[::-1][:7]
    np.testing.assert_allclose(eigenvalues.numpy(), wanted, atol=1e-12)
    means, basis = slices.mean(0), components[:3]
    rest = slices - means
    missed = rest - rest @ basis.t() @ basis
    expected = (missed.square().sum() / slices.square().sum()).item()
    assert gradiveq.loss_of(slices, means, basis) == pytest.approx(expected)
    assert gradiveq.kept(eigenvalues, 7, 12, 0.0) <= 6


def correlated_series(steps):
    """Gradients whose 16 x 4 collocated values are the same two combinations at each of nine positions."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(2, 64, generator=generator)
    weights = torch.randn(steps, 9, 2, generator=generator)
    slices = weights @ basis  # (steps, positions, D F), with F fastest
    return slices.view(steps, 3, 3, 4, 16).permute(0, 4, 3, 1, 2)


def test_slices_at_multiples_of_the_unit_lose_nothing(monkeypatch):
    monkeypatch.setattr(gradiveq, "SIZES", range(32, 257, 32))
    picture = {}
    (drops,) = gradiveq.slice_sizes(correlated_series(40), 40, picture)
    assert drops.hit
    losses = dict(zip(picture["slices"]["sizes"], picture["slices"]["loss"]))
    assert losses[64] < 0.02 and losses[192] < 0.02  # lambda, and the noise of few samples
    assert losses[96] > 0.3


def test_a_basis_of_all_slices_spans_what_each_of_them_has():
    """Slices that move along a direction each, at right angles: a basis of the first one's samples lacks the others."""
    rng = np.random.default_rng(0)
    directions = np.linalg.qr(rng.standard_normal((768, 3)))[0].T
    slices = rng.standard_normal((30, 3, 1)) * directions
    gradients = torch.from_numpy(slices.reshape(30, 3, 3, 16, 16)).permute(0, 4, 3, 1, 2)  # F is fastest, then D, W, H
    found = gradiveq_bases.lost(gradients)
    later = np.square(slices[20:]).sum((0, 2))
    means = slices[:20].mean(0)
    others = np.square(slices[20:] - means).sum((0, 2))[1:].sum() / later.sum()
    assert found["channels"] == 16 and found["slices"] == 3
    assert found["lost"]["all"] == found["lost"]["renewed"] == {"4": 0.0, "8": 0.0}
    # 20 samples on a line give 19 components more, anywhere.
    assert all((1 - 2 * 19 / 767) * others < lost <= others + 1e-4 for lost in found["lost"]["first"].values())


def test_bases_are_measured_once_for_each_batch(monkeypatch, tmp_path, capsys, one_thread):
    monkeypatch.setattr(gradiveq_bases, "FIRST_STEPS", 1)
    file = tmp_path / "bases.json"
    monkeypatch.setattr(
        sys, "argv", ["bases", "--batch-size=2", "--steps=9", "--json", str(file), "--cache", str(tmp_path)]
    )
    gradiveq_bases.main()
    monkeypatch.setattr(gradiveq_bases, "series", None)
    gradiveq_bases.main()
    (row,) = json.loads(file.read_text())["rows"]
    for layer in row["layers"]:
        for of in layer["lost"].values():
            assert 0 < of["4"] <= of["8"]
    assert capsys.readouterr().out.count("| resnet20, 2 | all slices | ") == 4


def test_correlation_is_found_and_shuffled_away():
    x = gradiveq.collocated(correlated_series(60))
    assert x.shape == (36, 60, 16)
    assert gradiveq.held(x)[:, 1].min().item() == pytest.approx(1.0)
    assert gradiveq.held(gradiveq.shuffled(x))[:, 1].max() < 0.6
    assert torch.equal(gradiveq.shuffled(x).sort(1).values, x.sort(1).values)


# ATOMO


def test_spectral_variance():
    x = torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0]))
    sigma = atomo.singular_values(x)
    nbytes, variance = atomo.spectral(x, sigma, 2)  # p = 1, 1/2, 1/4, 1/4
    assert nbytes == 48 + 4 * 2 * (4 + 4)
    assert variance == pytest.approx((4 * 1 + 1 * 3 + 1 * 3) / 22)
    assert atomo.spectral_at(x, sigma, nbytes) == pytest.approx(variance)
    assert atomo.spectral_at(x, sigma, 48 + 4 * 4 * 8) == 0


def test_spectral_variance_is_that_of_draws():
    x = torch.randn(32, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    expected = atomo.spectral(x, atomo.singular_values(x), 6)
    energies = [fft.energy(gradzip.roundtrip(gradzip.ATOMO(budget=6, seed=seed), x)[0] - x) for seed in range(60)]
    deviation = np.std(energies) / math.sqrt(len(energies))
    assert abs(np.mean(energies) - expected[1] * fft.energy(x)) < 4 * deviation


@pytest.mark.parametrize(("x", "holds"), [(torch.ones(32, 40), 1), (torch.eye(40), 0)])
def test_theorem_6_tells_low_rank_from_sparse(x, holds):
    # Ones: 72 * 32 * 40 <= (32 * 40)^2. Identity: 80 * 40^2 > 40^2.
    (row,) = atomo.theorem_6({0: {"x": x}})
    assert row.ours == f"in {holds} of 1 layers and steps" and row.hit is bool(holds)


def test_theorem_5_holds_for_the_method():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert all(float(row.ours.split()[0]) == pytest.approx(1, abs=0.1) for row in atomo.theorem_5({"x": x}))


def test_theorem_5_is_measured_on_the_quantizers(monkeypatch):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setitem(atomo.QUANTIZERS, "1-bit QSGD", atomo.QUANTIZERS["4-bit QSGD"])
    coarse, ternary = (float(row.ours.split()[0]) for row in atomo.theorem_5({"x": x}))
    assert coarse < 0.5 and ternary == pytest.approx(1, abs=0.1)


# Claims of accuracy and time


def scores(monkeypatch, tmp_path, **finals):
    runs = [
        {"recipe": "images", "method": name.replace("_", "-"), "scores": [1.0, of], "payload_bytes": [100 * of]}
        for name, of in finals.items()
    ]
    (tmp_path / accuracy.SHORT).write_text(
        json.dumps({"runs": [*runs, {"recipe": "text", "method": "none", "scores": [9.0]}]})
    )
    monkeypatch.setattr(accuracy, "RESULTS", tmp_path)
    accuracy.runs.cache_clear()


def test_accuracy_is_that_of_the_study(monkeypatch, tmp_path):
    scores(monkeypatch, tmp_path, none=70.0, qsgd=68.5, fft_range=70.25)
    assert (accuracy.points("qsgd"), accuracy.points("fft-range")) == ("−1.50", "+0.25")
    accuracy.runs.cache_clear()


def test_bytes_are_those_on_the_wire():
    """A gathered payload goes to three others, where an all-reduce sends one and a half of what it is handed."""
    none, qsgd = (accuracy.runs(accuracy.SHORT)[name][0]["payload_bytes"][-1] for name in ("none", "qsgd"))
    assert none / qsgd / 2 < accuracy.fewer("qsgd") < none / qsgd  # small parameters are all-reduced with both


def test_rows_of_other_benchmarks_are_those_of_their_files():
    """Stored rows that repeat results of other files have not been left behind by them."""
    fresh = [*fft.final_accuracy({}), *acp.training(), atomo.ends(), gradiveq.whole_runs()]
    known = [row for name in papers.PAPERS for row in stored().rows(name)]
    assert all(row in known for row in fresh) and len(fresh) == 7


@pytest.mark.parametrize(("final", "hits"), [(69.8, [True, True]), (68.0, [False, True]), (66.0, [False, False])])
def test_fft_is_compared_with_sgd_and_with_quantizers(monkeypatch, final, hits):
    behind = {"fft-range:error_feedback=false": 70 - final, "qsgd:bits=3": 3.0, "terngrad:clip=none": 5.0}
    monkeypatch.setattr(fft, "behind", lambda method, file: behind.get(method, 9.0))
    assert [row.hit for row in fft.final_accuracy({})] == [*hits, False]


def test_ring_times_are_those_of_a_cycle(monkeypatch, tmp_path):
    rows = [{"rate": "x", "ring": "subspace", "speedup": 8.0}, {"rate": "x", "ring": "QSGD", "speedup": 2.0}]
    (tmp_path / "ring.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(gradiveq, "RINGS", tmp_path / "ring.json")
    faster, than_qsgd = gradiveq.aggregation()
    assert (faster.ours, faster.hit) == ("5.0 ×", False)  # 400 steps at 8, 100 at 2: 500 / (50 + 50)
    assert (than_qsgd.ours, than_qsgd.hit) == ("4.00 ×", True)


# Captured gradients


def random_images():
    rng = np.random.default_rng(0)
    images = rng.integers(17, size=(40, 1, 8, 8), dtype=np.uint8), rng.integers(10, size=40)
    return data.Images("random", images, images, epochs=1, augmented=False)


def test_workers_gradients_average_to_that_of_their_batch():
    model = capture.MODELS["cnn"].build(1, 10)
    inputs, targets = next(data.batches(random_images(), batch_size=12, rank=0, size=1, seed=0))
    parts = capture.gradients_of_workers(model, inputs, targets, 3)
    whole = capture.gradients_of_workers(model, inputs, targets, 1)
    for name, gradients in parts.items():
        assert len(gradients) == 3
        assert torch.allclose(gradients.mean(0), whole[name][0], rtol=1e-4, atol=1e-6)


@pytest.mark.long  # the first optimizer of a process takes seconds to import
def test_captured_gradients_are_kept(tmp_path, one_thread):
    run = capture.Run("cnn", 8, 4, (1, 3), workers=2, series=("0.weight",), first=1)
    captured = capture.capture(run, random_images(), tmp_path / "new", lambda share: None)
    assert list(captured.snapshots) == [1, 3] and captured.series["0.weight"].shape == (3, 32, 1, 3, 3)
    shares = []
    again = capture.capture(run, random_images(), tmp_path / "new", shares.append)
    assert not shares  # read, not trained
    assert torch.equal(again.snapshots[3]["0.weight"], captured.snapshots[3]["0.weight"])
    other = capture.Run("cnn", 8, 5, (1,), series=("0.weight",), first=1)
    longer = capture.capture(other, random_images(), tmp_path / "new", shares.append)
    assert len(shares) == 5 and len(longer.series["0.weight"]) == 4


# Results and page

ROWS = [Row("a | b", "fig. 1", "1", "2", False, "far"), Row("c", "§2", "", "3", None), Row("d", "§3", "4", "4", None)]
STUDY = Study(ROWS, {"x": [1 / 3, 2]})


def test_results_are_kept_and_continued(tmp_path):
    path = tmp_path / "papers.json"
    results = Results({"data": "digits", "runs": [(1, 2)]}, path)
    results.resume()
    results.add("fft", STUDY, 1.25)
    again = Results({"data": "digits", "runs": [(1, 2)]}, path)
    again.resume()
    assert again.rows("fft") == STUDY.rows
    assert again.papers["fft"]["picture"] == {"x": [0.3333, 2]}
    assert "commit" in again.papers["fft"]["provenance"]
    with pytest.raises(ResultsError, match="other data or runs; give another --json"):
        Results({"data": "cifar10", "runs": [(1, 2)]}, path).resume()
    before = path.read_text()
    with pytest.raises(ValueError, match="finite"):
        again.add("acp", Study([], {"x": math.nan}), 1.0)
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"conditions": {}, "papers": {"fft": {"rows": [{}]}}}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "papers.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match="no results of this benchmark"):
        Results({}, path).resume()


def test_json_has_a_line_for_what_fits_and_for_each_list_of_numbers():
    numbers = [0.123456] * 50
    value = rounded({"a": {1: numbers}, "b": [[1, 2], [3, 4]], "c": [], "d": {}, "e": [{"f": "θ"}]})
    assert value["a"]["1"] == [0.1235] * 50
    text = to_json(value)
    assert json.loads(text) == value
    assert text.splitlines()[1:5] == [' "a": {', f'  "1": {[0.1235] * 50}', " },", ' "b": [[1, 2], [3, 4]],']


def test_table_shows_hits_and_misses_alike():
    assert list(table(STUDY.rows))[2:] == [
        r"| a \| b | fig. 1 | 1 | 2 | **miss** | far |",
        "| c | §2 |  | 3 | fact |  |",
        "| d | §3 | 4 | 4 | fact |  |",
    ]
    assert block(STUDY.rows).endswith("| fact |  |\n\n0 of 1 claims hold here.\n")


def stored():
    results = Results(json.loads(STORED.read_text())["conditions"], STORED)
    results.resume()
    return results


def test_all_papers_are_stored_and_have_a_picture_on_the_page():
    assert list(stored().papers) == list(papers.PAPERS)
    assert all(f"images/results-{name}.png" in papers.PAGE.read_text() for name in papers.PAPERS)


@pytest.mark.long
@pytest.mark.parametrize("name", papers.PAPERS)
def test_pictures(tmp_path, name):
    pytest.importorskip("matplotlib")
    from benchmarks.papers import pictures

    file = tmp_path / "picture.png"
    pictures.draw(name, stored().papers[name]["picture"], file)
    assert file.read_bytes().startswith(b"\x89PNG") and 10_000 < file.stat().st_size < 100_000


# Command line


def run(monkeypatch, capsys, *arguments):
    """(exit status, standard error) of the command."""
    monkeypatch.setattr(sys, "argv", ["papers", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        papers.main()
    return exit.value.code, capsys.readouterr().err


def test_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["papers", "--help"])
    with pytest.raises(SystemExit, match="0"):
        papers.main()
    assert "\nexamples:\n" in capsys.readouterr().out


def test_wrong_data_gets_one_line(monkeypatch, capsys, tmp_path):
    for content, message in ((None, "data_batch_1.bin: No such file"), (b"x" * 3000, "expected a multiple of 3073")):
        if content:
            (tmp_path / "data_batch_1.bin").write_bytes(content)
        status, error = run(monkeypatch, capsys, "--data", tmp_path)
        assert (
            status == 2
            and error.startswith("python -m benchmarks.papers: error: ")
            and error.count("\n") == 1
            and message in error
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "dgc"], "invalid choice"),
        (["--json", "/nowhere/papers.json"], "expected a file in a folder that exists"),
        (["--png-dir", "/nowhere"], "expected a folder that exists"),
        (["--data", "/nowhere"], "no such folder"),
    ],
)
def test_wrong_arguments_get_one_line(monkeypatch, capsys, arguments, message):
    status, error = run(monkeypatch, capsys, *arguments)
    assert status == 2 and error.count("\n") == 1 and message in error


@pytest.mark.long
@pytest.mark.timeout(900)
def test_quick_run(monkeypatch, capsys, tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    path = tmp_path / "papers.json"
    arguments = ["papers", "--quick", "--json", str(path), "--png-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    papers.main()
    output = capsys.readouterr().out
    assert all(paper.TITLE in output for paper in papers.PAPERS.values())
    assert len(list(tmp_path.glob("results-*.png"))) == len(papers.PAPERS)
    written = path.stat().st_mtime_ns
    papers.main()  # nothing is left to do
    assert path.stat().st_mtime_ns == written and capsys.readouterr().out == output
