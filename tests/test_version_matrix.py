"""What a version of transformers lacks, and what its tests come to: without installing anything."""

import importlib.machinery
import importlib.util
from importlib import metadata

import pytest

from tests.support import HERE

LOADER = importlib.machinery.SourceFileLoader(
    "version_matrix", str(HERE.parent / "scripts" / "version_matrix")
)


@pytest.fixture
def matrix():
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(LOADER.name, LOADER))
    LOADER.exec_module(module)
    return module


def distribution(folder, name, version, *requires):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {text}" for text in requires)]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))


def test_lacking_is_what_neither_the_folder_nor_the_environment_has(matrix, tmp_path):
    have = metadata.version("numpy")
    wants = ["numpy>=1", f"numpy!={have}", "tiny<2", "tiny>=2", "absent-a>=3", 'absent-b; extra == "dev"']
    distribution(tmp_path, "transformers", "1.0", *wants)
    distribution(tmp_path, "tiny", "1.5")
    assert sorted(matrix.lacking(tmp_path)) == ["absent-a>=3", f"numpy!={have}", "tiny>=2"]


def test_the_folder_comes_before_the_environment(matrix, tmp_path):
    distribution(tmp_path, "numpy", "0.1")
    assert matrix.version_of("numpy", tmp_path, *matrix.sys.path) == "0.1"
    assert matrix.version_of("numpy", tmp_path / "other", *matrix.sys.path) == metadata.version("numpy")


def test_another_torch_is_never_installed(matrix, tmp_path):
    distribution(tmp_path, "transformers", "1.0", "torch<1")
    with pytest.raises(SystemExit, match=r"transformers 1\.0 requires torch<1; leave this version out"):
        matrix.install("1.0", tmp_path)


def test_what_runs_is_the_version_asked_for(matrix, tmp_path):
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.9'\n")
    (tmp_path / "pytest.py").write_text("")  # runs and leaves no report
    with pytest.raises(SystemExit, match=r"transformers 1\.0 does not import here: 0\.9"):
        matrix.run("1.0", tmp_path)
    with pytest.raises(SystemExit, match=r"pytest left no report on transformers 0\.9"):
        matrix.run("0.9", tmp_path)


@pytest.mark.parametrize(("broken", "code"), [(False, 0), (True, 1)])
def test_the_table(matrix, tmp_path, monkeypatch, capsys, broken, code):
    def pretend(folder, *words):
        report = next((word.partition("=")[2] for word in words if word.startswith("--junitxml=")), None)
        if report is None:
            return matrix.subprocess.CompletedProcess(words, 0, "1.0\n", "")
        with open(report, "w") as file:
            file.write(f'<r><testsuite tests="9" failures="{broken:d}" errors="{broken:d}" skipped="2"/></r>')
        return matrix.subprocess.CompletedProcess(words, int(broken), "what pytest says", "")

    distribution(tmp_path / "1.0", "transformers", "1.0")
    monkeypatch.setattr(matrix, "python", pretend)
    monkeypatch.setattr(matrix.sys, "argv", ["version_matrix", "1.0", "--folder", str(tmp_path)])
    assert matrix.main() == code
    out = capsys.readouterr().out
    passed, failed, skipped, _ = out.splitlines()[-1].split()[-4:]
    assert (passed, failed, skipped) == (("5", "2", "2") if broken else ("7", "0", "2"))
    assert ("what pytest says" in out) == broken
