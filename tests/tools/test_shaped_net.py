"""scripts/shaped_net.sh: a network of limited bandwidth for one command."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import commands
from launch import SHAPED_NET, needs_network, shaped

COVERS = ["scripts/shaped_net.sh"]

# Host 0 gets SIZE bytes four times from host 1 (or from itself, where there are no hosts), and then from itself. Prints
# the seconds of each transfer, and the bytes that the interface INTERFACE has counted for the first four. Written at
# once: hosts share the output.
TRANSFER = r"""
import os, socket, sys, threading, time
size, interface, host = int(sys.argv[1]), sys.argv[2], os.environ.get("HOST")

def serve():
    peer, _ = socket.create_server(("", 5000)).accept()
    while peer.recv(1):
        peer.sendall(bytes(size))

def get(address):
    while True:
        try:
            peer = socket.create_connection((address, 5000))
            break
        except OSError:
            time.sleep(0.02)
    for _ in range(4):
        start, received = time.perf_counter(), 0
        peer.sendall(b"?")
        while received < size:
            received += len(peer.recv(1 << 20))
        os.write(1, b"%f\n" % (time.perf_counter() - start))
    peer.close()

def get_from_itself():
    threading.Thread(target=serve, daemon=True).start()
    get("127.0.0.1")

serve() if host == "1" else get("10.77.0.2") if host else get_from_itself()
(line,) = (line for line in open("/proc/net/dev") if line.strip().startswith(interface + ":"))
os.write(1, line.split()[9 if host == "1" else 1].encode() + b"\n")
if host == "0":
    get_from_itself()
"""


def transferred(network, size, interface):
    """Return the seconds of each transfer, and what interfaces have counted."""
    done = shaped(*network, "--", sys.executable, "-c", TRANSFER, size, interface)
    assert done.returncode == 0, done.stderr
    numbers = [float(line) for line in done.stdout.split()]
    return [number for number in numbers if number < 1000], [number for number in numbers if number > 1000]


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
    seconds, counted = transferred((rate, ranks), size, "lo")
    ideal = 8 * size / {"100mbit": 100e6, "0.5gbit": 2 * 500e6}[rate]
    # The fastest of four, and wide: a busy machine is slower, but wrong by a unit (bits, bytes) is a factor of eight.
    assert len(seconds) == 4 and 0.9 * ideal < min(seconds) < 4 * ideal
    assert len(counted) == 1 and 4 * size < counted[0] < 1.05 * 4 * size, "bytes are counted once"


@needs_network
def test_only_the_link_between_hosts_is_shaped():
    size, ideal = 1_000_000, 0.08
    seconds, counted = transferred(("--hosts", 2, "--inter", "100mbit"), size, "inter")
    assert len(counted) == 2 and all(4 * size < nbytes < 1.05 * 4 * size for nbytes in counted)
    assert len(seconds) == 8 and 0.9 * ideal < min(seconds[:4]) < 4 * ideal
    assert min(seconds[4:]) < ideal / 4


@needs_network
def test_command_replaces_the_script():
    done = shaped("2mbit", 3, "--", "bash", "-c", "cat; tc qdisc show dev lo; hostname; exit 7", input="in\n")
    assert (done.returncode, done.stderr) == (7, "")
    first, shape, host = done.stdout.splitlines()
    assert (first, host) == ("in", "localhost") and " tbf " in shape and "rate 6Mbit" in shape
    assert shaped("1mbit", 1, "--", "bash", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


@needs_network
def test_a_host_that_fails_ends_the_other(tmp_path):
    script = f"cd '{tmp_path}'; echo $HOST $(hostname) $PET_NODE_RANK; if ((HOST)); then " + (
        "until [[ -e read ]]; do sleep 0.02; done; exit 7; else cat; touch read; exec sleep 50; fi"
    )
    done = shaped("--hosts", 2, "--inter", "none", "--", "bash", "-c", script, input="in\n")
    assert done.returncode == 7
    assert sorted(done.stdout.splitlines()) == ["0 host0 0", "1 host1 1", "in"]
    assert shaped("--hosts", 2, "--inter", "none", "--", "bash", "-c", "exit $((HOST ? 0 : 3))").returncode == 3


@needs_network
@pytest.mark.parametrize(
    ("network", "number"),
    [
        (["1gbit", "2"], signal.SIGINT),  # to the whole process group, as Ctrl-C does
        (["--hosts", "2", "--inter", "1gbit"], signal.SIGTERM),
        (["--hosts", "2", "--inter", "1gbit"], signal.SIGKILL),
    ],
)
def test_nothing_is_left_after_a_signal(network, number):
    code = r"import os, time; os.write(1, os.readlink('/proc/self/ns/net').encode() + b'\n'); time.sleep(60)"
    # These tests may run as a background job of a shell, which starts those with SIGINT ignored.
    command = ["env", "--default-signal=INT", "bash", SHAPED_NET, *network, "--", sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as job:
        hosts = 2 if "--hosts" in network else 1
        namespaces = {job.stdout.readline().strip() for _ in range(hosts)}
        assert len(namespaces - {os.readlink("/proc/self/ns/net")}) == hosts and all(map(in_use, namespaces))
        (os.killpg if number == signal.SIGINT else os.kill)(job.pid, number)
        job.wait(10)
        assert job.stdout.read() == ""  # all commands have ended
    end = time.monotonic() + 5
    while any(map(in_use, namespaces)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(in_use, namespaces))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["1gbit", 2, "true"], "expected RATE RANKS -- COMMAND"),
        (["1gbps", 2, "--", "true"], "got rate '1gbps', expected a number"),
        (["0.0mbit", 2, "--", "true"], "got rate '0.0mbit', expected more than 0"),
        (["1gbit", "two", "--", "true"], "got 'two' ranks, expected a number"),
        (["--hosts", 3, "--inter", "1gbit", "--", "true"], "got '3' hosts, expected 2"),
        (["--hosts", 2, "--inter", "fast", "--", "true"], "got rate 'fast', expected a number"),
    ],
)
def test_wrong_arguments(arguments, expected):
    done = shaped(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("shaped_net: ") and expected in done.stderr


def test_missing_tools_are_named():
    done = commands.run(shutil.which("bash"), SHAPED_NET, "1gbit", "2", "--", "true", env={"PATH": "/none"})
    assert done.returncode == 2 and "no 'ip' on PATH; install iproute2" in done.stderr


@needs_network
def test_errors_of_the_machine_are_one_line():
    for command, status, says in (
        (("1gbit", 2, "--", "no-such-command"), 127, "shaped_net: no-such-command: command not found\n"),
        (("9999gbit", 9999, "--", "true"), 2, "take a lower rate"),
    ):
        done = shaped(*command)
        assert done.returncode == status and done.stderr.count("\n") == 1 and says in done.stderr
    # From the standard input, because another user may not be able to read the clone.
    options = {"input": SHAPED_NET.read_text(), "user": 65534, "extra_groups": [], "cwd": "/"}
    done = commands.run("bash", "-s", "--", "1gbit", "2", "--", "true", **options)
    assert done.returncode == 2
    assert done.stderr == "shaped_net: only root may make a network namespace; run this with sudo\n"
