"""Runs the cases of tests/support/stateful.py, on two ranks under horovodrun or torchrun.

After each action, what both ranks have is compared with a ledger of what must hold:

* Parameters, states of optimizers and averages are equal on both ranks, to the bit.
* Sum of averages + mean residual = sum of mean gradients, of all steps that were not skipped, up to rounding.
* A step is skipped if and only if a gradient of a rank is not finite. It changes no parameter then.
* After a step, nothing is in progress or hidden; after a case, nothing refers to the model and the compressor.
"""

import collections
import contextlib
import copy
import faulthandler
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
# How many numbers of the size of the largest one a step rounds, at most: the bound of the contract tests.
ROUNDINGS = 160


def fail(grad):
    raise ArithmeticError("in the backward pass")


class Block(torch.nn.Module):
    """Adds the products of its parameters and their gradients, which are arguments."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, x, gradients):
        for name, parameter in self.named_parameters():
            if name in gradients:
                x = x + (parameter * gradients[name]).sum()
        return x


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(SHAPES["first"]), Block(SHAPES["second"])
        self.fails = ""  # whether the backward pass fails before the first block, or between the blocks

    def forward(self, gradients):
        x = torch.zeros(())
        for block, module in self.named_children():
            x = module(x, {name.removeprefix(f"{block}."): grad for name, grad in gradients.items() if block in name})
            if self.fails == {"first": "between", "second": "first"}[block]:
                x.register_hook(fail)
        return x


def local(tensor):
    return getattr(tensor, "to_local", lambda: tensor)().detach()


class Ledger:
    """What must hold: what this rank's optimizer has got, and the gradients of this rank that are not skipped."""

    def __init__(self):
        self.averages = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in ALL.items()}
        self.gradients = copy.deepcopy(self.averages)
        self.largest, self.steps = 0.0, 0

    def add(self, gradients, averages):
        for total, tensors in ((self.gradients, gradients), (self.averages, averages)):
            for name, tensor in tensors.items():
                total[name] += tensor
                self.largest = max(self.largest, tensor.abs().max().item())
        self.steps += 1

    def check(self, compressor):
        """Compare the ranks' ledgers, with their residuals."""
        kept = residuals(compressor)
        assert kept.keys() <= ALL.keys(), sorted(kept)
        self.largest = max([self.largest, *(residual.abs().max().item() for residual in kept.values())])
        ranks = gather((self.averages, {name: self.gradients[name] - kept.get(name, 0) for name in ALL}, self.largest))
        assert_equal_states(ranks[0][0], ranks[1][0])
        if all(part.error_feedback or isinstance(part, gradzip.NoCompression) for part in compressor.parts):
            bound = max(self.steps, 1) * ROUNDINGS * 2**-24 * max(largest for *_, largest in ranks)
            for name, total in self.averages.items():
                lost = (sum(sent[name] for _, sent, _ in ranks) / len(ranks) - total).abs().max().item()
                assert lost <= bound, f"{name}: lost {lost}, expected at most {bound}"


