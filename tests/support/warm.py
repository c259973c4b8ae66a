"""Run a Python script in a process that has torch and Horovod loaded already: `warm.py FOLDER SCRIPT [ARGUMENT ...]`.

Importing torch takes seconds, and a job of three ranks imports it five times. A server (`warm.py FOLDER`) imports it
once and forks a process for each script. The fork gets this process's arguments, environment, working directory,
standard streams and network namespace. This process forwards signals to it, ends as it ends, and takes it along when it
is killed. The fork's `sys.executable` is FOLDER/python, which does the same, so that what a launcher starts is as fast.
"""

import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
PRELOADED = [
    "torch",
    "torch._dynamo",  # the first optimizer imports it, for as long as torch itself
    "torch.distributed.launcher.api",
    "horovod.torch",
    "horovod.runner.launch",
    "sklearn.datasets",
    # Of .venv-integrations alone:
    "lightning.pytorch",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "torchft",
]
NAMESPACES = ("net", "uts")  # those of scripts/shaped_net.sh


def receive(connection):
    """A JSON line, and the file descriptors that came with it."""
    data, files, _, _ = socket.recv_fds(connection, 1 << 16, 3 + len(NAMESPACES))
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 16)
    return json.loads(data), files


def enter(namespaces):
    """Move this process to other namespaces, if they are not its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name, file in zip(NAMESPACES, namespaces):
        if os.fstat(file).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino and libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"setns to another {name} namespace")
        os.close(file)


def keep(connection, child):
    """Tell the client how the child ended. Kill the child when the client is gone."""
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.send(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def serve(folder):
    """Fork a process for each connection. Return in the forks, with the script and its arguments, to run it."""
    for module in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(module)
    gc.freeze()  # a collection in a fork would copy all these objects
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen()
    print("ready", flush=True)
    keepers = []
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if listener not in ready:  # whoever started this server has closed its end
            os._exit(0)
        connection, _ = listener.accept()
        if keeper := os.fork():
            connection.close()
            keepers = [pid for pid in (*keepers, keeper) if os.waitpid(pid, os.WNOHANG)[0] == 0]
            continue
        listener.close()
        os.setsid()
        (arguments, environment, cwd), files = receive(connection)
        if child := os.fork():
            for file in (*files, 0, 1):
                os.close(file)
            connection.send(b"%d\n" % child)
            keep(connection, child)
        connection.close()
        enter(files[3:])
        for stream, file in enumerate(files[:3]):
            os.dup2(file, stream)
            os.close(file)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.executable = f"{folder}/python"
        # A shell without job control starts background jobs, and so this server, with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return arguments


def run(arguments):
    """What `python [-u] SCRIPT ...` or `python [-u] -m MODULE ...` does."""
    if arguments[0] == "-u":
        sys.stdout.reconfigure(line_buffering=True)
        del arguments[0]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))  # before the folder of this script
        runpy.run_path(arguments[0], run_name="__main__")


def ask(folder, arguments):
    """Have the server run a script; end as it ends."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{folder}/socket")
    request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode() + b"\n"
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    sent = socket.send_fds(connection, [request], [0, 1, 2, *namespaces])
    connection.sendall(request[sent:])
    answers = connection.makefile()
    child = int(answers.readline())
    for number in FORWARDED:
        # Also those that are ignored here, as SIGINT is in background jobs: the script decides.
        signal.signal(number, lambda number, _: os.kill(child, number))
    status = int(answers.readline())
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    if arguments:
        ask(folder, arguments)
    run(serve(folder))
