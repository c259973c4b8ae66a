"""The images of docker/, as far as that goes without an engine: what they copy and run is there and passes lint.

Each check is tried on a Dockerfile that is wrong, too.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu"]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# Where the images have the repository.
HOME = "/opt/gradzip"


def tool(name):
    return shutil.which(name, path=PATH) or pytest.skip(f"no {name} here")


def instructions(text):
    """(keyword, arguments) of each instruction of a Dockerfile."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0].upper(), line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def ignored(path, patterns):
    """Whether a .dockerignore leaves out a file of the context: the last pattern that fits it, or a parent, counts."""
    out = False
    for pattern in patterns:
        regex = re.escape(pattern.lstrip("!").strip("/"))
        regex = regex.replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
        if re.fullmatch(f"{regex}(?:/.*)?", path):
            out = not pattern.startswith("!")
    return out


PATTERNS = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


def context():
    """The files that `COPY . .` copies."""
    for place, folders, files in os.walk(ROOT):
        paths = {name: (Path(place) / name).relative_to(ROOT).as_posix() for name in folders + files}
        folders[:] = [name for name in folders if not ignored(paths[name], PATTERNS)]
        yield from (paths[name] for name in files if not ignored(paths[name], PATTERNS))


def faults(text):
    """What is wrong with a Dockerfile that its linter does not know: about this repository, or about base and user."""
    users, arguments = [], {}
    for keyword, rest in instructions(text):
        if keyword == "ARG" and "=" in rest:
            name, _, value = rest.partition("=")
            arguments[name] = value
        elif keyword == "FROM":
            base = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], rest)
            if not re.fullmatch(r"\S+:(?!latest\b)\S*\d\S*", base) and not base.endswith("-slim"):
                yield f"base {base} is not one release"
        elif keyword == "COPY":
            *sources, _ = [word for word in shlex.split(rest) if not word.startswith("--")]
            for source in sources:
                if ignored(source, PATTERNS):
                    yield f"copies {source}, which .dockerignore leaves out"
                elif not (ROOT / source).exists():
                    yield f"copies {source}, which is not there"
        elif keyword == "USER":
            users.append(rest)
        elif keyword == "RUN":
            for what, place in (("apt-get update", "/var/lib/apt/lists/*"), ("openssh-server", "/etc/ssh/ssh_host_*")):
                if what in rest and not re.search(rf"rm [^&]*{re.escape(place)}", rest):
                    yield f"keeps {place}"
            for script in re.findall(rf"(?:{HOME}/|\s)((?:scripts|docker)/[\w.-]+\.sh)", " " + rest):
                if not os.access(ROOT / script, os.X_OK):
                    yield f"runs {script}, which is not there or not executable"
    if not users or users[-1] in ("root", "0"):
        yield "runs as root"


def lint(text):
    """What hadolint finds, as {rule}."""
    done = subprocess.run(
        [tool("hadolint"), "--no-color", "--format", "tty", "-"], input=text, capture_output=True, text=True
    )
    assert not done.stderr, done.stderr
    return set(re.findall(r"\b(?:DL|SC)\d{4}\b", done.stdout))


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def dockerfile(request):
    return request.param.read_text()


def test_dockerfiles(dockerfile):
    assert list(faults(dockerfile)) == []


def test_dockerfiles_pass_lint(dockerfile):
    assert lint(dockerfile) == set()


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("BASE=debian:bookworm-slim", "BASE=debian", "base debian is not one release"),
        ("BASE=debian:bookworm-slim", "BASE=debian:latest", "base debian:latest is not one release"),
        ("COPY . .", "COPY docker/nonesuch .", "copies docker/nonesuch, which is not there"),
        ("COPY . .", "COPY docker build .", "copies build, which .dockerignore leaves out"),
        ("RUN scripts/build_horovod.sh", "RUN scripts/nonesuch.sh", "runs scripts/nonesuch.sh, which is not there or"),
        (
            f"-s {HOME}/docker/entrypoint.sh",
            f"-s {HOME}/docker/start.sh",
            "runs docker/start.sh, which is not there or",
        ),
        (" /var/lib/apt/lists/*", "", "keeps /var/lib/apt/lists/*"),
        (" /etc/ssh/ssh_host_*", "", "keeps /etc/ssh/ssh_host_*"),
        ("USER ${UID}", "USER root", "runs as root"),
        ("USER ${UID}", "", "runs as root"),
    ],
)
def test_faults_are_found(right, wrong, fault):
    text = (DOCKER / "Dockerfile.cpu").read_text()
    assert right in text
    found = list(faults(text.replace(right, wrong)))
    assert len(found) == 1 and found[0].startswith(fault), found


