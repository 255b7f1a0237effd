"""What does `import pca_torch` add to `import torch`?

Python processes that do nothing else, in turn; the aim is 0.3 s. The error is the number of optional packages
that were imported without being asked for; there should be none.
"""

import subprocess
import sys

import numpy as np
from pairs import HERE

OPTIONAL = ("accelerate", "gguf", "matplotlib", "peft", "scipy", "sklearn", "transformers")


def loaded(modules: str) -> list[str]:
    """The optional packages that a fresh process has after importing `modules`.

    Raises:
        RuntimeError: the import failed, with what it said.
    """
    code = f"import sys, {modules}; print(*sorted(sys.modules.keys() & {set(OPTIONAL)!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.split()


def test_import_against_torch_alone(versus):
    """One process each."""
    versus(
        "import torch, pca_torch",
        lambda: loaded("torch, pca_torch"),
        lambda: loaded("torch"),
        against="import torch",
        what="optional packages imported without need",
        judge=len,
        beside=lambda timing: {
            "added_seconds": float(np.median(np.subtract(timing.ours, timing.theirs))),
            "aim_seconds": 0.3,
        },
    )
