"""Checks of a converted folder that load no weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from llava_norm_align.common.errors import CheckFailed
from llava_norm_align.modeling import LlavaNormAlignForConditionalGeneration


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No load report and no progress bar from transformers: what they say is checked and raised here."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def check_keys(
    folder: Path,
    model_class: type[PreTrainedModel] = LlavaNormAlignForConditionalGeneration,
    config: PretrainedConfig | None = None,
) -> int:
    """Load `folder` as a `model_class` without memory (meta device); returns its number of tensors.

    `config` takes the place of the folder's config.json. transformers itself renames and compares the checkpoint's
    keys and shapes. RuntimeError, from the model's guard, if one is missing, left over or of another shape.
    """
    with quiet_transformers():
        model = model_class.from_pretrained(folder, config=config, device_map="meta", dtype="auto")
    return len(model.state_dict())


def check_norm(file: Path, prefix: str, hidden_size: int, bias: bool) -> dict[str, Any]:
    """The stored norm's names, shapes and dtypes; CheckFailed unless it is complete, in fp32, finite, with a gain."""
    tensors = load_file(file)
    expected = {f"{prefix}align_norm.weight"} | ({f"{prefix}align_norm.bias"} if bias else set())
    for name in sorted(expected | set(tensors)):
        tensor = tensors.get(name)
        good = (
            name in expected
            and tensor is not None
            and tensor.shape == (hidden_size,)
            and tensor.dtype == torch.float32
        )
        if not good or not torch.isfinite(tensor).all():
            raise CheckFailed(
                f"The norm's tensor {name} is missing, not finite, or not fp32 [{hidden_size}] in {file.name}."
            )
    if not tensors[f"{prefix}align_norm.weight"].any():
        raise CheckFailed(f"The norm's tensor {prefix}align_norm.weight is all zero in {file.name}.")
    return {name: {"dtype": "F32", "shape": list(tensor.shape)} for name, tensor in sorted(tensors.items())}
