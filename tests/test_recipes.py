"""recipes/: lint, real training with local processes as nodes, and the manifest against the operator's schema."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch import python

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
SCRIPTS = [RECIPES / "ssh.sh", RECIPES / "slurm" / "train.sh", RECIPES / "slurm" / "bin" / "ssh"]
VENV = Path(sys.executable).parent

# Nodes of this machine: addresses of the loopback interface, but not the one that horovodrun takes for local.
NODES = ["127.0.0.2", "127.0.0.3"]

# ssh, but to this machine: run the command in a new shell. Notes the host.
SSH = """\
host=
while (($#)); do
  case $1 in
  -tt) shift ;;
  -*) shift 2 ;;
  *) [[ -z $host ]] || break; host=$1; shift ;;
  esac
done
echo "$host" >>"$NOTES"
cd / && exec env -u PATH -u PYTHONPATH PATH=/usr/bin:/bin ${KEPT:+"$KEPT"} bash -c "$*"
"""

# srun of a job of two nodes: run the command on the named node, or on each of them.
SRUN = """\
tasks=1
while (($#)); do
  case $1 in
  --nodelist=*) echo "${1#*=}" >>"$NOTES"; shift ;;
  --ntasks=*) tasks=${1#*=}; shift ;;
  --*) shift ;;
  *) break ;;
  esac
done
pids=()
for ((node = 0; node < tasks; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || exit; done
"""
SCONTROL = '[[ $* == "show hostnames two-nodes" ]] && printf "%s\\\\n" {}\n'.format(" ".join(NODES))


@pytest.fixture
def environment(tmp_path):
    """Variables of a shell whose PATH has the commands of a cluster, and of this project's environment."""
    bin = tmp_path / "bin"
    bin.mkdir()
    # Processes that have torch loaded (warm.py). torchrun's options come before the script, `--no-python` among them.
    fork, torchrun = shlex.join(python()), shlex.join([*python(), "-m", "torch.distributed.run"])
    commands = {
        "python": f'exec {fork} "$@"\n',
        "horovodrun": f'exec {fork} {VENV / "horovodrun"} --disable-cache "$@"\n',
        "torchrun": (
            'options=(); while [[ $1 == --* ]]; do options+=("$1" "$2"); shift 2; done\n'
            f'exec {torchrun} "${{options[@]}}" --no-python {fork} "$@"\n'
        ),
    }
    for name, text in {**commands, "ssh": SSH, "srun": SRUN, "scontrol": SCONTROL}.items():
        (bin / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (bin / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(bin), str(VENV), os.environ["PATH"]])
    return {
        "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "INTERFACE": "lo",
        "PORT": str(port), "NOTES": str(tmp_path / "notes"), "HOROVOD_GLOO_TIMEOUT_SECONDS": "100",
        "SLURM_JOB_NODELIST": "two-nodes", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT),
        "KEPT": f"PYTHONPATH={ROOT}",
    }  # fmt: skip


def run(environment, *command, cwd=ROOT):
    return subprocess.run(
        list(map(str, command)), env=environment, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=150,
    )  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(RECIPES).as_posix())
def test_scripts_pass_lint(script):
    assert os.access(script, os.X_OK)
    shellcheck = shutil.which("shellcheck", path=f"{VENV}{os.pathsep}{os.environ['PATH']}")
    if not shellcheck:
        pytest.skip("no shellcheck here")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("engine", [pytest.param("horovod", marks=pytest.mark.long), "ddp"])
