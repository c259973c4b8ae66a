"""The figures of README.md and docs/ that follow from stored results, and the numbers that nobody measured.

`STATED`: (page, sentence with fields, what fills the fields). `GIVEN`: page -> phrases with numbers that are no
measurements. tests/tools/test_figures.py compares both with the pages.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

import torch

import gradzip
from benchmarks import rotation, transforms
from benchmarks.common.results import RESULTS
from benchmarks.convergence.results import Results, Row
from benchmarks.convergence.results import rows as rows_of_study
from benchmarks.scale import report as scale_report
from benchmarks.scale.variants import GATHERED, VARIANTS
from benchmarks.training.floor import share_of_unshaped
from benchmarks.training.predictions import predict_cells, share_within
from benchmarks.training.report import fixed_choices
from benchmarks.training.results import cells
from benchmarks.training.variants import FRONT_ENDS
from benchmarks.whole_runs import __main__ as whole_runs_of_studies
from gradzip.advice.cost import Link, minimal_ratio
from gradzip.methods.gradiveq import best_slice_size
from models import MODELS

Stated = tuple[str, str, Callable[[], tuple[Any, ...]]]
README, ACCURACY, BENCHMARKS, RESULTS_PAGE = "README.md", "docs/accuracy.md", "docs/benchmarks.md", "docs/results.md"
LINKS, METHODS, TRANSFORMS, ADVISE = "docs/links.md", "docs/methods.md", "docs/transforms.md", "docs/advise.md"
SCALE, OUTER = "docs/scale.md", "docs/outer.md"


@functools.cache
def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def extremes(values: Iterable[float]) -> tuple[float, float]:
    values = list(values)
    return min(values), max(values)


# Studies of accuracy


def runs(study: str, recipe: str, method: str) -> list[dict]:
    """The runs of a method at the learning rate of the study, of which it has one."""
    of_study = load(f"convergence_{study}.json")["runs"]
    found = [run for run in of_study if (run["recipe"], run["method"]) == (recipe, method)]
    assert found and len({run["lr"] for run in found}) == 1, (study, recipe, method)
    return found


def score(study: str, recipe: str, method: str, epoch: int = -1) -> float:
    """The mean over the seeds, after an epoch."""
    return fmean(run["scores"][epoch] for run in runs(study, recipe, method))


def seed_of_resnet20(method: str, seed: int) -> list[float]:
    """The scores of a run after each epoch."""
    (found,) = [run["scores"] for run in runs("resnet20", "images", method) if run["seed"] == seed]
    return found


def behind(study: str, recipe: str, method: str, without: str = "none") -> float:
    """How much worse a method ends than another: points, or bits per character."""
    return abs(score(study, recipe, method) - score(study, recipe, without))


def train_loss(study: str, recipe: str, method: str) -> float:
    """The last training loss, mean over the seeds."""
    return fmean(run["train_losses"][-1][-1] for run in runs(study, recipe, method))


def test_loss_above(method: str) -> float:
    """Of the text with BlockFloat: how much the mean test loss is above that without compression, %."""
    mine, none = (fmean(r["test_losses"][-1] for r in runs("block_float", "text", m)) for m in (method, "none"))
    return 100 * (mine / none - 1)


def fewer(study: str, recipe: str, method: str) -> float:
    """Bytes of float32 gradients for each byte sent."""
    sent, plain = (fmean(run["payload_bytes"][-1] if isinstance(run["payload_bytes"], list) else run["payload_bytes"]
                         for run in runs(study, recipe, name)) for name in (method, "none"))  # fmt: skip
    return plain / sent


def quick_methods() -> set[str]:
    """Of the quick study of images: all but `none` and ACPSGD without reuse."""
    methods = {run["method"] for run in load("convergence_quick.json")["runs"] if run["recipe"] == "images"}
    return {method for method in methods if method != "none" and "reuse=false" not in method}


@functools.cache
def tuned(method: str, recipe: str = "text", study: str = "text") -> Row:
    """The row of a method in a study of text with several learning rates."""
    results = Results({}, RESULTS / f"convergence_{study}.json")
    results.resume()
    return next(row for row in rows_of_study(results, recipe) if row.method == method)


def instructions(kernel: str) -> float:
    """What a kernel executes for an element."""
    rows = load("instructions.json")["rows"]
    return next(row["instructions_per_element"] for row in rows if row["kernel"] == kernel)


def local_steps_cost(method: str, study: str = "outer", recipe: str = "text-outer") -> tuple[float, float]:
    """How many times fewer bytes a run with local steps sends, and how many % above data-parallel training it ends."""
    row, none = (tuned(of, recipe, study) for of in (method, "none"))
    return fewer_of(row), 100 * (row.score / none.score - 1)


def muon_outer_cost(method: str, study: str = "muon_outer") -> float:
    """How many % above data-parallel Muon a run with local steps ends."""
    return local_steps_cost(method, study, "text-muon-outer")[1]


def muon_outer_row(method: str) -> Row:
    """Its row, with one seed."""
    return tuned(method, "text-muon-outer", "muon_outer")


def compressed_warmup(method: str) -> Row:
    """The row of a method in the study of a compressed warm-up."""
    return tuned(method, study="momentum")


def above_none(method: str, lr: float | None = None) -> float:
    """By how many percent a method ends above no compression there, each at its best learning rate, or at this one."""
    ours, none = (row.by_lr[lr] if lr else row.score for row in map(compressed_warmup, (method, "none")))
    return 100 * (ours / none - 1)


def seeds_differ() -> float:
    """By how many percent two seeds without compression differ there, at the best learning rate."""
    scores = [record.scores[-1] for record in compressed_warmup("none").records]
    return 100 * (max(scores) / min(scores) - 1)


def with_muon(method: str, study: str = "muon") -> Row:
    """The row of a method in a study of text with Muon."""
    return tuned(method, "text-muon", study)


def above_muon(method: str, study: str = "muon") -> float:
    """By how many percent a method ends above no compression there."""
    return 100 * (with_muon(method, study).score / with_muon("none", study).score - 1)


def dense(row: Row) -> float:
    """Bytes of the float32 gradients of an epoch."""
    return 4 * row.records[0].parameters * load("convergence_text.json")["recipes"]["text"]["steps"]


def fewer_of(row: Row) -> float:
    """Bytes of float32 gradients for each byte sent."""
    return dense(row) * len(row.payload_bytes) / row.payload_bytes[-1]


def fewer_at_the_end(row: Row) -> float:
    """The same in the last epoch."""
    return dense(row) / (row.payload_bytes[-1] - row.payload_bytes[-2])


# Time to the target loss


def whole_run(method: str) -> tuple[float, float]:
    """Seconds of a method to the target at 50 Mb/s: of the whole run, and predicted."""
    return run_and_prediction(next(row for row in load("whole_runs.json")["rows"] if row["method"] == method))


def run_and_prediction(row: dict) -> tuple[float, float]:
    study = whole_runs_of_studies.study_named(row["study"])
    taken = whole_runs_of_studies.taken(row, study)
    ours = whole_runs_of_studies.contender_of(row, study.table()).seconds(row["ms"])
    assert taken is not None and ours is not None
    return taken[1], ours


def longer_than_predicted() -> tuple[float, float, float]:
    """By how many percent whole runs take longer: the least and the most, but for the last run; that is shorter."""
    *pairs, (seconds, ours) = map(run_and_prediction, load("whole_runs.json")["rows"])
    return *extremes(100 * (seconds / ours - 1) for seconds, ours in pairs), 100 * (1 - seconds / ours)


# Training steps


def steps(file: str, **where: Any) -> list[dict]:
    """The rows of a file with steps, where fields have these values."""
    rows = load(file)["rows"]
    return [row for row in rows if "ms" in row and all(row[key] == value for key, value in where.items())]


def step(file: str, variant: str, **where: Any) -> dict:
    (row,) = steps(file, variant=variant, **where)
    return row


def of_gradzip(rows: Iterable[dict], without_fp16: bool = True) -> list[dict]:
    return [r for r in rows if ":" in r["variant"] and not (without_fp16 and r["variant"].endswith(":fp16"))]


def slow_cells(rate: str) -> list[tuple[list[dict], dict[str, float]]]:
    """The cells of a rate: rows of gradzip's methods, and ms of each variant."""
    of_rate = cells(steps("training_cpu.json", rate=rate))
    return [(of_gradzip(rows), {row["variant"]: row["ms"] for row in rows}) for _, rows in of_rate]


def fp16(ms: dict[str, float]) -> float:
    """The faster of the two stock averages in 16 bits."""
    return min(ms[name] for name in ("ddp-fp16", "horovod-fp16") if name in ms)


def fp32(ms: dict[str, float]) -> float:
    return min(ms[name] for name in ("ddp", "horovod") if name in ms)


def fastest_against(stock: Callable[[dict[str, float]], float]) -> tuple[float, float]:
    """The least and the most that the fastest method wins at 100 Mb/s."""
    return extremes(stock(ms) / min(row["ms"] for row in rows) for rows, ms in slow_cells("100mbit"))


def against_fp16() -> tuple[str, float]:
    """Whether every method that sends less is faster than fp16 at 250 Mb/s and below, and the most over Horovod."""
    slow = [cell for rate in ("100mbit", "250mbit") for cell in slow_cells(rate)]
    faster = all(row["ms"] < fp16(ms) for rows, ms in slow for row in rows)
    return "every" if faster else "not every", fastest_against(lambda ms: ms["horovod"])[1]


def fastest_over_fp16(model: str) -> float:
    """Of the fastest method over fp16 at 1 Gb/s with two ranks, %."""
    rows = steps("training_cpu.json", model=model, rate="1gbit", ranks=2)
    ms = {row["variant"]: row["ms"] for row in rows}
    return 100 * (fp16(ms) / min(row["ms"] for row in of_gradzip(rows)) - 1)


