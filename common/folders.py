"""Folders that appear whole or not at all: written beside the target, then renamed."""

import ctypes
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llava_norm_align.common.errors import InputError

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def check_target(target: Path, overwrite: bool = False, sources: tuple[Path, ...] = ()) -> None:
    """Raise InputError unless `target` can become a new folder that touches none of `sources`."""
    resolved = target.resolve()
    for source in sources:
        source = source.resolve()
        if resolved == source or source in resolved.parents or resolved in source.parents:
            raise InputError(
                f"The target {target} and the source {source} overlap. Name a target outside of the source folder."
            )
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InputError(f"{target} exists and is not a folder. Name a new folder, or remove it first.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise InputError(f"The folder {target} is not empty. Name a new folder, or pass --overwrite to replace it.")
    parent = next(p for p in resolved.parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"{target} cannot be written: {parent} is not a folder that you may write to.")


@contextmanager
def new_folder(target: Path, overwrite: bool = False, sources: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield an empty folder beside `target` that takes its place when the block ends, and is removed if it fails.

    A kill at any moment leaves the old state or the new one; what a killed run left beside the target is removed
    by the next run. Two runs cannot write the same target at once.
    """
    check_target(target, overwrite, sources)
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    writing = target.with_name(f".{target.name}.writing")
    lock = _lock_folder(writing, target)
    try:
        _clear(writing)
        yield writing
        check_target(target, overwrite, sources)  # it may have been filled meanwhile
        if target.is_dir() and any(target.iterdir()):
            _exchange(writing, target)
            shutil.rmtree(writing)
        else:
            os.rename(writing, target)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock_folder(folder: Path, target: Path) -> int:
    """Create `folder` and lock it; the lock ends with the process, so a killed run leaves none."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another run finished and renamed it just now
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise InputError(
                f"Another process is writing {target} right now. Wait for it, or name another target."
            ) from None
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders: one system call on Linux; elsewhere renames, with the old folder kept until they are done."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), RENAME_EXCHANGE) == 0:
            return
        error = ctypes.get_errno()
        if error not in (errno.EINVAL, errno.ENOSYS):  # a file system without exchange
            raise OSError(error, os.strerror(error), str(old))
    aside = old.with_name(f".{old.name}.replaced")
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)
