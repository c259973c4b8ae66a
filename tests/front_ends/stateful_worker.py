"""Runs the cases of tests/support/stateful.py, on two ranks under horovodrun or torchrun.

After each action, what both ranks have is compared with a ledger of what must hold:

* Parameters, states of optimizers and averages are equal on both ranks, to the bit.
* Sum of averages + mean residual = sum of mean gradients, of all steps that were not skipped, up to rounding.
* A pass that is announced to be thrown away changes no state, and neither does a step of another model.
* A step is skipped if and only if a gradient of a rank is not finite. It changes no parameter then.
* After a step, nothing is in progress; after a case, nothing refers to the model and the compressor.
"""

import collections
import contextlib
import copy
import faulthandler
import functools
import gc
import json
import os
import time
import traceback
import warnings
import weakref
from pathlib import Path

import torch

import gradzip
from contract import assert_equal_states, gradient, through_file
from gradzip.averaging import optimizer_hooks
from gradzip.memory.state import _SUMS
from harness import UNDER_HOROVOD, gather, job, main, residuals, scenario
from stateful import HANG_SECONDS, SHAPES, Case

if UNDER_HOROVOD:
    import horovod.torch as hvd
    from horovod.torch import mpi_ops

    from gradzip.horovod import front_end
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

ALL = {f"{block}.{name}": shape for block, shapes in SHAPES.items() for name, shape in shapes.items()}
ROUNDINGS = 160  # of numbers of the size of the largest one, in a step: the bound of the methods' tests


def fail(grad):
    raise ArithmeticError("in the backward pass")


def assert_unchanged(after, before):
    """Assert that the states of a compressor are what they were before, but for new ones."""
    for old, new in zip(*((states, *states.get("parts", ())) for states in (before, after))):
        for of_names in old.keys() & {"states", "steps"}:
            kept = {name: new[of_names][name] for name in old[of_names]}
            assert_equal_states(*map(of_any_groups, (kept, old[of_names])))


def of_any_groups(states):
    """States without numbers that parameters have together, and these of all: buckets decide which have which."""
    states = copy.deepcopy(states)
    fields = [of for of in states.values() if isinstance(of, dict)]
    sums = [sum(of.pop(name, 0) for of in fields) for name in _SUMS]
    return [states, sums, max((of.pop("momentum_bound", 0) for of in fields), default=0)]


def local(tensor):
    return getattr(tensor, "to_local", lambda: tensor)().detach()


class Block(torch.nn.Module):
    """Adds the products of its parameters and their gradients, which are an argument."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        for parameter, shape in SHAPES[name].items():
            self.register_parameter(parameter, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, x, gradients):
        for name, parameter in self.named_parameters():
            if (grad := gradients.get(f"{self.name}.{name}")) is not None:
                x = x + (parameter * grad).sum()
        return x


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = map(Block, SHAPES)
        self.fails = ""  # where the backward pass fails: before the second block, before the first, or at the end

    def forward(self, gradients):
        x = torch.zeros((), requires_grad=self.fails == "end") * 1  # the oldest node: it comes last in a backward pass
        if self.fails == "end":
            x.register_hook(fail)
        for name, block in self.named_children():
            x = block(x, gradients)
            if self.fails == name:
                x.register_hook(fail)
        return x


class Ledger:
    """What must hold: what this rank's optimizer has got, and the gradients of this rank that are not skipped."""

    def __init__(self):
        self.averages = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in ALL.items()}
        self.gradients = copy.deepcopy(self.averages)
        self.largest, self.steps = 0.0, 0

    def add(self, gradients, averages):
        for totals, tensors in ((self.gradients, gradients), (self.averages, averages)):
            for name, tensor in tensors.items():
                totals[name] += tensor
                self.largest = max(self.largest, tensor.abs().max().item())
        self.steps += 1

    def check(self, compressor):
        """Compare the ranks' ledgers, with their residuals."""
        kept = residuals(compressor)
        assert kept.keys() <= ALL.keys(), sorted(kept)
        self.largest = max([self.largest, *(residual.abs().max().item() for residual in kept.values())])
        ranks = gather((self.averages, {name: self.gradients[name] - kept.get(name, 0) for name in ALL}, self.largest))
        assert_equal_states(ranks[0][0], ranks[1][0])
        if all(part.keeps_residual or isinstance(part, gradzip.NoCompression) for part in compressor.parts):
            bound = self.steps * ROUNDINGS * 2**-24 * max(largest for *_, largest in ranks)
            for name, total in self.averages.items():
                lost = (sum(sent[name] for _, sent, _ in ranks) / len(ranks) - total).abs().max().item()
                assert lost <= bound, f"{name}: lost {lost}, expected at most {bound}"