@pytest.mark.parametrize(
    ("right", "wrong", "rule"),
    [
        ("FROM ${BASE}", "FROM debian", "DL3006"),
        ("FROM ${BASE}", "FROM debian:latest", "DL3007"),
        (" --no-install-recommends", "", "DL3015"),
        ("install -y", "install", "DL3014"),
        ("# hadolint ignore=DL3008\n", "", "DL3008"),
        ("rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*", "true", "DL3009"),
        ("WORKDIR /workspace", "WORKDIR workspace", "DL3000"),
        ("WORKDIR /workspace", "RUN cd /workspace", "DL3003"),
        ("COPY . .", "ADD scripts scripts", "DL3020"),
        ("USER ${UID}", "USER root", "DL3002"),
        ("SHELL [", "ENV A=b\nRUN date | wc\nSHELL [", "DL4006"),
        ('CMD ["gradzip", "info"]', "CMD gradzip info", "DL3025"),
        ('ENTRYPOINT ["gradzip-entrypoint"]', "ENTRYPOINT gradzip-entrypoint", "DL3025"),
        (" --no-cache-dir", "", "DL3042"),
    ],
)
def test_lint_finds(right, wrong, rule):
    text = (DOCKER / "Dockerfile.cpu").read_text()
    assert right in text
    assert rule in lint(text.replace(right, wrong))


def test_ignored():
    assert ignored("build/x.o", ["build"])
    assert not ignored("rebuild", ["build"])
    assert not ignored("docs/build/x", ["build"])
    assert ignored("a/b/x.so", ["**/*.so"]) and ignored("x.so", ["**/*.so"])
    assert not ignored("a/b.so.txt", ["**/*.so"])
    assert not ignored("keys/id", ["keys", "!keys/id"])


def test_context_is_what_is_under_version_control():
    """Nothing private, large or built gets into an image, and nothing that it needs stays out."""
    listed = subprocess.run([tool("git"), "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone")
    tracked = {path for path in listed.stdout.splitlines() if (ROOT / path).exists()}
    assert not {path for path in tracked if ignored(path, PATTERNS)}
    private = ["keys/id_ed25519", ".git/config", ".venv/bin/python", "build/simt/x", "gradzip/_C.so", "a/__pycache__/b"]
    assert not [path for path in private if not ignored(path, PATTERNS)]


SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *DOCKER.glob("*.sh"), *ROOT.glob(".ci/run")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run([tool("shellcheck"), script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_compose():
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"node1", "node2", "job"}
    for service in services.values():
        place = (DOCKER / service["build"]["context"]).resolve()
        assert place == ROOT
        assert (place / service["build"]["dockerfile"]) in DOCKERFILES
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service["volumes"]:
            assert volume.partition(":")[0] in compose["volumes"]
    for name in services["job"]["depends_on"]:
        assert services[name]["command"] == ["sshd"]
        assert services[name]["healthcheck"]["test"][-1].endswith("/2222")

    command = services["job"]["command"]
    ranks = dict(host.split(":") for host in command[command.index("-H") + 1].split(","))
    assert set(ranks) == set(services["job"]["depends_on"])
    assert int(command[command.index("-np") + 1]) == sum(map(int, ranks.values()))
    assert (ROOT / command[command.index("python") + 1]).is_file()


def test_one_port(dockerfile):
    assert ("EXPOSE", "2222") in instructions(dockerfile)
    assert "GRADZIP_SSH_PORT:-2222" in (DOCKER / "entrypoint.sh").read_text()


def test_readme(dockerfile):
    """What docker/README.md names is there."""
    text = (DOCKER / "README.md").read_text()
    paths = set(re.findall(r"\b(?:docker|scripts|examples|tests)/[\w./-]*\w", text))
    assert {"docker/Dockerfile", "docker/compose.yaml", "examples/train.py", "scripts/build_horovod.sh"} <= paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    arguments = dict(rest.partition("=")[::2] for keyword, rest in instructions(dockerfile) if keyword == "ARG")
    assert set(re.findall(r"--build-arg\s+(\w+)=", text)) | {"UID"} == set(arguments)
    assert f"`{arguments['BASE']}`" in text
    for command in ("gradzip-entrypoint", "gradzip-test"):
        assert f"/usr/local/bin/{command}" in dockerfile


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


def test_installed_package_is_whole(tmp_path):
    """`pip install .`, as in the images, installs every file of the package; the tests use those, not the sources."""
    if not (ROOT / "gradzip").is_dir():
        pytest.skip("the sources of the package are not here")
    sources = tmp_path / "sources"
    for path in context():
        (sources / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, sources / path)
    for variant in ("cpu", "cuda"):  # compiled again only where they are out of date
        objects = f"build/{sys.implementation.cache_tag}-{variant}"
        if (ROOT / objects).is_dir():
            shutil.copytree(ROOT / objects, sources / objects)
    site = tmp_path / "site"
    environment = {**os.environ, "PATH": PATH, "PYTHON": sys.executable}
    pip = "-m pip install --no-index --no-build-isolation --no-deps --disable-pip-version-check --target"
    subprocess.run([sys.executable, *pip.split(), site, sources], env=environment, check=True, capture_output=True)

    package = {path for path in context() if path.startswith("gradzip/")}
    installed = {path.relative_to(site).as_posix() for path in (site / "gradzip").rglob("*") if path.is_file()}
    assert package - installed == set()
    assert [path for path in installed - package if not re.search(r"_C.*\.so$|\.pyc$", path)] == []

    environment["PYTHONPATH"] = str(site)
    command = [sources / "scripts" / "test_installed.sh", "-q", "-p", "no:cacheprovider", "tests/test_cli.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"test_installed: {site}/gradzip\n")

    (site / "gradzip" / "methods" / "topk.py").unlink()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "gradzip.methods.topk" in done.stdout + done.stderr

    environment["PYTHONPATH"] = str(sources)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"gradzip is imported from the checkout, {sources}/gradzip" in done.stderr