def on_fast_networks() -> list[float]:
    """The steps of all methods at 10 Gb/s and unshaped, divided by that of stock Horovod."""
    rows = [row for rate in ("10gbit", "none") for row in steps("training_cpu.json", rate=rate)]
    return [
        row["ms"] / next(r["ms"] for r in of_cell if r["variant"] == "horovod")
        for _, of_cell in cells(rows)
        for row in of_gradzip(of_cell, without_fp16=False)
    ]


def block_float(front: str, spec: str) -> tuple[float, float]:
    """The least and the most that it is faster than fp16 with the same front end."""
    rows = load("training_block_float_cpu.json")["rows"]
    quotients = []
    for _, of_cell in cells(rows):
        ms = {row["variant"]: row["ms"] for row in of_cell if "ms" in row}
        if f"{front}:{spec}" in ms:
            quotients.append(ms[f"{front}-fp16"] / ms[f"{front}:{spec}"])
    return extremes(quotients)


def setting(name: str | None, variant: str, key: str) -> float:
    """A figure of ResNet-18 with a setting of Horovod's, such as CYCLE_TIME=5, or with its defaults."""
    environment = {f"HOROVOD_{name.partition('=')[0]}": name.partition("=")[2]} if name else {}
    for run in load("horovod_settings.json")["runs"]:
        if run["provenance"]["environment"] == environment:
            return next(row[key] for row in run["rows"] if row["variant"] == variant)
    raise KeyError(name)


def share(name: str | None) -> float:
    """Of the ideal, %: ACPSGD's step."""
    return 100 * setting(name, "horovod:acpsgd", "share_of_ideal")


MAIN, MAIN_MODELS = "training_main_cpu.json", ("alexnet", "resnet18", "charlm")
TORCH_POWERSGD = "training_powersgd_cpu.json"
FLOOR, FLOOR_MODELS = "floor_cpu.json", ("resnet18", "alexnet")
HOSTS, SAFE_HOSTS = "training_hosts_cpu.json", "training_hosts_safe_cpu.json"
HIERARCHICAL = "ddp:hierarchical:inner=acpsgd(rank=4)"
BLOCK_FLOAT_ON_HOSTS = "ddp:hierarchical:inner=block-float", "ddp:block-float"


def aborted_rounds(model: str) -> tuple[int, int]:
    """Of torch's powerSGD_hook: the rounds that it aborted, and all."""
    rounds = step(TORCH_POWERSGD, "ddp-powersgd", model=model)["rounds"]
    return sum("error" in of_round for of_round in rounds), len(rounds)


def at_floor(variant: str, model: str) -> dict:
    return step(FLOOR, variant, model=model, rate="1gbit")


def above_floor(front: str, model: str) -> list[dict]:
    """The rows of gradzip's methods with a front end."""
    rows = of_gradzip(steps(FLOOR, model=model, rate="1gbit"))
    return [row for row in rows if row["variant"].startswith(front)]


def of_floor(row: dict) -> float:
    return 100 * row["share_of_floor"]


def own_ms(row: dict) -> float:
    return row["compression_ms"]


def of_floor_with_own_code(row: dict) -> float:
    """What the share of the floor would be if a method added the time of its own code alone."""
    floor = row["ms"] * row["share_of_floor"]
    return 100 * floor / (floor + own_ms(row))


def times_unshaped(row: dict) -> float:
    return 1 / share_of_unshaped(load(FLOOR)["rows"], row["model"], row["variant"])


def slower_on_hosts(variant: str, other: str, file: str = HOSTS) -> tuple[float, float]:
    """How many times as long as another a variant takes: the least and the most of all cells."""
    return extremes(
        row["ms"] / step(file, other, rate=row["rate"], model=row["model"])["ms"]
        for row in steps(file, variant=variant)
    )


def codec_ms(model: str) -> list[float]:
    """Of BlockFloat: ms that a step spends in its own code."""
    return [row["compression_ms"] for row in of_gradzip(steps("training_block_float_cpu.json", model=model))]


def auto() -> list[float]:
    """How much slower Auto is than the best fixed choice of its front end, %: the worst cell first."""
    slower = []
    for _, of_cell in cells(steps("training_cpu.json")):
        ms = {row["variant"]: row["ms"] for row in of_cell}
        for front in FRONT_ENDS:
            if f"{front}:auto" in ms:
                best = min(ms[variant] for variant in fixed_choices(front))
                slower.append(100 * (ms[f"{front}:auto"] / best - 1))
    return sorted(slower, reverse=True)


@functools.cache
def predicted() -> list[tuple[Any, float, float]]:
    return predict_cells(load("training_cpu.json"))


def advice(link: str) -> dict:
    """How good the advice of the cost model is."""
    scores = load("decisions.json")["scores"]
    return next(score for score in scores if (score["model"], score["link"]) == ("cost model", link))


def regret(link: str, part: str, kind: str = "median_regret") -> float:
    return 100 * advice(link)[part][kind]


def missed_goals() -> tuple[int, int]:
    """Of the kernels: goals that are missed, and goals."""
    goals = [
        goal
        for row in load("kernels_cpu.json")["rows"]
        for goal in (
            row["most_copies"] and row["copies"] > row["most_copies"],
            row["least_speedup"] and row["speedup"] < row["least_speedup"],
        )
        if goal is not None
    ]
    return sum(goals), len(goals)


def copies(*names: str) -> tuple[float, ...]:
    by_name = {row["name"]: row["copies"] for row in load("kernels_cpu.json")["rows"]}
    return tuple(by_name[name] for name in names)


def kernel_speedup(name: str) -> float:
    return next(row["speedup"] for row in load("kernels_cpu.json")["rows"] if row["name"] == name)


def ring(rate: str, name: str, key: str) -> float:
    return next(row[key] for row in load("ring_cpu.json")["rows"] if (row["rate"], row["ring"]) == (rate, name))


# Bytes, and GradiVeQ

GRADIVEQ_FILES = "gradiveq.json", "gradiveq_seed1.json"


@functools.cache
def ratio(spec: str) -> float:
    """Bytes of float32 for each byte sent of a gradient of random numbers."""
    gradient = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    return gradient.nbytes / gradzip.roundtrip(gradzip.parse(spec), gradient)[1]


def lost(basis: tuple[int, float, int | None], channels: int) -> list[float]:
    """The energy that a basis loses in the first ten steps."""
    rows = [row for file in GRADIVEQ_FILES for row in load(file)["lost"]]
    wanted = (*basis, channels)
    return [row["own"][0] for row in rows if (row["samples"], row["loss"], row["reuse"], row["channels"]) == wanted]


def gradiveq(file: int, run: int) -> tuple[float, float, float, float]:
    """Of a run: the share of compressed gradients, the mean of what they lost, the ratio, the training loss."""
    found = load(GRADIVEQ_FILES[file])["runs"][run]
    lost = [point["lost"] for point in found["points"] if "lost" in point]
    compressed = fmean(point["compressed"] for point in found["points"])
    return compressed, fmean(lost) if lost else 0.0, found["ratio"], found["train_loss"]


def whole_runs() -> tuple[float, float]:
    """The least and the most times fewer bytes in a run with GradiVeQ."""
    of_resnet20 = [run["ratio"] for run in load(GRADIVEQ_FILES[0])["runs"] if run["compression"].startswith("gradiveq")]
    return extremes([*of_resnet20, *(fewer(study, "images", GRADIVEQ) for study in ("default", "quick"))])


def sampling_memory() -> tuple[float, float]:
    """Of a ResNet-18: MB, and times the model."""
    shapes = [parameter.shape for parameter in MODELS["resnet18"].build(3, 10).parameters()]
    stored = sum(4 * best_slice_size(shape) * 100 for shape in shapes if len(shape) == 4)
    return stored / 1e6, stored / sum(4 * shape.numel() for shape in shapes)


# Rotated blocks


def rounding(key: str, bits: int, rule: str = "largest, nearest", block: int = 256, model: str = "") -> list[float]:
    """The errors of all vectors of a network. key: plain or rotated, and ", divided" by AdamW's root mean square."""
    return [
        row[key]
        for vector in load("rotation.json")["vectors"]
        for row in vector["rows"]
        if (row["bits"], row["rule"], row["block"]) == (bits, rule, block) and model in vector["model"] and key in row
    ]


def quotients(mine: list[float], others: list[float]) -> tuple[float, float]:
    """The least and the most of errors relative to others of the same vectors."""
    return extremes(a / b for a, b in zip(mine, others, strict=True))


# Papers


def claims(file: str, of: str = "") -> tuple[int, int]:
    """How many claims hold, and how many were tested."""
    rows = [row for paper in load(file)["papers"].values() for row in paper["rows"]]
    hits = [row["hit"] for row in rows if row["hit"] is not None and row["claim"].startswith(of)]
    return sum(hits), len(hits)


def fft_against_topk() -> tuple[int, int, float, float]:
    """On digits: comparisons that the FFT loses, all of them, and the least and most of its error over Top-k's."""
    claim = "FFT loses less than Top-k"
    hits, number = claims("papers_digits.json", claim)
    rows = load("papers_digits.json")["papers"]["fft"]["rows"]
    quotients = [float(re.search(r"\((.*) ×\)", row["ours"])[1]) for row in rows if row["claim"].startswith(claim)]
    return number - hits, number, *extremes(quotients)


def top_three() -> str:
    """The share of the energy that three singular values hold, as on the page."""
    rows = load("papers_digits.json")["papers"]["atomo"]["rows"]
    share = next(row["ours"] for row in rows if row["claim"].startswith("Singular values"))
    return share.removesuffix(" of the energy").replace("18 hold", "18 singular values hold")


# Transforms

