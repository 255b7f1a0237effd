"""A run that is killed at any moment and resumed ends bit for bit as one that never stopped."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pca_torch._files import remove_stale_drafts, replacing
from pca_torch.checkpoint import Checkpoint
from pca_torch.head_moments import HeadMoments
from pca_torch.moments import Moments
from pca_torch.statistic_file import Statistic, load_statistics, save_statistics
from pca_torch.tokens import TokenViews

ROOT = Path(__file__).parents[1]
JOB = {"model": {"name": "seeded"}, "settings": {"seed": 0}}
BATCHES = 60


def batches(count: int = BATCHES, d: int = 160) -> Iterator[torch.Tensor]:
    """Seeded activations of many lengths, a few of which are extreme."""
    for i in range(count):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(1 + 97 * i % 700, d, generator=g) + 3
        yield x * torch.where(torch.rand(len(x), 1, generator=g) < 0.01, 40.0, 1.0)


def fresh(d: int = 160) -> dict[str, Statistic]:
    return {
        "layer": TokenViews(partial(Moments, d), max_held=100),
        "narrow": TokenViews(partial(Moments, d, precision="float32"), partial(Moments, d), max_held=100),
        "heads": TokenViews(partial(HeadMoments, 5, d // 5), max_held=100),
    }


def job(folder: Path, checkpoint: Checkpoint | None, count: int = BATCHES, d: int = 160) -> None:
    """Stream all batches through three sites and write their statistics."""
    statistics, seen = fresh(d), {"rows": 0}
    left = batches(count, d)
    if checkpoint is not None:
        statistics = checkpoint.load() or statistics
        seen |= checkpoint.progress
        left = checkpoint.remaining(left)
    for x in left:
        for statistic in statistics.values():
            statistic.update(x)
        seen["rows"] += len(x)
        if checkpoint is not None:
            checkpoint.tick(statistics, seen)
    save_statistics(folder / "final", statistics, {"tokens": seen})


@pytest.mark.parametrize("stop", [1, 2, 5, 8])
def test_a_resumed_run_ends_as_one_that_never_stopped(tmp_path, stop):
    (tmp_path / "once").mkdir()
    job(tmp_path / "once", None, 8)
    path = tmp_path / "checkpoint"

    def interrupted(checkpoint):
        statistics = fresh()
        for i, x in enumerate(checkpoint.remaining(batches(8))):
            for statistic in statistics.values():
                statistic.update(x)
            checkpoint.tick(statistics, {"rows": sum(map(len, batches(i + 1)))})
            if i + 1 == stop:
                return

    interrupted(Checkpoint(path, JOB, every_batches=1))
    resumed = Checkpoint(path, JOB, every_batches=1)
    job(tmp_path, resumed, 8)
    assert (tmp_path / "final").read_bytes() == (tmp_path / "once" / "final").read_bytes()
    assert resumed.done == 8


def test_only_what_was_not_counted_is_counted(tmp_path):
    checkpoint = Checkpoint(tmp_path / "c", JOB, every_batches=1)
    assert checkpoint.load() == {}
    moments = Moments(2)
    for x in checkpoint.remaining([torch.ones(1, 2), torch.ones(2, 2)]):
        checkpoint.tick({"s": moments.update(x)})
    again = Checkpoint(tmp_path / "c", JOB)
    loaded = again.load()
    assert loaded["s"].n_samples == 3
    assert [len(x) for x in again.remaining([torch.ones(n, 2) for n in (1, 2, 3, 4)])] == [3, 4]


def written_at(checkpoint: Checkpoint, times: list[float], patch: pytest.MonkeyPatch) -> list[float]:
    """Which of the batches that end at these times write a file."""
    statistics: dict[str, Statistic] = {"s": Moments(2)}
    written = []
    for now in times:
        patch.setattr(time, "monotonic", lambda now=now: now)
        if checkpoint.tick(statistics):
            written.append(now)
    return written


@pytest.mark.parametrize(
    ("intervals", "times", "written"),
    [
        ({"every_batches": 3, "every_seconds": None}, [1, 2, 30, 400, 5000, 6000, 7000], [30, 6000]),
        ({"every_seconds": 0}, [0, 0, 1], [0, 0, 1]),
        ({"every_seconds": 10}, [1, 9, 10, 11, 19.5, 20, 45, 46], [10, 20, 45]),
        ({"every_batches": 2, "every_seconds": 10}, [1, 12, 13, 14, 23.5, 24.5], [12, 14, 24.5]),
        ({"every_batches": None, "every_seconds": None}, [1, 1e9], []),
    ],
)
def test_the_intervals_are_kept(tmp_path, monkeypatch, intervals, times, written):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    checkpoint = Checkpoint(tmp_path / "c", JOB, **intervals)
    assert written_at(checkpoint, times, monkeypatch) == written


def test_progress_comes_back_as_it_was_told(tmp_path):
    told = {"tokens": {"seen": 3, "excluded": {"padding": 1}}, "share": 0.1}
    checkpoint = Checkpoint(tmp_path / "c", JOB)
    checkpoint.done = 5
    checkpoint.save({}, told)
    again = Checkpoint(tmp_path / "c", JOB)
    assert again.load() == {}  # no site has seen a token yet
    assert (again.done, again.progress) == (5, told)
    again.remove()
    again.remove()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("fingerprint", "message"),
    [
        ({"model": {"name": "other"}, "settings": {"seed": 0}}, "model.name was 'seeded', now it is 'other'"),
        (JOB | {"settings": {"seed": 0, "d": 3}}, "settings.d was 'nothing', now it is 3"),
        ({"model": JOB["model"]}, r"settings was \{'seed': 0\}, now it is 'nothing'"),
        ({"a": 1, "b": 2, "c": 3}, r"a was .*; b was .*; c was .*; …\. Run that one, or remove the file"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, fingerprint, message):
    Checkpoint(tmp_path / "c", JOB).save({"s": Moments(2)})
    before = (tmp_path / "c").read_bytes()
    with pytest.raises(ValueError, match=f"c: is of another run: {message}") as caught:
        Checkpoint(tmp_path / "c", fingerprint).load()
    assert "\n" not in str(caught.value)
    assert (tmp_path / "c").read_bytes() == before


def test_fewer_batches_than_were_counted_are_refused(tmp_path):
    checkpoint = Checkpoint(tmp_path / "c", JOB)
    checkpoint.done = 3
    checkpoint.save({"s": Moments(2)})
    again = Checkpoint(tmp_path / "c", JOB)
    again.load()
    with pytest.raises(ValueError, match="c: counted 3 batches, but there are 2; the data have changed"):
        list(again.remaining([1, 2]))


def test_a_checkpoint_is_no_statistic_file_and_none_is_a_checkpoint(tmp_path):
    Checkpoint(tmp_path / "c", JOB).save({"s": Moments(2)})
    with pytest.raises(ValueError, match="c: is not a pca_torch statistic"):
        load_statistics(tmp_path / "c")
    save_statistics(tmp_path / "s", {"s": Moments(2)})
    with pytest.raises(ValueError, match="s: is not a pca_torch checkpoint"):
        Checkpoint(tmp_path / "s", JOB).load()


@pytest.mark.parametrize("lie", [{"done": -1}, {"done": True}, {"done": "3"}, {"progress": 3}, {"more": 1}])
def test_a_checkpoint_that_lies_about_its_run_is_refused(tmp_path, lie):
    from tests.test_export_reading import body_of, join, split, with_body

    path = tmp_path / "c"
    Checkpoint(path, JOB).save({"s": Moments(2)})
    header, blob = split(path.read_bytes())
    body = body_of(header)
    body["metadata"] |= lie
    path.write_bytes(join(with_body(header, body), blob))
    with pytest.raises(
        ValueError, match="c: does not say how far its run had come; remove it and start anew"
    ):
        Checkpoint(path, JOB).load()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_batches": 0}, "`every_batches` must be a positive integer or None, got 0"),
        ({"every_batches": 1.5}, "`every_batches` must be a positive integer or None, got 1.5"),
        ({"every_seconds": -1}, "`every_seconds` must be a number ≥ 0 or None, got -1"),
        ({"every_seconds": "1"}, "`every_seconds` must be a number ≥ 0 or None, got '1'"),
    ],
)
def test_intervals_out_of_range_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path / "c", JOB, **options)
    with pytest.raises(TypeError, match=r"`fingerprint\['a'\]` must be dict, list, .* got tuple"):
        Checkpoint(tmp_path / "c", {"a": (1,)})


def test_a_statistic_that_an_interrupt_tore_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    moments = Moments(3).update(torch.randn(600, 3))
    checkpoint = Checkpoint(tmp_path / "c", JOB, every_batches=1)
    checkpoint.tick({"s": moments})
    before = (tmp_path / "c").read_bytes()

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("pca_torch.scatter.add_gram", interrupt)
        with pytest.raises(KeyboardInterrupt):
            moments.update(torch.randn(600, 3))
    with pytest.raises(RuntimeError, match="was interrupted while it counted rows"):
        checkpoint.tick({"s": moments})
    assert (tmp_path / "c").read_bytes() == before
    assert os.listdir(tmp_path) == ["c"]


# --- killed --------------------------------------------------------------------------------------------


def draft_of_a_killed_process(folder: Path) -> Path:
    """What a process leaves that is killed while it writes."""
    code = (  # without the package around it, which imports torch
        "import os, runpy, sys; replacing = runpy.run_path('pca_torch/_files.py')['replacing']\n"
        "with replacing(sys.argv[1]) as draft: draft.write_text('half'); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder / "x")], cwd=ROOT, timeout=120, check=False)
    assert done.returncode == -9
    (draft,) = folder.glob(".pca_torch-*.tmp")
    return draft


def test_drafts_of_killed_processes_are_removed_and_no_others(tmp_path):
    stale = draft_of_a_killed_process(tmp_path)
    elsewhere = stale.with_name(stale.name.replace(stale.name[11:19], "01234567"))
    others = [elsewhere, tmp_path / ".pca_torch-mine.tmp", tmp_path / "notes.tmp"]
    for other in others:
        other.write_text("of somebody else")
    with replacing(tmp_path / "y") as alive:
        alive.write_text("being written")
        remove_stale_drafts(tmp_path)
        assert not stale.exists()
        assert all(path.exists() for path in [alive, *others])


@pytest.mark.parametrize("act", ["load", "save"])
def test_a_checkpoint_removes_the_drafts_of_killed_runs(tmp_path, act):
    stale = draft_of_a_killed_process(tmp_path)
    checkpoint = Checkpoint(tmp_path / "c", JOB)
    checkpoint.load() if act == "load" else checkpoint.save({"s": Moments(2)})
    assert not stale.exists()


def run_until_killed(folder: Path, kills: int) -> None:
    """Fork the job, kill it at a random moment and start it again, until it was killed often and is done."""
    torch.set_num_threads(1)  # a fork of a process with a pool of threads would wait for them
    rng = random.Random(0)
    told = {"kills": 0, "while saving": 0, "runs": 0}
    once = folder / "once"
    once.mkdir()
    job(once, None)
    path = folder / "checkpoint"
    while told["kills"] < kills:
        child = os.fork()
        if not child:
            job(folder, Checkpoint(path, JOB, every_batches=1))
            os._exit(0)
        time.sleep(rng.uniform(0.01, 0.25))
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, 9)
            status = os.waitpid(child, 0)[1]
        code = os.waitstatus_to_exitcode(status)
        told["kills"] += code == -9
        told["while saving"] += code == -9 and any(folder.glob(".pca_torch-*.tmp"))
        assert code in {0, -9}
        if code == 0:  # ran to its end between two kills: the next one starts over
            told["runs"] += finished(folder, once)
    job(folder, Checkpoint(path, JOB, every_batches=1))
    told["runs"] += finished(folder, once)
    print(json.dumps(told))


def finished(folder: Path, once: Path) -> bool:
    """Compare what a run wrote with what one wrote that was never killed, and clear up."""
    assert (folder / "final").read_bytes() == (once / "final").read_bytes()
    (folder / "final").unlink()
    (folder / "checkpoint").unlink()
    remove_stale_drafts(folder)
    assert os.listdir(folder) == ["once"]
    return True


def test_killed_at_any_moment_and_resumed_the_result_is_bitwise_the_same(tmp_path):
    code = "import sys, tests.test_checkpoint as c; c.run_until_killed(c.Path(sys.argv[1]), kills=40)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)],
        cwd=ROOT,
        timeout=240,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["kills"] >= 30
    assert told["while saving"] > 0  # else the kills would prove little
    assert told["runs"] >= 1
