"""The projector of a file in the place of a source's own, for a conversion."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.results import sha256_file
from llava_norm_align.conversion.projector_file import (
    NEWLINE,
    NORM,
    check_fits,
    check_norm_type,
    norm_of,
    read_metadata,
    read_projector,
    read_values,
)
from llava_norm_align.conversion.source import Source
from llava_norm_align.conversion.weight_files import LEARNED


def replace_projector(
    stock: Source, file: Path, norm_type: str, start: str, bias: bool
) -> tuple[Source, dict[str, Any]]:
    """`stock` with the projector in `file`, and with its norm if it has one; and what calibration.json says of it.

    Nothing is written: the tensors of the result lie in the source's files and in `file`. InputError if the names or
    shapes are not the source's, or the options `norm_type`, `start` or `bias` contradict the file's norm.
    """
    projector, prefix = read_projector(file), stock.projector_prefix
    own = {
        NEWLINE if name.rpartition(".")[2] == NEWLINE else name.removeprefix(prefix): tensor
        for name, tensor in stock.weights.tensors.items()
        if name.startswith(prefix) or name.rpartition(".")[2] == NEWLINE
    }
    check_fits(projector, {name: tensor.shape for name, tensor in own.items()}, file)
    norm = norm_of(projector)
    if norm:
        _check_norm(stock, file, norm_type, start, bias, norm)
    tensors = dict(stock.weights.tensors)
    for name, tensor in projector.items():
        full = own[name].name if name in own else prefix + name
        tensors[full] = replace(tensor, name=full)
    left = {tensor.file for tensor in tensors.values()} - {file}
    files = [path for path in stock.weights.files if path in left] + [file]
    cut = {own[name].file for name in projector if name in own}
    started = read_metadata(file).get("norm_align_target") if norm else None
    described = {
        "file": file.name,
        "sha256": sha256_file(file),
        "norm": bool(norm),
        "norm_start": None if started is None else float(started),
    }
    weights = replace(stock.weights, tensors=tensors, files=files)
    return replace(stock, weights=weights, projector=file, rewritten=frozenset({file, *cut})), described


def _check_norm(stock: Source, file: Path, norm_type: str, start: str, bias: bool, norm: dict[str, Any]) -> None:
    if norm_type not in LEARNED or start != "text":
        options = f"--norm {norm_type}" if norm_type not in LEARNED else f"--start {start}"
        raise InputError(
            f"{file} holds a norm, which the result gets, but {options} asks for another one. Leave that out, or name "
            "a projector without a norm."
        )
    check_norm_type(file, norm_type)
    if not bias and f"{NORM}bias" in norm:
        raise InputError(f"{file} holds a norm with a bias, but --no-bias asks for one without. Leave it out.")
    size = (stock.config.text_config.hidden_size,)
    for name, tensor in norm.items():
        if tensor.shape != size:
            raise InputError(
                f"{name} in {file} is {list(tensor.shape)}, but the model's tokens have {size[0]} channels. Name the "
                "projector that was trained for this language model."
            )
        if not torch.isfinite(read_values(tensor)).all():
            raise InputError(f"{name} in {file} has NaN or inf. Use a projector of an earlier training step.")
    if not read_values(norm[f"{NORM}weight"]).any():
        raise InputError(f"{NORM}weight in {file} is all zero, so the model would see no image. Use another file.")


def check_norm_start(stock: Source, target: float) -> None:
    """InputError if the norm of the source's projector file is untrained and does not start at the norm `target`."""
    norm = {name: read_values(tensor) for name, tensor in stock.norm.items()}
    gain = norm["weight"].double()
    started = gain[0].item() * math.sqrt(len(gain))
    if gain.min() < gain.max() or norm.get("bias", torch.zeros(1)).any():
        return
    if not math.isclose(started, target, rel_tol=1e-6):
        raise InputError(
            f"The norm in {stock.projector} is untrained and starts at the L2 norm {started:.9g}, but this model's "
            f"text tokens have {target:.6g}. Pass --target {started:.9g} to keep that start, or name a file without "
            "a norm."
        )
