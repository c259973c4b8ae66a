"""Keep compiled kernels in files, so that later processes need not compile them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

Compiled = tuple[bytes, dict[str, str]]  # a cubin, and symbols in it by the names of kernels
MAGIC = b"gradzip kernels 1\n"

_log = logging.getLogger(__name__)
_warned: set[Path] = set()


def fetch(name: str, key: str, make: Callable[[], Compiled]) -> Compiled:
    """Return what `make` returned earlier for the key, in any process; else call it, and keep what it returns.

    Of several processes that ask at the same time, one calls `make`, and the others wait for it. A file is written
    whole or not at all. What is damaged, or has another key, is made again.

    Args:
        name: of the file.
        key: all that the result depends on.
    """
    made = None
    for folder in (home, temporary):
        path = folder() / name
        if found := read(path, key):
            return found
        try:
            with _writable(folder(), name.partition("-")[0]):
                made = made or read(path, key) or make()
                write(path, key, made)
                return made
        except OSError as error:
            if folder is home and path.parent not in _warned:
                _warned.add(path.parent)
                _log.warning(
                    "cannot write to %s (%s): compiled CUDA kernels are kept in %s; set GRADZIP_CACHE to a folder that "
                    "you can write to", path.parent, error.strerror, temporary(),
                )  # fmt: skip
    return made or make()


def home() -> Path:
    """Return the folder of compiled kernels: in $GRADZIP_CACHE, else in the user's folder of caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("GRADZIP_CACHE") or f"{caches}/gradzip").expanduser() / "kernels"


def temporary() -> Path:
    """Return the folder that is used if `home` cannot be written to."""
    return Path(tempfile.gettempdir()) / f"gradzip-kernels-{os.getuid()}"


def read(path: Path, key: str) -> Compiled | None:
    """Return what `write` wrote with this key; None if there is nothing like that, or it is not whole."""
    try:
        _check_folder(path.parent)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or _others_can_write(status):
                return None
            magic, checksum, head, image = file.read().split(b"\n", 3)
        facts = json.loads(head)
    except (OSError, ValueError):
        return None
    whole = magic + b"\n" == MAGIC and checksum == _checksum(head, image) and facts["key"] == key
    return (image, facts["symbols"]) if whole else None


def write(path: Path, key: str, compiled: Compiled) -> None:
    """Write a file by way of another one, so that nobody sees a part of it. Raises OSError."""
    image, symbols = compiled
    head = json.dumps({"key": key, "symbols": symbols}).encode()
    descriptor, fresh = tempfile.mkstemp(prefix=path.name, suffix=".new", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(MAGIC + _checksum(head, image) + b"\n" + head + b"\n" + image)
        os.chmod(fresh, 0o644)
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise


def _checksum(head: bytes, image: bytes) -> bytes:
    return hashlib.sha256(head + b"\n" + image).hexdigest().encode()


def _check_folder(folder: Path) -> None:
    """Raise OSError if other users may choose what is in a folder: they could have a device run their code."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is a link, or no folder", str(folder))
    if _others_can_write(status):
        raise PermissionError(errno.EPERM, "it belongs to another user, or others may write to it", str(folder))


def _others_can_write(status: os.stat_result) -> bool:
    """Whether users other than this one and root own a file, or may write to it."""
    return status.st_uid not in (0, os.getuid()) or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


@contextlib.contextmanager
def _writable(folder: Path, name: str) -> Iterator[None]:
    """Make the folder, and hold its lock of that name. Raises OSError if it cannot be, or others can write to it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_folder(folder)
    with open(os.open(folder / f"{name}.lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w") as lock:
        with contextlib.suppress(OSError):  # not on all network file systems: then several may compile
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
