"""Text and token ids to windows: the right tokens in the right order, and no more work than needed."""

import json
import logging
import tracemalloc

import numpy as np
import pytest
import torch

from pca_torch import texts
from pca_torch.texts import (
    Piece,
    Tokens,
    batches,
    check_ids,
    default_text,
    read_texts,
    read_tokens,
    token_windows,
)


class Letters:
    """One token per character, its code point; keeps what it was asked to tokenise."""

    def __init__(self, eos=7):
        self.eos_token_id = eos
        self.parts = []

    def __call__(self, text, add_special_tokens=True, **_):
        assert not add_special_tokens
        self.parts.append(text)
        return {"input_ids": [ord(c) for c in text]}


def codes(text):
    return [ord(c) for c in text]


def spelled(tokens):
    return "".join(chr(i) for i in tokens.ids.flatten().tolist())


# ---------------------------------------------------------------- windows


def test_windows_are_the_stream_cut_in_order():
    got = token_windows(["abcdefgh"], Letters(), seq_len=3, max_tokens=100)
    assert got.ids.tolist() == [codes("abc"), codes("def")]
    assert got.ids.dtype == torch.int64
    assert got.counts() == {"seen": 6, "padding": 0, "dropped_tail": 2, "n_sequences": 2, "seq_len": 3}


def test_documents_are_joined_by_the_end_of_text():
    pieces = ["ab", "", Piece("c", False), Piece("d", False), Piece("", True), "ef"]
    got = token_windows(pieces, Letters(eos=ord("|")), seq_len=1, max_tokens=100)
    assert spelled(got) == "ab|cd|ef"


def test_without_an_end_of_text_documents_follow_directly():
    assert spelled(token_windows(["ab", "cd"], Letters(eos=None), seq_len=2, max_tokens=9)) == "abcd"


@pytest.mark.parametrize(("max_tokens", "windows"), [(3, 1), (5, 1), (6, 2), (7, 2), (100, 3)])
def test_the_limit_leaves_out_a_window_that_does_not_fit(max_tokens, windows):
    got = token_windows(["abcdefghij"], Letters(), seq_len=3, max_tokens=max_tokens)
    assert got.n_sequences == windows
    assert got.dropped_tail == (1 if windows == 3 else 0)  # what the limit cut off was never asked for


def test_nothing_beyond_the_need_is_taken_or_tokenised():
    def endless():
        for i in range(1000):
            taken.append(i)
            yield "x" * (3 * texts.TOKENISE_CHARACTERS)

    taken, tokenizer = [], Letters()
    token_windows(endless(), tokenizer, seq_len=10, max_tokens=100)
    assert taken == [0]
    assert [len(part) for part in tokenizer.parts] == [texts.TOKENISE_CHARACTERS]


def test_a_larger_limit_leaves_the_first_windows_as_they_were():
    few = token_windows([default_text()], Letters(), seq_len=64, max_tokens=1000)
    many = token_windows([default_text()], Letters(), seq_len=64, max_tokens=200_000)
    assert many.n_sequences > few.n_sequences == 15
    assert torch.equal(many.ids[:15], few.ids)


@pytest.mark.parametrize("unit", ["a line of words\n", "words without lines ", "unbroken"])
def test_parts_are_bounded_and_cut_where_the_text_allows(unit):
    text, tokenizer = unit * 20_000, Letters()
    got = token_windows([text], tokenizer, seq_len=1, max_tokens=10**7)
    assert spelled(got) == text
    first, *_, last = tokenizer.parts
    assert texts.TOKENISE_CHARACTERS - len(unit) <= len(first) <= texts.TOKENISE_CHARACTERS
    assert len(last) <= texts.TOKENISE_CHARACTERS
    if "\n" in unit:
        assert first.endswith("\n")
    elif " " in unit:
        assert not first.endswith(" ")  # a byte-level tokenizer keeps the space with the word after it
        assert tokenizer.parts[1].startswith(" ")


def test_a_real_tokenizer_gets_no_special_tokens_and_gives_no_warning(caplog):
    tiny_model = pytest.importorskip("tests.tiny_model")
    tokenizer = tiny_model.tiny_tokenizer()  # of context 64, which a part may well exceed
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        got = token_windows([tiny_model.TEXT], tokenizer, seq_len=8, max_tokens=10_000)
        quiet = not caplog.records
        tokenizer(tiny_model.TEXT)
    finally:
        logger.removeHandler(caplog.handler)
    assert quiet
    assert caplog.records  # the warning that was not given
    assert tiny_model.TEXT.startswith(tokenizer.decode(got.ids.flatten()))
    assert got.dropped_tail < 8


