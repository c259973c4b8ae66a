#!/usr/bin/env python
"""Train a network on real data with stock Horovod, DDP or FSDP2, once for each compression, and compare the runs."""

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from statistics import quantiles

import torch
import torch.nn.functional as F

import data
import engines
import gradzip
from gradzip.outer.fragments import Schedule, cut
from models import MODELS, OPTIMIZERS, make_optimizer

EXAMPLES = """\
examples:
  python examples/train.py                                      one process: nothing is averaged
  horovodrun -np 2 python examples/train.py                     two ranks, FFT compression
  horovodrun -np 2 python examples/train.py --compression none --compression fft-range:theta=0.85,bits=10
                                                                two methods; the first is the reference
  horovodrun -np 2 python examples/train.py --model resnet18 --data cifar-10-batches-bin --batch-size 16 \\
      --steps 100 --compression none --compression fp16 --compression fft-range --json results.json
  torchrun --nproc-per-node 2 examples/train.py --model charlm  a character language model, through PyTorch DDP
  torchrun --nproc-per-node 4 examples/train.py --model charlm --engine fsdp    the same, sharded by FSDP2
  torchrun --nproc-per-node 2 examples/train.py --amp fp16      in mixed precision, with a loss scale
  torchrun --nproc-per-node 2 examples/train.py --model charlm --local-steps 30 --compression topk:theta=0.96,bits=4
                                                                averages differences of parameters every 30 steps
  torchrun --nproc-per-node 2 examples/train.py --model charlm --local-steps 30 --fragments 4 --delay 5
                                                                in four parts, while training goes on
"""

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}
OUTER = {"nesterov": gradzip.outer.nesterov, "mean": None}
UNTIMED_STEPS = 5  # first steps allocate memory and negotiate with other ranks


def fail(message):
    """Print an error once per host and exit with status 2. Works before an engine is initialized."""
    if engines.local_rank() > 0:
        # The first rank of each host prints. Launchers stop all ranks when one exits: wait until it has printed.
        time.sleep(3)
    else:
        print(f"train.py: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message}; see --help")


def positive(kind):
    def parse(text):
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"got {text}, expected a number above 0")
        return value

    parse.__name__ = kind.__name__  # argparse shows the name if `text` is no number
    return parse


def fraction(text):
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a number from 0 to below 1")
    return value


def seed(text):
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"got {text}, expected an integer from 0 to 2**63 - 1")
    return value


def compression(spec):
    try:
        gradzip.parse(spec)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return spec


def json_path(text):
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text}, expected a file in a folder that exists")
    return path


