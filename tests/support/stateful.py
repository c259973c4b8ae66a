"""Drive a front end by random actions on two ranks in lock-step: `python tests/support/stateful.py --engine ddp`.

A case is a method, options of the training, and a list of actions, such as steps, failed backward passes and loads of
checkpoints. It follows from its seed. `tests/front_ends/stateful_worker.py` has what the actions do, and compares the
front end with a model of it after each.

The command prints the seed and the actions of a case that fails, and looks for fewer actions that fail, too.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import launch

RANKS = 2
HANG_SECONDS = 100  # that an action may take; far more than needed, also on a busy machine
ENGINES = {"ddp": launch.torchrun, "fsdp": launch.torchrun, "horovod": launch.horovodrun}
SPECS = [
    "none",
    "topk:theta=0.9",
    "topk:theta=0.9,exchange=scatter_reduce",
    "fft-range:theta=0.8",
    "acpsgd",
    "powersgd",
    "onebit",
    "qsgd",
    "terngrad",
    "block-float",
    "randomk:theta=0.9",
    "momentum:inner=signsgd(majority=False),warmup_steps=2",
    "phases:0=topk(theta=0.9),3=acpsgd,6=onebit,9=none",
    "phases:0=topk(theta=0.9),2=momentum(inner=signsgd(majority=False),warmup_steps=2),9=none",
    "per-layer:a|k=acpsgd,c=fft-range(theta=0.8),default=topk(theta=0.9)",
]
SHAPES = {
    "first": {"a": (64, 48), "b": (48,), "k": (16, 8, 3, 3)},
    "second": {"c": (40, 40), "d": (33, 40), "e": (7,)},
}
# The parameters of which one may be frozen, unused or not finite.
SOME = ["first.a", "first.b", "second.c", "second.d"]
OPTIONS = ["scaled", "small_buckets", "two_passes"]  # a GradScaler; several buckets; backward_passes_per_step=2
FACTORS = [0.25, 0.5, 2.0, 4.0]  # of the loss scale

# How often each action is drawn. Their arguments are drawn in `draw`.
WEIGHTS = {
    "step": 8,
    "accumulate": 2,  # a step of two backward passes, with or without averages after the first
    "unused": 2,  # a step in which a parameter is unused, on one rank or on all; maybe in its second pass alone
    "discard": 2,  # a backward pass whose averages are announced to be thrown away
    "other": 1,  # a step of another model with the same compressor
    "overflow": 2,  # a step in which an element of a gradient of one rank is inf or NaN
    "fail": 2,  # a backward pass that raises an error on all ranks
    "forward": 1,  # a forward pass whose backward pass is not taken
    "freeze": 1,
    "unfreeze": 1,
    "wrap": 2,  # again: another optimizer, and another wrapper of the model
    "resume": 1,  # from a file: another model, another compressor; names may have a prefix
    "save": 1,
    "load": 1,  # what `save` has saved
    "scale": 1,
}


@dataclass
class Case:
    """What all ranks do. All fields are text."""

    method: str
    options: str  # of OPTIONS
    actions: str

    @classmethod
    def of(cls, seed):
        """Draw a case."""
        generator = random.Random(seed)
        method = generator.choice(SPECS)
        options = [option for option in OPTIONS if generator.random() < 0.5]
        actions = [draw(generator) for _ in range(generator.randint(4, 24))]
        return cls(method, " ".join(options), " ".join(actions))

    @classmethod
    def parse(cls, text):
        return cls(*(field.strip() for field in re.split(r" \|(?= )", text)))

    def __str__(self):
        return f"{self.method} | {self.options} | {self.actions}"


def new_seed():
    """Return another seed in every run."""
    return random.SystemRandom().randrange(10**6)


def draw(generator):
    """Draw an action, with its arguments."""
    (action,) = generator.choices(list(WEIGHTS), WEIGHTS.values())
    rank, name = generator.randrange(RANKS), generator.choice(SOME)
    passes = generator.choice(["local", "averaged"])
    arguments = {
        "step": [generator.choice(["none", "zeros"])],
        "unused": [name, generator.choice([rank, "all"]), generator.choice(["once", "averaged"])],
        "discard": [generator.choice(["nan", "1"])],
        "resume": [generator.choice(["", "net."])],
        "accumulate": [passes],
        "overflow": [name, rank, generator.choice(["inf", "nan"]), passes],
        "fail": [generator.choice(["second", "first", "end"])],
        "freeze": [name],
        "wrap": [generator.choice(["plain", "unused", "views"])],
        "scale": [generator.choice(FACTORS)],
    }
    return ":".join(map(str, [action, *arguments.get(action, [])]))


def run(engine, seconds=0, seed=0, cases=()):
    """Run cases in a job, and then those of one seed after the other until the time is over.

    Returns the number of cases that ran, that of each action, the case that failed, and the output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "progress")
        task = {"engine": engine, "seconds": seconds, "seed": seed, "cases": [*map(str, cases)], "path": str(path)}
        os.environ["STATEFUL"] = json.dumps(task)
        try:
            job = ENGINES[engine](RANKS, "stateful_worker.py", folder, timeout=seconds + 200)
            status, output = job.returncode, job.stdout + job.stderr
        except subprocess.TimeoutExpired as error:
            status, output = 1, str(error)
        progress = json.loads(path.read_text()) if path.exists() else {}
    if status and not progress.get("case"):
        raise RuntimeError(f"the job did not start, or did not end:\n{output[-4000:]}")
    return progress["count"], progress["actions"], Case.parse(progress["case"]) if status else None, output


def shrink(engine, case, tries=30):
    """Remove actions for as long as the case fails."""
    actions = case.actions.split()
    size = len(actions) // 2
    while size:
        start = 0
        while start < len(actions) and tries:
            fewer = [*actions[:start], *actions[start + size :]]
            tries -= 1
            if fewer and run(engine, cases=[replace(case, actions=" ".join(fewer))])[2] is not None:
                actions = fewer
            else:
                start += size
        size //= 2
    return replace(case, actions=" ".join(actions))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, action="append", help="default: all, one after the other")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each engine")
    parser.add_argument("--seed", type=int, help="of the first case (default: another one in every run)")
    parser.add_argument("--case", type=Case.parse, help="the only case, as a failure prints it")
    parser.add_argument("--no-shrink", action="store_true", help="print a failure as it was found")
    arguments = parser.parse_args()
    seed = new_seed() if arguments.seed is None else arguments.seed
    for engine in arguments.engine or ENGINES:
        given = [arguments.case] if arguments.case else []
        count, actions, failed, output = run(engine, 0 if given else arguments.seconds, seed, given)
        print(f"{engine}, seed {seed}: {count} cases, {sum(actions.values())} actions: {actions}", flush=True)
        if failed is not None:
            print(f"{output[:6000]}\nFAILED, with seed {seed + count}: --engine {engine} --case '{failed}'", flush=True)
            if not arguments.no_shrink:
                print(f"shortest: --engine {engine} --case '{shrink(engine, failed)}'")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
