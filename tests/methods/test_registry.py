"""Registration: by a decorator, and by an entry point of another package."""

import subprocess
import sys
from dataclasses import dataclass

import pytest

import gradzip
from gradzip.methods.base.registry import REGISTRY, register, registered


@pytest.fixture
def restored():
    """The registry as it was before the test."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def test_a_registered_method_is_found_by_name(restored):
    @register("mine", number=250, examples=["majority=False", ""])
    @dataclass
    class Mine(gradzip.SignSGD):
        pass

    assert gradzip.parse("mine:error_feedback=False") == Mine(error_feedback=False)
    assert registered()["mine"] is Mine and Mine.number == 250 and Mine.examples == ("mine:majority=False", "mine")
    assert gradzip.SignSGD.number == 18  # the base class keeps its own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "topk", "number": 250}, r"register\('topk'\): got Mine, expected another name: TopK has this one"),
        ({"name": "mine", "number": 2}, r"got Mine with number = 2, expected another one: TopK has it"),
        ({"name": "mine", "number": 256}, r"got Mine with number = 256, expected an integer from 1 to 255"),
        ({"name": "mine"}, r"got Mine, whose payloads need a number, expected register\('mine', number=1 to 255\)"),
    ],
)
def test_conflicts_are_refused(restored, arguments, message):
    class Mine(gradzip.SignSGD):
        pass

    with pytest.raises(ValueError, match=message):
        register(**arguments)(Mine)
    assert "mine" not in REGISTRY and REGISTRY["topk"] is gradzip.TopK


def test_a_class_of_the_same_name_replaces_no_method(restored):
    same_name = type("TopK", (gradzip.SignSGD,), {})
    assert same_name.__qualname__ == gradzip.TopK.__qualname__
    with pytest.raises(ValueError, match="expected another name: TopK has this one"):
        register("topk", number=2)(same_name)


def test_public_classes_are_those_registered():
    assert {method.__name__ for method in REGISTRY.values()} <= {*gradzip.__all__}
    assert all(getattr(gradzip, method.__name__) is method for method in REGISTRY.values())


def test_another_package_registers_by_an_entry_point(tmp_path):
    """An installed distribution, as pip leaves it: a module, and its metadata."""
    (tmp_path / "halves.py").write_text(
        "from dataclasses import dataclass\n"
        "import gradzip\n"
        "@gradzip.register('halves')\n"
        "@dataclass\n"
        "class Halves(gradzip.Cast):\n"
        "    '''Averages half of it.'''\n"
    )
    metadata = tmp_path / "halves-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: halves\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[gradzip.methods]\nhalves = halves\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import gradzip\n"
        "assert 'halves' not in sys.modules\n"  # importing gradzip imports no other package's methods
        "print(gradzip.parse('halves:min_numel=7'))\n"
        "sys.path.insert(0, 'tests/support'); import kinds; print('halves' in kinds.ALL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "Halves(min_numel=7, dtype=torch.float16)\nTrue\n", done.stderr


def test_a_broken_entry_point_is_named_and_hides_no_other_method(tmp_path):
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[gradzip.methods]\nbroken = no_such_module\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import gradzip; print(gradzip.parse('none'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "NoCompression(min_numel=1024)\n", done.stderr
    assert "methods of the entry point broken = no_such_module cannot be imported (ModuleNotFoundError" in done.stderr
