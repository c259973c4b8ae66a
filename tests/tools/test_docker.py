"""docker/ as far as that goes without an engine: lint, paths, the entrypoint, and what `pip install .` installs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import commands
from paths import ROOT

COVERS = ["docker/**/*", ".dockerignore", "scripts/*.sh", "recipes/**/*", ".ci/run"]
DOCKER = ROOT / "docker"
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu"]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
SCRIPTS = sorted(
    path
    for pattern in COVERS
    for path in ROOT.glob(pattern)
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env bash")
)


def tool(name):
    return shutil.which(name, path=PATH) or pytest.skip(f"no {name} here")


@pytest.mark.parametrize("path", [*SCRIPTS, *DOCKERFILES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lint(path):
    assert path in DOCKERFILES or os.access(path, os.X_OK)
    linter = [tool("hadolint")] if path in DOCKERFILES else [tool("shellcheck"), "-x"]  # -x: what a script reads, too
    done = commands.run(*linter, path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile(path):
    """It does not run as root, holds no host keys, and its arguments are those of docker/README.md."""
    text, readme = path.read_text(), (DOCKER / "README.md").read_text()
    assert text.rindex("\nUSER ${UID}\n") > text.rindex("\nRUN ") and "/etc/ssh/ssh_host_*" in text
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    assert {*re.findall(r"--build-arg\s+(\w+)=", readme)} == {*arguments} and f"`{arguments['BASE']}`" in readme


def test_named_files_exist():
    pages = [*DOCKERFILES, DOCKER / "README.md", ROOT / "recipes" / "README.md"]
    text = "".join(page.read_text() for page in pages)
    named = {*re.findall(r"\b(?:docker|recipes|scripts|examples|tests)/[\w./-]*\w", text)}
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_file_of_the_repository_is_in_the_context_of_an_image():
    commands.checked_in()  # or skip
    ignored = commands.run("git", "ls-files", "--cached", "--ignored", "--exclude-from=.dockerignore", cwd=ROOT)
    assert (ignored.returncode, ignored.stdout) == (0, "")
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "build", "keys", "**/*.so"} <= {*patterns}, "private, large or built"


def test_compose_starts_a_job_on_its_nodes():
    services = pytest.importorskip("yaml").safe_load((DOCKER / "compose.yaml").read_text())["services"]
    nodes, command = services["job"]["depends_on"], services["job"]["command"]
    assert all(services[node]["command"] == ["sshd"] for node in nodes)
    assert command[command.index("-H") + 1] == ",".join(f"{node}:1" for node in nodes)
    assert int(command[command.index("-np") + 1]) == len(nodes)
    assert (ROOT / command[command.index("python") + 1]).is_file()


# The entrypoint


@pytest.fixture
def home(tmp_path):
    """A user's home and an empty folder for keys, as the environment that names both."""
    tool("ssh-keygen")
    return new_home(tmp_path / "user")


def new_home(folder):
    (folder / "keys").mkdir(parents=True)
    return {"PATH": PATH, "HOME": str(folder), "GRADZIP_KEYS": str(folder / "keys")}


def new_key(environment, phrase=""):
    key = Path(environment["GRADZIP_KEYS"]) / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", phrase, "-f", key], check=True)
    return key


def enter(environment, *command):
    return commands.run(DOCKER / "entrypoint.sh", *command, env=environment)


def test_command_runs_as_it_is(home):
    done = enter(home, "bash", "-c", 'echo "$#:$1"; exit 7', "bash", "two words")
    assert (done.returncode, done.stdout, done.stderr) == (7, "1:two words\n", "")