STUDY = "transforms.json"
LAYERS, KERNELS = "mean of layers", "convolution 3x3"


def gradients(*models: str) -> list[dict]:
    return [x for x in load(STUDY)["gradients"] if x["model"] in models or not models]


def error(
    x: dict, transform: str, code: str = "rice 1024", bits: int = 6, rate: float = 1.0, kind: str = LAYERS
) -> float | None:
    wanted = (transform, code, bits)
    rows = (r for r in x["rows"] if (r.get("transform"), r.get("indices"), r.get("bits")) == wanted)
    errors = next(rows, {"errors": {}})["errors"].get(kind)
    return errors and errors[load(STUDY)["rates"].index(rate)]


def measured(x: dict, method: str, rate: float = 1.0) -> float:
    errors = next(r["errors"][LAYERS] for r in x["rows"] if r.get("method", "").startswith(method))
    return errors[load(STUDY)["rates"].index(rate)]


def against_method(other: str, *models: str, rate: float = 1.0) -> tuple[float, float]:
    return extremes(measured(x, "dct-range", rate) / measured(x, other, rate) for x in gradients(*models))


def against(transform: str, other: str, *models: str, kind: str = LAYERS, **mine: Any) -> tuple[float, float]:
    """The least and the most of the quotients of errors at 1 bit per element."""
    pairs = ((error(x, transform, kind=kind, **mine), error(x, other, kind=kind)) for x in gradients(*models))
    return extremes(a / b for a, b in pairs if a and b)


def by_network(transform: str, other: str) -> tuple[float, float]:
    """How much the mean error of a network's steps differs from that of another transform, %: least and most."""

    def mean(name: str, model: str) -> float:
        return fmean(error(x, name) for x in gradients(model))

    models = sorted({x["model"] for x in gradients()})
    return extremes(100 * (mean(transform, model) / mean(other, model) - 1) for model in models)


def bits_above_best(bits: int) -> tuple[float, float]:
    """Of the DCT by shape, mean over all gradients, at ½, 1 and 2 bits per element: above the best number, %."""

    def quotient(x: dict, rate: float) -> float:
        best = min(error(x, "dct kernel", bits=b, rate=rate) for b in (4, 5, 6, 7, 8, 10, 12))
        return error(x, "dct kernel", bits=bits, rate=rate) / best

    return extremes(100 * (fmean(quotient(x, rate) for x in gradients()) - 1) for rate in (0.5, 1.0, 2.0))


def most_gained(*kinds: str) -> float:
    """By any transform, on gradients of such layers: less error than without, at ½, 1 or 2 bits per element, %."""
    shares = [
        mine / plain
        for x in gradients()
        for rate in (0.5, 1.0, 2.0)
        for kind in kinds
        if (plain := error(x, "identity", kind=kind, rate=rate))
        for row in x["rows"]
        if (mine := "transform" in row and error(x, row["transform"], kind=kind, rate=rate))
    ]
    return 100 * (1 - min(shares))


def percent(bounds: tuple[float, float]) -> tuple[float, float]:
    """Quotients as differences, %."""
    return 100 * (bounds[0] - 1), 100 * (bounds[1] - 1)


# More ranks

SCALE_FILE = "scale_cpu.json"


def scale_differences(key: str) -> list[float]:
    """By how much predictions exceed what 2 to 16 ranks have measured, %."""
    return [100 * value for value in scale_report.differences(load(SCALE_FILE), key).values()]


def bytes_of_a_megabyte() -> tuple[float, float]:
    """How much less than on the wire is predicted where a rank sends a megabyte, %; and the most, kB."""
    sent = scale_report.measured(load(SCALE_FILE), "wire_bytes")
    shares = {pair: -value for pair, value in scale_report.differences(load(SCALE_FILE), "wire_bytes").items()}
    largest = max(share for pair, share in shares.items() if sent[pair] >= 1e6)
    return 100 * largest, max(share * sent[pair] for pair, share in shares.items()) / 1e3


def most_ranks() -> int:
    """With which all methods are measured."""
    of_ranks = Counter(ranks for _, ranks in scale_report.measured(load(SCALE_FILE), "cpu_seconds"))
    return max(ranks for ranks, count in of_ranks.items() if count == len(VARIANTS))


def growth(exchange: str) -> tuple[float, float]:
    """The least and the most CPU time with the most ranks, divided by that with two."""
    cpu = scale_report.measured(load(SCALE_FILE), "cpu_seconds")
    variants = [f"{method}:exchange={exchange}" for method in GATHERED]
    return extremes(cpu[variant, most_ranks()] / cpu[variant, 2] for variant in variants)


def projected_to(gbit: int, key: str, variant: str, ranks: int = 64) -> list[float]:
    """A figure of all models on a link, without those that are None."""
    cells = [c for c in load(SCALE_FILE)["projection"] if (c["gbit"], c["ranks"]) == (gbit, ranks)]
    return [cell[key][variant] for cell in cells if cell[key][variant] is not None]


def needed(gbit: int, variant: str) -> tuple[float, float]:
    """GB/s that a codec must do to pay with 64 ranks: the least and the most of the models."""
    return extremes(rate / 1e9 for rate in projected_to(gbit, "rate", variant))


def one_core(variant: str) -> float:
    """GB/s of gradients that one core encodes and decodes."""
    return scale_report.codec_rate(load(SCALE_FILE), variant) / 1e9


RESNETS = ("resnet20", "resnet18")

TOPK4, PAPERS_FFT = "topk:theta=0.96,bits=4", "fft-range:error_feedback=false"
FFT_90 = "fft-range:theta=0.9,error_feedback=false"
SCHEDULE = "fft-range:theta={0:0.9,50%:0.0},error_feedback=false"
LEARNING_RATE = MODELS["charlm-small"].lr  # of the recipe
GRADIVEQ = "gradiveq:warmup_steps=10%,sample_steps=5%,compress_steps=20%"
CLOSEST = "fft-range", "dct-range:theta=0.95"  # to no compression, in the default study
FOUR_BITS = [f"block-float:bits=4{more}" for more in ("", ",error_feedback=false", ",rounding=nearest")]
TWO_BITS = "block-float:bits=2,rounding=nearest"
FOUR_BITS_NEAREST = "block-float:bits=4,rounding=nearest"
FOUR_BITS_NEAREST_OF_PHASES = "block-float(bits=4,rounding=nearest)"
FOUR_BITS_THEN_SIGNS = "phases:0=block-float(bits=4,rounding=nearest),75=momentum(inner=signsgd(majority=False))"
IN_THREE_PHASES = "phases:0=qsgd,160=block-float(bits=4,rounding=nearest),200=momentum(inner=signsgd(majority=False))"
EVERY_10, EVERY_30 = (f"local(every={n}):phases:0=qsgd,20%={FOUR_BITS_NEAREST_OF_PHASES}" for n in (10, 30))
SHORT_10, SHORT_30 = (method.replace("20%", "5%") for method in (EVERY_10, EVERY_30))
PLAIN_10, PLAIN_30 = (method.replace(FOUR_BITS_NEAREST_OF_PHASES, "none") for method in (EVERY_10, EVERY_30))
MUON_MEANS = [
    f"local(every={n},lr=1,momentum=0):phases:0={FOUR_BITS_NEAREST_OF_PHASES},20%={FOUR_BITS_NEAREST_OF_PHASES}"
    for n in (10, 30, 100)
]
# Codecs of differences every 30 steps, in place of integers of 4 bits.
MUON_CODECS = {
    codec: MUON_MEANS[1].replace(f"20%={FOUR_BITS_NEAREST_OF_PHASES}", f"20%={codec}")
    for codec in (
        "none", "block-float(bits=2,rounding=nearest)",
        *(f"topk(theta={theta},bits=2,chunk=4096,residual_decay=0.95)" for theta in (0.8, 0.93, 0.96)),
    )
}  # fmt: skip
EVERY_20 = EVERY_10.replace("every=10", "every=20")
CHUNKS = "local(every=30):phases:0=qsgd,20%=topk(theta=0.985,bits=2,chunk=4096,residual_decay=0.95)"
CHUNKS_MEAN = CHUNKS.replace("every=30", "every=30,lr=1,momentum=0")
TWO_BITS_10 = EVERY_10.replace("bits=4", "bits=2")
SIGNS = "momentum:inner=signsgd(majority=False),warmup_steps=75"

