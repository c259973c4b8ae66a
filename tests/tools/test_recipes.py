"""recipes/: real training with local processes as nodes, and a manifest that agrees with the image."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

import commands
from launch import python
from paths import ROOT

COVERS = ["recipes/**/*", "docker/Dockerfile.cpu", "docker/entrypoint.sh", "examples/train.py"]
RECIPES = ROOT / "recipes"
SSH, SLURM = RECIPES / "ssh.sh", RECIPES / "slurm" / "train.sh"
VENV = Path(sys.executable).parent

# Nodes of this machine: addresses of the loopback interface, but not the one that horovodrun takes for local.
NODES = ["127.0.0.2", "127.0.0.3"]

COMMANDS = {
    # ssh, but to this machine: notes the host, and runs the command in a new shell.
    "ssh": """\
host=
until [[ $host && $1 != -* ]]; do
  case $1 in -tt) shift ;; -*) shift 2 ;; *) host=$1; shift ;; esac
done
echo "$host" >>"$NOTES"
cd / && exec env PATH=/usr/bin:/bin bash -c "$*"
""",
    # srun of a job of two nodes: runs the command on the named node, or on each of them.
    "srun": """\
tasks=1 pids=()
while [[ $1 == --* ]]; do
  case $1 in --nodelist=*) echo "${1#*=}" >>"$NOTES" ;; --ntasks=*) tasks=${1#*=} ;; esac
  shift
done
for ((node = 0; node < tasks; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || exit; done
""",
    "scontrol": '[[ $* == "show hostnames two-nodes" ]] && printf "%s\\\\n" {}\n'.format(" ".join(NODES)),
}


@pytest.fixture
def environment(tmp_path):
    """Variables of a shell whose PATH has the commands of a cluster, and of this project's environment."""
    bin = tmp_path / "bin"
    bin.mkdir()
    # Processes that have torch loaded (warm.py). torchrun's options come before the script, `--no-python` among them.
    fork, torchrun = shlex.join(python()), shlex.join([*python(), "-m", "torch.distributed.run"])
    warm = {
        "python": f'exec {fork} "$@"\n',
        "horovodrun": f'exec {fork} {VENV / "horovodrun"} --disable-cache "$@"\n',
        "torchrun": 'options=(); while [[ $1 == --* ]]; do options+=("$1" "$2"); shift 2; done\n'
        f'exec {torchrun} "${{options[@]}}" --no-python {fork} "$@"\n',
    }
    for name, text in {**warm, **COMMANDS}.items():
        commands.executable(bin / name, f"#!/usr/bin/env bash\n{text}")
    return {
        "PATH": os.pathsep.join([str(bin), str(VENV), os.environ["PATH"]]), "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "INTERFACE": "lo", "HOROVOD_GLOO_TIMEOUT_SECONDS": "100",
        "NOTES": str(tmp_path / "notes"), "SLURM_JOB_NODELIST": "two-nodes", "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(ROOT), "PORT": str(commands.free_port()),
    }  # fmt: skip


def run(environment, *command):
    return commands.run(*command, env=environment, cwd=ROOT)


@pytest.mark.parametrize("engine", [pytest.param("horovod", marks=pytest.mark.long), "ddp"])
@pytest.mark.parametrize("recipe", [SSH, SLURM], ids=lambda path: path.name)
def test_trains_on_two_nodes(environment, tmp_path, recipe, engine):
    """Ranks of two nodes train together: replicas are identical, and each node was reached."""
    pytest.importorskip("sklearn")
    if engine == "horovod":
        pytest.importorskip("horovod.torch")
    results = tmp_path / "results.json"
    hosts = [",".join(f"{node}:1" for node in NODES)] * (recipe == SSH)
    arguments = ["--compression", "acpsgd", "--steps", "3", "--threads", "1", "--json", results]
    done = run(environment | {"ENGINE": engine}, recipe, *hosts, *arguments)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    written = json.loads(results.read_text())
    assert written["configuration"]["ranks"] == 2 and written["configuration"]["engine"] == engine
    (trained,) = written["runs"]
    assert trained["steps"] == 3 and trained["replicas_identical"] and trained["ratio"] > 2
    if (recipe, engine) != (SLURM, "ddp"):  # one srun starts both
        assert {*Path(environment["NOTES"]).read_text().split()} == {*NODES}


@pytest.mark.long
def test_a_failed_rank_ends_the_job(environment):
    done = run(environment | {"ENGINE": "ddp"}, SSH, ",".join(f"{node}:1" for node in NODES), "--compression", "zip")
    assert done.returncode != 0
    assert "argument --compression" in done.stdout + done.stderr


def test_dry_run_prints_the_commands(environment):
    done = run(environment | {"INTERFACE": "eth0"}, SSH, "--dry-run", "gpu1:8,gpu2:4", "--steps", "3 4")
    assert shlex.split(done.stdout) == [
        "horovodrun", "-np", "12", "-H", "gpu1:8,gpu2:4", "--network-interfaces", "eth0", "python",
        "examples/train.py", "--engine", "horovod", "--steps", "3 4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "arguments", "variables", "says"),
    [
        (SSH, ["gpu1,gpu2"], {}, "got 'gpu1,gpu2', expected HOST:RANKS"),
        (SSH, ["-oProxyCommand=x:1"], {}, "expected HOST:RANKS"),
        (SSH, ["gpu1:1"], {"ENGINE": "mpi"}, "got ENGINE=mpi, expected horovod or ddp"),
        (SLURM, [], {"ENGINE": "mpi"}, "got ENGINE=mpi, expected horovod or ddp"),
        (SLURM, [], {"SLURM_JOB_NODELIST": ""}, "this is no Slurm job"),
        (SLURM, [], {"SLURM_SUBMIT_DIR": "/"}, "no examples/train.py in /"),
    ],
)
def test_refusals(environment, script, arguments, variables, says):
    done = run(environment | variables, script, *arguments)
    commands.check_refusal(done, 2, says)
    assert done.stdout == ""


def test_manifest_agrees_with_the_image_and_itself():
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load((RECIPES / "kubernetes" / "mpijob.yaml").read_text())["spec"]
    replicas = spec["mpiReplicaSpecs"]
    launcher, worker = (replicas[kind]["template"]["spec"]["containers"][0] for kind in ("Launcher", "Worker"))
    for container in (launcher, worker):
        (script,) = container["args"]
        assert container["image"] == launcher["image"] and "." in container["image"].partition("/")[0], "a registry"
        assert container["command"] == ["bash", "-ec"] and run(None, "bash", "-n", "-c", script).returncode == 0
        assert f"{spec['sshAuthMountPath']}/id_rsa" in script
        (keys,) = (v["value"] for v in container["env"] if v["name"] == "GRADZIP_KEYS")
        assert f" {keys}/id_ed25519 " in script.replace("\n", " "), "the key that the entrypoint looks for"
    command = shlex.split(launcher["args"][0].replace("\\\n", ""), comments=True)
    assert int(command[command.index("-np") + 1]) == replicas["Worker"]["replicas"] * spec["slotsPerWorker"]
    assert command[command.index("--hostfile") + 1] == "/etc/mpi/hostfile"  # where the operator mounts it
    assert (ROOT / command[command.index("python") + 1]).is_file()
    port = worker["readinessProbe"]["tcpSocket"]["port"]
    assert f"EXPOSE {port}" in (ROOT / "docker" / "Dockerfile.cpu").read_text()
