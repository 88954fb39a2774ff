"""The weight files of a model folder, read and copied as bytes: no tensor is loaded whole."""

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from llava_norm_align.common.errors import InputError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
BLOCK = 2**20  # bytes; a block stays in the cache while it is hashed and written


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as it lies on disk."""

    name: str
    dtype: str  # as safetensors writes it: "F32", "BF16", "F16", "I64", ...
    shape: tuple[int, ...]
    file: Path
    offset: int  # of its first byte in the file
    nbytes: int


@dataclass(frozen=True)
class StoredWeights:
    """All tensors of a folder, by name, and the files they lie in."""

    tensors: dict[str, StoredTensor]
    files: list[Path]
    index: dict[str, Any] | None  # the content of model.safetensors.index.json, None for a single file


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in `path`; InputError if it is missing, not JSON, or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"There is no {path.name} in {path.parent}: {what} was expected there.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is broken ({error}): {what} was expected. Download or write it again.") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a JSON {type(content).__name__}, but an object was expected: {what}.")
    return content


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file in the order of their bytes. InputError if it is cut or its header lies."""
    try:
        with safe_open(path, framework="pt"):  # the library checks lengths, offsets and shapes against the file's size
            pass
    except FileNotFoundError:
        raise InputError(f"The weight file {path} is missing. Download or convert the model again.") from None
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"The weight file {path} is cut or damaged ({error}). Download or convert the model again."
        ) from None
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = [
        StoredTensor(name, entry["dtype"], tuple(entry["shape"]), path, start + begin, end - begin)
        for name, entry in header.items()
        for begin, end in [entry["data_offsets"]]
    ]
    return sorted(tensors, key=lambda tensor: tensor.offset)


def read_weights(folder: Path) -> StoredWeights:
    """The safetensors weights of a model folder: one file, or shards with an index that agrees with them."""
    index = None
    if (folder / SINGLE_FILE).is_file():  # transformers takes it even if there is an index too
        files = [folder / SINGLE_FILE]
    elif (folder / INDEX_FILE).is_file():
        index = read_json(folder / INDEX_FILE, "the index of the weight shards")
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{folder / INDEX_FILE} has no weight_map. Download or convert the model again.")
        nameless = next((name for name, file in weight_map.items() if not isinstance(file, str)), None)
        if nameless is not None:
            raise InputError(
                f"{folder / INDEX_FILE} places {nameless} in {weight_map[nameless]!r}, but a file name was expected. "
                "Download or convert the model again."
            )
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise InputError(f"{folder / INDEX_FILE} names {outside[0]!r}; the shards must lie in the folder itself.")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InputError(
                f"{folder / INDEX_FILE} names {len(missing)} weight file(s) that are missing, such as {missing[0]}. "
                "Download or convert the model again."
            )
        files = [folder / name for name in names]
    else:
        pickled = sorted(path.name for pattern in ("pytorch_model*.bin", "*.pth") for path in folder.glob(pattern))
        if pickled:
            raise InputError(
                f"The weights in {folder} are pickled ({pickled[0]}), but safetensors was expected. Save it as "
                "safetensors first: load the model with transformers and call save_pretrained."
            )
        raise InputError(
            f"There are no weights in {folder}: {SINGLE_FILE} or {INDEX_FILE} was expected. Download the model again."
        )
    tensors = {tensor.name: tensor for file in files for tensor in read_header(file)}
    if index is not None:
        wrong = [name for name, file in weight_map.items() if name not in tensors or tensors[name].file.name != file]
        if wrong:
            raise InputError(
                f"{folder / INDEX_FILE} places {len(wrong)} tensor(s) in a file that does not hold them, "
                f"such as {wrong[0]}. Download or convert the model again."
            )
        unlisted = set(tensors) - set(weight_map)
        if unlisted:
            raise InputError(
                f"{folder / INDEX_FILE} leaves out {len(unlisted)} tensor(s) of its shards, such as {min(unlisted)}. "
                "Download or convert the model again."
            )
    return StoredWeights(tensors, files, index)


def write_renamed(target: Path, tensors: Iterable[tuple[str, StoredTensor]]) -> None:
    """Write a safetensors file of (new name, stored tensor) pairs; the bytes are copied from file to file."""
    tensors = list(tensors)
    with target.open("wb") as out:
        write_header(out, tensors)
        for _, tensor in tensors:
            copy_bytes(tensor, out)


def write_header(out: BinaryIO, tensors: Iterable[tuple[str, StoredTensor]]) -> None:
    """Write the header of a safetensors file of (new name, tensor) pairs, whose bytes must follow in that order."""
    header, begin = {}, 0
    for name, tensor in tensors:
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.nbytes],
        }
        begin += tensor.nbytes
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    out.write(struct.pack("<Q", len(encoded)) + encoded)


def copy_bytes(tensor: StoredTensor, out: BinaryIO) -> None:
    """Copy the bytes of a stored tensor to `out`."""
    with tensor.file.open("rb") as source:
        source.seek(tensor.offset)
        left = tensor.nbytes
        while left:
            block = source.read(min(BLOCK, left))
            if not block:
                raise InputError(f"The weight file {tensor.file} ended early; it was cut while it was read.")
            out.write(block)
            left -= len(block)


def write_index(folder: Path, files: Iterable[Path]) -> None:
    """Write the index of `files`, which lie in `folder`, as save_pretrained does."""
    weight_map, total = {}, 0
    for file in files:
        for tensor in read_header(file):
            weight_map[tensor.name] = file.name
            total += tensor.nbytes
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    partial = folder / f".{INDEX_FILE}.writing"
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / INDEX_FILE)
