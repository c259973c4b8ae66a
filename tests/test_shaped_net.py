"""scripts/shaped_net.sh: a network of limited bandwidth for one command."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch import SHAPED_NET, needs_network, shaped

# One process sends SIZE bytes to another four times. Prints the seconds of each transfer.
TRANSFER = """
import os, socket, sys, time
size, server = int(sys.argv[1]), socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    with socket.create_connection(server.getsockname()) as peer:
        while peer.recv(1):
            peer.sendall(bytes(size))
    os._exit(0)
peer, _ = server.accept()
for _ in range(4):
    start = time.perf_counter()
    peer.sendall(b"?")
    received = 0
    while received < size:
        received += len(peer.recv(1 << 20))
    print(time.perf_counter() - start)
peer.close()
os.wait()
"""


def qdisc():
    return subprocess.run(["tc", "qdisc", "show", "dev", "lo"], capture_output=True, text=True, check=True).stdout


def in_use(namespace):
    """Whether any process is in the network namespace (net:[number])."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns/net") == namespace:
                return True
        except OSError:  # the process has ended
            pass
    return False


@needs_network
@pytest.mark.parametrize(("rate", "ranks", "size"), [("100mbit", 1, 2_000_000), ("0.5gbit", 2, 20_000_000)])
def test_transfers_have_the_bandwidth(rate, ranks, size):
    done = shaped(rate, ranks, "--", sys.executable, "-c", TRANSFER, size)
    assert done.returncode == 0, done.stderr
    seconds = [float(line) for line in done.stdout.split()]
    ideal = 8 * size / {"100mbit": 100e6, "0.5gbit": 2 * 500e6}[rate]
    assert len(seconds) == 4
    assert min(seconds) > 0.9 * ideal
    # The fastest of four, and wide: a busy machine is slower, but wrong by a unit (bits, bytes) is a factor of eight.
    assert min(seconds) < 4 * ideal


@needs_network
def test_bytes_are_counted_once():
    count = "grep lo: /proc/net/dev"
    done = shaped("1gbit", 1, "--", "bash", "-c", f'"$0" -c "$1" 1000000 >/dev/null; {count}', sys.executable, TRANSFER)
    received, sent = (int(done.stdout.split()[column]) for column in (1, 9))
    assert received == sent
    assert 4_000_000 < sent < 1.05 * 4_000_000


@needs_network
def test_command_replaces_the_script():
    done = shaped("2mbit", 3, "--", "bash", "-c", "cat; tc qdisc show dev lo; hostname; exit 7", input="in\n")
    assert done.returncode == 7
    assert done.stderr == ""
    first, shape, host = done.stdout.splitlines()
    assert (first, host) == ("in", "localhost")
    assert " tbf " in shape
    assert "rate 6Mbit" in shape
    assert shaped("1mbit", 1, "--", "bash", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


@needs_network
def test_networks_nest():
    done = shaped("1gbit", 2, "--", "bash", SHAPED_NET, "20mbit", 1, "--", "tc", "qdisc", "show", "dev", "lo")
    assert "rate 20Mbit" in done.stdout
    assert done.returncode == 0


@needs_network
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(number):
    before = qdisc()
    code = "import os, time; print(os.readlink('/proc/self/ns/net'), flush=True); time.sleep(60)"
    # These tests may run as a background job of a shell, which starts those with SIGINT ignored.
    command = ["env", "--default-signal=INT", "bash", SHAPED_NET, "1gbit", "2", "--", sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as job:
        namespace = job.stdout.readline().strip()
        assert namespace != os.readlink("/proc/self/ns/net")
        assert in_use(namespace)
        os.killpg(job.pid, number)  # to the whole process group, as Ctrl-C does
        assert job.wait(10) == -number
    assert not in_use(namespace)
    assert qdisc() == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "expected RATE RANKS -- COMMAND"),
        (["1gbit", 2, "true"], "expected RATE RANKS -- COMMAND"),
        (["1gbps", 2, "--", "true"], "got rate '1gbps', expected a number"),
        (["0.0mbit", 2, "--", "true"], "got rate '0.0mbit', expected more than 0"),
        (["1gbit", "two", "--", "true"], "got 'two' ranks, expected a number"),
    ],
)
def test_wrong_arguments(arguments, expected):
    done = shaped(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("shaped_net: ")
    assert expected in done.stderr


def test_missing_tools_are_named(tmp_path):
    done = subprocess.run(
        [shutil.which("bash"), SHAPED_NET, "1gbit", "2", "--", "true"],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no 'ip' on PATH; install iproute2" in done.stderr


@needs_network
def test_root_is_required():
    # From the standard input, because that user may not be able to read the clone.
    done = subprocess.run(
        ["bash", "-s", "--", "1gbit", "2", "--", "true"],
        input=SHAPED_NET.read_text(), capture_output=True, text=True, user=65534, extra_groups=[], cwd="/",
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "shaped_net: only root may make a network namespace; run this with sudo\n"


@needs_network
def test_missing_command():
    done = shaped("1gbit", 2, "--", "no-such-command")
    assert done.returncode == 127
    assert done.stderr == "shaped_net: no-such-command: command not found\n"


@needs_network
def test_rate_that_the_kernel_refuses():
    done = shaped("9999gbit", 9999, "--", "true")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "take a lower rate" in done.stderr


def test_help_has_examples():
    done = shaped("--help")
    assert done.returncode == 0
    assert "horovodrun -np 2" in done.stdout
    assert "torchrun" in done.stdout
