"""What `make wheel` builds: an sdist with everything that tests and builds need."""

import shutil
import sys
import tarfile

import pytest

import commands
import gradzip
from paths import ROOT

pytestmark = pytest.mark.long
# Of a clone alone: what git, CI and editors read.
LEFT_OUT = {".ci/run", ".clang-format", ".gitignore", ".pre-commit-config.yaml"}


def python(*arguments, **options):
    done = commands.run(sys.executable, *arguments, timeout=250, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The sdist, unpacked."""
    files, folder = commands.checked_in(), tmp_path_factory.mktemp("sdist")
    clone = folder / "clone"
    for path in files:
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, clone / path)
    build = "from setuptools.build_meta import build_sdist; import sys; build_sdist(sys.argv[1])"
    python("-c", build, folder, cwd=clone)
    (archive,) = folder.glob("*.tar.gz")
    assert archive.name == f"gradzip-{gradzip.__version__}.tar.gz"
    with tarfile.open(archive) as opened:
        opened.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder / archive.name.removesuffix(".tar.gz")


def test_sdist_has_every_file(sources):
    packed = {path.relative_to(sources).as_posix() for path in sources.rglob("*") if path.is_file()}
    assert set(commands.checked_in()) - packed == LEFT_OUT
    made = packed - set(commands.checked_in())
    assert {path for path in made if not path.startswith("gradzip.egg-info/")} == {"PKG-INFO", "setup.cfg"}