@pytest.mark.parametrize("recipe", ["ssh", "slurm"])
def test_trains_on_two_nodes(environment, tmp_path, recipe, engine):
    """Ranks of two nodes train together: replicas are identical, and each node was reached."""
    pytest.importorskip("sklearn")
    if engine == "horovod":
        pytest.importorskip("horovod.torch")
    results = tmp_path / "results.json"
    start = {"ssh": [SCRIPTS[0], ",".join(f"{node}:1" for node in NODES)], "slurm": [SCRIPTS[1]]}[recipe]
    arguments = ["--compression", "acpsgd", "--steps", "3", "--threads", "1", "--json", results]
    done = run(environment | {"ENGINE": engine}, *start, *arguments)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    written = json.loads(results.read_text())
    assert written["configuration"]["ranks"] == 2 and written["configuration"]["engine"] == engine
    (trained,) = written["runs"]
    assert trained["steps"] == 3 and trained["replicas_identical"] and trained["ratio"] > 2
    if (recipe, engine) != ("slurm", "ddp"):  # one srun starts both
        assert {*Path(environment["NOTES"]).read_text().split()} == {*NODES}


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS[:2], ids=lambda path: path.name)
def test_a_failed_rank_ends_the_job(environment, script):
    hosts = [",".join(f"{node}:1" for node in NODES)] if script.name == "ssh.sh" else []
    done = run(environment | {"ENGINE": "ddp"}, script, *hosts, "--compression", "zip")
    assert done.returncode != 0
    assert "argument --compression" in done.stdout + done.stderr


def test_dry_run_prints_the_commands(environment):
    done = run(environment | {"INTERFACE": "eth0"}, SCRIPTS[0], "--dry-run", "gpu1:8,gpu2:4", "--steps", "3 4")
    assert shlex.split(done.stdout) == [
        "horovodrun", "-np", "12", "-H", "gpu1:8,gpu2:4", "--network-interfaces", "eth0", "python",
        "examples/train.py", "--engine", "horovod", "--steps", "3 4",
    ]  # fmt: skip
    done = run(environment | {"ENGINE": "ddp"}, SCRIPTS[0], "--dry-run", "gpu1:8,gpu2:4", "--steps", "3 4")
    for i, (line, node) in enumerate(zip(done.stdout.splitlines(), ["gpu1:8", "gpu2:4"], strict=True)):
        host, ranks = node.split(":")
        command = shlex.split(line)
        assert command[:5] == ["ssh", "-tt", "-o", "BatchMode=yes", host]
        remote = shlex.split(command[5])
        assert remote[:5] == ["cd", str(ROOT), "&&", "exec", "env"]
        assert remote[remote.index("torchrun") :] == [
            "torchrun", "--nnodes", "2", "--node-rank", str(i), "--nproc-per-node", ranks, "--master-addr", "gpu1",
            "--master-port", environment["PORT"], "examples/train.py", "--engine", "ddp", "--steps", "3 4",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "arguments", "variables", "says"),
    [
        (SCRIPTS[0], [], {}, "got '', expected HOST:RANKS"),
        (SCRIPTS[0], ["gpu1,gpu2"], {}, "got 'gpu1,gpu2', expected HOST:RANKS"),
        (SCRIPTS[0], ["gpu1:0"], {}, "got 'gpu1:0', expected HOST:RANKS"),
        (SCRIPTS[0], ["-oProxyCommand=x:1"], {}, "expected HOST:RANKS"),
        (SCRIPTS[0], ["gpu1:1"], {"ENGINE": "mpi"}, "got ENGINE=mpi, expected horovod or ddp"),
        (SCRIPTS[1], [], {"ENGINE": "mpi"}, "got ENGINE=mpi, expected horovod or ddp"),
        (SCRIPTS[1], [], {"SLURM_JOB_NODELIST": ""}, "this is no Slurm job"),
        (SCRIPTS[1], [], {"SLURM_SUBMIT_DIR": "/"}, "no examples/train.py in /"),
    ],
)
def test_refusals(environment, script, arguments, variables, says):
    done = run(environment | variables, script, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert says in done.stderr and len(done.stderr.splitlines()) == 2, "one line says what is wrong, one what to do"


# What the manifest uses of the schema of MPIJob v2beta1 (manifests/base/kubeflow.org_mpijobs.yaml of the MPI operator,
# 0.5 and newer), and of Kubernetes' pods within it. A dict: an object with these fields and no others.
CONTAINER = {
    "name": str, "image": str, "command": [str], "args": [str], "env": [{"name": str, "value": str}],
    "ports": [{"containerPort": int}], "readinessProbe": {"tcpSocket": {"port": int}, "periodSeconds": int},
    "resources": {"limits": {"cpu": (int, str), "memory": str}}, "volumeMounts": [{"name": str, "mountPath": str}],
}  # fmt: skip
REPLICA = {
    "replicas": int,
    "template": {"spec": {"containers": [CONTAINER], "volumes": [{"name": str, "emptyDir": {"medium": {"Memory"}}}]}},
}
MPIJOB = {
    "apiVersion": {"kubeflow.org/v2beta1"},
    "kind": {"MPIJob"},
    "metadata": {"name": str},
    "spec": {
        "slotsPerWorker": int, "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"}, "sshAuthMountPath": str,
        "runPolicy": {"cleanPodPolicy": {"None", "Running", "All"}, "backoffLimit": int},
        "mpiReplicaSpecs": {"Launcher": REPLICA, "Worker": REPLICA},
    },
}  # fmt: skip


