"""gradzip.ops.nvrtc: NVRTC is found, compiles kernels, and what it made is kept in files."""

import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradzip.ops.nvrtc import cache, compile_module, library
from paths import ROOT

COMPILED = (b"\x7fELF\n\0image", {"kernel<0>": "_Z6kernel"})
# cache.py alone, without torch: a process of the tests below starts in a moment
LOAD = f"""
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("cache", {cache.__file__!r})
cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The cache in a folder of its own."""
    monkeypatch.setenv("GRADZIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / "cache" / "kernels"


def sources():
    csrc = ROOT / "csrc"
    paths = [*csrc.glob("common/*.h"), *csrc.rglob("*.cuh")]
    return {path.relative_to(csrc).as_posix(): path.read_text() for path in paths}


def refuse():
    raise AssertionError("it is in the cache")


# --- the cache


def test_compiled_kernels_are_kept(home):
    assert cache.home() == home
    assert cache.fetch("select-sm_90", "key", lambda: COMPILED) == COMPILED
    assert cache.fetch("select-sm_90", "key", refuse) == COMPILED
    other = (b"other", {})
    assert cache.fetch("select-sm_90", "another key", lambda: other) == other
    assert cache.fetch("select-sm_90", "another key", refuse) == other


def test_folders(monkeypatch):
    for name in ("GRADZIP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.home() == Path("/home/somebody/.cache/gradzip/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache.home() == Path("/caches/gradzip/kernels")
    monkeypatch.setenv("GRADZIP_CACHE", "/mine")
    assert cache.home() == Path("/mine/kernels")


def test_damaged_files_are_made_again(home):
    cache.fetch("select", "key", lambda: COMPILED)
    whole = (home / "select").read_bytes()
    damaged = [whole[:n] for n in range(len(whole))]
    damaged += [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
    damaged += [whole + b"\0", b"another program's file\n" * 9]
    for content in damaged:
        (home / "select").write_bytes(content)
        assert cache.read(home / "select", "key") is None, content
    assert cache.fetch("select", "key", lambda: COMPILED) == COMPILED
    assert (home / "select").read_bytes() == whole


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_files_of_other_users_are_not_read(home):
    cache.fetch("select", "key", lambda: COMPILED)
    os.chown(home / "select", 12345, 12345)
    assert cache.read(home / "select", "key") is None


def give_away(path):
    os.chown(path, 12345, 12345)


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


UNSAFE = {
    "link": (link, "it is a link, or no folder"),
    "group-writable": (lambda path: path.chmod(0o770), "it belongs to another user, or others may write to it"),
    "world-writable": (lambda path: path.chmod(0o707), "it belongs to another user, or others may write to it"),
    "another user's": (give_away, "it belongs to another user, or others may write to it"),
}


@pytest.mark.parametrize("change", UNSAFE)
def test_folders_that_others_may_write_to_are_not_used(home, tmp_path, caplog, change):
    """Neither the user's own nor the one in the temporary directory, whose name others know."""
    make_unsafe, reason = UNSAFE[change]
    if make_unsafe is give_away and os.getuid() != 0:
        pytest.skip("only root can give files away")
    folders = home, tmp_path / f"gradzip-kernels-{os.getuid()}"
    cache.fetch("select", "key", lambda: (b"theirs", {}))
    shutil.copytree(*folders)
    for folder in folders:
        (folder / "select.lock").unlink()
        make_unsafe(folder)
    assert cache.fetch("select", "key", lambda: COMPILED) == COMPILED
    for folder in folders:
        assert cache.read(folder / "select", "key") is None
        assert [path.name for path in folder.iterdir()] == ["select"]
    assert [record.args[1] for record in caplog.records] == [reason]


@pytest.mark.parametrize("change", [link, lambda path: path.chmod(0o664)], ids=["link", "group-writable"])
def test_files_that_others_may_write_to_are_not_read(home, change):
    cache.fetch("select", "key", lambda: COMPILED)
    change(home / "select")
    assert cache.read(home / "select", "key") is None


def test_a_file_is_checked_and_read_at_the_same_time(home, monkeypatch):
    """Whoever puts another file in its place between the two does not have that one read."""
    cache.fetch("select", "key", lambda: COMPILED)
    cache.fetch("theirs", "key", lambda: (b"theirs", {}))

    def replace(status):
        if stat.S_ISREG(status.st_mode):
            (home / "theirs").replace(home / "select")
        return False

    monkeypatch.setattr(cache, "_others_can_write", replace)
    assert cache.read(home / "select", "key") == COMPILED


def test_a_lock_is_not_written_through_a_link(home, tmp_path):
    (tmp_path / "precious").write_text("content")
    home.mkdir(parents=True, mode=0o700)
    (home / "select.lock").symlink_to(tmp_path / "precious")
    assert cache.fetch("select", "key", lambda: COMPILED) == COMPILED
    assert (tmp_path / "precious").read_text() == "content"


def test_without_a_folder_to_write_to_a_temporary_one_is_used(home, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRADZIP_CACHE", str(tmp_path / "file"))
    for name in ("select", "signs"):
        assert cache.fetch(name, "key", lambda: COMPILED) == COMPILED
        assert cache.fetch(name, "key", refuse) == COMPILED
    (line,) = [record.getMessage() for record in caplog.records]
    temporary = tmp_path / f"gradzip-kernels-{os.getuid()}"
    assert line == (
        f"cannot write to {tmp_path}/file/kernels (Not a directory): compiled CUDA kernels are kept in {temporary}; "
        "set GRADZIP_CACHE to a folder that you can write to"
    )
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700


def test_with_no_folder_at_all_kernels_are_compiled(home, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRADZIP_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    assert cache.fetch("select", "key", lambda: COMPILED) == COMPILED


def test_a_folder_that_can_only_be_read_serves(home, monkeypatch):
    cache.fetch("select", "key", lambda: COMPILED)
    monkeypatch.setattr(cache, "_writable", refuse)
    assert cache.fetch("select", "key", refuse) == COMPILED


def test_of_several_processes_one_compiles(home):
    program = LOAD + (
        "def make():\n"
        "    print('made', flush=True)\n"
        "    time.sleep(0.3)\n"
        "    return b'image' * 100000, {}\n"
        "image, _ = cache.fetch('select', 'key', make)\n"
        "assert image == b'image' * 100000\n"
    )
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert "".join(printed) == "made\n"


@pytest.mark.parametrize("moment", ["compiling", "writing"])
def test_a_killed_process_leaves_the_cache_whole(home, moment):
    """It is killed while it holds the lock; in the second case, with a part of its file written."""
    at = {"compiling": "kill()", "writing": "cache.os.replace = kill"}[moment]
    program = LOAD + (
        "def kill(*_): print('here', flush=True); time.sleep(60)\n"
        f"def make():\n    {at}\n    return b'half', {{}}\n"
        "cache.fetch('select', 'key', make)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    start = time.monotonic()
    assert cache.fetch("select", "key", lambda: COMPILED) == COMPILED
    assert cache.read(home / "select", "key") == COMPILED
    assert time.monotonic() - start < 10, "nobody holds the lock"


# --- the library


@pytest.fixture
def nvrtc():
    try:
        return library.find()
    except RuntimeError as reason:
        pytest.skip(str(reason))


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(library, "candidates", lambda: ["/nonexistent/libnvrtc.so.12"])
    with pytest.raises(
        RuntimeError, match=r"there is no NVRTC .* pip install nvidia-cuda-nvrtc .* where nvcc is"
    ) as error:
        library.find()
    assert "\n" not in str(error.value)


def test_places_of_nvrtc(tmp_path, monkeypatch):
    """Packages, then toolkits, the newest release first, then what the loader finds. What does not load is left out."""
    files = [
        tmp_path / "lib64" / name for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "libnvrtc.alt.so.12")
    ]
    files[0].parent.mkdir()
    for path in files:
        path.write_text("no library")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = library.candidates()
    first = found.index(str(files[0]))
    assert found[first + 1] == str(files[1]) and str(files[2]) not in found and str(files[3]) not in found
    assert all("site-packages" in path or "nvidia" in path for path in found[:first])
    assert tuple(found[-len(library.NAMES) :]) == library.NAMES
    assert library.load(str(files[0])) is None


def test_nvrtc_is_not_newer_than_the_driver(nvrtc, monkeypatch):
    major = int(nvrtc.version.split(".")[0])
    monkeypatch.setattr(library, "candidates", lambda: [nvrtc.path])
    assert library.find(1000 * major) is nvrtc
    with pytest.raises(
        RuntimeError, match=rf"got NVRTC {nvrtc.version} .* a driver for CUDA {major - 1}.4, expected"
    ) as error:
        library.find(1000 * (major - 1) + 40)
    assert "\n" not in str(error.value)


def test_a_device_that_nvrtc_does_not_know(nvrtc):
    assert nvrtc.capabilities == tuple(sorted(nvrtc.capabilities))
    for capability, name in ((999, "99.9"), (50, "5.0")):
        with pytest.raises(
            RuntimeError, match=rf"compute capability {name}, for which NVRTC .* install another"
        ) as error:
            compile_module({}, "select", [], capability)
        assert "\n" not in str(error.value)


def test_errors_of_a_program_are_shown(nvrtc, home):
    with pytest.raises(RuntimeError, match=r"(?s)cannot compile gradzip's kernels: .*nonesuch"):
        compile_module({"cuda/x.cuh": "nonesuch"}, "x", [], nvrtc.capabilities[0])
    assert not [path for path in home.iterdir() if path.suffix != ".lock"]


def test_kernels_of_a_module(nvrtc, home, caplog):
    names = ["gradzip::cuda::compact_kernel<long long unsigned int>", "gradzip::cuda::scan_counts_kernel"]
    image, symbols = compile_module(sources(), "compact", names, 80)
    assert image.startswith(b"\x7fELF")
    assert symbols == {
        names[0]: "_ZN7gradzip4cuda14compact_kernelIyEEvPKT_lPKhPKlPS2_l",
        names[1]: "_ZN7gradzip4cuda18scan_counts_kernelEPKjlPlS3_",
    }
    assert all(symbol.encode() in image for symbol in symbols.values())
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == (
        f"compiling the CUDA kernels of compact for compute capability 8.0 with NVRTC {nvrtc.version}: once, then they "
        f"are kept in {home}"
    )
    assert compile_module(sources(), "compact", names, 80) == (image, symbols)
    assert len(caplog.records) == 1, "now it is in the cache"
    compile_module({**sources(), "cuda/other.cuh": "// of another version"}, "compact", names, 80)
    assert len(caplog.records) == 2, "another version of the sources"
