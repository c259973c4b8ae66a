"""Records of earlier runs: what a test of tooling covers decides whether it runs again."""

import pytest

import records


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADZIP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tests.json"


def test_a_run_updates_its_tests_only(file):
    assert records.load() == {"seconds": {}, "passed": {}}
    records.save({"a": 2.04, "b": 30.0, "c": 0.1}, {"a": "digest of a", "b": "digest of b"})
    records.save({"b": 0.2, "d": 7.0}, {"b": None})
    assert records.load() == {"seconds": {"a": 2.0, "d": 7.0}, "passed": {"a": "digest of a"}}
    file.write_text("damaged")
    assert records.load() == {"seconds": {}, "passed": {}}


def test_digest_depends_on_names_and_contents(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tmp_path)
    test, script, other = (tmp_path / name for name in ("test_x.py", "x.sh", "y.sh"))

    def digest(*covered):
        records.digest.cache_clear()
        return records.digest(test, *covered)

    test.write_text("1")
    script.write_text("2")
    digests = [digest("x.sh"), digest("*.sh")]
    assert digests[0] == digests[1], "the same files"
    script.write_text("3")
    digests.append(digest("*.sh"))
    other.write_text("4")
    digests.append(digest("*.sh"))
    test.write_text("5")
    digests.append(digest("*.sh"))
    assert len({*digests}) == 4
    with pytest.raises(ValueError, match="COVERS has 'z.sh', which matches no file"):
        digest("z.sh")
