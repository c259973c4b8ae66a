"""What benchmarks/convergence trains: networks, data, methods, learning rates and seeds, in three sizes."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace

import data
import gradzip
from benchmarks.common.local_steps import local_steps
from models import MODELS

# The most useful first. `compressor` reads them.
IMAGE_METHODS = (
    "none", "acpsgd", "powersgd", "fft-range", "qsgd", "topk", "signsgd", "dct-range:theta=0.95",
    # Wang et al., HPDC 2020, figure 13:
    "fft-range:error_feedback=false", "fft-range:theta=0.9,error_feedback=false",
    "fft-range:theta={0:0.9,50%:0.0},error_feedback=false",
    # Zhang et al., ICDCS 2023, figure 7:
    "acpsgd:error_feedback=false", "acpsgd:reuse=false", "acpsgd:error_feedback=false,reuse=false",
    "terngrad", "dgc:warmup_steps=10%", "atomo",
    "gradiveq:warmup_steps=10%,sample_steps=5%,compress_steps=20%",  # nearly four cycles
)  # fmt: skip
TEXT_METHODS = (
    "none", "acpsgd:rank=4", "powersgd:rank=4", "qsgd", "topk", "fp16", "acpsgd:rank=16", "powersgd:rank=16",
    "acpsgd:rank=32", "powersgd:rank=32", "topk:theta=0.96,bits=4",
    "momentum:inner=signsgd(majority=False),warmup_steps=10%",
)  # fmt: skip
MUON_METHODS = (
    "none", "block-float:bits=4,rounding=nearest", "onebit", "powersgd:rank=32", "powersgd:rank=16", "qsgd",
    "signsgd:majority=False",
)  # fmt: skip
OUTER_METHODS = (
    "none", "local(every=10):phases:0=qsgd,20%=none", "local(every=30):phases:0=qsgd,20%=none",
    "local(every=10):phases:0=qsgd,20%=block-float(bits=4,rounding=nearest)",
    "local(every=30):phases:0=qsgd,20%=block-float(bits=4,rounding=nearest)",
    "local(every=30):phases:0=qsgd,20%=topk(theta=0.985,bits=2,chunk=4096,residual_decay=0.95)",
    "local(every=5):phases:0=qsgd,20%=none", "local(every=100):phases:0=qsgd,20%=none", "local(every=30):none",
)  # fmt: skip
OUTER_LRS = (0.004, 0.008, 0.002)
MUON_LRS = (0.016, 0.008, 0.032)
REMEDY_METHODS = ("none", "topk:theta=0.96,bits=4", "qsgd", "acpsgd:rank=4")


@dataclass(frozen=True)
class Recipe:
    """How all methods that are compared with each other train.

    Args:
        network: a name in MODELS.
        lrs: peak learning rates, for every method alike. The first is run first.
        optimizer: a name in OPTIMIZERS.
        betas: its momentum, and beta2 of AdamW; empty for those of OPTIMIZERS.
        workers: simulated ranks.
        batch_size: examples of a step and worker.
        share: of the training examples that is used: the first ones.
        margin: by how much the score of a run may be worse than without compression to count as reached, in units of
            the data set's measure.
    """

    network: str
    epochs: int
    lrs: tuple[float, ...]
    methods: tuple[str, ...]
    margin: float
    optimizer: str
    betas: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0, 1)
    workers: int = 4
    batch_size: int = 32
    share: float = 1.0


_IMAGES = Recipe("resnet20", epochs=15, lrs=(0.1, 0.03, 0.3), methods=IMAGE_METHODS, margin=2.0, optimizer="sgd")
_TEXT = Recipe(
    "charlm", epochs=4, lrs=(0.002, 0.001, 0.004), methods=TEXT_METHODS, margin=0.05, optimizer="adamw", batch_size=8
)


def _recipes(images: Recipe, text: Recipe) -> dict[str, Recipe]:
    """Recipes for images and text; for text with betas that suit late gradients, and with Muon; local steps."""
    few = replace(text, methods=REMEDY_METHODS)
    return {
        "images": images,
        "text": text,
        "text-betas": replace(few, betas=(0.3, 0.99)),
        "text-muon": replace(text, methods=MUON_METHODS, optimizer="muon"),
        "images-outer": replace(images, methods=OUTER_METHODS),
        "text-outer": replace(text, methods=OUTER_METHODS, epochs=4 * text.epochs, lrs=OUTER_LRS),
        "text-muon-outer": replace(text, methods=OUTER_METHODS, epochs=4 * text.epochs, lrs=MUON_LRS, optimizer="muon"),
    }


SIZES = {
    "quick": _recipes(
        replace(_IMAGES, network="cnn", batch_size=8, epochs=15, lrs=(0.05,), seeds=(0,)),
        replace(_TEXT, network="charlm-small", epochs=3, lrs=(0.002,), seeds=(0,), share=0.1),
    ),
    "default": _recipes(
        replace(_IMAGES, network="resnet8", epochs=4, lrs=(0.1, 0.03)),
        replace(_TEXT, network="charlm-small", epochs=3, lrs=(0.002,)),
    ),
    "full": _recipes(_IMAGES, _TEXT),
}


BY_NAME = ("images-outer", "text-outer", "text-muon-outer")  # recipes that are trained if they are asked for alone


@dataclass(frozen=True)
class Run:
    """One training run. The result depends on these values, the data and the number of threads alone."""

    recipe: str
    method: str
    lr: float
    seed: int
    network: str
    epochs: int
    workers: int
    batch_size: int
    share: float
    optimizer: str
    betas: tuple[float, ...]

    @property
    def key(self) -> tuple[str, str, float, int]:
        """What tells it from other runs of a study."""
        return self.recipe, self.method, self.lr, self.seed

    @property
    def title(self) -> str:
        return f"{self.recipe}, {self.method}, lr {self.lr:g}, seed {self.seed}"

    @property
    def stem(self) -> str:
        """Name of its files: readable, and different for different runs."""
        digest = hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=6).hexdigest()
        return f"{self.recipe}-{re.sub('[^a-z0-9.]+', '-', self.method)}-{self.lr:g}-{self.seed}-{digest}"


def runs_of(recipes: dict[str, Recipe]) -> list[Run]:
    """All runs in the order in which they are done, so that an unfinished study compares as many methods as it can.

    Every method once, then again with the other seeds, then with the other learning rates.
    """
    ranked = []
    for name, recipe in recipes.items():
        fixed = (
            recipe.network, recipe.epochs, recipe.workers, recipe.batch_size, recipe.share, recipe.optimizer,
            recipe.betas,
        )  # fmt: skip
        for s, seed in enumerate(recipe.seeds):
            for i, lr in enumerate(recipe.lrs):
                ranked += [((i, s), Run(name, method, lr, seed, *fixed)) for method in recipe.methods]
    return [run for _, run in sorted(ranked, key=lambda entry: entry[0])]  # recipes and methods keep their order


def compressor(method: str, steps: int) -> gradzip.Compressor:
    """Make the compressor of a run of so many steps.

    Args:
        method: a spec as for `gradzip.parse`, with three additions: `10%` stands for a tenth of the steps (at least 2);
            theta may be a schedule of steps, as in fft-range:theta={0:0.9,50%:0.0}; and local(every=30): before it says
            that it compresses differences of parameters. With phases, the last one does, and earlier ones gradients.

    Raises:
        ValueError: unknown method or argument.
    """
    _, method = local_steps(method)
    spec = re.sub(r"(\d+)%", lambda found: str(max(2, steps * int(found[1]) // 100)), method)
    found = re.search(r"theta=(\{[^}]*\}),?", spec)
    if found is None:
        return gradzip.parse(spec)
    made = gradzip.parse(spec.replace(found[0], "").rstrip(",:"))
    try:
        schedule = gradzip.StepSchedule(ast.literal_eval(found[1]))
        return replace(made, theta=schedule)
    except (SyntaxError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"compression {method!r}: got theta = {found[1]} ({error}), expected a schedule such as {{0:0.9,50%:0.0}} "
            "of a method that has theta"
        ) from None


def is_text(network: str) -> bool:
    return MODELS[network].data is data.text


def load_data(run: Run | Recipe, path: str | None) -> data.Images | data.Text:
    """The data set of a run: a folder with CIFAR-10 or the digits, a text file or the sources of torch.nn.

    Raises:
        data.DataError: it is missing or damaged.
    """
    dataset = MODELS[run.network].data(path)
    if run.share < 1:
        used = int(run.share * len(dataset.train if is_text(run.network) else dataset))
        cut = dataset.train[:used] if is_text(run.network) else tuple(array[:used] for array in dataset.train)
        dataset = replace(dataset, train=cut)
    return dataset


def steps_per_epoch(run: Run | Recipe, dataset: data.Images | data.Text) -> int:
    """Steps of an epoch. An incomplete last step is dropped."""
    return len(dataset) // (run.workers * run.batch_size)
