"""The scripts of docs/integrations.md run, on two processes."""

import re
import subprocess

import pytest

import integrations
from integrations import needs_integrations
from launch import assert_done, environment
from paths import ROOT

pytestmark = [needs_integrations, pytest.mark.long, pytest.mark.timeout(600)]

PAGE = (ROOT / "docs" / "integrations.md").read_text()
# A torch thread that frees a Python object during shutdown aborts the process, if it ends within 5 ms of a collective.
END = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"


def blocks(title, language):
    """The code of a section, without those below it."""
    section = re.split(r"^##+ ", PAGE.partition(f"# {title}\n")[2], flags=re.MULTILINE)[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("title", "printed"),
    [
        ("Accelerate", "Traffic(bytes_sent="),
        ("Local steps", "\n3\n"),
        ("Transformers", "'train_runtime'"),
        ("Local steps of a Trainer", "'train_runtime'"),
    ],
)
def test_scripts_run(tmp_path, title, printed):
    (script,) = blocks(title, "python")
    (tmp_path / "train.py").write_text(script + END)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = subprocess.run(
        [*integrations.python(), *launch, "train.py"],
        cwd=tmp_path,
        env=environment(GLOO_SOCKET_IFNAME="lo"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert_done(job)
    assert printed in f"\n{job.stdout}"
    written = {path.name for path in tmp_path.rglob("gradzip_*.pt")}
    assert {re.sub(r"\w+_", "", name) for name in written} == {"0.pt", "1.pt"}
