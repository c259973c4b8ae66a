"""What `make wheel` builds: an sdist with everything that tests and builds need, and a wheel that needs no compiler."""

import os
import re
import shutil
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import commands
import gradzip
from paths import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # it compiles everything
# Of a clone alone: what git, CI and editors read.
LEFT_OUT = {".ci/run", ".clang-format", ".github/workflows/test.yml", ".gitignore", ".pre-commit-config.yaml"}

TRAINING = """
import os, torch, torch.distributed as dist, gradzip
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(200, 30))
gradzip.ddp.register(model, gradzip.parse(METHOD))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 200)).square().mean().backward()
    optimizer.step()
both = [torch.empty(30, 200) for _ in range(2)]
dist.all_gather(both, model.module.weight.detach())
assert both[0].equal(both[1]) and both[0].isfinite().all()
dist.destroy_process_group()
os._exit(0)  # now: a torch thread that frees a Python object during shutdown aborts the process
"""


def succeed(*command, **options):
    done = commands.run(*command, timeout=850, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder that `make wheel` fills, from a copy of what git has."""
    files, clone = commands.checked_in(), tmp_path_factory.mktemp("wheel") / "clone"
    for path in files:
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, clone / path)
    # Half of the time of a compiler is for optimizations, with which bootstrap.sh has built the same files.
    variables = {"PYTHON": sys.executable, "CXXFLAGS": "-O0"}
    succeed(clone / "scripts" / "build_wheel.sh", env={**os.environ, **variables})
    return clone / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    (found,) = dist.glob("*.whl")
    return found


def test_sdist_has_every_file(dist, tmp_path):
    (archive,) = dist.glob("*.tar.gz")
    name = f"gradzip-{gradzip.__version__}"
    assert archive.name == f"{name}.tar.gz"
    with tarfile.open(archive) as opened:
        packed = {member.name.removeprefix(f"{name}/") for member in opened if member.isfile()}
    assert set(commands.checked_in()) - packed == LEFT_OUT
    made = packed - set(commands.checked_in())
    assert {path for path in made if not path.startswith("gradzip.egg-info/")} == {"PKG-INFO", "setup.cfg"}


def test_wheel_has_the_package_alone(wheel):
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"gradzip-{gradzip.__version__}-{python}-{python}-manylinux.*\.whl", wheel.name)
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not re.search(r"\.dist-info/|/$", name)}
    ours = {
        path
        for path in commands.checked_in()
        if re.match(r"gradzip/.*(\.pyi?|py\.typed|(studies|devices)\.json)$", path)
    }
    built = {name for name in packed if re.fullmatch(r"gradzip/_C\.[\w-]*\.so", name)}
    assert len(built) == 1 and packed == ours | built | {"gradzip/methods/__init__.pyi"}


def needed(name, found):
    """Add a distribution, and all that it needs, to those that are found, by name."""
    if name not in found:
        found[name] = metadata.distribution(name)
        for requirement in map(Requirement, found[name].requires or ()):
            if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name, found)


def test_wheel_needs_no_compiler(wheel, tmp_path):
    """In an environment with nothing but torch and NumPy, and nothing else on PATH, two processes train."""
    clean = tmp_path / "clean"
    succeed(sys.executable, "-m", "venv", "--without-pip", clean)
    (site,) = clean.glob("lib/python*/site-packages")
    found = {}
    for name in ("torch", "numpy"):
        needed(name, found)
    for distribution in found.values():  # links: to install torch takes a minute
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__", *os.listdir(site)}:
            (site / top).symlink_to(distribution.locate_file(top))
    # Without an index: all that the wheel asks for is there.
    pip = [sys.executable, "-m", "pip", "--python", clean / "bin" / "python"]
    succeed(*pip, "install", "-q", "--no-compile", "--no-index", wheel)
    kept = {name: value for name, value in os.environ.items() if not re.match("PYTHON|CXX|CC$|CUDA|VIRTUAL_ENV", name)}
    options = {"cwd": tmp_path, "env": {**kept, "PATH": str(clean / "bin"), "HOME": str(tmp_path)}}
    assert not shutil.which("g++", path=options["env"]["PATH"])
    assert gradzip.__version__ in succeed(clean / "bin" / "gradzip", "--version", **options)
    where = succeed(clean / "bin" / "python", "-c", "from gradzip import _C; print(_C.__file__)", **options)
    assert Path(where.strip()).is_relative_to(clean)
    script = tmp_path / "train.py"
    for method in ("fft-range", "block-float"):
        script.write_text(TRAINING.replace("METHOD", repr(method)))
        torchrun = [clean / "bin" / "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        succeed(*torchrun, script, **options)
