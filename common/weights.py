"""The weight files of a model folder, read and copied as bytes: no tensor is loaded whole."""

import json
import os
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from llava_norm_align.common.errors import CheckFailed, InputError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
BLOCK = 2**20  # bytes; a block stays in the cache while it is hashed and written
SAVE_AGAIN = "Load the model with transformers and call save_pretrained, which writes safetensors."
# the dtypes of a .bin that safetensors can hold, in its words
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as it lies on disk, in a safetensors file or a `.bin`: `nbytes` bytes in row-major order."""

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
    index: dict[str, Any] | None  # the content of the shards' index, None for a single file
    pickled: bool = False  # the files are .bin, not safetensors


def check_readable(path: Path) -> None:
    """InputError if `path` is there, but may not be read; what else is wrong with it is left to its reader."""
    try:
        path.open("rb").close()
    except PermissionError:
        raise InputError(f"You may not read {path}. Give yourself the permission, or name another source.") from None
    except OSError:
        pass


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in `path`; InputError if it is missing, not JSON, or not an object."""
    check_readable(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"There is no {path.name} in {path.parent}: {what} was expected there. "
            "Download it, or name another folder."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is broken ({error}): {what} was expected. Download or write it again.") from None
    if not isinstance(content, dict):
        raise InputError(
            f"{path} holds a JSON {type(content).__name__}, but an object was expected: {what}. "
            "Download or write it again."
        )
    return content


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file in the order of their bytes. InputError if it is cut or its header lies."""
    check_readable(path)
    try:
        with safe_open(path, framework="pt"):  # the library checks lengths, offsets and shapes against the file's size
            pass
    except FileNotFoundError:
        raise InputError(f"The weight file {path} is missing. Download or convert the model again.") from None
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None
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


def read_pickled(path: Path) -> list[StoredTensor]:
    """The tensors of a `.bin` in torch's zip format, in the order of their bytes, of which none is read.

    The format stores every storage uncompressed, so a tensor can be copied from its offset (torch's notes on
    serialization, "Layout control"). torch's weights_only unpickler reads the names: nothing in the file can run. Two
    names of one tensor, as of a tied lm_head, are two entries of one place: see `is_alias`. InputError for anything
    but a dict of dense tensors by name.
    """
    records = _zip_records(path)
    tensors = []
    for name, tensor in _unpickle(path).items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InputError(
                f"{path} holds {name!r}: {type(tensor).__name__}, but only tensors by name were expected, as in a "
                f"model's state dict; this may be a training checkpoint. {SAVE_AGAIN}"
            )
        if tensor.dtype not in DTYPE_NAMES:
            raise InputError(f"{path} holds {name} as {tensor.dtype}, which safetensors does not know. {SAVE_AGAIN}")
        if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.is_neg():
            raise InputError(
                f"{path} holds {name} with transposed, sparse or shared elements, but a tensor whose bytes lie in "
                f"order was expected. {SAVE_AGAIN}"
            )
        tensors.append(_place_in_records(path, name, tensor, records))
    return sorted(tensors, key=lambda tensor: tensor.offset)


def _zip_records(path: Path) -> dict[int, int]:
    """{offset of the first byte: number of bytes} of the uncompressed records in a zip file."""
    check_readable(path)
    records = {}
    try:
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                raise InputError(
                    f"{path} is not in the zip format that torch writes since 1.6: it is older, a pointer of Git LFS, "
                    f"or damaged. Download it again, or: {SAVE_AGAIN}"
                )
            with zipfile.ZipFile(file) as archive:
                for record in archive.infolist():
                    if record.filename.endswith("/byteorder") and archive.read(record) != b"little":
                        raise InputError(f"{path} was written by a big-endian machine. {SAVE_AGAIN}")
                    file.seek(record.header_offset + 26)  # the local header has 30 bytes, a name and an extra field
                    name, extra = struct.unpack("<HH", file.read(4))
                    if record.compress_type == zipfile.ZIP_STORED:
                        records[record.header_offset + 30 + name + extra] = record.file_size
    except FileNotFoundError:
        raise InputError(f"The weight file {path} is missing. Download or convert the model again.") from None
    except (zipfile.BadZipFile, struct.error, OSError, NotImplementedError) as error:
        raise _damaged(path, error) from None
    return records


def _unpickle(path: Path) -> dict[Any, Any]:
    """The dict in a `.bin`, its tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes half a second

    try:
        with FakeTensorMode(), warnings.catch_warnings(action="ignore"):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can lead to any
        refused = re.search(r"GLOBAL ([\w.]+)|(TorchScript)", str(error))
        if refused or isinstance(error, pickle.UnpicklingError):
            what = f" ({refused[1] or refused[2]})" if refused else ""
            raise InputError(
                f"{path} holds more than tensors{what}, which could run code; nothing of it was run. Use a version of "
                "the model in safetensors, or save it as such where you trust the file."
            ) from None
        raise _damaged(path, error) from None
    if not isinstance(content, dict):
        raise InputError(
            f"{path} holds a {type(content).__name__}, but a model's tensors by name were expected. {SAVE_AGAIN}"
        )
    return content


def _place_in_records(path: Path, name: str, tensor: torch.Tensor, records: dict[int, int]) -> StoredTensor:
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if start is None:
        raise InputError(
            f"torch {torch.__version__} does not tell where the tensors lie in {path}. Install torch 2.7 or newer, or "
            "use a version of the model in safetensors."
        )
    first = tensor.storage_offset() * tensor.itemsize
    if first + tensor.nbytes > records.get(start, 0):
        raise _damaged(path, f"{name} does not lie in an uncompressed record")
    return StoredTensor(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), path, start + first, tensor.nbytes)