class Training:
    """A model in training, and the actions of a case."""

    def __init__(self, engine, case):
        self.engine, self.method, options = engine, case.method, case.options.split()
        self.scaled = "scaled" in options
        self.bucket_cap_mb = 0.012 if "small_buckets" in options else 25
        self.passes_per_step = 2 if engine == "horovod" and "two_passes" in options else 1
        self.number, self.saved, self.mode = 0, None, "plain"
        self.ledger = Ledger()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4, enabled=self.scaled)
        self.scaler.scale(torch.zeros(()))  # makes the scale
        self.create(Model(), None)

    # --- engines

    def create(self, model, states):
        """Start to train a model, with a new compressor."""
        self.model, self.compressor = model, gradzip.parse(self.method)
        if self.scaled:
            self.compressor.follow(self.scaler)
        if states is not None:
            self.compressor.load_state_dict(states)
        self.connect()

    def connect(self):
        """Wrap the model, and make an optimizer."""
        module, named = self.model, self.model.named_parameters
        self.wrapped = self.state = self.module = self.optimizer = None
        gc.collect()  # a former wrapper's hooks
        if self.engine == "fsdp":
            mesh = init_device_mesh("cpu", (job.size, 1), mesh_dim_names=("replicate", "shard"))
            for part in (module.first, module.second, module):
                fully_shard(part, mesh=mesh["shard"])
            module.set_reduce_scatter_unused_params(True)
            self.state = gradzip.fsdp.compress(module, self.compressor, mesh["replicate"].get_group())
        elif self.engine == "ddp":
            options = {"find_unused_parameters": self.mode != "plain", "gradient_as_bucket_view": self.mode == "views"}
            module = DistributedDataParallel(module, bucket_cap_mb=self.bucket_cap_mb, **options)
            self.state = gradzip.ddp.HookState(self.compressor, named_parameters=named())
            module.register_comm_hook(self.state, gradzip.ddp.hook)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if self.engine == "horovod":
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer,
                named(),
                compression=gradzip.horovod.bucketed(self.compressor, self.bucket_cap_mb),
                backward_passes_per_step=self.passes_per_step,
            )
        self.module = module

    def recover(self):
        """Do what the engine needs after a backward pass that has failed."""
        if self.engine == "ddp":
            self.wrap(self.mode)
        elif self.engine == "fsdp":
            self.model.reset_iter_state()
        else:
            for handle in list(mpi_ops._handle_map):
                hvd.synchronize(handle)
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    @contextlib.contextmanager
    def without_averages(self, disabled):
        if not disabled or self.engine == "horovod":
            yield
        elif self.engine == "ddp":
            with self.module.no_sync():
                yield
        else:
            self.module.set_requires_gradient_sync(False)
            yield
            self.module.set_requires_gradient_sync(True)

    def in_progress(self):
        """What must be empty between steps."""
        if self.engine == "horovod":
            context = front_end._contexts[self.optimizer]
            session = context.session
            own = [
                context._waiting,
                context._sums,
                context._num_in_flight,
                self.optimizer._handles,
                mpi_ops._handle_map,
            ]
        else:
            session = self.state._session
            own = [self.state._started] if self.engine == "ddp" else [self.state._averaged, self.state._copied]
        of_session = [session._in_step, session.buckets, session.units, session.waiting, session._parameters]
        return [*own, *of_session, list(optimizer_hooks._hidden)]

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
            skip: a parameter that this rank does not use.
            bad: a parameter, and a value of its gradient in the first backward pass.
            skipped: whether the step is expected to be skipped.
        """
        self.model.zero_grad(set_to_none=zeroing == "none")
        before, gradients = self.tensors(), []
        number = self.passes_per_step if self.engine == "horovod" else 1 + (passes != "once")
        for i in range(number):
            with self.without_averages(passes == "local" and i == 0):
                gradients.append(self.backward(skip, bad if i == 0 else ()))
        if self.engine == "horovod":
            self.optimizer.synchronize()
        averages = {
            name: local(parameter.grad).double() / self.scaler.get_scale()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and parameter.grad is not None
        }
        self.scaler.unscale_(self.optimizer)
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))  # that the step is skipped
            if self.engine == "horovod":
                stack.enter_context(self.optimizer.skip_synchronize())
            self.scaler.step(self.optimizer)
        self.scaler.update()
        assert self.compressor.last_step_skipped == skipped
        if skipped:
            assert_equal_states(self.tensors(), before)
        else:
            self.ledger.add({name: sum(each[name].double() for each in gradients) for name in gradients[0]}, averages)
            for name, old, new in zip(ALL, before[0], self.tensors()[0]):
                assert name not in averages or not averages[name].any() or not torch.equal(old, new), (
                    f"{name} stands still"
                )
        assert not any(self.in_progress()), self.in_progress()

    def accumulate(self, passes):
        self.step(passes=passes)

    def unused(self, name, rank):
        can = self.engine != "ddp" or self.mode != "plain"
        self.step(skip=name if can and rank in (str(job.rank), "all") else "")

    def overflow(self, name, rank, value, passes):
        bad = (name, value) if rank == str(job.rank) else ()
        self.step(passes=passes, bad=bad, skipped=self.model.get_parameter(name).requires_grad)

    def fail(self, where):
        self.model.fails = where
        with contextlib.suppress(ArithmeticError):
            self.backward()
            raise AssertionError("the backward pass has not failed")
        self.model.fails = ""
        self.recover()

    def forward(self):
        self.module({name: torch.zeros(shape) for name, shape in ALL.items()})
        if self.engine == "fsdp":
            self.model.reset_iter_state()

    # --- between steps

    def freeze(self, name, frozen=True):
        self.model.get_parameter(name).requires_grad_(not frozen)
        self.model.zero_grad()
        if self.engine == "ddp":
            self.wrap(self.mode)

    def unfreeze(self):
        for name in ALL:
            self.freeze(name, frozen=False)

    def wrap(self, mode):
        """Wrap the model again; with engines that cannot, resume."""
        if self.engine != "ddp":
            self.resume()
            return
        self.mode, states = mode, self.optimizer.state_dict()
        self.connect()
        self.optimizer.load_state_dict(states)

    def resume(self):
        saved = self.checkpoint()
        model = Model()
        for new, old in zip(model.parameters(), self.model.parameters()):
            new.requires_grad_(old.requires_grad)
        self.create(model, saved["compressor"])
        self.restore(saved)

    def checkpoint(self):
        state = {
            "parameters": [local(p) for p in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ledger": self.ledger,
        }
        return copy.deepcopy(state) | {"compressor": through_file(self.compressor.state_dict())}

    def restore(self, saved):
        saved = copy.deepcopy(saved)
        for parameter, value in zip(self.model.parameters(), saved["parameters"]):
            local(parameter).copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scaled:
            self.scaler.load_state_dict(saved["scaler"])
        self.ledger = saved["ledger"]

    def save(self):
        self.saved = self.checkpoint()

    def load(self):
        if self.saved is not None:
            self.compressor.load_state_dict(copy.deepcopy(self.saved["compressor"]))
            self.restore(self.saved)

    def scale(self, factor):
        if self.scaled:
            self.scaler.update(self.scaler.get_scale() * float(factor))

    # --- what must hold

    def tensors(self):
        """Parameters, and the states of the optimizer."""
        states = [
            {name: local(v).clone() for name, v in of.items()} for of in self.optimizer.state_dict()["state"].values()
        ]
        return [[local(p).clone() for p in self.model.parameters()], states]

    def check(self):
        first, second = gather(self.tensors())
        assert_equal_states(first, second)
        self.ledger.check(self.compressor)


def run(engine, case):
    """Run a case. Returns references to what it has used."""
    training = Training(engine, case)
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
    given = [Case.parse(text) for text in task["cases"]]

    def report(case):
        if job.rank == 0:
            Path(task["path"]).write_text(json.dumps({"case": str(case), "count": count, "actions": actions}))

    case = None
    try:
        while count < len(given) or gather(time.monotonic() - start < task["seconds"])[0]:
            case = given[count] if count < len(given) else Case.of(task["seed"] + count - len(given))
            report(case)
            references = run(task["engine"], case)
            gc.collect()
            assert UNDER_HOROVOD or not any(reference() for reference in references), f"{case}: leaks"
            count += 1
            actions.update(action.split(":")[0] for action in case.actions.split())
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # now: the other rank may be waiting
    report(case)


if __name__ == "__main__":
    main()
