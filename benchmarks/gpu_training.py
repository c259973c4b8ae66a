"""Train a transformer of GPT-2's shape on one GPU, with simulated workers: the loss by step of each method.

12 layers of 768, tokens of a byte-pair code that is trained on the spot, bfloat16 autocast. The text is the Python
sources of the interpreter and of its packages; a fiftieth of the files is for validation. All variants start with the
same weights and see the same tokens. Results are written after each training, and those that a file has are not trained
again.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import gradzip
from benchmarks.common.arguments import Parser, at_least, output_file
from benchmarks.common.networks import GPT
from benchmarks.common.results import RESULTS, provenance, write_json
from benchmarks.common.workers import Workers
from train import learning_rate

EXAMPLES = """\
examples:
  python -m benchmarks.gpu_training --seconds 330 gpu_training.json     on a GPU, what six minutes allow
  python -m benchmarks.gpu_training --lr 3e-4 6e-4 1.5e-4 --variants none "4 bits"      at three rates
  python -m benchmarks.gpu_training --layers 2 --width 64 --tokens 500 --length 32 --megabytes 1 --steps 4 small.json
"""
STORED = RESULTS / "gpu_training.json"
VALIDATION = 50  # one file of so many
BETAS = (0.9, 0.95)
RECIPE = (
    "phases:0=qsgd,{qsgd}=block-float(bits=4,rounding=nearest),"
    "{signs}=momentum(inner=signsgd(majority=False),beta2=0.95)"
)


class Variant(NamedTuple):
    """What is trained. method: a spec; {qsgd} and {signs} are the steps at which the phases of the recipe begin."""

    name: str
    method: str
    optimizer: str = "adamw"


VARIANTS = [
    Variant("none", "none"),
    Variant("4 bits", "block-float:bits=4,rounding=nearest"),
    Variant("recipe for AdamW", RECIPE),
    Variant("8 bits", "block-float"),
    Variant("muon, none", "none", "muon"),
    Variant("muon, 4 bits", "block-float:bits=4,rounding=nearest", "muon"),
    Variant("PowerSGD(32)", "powersgd:rank=32"),
    Variant("TopK(.99)", "topk"),
    Variant("muon, OneBit", "onebit", "muon"),
    Variant("fp16", "fp16"),
]


@dataclass(frozen=True)
class Text:
    """Token numbers, and what they are made of."""

    train: Tensor
    validation: Tensor
    about: dict[str, Any]


def sources(megabytes: int) -> Iterator[tuple[bool, bytes]]:
    """Whether a file is for validation, and its text: the library's, then the packages', up to so many bytes."""
    left, number = 1_000_000 * megabytes, 0
    for folder in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(folder)).rglob("*.py")):
            if folder == "stdlib" and "site-packages" in path.parts:
                continue
            content = path.read_bytes()
            if left <= 0:
                return
            left -= len(content)
            yield number % VALIDATION == 0, content
            number += 1


def text(args: argparse.Namespace) -> Text:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    parts: dict[bool, list[str]] = {False: [], True: []}
    digest = hashlib.sha256()
    for validates, content in sources(args.megabytes):
        digest.update(content)
        parts[validates].append(content.decode(errors="replace"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=args.tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(parts[False][:: max(1, args.megabytes // 20)], trainer)

    def encoded(files: list[str]) -> Tensor:
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(files)]
        return torch.from_numpy(np.concatenate([np.asarray(each, np.int16) for each in ids])).to(args.device)

    train, validation = encoded(parts[False]), encoded(parts[True])
    about = {
        "files": len(parts[False]) + len(parts[True]), "sha256": digest.hexdigest(),
        "train_tokens": train.numel(), "validation_tokens": validation.numel(),
        "bytes_per_token": sum(len(file.encode()) for file in parts[True]) / validation.numel(),
    }  # fmt: skip
    return Text(train, validation, about)


class Training(Workers):
    """A network in training. forward: the network, perhaps compiled."""

    def __init__(self, network: GPT, forward: Any, variant: Variant, lr: float, args: argparse.Namespace) -> None:
        phases = {"qsgd": int(0.16 * args.steps), "signs": int(0.2 * args.steps)}
        compressor = gradzip.parse(variant.method.format(**phases))
        momenta = any(part.averaged_momentum is not None for part in compressor.parts)
        fused = {"fused": True} if args.device == "cuda" and not momenta else {}
        optimizer: torch.optim.Optimizer
        if variant.optimizer == "muon":
            matrices = [p for p in network.blocks.parameters() if p.ndim == 2]
            known = {*map(id, matrices)}
            others = [p for p in network.parameters() if id(p) not in known]
            groups = [{"params": matrices}, {"params": others, "adamw": True, "betas": BETAS}]
            optimizer = gradzip.optim.Muon(groups, lr=lr, weight_decay=0.1)
        else:
            kind = gradzip.optim.AdamW if momenta else torch.optim.AdamW
            optimizer = kind(network.parameters(), lr=lr, betas=BETAS, weight_decay=0.1, **fused)
        super().__init__(network, optimizer, compressor, args.workers)
        self.forward, self.device = forward, args.device

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return nn.functional.cross_entropy(self.forward(inputs).flatten(0, 1), targets.flatten())


def windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(tokens.numel() - length, (count, 1), generator=generator)
    found = tokens[(starts + torch.arange(length + 1)).to(tokens.device)].long()
    return found[:, :-1], found[:, 1:]


def train(training: Training, of: Text, lr: float, args: argparse.Namespace) -> dict[str, Any]:
    """Train a variant. Returns its row, without the fields that say which."""
    generator = torch.Generator().manual_seed(args.seed)
    losses, start = [], time.perf_counter()
    for number in range(args.steps):
        shards = [windows(of.train, args.batch_size, args.length, generator) for _ in range(args.workers)]
        losses.append(training.step(learning_rate(lr, number, args.steps, args.warmup), shards))
    seconds = time.perf_counter() - start
    generator.manual_seed(1)
    batches = [windows(of.validation, args.batch_size, args.length, generator) for _ in range(16)]
    validation = [training.loss(*batch).item() for batch in batches]  # with gradients: no other graph to compile
    return {
        "losses": [round(loss, 4) for loss in losses],
        "validation_loss": sum(validation) / len(validation),
        "seconds": seconds,
        "payload_bytes": training.group.bytes_sent,
        "memory": torch.cuda.max_memory_allocated() if args.device == "cuda" else None,
    }


def main() -> None:
    parser = Parser("gpu_training", __doc__, EXAMPLES)
    parser.add_argument("file", nargs="?", type=output_file, default=STORED, help="of results, JSON")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=at_least(1), help="start no variant that would end later (default: no limit)")
    for name, default, text_of in (
        ("steps", 240, "of each variant"), ("workers", 4, "that are simulated"),
        ("batch-size", 8, "sequences of a worker"), ("length", 1024, "of a sequence, in tokens"),
        ("tokens", 16384, "of the code"), ("layers", 12, "of the network"), ("width", 768, "of the network"),
        ("megabytes", 80, "of text"), ("seed", 0, "of weights and examples"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=at_least(0), default=default, help=f"{text_of} (default: %(default)s)")
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-4], help="highest learning rates (default: 3e-4)")
    parser.add_argument("--warmup", type=float, default=0.2, help="share of the steps (default: %(default)s)")
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--variants", nargs="+", choices=names, default=names, help="(default: all)")
    parser.add_argument("--no-compile", dest="compiles", action="store_false", help="do not use torch.compile")
    args = parser.parse_args()
    deadline = time.monotonic() + (args.seconds or 1e9)
    found = text(args)
    print(f"gpu_training: {found.about}", flush=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    network = GPT(args.tokens, args.layers, args.width, args.width // 64, args.length).to(args.device)
    initial = {name: value.clone() for name, value in network.state_dict().items()}
    forward = torch.compile(network) if args.compiles else network
    names = ("steps", "workers", "batch_size", "length", "tokens", "layers", "width", "seed", "compiles")
    settings = {name: getattr(args, name) for name in names}
    settings["parameters"] = sum(p.numel() for p in network.parameters())
    about = {**provenance(args.device), **settings, "text": found.about}
    rows: list[dict[str, Any]] = []
    if args.file.exists():
        stored = json.loads(args.file.read_text())
        if {name: stored["provenance"].get(name) for name in settings} == settings:
            rows = stored["rows"]
    trained = {(row["variant"], row["lr"], row["warmup"]) for row in rows}
    longest = 0.0
    for lr, variant in itertools.product(args.lr, VARIANTS):
        key = (variant.name, lr, args.warmup)
        if variant.name not in args.variants or key in trained or time.monotonic() + longest > deadline:
            continue
        begin = time.monotonic()
        network.load_state_dict(initial)
        network.zero_grad()
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row = train(training := Training(network, forward, variant, lr, args), found, lr, args)
        which = dict(zip(("variant", "lr", "warmup"), key, strict=True))
        rows.append({**which, "method": variant.method, "optimizer": variant.optimizer, **row})
        write_json(args.file, {"provenance": about, "rows": rows})
        del training
        gc.collect()
        longest = max(longest, time.monotonic() - begin) if len(rows) > 1 else 0.0
        sent = row["payload_bytes"] / (4 * settings["parameters"] * args.steps)
        print(
            f"{variant.name:20} rate {lr:g}  loss {row['validation_loss']:.4f}  {row['seconds']:.1f} s  "
            f"sent {sent:.4f} of float32",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
