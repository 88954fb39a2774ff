"""Copies of a checkpoint's files."""

import errno
import hashlib
import mmap
import os
import shutil
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from llava_norm_align.common.errors import CheckFailed, InputError

STREAMS = 2  # files at a time
BLOCK = 2**24  # bytes
# everything else is left behind: weights in other formats, optimizer states, code of another model
COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".md", ".spm", ".tiktoken"}
COPIED_NAMES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "COPYING")
LEFT_OUT = ("config.json", "trainer_state.json")
MAX_COPIED = 100_000_000  # bytes; the largest tokenizer.json have 35 MB


def small_files(source: Path) -> list[Path]:
    """The files of a checkpoint that are copied as they are; InputError if one of them may not be read."""
    found = []
    for path in [*source.iterdir(), *(source / "additional_chat_templates").glob("*")]:
        wanted = path.suffix in COPIED_SUFFIXES or path.name.startswith(COPIED_NAMES)
        if not wanted or path.name in LEFT_OUT or path.name.endswith(".index.json") or path.name.startswith("."):
            continue
        if path.is_file():
            if not os.access(path, os.R_OK):
                raise InputError(f"You may not read {path}. Give yourself the permission, or remove the file.")
            found.append(path)
    return sorted(found)


def copy_small_files(source: Path, folder: Path) -> list[str]:
    """Copy tokenizer, processor, templates, generation config and papers; returns which were too large."""
    left = []
    for path in small_files(source):
        relative = path.relative_to(source)
        if path.stat().st_size > MAX_COPIED:
            left.append(f"{relative} was not copied: it has {path.stat().st_size:,} bytes")
            continue
        (folder / relative).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / relative)
    return left


def copy_with_checksums(copies: dict[str, Path], folder: Path) -> dict[str, int]:
    """Copy {name: source file} into `folder`, each read once; returns the CRC-32 of the bytes that were read."""
    total, stop = sum(file.stat().st_size for file in copies.values()), threading.Event()
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="copy weights", disable=None) as progress,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        try:
            checksums = pool.map(lambda name: _copy_file(copies[name], folder / name, progress, stop), copies)
            return dict(zip(copies, checksums, strict=True))
        except BaseException:  # the pool waits for its threads, also after Ctrl-C
            stop.set()
            raise


def _copy_file(source: Path, target: Path, progress: tqdm, stop: threading.Event) -> int:
    """Copy one file and return its CRC-32, summed while the kernel copies. `stop` ends it after a block.

    A cryptographic hash would take longer than the copy; it is taken when the file is read back.
    """
    with source.open("rb", buffering=0) as reader, target.open("xb", buffering=0) as writer:
        left = os.fstat(reader.fileno()).st_size
        with ThreadPoolExecutor(1) as pool:
            summing = pool.submit(_checksum, reader.fileno(), left, stop)
            try:
                while left and not stop.is_set():
                    copied = _copy_block(reader.fileno(), writer.fileno(), min(BLOCK, left))
                    if not copied:
                        raise InputError(f"The weight file {source} was cut while it was read. Download it again.")
                    left -= copied
                    progress.update(copied)
            except BaseException:
                stop.set()
                raise
            return summing.result()


def _checksum(descriptor: int, size: int, stop: threading.Event) -> int:
    checksum = 0
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as content:
        for start in range(0, size, BLOCK):
            if stop.is_set():
                break
            checksum = zlib.crc32(content[start : start + BLOCK], checksum)
    return checksum


def _copy_block(reader: int, writer: int, size: int) -> int:
    """Copy up to `size` bytes at the current positions, inside the kernel where it can."""
    try:
        return os.copy_file_range(reader, writer, size)
    except (AttributeError, OSError) as error:  # not Linux, or two file systems that it cannot join
        if isinstance(error, OSError) and error.errno not in (
            errno.EXDEV,
            errno.EINVAL,
            errno.ENOSYS,
            errno.EOPNOTSUPP,
        ):
            raise
    block = memoryview(os.read(reader, size))
    written = 0
    while written < len(block):
        written += os.write(writer, block[written:])
    return written


def check_copies(folder: Path, checksums: dict[str, int]) -> dict[str, str]:
    """The sha256 of every copy, read back. CheckFailed if its CRC-32 is not that of what was read from the source."""
    total = sum((folder / name).stat().st_size for name in checksums)
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=None) as progress,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        found = dict(
            zip(checksums, pool.map(lambda name: _read_back(folder / name, progress), checksums), strict=True)
        )
    for name, (checksum, _) in found.items():
        if checksum != checksums[name]:
            raise CheckFailed(
                f"The copy {name} differs from its source (CRC-32 {checksum:08x}, not {checksums[name]:08x}). The "
                "disk or its memory is faulty; nothing was kept. Convert again to another disk."
            )
    return {name: digest for name, (_, digest) in found.items()}


def _read_back(file: Path, progress: tqdm) -> tuple[int, str]:
    checksum, digest = 0, hashlib.sha256()
    with file.open("rb", buffering=0) as reader:
        while block := reader.read(2**20):  # small enough to stay in the cache
            checksum = zlib.crc32(block, checksum)
            digest.update(block)
            progress.update(len(block))
    return checksum, digest.hexdigest()
