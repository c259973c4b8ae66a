"""Measure the link of a real job, for tests/test_measure.py: `measure_worker.py FOLDER link`."""

import dataclasses
import os
import sys
from pathlib import Path

import torch

from gradzip.measure import measure_link
from gradzip.traffic import Traffic


def engine():
    if "HOROVOD_RANK" in os.environ:
        import horovod.torch as hvd

        from gradzip.engines.horovod import HorovodEngine

        hvd.init()
        return HorovodEngine(hvd.global_process_set, Traffic(bytes_sent=17))
    from gradzip.engines.torch import TorchEngine

    torch.distributed.init_process_group("gloo")
    return TorchEngine(torch.distributed.group.WORLD, Traffic(bytes_sent=17), torch.device("cpu"))


if __name__ == "__main__":
    of_job = engine()
    link = measure_link(of_job)
    results = {"link": dataclasses.asdict(link) | {"bytes_sent": of_job.traffic.bytes_sent}}
    torch.save(results, Path(sys.argv[1]) / f"{of_job.rank}.pt")
    sys.stdout.flush()
    of_job.allgather_bytes(b"done\n", "done")
    os._exit(0)  # a torch thread that frees a Python object during shutdown aborts the process