class Training:
    """A model in training, and the actions of a case. Subclasses have what differs between front ends."""

    passes_per_step = 1

    def __init__(self, case):
        self.method, options = case.method, case.options.split()
        self.scaled, self.two_passes = "scaled" in options, "two_passes" in options
        self.bucket_cap_mb = 0.012 if "small_buckets" in options else 25
        self.number, self.saved, self.ledger, self.mode = 0, None, Ledger(), "plain"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4, enabled=self.scaled)
        self.scaler.scale(torch.zeros(()))  # makes the scale
        self.create(Model())

    # --- front ends

    def create(self, model, states=None):
        """Start to train a model, with a new compressor."""
        self.model, self.compressor = model, gradzip.parse(self.method)
        if self.scaled:
            self.compressor.follow(self.scaler)
        if states is not None:
            self.compressor.load_state_dict(states)
        self.discarding = self.compressor.discarding()
        self.connect()

    def connect(self):
        """Make `module`, which takes the gradients, and `optimizer`."""
        momentum = any(part.averaged_momentum is not None for part in self.compressor.parts)
        adamw = gradzip.optim.AdamW if momentum else torch.optim.AdamW
        self.module, self.optimizer = self.model, adamw(self.model.parameters(), lr=0.01)

    def without_averages(self):
        return contextlib.nullcontext()

    def synchronized(self):
        """The context of a step of the optimizer. The gradients are averages in it."""
        return contextlib.nullcontext()

    # --- steps

    def backward(self, skip="", bad=()):
        """Take a backward pass. Returns the gradients of this rank."""
        self.number += 1
        gradients = {name: gradient(name, job.rank, self.number, shape) for name, shape in ALL.items() if name != skip}
        if bad:
            gradients[bad[0]].view(-1)[-1] = float(bad[1])
        self.scaler.scale(self.module(gradients)).backward()
        return {name: grad for name, grad in gradients.items() if self.model.get_parameter(name).requires_grad}

    def step(self, zeroing="none", passes="once", skip="", bad=(), skipped=False):
        """Take a step.

        Args:
            passes: backward passes: "once", or two of them, of which "local" averages once and "averaged" twice.
            skip: a parameter that this rank does not use; of passes that are averaged, only the last does not.
            bad: a parameter, and a value of its gradient in the first backward pass.
            skipped: whether the step is expected to be skipped.
        """
        self.model.zero_grad(set_to_none=zeroing == "none")
        before, gradients = self.tensors(), []
        for i in range(self.passes_per_step or 1 + (passes != "once")):
            with self.without_averages() if passes == "local" and i == 0 else contextlib.nullcontext():
                skipped_now = skip if passes == "once" or i > 0 else ""
                gradients.append(self.backward(skipped_now, bad if i == 0 else ()))
        with self.synchronized(), warnings.catch_warnings(action="ignore"):  # that the step is skipped
            averages = {
                name: local(p.grad).double() / self.scaler.get_scale()
                for name, p in self.model.named_parameters()
                if p.requires_grad and p.grad is not None
            }
            self.scaler.step(self.optimizer)
        self.scaler.update()
        assert self.compressor.last_step_skipped == skipped
        assert not any(self.in_progress()), self.in_progress()
        assert not optimizer_hooks._hidden
        if skipped:
            assert_equal_states(self.tensors(), before)
            return
        sums = {name: sum(each[name].double() for each in gradients if name in each) for name in gradients[0]}
        self.ledger.add(sums, averages)
        after = dict(zip(ALL, zip(before[0], self.tensors()[0])))
        assert not (
            still := [name for name, average in averages.items() if average.any() and torch.equal(*after[name])]
        ), still

    def in_progress(self):
        """What must be empty between steps."""
        session = self.session()
        return [session._in_step, session.buckets, session.groups, session._told]

    def accumulate(self, passes):
        self.step(passes=passes)

    def unused(self, name, rank, passes="once"):
        self.step(skip=name if rank in (str(job.rank), "all") else "", passes=passes)

    def discard(self, value):
        before, tensors = copy.deepcopy(self.compressor.state_dict()), self.tensors()
        self.model.zero_grad()
        with self.discarding:
            for _ in range(self.passes_per_step or 1):
                self.backward(bad=("first.a", value))
        self.synchronized()
        assert_equal_states(self.tensors(), tensors)
        if not self.scaled:  # else residuals may have another scale
            assert_unchanged(self.compressor.state_dict(), before)
        self.model.zero_grad()

    def other(self):
        """Take a step of another model with the compressor."""

    def overflow(self, name, rank, value, passes):
        bad = (name, value) if rank == str(job.rank) else ()
        self.step(passes=passes, bad=bad, skipped=self.model.get_parameter(name).requires_grad)

    def fail(self, block):
        self.model.fails = block
        with contextlib.suppress(ArithmeticError):
            self.backward()
            raise AssertionError("the backward pass has not failed")
        self.model.fails = ""
        self.recover()

    def forward(self):
        self.module({name: torch.zeros(shape) for name, shape in ALL.items()})

    # --- between steps

    def freeze(self, name, frozen=True):
        self.model.get_parameter(name).requires_grad_(not frozen)
        self.model.zero_grad()

    def unfreeze(self):
        for name in ALL:
            self.freeze(name, frozen=False)

    def wrap(self, mode):
        self.resume()  # front ends that cannot wrap a model again

    def resume(self, prefix=""):
        saved, model = self.checkpoint(), Model()
        for states in (saved["compressor"], *saved["compressor"].get("parts", ())):
            for of_names in ("states", "steps"):
                if of_names in states:
                    states[of_names] = {prefix + name: value for name, value in states[of_names].items()}
        for new, old in zip(model.parameters(), self.model.parameters()):
            new.requires_grad_(old.requires_grad)
        self.create(model, saved["compressor"])
        self.restore(saved)
        if prefix:
            self.step()  # in which states get their names

    def checkpoint(self):
        saved = {
            "parameters": [local(p) for p in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ledger": self.ledger,
        }
        return copy.deepcopy(saved) | {"compressor": through_file(self.compressor.state_dict())}

    def restore(self, saved):
        for parameter, value in zip(self.model.parameters(), saved["parameters"]):
            local(parameter).copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scaled:
            self.scaler.load_state_dict(saved["scaler"])
        self.ledger = copy.deepcopy(saved["ledger"])

    def save(self):
        self.saved = self.checkpoint()

    def load(self):
        if self.saved is not None:
            self.compressor.load_state_dict(self.saved["compressor"])
            self.restore(self.saved)

    def scale(self, factor):
        if self.scaled:
            self.scaler.update(self.scaler.get_scale() * float(factor))

    # --- what must hold

    def tensors(self):
        """Parameters, and the states of the optimizer."""
        states = self.optimizer.state_dict()["state"].values()
        of_optimizer = [{name: local(value).clone() for name, value in state.items()} for state in states]
        return [[local(p).clone() for p in self.model.parameters()], of_optimizer]

    def check(self):
        assert_equal_states(*gather(self.tensors()))
        self.ledger.check(self.compressor)


class UnderDDP(Training):
    passes_per_step = 0  # as many as the action says

    def connect(self):
        self.module = self.state = None
        gc.collect()  # the hooks of a former wrapper
        super().connect()
        options = {"find_unused_parameters": self.mode != "plain", "gradient_as_bucket_view": self.mode == "views"}
        self.module = DistributedDataParallel(self.model, bucket_cap_mb=self.bucket_cap_mb, **options)
        self.state = gradzip.ddp.HookState(self.compressor, named_parameters=self.model.named_parameters())
        self.module.register_comm_hook(self.state, gradzip.ddp.hook)

    def wrap(self, mode):
        self.mode, states = mode, self.optimizer.state_dict()
        self.connect()
        self.optimizer.load_state_dict(states)

    def recover(self):
        self.wrap(self.mode)

    def freeze(self, name, frozen=True):
        super().freeze(name, frozen)
        self.wrap(self.mode)

    def unused(self, name, rank, passes="once"):
        super().unused(name, rank if self.mode != "plain" else "none", passes)

    def other(self):
        before, model = copy.deepcopy(self.compressor.state_dict()), Model()
        module = DistributedDataParallel(model)
        state = gradzip.ddp.HookState(self.compressor, named_parameters=model.named_parameters())
        module.register_comm_hook(state, gradzip.ddp.hook)
        module({name: gradient(name, job.rank, 0, shape) for name, shape in ALL.items()}).backward()
        assert_unchanged(self.compressor.state_dict(), before)
        del model, module, state
        self.wrap(self.mode)  # which frees its states

    def without_averages(self):
        return self.module.no_sync()

    def session(self):
        return self.state._session

    def in_progress(self):
        return [*super().in_progress(), self.state._joined]


@functools.cache
def mesh_of_all():
    """One for all cases: the groups of a mesh keep their threads."""
    return init_device_mesh("cpu", (job.size, 1), mesh_dim_names=("replicate", "shard"))


class UnderFSDP(Training):
    passes_per_step = 0

    def connect(self):
        mesh = mesh_of_all()
        for module in (self.model.first, self.model.second, self.model):
            fully_shard(module, mesh=mesh["shard"])
        self.model.set_reduce_scatter_unused_params(True)
        self.state = gradzip.fsdp.compress(self.model, self.compressor, mesh["replicate"].get_group())
        super().connect()

    def recover(self):
        self.model.reset_iter_state()

    def forward(self):
        super().forward()
        self.recover()

    @contextlib.contextmanager
    def without_averages(self):
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def session(self):
        return self.state._session

    def in_progress(self):
        return [*super().in_progress(), self.state._copied, self.state._sums]


class UnderHorovod(Training):
    def connect(self):
        super().connect()
        self.passes_per_step = 1 + self.two_passes
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer,
            self.model.named_parameters(),
            compression=gradzip.horovod.bucketed(self.compressor, self.bucket_cap_mb),
            backward_passes_per_step=self.passes_per_step,
        )

    def recover(self):
        for handle in list(mpi_ops._handle_map):
            hvd.synchronize(handle)
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def unfreeze(self):
        super().unfreeze()
        self.resume()  # Horovod does not average parameters that were frozen when the optimizer was made

    def synchronized(self):
        self.optimizer.synchronize()
        return self.optimizer.skip_synchronize()

    def session(self):
        return front_end._contexts[weakref.ref(self.optimizer)].session

    def in_progress(self):
        context = front_end._contexts[weakref.ref(self.optimizer)]
        own = [context.waiting, [context.step] if context.step else []]
        return [*super().in_progress(), *own, self.optimizer._handles, mpi_ops._handle_map]


