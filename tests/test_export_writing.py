"""A file is whole at every moment: failures at any step, and a writer that is killed."""

import errno
import os
import random
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pca_torch.conversion import convert
from pca_torch.export import load, save
from pca_torch.moments import Moments
from pca_torch.statistic_file import save_statistics
from tests.test_layout import assert_same, result

ROOT = Path(__file__).parents[1]


def test_a_file_has_the_permissions_of_any_new_file(tmp_path):
    old = os.umask(0o027)
    try:
        save(tmp_path / "b", {"s": result()})
    finally:
        os.umask(old)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o640


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no folder; make it first"):
        save(tmp_path / "no" / "b", {"s": result()})
    with pytest.raises(OSError, match="directory"):
        save(tmp_path, {"s": result()})
    assert list(tmp_path.iterdir()) == []


WRITERS = {
    "basis": lambda source, out: save(out, {"s": result(d=60)}),
    "statistics": lambda source, out: save_statistics(out, {"s": Moments(60).update(torch.eye(60))}),
    "columns": lambda source, out: convert(source, out, layout="columns"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_named_and_leaves_the_old_file_and_no_other(tmp_path, writer):
    source, out = tmp_path / "basis.safetensors", tmp_path / "out" / "b"
    save(source, {"s": result(d=60)})
    out.parent.mkdir()
    save(out, {"s": result()}, {"old": True})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"{out} could not be written: File too large") as caught:
            WRITERS[writer](source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert list(out.parent.iterdir()) == [out]
    assert load(out).metadata == {"old": True}


@pytest.mark.parametrize("step", ["pca_torch._safetensors.as_bytes", "os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_at_any_step_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, step, error):
    save(tmp_path / "b", {"s": result()}, {"old": True})
    before = (tmp_path / "b").read_bytes()

    def fail(*_, **__):
        raise error("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(step, fail)
        with pytest.raises(error, match="stopped"):
            save(tmp_path / "b", {"s": result(seed=1)})
    assert list(tmp_path.iterdir()) == [tmp_path / "b"]
    assert (tmp_path / "b").read_bytes() == before


def save_until_killed(path: Path, kills: int) -> None:
    """Fork a child that saves version after version, kill it at a random moment, and read: `kills` times."""
    torch.set_num_threads(1)  # a fork of a process with a pool of threads would wait for them
    rng = random.Random(0)
    wide = [replace(result(d=400), mean=torch.full((400,), float(i)).double()) for i in range(4)]
    versions = [{f"site {s}": wide[i] for s in range(30)} for i in range(4)]
    save(path, versions[0], {"version": 0})
    for _ in range(kills):
        child = os.fork()
        while not child:
            for i in range(4):
                save(path, versions[i], {"version": i})
        time.sleep(rng.uniform(0.02, 0.1))
        os.kill(child, 9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
        file = load(path)
        assert list(file) == list(versions[0])
        for got in file.values():
            assert_same(got, wide[file.metadata["version"]])


def test_a_kill_at_any_moment_leaves_one_whole_version(tmp_path):
    code = "import sys, tests.test_export_writing as w; w.save_until_killed(w.Path(sys.argv[1]), kills=12)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], cwd=ROOT, timeout=120, check=True)
