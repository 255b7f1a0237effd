"""The README is executed: its Python blocks in one namespace, its commands marked ```bash run."""

import re
import shlex
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import bench_module, bench_script

README = Path(__file__).parent.parent / "README.md"
FIRST_SCREEN = 35


class Block(NamedTuple):
    """One fenced block of a Markdown text."""

    info: str  # what follows the fence: "python", "bash", "bash run"
    line: int  # of its first line of code, from 1
    code: str


def blocks_of(text):
    """The fenced blocks in the order of the text."""
    found = re.finditer(r"^```(.*)\n((?:(?!```).*\n)*)^```$", text, re.MULTILINE)
    return [Block(m[1].strip(), text.count("\n", 0, m.start(2)) + 1, m[2]) for m in found]


def commands_of(code):
    """The commands of a shell block as argument lists; lines that end in a backslash are joined."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run_command(words, folder):
    """`pca-torch …` in `folder`; anything else is not ours to run."""
    assert words[0] == "pca-torch", f"a `bash run` block holds pca-torch commands alone, got {words}"
    command = [sys.executable, "-m", "pca_torch", *words[1:]]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{shlex.join(words)} ended with {run.returncode}:\n{run.stderr}"


def execute(text, folder):
    """Run the blocks in order in `folder`, the current one; a traceback shows the README's own lines."""
    namespace = {"__name__": "readme"}
    for block in blocks_of(text):
        if block.info == "python":
            exec(compile("\n" * (block.line - 1) + block.code, "README.md", "exec"), namespace)
        elif block.info == "bash run":
            for words in commands_of(block.code):
                run_command(words, folder)
    return namespace


@pytest.mark.timeout(900)  # its commands analyse a language model
def test_every_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = README.read_text()
    assert any(block.info == "python" for block in blocks_of(text))
    assert any(block.info == "bash run" for block in blocks_of(text))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        execute(text, tmp_path)


def test_the_first_screen_says_what_it_is_and_how_to_start():
    text = README.read_text()
    head = "\n".join(text.splitlines()[:FIRST_SCREEN])
    sentence = next(part for part in head.split("\n\n") if not part.startswith("#"))
    assert sentence.endswith(".")
    assert ". " not in sentence.replace("\n", " ")
    shell = next(block for block in blocks_of(head) if block.info == "bash")
    assert [words[0] for words in commands_of(shell.code)] == ["./scripts/quickstart", "./scripts/test"]
    example = next(block for block in blocks_of(head) if block.info == "python")
    assert 8 <= len(example.code.strip().splitlines()) <= 15


SAMPLE = """# Sample

It runs.

```python
x = 20
```
Text with `inline` code.
```bash
./scripts/quickstart  # not executed
```
```python
from pathlib import Path

y = x + 1
Path("out.txt").write_text(str(y))
```
"""


def test_blocks_share_a_namespace_and_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert execute(SAMPLE, tmp_path)["y"] == 21
    assert (tmp_path / "out.txt").read_text() == "21"


def test_blocks_are_found_with_their_lines():
    found = [(block.info, block.line) for block in blocks_of(SAMPLE)]
    assert found == [("python", 6), ("bash", 10), ("python", 13)]


@pytest.mark.parametrize(
    ("code", "error"),
    [("1 / 0", ZeroDivisionError), ("import warnings; warnings.warn('old')", UserWarning)],
    ids=["error", "warning"],
)
def test_a_failing_example_names_its_line(code, error, tmp_path):
    with pytest.raises(error) as caught:
        execute(f"Text.\n\n```python\nx = 1\n{code}\n```\n", tmp_path)
    lines = [frame.lineno for frame in traceback.extract_tb(caught.tb) if frame.filename == "README.md"]
    assert lines == [5]


def test_commands_are_split_as_a_shell_would():
    assert commands_of("# why\npca-torch run \\\n  --out 'a b'  # here\n\npca-torch --help\n") == [
        ["pca-torch", "run", "--out", "a b"],
        ["pca-torch", "--help"],
    ]


def test_a_command_of_another_program_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="pca-torch commands alone"):
        execute("```bash run\nrm -r out\n```\n", tmp_path)


def test_a_failing_command_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="no-such-command ended with 2"):
        execute("```bash run\npca-torch no-such-command\n```\n", tmp_path)


fill = bench_module("fill")
FILES = {"README.md": README, "bench/README.md": README.parent / "bench" / "README.md"}
TABLES = [(name, *block) for name, path in FILES.items() for block in fill.blocks(path.read_text())]
ONE_LINE = "bench/gpu_table.py"  # a sentence where no GPU was measured


def test_generated_blocks_are_found_with_their_commands():
    first, second = (
        "<!-- python bench/a.py x -->\n1\n\n2\n<!-- end -->",
        "<!-- python bench/b.py -->\n<!-- end -->",
    )
    text = f"a\n{first}\nb\n{second}\n"
    assert fill.blocks(text) == [("bench/a.py x", "1\n\n2"), ("bench/b.py", "")]


def test_blocks_are_filled_with_what_their_commands_print(monkeypatch):
    monkeypatch.setattr(fill, "output", lambda command: f"of {command}\n\\1")  # a backslash stays one
    text = "a\n<!-- python bench/b.py c -->\nold\n<!-- end -->\nd\n<!-- python bench/e.py -->\n<!-- end -->\n"
    new = fill.filled(text)
    assert fill.blocks(new) == [
        ("bench/b.py c", "of bench/b.py c\n\\1"),
        ("bench/e.py", "of bench/e.py\n\\1"),
    ]
    assert fill.filled(new) == new
    assert new.startswith("a\n<!-- python bench/b.py c -->\nof ")
    assert "<!-- end -->\nd\n" in new


def test_a_command_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "a.md"
    path.write_text("<!-- python bench/table.py none -->\nold\n<!-- end -->\n")
    done = bench_script("fill", path)
    assert done.returncode == 1
    assert "a.md is as it was: bench/table.py none failed: usage:" in done.stderr
    assert "old" in path.read_text()


@pytest.mark.parametrize("name", FILES)
def test_every_marker_is_such_a_block(name):
    text = FILES[name].read_text()
    assert len(fill.blocks(text)) == text.count("<!-- python") == text.count("<!-- end") > 0


@pytest.mark.parametrize(
    ("command", "shown"),
    [table[1:] for table in TABLES],
    ids=[f"{name}, {command}" for name, command, _ in TABLES],
)
def test_tables_are_those_of_the_stored_results(command, shown):
    assert len(shown.splitlines()) > (0 if command == ONE_LINE else 2)  # more than a head
    assert shown == fill.output(command)