STATED: list[Stated] = [
    # README
    (
        BENCHMARKS,
        "brought `ACPSGD()` on ResNet-18 from {:.2f} to {:.2f} of the upper bound",
        lambda: (share(None) / 100, share("CYCLE_TIME=20") / 100),
    ),
    (
        BENCHMARKS,
        "{} method that sends less than fp16 is faster than it, up to {:.0f} times as fast as fp32",
        against_fp16,
    ),
    (
        README,
        "such as `gradzip.BlockFloat()`, which sends {:.2f} times fewer bytes",
        lambda: (ratio("block-float"),),
    ),
    (
        README,
        '`BlockFloat(bits=4, rounding="nearest")` sends {:.2f} times fewer bytes: AdamW ends at {:.3f} bits per '
        "character, without compression at {:.3f}; Muon at {:.3f}, without at {:.3f}.",
        lambda: (
            ratio(FOUR_BITS_NEAREST),
            *(tuned(m).score for m in (FOUR_BITS_NEAREST, "none")),
            *(tuned(m, "text-muon", "muon").score for m in (FOUR_BITS_NEAREST, "none")),
        ),
    ),
    (
        README,
        "{:.1f} times fewer bytes in all; it ends at {:.3f} bits per character, and at {:.3f} without compression",
        lambda: (
            fewer_of(compressed_warmup(IN_THREE_PHASES)),
            *(compressed_warmup(m).score for m in (IN_THREE_PHASES, "none")),
        ),
    ),
    (
        README,
        "`FFTRange()`, {:.1f} times fewer bytes: a ResNet-20 ends at {:.2f} %, and at {:.2f} % without compression, at "
        "the same rate. `PowerSGD()` sends less, by all-reduces: a ResNet-8 ends at {:.1f} %, and at {:.1f} % without.",
        lambda: (
            ratio("fft-range"),
            *(score("resnet20", "images", m) for m in ("fft-range", "none")),
            *(score("long", "images", m) for m in ("powersgd", "none")),
        ),
    ),
    (
        README,
        "(`ACPSGD(rank=4)`: {:.3f} bits per character, without compression {:.3f})",
        lambda: tuple(tuned(m).score for m in ("acpsgd:rank=4", "none")),
    ),
    (METHODS, "| `gradiveq` | `GradiVeQ` | {:.2f} to {:.1f} in a run |", whole_runs),
    (
        RESULTS_PAGE,
        "{} of {} claims hold, {} on CIFAR-10. The FFT loses to Top-k in {} of {} comparisons, with {:.1f} to {:.1f} "
        "times its error, and {} of the energy",
        lambda: (*claims("papers_digits.json"), claims("papers.json")[0], *fft_against_topk(), top_three()),
    ),
    (RESULTS_PAGE, "Whole runs send [{:.2f} to {:.1f} times fewer bytes]", whole_runs),
    (
        METHODS,
        "`PowerSGD` loses less at the same rank: it ended {:.1f} points behind, `ACPSGD` {:.1f}.",
        lambda: tuple(behind("long", "images", m) for m in ("powersgd", "acpsgd")),
    ),
    (
        METHODS,
        "A small transformer ends at {:.3f} bits per character, with {:.1f} times fewer bytes in all; without "
        'compression at {:.3f}; with `BlockFloat(bits=4, rounding="nearest")` at {:.3f}, `QSGD()` at {:.3f} and '
        "`ACPSGD(rank=4)` at {:.3f}",
        lambda: (
            tuned(SIGNS).score,
            fewer_of(tuned(SIGNS)),
            *(tuned(m).score for m in ("none", FOUR_BITS_NEAREST, "qsgd", "acpsgd:rank=4")),
        ),
    ),
    (
        METHODS,
        "longer training with {:.1f} times fewer bytes in all ends at {:.3f}, and at {:.3f} without compression",
        lambda: (
            fewer_of(compressed_warmup(IN_THREE_PHASES)),
            *(compressed_warmup(m).score for m in (IN_THREE_PHASES, "none")),
        ),
    ),
    (
        ACCURACY,
        "**The whole run sends {:.1f} times fewer bytes, and ends {:.1f} % below the bits per character without "
        "compression**, each at its best rate, 0.008. At 0.004 and 0.002 it ends {:.1f} % and {:.1f} % below.",
        lambda: (
            fewer_of(compressed_warmup(IN_THREE_PHASES)),
            -above_none(IN_THREE_PHASES),
            *(-above_none(IN_THREE_PHASES, lr) for lr in (0.004, 0.002)),
        ),
    ),
    (
        BENCHMARKS,
        "**Four runs take {:.0f} to {:.0f} % longer than predicted**, and that of charlm takes {:.0f} % less:",
        longer_than_predicted,
    ),
    (
        BENCHMARKS,
        "Integers of 4 bits reach the target {:.2f} times as fast as the fp16 hook; predicted were {:.2f}",
        lambda: tuple(fp16 / ours for fp16, ours in zip(whole_run("ddp-fp16"), whole_run(FOUR_BITS_NEAREST))),
    ),
    (ACCURACY, "two seeds without compression differ by {:.1f} %", lambda: (seeds_differ(),)),
    (
        ACCURACY,
        "75 steps with integers of 4 bits, sends {:.1f} times fewer bytes and ends {:.1f} % above",
        lambda: (fewer_of(compressed_warmup(FOUR_BITS_THEN_SIGNS)), above_none(FOUR_BITS_THEN_SIGNS)),
    ),
    (
        METHODS,
        "it ended {:.1f} points ahead of no compression on CIFAR-10. Without error feedback, as in its paper, it ended "
        "{:.1f} points behind",
        lambda: (behind("long", "images", "fft-range"), behind("long", "images", PAPERS_FFT)),
    ),
    (
        METHODS,
        "with betas of (0.3, 0.99) ends at {:.3f}, with {:.0f} times fewer bytes",
        lambda: (tuned(TOPK4, "text-betas", "betas").score, fewer_of(tuned(TOPK4, "text-betas", "betas"))),
    ),
    # docs/accuracy.md
    (
        ACCURACY,
        "Every 10 steps, the run sends {:.0f} times fewer bytes than data-parallel training, and ends {:.1f} % above "
        "its bits per character; every 30 steps, {:.0f} times fewer, and {:.1f} % above.",
        lambda: (*local_steps_cost(EVERY_10, "outer_more"), *local_steps_cost(EVERY_30, "outer_more")),
    ),
    (
        ACCURACY,
        "With a twentieth in place of a fifth, they end {:.1f} and {:.1f} % above, with one seed. Uncompressed "
        "differences end {:.1f} and {:.1f} % above, integers of 2 bits every 10 steps {:.1f} %.",
        lambda: tuple(local_steps_cost(m)[1] for m in (SHORT_10, SHORT_30, PLAIN_10, PLAIN_30, TWO_BITS_10)),
    ),
    (
        README,
        "every 10 steps with integers of 4 bits send {:.0f} times fewer bytes, and end {:.1f} % above the bits per "
        "character of AdamW that averages every gradient; every 30 steps, {:.0f} times fewer, and {:.1f} % above",
        lambda: (*local_steps_cost(EVERY_10, "outer_more"), *local_steps_cost(EVERY_30, "outer_more")),
    ),
    (
        OUTER,
        "ended {1:.1f} % above the bits per character of data-parallel training with exchanges every 10 steps, and "
        "sent {0:.0f} times fewer bytes; {3:.1f} % above every 30 steps, with {2:.0f} times fewer",
        lambda: (*local_steps_cost(EVERY_10, "outer_more"), *local_steps_cost(EVERY_30, "outer_more")),
    ),
    (
        ACCURACY,
        "the last epoch sends {:.0f} and {:.0f} times fewer than data-parallel training. Every 20 steps, it sends "
        "{:.0f} times fewer, and the run ends {:.1f} % above.",
        lambda: (
            *(fewer_at_the_end(tuned(m, "text-outer", "outer")) for m in (EVERY_10, EVERY_30, EVERY_20)),
            local_steps_cost(EVERY_20)[1],
        ),
    ),
    (
        BENCHMARKS,
        "`transform_select` executes {:.1f} for each element with Fourier transforms of 64, and {:.1f} with DCTs of "
        "3 × 3",
        lambda: (
            instructions("transform_select Fourier 64, 15%"),
            instructions("transform_select DCT 3x3, 15%"),
        ),
    ),
    (
        BENCHMARKS,
        "which reads as much, executes {:.1f} (`python -m benchmarks.instructions`). A stochastic `block_float_encode` "
        "executes {:.1f} and {:.1f}, and `range_float_encode_packed` {:.1f}.",
        lambda: tuple(
            instructions(kernel)
            for kernel in (
                "abs_max",
                "block_float_encode 8 bits",
                "block_float_encode 4 bits",
                "range_float_encode_packed",
            )
        ),
    ),
    (
        ACCURACY,
        "Every 5 steps ends {:.1f} % above, every 100 steps {:.1f} %.",
        lambda: tuple(local_steps_cost(EVERY_10.replace("every=10", f"every={n}"))[1] for n in (5, 100)),
    ),
    (
        ACCURACY,
        "ends {:.1f} % above every 10 steps, and {:.1f} % every 30, with the outer optimizer: its momentum",
        lambda: tuple(
            local_steps_cost(CHUNKS.replace("0.985", "0.8").replace("every=30", f"every={n}"))[1] for n in (10, 30)
        ),
    ),
    (
        ACCURACY,
        "every 30 steps, uncompressed, it ends {:.1f} % below AdamW",
        lambda: (-local_steps_cost("local(every=30):phases:0=none,20%=none", "outer_k1")[1],),
    ),
    (
        ACCURACY,
        "exchanges every 30 steps end {:.1f} % above data-parallel training (`convergence_outer_k8.json`)",
        lambda: (local_steps_cost(EVERY_30, "outer_k8")[1],),
    ),
    (
        ACCURACY,
        "of the parameters, which ends {:.1f} % above every 10 steps, and {:.1f} % above every 30.",
        lambda: tuple(local_steps_cost(m.replace("):", ",lr=1,momentum=0):"))[1] for m in (EVERY_10, EVERY_30)),
    ),
    (
        ACCURACY,
        "Every 10 steps, training ends {:.1f} % above the bits per character of data-parallel Muon, every 30 steps "
        "{:.1f} % above (two seeds), and every 100 steps {:.1f} % (one). The last epoch sends {:.0f}, {:.0f} and "
        "{:.0f} times fewer bytes.",
        lambda: (
            *(muon_outer_cost(n, "muon_outer_more") for n in MUON_MEANS[:2]),
            muon_outer_cost(MUON_MEANS[2]),
            *(fewer_at_the_end(muon_outer_row(n)) for n in MUON_MEANS),
        ),
    ),
    (
        ACCURACY,
        "Every 30 steps, uncompressed ones end at {:.3f}. Integers of 2 bits end at {:.3f}, and send {:.0f} times "
        "fewer bytes than data-parallel training in the last epoch; chunks of 2-bit values with θ of 0.8, 0.93 and "
        "0.96 end at {:.3f}, {:.3f} and {:.3f}, with {:.0f}, {:.0f} and {:.0f} times fewer",
        lambda: (
            *(muon_outer_row(m).score for m in list(MUON_CODECS.values())[:2]),
            fewer_at_the_end(muon_outer_row(list(MUON_CODECS.values())[1])),
            *(muon_outer_row(m).score for m in list(MUON_CODECS.values())[2:]),
            *(fewer_at_the_end(muon_outer_row(m)) for m in list(MUON_CODECS.values())[2:]),
        ),
    ),
    (
        ACCURACY,
        "does not suit it here**: every 10 steps, training ends {:.1f} % above.",
        lambda: (muon_outer_cost(MUON_MEANS[0].replace(",lr=1,momentum=0", "")),),
    ),
    (
        OUTER,
        "The mean of the parameters every 10 steps ended {:.1f} % above data-parallel Muon, every 30 steps {:.1f} %, "
        "and with DiLoCo's outer optimizer, every 10 steps ended {:.1f} % above",
        lambda: (
            *(muon_outer_cost(n, "muon_outer_more") for n in MUON_MEANS[:2]),
            muon_outer_cost(MUON_MEANS[0].replace(",lr=1,momentum=0", "")),
        ),
    ),
    (
        README,
        "With Muon and `outer=None`, every 30 steps end {:.1f} % above Muon that averages every gradient.",
        lambda: (muon_outer_cost(MUON_MEANS[1], "muon_outer_more"),),
    ),
    (
        ACCURACY,
        "With two seeds, uncompressed differences end at {:.3f}, integers of 2 bits at {:.3f}, and chunks with θ of "
        "0.96 at {:.3f}.",
        lambda: tuple(
            tuned(MUON_CODECS[codec], "text-muon-outer", "muon_outer_more").score
            for codec in (
                "none",
                "block-float(bits=2,rounding=nearest)",
                "topk(theta=0.96,bits=2,chunk=4096,residual_decay=0.95)",
            )
        ),
    ),
    (
        ACCURACY,
        "`charlm`, with seven times the parameters and a third of the steps, ends {:.1f} % above every 10 steps "
        "(`convergence_charlm_outer.json`)",
        lambda: (local_steps_cost(EVERY_10, "charlm_outer")[1],),
    ),
    (
        README,
        "Integers of 2 bits cost nothing more there, and the last epoch sends {:.0f} times fewer bytes.",
        lambda: (fewer_at_the_end(muon_outer_row(MUON_CODECS["block-float(bits=2,rounding=nearest)"])),),
    ),
    (
        ACCURACY,
        "every 30 steps ends {:.1f} % above with the mean of the parameters, as SparseLoCo has it, and {:.0f} % with "
        "the outer optimizer",
        lambda: tuple(local_steps_cost(method)[1] for method in (CHUNKS_MEAN, CHUNKS)),
    ),
    (
        OUTER,
        "with a twentieth, the runs above ended {:.1f} and {:.1f} % above",
        lambda: tuple(local_steps_cost(method)[1] for method in (SHORT_10, SHORT_30)),
    ),
    (
        ACCURACY,
        "sends {:.1f} times fewer bytes, {:.1f} times fewer in its last epoch, and ends {:.1f} % below the bits per "
        "character without compression.",
        lambda: (
            fewer_of(tuned(IN_THREE_PHASES, "text", "charlm")),
            fewer_at_the_end(tuned(IN_THREE_PHASES, "text", "charlm")),
            100 * (1 - tuned(IN_THREE_PHASES, "text", "charlm").score / tuned("none", "text", "charlm").score),
        ),
    ),
    (
        ACCURACY,
        "the three phases end at {:.3f} and {:.3f} at 0.008 and 0.004, and without it at {:.3f} and {:.3f}",
        lambda: tuple(
            tuned(IN_THREE_PHASES, "text", study).by_lr[lr]
            for study in ("momentum_more", "momentum")
            for lr in (0.008, 0.004)
        ),
    ),
    (ACCURACY, "AdamW ends at {:.3f} bits per character. What remains", lambda: (tuned("none").score,)),
    *(
        (
            ACCURACY,
            f"{name} {{:.3f}}{between} {{:.{digits}f}}{after}",
            lambda method=method: (tuned(method).score, fewer_of(tuned(method))),
        )
        for name, method, between, digits, after in (
            ('rounding="nearest")` ends at', FOUR_BITS_NEAREST, ", with", 1, " times fewer bytes"),
            ("([how](methods.md#compressed-momenta)), ends at", SIGNS, ", with", 1, " times fewer bytes in all"),
            ("`PowerSGD(rank=16)` ends at", "powersgd:rank=16", " with", 1, " times fewer bytes"),
            ("`QSGD()` at", "qsgd", " with", 0, ""),
            ("`PowerSGD(rank=4)` at", "powersgd:rank=4", " with", 0, ""),
            ("`ACPSGD(rank=4)` at", "acpsgd:rank=4", " with", 0, ""),
        )
    ),
    (
        ACCURACY,
        "and {:.0f} times fewer in the last epoch. At {}, the best rate of the method, AdamW itself ends at {:.3f}",
        lambda: (fewer_at_the_end(tuned(SIGNS)), tuned(SIGNS).lr, tuned("none").by_lr[tuned(SIGNS).lr]),
    ),
    (
        ACCURACY,
        "What is best for AdamW, {}, is {} times the rate of the recipe",
        lambda: (tuned("none").lr, {2: "two", 4: "four"}[round(tuned("none").lr / LEARNING_RATE)]),
    ),
    *(
        (
            ACCURACY,
            f"| {method} | {betas} | {{:.3f}} | {{:.0f}} |",
            lambda row=row: (tuned(*row).score, fewer_of(tuned(*row))),
        )
        for method, betas, row in (
            ("no compression", "(0.9, 0.95)", ("none", "text", "text_more")),
            ("`TopK(theta=0.99)`", "(0.9, 0.95)", ("topk", "text", "text_more")),
            ("`TopK(theta=0.96, bits=4)`", "(0.9, 0.95)", (TOPK4, "text", "text_more")),
            ("`TopK(theta=0.96, bits=4)`", "(0.3, 0.99)", (TOPK4, "text-betas", "betas")),
        )
    ),
    (
        ACCURACY,
        '`BlockFloat(bits=2, rounding="nearest")` at {:.3f} with {:.0f}',
        lambda: (
            tuned(TWO_BITS, study="text_more").score,
            fewer_of(tuned(TWO_BITS, study="text_more")),
        ),
    ),
    (
        ACCURACY,
        "All other methods end within {:.1f} points of `none`. They send {:.0f} to {:.0f} times fewer bytes",
        lambda: (
            max(behind("quick", "images", method) for method in quick_methods()),
            *extremes(fewer("quick", "images", method) for method in quick_methods() if method != GRADIVEQ),
        ),
    ),
    (
        ACCURACY,
        "{:.1f} % without, {:.1f} % without error feedback either",
        lambda: tuple(
            score("quick", "images", f"acpsgd:{a}") for a in ("reuse=false", "error_feedback=false,reuse=false")
        ),
    ),
    (
        ACCURACY,
        "`PowerSGD` is {:.2f} points behind after four epochs and {:.2f} after twelve, `ACPSGD` {:.2f} and {:.2f}. "
        "The training loss is behind, too ({:.2f} and {:.2f} at the end, {:.2f} without compression)",
        lambda: (
            *(behind(study, "images", m) for m in ("powersgd", "acpsgd") for study in ("default", "long")),
            *(train_loss("long", "images", m) for m in ("powersgd", "acpsgd", "none")),
        ),
    ),
    (
        ACCURACY,
        "it is {:.1f} points behind after four epochs, and {:.1f} after twelve. **With error feedback, the "
        "default, `FFTRange()` is {:.2f} ahead**, less than its two seeds differ ({:.1f} and {:.1f}), with {:.0f} "
        "times fewer bytes",
        lambda: (
            behind("default", "images", PAPERS_FFT),
            behind("long", "images", PAPERS_FFT),
            behind("long", "images", "fft-range"),
            *sorted(run["scores"][-1] for run in runs("long", "images", "fft-range")),
            fewer("long", "images", "fft-range"),
        ),
    ),
    (
        ACCURACY,
        "It ends {:.2f} points ahead of no compression, with {:.1f} times fewer bytes. That is noise: the two seeds "
        "without compression differ by {:.1f} points. After four epochs, seed 1 was {:.1f} points behind",
        lambda: (
            behind("resnet20", "images", "fft-range"),
            fewer("resnet20", "images", "fft-range"),
            abs(seed_of_resnet20("none", 0)[-1] - seed_of_resnet20("none", 1)[-1]),
            seed_of_resnet20("none", 1)[3] - seed_of_resnet20("fft-range", 1)[3],
        ),
    ),
    (
        ACCURACY,
        '`BlockFloat(bits=4, rounding="nearest")` ends {:.2f} points behind',
        lambda: (behind("resnet20", "images", FOUR_BITS_NEAREST),),
    ),
    (
        ACCURACY,
        "Muon without compression ends at {:.3f} bits per character; AdamW ends at {:.3f} after as many steps",
        lambda: (with_muon("none").score, tuned("none").score),
    ),
    (
        ACCURACY,
        '`BlockFloat(bits=4, rounding="nearest")` ends {:.1f} % above, with {:.0f} times fewer bytes',
        lambda: (above_muon(FOUR_BITS_NEAREST), fewer_of(with_muon(FOUR_BITS_NEAREST))),
    ),
    (
        ACCURACY,
        "`OneBitSGD()` ends {:.1f} % above, with {:.0f} times fewer bytes",
        lambda: (above_muon("onebit"), fewer_of(with_muon("onebit"))),
    ),
    (
        ACCURACY,
        "With two seeds, and also at 0.032, it ends {:.1f} % above",
        lambda: (above_muon(FOUR_BITS_NEAREST, "muon_more"),),
    ),
    (
        ACCURACY,
        '`BlockFloat(bits=2, rounding="nearest")` ends {:.1f} % above, with {:.0f} times fewer bytes',
        lambda: (above_muon(TWO_BITS, "muon_more"), fewer_of(with_muon(TWO_BITS, "muon_more"))),
    ),
    (
        ACCURACY,
        "`PowerSGD(rank=32)` ends {:.1f} % above",
        lambda: (above_muon("powersgd:rank=32"),),
    ),
    (
        ACCURACY,
        "{:.1f} points after four epochs, {:.1f} after twelve",
        lambda: (behind("default", "images", "qsgd"), behind("long", "images", "qsgd")),
    ),
    (
        ACCURACY,
        "the test losses differ by at most {:.3f} %",
        lambda: (
            max(
                abs(100 * (a["test_losses"][-1] / b["test_losses"][-1] - 1))
                for a, b in zip(runs("block_float", "text", "block-float"), runs("block_float", "text", "none"))
            ),
        ),
    ),
    (ACCURACY, "{:.1f} to {:.1f} % of the test loss on text", lambda: extremes(map(test_loss_above, FOUR_BITS))),
    (
        ACCURACY,
        "ends {:.1f} % above the loss without compression, the default, stochastic rounding, {:.1f} %",
        lambda: (test_loss_above("block-float:bits=4,rounding=nearest"), test_loss_above("block-float:bits=4")),
    ),
    (
        ACCURACY,
        "Without error feedback, stochastic rounding costs {:.1f} %",
        lambda: (test_loss_above("block-float:bits=4,error_feedback=false"),),
    ),
    (
        ACCURACY,
        "without the first it ends {:.1f} points behind, without the second {:.1f}",
        lambda: (
            behind("default", "images", "acpsgd:error_feedback=false"),
            behind("default", "images", "acpsgd:reuse=false"),
        ),
    ),
    (
        ACCURACY,
        "recovers {:.1f} of the {:.1f} points",
        lambda: (behind("default", "images", SCHEDULE, FFT_90), behind("default", "images", FFT_90)),
    ),
    (
        ACCURACY,
        "`FFTRange()` and `DCTRange(theta=0.95)` come closest, {:.1f} and {:.1f} points behind with {:.0f} and {:.0f} "
        "times fewer bytes; so does `GradiVeQ`, with hardly fewer ({:.2f} times)",
        lambda: (
            *(behind("default", "images", m) for m in CLOSEST),
            *(fewer("default", "images", m) for m in (*CLOSEST, GRADIVEQ)),
        ),
    ),
    # docs/advise.md
    (
        ADVISE,
        "`ACPSGD()` ends {:.2f} bits per character behind no compression, with SGD {:.1f} points of test accuracy",
        lambda: (tuned("acpsgd:rank=4").score - tuned("none").score, behind("long", "images", "acpsgd")),
    ),
    (
        ADVISE,
        "the training, which ended {:.2f} bits better than without compression",
        lambda: (tuned("none", study="charlm").score - tuned(IN_THREE_PHASES, study="charlm").score,),
    ),
    (
        ADVISE,
        "saves more than the margin of error, {:.0f} % of the faster",
        lambda: (100 * advice("measured")["margin"],),
    ),
    (
        ADVISE,
        "a median regret of {:.0f} and {:.0f} %, and no false advice",
        lambda: (regret("measured", "calibration"), regret("measured", "held_out")),
    ),
    (
        ADVISE,
        "The mean regret, {:.0f} % and {:.0f} %",
        lambda: tuple(regret("measured", part, "mean_regret") for part in ("calibration", "held_out")),
    ),
    (
        ADVISE,
        "the median regret is {:.1f} % with DDP, and {:.0f} % with Horovod",
        lambda: tuple(100 * advice("stated")["held_out_of"][front]["median_regret"] for front in ("ddp", "horovod")),
    ),
    (
        ADVISE,
        "whose float16 sums took up to {:.0f} ns a byte",
        lambda: (1e9 * max(found["link"]["half"] for found in load("training_block_float_cpu.json")["links"]),),
    ),
    # docs/benchmarks.md
    (
        BENCHMARKS,
        "predictions: {:.0f} % of {} are within 25 %",
        lambda: (100 * share_within(predicted(), 0.25), len(predicted())),
    ),
    (
        BENCHMARKS,
        "In {} of {} cells its step is faster than the best fixed choice or at most 5 % slower. The worst are {:.0f} % "
        "slower (charlm at 10 Gb/s, DDP), {:.0f} % (ResNet-18 at 10 Gb/s, Horovod) and {:.0f} % (AlexNet at 1 Gb/s, "
        "DDP).",
        lambda: (sum(slower <= 5 for slower in auto()), len(auto()), *auto()[:3]),
    ),
    (
        BENCHMARKS,
        "| {:.0f} % | 90 % |\n| 1 Gb/s",
        lambda: (100 * load("ring_cpu.json")["overlaps"][0]["hidden"],),
    ),
    (
        BENCHMARKS,
        "| {:.0f} %, missed | 90 % |",
        lambda: (100 * load("ring_cpu.json")["overlaps"][1]["hidden"],),
    ),
    (
        BENCHMARKS,
        "the fastest method is {:.1f} to {:.0f} times as fast as fp32, and {:.1f} to {:.0f} times as fast as fp16",
        lambda: (*fastest_against(fp32), *fastest_against(fp16)),
    ),
    (
        BENCHMARKS,
        "{:.0f} % over fp16 on ResNet-18, and {:.0f} % on charlm",
        lambda: (fastest_over_fp16("resnet18"), fastest_over_fp16("charlm")),
    ),
    (
        BENCHMARKS,
        "{} of {} rows with a method of gradzip are slower than stock Horovod. The slowest takes {:.1f} times as long",
        lambda: (sum(q > 1 for q in on_fast_networks()), len(on_fast_networks()), max(on_fast_networks())),
    ),
    (
        BENCHMARKS,
        "is worth {:.0f} points of the ideal to compressed training, and nothing to stock Horovod. Runs differ by "
        "about as much: the thresholds below seem to gain {:.0f} and {:.0f}.",
        lambda: tuple(
            share(name) - share(None) for name in ("CYCLE_TIME=20", "FUSION_THRESHOLD=16384", "FUSION_THRESHOLD=0")
        ),
    ),
    *(
        (
            BENCHMARKS,
            f"| {label} | {{:.0f}} | {{:.0f}} | {{:.0f}} |",
            lambda name=name: (setting(name, "horovod", "ms"), setting(name, "horovod:acpsgd", "ms"), share(name)),
        )
        for label, name in (
            ("Horovod's defaults", None),
            *((f"`HOROVOD_{name}`", name) for name in ("CYCLE_TIME=5", "CYCLE_TIME=20", "FUSION_THRESHOLD=16384")),
            ("`HOROVOD_FUSION_THRESHOLD=0`", "FUSION_THRESHOLD=0"),
        )
    ),
    (
        BENCHMARKS,
        "With Horovod, it is {:.2f} to {:.2f} times as fast with 8 bits, and {:.2f} to {:.2f} with 4 bits.",
        lambda: (*block_float("horovod", "block-float"), *block_float("horovod", "block-float:bits=4")),
    ),
    (
        BENCHMARKS,
        "With DDP, it is {:.2f} to {:.2f} times as fast with 8 bits, and {:.2f} to {:.2f} with 4 bits.",
        lambda: (*block_float("ddp", "block-float"), *block_float("ddp", "block-float:bits=4")),
    ),
    (
        BENCHMARKS,
        "the four methods are faster than the fp16 hook on all three networks: {:.2f} to {:.2f} times on AlexNet, "
        "{:.2f} to {:.2f} times on ResNet-18 and {:.2f} to {:.2f} times on charlm, where {:.2f}, {:.2f} and {:.2f} "
        "times would be",
        lambda: (
            *(
                end
                for model in MAIN_MODELS
                for end in extremes(
                    row["times_fp16"]
                    for row in of_gradzip(steps(MAIN, model=model))
                    if row["variant"].startswith("ddp:")
                )
            ),
            *(step(MAIN, "compute", model=model)["times_fp16"] for model in MAIN_MODELS),
        ),
    ),
    (
        BENCHMARKS,
        "it aborted in {} of {} rounds on AlexNet, in {} of {} on ResNet-18 and in none on charlm. The others took "
        "{:.0f}, {:.0f} and {:.0f} ms a step.",
        lambda: (
            *(number for model in MAIN_MODELS[:2] for number in aborted_rounds(model)),
            *(step(TORCH_POWERSGD, "ddp-powersgd", model=model)["ms"] for model in MAIN_MODELS),
        ),
    ),
    (
        BENCHMARKS,
        "reaches {:.0f} % of the ideal on ResNet-18 and {:.0f} % on AlexNet. Horovod, with one element of each "
        "gradient, reaches {:.0f} % and {:.0f} %",
        lambda: tuple(
            100 * at_floor(f"{front}-noop", model)["share_of_ideal"]
            for front in ("ddp", "horovod")
            for model in FLOOR_MODELS
        ),
    ),
    (
        BENCHMARKS,
        "reach {:.0f} to {:.0f} % of the floor on ResNet-18, and {:.0f} to {:.0f} % on AlexNet. Their own code takes "
        "{:.0f} to {:.0f} ms and {:.0f} to {:.0f} ms of a step. If nothing else were added to the floor, they would "
        "reach {:.0f} to {:.0f} % and {:.0f} to {:.0f} %",
        lambda: tuple(
            end
            for figure in (of_floor, own_ms, of_floor_with_own_code)
            for model in FLOOR_MODELS
            for end in extremes(map(figure, above_floor("ddp", model)))
        ),
    ),
    (
        BENCHMARKS,
        "reach {:.0f} to {:.0f} % and {:.0f} to {:.0f} % of its floor.",
        lambda: tuple(end for model in FLOOR_MODELS for end in extremes(map(of_floor, above_floor("horovod", model)))),
    ),
    (
        BENCHMARKS,
        "take {:.2f} to {:.2f} times as long as those of stock Horovod on an unshaped loopback, but for `BlockFloat`, "
        "with {:.2f} and {:.2f}.",
        lambda: (
            *extremes(
                times_unshaped(row)
                for m in FLOOR_MODELS
                for row in above_floor("horovod", m)
                if "block-float" not in row["variant"]
            ),
            *(times_unshaped(at_floor("horovod:block-float", model)) for model in FLOOR_MODELS),
        ),
    ),
    (
        BENCHMARKS,
        "`BlockFloat` sends {:.1f} and {:.1f} MB in a step",
        lambda: tuple(at_floor("ddp:block-float", model)["payload_bytes"] / 1e6 for model in FLOOR_MODELS),
    ),
    (
        BENCHMARKS,
        "its own code takes {:.0f} and {:.0f} ms.",
        lambda: tuple(own_ms(at_floor("ddp:block-float", model)) for model in FLOOR_MODELS),
    ),
    (
        BENCHMARKS,
        "`ACPSGD()` over all ranks is {:.2f} to {:.2f} times as fast as torch's fp16 hook, and faster than "
        "`Hierarchical(ACPSGD())` in all four cells: {:.2f} to {:.2f} times.",
        lambda: tuple(
            end
            for variant in ("ddp:acpsgd", HIERARCHICAL)
            for end in extremes(row["times_fp16"] for row in steps(HOSTS, variant=variant))
        ),
    ),
    (
        BENCHMARKS,
        "sends {:.2f} MB from each rank in a step, between the hosts, and `BlockFloat()` {:.2f} MB, to all others. "
        "Both are as fast at 250 Mb/s ({:.2f} and {:.2f} times as fast as fp16)",
        lambda: (
            *(step(SAFE_HOSTS, v, rate="250mbit")["payload_bytes"] / 1e6 for v in BLOCK_FLOAT_ON_HOSTS),
            *(step(SAFE_HOSTS, v, rate="250mbit")["times_fp16"] for v in BLOCK_FLOAT_ON_HOSTS),
        ),
    ),
    (
        BENCHMARKS,
        "takes {:.2f} to {:.2f} times as long as no communication. Averages with rank 4 add {:.0f} to {:.0f} %, and "
        "FSDP2's own ones {:.0f} to {:.0f} %. Compression by rank 4 makes FSDP2 {:.2f} to {:.2f} times as fast, and "
        "`BlockFloat()`, on charlm, {:.2f} and {:.2f} times.",
        lambda: (
            *slower_on_hosts("fsdp-noop", "compute"),
            *(100 * (ratio - 1) for ratio in slower_on_hosts("fsdp:acpsgd", "fsdp-noop")),
            *(100 * (ratio - 1) for ratio in slower_on_hosts("fsdp", "fsdp-noop")),
            *slower_on_hosts("fsdp", "fsdp:acpsgd"),
            *slower_on_hosts("fsdp", "fsdp:block-float", SAFE_HOSTS),
        ),
    ),
    (
        BENCHMARKS,
        "take {:.0f} to {:.0f} ms on ResNet-18, and {:.0f} to {:.0f} ms on AlexNet",
        lambda: (*extremes(codec_ms("resnet18")), *extremes(codec_ms("alexnet"))),
    ),
    (BENCHMARKS, "{} of {} are missed", missed_goals),
    (
        BENCHMARKS,
        "all but `index_code_encode` ({:.1f}) and `majority` ({:.1f}) are faster",
        lambda: (kernel_speedup("index_code_encode 1%"), kernel_speedup("majority of 3")),
    ),
    (
        BENCHMARKS,
        "| `FFTRange`: encode, decode, both | {:.1f}, {:.1f}, {:.1f} |",
        lambda: copies("FFTRange encode", "FFTRange decode", "FFTRange round trip"),
    ),
    (
        BENCHMARKS,
        "| `DCTRange`: encode, both | {:.1f}, {:.1f} |",
        lambda: copies("DCTRange encode", "DCTRange round trip"),
    ),
    (BENCHMARKS, "| `range_float` encode and pack | {:.1f} |", lambda: copies("range_float encode+pack")),
    (
        BENCHMARKS,
        "| `block_float_encode`, 8 and 4 bits | {:.1f}, {:.1f} |",
        lambda: copies("block_float_encode 8 bits", "block_float_encode 4 bits"),
    ),
    (
        BENCHMARKS,
        "| `bitmap_code`: encode, decode | {:.1f}, {:.1f} |",
        lambda: copies("bitmap_code_encode 15%", "bitmap_code_decode 15%"),
    ),
    (BENCHMARKS, "{:.1f} times as fast as torch, of 2", lambda: (kernel_speedup("orthogonalize ResNet-50 r=4"),)),
    *(
        (
            BENCHMARKS,
            f"| {name} | {{:.0f}} | {{:.1f}} | {{:.1f}} |",
            lambda rate=rate: (
                ring(rate, "uncompressed", "ms"),
                ring(rate, "QSGD", "speedup"),
                ring(rate, "subspace", "speedup"),
            ),
        )
        for name, rate in (("250 Mb/s", "250mbit"), ("1 Gb/s", "1gbit"))
    ),
    (
        BENCHMARKS,
        "The step without communication takes {:.0f} ms; `FFTRange(error_feedback=False)` {:.0f} with Horovod "
        "and {:.0f} with DDP, `DCTRange(theta=0.95)` {:.0f} and {:.0f}, torch's fp16 hook {:.0f}, "
        "stock Horovod {:.0f}.",
        lambda: tuple(
            step("training_transforms_cpu.json", v)["ms"]
            for v in (
                "compute",
                "horovod:" + PAPERS_FFT,
                "ddp:" + PAPERS_FFT,
                "horovod:dct-range:theta=0.95",
                "ddp:dct-range:theta=0.95",
                "ddp-fp16",
                "horovod",
            )
        ),
    ),
    # docs/results.md
    (
        RESULTS_PAGE,
        "if no ratio pays above 22 Gb/s, with a slow selection, then one of {:.1f} pays at 10 Gb/s; the paper says 2.",
        lambda: (minimal_ratio(Link(2, 10e9 / 8, 0.0), nbytes=1.0, seconds=1 / (22e9 / 8)),),
    ),
    # docs/transforms.md
    (TRANSFORMS, "{}", lambda: ("\n".join(transforms.table(gradients())),)),
    (
        TRANSFORMS,
        "`DCTRange(bits=6)` has {:.2f} to {:.2f} of the error of `FFTRange(block=4096, bits=10)` on the ResNets, "
        "and {:.2f} to {:.2f} of that of `TopK(bits=10)`. On charlm, where it has no transform, its 6 bits give it "
        "{:.2f} to {:.2f} and {:.2f} to {:.2f}. The gain over `TopK` is smaller at fewer bits: {:.2f} to {:.2f} on "
        "the ResNets at half a bit.",
        lambda: (
            *against_method("fft", *RESNETS),
            *against_method("topk", *RESNETS),
            *against_method("fft", "charlm"),
            *against_method("topk", "charlm"),
            *against_method("topk", *RESNETS, rate=0.5),
        ),
    ),
    (
        TRANSFORMS,
        "its error is {:.2f} to {:.2f} of Top-k's on the ResNets, and {:.2f} to {:.2f} on AlexNet",
        lambda: (
            *against("dct kernel", "identity", *RESNETS, kind=KERNELS),
            *against("dct kernel", "identity", "alexnet", kind=KERNELS),
        ),
    ),
    (
        TRANSFORMS,
        "2, 4 or 8 input channels as well changes the error by {:+.0f} to {:+.0f} %, and over output channels by "
        "{:+.0f} to {:+.0f} %",
        lambda: (
            *percent(
                extremes(q for n in (2, 4, 8) for q in against(f"dct kernel x {n} inputs", "dct kernel", kind=KERNELS))
            ),
            *percent(
                extremes(q for n in (2, 8) for q in against(f"dct kernel x {n} outputs", "dct kernel", kind=KERNELS))
            ),
        ),
    ),
    (
        TRANSFORMS,
        "Of attention, perceptrons and embeddings, no transform gains more than {:.0f} %.",
        lambda: (most_gained("attention", "perceptron", "embedding"),),
    ),
    (
        TRANSFORMS,
        "at 1 bit, a DCT of its rows has {:.2f} to {:.2f} of the error",
        lambda: against("dct rows", "identity", "resnet18", kind="dense"),
    ),
    (
        TRANSFORMS,
        "The error of FFTs of 128 elements differs by {:+.0f} to {:+.0f} % from that of 4096, by network, and one "
        "FFT of each whole layer by {:+.0f} to {:+.0f} %.",
        lambda: (*by_network("fft 128", "fft 4096"), *by_network("fft whole", "fft 4096")),
    ),
    (
        TRANSFORMS,
        "A DCT of 64 differs by {:+.0f} to {:+.0f} % from the FFT of 64, a Hadamard transform by {:+.0f} to {:+.0f} %.",
        lambda: (*by_network("dct 64", "fft 64"), *by_network("hadamard 64", "fft 64")),
    ),
    (
        TRANSFORMS,
        "the error of the DCT by shape is {:.0f} to {:.0f} % above that of the best number of bits, on average over "
        "the networks; with 10 bits, {:.0f} to {:.0f} %",
        lambda: (*bits_above_best(6), *bits_above_best(10)),
    ),
    (
        TRANSFORMS,
        "FFT 64 has {:.1f} to {:.1f} times the error with a bitmap",
        lambda: against("fft 64", "fft 64", code="bitmap"),
    ),
    (
        TRANSFORMS,
        "the DCT's error relative to Top-k's is {:.2f} at step 120 of ResNet-20, and {:.2f} at step 1500",
        lambda: tuple(
            error(x, "dct kernel", rate=2.0) / error(x, "identity", rate=2.0) for x in gradients("resnet20")[1:]
        ),
    ),
    (TRANSFORMS, "{}", lambda: ("\n".join(rotation.table(load("rotation.json")["vectors"])),)),
    (
        TRANSFORMS,
        "With the step of `BlockFloat` and 4 bits, the error on ResNet-8 differs by {:+.0f} to {:+.0f} %.",
        lambda: percent(quotients(rounding("rotated", 4, model="resnet8"), rounding("plain", 4, model="resnet8"))),
    ),
    (
        TRANSFORMS,
        "On charlm-small, the error with 4 bits is {:.2f} to {:.2f} times that without rotation. In AdamW's update, it "
        "is {:.2f} to {:.2f} times that without rotation",
        lambda: (
            *quotients(rounding("rotated", 4, model="charlm"), rounding("plain", 4, model="charlm")),
            *quotients(rounding("rotated, divided", 4), rounding("plain, divided", 4)),
        ),
    ),
    (
        TRANSFORMS,
        "With 4 bits, blocks of 64 without rotation have {:.2f} to {:.2f} of the error of rotated blocks of 256, for "
        "{:.3f} bits more for each element.",
        lambda: (*quotients(rounding("plain", 4, block=64), rounding("rotated", 4)), 32 / 64 - 32 / 256),
    ),
    (
        TRANSFORMS,
        "The error is {:.2f} to {:.2f} without rotation, and {:.2f} to {:.2f} with it. With the step for normal "
        "elements, it is {:.2f} to {:.2f} and {:.2f} to {:.2f}.",
        lambda: (
            *(
                bound
                for rule in ("largest, nearest", "normal, nearest")
                for key in ("plain", "rotated")
                for bound in extremes(rounding(key, 2, rule))
            ),
        ),
    ),
    # docs/methods.md
    (
        METHODS,
        "{:.2f} times less than float32, or 132 with `bits=4`, {:.2f} times less, "
        "or 68 with `bits=2`, {:.2f} times less",
        lambda: (1024 / 260, 1024 / 132, 1024 / 68),
    ),
    (
        METHODS,
        "{:.1f} times less than float32. The bitmap is smaller if some frequencies",
        lambda: (ratio("fft-range"),),
    ),
    (
        METHODS,
        "{:.1f} times less than float32. The bitmap is smaller if some coefficients",
        lambda: (ratio("dct-range"),),
    ),
    (
        METHODS,
        "`topk` needs {:.2f} bytes per kept element at theta = 0.99, or {:.2f} with `bits=8`; `dgc` {:.1f} "
        "at theta = 0.999",
        lambda: (400 / ratio("topk"), 400 / ratio("topk:bits=8"), 4000 / ratio("dgc")),
    ),
    (
        METHODS,
        "`TopK(theta=0.985, bits=2, chunk=4096)` sends {:.4f} bytes for each element of a gradient",
        lambda: (4 / ratio("topk:theta=0.985,bits=2,chunk=4096"),),
    ),
    *(
        (
            METHODS,
            f"| {label} | {{:.2f}}–{{:.2f}} | {{:.2f}}–{{:.2f}} | {{:.2f}}–{{:.2f}} |",
            lambda basis=basis: tuple(bound for channels in (16, 32, 64) for bound in extremes(lost(basis, channels))),
        )
        for label, basis in (
            ("50 samples", (50, 0.01, None)),
            ("100 samples", (100, 0.01, None)),
            ("100 samples, `loss=0`", (100, 0.0, None)),
            ("100 samples, `loss=0.1`", (100, 0.1, None)),
            ("100 samples, `reuse=1`", (100, 0.01, 1)),
        )
    ),
    (
        METHODS,
        "gradients lose up to {:.2f} more",
        lambda: (max(row["own"][-1] - row["own"][0] for file in GRADIVEQ_FILES for row in load(file)["lost"]),),
    ),
    *(
        (METHODS, f"| {label} | {{:.2f}} | {{:.2f}} | {{:.3g}} | {{:.3f}} |", lambda at=at: gradiveq(*at))
        for label, at in (
            ("50 | `stop=None`", (0, 1)),
            ("50 | `stop=0.5`", (0, 3)),
            ("100 | `stop=None`", (0, 2)),
            ("100 | `stop=None`, `reuse=1`", (0, 5)),
            ("100 | `stop=0.5`", (0, 4)),
            ("100 | `stop=0.5`, `sampling=QSGD(bits=4)`", (0, 6)),
            ("100 | `stop=0.5`, another seed", (1, 1)),
        )
    ),
    (METHODS, "for comparison: `QSGD(bits=4)` | | | {:.1f} | {:.3f} |", lambda: gradiveq(0, 8)[2:]),
    (METHODS, "for comparison: `ACPSGD()` | | | {:.1f} | {:.3f} |", lambda: gradiveq(0, 7)[2:]),
    (
        METHODS,
        "while all layers are, the ratio is {:.0f} to {:.0f}",
        lambda: extremes(
            point["ratio"]
            for run in load(GRADIVEQ_FILES[0])["runs"][1:3]
            for point in run["points"]
            if point["compressed"] == 1
        ),
    ),
    (METHODS, "{:.0f} MB for a ResNet-18: {:.0f} times the model's size", sampling_memory),
    # docs/scale.md
    (
        SCALE,
        "Where a rank sends a megabyte or more, at most {:.1f} % less is predicted than is on the wire; the rest, up "
        "to {:.0f} kB in a step,",
        bytes_of_a_megabyte,
    ),
    (
        SCALE,
        "{} of {} predictions are within 25 %, and all within {:+.0f} and {:+.0f} %.",
        lambda: (
            sum(abs(value) <= 25 for value in scale_differences("cpu_seconds")),
            len(scale_differences("cpu_seconds")),
            *extremes(scale_differences("cpu_seconds")),
        ),
    ),
    (
        SCALE,
        "From 2 to {} ranks, CPU time grows {:.1f} to {:.1f} times with a gather, and {:.1f} to {:.1f} times with a "
        "scatter-reduce",
        lambda: (most_ranks(), *growth("gather"), *growth("scatter_reduce")),
    ),
    (
        SCALE,
        "with 64 ranks, `ACPSGD` pays if a device encodes and decodes {:.1f} GB/s, and `BlockFloat` from {:.1f} to "
        "{:.1f} GB/s on. One core here does {:.1f} and {:.1f} GB/s",
        lambda: (needed(10, "acpsgd")[1], *needed(10, "block-float"), one_core("acpsgd"), one_core("block-float")),
    ),
    (
        SCALE,
        "`ACPSGD` needs {:.0f} GB/s, and `BlockFloat` {:.0f} to {:.0f} GB/s; on ResNet-50 no rate is enough for it",
        lambda: (needed(100, "acpsgd")[1], *needed(100, "block-float")),
    ),
    (
        SCALE,
        "`ACPSGD` needs {:.0f} to {:.0f} GB/s. `BlockFloat` pays on LLaMA 7B alone, at {:.0f} GB/s",
        lambda: (*needed(400, "acpsgd"), needed(400, "block-float")[1]),
    ),
    (
        SCALE,
        "At 10 Gb/s with 64 ranks, LLaMA 7B keeps nine tenths of its speed with steps of {:.0f} s in fp32, {:.0f} s in "
        "fp16, and {:.1f} s with 30 local steps and `BlockFloat`",
        lambda: (
            projected_to(10, "least_step", "none")[-1],
            projected_to(10, "least_step", "fp16")[-1],
            projected_to(10, "local_step", "block-float")[-1],
        ),
    ),
    # docs/links.md
    (LINKS, "on ResNet-18 {:.2f} times at 250 Mb/s", lambda: slower_on_hosts("fsdp", "fsdp:acpsgd")[1:]),
    *(
        (
            LINKS,
            f"| with `reduce_scatter(BlockFloat(bits={bits}))` | 4 + 4 + {{:.2f}} |",
            lambda bits=bits: (bits / 8 + 4 / 256,),
        )
        for bits in (8, 4)
    ),
]


