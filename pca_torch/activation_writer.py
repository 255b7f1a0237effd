"""Activations on disk, for those who want the tokens themselves: bounded shards, each of them whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from pca_torch._checks import as_mask, as_rows, check_whole
from pca_torch._dtypes import FLOATING
from pca_torch._files import replacing
from pca_torch._safetensors import encode, write_tensors
from pca_torch.sites.site import Site

__all__ = ["ActivationWriter", "SiteWriter"]

FORMAT, VERSION = "pca_torch_activations", "1"
INDEX = "index.json"
LONGEST_NAME = 100  # characters of a folder's name; file systems allow 255 bytes with the number and suffix


class ActivationWriter:
    """A folder with the rows that sites gave, in the order of firing, as safetensors shards.

    A site has its folder, `SITE/SITE-00001.safetensors` and so on, which `open_sources` and
    `pca-torch fit` read back bit for bit; each shard holds `rows` (n, D) and says of which site and
    from which row on. `index.json` is written at the end. Memory is that of one shard per site.

    Beyond a limit rows are left out, counted in the index and told by one warning at the end; each site
    keeps its first rows without a gap, so that row i is the same token in all sites that see the same
    tokens. After a crash the shards on disk are whole and there is no index.

    Args:
        folder: a new or empty folder; it is made if need be. To go on, take another folder: `open_sources`
            reads several as one.
        max_shard_bytes: size of the rows in one file.
        max_total_bytes: size of the rows of all sites together; None is no limit.
        max_rows: rows per site; None is no limit.
        dtype: what rows are stored in; None is the dtype they come in.
        origins: store with each row where it came from, as `firing` (n,), a count of the site's firings from
            0, and `token` (n,), the index in the flattened leading dimensions of that firing.
        metadata: what else to keep in the index, such as the model and the text, in JSON types.

    Raises:
        ValueError: the folder holds something, or an argument is out of range.
        TypeError: a value in `metadata` is of no JSON type.
        FileExistsError: `folder` is a file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_shard_bytes: int = 64 * 2**20,
        max_total_bytes: int | None = 16 * 2**30,
        max_rows: int | None = None,
        dtype: torch.dtype | None = None,
        origins: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        limits = {
            "max_shard_bytes": max_shard_bytes,
            "max_total_bytes": max_total_bytes,
            "max_rows": max_rows,
        }
        for name, limit in limits.items():
            if limit is not None or name == "max_shard_bytes":
                check_whole(limit, name, 1)
        if dtype is not None and dtype not in FLOATING.values():
            raise ValueError(f"`dtype` must be one of {', '.join(FLOATING)}, or None, got {dtype!r}.")
        self._metadata = encode(dict(metadata or {}), "metadata")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.iterdir()):
            raise ValueError(
                f"`folder` must be new or empty, and {self.folder} is not; give another folder, and "
                "read both with `open_sources`."
            )
        self.dtype, self.origins, self.closed = dtype, origins, False
        self.limits = limits
        self._left = max_total_bytes  # None is no limit
        self._sites: dict[str, SiteWriter] = {}
        self._folders = {INDEX}  # names that are taken

    def sink(self, site: str | Site) -> SiteWriter:
        """The sink for one site, to be handed to `capture`; the same one when asked again.

        Args:
            site: the site, or its name.

        Raises:
            ValueError: the writer is closed, or the name is empty.
        """
        name = site.name if isinstance(site, Site) else site
        if not name:
            raise ValueError("`site` must be a name, got an empty one.")
        if name not in self._sites:
            self.check_open()
            facts = {"kind": site.kind, "point": site.point} if isinstance(site, Site) else {}
            self._sites[name] = SiteWriter(self, name, self._new_folder(name), facts)
        return self._sites[name]

    @property
    def left_out(self) -> int:
        """Rows of all sites that came after a limit was reached."""
        return sum(site.left_out for site in self._sites.values())

    @property
    def full(self) -> bool:
        """Whether every site has reached a limit: there is no use in running the model further."""
        return bool(self._sites) and all(site.full for site in self._sites.values())

    def take(self, n: int, row_bytes: int) -> int:
        """How many of `n` rows the total still has room for; they are counted as written.

        Args:
            n: rows that a site has.
            row_bytes: size of one.
        """
        if self._left is not None:
            n = min(n, self._left // row_bytes)
            self._left -= n * row_bytes
        return n

    def check_open(self) -> None:
        """Refuse to go on after the end.

        Raises:
            ValueError: the writer is closed.
        """
        if self.closed:
            raise ValueError(f"the writer of {self.folder} is closed; open a new one with another folder.")

    def close(self, complete: bool = True) -> None:
        """Write what is pending and the index; the second call does nothing.

        Args:
            complete: what the index says: whether the run came to its end.
        """
        if self.closed:
            return
        for site in self._sites.values():
            site.flush()
        self.closed = True
        index = {
            "format": FORMAT,
            "version": VERSION,
            "complete": complete,
            "limits": self.limits,
            "metadata": self._metadata,
            "sites": {name: site.facts() for name, site in self._sites.items()},
        }
        with replacing(self.folder / INDEX) as draft:
            draft.write_text(json.dumps(index, indent=1), encoding="utf-8")
        if self.left_out:
            most = max(self._sites.values(), key=lambda site: site.left_out)
            warnings.warn(
                f"{self.folder}: {self.left_out} rows came after a limit and were left out, "
                f"{most.left_out} of them of {most.name}; raise that limit to keep more.",
                stacklevel=2,
            )

    def __enter__(self) -> ActivationWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error the index says that the run did not come to its end."""
        self.close(complete=kind is None)

    def _new_folder(self, name: str) -> Path:
        """A folder for a site: its name with `_` for what file systems do not all take, and unique."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".")[:LONGEST_NAME]
        if not plain or plain.lower() in self._folders:  # some file systems take Q and q for one
            plain = f"{plain or 'site'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        self._folders.add(plain.lower())
        (self.folder / plain).mkdir()
        return self.folder / plain


class SiteWriter:
    """The sink of one site; `ActivationWriter.sink` makes it."""

    def __init__(self, writer: ActivationWriter, name: str, folder: Path, about: dict[str, str]) -> None:
        self.name, self.folder = name, folder
        self.n_rows = self.left_out = 0  # rows accepted, on disk or pending; rows beyond a limit
        self.full = False
        self._writer, self._about = writer, about
        # (rows of a shard, D), the first `_pending` of them filled
        self._buffer = torch.empty(0, 0, device="cpu")
        self._origin = torch.empty(2, 0, dtype=torch.int64, device="cpu")  # firing and token of each
        self._pending = self._firing = 0
        self._shards: list[dict[str, Any]] = []

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Append the rows of one firing.

        Args:
            x: (..., D); the leading dimensions are flattened to rows.
            mask: (...) of 0 and 1, the rows to keep; None keeps all.

        Raises:
            ValueError: the writer is closed, D or the dtype differs from the first firing's, a row does not
                fit a shard, or a finite value is too large for the dtype of the file.
            OSError: the disk is full, or a shard could not be written.
        """
        self._writer.check_open()
        rows, lead = as_rows(x.detach(), self._buffer.shape[1] or None)
        keep = as_mask(mask, lead, rows.device)
        tokens = torch.arange(len(rows), device="cpu") if keep is None else keep.nonzero()[:, 0].cpu()
        took = 0
        if len(tokens) and not self.full:
            self._prepare(rows)
            rows = self._converted(rows if keep is None else rows[keep])
            took = self._room_for(len(rows))
            self._append(rows[:took], tokens[:took])
        self.left_out += len(tokens) - took
        self._firing += 1

    def flush(self) -> None:
        """Write the pending rows as a shard of their own.

        Raises:
            OSError: the disk is full, or the folder may not be written to.
        """
        if not self._pending:
            return
        n, first = self._pending, self.n_rows - self._pending
        name = f"{self.folder.name}-{len(self._shards) + 1:05d}.safetensors"
        tensors = {"rows": self._buffer[:n]}
        if self._writer.origins:
            tensors |= {"firing": self._origin[0, :n], "token": self._origin[1, :n]}
        about = {
            "format": FORMAT,
            "version": VERSION,
            "site": self.name,
            "first_row": str(first),
            **self._about,
        }
        write_tensors(self.folder / name, about, tensors)
        self._shards.append({"file": name, "first_row": first, "rows": n})
        self._pending = 0

    def facts(self) -> dict[str, Any]:
        """What the index says of the site."""
        return {
            "folder": self.folder.name,
            **self._about,
            "rows": self.n_rows,
            "features": self._buffer.shape[1],
            "dtype": str(self._buffer.dtype).removeprefix("torch.") if self.n_rows else None,
            "left_out": self.left_out,
            "shards": self._shards,
        }

    def _prepare(self, rows: Tensor) -> None:
        """Room for one shard at the first firing; later ones must be like it.

        Raises:
            ValueError: the dtype is none of ours or another than before, or a row does not fit a shard.
        """
        dtype = self._writer.dtype or rows.dtype
        if self._buffer.numel():
            if dtype != self._buffer.dtype:
                raise ValueError(
                    f"`x` is {dtype} after {self._buffer.dtype}; say with `dtype` what to store for this run."
                )
            return
        if dtype not in FLOATING.values():
            raise ValueError(
                f"`x` must hold floats of 16 to 64 bits, got {dtype}; set `dtype` to make it such."
            )
        row_bytes = rows.shape[1] * dtype.itemsize
        fit = self._writer.limits["max_shard_bytes"] // row_bytes
        if not fit:
            raise ValueError(f"`max_shard_bytes` must hold at least one row, here of {row_bytes} bytes.")
        with torch.inference_mode(False):  # else no later update could write to them outside of it
            self._buffer = torch.empty(fit, rows.shape[1], dtype=dtype, device="cpu")
            told = fit if self._writer.origins else 0
            self._origin = torch.empty(2, told, dtype=torch.int64, device="cpu")

    def _converted(self, rows: Tensor) -> Tensor:
        """`rows` in the dtype of the file.

        Raises:
            ValueError: a finite value became infinite.
        """
        dtype = self._buffer.dtype
        out = rows.to(dtype)
        narrower = not rows.is_floating_point() or torch.finfo(dtype).max < torch.finfo(rows.dtype).max
        if narrower and not torch.equal(out.isfinite(), rows.isfinite()):
            raise ValueError(
                f"`x` has values beyond {torch.finfo(dtype).max:g}, where {dtype} ends; store bfloat16."
            )
        return out

    def _room_for(self, n: int) -> int:
        """How many of `n` rows the limits allow; at the first that they do not, the site is full."""
        most = self._writer.limits["max_rows"]
        room = n if most is None else min(n, most - self.n_rows)
        took = self._writer.take(room, self._buffer.shape[1] * self._buffer.dtype.itemsize)
        self.full = took < n or self.n_rows + took == most
        return took

    def _append(self, rows: Tensor, tokens: Tensor) -> None:
        """Copy rows behind the pending ones; whenever they fill a shard it is written."""
        while len(rows):
            if self._pending == len(self._buffer):  # a write that failed is tried again
                self.flush()
            n = min(len(rows), len(self._buffer) - self._pending)
            place = slice(self._pending, self._pending + n)
            self._buffer[place].copy_(rows[:n])
            if self._writer.origins:
                self._origin[0, place] = self._firing
                self._origin[1, place] = tokens[:n]
            rows, tokens = rows[n:], tokens[n:]
            self._pending += n
            self.n_rows += n
        if self._pending and self._pending == len(self._buffer):
            self.flush()
