"""Encoded images and captions on disk, addressed by the content of everything that shapes them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import DatasetError, Problem, WorkspaceError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_BAD = 20  # a broken encoder spoils every entry; so many names are enough to tell
_KEY = re.compile(r"[0-9a-f]{64}")


def fingerprint(**fields: object) -> str:
    """The sha256, as 64 hex digits, of the fields as canonical JSON: a cache key.

    Fields are JSON values; tuples count as lists. The order in which they are given does not matter. Raises TypeError
    for values that JSON does not have and ValueError for NaN, which would make keys that never match.
    """
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class TensorCache:
    """Named tensors under content keys, in `root` on disk and the most recently used ones in memory.

    Entries are written to a temporary name and renamed, so several processes may share a folder. Every entry carries a
    checksum, and an entry that does not match it is removed with a warning and counts as absent.
    """

    def __init__(self, root: Path, memory_bytes: int = 2 * 2**30) -> None:
        self.root = root
        self.memory_bytes = memory_bytes
        self._held: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._held_bytes = 0
        self._checked: set[str] = set()  # keys whose file has been read and found sound by this process
        self._lock = threading.Lock()

    def path(self, key: str) -> Path:
        """Where the entry lies. Two levels of folders keep directories small with hundreds of thousands of entries."""
        if not _KEY.fullmatch(key):
            raise ValueError(f"not a cache key: {key!r}")
        return self.root / key[:2] / key[2:4] / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        """Whether `read` will succeed. The first call for a key reads the file and verifies its checksum."""
        if key in self._held or (key in self._checked and self.path(key).exists()):
            return True
        return self._load(key) is not None

    def read(self, key: str) -> dict[str, Tensor]:
        """The entry's tensors, on the CPU. They are shared with later callers and must not be written to.

        Raises WorkspaceError when the entry is absent or damaged.
        """
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        tensors = self._load(key)
        if tensors is None:
            raise WorkspaceError(
                f"cache entry {key[:12]} is missing or damaged", "start the run again; missing entries are made anew"
            )
        return tensors

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store copies of the tensors. Raises WorkspaceError when the disk is full or cannot be written."""
        # Cloned: an element of a batch would otherwise keep the memory of the whole batch alive.
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        data = safetensors.torch.save(own, metadata={"sha256": _checksum(own)})
        self._store(self.path(key), data)
        self._checked.add(key)
        self._hold(key, own)

    def _store(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f".{path.stem[:16]}-{uuid.uuid4().hex}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise _cannot_write(self.root, error) from error

    def _load(self, key: str) -> dict[str, Tensor] | None:
        """The entry from disk, verified, or None. Removes an entry that is damaged."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("cache entry %s cannot be read and is made anew: %s", path.name, error)
            return None
        tensors = _verified(data)
        if tensors is None:
            logger.warning("cache entry %s is damaged and is made anew", path.name)
            self._checked.discard(key)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        self._checked.add(key)
        self._hold(key, tensors)
        return tensors

    def _hold(self, key: str, tensors: dict[str, Tensor]) -> None:
        size = _size_bytes(tensors)
        with self._lock:
            if key in self._held:
                self._held_bytes -= _size_bytes(self._held.pop(key))
            if size > self.memory_bytes:
                return
            self._held[key] = tensors
            self._held_bytes += size
            while self._held_bytes > self.memory_bytes:
                _, oldest = self._held.popitem(last=False)
                self._held_bytes -= _size_bytes(oldest)


def fill(
    cache: TensorCache,
    jobs: Mapping[str, T],
    encode: Callable[[list[T]], list[dict[str, Tensor]]],
    *,
    batch_size: int,
    group: Callable[[T], Hashable] | None = None,
    name: Callable[[T], str] = str,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Encode the jobs whose keys the cache does not have; returns how many that were.

    Jobs with the same `group` (for instance the same size) are encoded together, up to `batch_size`. Each batch is
    stored before the next, so an interruption costs one batch. `progress(done, len(jobs))` counts entries that were
    already there too. `name` says what a job is called in an error.

    Raises DatasetError, naming the jobs, when encoded values are not finite; what was finite is stored.
    """
    groups: dict[Hashable, list[str]] = {}
    for key, job in jobs.items():
        if not cache.has(key):
            groups.setdefault(group(job) if group else None, []).append(key)
    missing = sum(len(keys) for keys in groups.values())
    done = len(jobs) - missing
    if progress:
        progress(done, len(jobs))
    bad: list[str] = []
    for keys in groups.values():
        for start in range(0, len(keys), batch_size):
            batch = keys[start : start + batch_size]
            bad += _encode_batch(cache, {key: jobs[key] for key in batch}, encode, name)
            if len(bad) >= _MAX_BAD:
                raise _not_finite(bad)
            done += len(batch)
            if progress:
                progress(done, len(jobs))
    if bad:
        raise _not_finite(bad)
    return missing


def _encode_batch(
    cache: TensorCache,
    batch: Mapping[str, T],
    encode: Callable[[list[T]], list[dict[str, Tensor]]],
    name: Callable[[T], str],
) -> list[str]:
    """Encode and store one batch; the names of those with values that are not finite, which are not stored."""
    encoded = encode(list(batch.values()))
    if len(encoded) != len(batch):
        raise RuntimeError(f"the encoder returned {len(encoded)} entries for {len(batch)} jobs")
    bad: list[str] = []
    for (key, job), tensors in zip(batch.items(), encoded, strict=True):
        if all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            cache.write(key, tensors)
        else:
            bad.append(name(job))
    return bad


def _not_finite(names: list[str]) -> DatasetError:
    return DatasetError(
        "encoding gave values that are not finite numbers (NaN or infinity)",
        "the usual cause is a VAE or text encoder in fp16, not the files: set base.dtype to 'bf16' or 'fp32'",
        problems=[Problem(name, "its encoding is not finite") for name in names],
    )


def _verified(data: bytes) -> dict[str, Tensor] | None:
    """The tensors in a safetensors file with our checksum, or None if anything about it is wrong."""
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        expected = json.loads(data[8 : 8 + length])["__metadata__"]["sha256"]
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    return tensors if _checksum(tensors) == expected else None


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _size_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _cannot_write(root: Path, error: OSError) -> WorkspaceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WorkspaceError(
            f"the disk is full: cannot write the cache in {root}",
            "free some space; the cache folder may be deleted at any time, its entries are made anew",
        )
    return WorkspaceError(
        f"cannot write the cache in {root}: {error.strerror or error}",
        "make the folder writable, or choose another workspace with --workspace or SAFELIGHT_HOME",
    )
