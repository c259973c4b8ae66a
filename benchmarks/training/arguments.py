"""The command line of benchmarks/training."""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path

import data
from benchmarks.common.arguments import Parser, at_least, data_path, output_file, picture_file
from benchmarks.common.jobs import shaping_error
from benchmarks.training.variants import FLOOR_METHODS, METHODS, QUICK, expanded, front_end, variant
from models import MODELS

BATCH_SIZES = {"alexnet": 32}  # others: 16
QUICK_OPTIONS = {
    "variants": QUICK, "model": ["alexnet", "resnet18"], "rate": ["1gbit", "none"], "ranks": [2], "rounds": 1,
    "seconds": 4,
}  # fmt: skip

EXAMPLES = f"""\
variants:
  compute        gradients are not averaged
  horovod        stock Horovod              horovod-fp16   with hvd.Compression.fp16
  ddp            stock DDP                  ddp-fp16       with fp16_compress_hook
                                            ddp-powersgd   with powerSGD_hook, rank 4
  horovod:SPEC   Horovod with a method of gradzip, for example horovod:fft-range:theta=0.9
  ddp:SPEC       DDP with a method of gradzip
  horovod-noop   Horovod, one element of each gradient     ddp-noop   DDP, with a hook that does nothing: the floor
  fsdp           FSDP2, which averages over the replicas itself     fsdp:SPEC   with a method of gradzip
  fsdp-noop      FSDP2, shards without averages over the replicas: the floor
  local(every=30):SPEC   differences of parameters after every 30 steps, with the means of these steps; torchrun
  stock          the first six (the default)
  methods        Horovod with each of gradzip's {len(METHODS)} methods
  ddp-methods    DDP with the main ones
  all            stock, methods and ddp-methods
  floor          compute, the floor of each front end, and {len(FLOOR_METHODS)} methods with each

examples:
  python -m benchmarks.training --quick                          ten minutes: two models, 1 Gb/s and unshaped
  python -m benchmarks.training stock horovod:topk ddp:topk --model resnet18 --data cifar-10-batches-bin \\
      --rate 1gbit --rate 100mbit --json results.json            two methods, on two networks, with CIFAR-10
  python -m benchmarks.training all --rate 100mbit --rate 1gbit --rate 10gbit --rate none --ranks 2 --ranks 4 \\
      --json results.json --png results.png                      hours: all models, on all networks
  python -m benchmarks.training compute horovod horovod:fft-range --ranks 4
  python -m benchmarks.training floor --interleave --model resnet18 --rate 1gbit --seconds 20
                                                                 how far methods are above what DDP and Horovod cost
  python -m benchmarks.training compute ddp-noop ddp:topk --interleave --model alexnet --rate 1gbit
  python -m benchmarks.training compute ddp-fp16 fsdp fsdp:acpsgd --hosts 2 --ranks 4 --rate 250mbit --rate none
                                                                 two hosts of two ranks, and a link between them

--json PATH is written after each measurement. The same command continues an interrupted run, or adds rounds, models,
rates or numbers of ranks to it. Rates other than none need root, for scripts/shaped_net.sh. Without root, unshaped runs
count no bytes on the wire. benchmarks.training.report makes the
tables of README.md and docs/benchmarks.md of the results.
"""


