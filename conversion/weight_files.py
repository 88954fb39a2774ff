"""The weight files of a converted model: which there are, how each comes to be, and whose bytes it holds."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tqdm import tqdm

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.results import sha256_file
from llava_norm_align.common.weights import (
    SINGLE_FILE,
    StoredTensor,
    check_written,
    is_alias,
    read_header,
    write_index,
    write_renamed,
)
from llava_norm_align.conversion.calibration import FLOAT_DTYPES
from llava_norm_align.conversion.files import check_copies, copy_with_checksums
from llava_norm_align.conversion.source import HEAD_NAME, Source

LEARNED = ("layer_norm", "rms_norm")  # the types with tensors


@dataclass(frozen=True)
class WeightFile:
    """One weight file of the source in the new folder."""

    name: str
    source: Path
    how: str  # "copy", "link" (a hard link), "rewrite" (a .bin, as safetensors; or some tensors of it)


def plan_weights(stock: Source, fields: dict[str, Any], link: bool, fold: bool) -> list[WeightFile]:
    """The source's weight files under the names that they get; the norm's own file, if there is one, is the last."""
    files, norm = stock.weights.files, fields["norm_align_type"] in LEARNED and not stock.norm
    total = len(files) + norm
    names = [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    folded = {tensor.file for tensor in projector_output(stock)} if fold else set()

    def how(file: Path) -> str:
        if stock.weights.pickled or file in stock.rewritten:
            return "rewrite"
        return "link" if link and file not in folded else "copy"

    return [
        WeightFile(name if total > 1 else SINGLE_FILE, file, how(file))
        for name, file in zip(names, files, strict=False)
    ]


def projector_output(stock: Source) -> list[StoredTensor]:
    """linear_2 of the projector: weight, and bias if it has one."""
    prefix = f"{stock.projector_prefix}linear_2."
    return [tensor for name, tensor in stock.weights.tensors.items() if name.startswith(prefix)]


def lay_out(folder: Path, stock: Source, plan: Sequence[WeightFile], fields: dict[str, Any]) -> None:
    """Write the norm's file and the index, with stand-ins for the source's files: checked before the bytes move."""
    for file in plan:
        if file.how == "rewrite":
            write_renamed(folder / file.name, _pairs(stock, file), only=())
        else:
            (folder / file.name).symlink_to(file.source.resolve())
    names = [file.name for file in plan]
    if norm := norm_tensors(stock, fields):
        names.append(f"model-{len(plan) + 1:05d}-of-{len(plan) + 1:05d}.safetensors")
        (folder / names[-1]).write_bytes(save(norm, metadata={"format": "pt"}))  # save_file would give it mode 0600
    if len(names) > 1:
        write_index(folder, [folder / name for name in names])


def norm_tensors(stock: Source, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A new norm's fp32 tensors [D] under the key layout of the source: every gain T / sqrt(D), every bias 0."""
    if fields["norm_align_type"] not in LEARNED or stock.norm:
        return {}
    size, name = stock.config.text_config.hidden_size, f"{stock.projector_prefix}align_norm"
    tensors = {
        f"{name}.weight": torch.full((size,), fields["norm_align_target"] / math.sqrt(size), dtype=torch.float32)
    }
    if fields["norm_align_bias"]:
        tensors[f"{name}.bias"] = torch.zeros(size)
    return tensors


def kept_tensors(stock: Source, file: Path | None = None) -> list[StoredTensor]:
    """The source's tensors (of one `file`), but for a head in a .bin that is only another name of the text table."""
    tensors = [tensor for tensor in stock.weights.tensors.values() if file in (None, tensor.file)]
    return [tensor for tensor in tensors if not (HEAD_NAME.fullmatch(tensor.name) and is_alias(tensor, stock.table))]


def count_tensors(stock: Source, fold: bool) -> dict[str, int]:
    """How many tensors of the converted model are the source's, and how many a projector file's, bit for bit."""
    kept = set(kept_tensors(stock)) - set(projector_output(stock) if fold else ())
    replaced = sum(tensor.file == stock.projector for tensor in kept)
    return {"untouched": len(kept) - replaced, "replaced": replaced}


def place_weights(folder: Path, stock: Source, plan: Sequence[WeightFile]) -> dict[str, int]:
    """Put the source's bytes in the place of their stand-ins; returns the checksums of what was copied."""
    for file in plan:
        (folder / file.name).unlink()
        if file.how == "link":
            _link(file.source.resolve(), folder / file.name)
    checksums = copy_with_checksums({file.name: file.source for file in plan if file.how == "copy"}, folder)
    for file in tqdm(_rewritten(plan), desc="rewrite weights", unit="file", disable=None):
        write_renamed(folder / file.name, _pairs(stock, file))
    return checksums


def check_weights(
    folder: Path, stock: Source, plan: Sequence[WeightFile], checksums: dict[str, int]
) -> dict[str, str]:
    """Read back what was written, not linked; returns {file: sha256}. CheckFailed if it is not the source's bytes."""
    digests = check_copies(folder, checksums)
    for file in tqdm(_rewritten(plan), desc="verify", unit="file", disable=None):
        check_written(folder / file.name, _pairs(stock, file))
        digests[file.name] = sha256_file(folder / file.name)
    return digests


def fold_factor(folder: Path, stock: Source, plan: Sequence[WeightFile], factor: float) -> dict[str, str]:
    """Multiply linear_2 of the projector by `factor` in place; returns {file: sha256} of the files it lies in."""
    names = {file.source: file.name for file in plan}
    for tensor in projector_output(stock):
        _multiply(folder / names[tensor.file], tensor, factor)
    changed = {names[tensor.file] for tensor in projector_output(stock)}
    return {name: sha256_file(folder / name) for name in sorted(changed)}


def _pairs(stock: Source, file: WeightFile) -> list[tuple[str, StoredTensor]]:
    return [(tensor.name, tensor) for tensor in kept_tensors(stock, file.source)]


def _rewritten(plan: Sequence[WeightFile]) -> list[WeightFile]:
    return [file for file in plan if file.how == "rewrite"]


def _multiply(file: Path, tensor: StoredTensor, factor: float) -> None:
    """Multiply `tensor` in `file` in place, computed in float64 and rounded to its own dtype."""
    stored = next(found for found in read_header(file) if found.name == tensor.name)
    dtype = FLOAT_DTYPES[tensor.dtype]
    with file.open("r+b") as weights:
        weights.seek(stored.offset)
        values = torch.frombuffer(bytearray(weights.read(stored.nbytes)), dtype=dtype)
        folded = (values.double() * factor).to(dtype)
        if not folded.isfinite().all():
            raise InputError(
                f"{tensor.name} of {tensor.file} times {factor:g} is not finite in {tensor.dtype}. Leave out --fold."
            )
        weights.seek(stored.offset)
        weights.write(folded.view(torch.uint8).numpy().tobytes())


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        raise InputError(
            f"{source} cannot be linked into the target ({os.strerror(error.errno)}). Leave out --link to copy."
        ) from None
