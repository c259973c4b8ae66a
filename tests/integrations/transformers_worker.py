"""Scenarios for tests/integrations/test_transformers.py: callbacks of a Trainer that trains a small GPT-2 on text."""

import itertools
import warnings

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import gradzip
from gradzip.integrations.transformers import Compression, LocalSteps
from harness import job, main, message, on_request, scenario
from paths import ROOT

STEPS, SAVED = 6, 3
METHOD = "powersgd:rank=2,min_numel=256"
EVERY = 2  # steps between exchanges: the checkpoint comes between two
BATCH, LENGTH = 2, 32  # examples for a rank, characters of each


def network():
    torch.manual_seed(0)
    no_dropout = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    tokens = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, loss_type="ForCausalLM", **tokens, **no_dropout)
    )


class Record(TrainerCallback):
    """Keeps the parameters of this rank after each step."""

    def __init__(self):
        self.after = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.after.append(values(model))


class Report(TrainerCallback):
    """Keeps what is logged, as a callback before Compression that sends it elsewhere."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append(dict(logs))


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(folder, *callbacks, trainer=Trainer, resume=None, accumulated=1):
    """Train as Transformers' users do. Returns parameters after each step and at the end, and the logged losses."""
    text = torch.tensor(list((ROOT / "LICENSE").read_bytes())) % 128  # a token for each character
    pieces = text[: STEPS * accumulated * BATCH * job.size * LENGTH].split(LENGTH)
    record = Record()
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=BATCH, max_steps=STEPS, logging_steps=1,
        save_strategy="steps", save_steps=SAVED, gradient_accumulation_steps=accumulated, learning_rate=1e-3,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    made = trainer(
        network(),
        arguments,
        train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
        callbacks=[*callbacks, record],
    )
    made.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return record.after, values(made.model), losses


class HookByHand(Trainer):
    """Registers gradzip's hook without an adapter."""

    state_of_hook = None

    def training_step(self, model, inputs, *arguments):
        if self.state_of_hook is None:
            self.state_of_hook = gradzip.ddp.register(model, gradzip.parse(METHOD))
        return super().training_step(model, inputs, *arguments)


class LocalByHand(Trainer):
    """Local steps without an adapter."""

    outer = None

    def training_step(self, model, inputs, *arguments):
        if self.outer is None:
            method = gradzip.parse(METHOD)
            self.outer = gradzip.outer.LocalSteps(model.module, self.optimizer.optimizer, method, every=EVERY)
        with model.no_sync():
            return super().training_step(model, inputs, *arguments)


KINDS = {
    "compression": lambda: Compression(gradzip.parse(METHOD)),
    "local": lambda: LocalSteps(gradzip.parse(METHOD), every=EVERY),
    "streamed": lambda: LocalSteps(every=4, fragments=2, delay=1, blend=0.5),
}


@scenario
def uninterrupted(folder):
    """What `train` returns, of trainings that save a checkpoint on the way."""
    return {kind: train(folder / kind, make()) for kind, make in KINDS.items()}


@scenario
def by_hand(folder):
    """The same without adapters."""
    return {
        "compression": train(folder / "hook", trainer=HookByHand),
        "local": train(folder / "outer", trainer=LocalByHand),
    }


@scenario
def accumulated(folder):
    """With gradients of two batches: what `train` returns, with the callback and by hand; and with local steps."""
    return {
        "compression": train(folder / "two", KINDS["compression"](), accumulated=2),
        "compression by hand": train(folder / "two by hand", trainer=HookByHand, accumulated=2),
        "local": train(folder / "two local", KINDS["local"](), accumulated=2),
        "local by hand": train(folder / "two local by hand", trainer=LocalByHand, accumulated=2),
    }


def checkpoint(folder, kind):
    return str(folder / kind / f"checkpoint-{SAVED}")


@scenario
def logs(folder):
    """What a reporter is told and what the Trainer keeps, with the callback; and bytes that its method has sent."""
    report, compression = Report(), Compression(gradzip.parse("block-float:min_numel=256"))
    train(folder / "logs", report, compression)
    traffic = compression.compressor.traffic
    return report.logs, traffic.wire_ratio(job.size), traffic.bytes_wire