@pytest.mark.parametrize(
    ("seq_len", "max_tokens", "message"),
    [
        (0, 10, "`seq_len` must be at least 1, got 0"),
        (-1, 10, "`seq_len` must be at least 1, got -1"),
        (8, 7, "`max_tokens` must be at least `seq_len`, 8, got 7"),
        (8, 100, "`seq_len` is 8, but the texts gave 5 tokens; give more, or a shorter `seq_len`"),
    ],
)
def test_lengths_that_give_no_window_are_refused(seq_len, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        token_windows(["abcde"], Letters(), seq_len, max_tokens)


# ---------------------------------------------------------------- texts


def test_the_default_text_is_plain_english_of_some_length():
    text = default_text()
    assert text == default_text()
    assert len(text) > 300_000  # 100,000 tokens or so
    assert "The Python" in text


def test_a_plain_file_is_one_document_in_pieces_cut_at_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "READ_CHARACTERS", 10)
    text = "one\ntwo\nthree four five\n\nsix äöü €\nseven"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    pieces = list(read_texts([tmp_path / "a.txt"]))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[0].text == "one\ntwo\nthree four f"  # a line longer than a block is cut all the same
    assert all(len(piece.text) <= 20 for piece in pieces)


def test_a_byte_order_mark_and_foreign_line_ends_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfab\r\ncd")
    assert "".join(piece.text for piece in read_texts([tmp_path / "a.txt"])) == "ab\ncd"


def test_memory_does_not_grow_with_the_file(tmp_path):
    (tmp_path / "a.txt").write_text("some words in a line\n" * 2**20)  # 21 MiB
    tracemalloc.start()
    characters = sum(len(piece.text) for piece in read_texts([str(tmp_path / "a.txt")]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert characters == 21 * 2**20
    assert peak < 8 * 2**20  # a piece, its successor, and the decoder's bytes


def test_json_lines_are_a_document_each(tmp_path):
    lines = [{"text": "one\ntwo"}, {"id": 3, "text": "häß"}]
    content = "\n\n".join(json.dumps(line) for line in lines) + "\n"
    (tmp_path / "a.JSONL").write_text(content)
    assert list(read_texts([tmp_path / "a.JSONL"])) == [Piece("one\ntwo", True), Piece("häß", True)]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        "null",
        '"text"',
        "{}",
        '{"text": 3}',
        '{"text": null}',
        '{"text": ["a"]}',
        r'{"text": "\ud800"}',
        "[" * 10**5,
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(
        ValueError, match=r'a\.jsonl, line 3: must be one JSON object with a string "text"'
    ) as error:
        list(read_texts([tmp_path / "a.jsonl"]))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(tmp_path)) + 160


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_that_is_not_utf8_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ValueError, match=rf"{name}: not UTF-8 \(.*\); convert it first"):
        list(read_texts([tmp_path / name]))


def test_all_files_are_checked_before_the_first_is_read(tmp_path):
    good = tmp_path / "good.txt"
    good.write_text("fine")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"gone\.txt: no such file"):
        read_texts([good, tmp_path / "gone.txt"])
    with pytest.raises(ValueError, match="not a file"):
        read_texts([good, tmp_path])
    with pytest.raises(ValueError, match=r"empty\.txt: the file is empty"):
        read_texts([good, tmp_path / "empty.txt"])
    with pytest.raises(ValueError, match="`paths` is empty"):
        read_texts([])


# ---------------------------------------------------------------- ids


def save(path, array):
    np.save(path, array, allow_pickle=True)
    return path


@pytest.mark.parametrize("dtype", ["<i8", ">i4", "<u2", "|u1", "<u8"])
def test_a_stream_of_ids_is_cut_into_windows(tmp_path, dtype):
    path = save(tmp_path / "ids.npy", np.arange(11).astype(dtype))
    got = read_tokens(path, seq_len=4)
    assert got.ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert got.ids.dtype == torch.int64
    assert got.dropped_tail == 3
    assert read_tokens(path, seq_len=4, max_tokens=7).counts() == {
        "seen": 4, "padding": 0, "dropped_tail": 0, "n_sequences": 1, "seq_len": 4,
    }  # fmt: skip


