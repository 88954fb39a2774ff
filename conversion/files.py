"""Copies of a checkpoint's files."""

import hashlib
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.weights import BLOCK

COPY_STREAMS = 2  # files copied at a time: hashing one is slower than copying it
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


def copy_with_digests(copies: dict[str, Path], folder: Path) -> dict[str, str]:
    """Copy {name: source file} into `folder`, each read once; returns the sha256 of the bytes that were read."""
    total, stop = sum(file.stat().st_size for file in copies.values()), threading.Event()
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="copy weights", disable=None) as progress,
        ThreadPoolExecutor(COPY_STREAMS) as pool,
    ):
        try:
            digests = pool.map(lambda name: _copy_file(copies[name], folder / name, progress, stop), copies)
            return dict(zip(copies, digests, strict=True))
        except BaseException:  # the pool waits for its threads, also after Ctrl-C
            stop.set()
            raise


def _copy_file(source: Path, target: Path, progress: tqdm, stop: threading.Event) -> str:
    """Copy one file and return its sha256; a block is hashed while it is written. `stop` ends it after a block."""
    target.unlink(missing_ok=True)  # the link that stood in for it
    digest, hashing = hashlib.sha256(), None
    with (
        source.open("rb", buffering=0) as reader,
        target.open("wb") as writer,
        ThreadPoolExecutor(1) as pool,
    ):
        while not stop.is_set() and (block := reader.read(BLOCK)):
            if hashing:
                hashing.result()
            hashing = pool.submit(digest.update, block)
            writer.write(block)
            progress.update(len(block))
    return digest.hexdigest()