GIVEN: dict[str, list[str]] = {
    README: ["Apache-2.0"],
    ACCURACY: ["drops 90 % of the frequencies", "[3.94 and 7.76 times fewer](methods.md) bytes"],
    ADVISE: [
        "at most 2 points of test accuracy, or 0.05 bits per character, worse",
        "takes 95 % of the step that you have, compression cannot win more than 5 %",
        "1 Gb/s are 125 MB/s, 10 Gb/s 1.25 GB/s, 100 Gb/s 12.5 GB/s",
    ],
    BENCHMARKS: ["a share of the ideal above 100 %"],
    "docs/scale.md": ["four 1024 × 1024 matrices of random numbers, 16.8 MB"],
    "docs/gpu.md": ["compute capabilities 8.0 and 9.0"],
    "docs/guarantees.md": ["the median regret is at most 3 %"],
    METHODS: [
        "the largest 15 % of the frequencies",
        "the largest 15 % of the coefficients",
        "1.6 bits each",
        "the largest 1 % and their",
        "a random 1 %",
        "the largest 0.1 % of",
        "0.15·n",
        "0.63·n",
        "The paper's ratio of 21.3",
        "below 0.01",
        "hold 99 % of the variance",
        "differ by less than 4 %",
    ],
    TRANSFORMS: ["1 and 2 bits per element", "At 2 bits per element"],
    SCALE: ["10 µs a message", "matrices of random numbers, 16.8 MB"],
    "docs/usage.md": ["at least 2 %"],
}
