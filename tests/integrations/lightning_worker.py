"""Scenarios for tests/integrations/test_lightning.py, run by torchrun: callbacks of Lightning."""

import gc
import weakref
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradzip
from gradzip.integrations.lightning import Compression, LocalSteps
from harness import SIZE, job, main, message, on_request, scenario

SPECS = ["acpsgd:rank=2", "topk:theta=0.9", "block-float"]
RESUMED = ["acpsgd:rank=2", "topk:theta=0.9"]
BATCHES, BATCH = 5, 4  # of a rank, in an epoch
LOCAL = {"every": 3, "fragments": 2, "delay": 1}  # an epoch ends within a round, and an exchange is in progress


class Net(LightningModule):
    """A network with a buffer that differs between ranks when they train alone."""

    def __init__(self):
        super().__init__()
        self.seed()
        self.layers = nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 36))

    def seed(self):
        torch.manual_seed(job.rank)

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Sharded(Net):
    """`Net` in shards over pairs of ranks. FSDP leaves it to the user to start replicas alike."""

    replicas = 2

    def seed(self):
        torch.manual_seed(0)

    def configure_model(self):
        mesh = init_device_mesh("cpu", (self.replicas, SIZE // self.replicas), mesh_dim_names=("replicate", "shard"))
        shard(self.layers, mesh)


def shard(layers, mesh):
    for layer in (layers[0], layers[3]):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(layers, mesh=mesh["shard"])


def loader():
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = (torch.randn(BATCHES * BATCH * SIZE, n, generator=generator) for n in (40, 36))
    return DataLoader(TensorDataset(inputs, outputs), batch_size=BATCH)


def batches(epoch):
    """This rank's batches of an epoch, as those of a Trainer."""
    dataset = loader().dataset
    sampler = DistributedSampler(dataset, SIZE, job.rank)
    sampler.set_epoch(epoch)
    return DataLoader(dataset, BATCH, sampler=sampler)


def trainer(callback, epochs=1, **options):
    options = {"strategy": "ddp", "enable_checkpointing": False, "logger": False} | options
    if callable(strategy := options["strategy"]):
        options["strategy"] = strategy()  # a strategy is for one Trainer
    return Trainer(
        accelerator="cpu", devices=SIZE, max_epochs=epochs, callbacks=callback,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=job.folder, **options,
    )  # fmt: skip


def fit(callback, epochs=1, ckpt_path=None, module=Net, **options):
    """The parameters and buffers after a fit."""
    module = module()
    trainer(callback, epochs, **options).fit(module, loader(), ckpt_path=ckpt_path)
    return state(module)


def state(module):
    tensors = [*module.parameters(), *module.buffers()]
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for t in tensors]


def train(model, net, optimizer, epochs=1, accumulate=1, scaler=None):
    """Train without Lightning. Return the parameters and buffers."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    half = torch.autocast("cpu", dtype=torch.half, cache_enabled=False, enabled=scaler.is_enabled())
    for epoch in range(epochs):
        for i, (x, y) in enumerate(batches(epoch), 1):
            steps = i % accumulate == 0 or i == BATCHES
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = steps
            with half:
                loss = nn.functional.mse_loss(model(x), y) / accumulate
            scaler.scale(loss).backward()
            if steps:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return state(net)


def train_ddp(spec, **options):
    net = Net()
    model = DistributedDataParallel(net)
    compressor = gradzip.parse(spec)
    if scaler := options.get("scaler"):
        compressor.follow(scaler)
    gradzip.ddp.register(model, compressor)
    return train(model, net, net.configure_optimizers(), **options), compressor.traffic.bytes_sent


def file_of(name):
    """A path that is the same on all ranks."""
    return str(Path(job.folder) / name)


def stopped_and_resumed(make, name, **options):
    """What two epochs give, and one epoch that is saved, and continued by new objects. make: makes the callbacks."""
    whole = fit(make(), 2, **options)
    save = ModelCheckpoint(job.folder, name, save_on_train_epoch_end=True)
    fit([*make(), save], 1, enable_checkpointing=True, **options)
    return whole, fit(make(), 2, ckpt_path=file_of(f"{name}.ckpt"), **options)


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)  # too large for the first steps


@scenario
def plain():
    """Each method under a Trainer, and without Lightning."""
    found = {}
    for spec in SPECS:
        compressor = gradzip.parse(spec)
        found[spec] = (fit(Compression(compressor), 2), compressor.traffic.bytes_sent), train_ddp(spec, epochs=2)
    return found


class Kept(DummyLogger):
    """A logger that keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, dict(metrics)))


@scenario
def logged():
    """What a logger is told every third of five steps, and every step; and what was sent."""
    found = []
    for every in (3, 1, 0):
        logger, compression = Kept(), Compression(gradzip.parse("block-float"))
        fit(compression, logger=logger, log_every_n_steps=every)
        traffic = compression.compressor.traffic
        found.append((logger.metrics, traffic.wire_ratio(job.size), traffic.bytes_wire))
    return found


