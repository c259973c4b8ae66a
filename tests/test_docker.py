"""docker/ as far as that goes without an engine: lint, paths, the entrypoint, and what `pip install .` installs."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *DOCKER.glob("*.sh"), ROOT / ".ci" / "run"])


def tool(name):
    return shutil.which(name, path=PATH) or pytest.skip(f"no {name} here")


@pytest.fixture(params=["Dockerfile", "Dockerfile.cpu"])
def dockerfile(request):
    return DOCKER / request.param


def test_dockerfile(dockerfile):
    """It passes lint, what it copies and runs is there, and docker/README.md and compose.yaml agree with it."""
    done = subprocess.run([tool("hadolint"), "--no-color", dockerfile], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = dockerfile.read_text()
    lines = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.*) \S+$", text, re.MULTILINE)
    copied = [path for line in lines for path in line.split()]
    run = re.findall(r"(?:/opt/gradzip/|RUN |NCCL_LINK=SHARED )((?:scripts|docker)/\S+\.sh)", text)
    assert {"scripts/requirements.txt", ".", "examples"} <= {*copied}
    assert sorted(run) == ["docker/entrypoint.sh", "scripts/build_horovod.sh", "scripts/test_installed.sh"]
    assert [path for path in copied + run if not (ROOT / path).exists()] == []
    assert text.rindex("\nUSER ${UID}\n") > text.rindex("\nRUN "), "not root"
    assert "/etc/ssh/ssh_host_*" in text, "an image must not hold the host keys that a package makes"

    readme = (DOCKER / "README.md").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    assert {*re.findall(r"--build-arg\s+(\w+)=", readme)} == {*arguments}
    assert f"`{arguments['BASE']}`" in readme
    paths = {*re.findall(r"\b(?:docker|scripts|examples|tests)/[\w./-]*\w", readme)}
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert "EXPOSE 2222" in text
    assert "GRADZIP_SSH_PORT:-2222" in (DOCKER / "entrypoint.sh").read_text()


def test_dockerignore():
    """Every tracked file is in the context of an image; nothing private, large or built is."""
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "build", "keys", "**/*.so", "**/__pycache__"} <= {*patterns}
    command = [tool("git"), "ls-files", "--cached", "--ignored", "--exclude-from=.dockerignore"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone")
    assert listed.stdout == ""


def test_compose():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    nodes = services["job"]["depends_on"]
    for node in nodes:
        assert services[node]["command"] == ["sshd"]
        assert services[node]["healthcheck"]["test"][-1].endswith("/2222")
    command = services["job"]["command"]
    assert command[command.index("-H") + 1] == ",".join(f"{node}:1" for node in nodes)
    assert int(command[command.index("-np") + 1]) == len(nodes)
    assert (ROOT / command[command.index("python") + 1]).is_file()
    build = services["job"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts(script):
    assert os.access(script, os.X_OK)
    done = subprocess.run([tool("shellcheck"), script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# The entrypoint


@pytest.fixture
def home(tmp_path):
    """A user's home and an empty folder for keys, as the environment that names both."""
    tool("ssh-keygen")
    (tmp_path / "home").mkdir()
    (tmp_path / "keys").mkdir()
    return {"PATH": PATH, "HOME": str(tmp_path / "home"), "GRADZIP_KEYS": str(tmp_path / "keys")}


def enter(environment, *command):
    return subprocess.run(
        [DOCKER / "entrypoint.sh", *command], env=environment, capture_output=True, text=True, timeout=60
    )


def new_key(environment):
    key = Path(environment["GRADZIP_KEYS"]) / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return key


def test_command_runs_as_it_is(home):
    done = enter(home, "bash", "-c", 'echo "$#:$1"; exit 7', "bash", "two words")
    assert (done.returncode, done.stdout, done.stderr) == (7, "1:two words\n", "")
    assert not list(Path(home["HOME"]).iterdir()), "no key: nothing to set up"


def test_key_is_taken(home):
    key = new_key(home)
    key.chmod(0o644)  # as a mounted one may be; ssh would refuse it
    assert enter(home, "true").returncode == 0
    folder = Path(home["HOME"]) / ".ssh"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == dict.fromkeys(
        ("id_ed25519", "authorized_keys", "known_hosts", "config"), 0o600
    )
    public = key.with_suffix(".pub").read_text().split()[1]
    assert (folder / "authorized_keys").read_text().split()[1] == public
    assert (folder / "known_hosts").read_text().split()[:3] == ["*", "ssh-ed25519", public]
    settings = subprocess.run(
        [tool("ssh"), "-G", "-F", folder / "config", "node7"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {"port 2222", "stricthostkeychecking true", f"identityfile {folder}/id_ed25519"} <= set(settings)


def test_nodes_that_start_together_have_one_key(home):
    """Every process makes a key, all but one lose, and none ever sees a part of one."""
    look = f'source {DOCKER}/entrypoint.sh; make_key; cat "$key"'
    nodes = [subprocess.Popen(["bash", "-c", look], env=home, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    keys = {node.communicate()[0] for node in nodes}
    assert [node.returncode for node in nodes] == [0] * 8
    assert len(keys) == 1 and "OPENSSH PRIVATE KEY" in keys.pop()
    (left,) = Path(home["GRADZIP_KEYS"]).iterdir()
    assert left.name == "id_ed25519"
    assert left.stat().st_mode & 0o777 == 0o600


def test_refusals(home):
    folder = Path(home["GRADZIP_KEYS"])
    assert "nothing to run" in refusal(home)
    assert "sshd takes no arguments, got: -p 22" in refusal(home, "sshd", "-p", "22")
    assert f"no key in {folder}/none" in refusal(home | {"GRADZIP_KEYS": f"{folder}/none"}, "sshd")
    (folder / "id_ed25519").write_text("not a key")
    assert f"{folder}/id_ed25519 is not a private key without passphrase" in refusal(home, "true")
    (folder / "id_ed25519").unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "a phrase", "-f", folder / "id_ed25519"], check=True)
    assert "is not a private key without passphrase" in refusal(home, "sshd")


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("localhost", r"(127\.|::1)"),
        ("127.0.1.1", r"127\.0\.1\.1"),  # as Debian has a machine's own name
        ("x" * 64, "no address"),  # longer than a name can be: no server is asked
        ("192.0.2.1", None),
    ],
)
def test_name_that_others_cannot_reach(home, name, address):
    look = f"source {DOCKER}/entrypoint.sh; check_name {name}"
    told = subprocess.run(["bash", "-c", look], env=home, capture_output=True, text=True, check=True).stderr
    assert re.match(f"entrypoint: this host's name, {name}, stands for {address}", told) if address else not told


