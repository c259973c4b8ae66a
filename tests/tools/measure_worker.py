"""A scenario for test_measure.py: the link of a job."""

import dataclasses

import torch

import harness
from gradzip.advice.measure import measure_link
from gradzip.collectives.traffic import Traffic


def engine():
    traffic = Traffic(bytes_sent=17)
    if harness.UNDER_HOROVOD:
        from gradzip.engines.horovod import HorovodEngine

        return HorovodEngine(harness.hvd.global_process_set, traffic)
    from gradzip.engines.torch import TorchEngine

    return TorchEngine(torch.distributed.group.WORLD, traffic, torch.device("cpu"))


@harness.scenario
def link():
    of_job = engine()
    return dataclasses.asdict(measure_link(of_job)) | {"bytes_sent": of_job.traffic.bytes_sent}


if __name__ == "__main__":
    harness.main()