@scenario
def accumulated():
    spec = SPECS[0]
    return fit(Compression(gradzip.parse(spec)), accumulate_grad_batches=2), train_ddp(spec, accumulate=2)[0]


@scenario
def scaled():
    """Under a Trainer and without Lightning, with a loss scale that changes; and whether the compressor follows it."""
    compressor, own = gradzip.parse(SPECS[0]), scaler()
    ours = fit(Compression(compressor), 2, plugins=[MixedPrecision("16-mixed", "cpu", own)])
    theirs = train_ddp(SPECS[0], epochs=2, scaler=scaler())[0]
    return ours, theirs, compressor.memory.loss_scale.scaler is own, own.get_scale()


@scenario
def resumed():
    """Stopped and resumed; and what the checkpoint has."""
    found = {}
    for i, spec in enumerate(RESUMED):
        whole, continued = stopped_and_resumed(lambda spec=spec: [Compression(gradzip.parse(spec))], f"resumed{i}")
        saved = torch.load(file_of(f"resumed{i}.ckpt"), weights_only=True)["callbacks"]["Compression"]
        residuals = [own["states"]["layers.0.weight"]["residual"] for own in saved["ranks"]]
        found[spec] = whole, continued, residuals
    return found


def launched(compression, **options):
    runner = Fabric(accelerator="cpu", strategy="ddp", devices=SIZE, callbacks=compression, **options)
    runner.launch()
    return runner


@scenario
def fabric():
    """With a Fabric that saves and loads after an epoch, and without Lightning."""
    spec = SPECS[0]

    def start():
        compression = Compression(gradzip.parse(spec))
        runner = launched(compression)
        net = Net()
        model, optimizer = runner.setup(net, net.configure_optimizers())
        return runner, net, {"model": model, "optimizer": optimizer, "compression": compression}

    def epoch(number, runner, state):
        for x, y in batches(number):
            runner.backward(nn.functional.mse_loss(state["model"](x), y))
            state["optimizer"].step()
            state["optimizer"].zero_grad()

    runner, _, first = start()
    epoch(0, runner, first)
    runner.save(file_of("fabric.ckpt"), first)
    runner, net, second = start()
    runner.load(file_of("fabric.ckpt"), second)
    epoch(1, runner, second)

    compression = Compression(gradzip.parse(spec))
    own = scaler()
    half = launched(compression, plugins=FabricMixedPrecision("16-mixed", "cpu", own))
    half.setup(Net())
    follows = compression.compressor.memory.loss_scale.scaler is own
    return state(net), train_ddp(spec, epochs=2)[0], follows


class Freed(Callback):
    """Whether the DDP model is gone while training goes on."""

    def on_fit_start(self, trainer, pl_module):
        self.model = weakref.ref(trainer.strategy.model)

    def on_train_epoch_end(self, trainer, pl_module):
        gc.collect()
        self.gone = self.model() is None


@scenario
def local_steps():
    """Local steps under a Trainer, and without Lightning."""
    compressor = gradzip.TopK(theta=0.9)
    callback = LocalSteps(compressor, **LOCAL)
    freed = Freed()
    ours = fit([callback, freed], 2)
    net = Net()
    optimizer = net.configure_optimizers()
    outer = gradzip.outer.LocalSteps(net, optimizer, gradzip.TopK(theta=0.9), **LOCAL)
    train(net, net, optimizer, epochs=2)
    outer.synchronize()
    outer.synchronize()  # the callback does it again when other callbacks have ended the training
    outer.remove()
    sent = [traffic.bytes_sent for traffic in (compressor.traffic, outer.traffic)]
    return ours, state(net), sent, callback.outer.exchanges, freed.gone


@scenario
def local_steps_resumed():
    return stopped_and_resumed(lambda: [LocalSteps(gradzip.TopK(theta=0.9), **LOCAL)], "local")


class Counting(Net):
    """A network whose training depends on a count, which is in its state dict and no tensor."""

    steps = 0

    def training_step(self, batch, index):
        self.steps += 1
        return super().training_step(batch, index) / self.steps

    def validation_step(self, batch, index):
        return super().training_step(batch, index)

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]


@scenario
def extra_state():
    return stopped_and_resumed(lambda: [LocalSteps(gradzip.TopK(theta=0.9), **LOCAL)], "extra", module=Counting)


@scenario
def started():
    """A data-parallel start that ends in the first epoch or in the second, stopped and resumed between them, and
    without Lightning."""
    found = []
    for start in (3, 7):

        def make(start=start):
            return [Compression(gradzip.parse(SPECS[0])), LocalSteps(gradzip.TopK(theta=0.9), every=2, start=start)]

        net = Net()
        model, optimizer = DistributedDataParallel(net), net.configure_optimizers()
        gradzip.ddp.register(model, gradzip.parse(SPECS[0]))
        for number, (x, y) in enumerate([*batches(0), *batches(1)]):
            if number == start:
                model = net
                outer = gradzip.outer.LocalSteps(net, optimizer, gradzip.TopK(theta=0.9), every=2)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        outer.synchronize()
        outer.remove()
        found.append((*stopped_and_resumed(make, f"started{start}"), state(net)))
    return found