def test_rows_of_ids_stay_as_they_are(tmp_path):
    rows = np.array([[1, 2, -1], [-100, 3, 4], [5, 6, 7]])
    path = save(tmp_path / "ids.npy", rows)
    got = read_tokens(path, seq_len=512, max_tokens=100)  # the rows say how long they are
    assert got.ids.tolist() == rows.tolist()
    assert got.counts() == {"seen": 7, "padding": 2, "dropped_tail": 0, "n_sequences": 3, "seq_len": 3}
    assert read_tokens(path, seq_len=1, max_tokens=8).n_sequences == 2
    got.ids[:] = 0  # the caller's own memory
    assert np.array_equal(np.load(path), rows)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((2, 3)), r"integers of shape \(N, T\) or \(N,\), got float64 of \(2, 3\)"),
        (np.ones((2, 3), bool), "got bool"),
        (np.ones((2, 3, 4), int), r"got int64 of \(2, 3, 4\)"),
        (np.array(3), r"got int64 of \(\)"),
        (np.empty((0, 4), int), r"got int64 of \(0, 4\)"),
        (np.empty((4, 0), int), r"got int64 of \(4, 0\)"),
        (np.empty(0, int), r"got int64 of \(0,\)"),
        (np.array([object()]), "not a readable `.npy` array"),
        (np.full((2, 3), -1), "nothing but padding"),
        (np.full(4, 2**63, np.uint64), "holds 9223372036854775808, which is no token id"),
        (np.arange(3), r"`seq_len` is 4, but .*ids\.npy gave 3 tokens"),
    ],
)
def test_what_are_no_token_ids_is_refused(tmp_path, array, message):
    with pytest.raises(ValueError, match=message):
        read_tokens(save(tmp_path / "ids.npy", array), seq_len=4)


def test_damaged_files_of_ids_are_refused(tmp_path):
    path = save(tmp_path / "ids.npy", np.arange(100))
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:70], whole[:7], b"PK\x03\x04" + bytes(60), b"text"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"ids\.npy: not a readable `.npy` array") as error:
            read_tokens(path, seq_len=4)
        assert "\n" not in str(error.value)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="the file is empty"):
        read_tokens(path, seq_len=4)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_tokens(tmp_path / "gone.npy", seq_len=4)


def test_limits_below_one_sequence_are_refused(tmp_path):
    path = save(tmp_path / "ids.npy", np.ones((2, 6), int))
    with pytest.raises(ValueError, match=r"`max_tokens` must be at least 6, the row length of .*, got 5"):
        read_tokens(path, seq_len=1, max_tokens=5)
    path = save(tmp_path / "ids.npy", np.ones(12, int))
    with pytest.raises(ValueError, match="`max_tokens` must be at least `seq_len`, 6, got 5"):
        read_tokens(path, seq_len=6, max_tokens=5)
    with pytest.raises(ValueError, match="`seq_len` must be at least 1, got 0"):
        read_tokens(path, seq_len=0)


def test_batches_mask_the_padding_where_it_stands():
    ids = torch.tensor([[1, 2, -1], [-100, 3, 4], [0, 5, 6]])
    first, second = batches(ids, 2)
    assert first["input_ids"].tolist() == [[1, 2, 0], [0, 3, 4]]
    assert first["attention_mask"].tolist() == [[1, 1, 0], [0, 1, 1]]
    assert second["input_ids"].tolist() == [[0, 5, 6]]
    assert second["attention_mask"].tolist() == [[1, 1, 1]]  # id 0 is a token
    assert ids[0, 2] == -1
    with pytest.raises(ValueError, match="`batch_size` must be at least 1, got 0"):
        batches(ids, 0)  # at once, not at the first batch


def test_ids_beyond_the_vocabulary_are_named():
    ids = torch.tensor([[1, 9], [-1, 3]])
    check_ids(ids, 10)
    with pytest.raises(ValueError, match="`ids` must be below 9, the model's vocabulary, got 9"):
        check_ids(ids, 9)


def test_counts_of_padding_and_tokens_add_up():
    tokens = Tokens(torch.tensor([[1, -1], [2, 3]]), dropped_tail=5)
    assert (tokens.seen, tokens.padding, tokens.n_sequences, tokens.seq_len) == (3, 1, 2, 2)