def parser(description: str | None = None) -> Parser:
    parser = Parser("training", description, EXAMPLES)
    number = {"type": at_least(1), "metavar": "N"}
    parser.add_argument("variants", nargs="*", metavar="VARIANT", type=variant, help="see below (default: stock)")
    parser.add_argument(
        "--quick", action="store_true",
        help=f"a subset of ten minutes: {', '.join(QUICK)} for alexnet and resnet18 at 1gbit and none, one round; "
        "other options replace its parts",
    )  # fmt: skip
    parser.add_argument(
        "--model", action="append", choices=MODELS, help="repeat for several (default: alexnet, resnet18 and charlm)"
    )
    parser.add_argument(
        "--rate", action="append", metavar="RATE",
        help="bandwidth of each rank, for example 1gbit; none is unshaped loopback (the default); repeat for several",
    )  # fmt: skip
    parser.add_argument("--ranks", action="append", **number, help="repeat for several (default: 2)")
    parser.add_argument(
        "--hosts", type=int, choices=(1, 2), default=1,
        help="2: half of the ranks on each of two hosts, which a link of RATE joins; not with Horovod",
    )  # fmt: skip
    parser.add_argument(
        "--data", action="append", default=[], metavar="PATH",
        help="a folder with CIFAR-10's binary version (default: scikit-learn's digits, 8x8), or a text for charlm "
        "(default: sources of Python's library); give both for both",
    )  # fmt: skip
    parser.add_argument("--threads", default=1, **number, help="torch threads per rank (default: %(default)s)")
    parser.add_argument("--batch-size", **number, help="examples per step and rank (default: 16; alexnet 32)")
    parser.add_argument("--rounds", **number, help="rounds, in which each variant runs once (default: 3)")
    parser.add_argument("--seconds", **number, help="of timed steps per round, at least 3 steps (default: 6)")
    parser.add_argument(
        "--steps", default=40, type=at_least(3), metavar="N", help="most timed steps per round (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup", default=2, **number,
        help="untimed steps before them; more where a method needs them (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", default=0, type=at_least(0), metavar="N", help="(default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="start new processes for each variant")
    parser.add_argument(
        "--interleave", action="store_true",
        help="the variants of a front end take turns in each step, with all their models in memory: steps that differ "
        "by less than the machine drifts can be compared",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", default=900, **number, help="limit of one variant, in seconds (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="PATH", type=output_file, help="keep results here, and continue them")
    parser.add_argument("--markdown", metavar="PATH", type=output_file, help="write the printed tables")
    parser.add_argument("--png", metavar="PATH", type=picture_file, help="draw the parts of each step")
    return parser


def checked(parse: Parser) -> argparse.Namespace:
    """The checked arguments of the process. `data_of` has the data of each model. Exits for others, and for --help."""
    args = parse.parse_args()
    defaults = {
        "variants": ["stock"], "model": ["alexnet", "resnet18", "charlm"], "rate": ["none"], "ranks": [2], "rounds": 3,
        "seconds": 6,
    }  # fmt: skip
    for name, value in (QUICK_OPTIONS if args.quick else defaults).items():
        setattr(args, name, getattr(args, name) or value)
    args.variants = expanded(args.variants)
    for name in ("model", "rate", "ranks"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    for path in args.data:
        if not Path(path).exists():
            parse.error(f"--data {path}: no such file or folder")
    args.data_of = {model: data_path(MODELS[model].data, args.data) for model in args.model}
    for model, path in args.data_of.items():
        try:
            dataset = MODELS[model].data(path)
        except data.DataError as error:
            parse.error(str(error))
        batch, ranks = args.batch_size or BATCH_SIZES.get(model, 16), max(args.ranks)
        if batch * ranks > len(dataset):
            parse.error(f"got a batch of {ranks} x {batch}, expected at most all {len(dataset)} {dataset.unit}")
    if args.interleave and args.fresh:
        parse.error("--interleave: got --fresh, expected one of them: models that take turns are in one process")
    if args.hosts > 1:
        if any(front_end(text) == "horovod" for text in args.variants):
            parse.error("--hosts 2: got variants of Horovod, expected those of torchrun: compute, ddp..., fsdp...")
        if any(ranks % args.hosts for ranks in args.ranks):
            parse.error(f"--hosts 2: got {args.ranks} ranks, expected even numbers")
    if version("horovod") is None and any(front_end(text) == "horovod" for text in args.variants):
        parse.error("Horovod is not installed; run make bootstrap, or name variants without it")
    for rate in args.rate:
        if (rate != "none" or args.hosts > 1) and (reason := shaping_error(rate, max(args.ranks), args.hosts)):
            parse.error(f"--rate {rate}: {reason}")
    return args


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