@scenario
def evaluated():
    """A fit after a validation of another module from a checkpoint, and without that."""
    found = []
    for i, make in enumerate((lambda: Compression(gradzip.TopK(theta=0.9)), lambda: LocalSteps(every=3))):
        fit([make(), ModelCheckpoint(job.folder, f"evaluated{i}")], enable_checkpointing=True, module=Counting)

        def after(validates, i=i, make=make):
            runner, module = trainer(make(), num_sanity_val_steps=0), Net()
            if validates:
                runner.validate(Counting(), loader(), ckpt_path=file_of(f"evaluated{i}.ckpt"), verbose=False)
            runner.fit(module, loader())
            return state(module)

        found.append((after(True), after(False)))
    return found


@scenario
def failed():
    """The error of a fit, while an exchange is in progress, and the parameters after the next one."""

    class Fails(Net):
        failed, kept = False, None

        def training_step(self, batch, index):
            if index == 2 and not self.failed:
                self.failed = True
                raise RuntimeError("a bad batch")
            return super().training_step(batch, index)

        def configure_optimizers(self):
            self.kept = self.kept or super().configure_optimizers()
            return self.kept

    module, runner = Fails(), trainer(LocalSteps(gradzip.TopK(theta=0.9), **LOCAL))
    error = message(runner.fit, module, loader())
    runner.fit(module, loader())
    return error, state(module)


@scenario
def changed_at_the_end():
    """The parameters after a fit, which another callback has changed after the last step."""

    class Changes(Callback):
        def on_train_end(self, trainer, pl_module):
            pl_module.layers[0].weight.data += job.rank

    return [fit(callbacks) for callbacks in ([Changes(), LocalSteps(every=3)], [LocalSteps(every=3), Changes()])]


@scenario
def fabric_modules():
    """The error of a step after `setup_module`, and parameters after steps of a model that the callback was told of."""
    found = []
    for told in (False, True):
        compression = Compression(gradzip.parse(SPECS[0]))
        runner = launched(compression)
        net = Net()
        model, optimizer = runner.setup_module(net), runner.setup_optimizers(net.configure_optimizers())
        if told:
            runner.call("on_after_setup", fabric=runner, module=model)

        def epoch(runner=runner, model=model, optimizer=optimizer):
            for x, y in batches(0):
                runner.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

        found.append((message(epoch), state(net)))
    runner = launched(LocalSteps())
    return found, train_ddp(SPECS[0])[0], message(runner.setup, Net())


class Other(DDPStrategy):
    """A strategy that averages gradients without DDP."""

    def configure_ddp(self):
        pass


@scenario
def refused():
    class Plain(Net):
        def configure_model(self):
            pass

    class Whole(Sharded):
        replicas = 1

    class Two(Net):
        automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.layers[0], self.layers[3])]

    def error(callback, module=Net, **options):
        return message(lambda: fit(callback, module=module, **options))

    def compression():
        return Compression(gradzip.ACPSGD())

    return {
        "class": message(Compression, gradzip.ACPSGD),
        "other": error(compression(), strategy=Other),
        "model parallel": error(compression(), Plain, strategy=ModelParallelStrategy()),
        "no replicas": error(compression(), Whole, strategy=ModelParallelStrategy(SIZE, 1)),
        "local fsdp2": error(LocalSteps(), Sharded, strategy=ModelParallelStrategy(SIZE, 1)),
        "local optimizers": error(LocalSteps(), Two),
        "local averages": error([LocalSteps(), StochasticWeightAveraging(0.1)]),
        "local options": error(LocalSteps(every=0)),
    }


@on_request
def sharded():
    """FSDP2 under a Trainer, stopped and resumed, and without Lightning."""
    spec = "acpsgd:rank=2,min_numel=256"
    options = {"module": Sharded, "strategy": lambda: ModelParallelStrategy(SIZE, 1)}
    whole, continued = stopped_and_resumed(lambda: [Compression(gradzip.parse(spec))], "sharded", **options)
    net = Sharded()
    net.configure_model()
    mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("replicate", "shard"))
    compressor = gradzip.parse(spec)
    gradzip.fsdp.compress(net, compressor, mesh["replicate"].get_group())
    return whole, continued, train(net, net, net.configure_optimizers(), epochs=2)


@on_request
def alone():
    """One process, with the callbacks and without."""

    def make():
        return [Compression(gradzip.ACPSGD()), LocalSteps(every=2)]

    whole, continued = stopped_and_resumed(make, "alone", strategy="auto")
    return whole, continued, fit([], 2, strategy="auto")


if __name__ == "__main__":
    main()
