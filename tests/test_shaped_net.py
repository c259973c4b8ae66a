"""scripts/shaped_net.sh: a network of limited bandwidth for one command."""

import os
import shutil
import signal
import subprocess
import sys
import time
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
        (["--hosts", 2, "--", "true"], "expected --hosts 2 --inter RATE -- COMMAND"),
        (["--hosts", 3, "--inter", "1gbit", "--", "true"], "got '3' hosts, expected 2"),
        (["--hosts", 2, "--inter", "fast", "--", "true"], "got rate 'fast', expected a number"),
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


# --- two hosts

# As TRANSFER: host 1 sends SIZE bytes four times to host 0, which also sends as much to itself.
BETWEEN_HOSTS = r"""
import os, socket, sys, time
size, host = int(sys.argv[1]), int(os.environ["HOST"])
def receive(server, sender):
    if host == 0:
        server = socket.create_server((server, 5000))
    if os.fork() == 0:
        while host == sender:
            try:
                peer = socket.create_connection(("10.77.0.1", 5000))
                break
            except OSError:
                time.sleep(0.02)
        while host == sender and peer.recv(1):
            peer.sendall(bytes(size))
        os._exit(0)
    if host == 0:
        peer, _ = server.accept()
        for _ in range(4):
            start, received = time.perf_counter(), 0
            peer.sendall(b"?")
            while received < size:
                received += len(peer.recv(1 << 20))
            os.write(1, b"%f\n" % (time.perf_counter() - start))
        peer.close()
        server.close()
    os.wait()
receive("10.77.0.1", 1)
(line,) = (line for line in open("/proc/net/dev") if line.strip().startswith("inter:"))
os.write(1, line.split()[1 if host == 0 else 9].encode() + b"\n")  # at once: the hosts share the output
receive("10.77.0.1", 0)
"""


@needs_network
def test_only_the_link_between_hosts_is_shaped():
    size, ideal = 1_000_000, 0.08
    done = shaped("--hosts", 2, "--inter", "100mbit", "--", sys.executable, "-c", BETWEEN_HOSTS, size)
    assert done.returncode == 0, done.stderr
    numbers = [float(line) for line in done.stdout.split()]
    counted = [number for number in numbers if number > 1000]
    times = [number for number in numbers if number < 1000]
    assert len(counted) == 2 and all(4 * size < nbytes < 1.05 * 4 * size for nbytes in counted)
    assert len(times) == 8 and 0.9 * ideal < min(times[:4]) < 4 * ideal
    assert min(times[4:]) < ideal / 4


@needs_network
def test_a_host_that_fails_ends_the_other():
    script = "echo $HOST $(hostname) $PET_NODE_RANK; if ((HOST)); then exit 7; else cat; exec sleep 50; fi"
    done = shaped("--hosts", 2, "--inter", "none", "--", "bash", "-c", script, input="in\n")
    assert done.returncode == 7
    assert sorted(done.stdout.splitlines()) in (["0 host0 0", "1 host1 1"], ["0 host0 0", "1 host1 1", "in"])
    assert shaped("--hosts", 2, "--inter", "none", "--", "bash", "-c", "exit $((HOST ? 0 : 3))").returncode == 3
    assert shaped("--hosts", 2, "--inter", "none", "--", "no-such-command").returncode == 127


@needs_network
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_the_hosts_after_a_signal(number):
    # Written at once: the hosts share the output.
    code = r"import os, time; os.write(1, os.readlink('/proc/self/ns/net').encode() + b'\n'); time.sleep(60)"
    command = ["bash", SHAPED_NET, "--hosts", "2", "--inter", "1gbit", "--", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as job:
        namespaces = {job.stdout.readline().strip() for _ in range(2)}
        assert len(namespaces) == 2 and all(map(in_use, namespaces))
        job.send_signal(number)  # to the script alone
        job.wait(10)
        assert job.stdout.read() == ""  # both commands have ended
    end = time.monotonic() + 5
    while any(map(in_use, namespaces)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(in_use, namespaces))


@needs_network
@pytest.mark.long
def test_torchrun_joins_the_hosts():
    code = (
        "import os, torch, torch.distributed as dist; dist.init_process_group('gloo'); "
        "x = torch.ones(1); dist.all_reduce(x); os.write(1, b'sum %d %s\\n' % (x, os.environ['GROUP_RANK'].encode()))"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", 2]
    done = shaped("--hosts", 2, "--inter", "1gbit", "--", *command, sys.executable, "-c", code, timeout=250)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["sum 4 0", "sum 4 0", "sum 4 1", "sum 4 1"]
