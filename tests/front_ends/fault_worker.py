"""Train until an error or a signal ends the process: `fault_worker.py METHOD FOLDER [raises|leaves]`.

Writes FOLDER/RANK.pid, FOLDER/RANK.step after every step, and FOLDER/RANK.error with the time and the exception that
ended training. FOLDER/RANK.shut_down says whether Horovod had shut down before the first step, and at the error. In
step 3, the last rank raises an error in the middle of the backward pass, or exits.
"""

import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import gradzip
from gradzip.engines.horovod import has_shut_down

STEPS = 100_000  # takes minutes: longer than any test waits


def raise_error(_):
    raise ValueError("stumbled")


def main():
    method, folder, *fault = sys.argv[1:]
    hvd.init()
    prefix = str(Path(folder, str(hvd.rank())))
    Path(f"{prefix}.pid").write_text(str(os.getpid()))
    # The launcher also sends SIGTERM to the other ranks. The tests check that they end without it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(8)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=gradzip.parse(method),
    )
    shut_down = [has_shut_down()]
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            hidden = model[:4](torch.randn(4, 64))
            if fault and step == 3 and hvd.rank() == hvd.size() - 1:
                if fault == ["leaves"]:
                    sys.exit()
                hidden.register_hook(raise_error)
            model[4:](hidden).square().mean().backward()
            optimizer.step()
            Path(f"{prefix}.step").write_text(str(step))
    except BaseException as error:
        time.sleep(0.2)  # Horovod fails what is queued, and then closes its process sets
        shut_down.append(has_shut_down())
        Path(f"{prefix}.shut_down").write_text(repr(shut_down))
        Path(f"{prefix}.error").write_text(f"{time.time()} {type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
