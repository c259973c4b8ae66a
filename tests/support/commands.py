"""Run the project's commands as a user does, and write commands that stand for others."""

import shutil
import socket
import subprocess

import pytest

from paths import ROOT


def run(*command, **options):
    """Run a command without a terminal. Return the finished process with its output as text."""
    if "input" not in options:
        options["stdin"] = subprocess.DEVNULL
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **{"timeout": 150, **options})


def checked_in():
    """Return the files that git has, relative to the repository. Skip the test where there is no git, or no clone."""
    git = shutil.which("git")
    listed = git and run(git, "ls-files", cwd=ROOT)
    if not listed or listed.returncode:
        pytest.skip("not a clone")
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def check_refusal(done, status, *says):
    """Check that a command ended with this status and two lines of error: what is wrong, and what to do."""
    assert done.returncode == status and all(text in done.stderr for text in says), done.stderr
    assert len(done.stderr.splitlines()) == 2, "one line says what is wrong, one what to do"


def executable(path, text):
    """Write a program. Return its path."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