def run(engine, case):
    """Run a case. Returns references to what it has used."""
    training = {"ddp": UnderDDP, "fsdp": UnderFSDP, "horovod": UnderHorovod}[engine](case)
    for action in case.actions.split():
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        name, *arguments = action.split(":")
        try:
            getattr(training, name)(*arguments)
            training.check()
        except BaseException:
            print(f"rank {job.rank}: in {action} of {case}", flush=True)
            raise
    faulthandler.cancel_dump_traceback_later()
    return [weakref.ref(training.compressor), weakref.ref(training.model)]


@scenario
def cases():
    task, start, count, actions = json.loads(os.environ["STATEFUL"]), time.monotonic(), 0, collections.Counter()
    given, case = [Case.parse(text) for text in task["cases"]], None

    def report(case):
        if job.rank == 0:
            Path(task["path"]).write_text(json.dumps({"case": str(case), "count": count, "actions": actions}))

    try:
        while count < len(given) or gather(time.monotonic() - start < task["seconds"])[0]:
            case = given[count] if count < len(given) else Case.of(task["seed"] + count - len(given))
            report(case)
            references = run(task["engine"], case)
            gc.collect()
            # Horovod's hooks keep its optimizers.
            assert UNDER_HOROVOD or not any(reference() for reference in references), f"{case}: leaks"
            count += 1
            actions.update(action.split(":")[0] for action in case.actions.split())
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # now: the other rank may be waiting
    report(case)


if __name__ == "__main__":
    main()