def differences(value, schema, at="manifest"):
    """Yield what of a value is not as the schema has it."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            yield f"{at}: got {value!r}, expected an object"
            return
        yield from (f"{at}: no field {name!r}" for name in value.keys() - schema.keys())
        for name in value.keys() & schema.keys():
            yield from differences(value[name], schema[name], f"{at}.{name}")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{at}: got {value!r}, expected a list"
            return
        for i, item in enumerate(value):
            yield from differences(item, schema[0], f"{at}[{i}]")
    elif (
        value not in schema
        if isinstance(schema, set)
        else type(value) not in (schema if isinstance(schema, tuple) else (schema,))
    ):
        yield f"{at}: got {value!r}, expected {schema}"


def manifest():
    return pytest.importorskip("yaml").safe_load((RECIPES / "kubernetes" / "mpijob.yaml").read_text())


def test_manifest_has_fields_of_the_schema():
    job = manifest()
    assert list(differences(job, MPIJOB)) == []
    job["spec"]["runPolicy"]["cleanPodPolicy"] = "Sometimes"
    job["spec"]["mpiReplicaSpecs"]["Worker"]["replica"] = job["spec"].pop("slotsPerWorker")
    job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"] = "bash"
    assert len(list(differences(job, MPIJOB))) == 3


def test_manifest_agrees_with_the_image_and_itself(tmp_path):
    spec = manifest()["spec"]
    launcher, worker = (
        spec["mpiReplicaSpecs"][kind]["template"]["spec"]["containers"][0] for kind in ("Launcher", "Worker")
    )
    dockerfile = (ROOT / "docker" / "Dockerfile.cpu").read_text()
    for container in (launcher, worker):
        assert container["command"] == ["bash", "-ec"]
        (script,) = container["args"]
        assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0
        assert re.search(r"ln -s \S+/docker/entrypoint.sh \S+/gradzip-entrypoint", dockerfile)
        assert f"{spec['sshAuthMountPath']}/id_rsa" in script
        (keys,) = (v["value"] for v in container["env"] if v["name"] == "GRADZIP_KEYS")
        assert f" {keys}/id_ed25519 " in script.replace("\n", " "), "the key that the entrypoint looks for"
    command = shlex.split(launcher["args"][0].replace("\\\n", ""), comments=True)
    replicas = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert int(command[command.index("-np") + 1]) == replicas * spec["slotsPerWorker"]
    assert command[command.index("--hostfile") + 1] == "/etc/mpi/hostfile"  # where the operator mounts it
    assert (ROOT / command[command.index("python") + 1]).is_file()
    port = worker["readinessProbe"]["tcpSocket"]["port"]
    assert f"EXPOSE {port}" in dockerfile and worker["ports"] == [{"containerPort": port}]


def test_readme_names_what_is_there():
    readme = (RECIPES / "README.md").read_text()
    paths = {*re.findall(r"\b(?:docker|recipes|examples|tests)/[\w./-]*\w", readme)}
    assert {f"recipes/{script.relative_to(RECIPES)}" for script in SCRIPTS} <= paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
