"""A file is whole at every moment."""

import os

import pytest

from pca_torch._files import replacing


def test_a_draft_becomes_the_file_at_the_end_of_the_block(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    with replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_an_error_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")

    def fail():
        with replacing(path) as draft:
            draft.write_text("ne")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_a_link_keeps_pointing_to_its_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with replacing(tmp_path / "link") as draft:
        draft.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_missing_folder_is_named(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match=r"`path` is in .*nowhere, which is no folder"),
        replacing(tmp_path / "nowhere" / "out.txt"),
    ):
        pytest.fail("the block must not run")
