"""Images, built with buildah on a Debian of debootstrap's: two containers of each train together."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request

import pytest

import commands
from paths import ROOT

COVERS = [
    "docker/**/*", ".dockerignore", "scripts/build_image.sh", "scripts/two_containers.sh", "scripts/build_horovod.sh",
    "scripts/shaped_net.sh", "scripts/requirements.txt", "scripts/horovod.txt",
]  # fmt: skip
FREE = {"cpu": 15e9, "gpu": 35e9}  # bytes of disk, without overlays


@pytest.fixture
def environment(tmp_path):
    """Variables of a shell with an image store of its own, where images can be built. Skip the test elsewhere."""
    if os.geteuid():
        pytest.skip("not root")
    for tool in ("buildah", "debootstrap", "ip", "tc", "unshare", "hostname"):
        if not shutil.which(tool):
            pytest.skip(f"no {tool} here")
    if subprocess.run(["unshare", "--net", "--uts", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no network namespace may be made here")
    try:
        urllib.request.urlopen("http://deb.debian.org/debian/dists/bookworm/Release", timeout=20).close()
    except OSError as error:
        pytest.skip(f"no Debian packages here: {error}")
    if commands.run(sys.executable, "-m", "pip", "index", "versions", "horovod").returncode:
        pytest.skip("no package index here")
    store, driver = tmp_path / "store", commands.run("buildah", "info", "--format", "{{.store.GraphDriverName}}").stdout
    places = f'[storage]\ndriver = "{driver.strip()}"\ngraphroot = "{store}/root"\nrunroot = "{store}/run"\n'
    (tmp_path / "storage.conf").write_text(places)
    environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(tmp_path / "storage.conf"), "TMPDIR": str(tmp_path)}
    yield environment
    subprocess.run(["buildah", "rm", "--all"], env=environment, check=True)
    subprocess.run(["buildah", "rmi", "--all", "--force"], env=environment, check=True)
    shutil.rmtree(store)


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("kind", FREE)
def test_two_containers_train(environment, tmp_path, kind, request):
    if kind == "gpu" and not request.config.facts["given"]:
        pytest.skip("gigabytes of downloads: --long and its path run it")
    free = shutil.disk_usage(tmp_path).free
    if free < FREE[kind]:
        pytest.skip(f"{free / 1e9:.0f} GB of disk here, an image takes {FREE[kind] / 1e9:.0f}")

    def run(*command, status=0):
        done = commands.run(*command, env=environment, cwd=ROOT, timeout=None)
        assert done.returncode == status, (done.stdout + done.stderr)[-8000:]
        return done

    run("scripts/build_image.sh", kind)
    image = f"localhost/gradzip:{kind}"
    container = run("buildah", "from", "--pull-never", image).stdout.strip()

    def enter(name, *command, status=0):
        return run(
            "buildah", "run", "--isolation", "chroot", "--hostname", name, container, "--", *command, status=status
        )

    info = json.loads(enter("localhost", "gradzip", "info", "--json").stdout)
    assert info["extension"]["path"].startswith("/opt/venv/")
    assert info["horovod"]["backends"] == {"gloo": True, "nccl": kind == "gpu", "mpi": False}
    assert info["cuda"]["built"] == (kind == "gpu") and bool(info["torch"]["cuda"]) == (kind == "gpu")
    if kind == "gpu":
        assert info["cuda"]["nvrtc"]["version"] and info["cuda"]["devices"] == []
    imported = "import gradzip, torch; gradzip.roundtrip(gradzip.TopK(), torch.randn(64, 64))"
    hidden = enter("localhost", "sh", "-c", f"cd /opt/gradzip && python -c '{imported}'", status=1).stderr
    assert "the sources in /opt/gradzip hide the gradzip that is installed in /opt/venv/" in hidden
    assert "x, has no address" in enter("x" * 64, "horovodrun", "-np", "2", "true", status=1).stderr

    methods = ["--compression", "none", "--compression", "fft-range:theta=0.85,bits=10"]
    output = run("scripts/two_containers.sh", image, "--steps", "20", *methods).stdout
    assert re.search(r"replicas identical +yes +yes", output), output
    (ratio,) = re.findall(r"\bratio +1\.0 +([\d.]+)", output)
    assert float(ratio) > 10