def parse_arguments():
    parser = Parser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="cnn", help="network (default: %(default)s)")
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="folder with CIFAR-10's binary version (default: scikit-learn's digits, 8x8 pixels); for charlm, a text "
        "file (default: 2 MB, the sources of torch.nn)",
    )
    parser.add_argument(
        "--engine",
        choices=engines.ENGINES,
        default=engines.launcher() or "horovod",
        help="averages the gradients (default: ddp under torchrun, otherwise horovod)",
    )
    parser.add_argument(
        "--compression",
        metavar="SPEC",
        action="append",
        type=compression,
        help="compression method, for example none, fp16 or fft-range:theta=0.85,bits=10 (the "
        "default); repeat it to compare several from the same initial weights",
    )
    parser.add_argument(
        "--epochs", type=positive(int), help="passes over the data (default: digits 20, CIFAR-10 10, text 1)"
    )
    parser.add_argument("--steps", type=positive(int), help="stop after this many steps")
    parser.add_argument(
        "--batch-size", type=positive(int), default=32, help="examples per step and rank (default: %(default)s)"
    )
    parser.add_argument(
        "--lr",
        type=positive(float),
        help="peak learning rate (default: "
        + ", ".join(f"{name} {recipe.lr}" for name, recipe in MODELS.items())
        + ")",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="(default: sgd, for charlm adamw)")
    parser.add_argument(
        "--momentum",
        type=fraction,
        help="of the optimizer, beta1 of AdamW; dgc replaces it by its own (default: 0.9, muon 0.95)",
    )
    parser.add_argument("--beta2", type=fraction, help="of AdamW (default: 0.95)")
    parser.add_argument(
        "--amp",
        choices=AMP,
        help="mixed precision: forward passes under torch.autocast; fp16 also scales the loss (default: float32)",
    )
    parser.add_argument(
        "--local-steps",
        metavar="N",
        type=positive(int),
        help="train each rank alone, and average what has changed after every N steps (default: average each gradient)",
    )
    parser.add_argument(
        "--outer",
        choices=OUTER,
        default="nesterov",
        help="with --local-steps: SGD with a learning rate of 0.7 and Nesterov's momentum of 0.9 takes average "
        "differences as gradients, or the parameters become their mean (default: %(default)s)",
    )
    parser.add_argument(
        "--fragments",
        metavar="N",
        type=positive(int),
        default=1,
        help="with --local-steps: parts of the model that are averaged in turn (default: %(default)s)",
    )
    parser.add_argument(
        "--delay",
        metavar="N",
        type=int,
        default=0,
        help="with --local-steps: an average is made in the background during N steps (default: %(default)s)",
    )
    parser.add_argument(
        "--blend",
        type=float,
        default=0.0,
        help="with --delay: weight of the parameters of the rank, where the average is applied (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, help="of weights, data order and augmentation (default: %(default)s)"
    )
    parser.add_argument("--threads", type=positive(int), help="torch threads per rank (default: cores / local ranks)")
    parser.add_argument("--json", metavar="PATH", type=json_path, help="write all results to this file")
    args = parser.parse_args()
    args.compression = args.compression or ["fft-range:theta=0.85,bits=10"]
    args.lr = args.lr or MODELS[args.model].lr
    args.optimizer = args.optimizer or MODELS[args.model].optimizer
    if args.beta2 is not None and args.optimizer == "sgd":
        parser.error("argument --beta2: got it for sgd, which has none; give --momentum, or another --optimizer")
    if not args.local_steps and (args.fragments > 1 or args.delay or args.blend or args.outer != "nesterov"):
        parser.error(
            "arguments --outer, --fragments, --delay, --blend: got one without --local-steps, expected it, too"
        )
    if args.local_steps:
        try:
            Schedule(args.local_steps, **streaming(args), what="--local-steps")
        except ValueError as error:
            parser.error(str(error))
    launcher, start = engines.launcher(), engines.ENGINES[args.engine].start
    if args.local_steps and args.engine == "fsdp":
        parser.error("argument --local-steps: got it with --engine fsdp, expected ddp or horovod")
    if args.optimizer == "muon" and args.engine == "fsdp":
        parser.error("argument --optimizer: got muon, expected adamw with --engine fsdp, which shards matrices")
    if launcher and engines.ENGINES[launcher].start != start:
        parser.error(f"argument --engine: got {args.engine} from a launcher for {launcher}; start it with {start}")
    return args


