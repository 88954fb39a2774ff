"""Folders that appear whole or not at all: written beside the target, then renamed."""

import ctypes
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llava_norm_align.common.errors import InputError

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
OURS = ("config.json", "demo.json")  # what a folder must hold to be replaced
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAX_NAME = 240  # bytes; file systems end at 255, and the name is written with a prefix and a suffix


def check_utf8(path: Path | str) -> None:
    """InputError for a path that safetensors and transformers cannot open."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise InputError(f"The path {str(path)!r} is not UTF-8, so its files cannot be opened. Rename it.") from None


def check_target(target: Path, overwrite: bool = False, sources: tuple[Path, ...] = ()) -> None:
    """Raise InputError unless `target` can become a new folder that touches none of `sources`."""
    check_utf8(target)
    resolved = target.resolve()
    for source in sources:
        source = source.resolve()
        if resolved == source or source in resolved.parents or resolved in source.parents:
            raise InputError(
                f"The target {target} and the source {source} overlap. Name a target outside of the source folder."
            )
    for place, folder in (("your home", Path.home()), ("the working folder", Path.cwd())):
        if resolved == folder.resolve() or resolved in folder.resolve().parents:
            raise InputError(f"The target {target} holds {place}. Name a folder of its own.")
    if len(os.fsencode(resolved.name)) > MAX_NAME:
        raise InputError(f"The name of the target {target} has more than {MAX_NAME} bytes. Name a shorter one.")
    if target.is_symlink():
        raise InputError(f"The target {target} is a link. Name the folder itself.")
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} exists and is not a folder. Name a new folder, or remove it first.")
    parent = next(folder for folder in resolved.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(
            f"{target} cannot be written: {parent} is not a folder that you may write to. Give yourself the "
            "permission, or name another target."
        )
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise InputError(
                f"The folder {target} is not empty. Name a new folder, or pass --overwrite to replace it."
            )
        if not any((target / name).is_file() for name in OURS):
            raise InputError(
                f"The folder {target} holds no model ({' or '.join(OURS)}), so --overwrite does not replace it. "
                "Name another folder, or remove this one yourself."
            )


@contextmanager
def new_folder(target: Path, overwrite: bool = False, sources: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield an empty folder beside `target` that takes its place when the block ends, and is removed if it fails.

    A kill at any moment leaves the old state or the new one; what a killed run left beside the target is removed
    by the next run. Two runs cannot write the same target at once. (Where the file system cannot exchange two
    folders in one step, a kill between two renames leaves the old state as `.NAME.replaced`.)
    """
    check_target(target, overwrite, sources)
    target = target.resolve()
    writing = target.with_name(f".{target.name}.writing")
    with _parents_of(target), locked(target):
        shutil.rmtree(writing, ignore_errors=True)
        try:
            writing.mkdir()
            yield writing
            check_target(target, overwrite, sources)  # it may have been filled meanwhile
            if target.is_dir() and any(target.iterdir()):
                _exchange(writing, target)
            else:
                os.rename(writing, target)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise InputError(
                f"There is no room to write {target} ({error.strerror}). Nothing was kept. Make room on its disk, or "
                "name a target on another disk."
            ) from error
        finally:
            shutil.rmtree(writing, ignore_errors=True)


@contextmanager
def _parents_of(target: Path) -> Iterator[None]:
    """Make the folders above `target`; if the block fails, those that were made go again."""
    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for parent in made:
            with suppress(OSError):  # it is in use by now
                parent.rmdir()
        raise


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold a lock file beside `target`; the lock ends with the process, so a killed run blocks nobody."""
    path = target.with_name(f".{target.name}.lock")
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise InputError(
                f"Another process is writing {target} right now. Wait for it, or name another target."
            ) from None
        if path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path)):
            break
        os.close(descriptor)  # its holder removed it just now
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders: one system call on Linux, else three renames."""
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


def cache_folder() -> Path:
    """LLAVA_NORM_ALIGN_CACHE, or llava-norm-align in XDG_CACHE_HOME (default ~/.cache)."""
    if os.environ.get("LLAVA_NORM_ALIGN_CACHE"):
        return Path(os.environ["LLAVA_NORM_ALIGN_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llava-norm-align"
