"""A checkpoint that was just written is read back, as its users will."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.loading import load_processor, resolve_model
from llava_norm_align.common.weights import INDEX_FILE, read_json
from llava_norm_align.conversion.doctor_alone import run_alone
from llava_norm_align.conversion.doctor_checks import Failed
from llava_norm_align.trl_recipes.checkpoints import ADAPTER_FILE, PROJECTOR_FILE

ADAPTER_CONFIG = "adapter_config.json"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def reload_checkpoint(folder: Path, projector: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """Read the checkpoint in `folder` back: what was done and how long it took. CheckFailed if it does not load.

    A model, or an adapter on its base, loads in a fresh process without this package and answers once. With
    `projector`, the folder holds a projector alone, whose tensors must be these, bit for bit.
    """
    started = time.perf_counter()
    try:
        if projector is not None:
            how = _reload_projector(folder, projector)
        elif (folder / ADAPTER_FILE).is_file():
            with _named_base(folder) as view:
                how = _reload_alone(view, "the adapter loads on its base")
        elif (folder / "model.safetensors").is_file() or (folder / INDEX_FILE).is_file():
            how = _reload_alone(folder, "the model loads")
        else:
            return {"folder": str(folder), "how": "not reloaded: its weights are sharded, for resuming alone"}
    except (Failed, InputError) as error:
        raise CheckFailed(
            f"The checkpoint {folder} was written, but it does not load again, so the model is not trained: {error} "
            "Correct the file that is named there in the model folder, and start again."
        ) from error
    seconds = time.perf_counter() - started
    return {"folder": str(folder), "how": f"reloaded: ok, {how}, {seconds:.1f} s", "seconds": seconds}


def _reload_alone(folder: Path, what: str) -> str:
    prompt = "image" if any((folder / name).is_file() for name in PROCESSOR_FILES) else "text"
    result = run_alone(folder, Path(sys.executable), prompt)
    note = f" ({result['note']})" if result["note"] else ""
    return f"{what} in a fresh process and answers on {result['device']}{note}"


@contextmanager
def _named_base(folder: Path) -> Iterator[Path]:
    """A folder of links to an adapter's files in which its base is a full path: the process works elsewhere."""
    config = read_json(folder / ADAPTER_CONFIG, "the configuration of an adapter")
    base = config.get("base_model_name_or_path")
    if not base:
        raise InputError(f"{folder / ADAPTER_CONFIG} names no base model. Load the model from a folder or Hub id.")
    base = resolve_model(base, None if os.path.isdir(base) else config.get("revision")).absolute()
    with tempfile.TemporaryDirectory() as scratch:
        view = Path(scratch)
        for path in folder.iterdir():
            if path.name != ADAPTER_CONFIG:
                os.symlink(path.absolute(), view / path.name)
        for path in base.glob("*.safetensors"):  # by the size of such files, a device with room is chosen
            os.symlink(path, view / f"base-{path.name}")
        (view / ADAPTER_CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
        yield view


def _reload_projector(folder: Path, expected: Mapping[str, torch.Tensor]) -> str:
    file = folder / PROJECTOR_FILE
    if not file.is_file():
        raise InputError(f"{file} is missing.")
    stored = {name.rpartition("multi_modal_projector.")[2]: tensor for name, tensor in load_file(file).items()}
    if stored.keys() != expected.keys():
        raise InputError(f"{file} and the model differ in {min(stored.keys() ^ expected.keys())}.")
    for name, tensor in expected.items():
        # what is stored in a wider dtype than the model's, as ZeRO's norm, is still the model's when it is rounded
        if stored[name].shape != tensor.shape or not torch.equal(stored[name].to(tensor.dtype), tensor):
            raise InputError(f"{name} in {file} is not the model's.")
    processor = load_processor(folder)
    try:
        GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"The generation configuration in {folder} does not load ({error}).") from error
    return f"{len(expected)} tensors of the projector bit for bit, {type(processor).__name__}"