def refusal(environment, *command):
    done = enter(environment, *command)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2, "one line says what is wrong, one what to do"
    return done.stderr


@pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="no sshd here")
def test_node_serves_who_has_the_key(home, tmp_path):
    """As in a container. ssh takes the home from the password file, so it is told where its files are."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home |= {"GRADZIP_SSH_PORT": str(port)}
    # The user's shell may put something before the node's PATH, or take something out: its own end tells whose it is.
    own = {**home, "PATH": os.pathsep.join([PATH, str(tmp_path)])}
    node = subprocess.Popen([DOCKER / "entrypoint.sh", "sshd"], env=own, stderr=subprocess.PIPE, text=True)
    try:
        answer = ssh(home, "printenv PATH", until=time.monotonic() + 20)
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.rstrip().split(os.pathsep)[-1] == str(tmp_path)

        stranger = home | {"HOME": str(tmp_path / "stranger"), "GRADZIP_KEYS": str(tmp_path / "other")}
        for name in ("HOME", "GRADZIP_KEYS"):
            Path(stranger[name]).mkdir()
        new_key(stranger)
        assert enter(stranger, "true").returncode == 0
        answer = ssh(stranger, "true")
        assert answer.returncode == 255
        assert "Host key verification failed" in answer.stderr

        # Trusting the node does not make the node trust it.
        shutil.copy(tmp_path / "home" / ".ssh" / "known_hosts", tmp_path / "stranger" / ".ssh" / "known_hosts")
        answer = ssh(stranger, "true")
        assert answer.returncode == 255
        assert "Permission denied (publickey)" in answer.stderr
    finally:
        node.terminate()
        node.communicate(timeout=10)


def ssh(environment, command, until=0.0):
    """Runs a command on the node, which may take until then to be there."""
    while True:
        done = subprocess.run(
            ["ssh", "-F", f"{environment['HOME']}/.ssh/config", "127.0.0.1", command],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if done.returncode != 255 or time.monotonic() > until:
            return done
        time.sleep(0.1)


# The installed package


@pytest.mark.slow
@pytest.mark.long
def test_installed_package_is_whole(tmp_path):
    """`pip install .` installs every file of the package, and gradzip-test tests those, not the sources."""
    listed = subprocess.run([tool("git"), "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone")
    sources, site = tmp_path / "sources", tmp_path / "site"
    files = [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]
    for path in files:
        (sources / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, sources / path)
    for variant in ("cpu", "cuda", "nvrtc"):  # so that only what is out of date is compiled
        objects = f"build/{sys.implementation.cache_tag}-{variant}"
        if (ROOT / objects).is_dir():
            shutil.copytree(ROOT / objects, sources / objects)
    environment = {**os.environ, "PATH": PATH, "PYTHON": sys.executable}
    pip = "-m pip install --no-index --no-build-isolation --no-deps --disable-pip-version-check --target"
    subprocess.run([sys.executable, *pip.split(), site, sources], env=environment, check=True, capture_output=True)
    package = {path for path in files if path.startswith("gradzip/")}
    installed = {path.relative_to(site).as_posix() for path in (site / "gradzip").rglob("*") if path.is_file()}
    assert package - installed == set()
    assert [path for path in installed - package if not re.search(r"_C.*\.so$|\.pyc$", path)] == []

    def run(place):
        command = [sources / "scripts" / "test_installed.sh", "-q", "-p", "no:cacheprovider", "tests/test_cli.py"]
        done = subprocess.run(command, env=environment | {"PYTHONPATH": str(place)}, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    status, output = run(site)
    assert status == 0, output
    assert output.startswith(f"test_installed: {site}/gradzip\n")
    (site / "gradzip" / "methods" / "topk.py").unlink()
    status, output = run(site)
    assert status != 0 and "gradzip.methods.topk" in output
    status, output = run(sources)
    assert status == 1 and f"gradzip is imported from the checkout, {sources}/gradzip" in output
