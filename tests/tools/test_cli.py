"""The command line `gradzip`."""

import importlib.util
import json
import socket
import subprocess
import sys
from importlib import metadata

import pytest
import torch

import gradzip
from gradzip import cli


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "gradzip", *arguments], capture_output=True, text=True, timeout=120)


def test_info():
    done = run("info")
    assert done.returncode == 0
    assert done.stderr == ""
    for text in (f"gradzip {gradzip.__version__}\n", "extension", "simd", "cuda", "torch 2.", "horovod"):
        assert text in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 240
    assert done.stdout.count("\n  error ") == (importlib.util.find_spec("horovod") is None)


def test_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gradzip"]["version"] == gradzip.__version__
    assert report["extension"]["simd"] in report["extension"]["simd_levels"]
    assert report["torch"]["version"] == torch.__version__
    assert report["cuda"].get("built") in (True, False)


def test_missing_extension(capsys, monkeypatch):
    monkeypatch.delattr(gradzip, "_C", raising=False)
    monkeypatch.setitem(sys.modules, "gradzip._C", None)
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "extension\n  error          ModuleNotFoundError: " in out
    assert "pip install -e ." in out
    assert "torch 2." in out


def test_missing_horovod(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "horovod\n  error          not installed\n  needed only for training with Horovod" in out
    assert "torch 2." in out


def test_broken_horovod(capsys, monkeypatch):
    pytest.importorskip("horovod")
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert cli.main(["info"]) == 0
    assert "horovod\n  error          ModuleNotFoundError: " in capsys.readouterr().out


def test_host_without_an_address(capsys, monkeypatch):
    pytest.importorskip("horovod")
    monkeypatch.setattr(socket, "gethostname", lambda: "x" * 64)  # longer than a name may be
    assert cli.main(["info"]) == 0
    assert "  address        none: ranks crash in hvd.init() until the name of this host, x" in capsys.readouterr().out
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.1")
    assert cli.main(["info"]) == 0
    assert "  address        192.0.2.1 of 192.0.2.1\n" in capsys.readouterr().out


def test_versions_of_libraries(capsys, monkeypatch):
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"cupy": ["cupy-cuda13x"], "torch": ["torch"]})
    monkeypatch.setattr(metadata, "version", {"cupy-cuda13x": "14.0.1"}.__getitem__)
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out.endswith("libraries\n  cupy           14.0.1\n")
    monkeypatch.setattr(metadata, "packages_distributions", dict)
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out.endswith("libraries none\n")


def test_cuda_facts_as_text():
    device = {"name": "NVIDIA H200", "major": 9, "minor": 0}
    facts = {"built": True, "archs": ["sm_80", "sm_90"], "nvrtc": None, "devices": [device, device], "driver": "13.0"}
    assert list(cli.info._lines({"cuda": facts})) == [
        "cuda",
        "  built          yes",
        "  archs          sm_80; sm_90",
        "  nvrtc          none",
        "  devices        name NVIDIA H200, major 9, minor 0; name NVIDIA H200, major 9, minor 0",
        "  driver         13.0",
    ]
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