def test_nodes_that_start_together_have_one_key(home):
    """Every process makes a key, all but one lose, and none ever sees a part of one."""
    look = f'source {DOCKER}/entrypoint.sh; make_key; cat "$key"'
    nodes = [subprocess.Popen(["bash", "-c", look], env=home, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    keys = {node.communicate()[0] for node in nodes}
    assert [node.returncode for node in nodes] == [0] * 8
    assert len(keys) == 1 and "OPENSSH PRIVATE KEY" in keys.pop()
    (left,) = Path(home["GRADZIP_KEYS"]).iterdir()
    assert left.stat().st_mode & 0o777 == 0o600


def test_refusals(home):
    commands.check_refusal(enter(home), 1, "nothing to run")
    commands.check_refusal(enter(home, "sshd", "-p", "22"), 1, "sshd takes no arguments, got: -p 22")
    commands.check_refusal(enter(home | {"GRADZIP_KEYS": "/none"}, "sshd"), 1, "no key in /none")
    new_key(home, "a phrase")
    commands.check_refusal(enter(home, "true"), 1, "is not a private key without passphrase")


@pytest.mark.parametrize(
    ("name", "warning"),
    [("127.0.1.1", "127.0.1.1, stands for 127"), ("x" * 64, "stands for no address"), ("192.0.2.1", "")],
)
def test_name_that_others_cannot_reach_is_a_warning(home, name, warning):
    done = commands.run("bash", "-c", f"source {DOCKER}/entrypoint.sh; check_name {name}", env=home)
    assert done.returncode == 0 and warning in done.stderr and bool(warning) == bool(done.stderr)


def test_horovodrun_refuses_a_host_without_an_address(tmp_path):
    """Horovod's ranks would end in a segmentation fault."""
    commands.executable(tmp_path / "uname", "#!/usr/bin/env bash\necho " + "x" * 64)  # longer than a name may be
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = commands.run(DOCKER / "bin" / "horovodrun", "-np", "1", "true", env={"PATH": path})
    commands.check_refusal(done, 1, f"this host's name, {'x' * 64}, has no address")


@pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="no sshd here")
def test_node_serves_who_has_the_key(home, tmp_path):
    home |= {"GRADZIP_SSH_PORT": str(commands.free_port())}
    new_key(home).chmod(0o644)  # as a mounted one may be; ssh would refuse it
    # A session has the node's PATH. The user's shell may put something before it, or take something out.
    own = {**home, "PATH": os.pathsep.join([PATH, str(tmp_path)])}
    node = subprocess.Popen([DOCKER / "entrypoint.sh", "sshd"], env=own, stderr=subprocess.PIPE, text=True)
    assert any("listening" in line for line in node.stderr)

    def ssh(environment, command):
        # It takes the home from the password file, so it is told where its files are.
        return commands.run("ssh", "-F", f"{environment['HOME']}/.ssh/config", "127.0.0.1", command, env=environment)

    try:
        answer = ssh(home, "printenv PATH")
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.rstrip().split(os.pathsep)[-1] == str(tmp_path)

        stranger = home | new_home(tmp_path / "stranger")
        new_key(stranger)
        assert enter(stranger, "true").returncode == 0
        answer = ssh(stranger, "true")
        assert answer.returncode == 255 and "Host key verification failed" in answer.stderr
        # Trusting the node does not make the node trust it.
        shutil.copy(f"{home['HOME']}/.ssh/known_hosts", f"{stranger['HOME']}/.ssh/known_hosts")
        answer = ssh(stranger, "true")
        assert answer.returncode == 255 and "Permission denied (publickey)" in answer.stderr
    finally:
        node.terminate()
        node.communicate(timeout=10)


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_packages_of_an_image_come_from_where_pip_has_them(tmp_path):
    """A build gets pip's configuration with its certificates and folders, and the torch of its kind."""
    commands.executable(
        tmp_path / "buildah",
        "#!/usr/bin/env bash\n"
        'for word; do [[ $word != *:/etc/xdg/pip:ro ]] || tail -n +1 "${word%%:*}"/*; done\n'
        '[[ $1 != bud ]] || printf "%s\\n" "$@"\n',
    )
    wheels, packages, certificates = (tmp_path / name for name in ("wheels", "packages", "certificates"))
    wheels.mkdir()
    (packages / "simple").mkdir(parents=True)
    certificates.write_text("A CERTIFICATE\n")
    own = {
        "PATH": os.pathsep.join([str(tmp_path), PATH]), "TMPDIR": str(tmp_path), "PIP_FIND_LINKS": str(wheels),
        "PIP_EXTRA_INDEX_URL": f"file://{packages}/simple", "PIP_CERT": str(certificates), "BASE": "a-base",
    }  # fmt: skip

    def build(kind):
        done = commands.run(ROOT / "scripts" / "build_image.sh", kind, env=own)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    plain = build("gpu")
    assert {"BASE=a-base", "gradzip:gpu", f"{packages}:{packages}:ro", f"{wheels}:{wheels}:ro"} <= {*plain}
    settings = {"cert = /etc/xdg/pip/cert.pem", "A CERTIFICATE", f"extra-index-url = file://{packages}/simple"}
    assert settings <= {*plain} and not any("TORCH_INDEX" in line for line in plain)
    (wheels / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    cpu, gpu = build("cpu"), build("gpu")
    assert {f"find-links = {wheels}", f"{wheels}:{wheels}:ro", "TORCH_INDEX=https://pypi.org/simple"} <= {*cpu}
    assert f"find-links = {wheels}" not in gpu and settings <= {*gpu}
    assert [path.name for path in tmp_path.glob("gradzip-image.*")] == []


@pytest.mark.long
def test_installed_package_is_whole(tmp_path):
    """`pip install .` installs every file of the package, and gradzip-test tests those, not the sources."""
    sources, site, files = tmp_path / "sources", tmp_path / "site", commands.checked_in()
    for path in files:
        (sources / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, sources / path)
    for objects in (ROOT / "build").glob(f"{sys.implementation.cache_tag}-*"):  # so that little is compiled
        shutil.copytree(objects, sources / "build" / objects.name)
    environment = {**os.environ, "PATH": PATH, "PYTHON": sys.executable}
    pip = "-m pip install --no-index --no-build-isolation --no-deps --disable-pip-version-check --target"
    done = commands.run(sys.executable, *pip.split(), site, sources, env=environment, timeout=None)
    assert done.returncode == 0, done.stdout + done.stderr
    package = {path for path in files if path.startswith("gradzip/")}
    installed = {path.relative_to(site).as_posix() for path in (site / "gradzip").rglob("*") if path.is_file()}
    assert package - installed == set()
    made = re.compile(r"_C.*\.so$|\.pyc$|methods/__init__\.pyi$")
    assert {path for path in installed - package if not made.search(path)} == set()

    def run(place):
        arguments = ["-q", "-p", "no:cacheprovider", "tests/tools/test_cli.py"]
        variables = environment | {"PYTHONPATH": str(place)}
        done = commands.run(sources / "scripts" / "test_installed.sh", *arguments, env=variables, timeout=None)
        return done.returncode, done.stdout + done.stderr

    status, output = run(site)
    assert status == 0 and output.startswith(f"test_installed: {site}/gradzip\n"), output
    (site / "gradzip" / "methods" / "spec.py").unlink()
    status, output = run(site)
    assert status != 0 and "gradzip.methods.spec" in output
    status, output = run(sources)
    assert status == 1 and f"gradzip is imported from the checkout, {sources}/gradzip" in output