def streaming(args):
    return {"fragments": args.fragments, "delay": args.delay, "blend": args.blend}


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def learning_rate(peak, step, steps, share=1 / 20):
    """Linear warm-up over a share of the steps, then a half cosine down to zero."""
    warmup = max(1, int(share * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@contextlib.contextmanager
def progress(title, steps, rank):
    """Yield report(step, loss) for rank 0: a progress bar on a terminal, ten lines in a pipe (as under horovodrun)."""
    if rank > 0:
        yield lambda step, loss: None
        return
    try:
        from rich import progress as rich
    except ImportError:
        rich = None
    if rich and sys.stdout.isatty():
        columns = (
            "{task.description}",
            rich.BarColumn(None),
            rich.MofNCompleteColumn(),
            "loss {task.fields[loss]:.3f}",
            rich.TimeRemainingColumn(),
        )
        with rich.Progress(*columns, expand=True) as bar:
            task = bar.add_task(title, total=steps, loss=math.nan)
            yield lambda step, loss: bar.update(task, completed=step, loss=loss)
        return

    start, every = time.perf_counter(), math.ceil(steps / 10)

    def report(step, loss):
        if step % every == 0 or step == steps:
            seconds = time.perf_counter() - start
            print(f"{title}  step {step:{len(str(steps))}}/{steps}  loss {loss:.3f}  {seconds:.1f} s", flush=True)

    yield report


def cross_entropy(outputs, targets, reduction="mean"):
    """Cross entropy in nats, of logits (n, classes) or (n, length, classes)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction=reduction)


def train(spec, args, dataset, steps, engine):
    """Train with one compression. Returns the results, equal on all ranks except for time and traffic."""
    recipe = MODELS[args.model]
    torch.manual_seed(args.seed)
    model = recipe.build(*dataset.dimensions)
    compressor = gradzip.parse(spec)
    chosen = {"momentum": args.momentum, "beta2": args.beta2}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    optimizer = make_optimizer(args.optimizer, model, args.lr, compressor, **chosen)
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp == "fp16")
    if scaler.is_enabled() and not args.local_steps:  # differences of parameters are not scaled
        compressor.follow(scaler)  # rescale residuals with the loss scale
    replica, optimizer, traffic = engine.wrap(model, optimizer, compressor)
    # From here on, torch's generator only draws dropout masks, which should differ between ranks.
    torch.manual_seed(args.seed + engine.rank)
    shard = data.batches(dataset, batch_size=args.batch_size, rank=engine.rank, size=engine.size, seed=args.seed)

    losses, times = [], []
    start = time.perf_counter()
    with progress(spec, steps, engine.rank) as report:
        for step, (inputs, targets) in enumerate(itertools.islice(shard, steps)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args.lr, step, steps)
            begin = time.perf_counter()
            optimizer.zero_grad()
            with torch.autocast("cpu", AMP.get(args.amp), enabled=args.amp is not None):
                loss = cross_entropy(replica(inputs), targets)
            scaler.scale(loss).backward()
            engine.step(optimizer, scaler)
            scaler.update()
            times.append(1000 * (time.perf_counter() - begin))
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                sys.exit(
                    f"train.py: error: {spec}: the loss is {losses[-1]} in step {step} on rank {engine.rank}, "
                    f"expected a finite number; try a lower --lr than {args.lr}"
                )
            report(step + 1, losses[-1])
    seconds = time.perf_counter() - start
    exchanging = engine.exchange_seconds if args.local_steps else None

    model = engine.whole(model)
    curve = engine.average(torch.tensor(losses, dtype=torch.float64), name="loss_curve")
    if engine.rank == 0:
        print(f"{spec}  testing", flush=True)
    accuracy, test_loss = evaluate(model, dataset, engine)
    timed = times[UNTIMED_STEPS:] if len(times) > UNTIMED_STEPS + 1 else times
    deciles = quantiles(timed, n=10, method="inclusive") if len(timed) > 1 else timed * 9
    return {
        "compression": spec,
        "parameters": sum(p.numel() for p in model.parameters()),
        "test_accuracy": accuracy,
        "test_loss": test_loss,
        "train_loss": curve[-max(1, steps // 10) :].mean().item(),
        "ms_per_step": deciles[4],
        "ms_per_step_p20": deciles[1],
        "ms_per_step_p80": deciles[7],
        "payload_bytes_per_step": traffic.bytes_sent / steps,
        "sent_bytes_per_step": traffic.bytes_wire / steps,
        "uncompressed_bytes_per_step": traffic.bytes_dense / steps,
        "ratio": traffic.wire_ratio(engine.ranks) if traffic.bytes_wire else None,
        "replicas_identical": replicas_identical(model, engine),
        "steps": steps,
        "seconds": seconds,
        "exchange_seconds": exchanging,
        "loss_curve": [round(loss, 6) for loss in curve.tolist()],
    }


@torch.no_grad()
def evaluate(model, dataset, engine):
    """Accuracy and loss on the test set, of which each rank evaluates a share."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    for inputs, targets in dataset.test_batches(engine.rank, engine.size):
        outputs = model(inputs)
        totals[0] += (outputs.argmax(-1) == targets).sum()
        totals[1] += cross_entropy(outputs, targets, reduction="sum")
        totals[2] += targets.numel()
    correct, loss, count = engine.average(totals, name="test_totals").tolist()
    return correct / count, loss / count


def replicas_identical(model, engine):
    """Whether all ranks have the same parameters, bit for bit. (BatchNorm's running statistics differ.)"""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    digests = engine.gather(torch.tensor(list(digest.digest()), dtype=torch.uint8), name="parameter_digests")
    return bool((digests == digests[0]).all())


def human(size):
    """Format a number of bytes: 1234567 becomes 1.23 MB."""
    power = 0
    while size >= 999.5 and power < 3:
        size, power = size / 1000, power + 1
    return f"{size:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def score(run, measure):
    """The quality of a run, by the data set's measure."""
    return measure.value(run["test_accuracy"], run["test_loss"])


def table(runs, measure):
    """Yield the lines of a table: one column per compression, with differences from the first one."""
    first = runs[0]
    rows = {
        measure.label: lambda run: f"{score(run, measure):.{measure.digits}f}",
        "test loss": lambda run: f"{run['test_loss']:.4f}",
        "train loss": lambda run: f"{run['train_loss']:.4f}",
        "ms per step": lambda run: f"{run['ms_per_step']:.1f}",
        "sent per step and rank": lambda run: human(run["sent_bytes_per_step"]),
        "gradients per step": lambda run: human(run["uncompressed_bytes_per_step"]),
        "ratio": lambda run: f"{run['ratio']:.1f}" if run["ratio"] else "-",
        "replicas identical": lambda run: "yes" if run["replicas_identical"] else "NO",
    }
    differences = {
        measure.label: lambda run: f" ({score(run, measure) - score(first, measure):+.{measure.digits}f})",
        "ms per step": lambda run: f" (x{run['ms_per_step'] / first['ms_per_step']:.2f})",
    }
    # One line for the name and for each argument of a spec, to keep columns narrow.
    columns = [run["compression"].replace(":", ",").split(",") for run in runs]
    height = max(map(len, columns))
    for run, column in zip(runs, columns, strict=True):
        column += [""] * (height - len(column))
        for label, cell in rows.items():
            difference = differences.get(label) if run is not first else None
            column.append(cell(run) + (difference(run) if difference else ""))
    labels = [""] * height + list(rows)
    widths = [max(map(len, column)) for column in columns]
    for i, cells in enumerate(zip(labels, *columns, strict=True)):
        if i == height:
            yield "-" * (max(map(len, labels)) + sum(3 + width for width in widths))
        row = [cell.rjust(width) for cell, width in zip(cells[1:], widths, strict=True)]
        yield "   ".join([cells[0].ljust(max(map(len, labels))), *row])


def verdict(runs, measure, engine):
    """Yield the table's result in words: a line for each compression."""
    first, *others = runs
    if engine.size == 1:
        yield f"One rank exchanges gradients with nobody, so nothing was compressed: run this under {engine.start}."
    elif not others:
        yield (
            f"{first['compression']} sent {human(first['sent_bytes_per_step'])} for "
            f"{human(first['uncompressed_bytes_per_step'])} of gradients; give --compression twice to compare."
        )
    else:
        for run in others:
            yield compare(run, first, measure)
    if not all(run["replicas_identical"] for run in runs):
        yield "The replicas differ: these runs are not valid."


def compare(run, first, measure):
    fewer = first["sent_bytes_per_step"] / run["sent_bytes_per_step"]
    traffic = f"{fewer:.1f} times fewer" if fewer >= 1 else f"{1 / fewer:.1f} times more"
    difference = score(run, measure) - score(first, measure)
    slower = run["ms_per_step"] / first["ms_per_step"]
    if run["ms_per_step_p20"] > first["ms_per_step"]:
        speed = f"but takes {slower:.2f} times as long"
        if fewer > 1:
            speed += ": on this network, compressing costs more time than it saves"
    elif run["ms_per_step_p80"] < first["ms_per_step"]:
        speed = f"and is {1 / slower:.2f} times as fast"
    else:
        speed = "in about the same time"
    return (
        f"{run['compression']} sends {traffic} bytes than {first['compression']} "
        f"({difference:+.{measure.digits}f} {measure.unit}) {speed}."
    )


def main():
    args = parse_arguments()
    try:
        dataset = MODELS[args.model].data(args.data)
        if args.fragments > 1:
            with torch.device("meta"):  # without memory
                model = MODELS[args.model].build(*dataset.dimensions)
            cut(dict(model.named_parameters()), args.fragments, "--local-steps")
    except (data.DataError, ValueError) as error:
        fail(error)
    try:
        engine = engines.ENGINES[args.engine]()
    except ImportError as error:
        fail(f"--engine {args.engine}: {error}; install it, or choose the other engine")
    if args.local_steps:
        engine = engines.LocalSteps(engine, every=args.local_steps, outer=OUTER[args.outer], **streaming(args))

    per_epoch = len(dataset) // (args.batch_size * engine.size)
    if per_epoch == 0:
        fail(
            f"got --batch-size {args.batch_size} on {engine.size} rank(s), expected a step to take at most the "
            f"{len(dataset)} training {dataset.unit}; choose a smaller batch"
        )
    args.threads = args.threads or max(1, cores() // engine.local_size)
    torch.set_num_threads(args.threads)
    args.epochs = args.epochs or dataset.epochs
    steps = min(args.epochs * per_epoch, args.steps or math.inf)
    if engine.rank == 0:
        print(
            f"{args.model} on {dataset.name}: {len(dataset)} {dataset.unit}, {engine.size} rank(s) x batch "
            f"{args.batch_size}, {steps} steps, {args.threads} thread(s) a rank",
            flush=True,
        )

    runs = [train(spec, args, dataset, steps, engine) for spec in args.compression]
    if engine.rank == 0:
        measure = dataset.measure
        print("", *table(runs, measure), "", *verdict(runs, measure, engine), sep="\n", flush=True)
        if args.json:
            args.json.write_text(json.dumps(results(args, dataset, runs, engine), indent=1) + "\n")
    engine.end()


def results(args, dataset, runs, engine):
    configuration = {**vars(args), "data": dataset.name, "ranks": engine.size}
    del configuration["json"], configuration["compression"]  # the output path; each run has its compression
    versions = {
        "gradzip": gradzip.__version__,
        "torch": torch.__version__,
        **engine.versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": cores(),
    }
    return {"configuration": configuration, "versions": versions, "runs": runs}


if __name__ == "__main__":
    main()