@on_request
def resumed(folder):
    """What `train` returns, of the same trainings from their checkpoints on, and of one that ignores the states."""
    results = {
        kind: train(folder / kind / "again", make(), resume=checkpoint(folder, kind)) for kind, make in KINDS.items()
    }
    ignored = train(folder / "ignored", trainer=HookByHand, resume=checkpoint(folder, "compression"))
    return results | {"without states": ignored}


@on_request
def with_other_checkpoints(folder):
    """Warnings of trainings that resume from a checkpoint without states, or from one of another number of ranks."""
    found = {}
    for name, kind, make in (
        ("compression", "compression", KINDS["compression"]),
        ("local", "local", KINDS["local"]),
        ("without", "hook", KINDS["compression"]),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callback = make()
            steps = len(train(folder / kind / f"on {job.size}", callback, resume=checkpoint(folder, kind))[0])
        texts = [str(warning.message) for warning in caught]
        found[name] = steps, [text for text in texts if "residuals are dropped" in text or "begin anew" in text]
    return found


@scenario
def twice(folder):
    """The number of steps of two trainings in a row of one Trainer."""
    record, lengths = Record(), []
    arguments = TrainingArguments(
        str(folder / "twice"), use_cpu=True, max_steps=2, save_strategy="no", report_to="none", disable_tqdm=True
    )
    pieces = torch.arange(64 * LENGTH).remainder(128).split(LENGTH)
    for callback in (KINDS["compression"](), KINDS["local"]()):
        trainer = Trainer(
            network(),
            arguments,
            train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
            callbacks=[callback, record],
        )
        for _ in range(2):
            trainer.train()
            lengths.append(len(record.after))
    return lengths


class Tokens(TrainerCallback):
    """Whether the Trainer averages tokens over ranks, in each step."""

    def __init__(self):
        self.seen = set()

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.add(args.average_tokens_across_devices)


class RunsOutOfMemory(Trainer):
    """Raises an error in the second and the sixth step, once each. With a smaller batch, or in another training, it
    goes on."""

    calls = 0

    def training_step(self, *arguments):
        self.calls += 1
        if self.calls in (2, 6):
            raise RuntimeError("CUDA out of memory." if self.calls == 2 else "a bad batch")
        return super().training_step(*arguments)


@scenario
def again(folder):
    """Local steps that begin again with a smaller batch, and after another error: the error, the parameters, how many
    steps there were after each, and whether tokens are averaged in steps and after them."""
    arguments = TrainingArguments(
        str(folder / "again"), use_cpu=True, max_steps=5, save_strategy="no", report_to="none", disable_tqdm=True,
        auto_find_batch_size=True,
    )  # fmt: skip
    pieces = torch.arange(64 * LENGTH).remainder(128).split(LENGTH)
    callback, record, tokens = KINDS["streamed"](), Record(), Tokens()
    trainer = RunsOutOfMemory(
        network(),
        arguments,
        train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
        callbacks=[callback, record, tokens],
    )
    error, steps = message(trainer.train), len(record.after)
    trainer.train()
    kept = trainer.args.average_tokens_across_devices
    return error, values(trainer.model), [steps, len(record.after)], tokens.seen, kept


@scenario
def started(folder):
    """A data-parallel start of all steps, with the method of a `Compression`."""
    return train(folder / "started", KINDS["compression"](), LocalSteps(every=EVERY, start=STEPS))


class Strategy(TrainerCallback):
    """Makes the Trainer's Accelerator say that it has a strategy, which needs packages to be chosen."""

    def __init__(self, name):
        self.name = name

    def on_train_begin(self, *arguments, **kwargs):
        PartialState().distributed_type = DistributedType[self.name]
        AcceleratorState().distributed_type = DistributedType[self.name]


@scenario
def refused(folder):
    """Errors, by what was wrong."""
    found = {
        "type": message(Compression, "topk"),
        "outside": message(KINDS["compression"]().on_train_begin, None, None, None),
    }
    strategies = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}
    for (strategy, name), kind in itertools.product(strategies.items(), ("compression", "local")):
        found[f"{kind} {name}"] = message(train, folder / "refused", Strategy(strategy), KINDS[kind]())
        for state in (PartialState(), AcceleratorState()):
            state.distributed_type = DistributedType.MULTI_CPU
    return found


if __name__ == "__main__":
    main()
