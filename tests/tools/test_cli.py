"""The command line `gradzip`."""

import importlib.util
import json
import subprocess
import sys

import pytest

import gradzip
from gradzip import cli
from gradzip.methods.base.registry import registered


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "gradzip", *arguments], capture_output=True, text=True, timeout=120)


def test_info():
    done = run("info")
    assert done.returncode == 0
    assert done.stderr == ""
    for text in (f"gradzip {gradzip.__version__}", "Python 3.", "kernels", "SIMD", "torch 2.", "Horovod", "fft-range"):
        assert text in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 240
    methods = done.stdout.partition("\nmethods\n")[2].splitlines()
    assert len(methods) == len(registered())
    assert all(line.endswith(".") for line in methods)  # whole sentences


def test_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gradzip"]["version"] == gradzip.__version__
    assert report["extension"]["simd"] in report["extension"]["simd_levels"]
    assert report["methods"].keys() == registered().keys()
    assert {"gloo", "nccl", "mpi"} == report["torch"]["backends"].keys()
    assert report["cuda"].get("built") in (True, False)


def test_missing_extension(capsys, monkeypatch):
    monkeypatch.delattr(gradzip, "_C", raising=False)
    monkeypatch.setitem(sys.modules, "gradzip._C", None)
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "kernels\n  unusable    ModuleNotFoundError: " in out
    assert "pip install ." in out
    assert "torch 2." in out


def test_missing_horovod(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "Horovod\n  unusable    not installed\n" in out
    assert "fft-range" in out


def test_broken_horovod(capsys, monkeypatch):
    pytest.importorskip("horovod")
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert cli.main(["info"]) == 0
    assert "Horovod\n  unusable    ModuleNotFoundError: " in capsys.readouterr().out


def test_cuda_facts_as_text():
    device = {"name": "NVIDIA H200", "major": 9, "minor": 0, "memory": 139 * 2**30}
    facts = {"built": True, "archs": ["sm_80", "sm_90"], "nvrtc": None, "runtime": "13.0", "driver": "13.0"}
    facts["devices"] = [device]
    assert cli.info._cuda_rows(facts) == [
        ("CUDA", "built by nvcc for sm_80, sm_90; runtime 13.0, driver for CUDA 13.0"),
        ("", "device 0: NVIDIA H200, sm_90, 139 GiB"),
    ]
    assert "no driver found" in cli.info._cuda_rows({**facts, "driver": None, "devices": []})[0][1]
    nvrtc = {"version": "13.0", "path": "/lib/libnvrtc.so.13", "cache": "/cache"}
    assert cli.info._cuda_rows({**facts, "archs": [], "runtime": None, "nvrtc": nvrtc}) == [
        ("CUDA", "built without nvcc: NVRTC 13.0 compiles kernels at their first use; driver for CUDA 13.0"),
        ("", "NVRTC in /lib/libnvrtc.so.13"),
        ("", "compiled kernels in /cache"),
        ("", "device 0: NVIDIA H200, sm_90, 139 GiB"),
    ]
    rows = cli.info._cuda_rows({**facts, "nvrtc": {"error": "no NVRTC"}, "devices": []})
    assert rows == [("CUDA", "kernels cannot be compiled; driver for CUDA 13.0"), ("", "no NVRTC")]
    assert "not built" in cli.info._cuda_rows({"built": False})[0][1]
    assert cli.info._cuda_version(12080) == "12.8"
    assert cli.info._cuda_version(0) is None


def test_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert "gradzip info --json" in text
    assert cli.main([]) == 0
    assert capsys.readouterr().out == text


def test_unknown_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["nonesuch"])
    assert "invalid choice: 'nonesuch'" in capsys.readouterr().err


def test_closed_pipe_is_no_error():
    command = f"{sys.executable} -m gradzip info --json | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
