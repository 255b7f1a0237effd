"""Packages that only some features need, imported where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["require"]


def require(module: str, extra: str, user: str) -> ModuleType:
    """An optional package, or the line that installs it.

    Args:
        module: dotted name of what to import.
        extra: of pca-torch, brings the package.
        user: what cannot be done without it, begins the sentence.

    Raises:
        ImportError: the package is not installed.
        ModuleNotFoundError: it is, but lacks something itself.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:  # it is there, and lacks something itself
            raise
        raise ImportError(f'{user} needs {package}: pip install "pca-torch[{extra}]"') from error