def _damaged(path: Path, reason: object) -> InputError:
    reason = str(reason).partition("\n")[0]
    return InputError(f"The weight file {path} is cut or damaged ({reason}). Download or convert the model again.")


def is_alias(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two names stand for one tensor in one place, as `.bin` files keep a tied lm_head."""
    return one.nbytes > 0 and replace(one, name=other.name) == other


def read_weights(folder: Path) -> StoredWeights:
    """The weights of a model folder: one file, or shards with an index that agrees with them.

    As transformers does it: safetensors if there are any, else `.bin`; one file before an index.
    """
    for single, index_file, read_file in (
        (SINGLE_FILE, INDEX_FILE, read_header),
        (PICKLED_FILE, PICKLED_INDEX_FILE, read_pickled),
    ):
        pickled = read_file is read_pickled
        if (folder / single).is_file():
            tensors = read_file(folder / single)
            return StoredWeights({tensor.name: tensor for tensor in tensors}, [folder / single], None, pickled)
        if (folder / index_file).is_file():
            index = read_json(folder / index_file, "the index of the weight shards")
            files, tensors = _read_shards(folder / index_file, index, read_file)
            return StoredWeights(tensors, files, index, pickled)
    raise InputError(
        f"There are no weights in {folder}: {SINGLE_FILE}, {PICKLED_FILE} or one of their indexes was expected. "
        "Download the model again."
    )


def _read_shards(
    path: Path, index: dict[str, Any], read_file: Callable[[Path], list[StoredTensor]]
) -> tuple[list[Path], dict[str, StoredTensor]]:
    """The shards that an index names and their tensors; InputError unless the two agree."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path} has no weight_map. Download or convert the model again.")
    nameless = next((name for name, file in weight_map.items() if not isinstance(file, str)), None)
    if nameless is not None:
        raise InputError(
            f"{path} places {nameless} in {weight_map[nameless]!r}, but a file name was expected. "
            "Download or convert the model again."
        )
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise InputError(
            f"{path} names {outside[0]!r}, but the shards must lie in the folder itself. "
            "Download or convert the model again."
        )
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise InputError(
            f"{path} names {len(missing)} weight file(s) that are missing, such as {missing[0]}. "
            "Download or convert the model again."
        )
    files = [path.parent / name for name in names]
    tensors = {tensor.name: tensor for file in files for tensor in read_file(file)}
    wrong = [name for name, file in weight_map.items() if name not in tensors or tensors[name].file.name != file]
    if wrong:
        raise InputError(
            f"{path} places {len(wrong)} tensor(s) in a file that does not hold them, such as {wrong[0]}. "
            "Download or convert the model again."
        )
    unlisted = set(tensors) - set(weight_map)
    if unlisted:
        raise InputError(
            f"{path} leaves out {len(unlisted)} tensor(s) of its shards, such as {min(unlisted)}. "
            "Download or convert the model again."
        )
    return files, tensors


def write_renamed(
    target: Path, tensors: Iterable[tuple[str, StoredTensor]], only: Collection[str] | None = None
) -> None:
    """Write a safetensors file of (new name, stored tensor) pairs; the bytes are copied from file to file.

    With `only`, a hole stands in for the bytes of all but these new names: good for what reads headers.
    """
    tensors = list(tensors)
    with target.open("wb") as out:
        write_header(out, tensors)
        for name, tensor in tensors:
            if only is None or name in only:
                copy_bytes(tensor, out)
            else:
                out.truncate(out.seek(tensor.nbytes, os.SEEK_CUR))


def check_written(file: Path, tensors: Iterable[tuple[str, StoredTensor]]) -> None:
    """CheckFailed unless `file`, read back, has the bytes of every (new name, stored tensor) pair."""
    found = {tensor.name: tensor for tensor in read_header(file)}
    for name, tensor in tensors:
        if not same_bytes(tensor, found[name]):
            raise CheckFailed(
                f"{name} in the new {file.name} differs from {tensor.name} in {tensor.file}. The disk or memory is "
                "faulty; nothing was kept. Write to another disk."
            )


def same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two stored tensors have the same dtype, shape and bytes; read in blocks."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        left = one.nbytes
        while left:
            size = min(BLOCK, left)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


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
                raise InputError(f"The weight file {tensor.file} was cut while it was read. Download it again.")
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
