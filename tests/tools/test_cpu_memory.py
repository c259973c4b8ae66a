"""benchmarks.cpu_memory: what is resident in real processes, in a study that continues."""

import json
import sys

import torch

from benchmarks.cpu_memory import __main__ as cpu_memory
from benchmarks.cpu_memory.rank import allocated, resident, restart


def test_memory_that_a_step_frees_counts_as_its_most():
    restart()
    before, nbytes = resident("VmRSS"), 1 << 27
    torch.ones(nbytes, dtype=torch.uint8)  # written, and freed
    assert 0.95 * nbytes < resident("VmHWM") - before < 1.1 * nbytes
    assert resident("VmRSS") - before < 0.1 * nbytes
    restart()
    assert resident("VmHWM") - before < 0.1 * nbytes


def test_allocated_memory_is_what_is_not_freed():
    before, nbytes = allocated(), 1 << 27
    kept = torch.empty(nbytes, dtype=torch.uint8)
    assert nbytes <= allocated() - before < 1.01 * nbytes
    del kept
    assert abs(allocated() - before) < 0.01 * nbytes


def test_methods_are_compared_with_ddp_alone(monkeypatch, tmp_path, capsys):
    file, started = tmp_path / "memory.json", []

    def run(job, threads, timeout):
        started.append(job[-1])
        numel = cpu_memory.NUMEL
        more = 8 if started[-1] else 0
        found = {"allocated": 19 + 0.5 * more, "between": 20 + more, "in_step": 21 + 1.5 * more, "faults": 1 / 1024}
        yield {name: int(numel * x) for name, x in found.items()}

    monkeypatch.setattr(cpu_memory.jobs, "run", run)
    for specs in (["topk"], ["topk", "fp16"]):
        monkeypatch.setattr(sys, "argv", ["cpu_memory", *specs, "--json", str(file)])
        cpu_memory.main()
    assert started == ["", "topk", "fp16"]  # none twice
    assert [row["method"] for row in json.loads(file.read_text())["rows"]] == started
    *_, ddp, fp16, topk = capsys.readouterr().out.strip().splitlines()
    assert ddp == "| DDP alone | 19.0 | 20.0 | 21.0 | 4.0 |"
    assert fp16 == "| `fp16` | 4.0 | 8.0 | 12.0 | 4.0 |" and topk == "| `topk` | 4.0 | 8.0 | 12.0 | 4.0 |"
