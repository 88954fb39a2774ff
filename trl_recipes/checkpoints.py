"""Checkpoints of a training: whole or not there, loadable alone, and resumed with exactly their weights.

transformers' Trainer loads a checkpoint with load_state_dict(strict=False). For a LLaVA the names in the file differ
from those in memory, so no weight is loaded, with only a warning. Here weights are read by from_pretrained.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, ProcessorMixin
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.folders import FULL
from llava_norm_align.common.loading import first_line
from llava_norm_align.common.results import FOLDER, provenance, write_json
from llava_norm_align.common.weights import read_header, read_json, read_weights
from llava_norm_align.conversion.processor_fields import complete_processor_files, make_tokenizer_portable
from llava_norm_align.conversion.projector_file import load_projector, save_projector
from llava_norm_align.modeling.modeling_llava_norm_align import check_loading_info

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"  # written last
START_FILE = f"{FOLDER}/start.json"
ADAPTER_FILE = "adapter_model.safetensors"
PROJECTOR_FILE = "projector.safetensors"
RESUME_FILES = [  # what only a resumed run reads
    STATE_FILE, START_FILE, "optimizer*", "scheduler.pt", "rng_state*", "scaler.pt", "global_step*", "latest",
    "zero_to_fp32.py", "pytorch_model_fsdp*",
]  # fmt: skip
# fields that a resumed run may change: where and how long, not what is computed in a step
FREE_FIELDS = ("output_dir", "max_steps", "num_train_epochs", "report_to", "run_name", "disable_tqdm", "push_to_hub")
FREE_FIELDS += ("model_name_or_path", "image_folder", "resume", "overwrite", "norm_ratio_band", "use_cpu", "project")
FREE_PREFIXES = ("save_", "logging_", "hub_", "log_", "dataloader_", "trackio_", "eval_", "ddp_")
SAMPLE = 64  # values of each tensor that tell a model
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def last_checkpoint(output_dir: Path) -> Path:
    """The newest whole checkpoint; what a cut save left is ignored with a sentence. InputError if there is none."""
    for path in sorted(output_dir.glob("tmp-checkpoint-*")):
        logger.warning("%s is ignored: the run ended while it was saved.", path)
    found = [
        (int(match[1]), path)
        for path in output_dir.glob("checkpoint-*")
        if path.is_dir() and (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    ]
    for _, path in sorted(found, reverse=True):
        try:
            check_whole(path)
        except InputError as error:
            logger.warning("%s is ignored: %s", path, error)
        else:
            return path
    raise InputError(f"There is no whole checkpoint in {output_dir} to resume from. Train without --resume.")


def check_whole(folder: Path) -> None:
    """InputError unless `folder` holds what a resumed run needs; of the weights only the headers are read."""
    missing = [name for name in (STATE_FILE, "optimizer.pt", "scheduler.pt") if not (folder / name).is_file()]
    if missing and not _is_sharded(folder):
        raise InputError(
            f"{missing[0]} is missing in {folder}, so the training cannot be resumed from it. It was cut, or saved "
            "with save_only_model: resume from another checkpoint, or start anew from its weights."
        )
    read_json(folder / STATE_FILE, "the state of a training")
    part = next((folder / name for name in (ADAPTER_FILE, PROJECTOR_FILE) if (folder / name).is_file()), None)
    if part is not None:
        read_header(part)
    elif not _is_sharded(folder):
        read_weights(folder)


def _is_sharded(folder: Path) -> bool:
    """Whether FSDP or DeepSpeed wrote the optimizer in its own format, which each reads itself."""
    return any(folder.glob("global_step*")) or any(folder.glob("optimizer_*")) or (folder / "optimizer.bin").is_file()


def fingerprint(model: nn.Module) -> str:
    """Hex sha256 that tells the model a training started from: names, shapes and the first values of its tensors."""
    digest = hashlib.sha256()
    fields = {name: value for name, value in model.config.to_dict().items() if name.startswith("norm_align_")}
    digest.update(json.dumps(fields, sort_keys=True).encode())
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        if ".lora_" in name or parameter.is_meta:  # LoRA starts at random
            continue
        values = parameter.detach().flatten()[:SAMPLE].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + values.numpy().tobytes())
    return digest.hexdigest()


def check_same_start(folder: Path, model: nn.Module, start: str) -> None:
    """InputError if the checkpoint in `folder` was written by a training that started from another model."""
    if (folder / START_FILE).is_file():
        written = read_json(folder / START_FILE, "what a checkpoint's training started from")
        if written.get("weights") != start:
            raise InputError(
                f"{folder} was written by a training of another model ({written.get('model')}); this one trains "
                f"{model.config._name_or_path or 'a model without a name'}. Resume with the model that it started "
                "from, or train into another output_dir."
            )
    elif (folder / "config.json").is_file():
        found = read_json(folder / "config.json", "the configuration of a model").get("model_type")
        if found != model.config.model_type:
            raise InputError(
                f"{folder} holds a {found}, but a {model.config.model_type} is trained. Resume with the model that "
                "the checkpoint started from, or train into another output_dir."
            )


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Give `model` exactly the weights in `folder`: InputError for a missing, unexpected or rounded tensor.

    They are read in the dtype they are stored in (float32 if that differs between parts), on the CPU: that takes the
    memory of a second model.
    """
    stored = {tensor.dtype for name, tensor in read_weights(folder).tensors.items() if ".align_norm." not in name}
    dtype = DTYPES.get(next(iter(stored)), torch.float32) if len(stored) == 1 else torch.float32
    try:
        loaded, info = type(model).from_pretrained(folder, dtype=dtype, output_loading_info=True)
        check_loading_info(loaded, info, folder)
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(f"{folder} cannot be resumed from: {first_line(error)}") from error
    tensors, here = loaded.state_dict(), model.state_dict()
    if set(tensors) != set(here):
        differing = min(set(tensors) ^ set(here))
        raise InputError(f"{folder} is of another model: only one of the two has {differing}. Resume with its own.")
    for name, tensor in tensors.items():
        here[name].copy_(tensor)
        _check_exact(here[name], tensor, name, folder)


@torch.no_grad()
def load_adapter_weights(model: nn.Module, folder: Path) -> None:
    """Give the PEFT `model` exactly the adapter in `folder`: InputError for a missing or unexpected tensor."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    if not (folder / ADAPTER_FILE).is_file():
        raise InputError(f"{folder} has no {ADAPTER_FILE}, but an adapter is trained. Resume without LoRA.")
    tensors = load_file(folder / ADAPTER_FILE)
    differing = set(tensors) ^ set(get_peft_model_state_dict(model))
    if differing:
        raise InputError(
            f"The adapter in {folder} is not this one: {len(differing)} tensors are in one of the two only, such as "
            f"{min(differing)}. Resume with the LoRA settings that it was trained with."
        )
    set_peft_model_state_dict(model, dict(tensors))
    here = get_peft_model_state_dict(model)
    for name, tensor in tensors.items():
        _check_exact(here[name], tensor, name, folder)


def load_projector_exactly(model: PreTrainedModel, folder: Path) -> None:
    """Give `model` exactly the projector and norm in `folder`, which holds nothing else of a model."""
    notes = load_projector(model, folder / PROJECTOR_FILE)
    if notes:  # something is missing, or rounded
        raise InputError(f"{folder} cannot be resumed from: {notes[0]}. Resume with the model that it started from.")


def save_projector_folder(folder: Path, model: PreTrainedModel, processor: ProcessorMixin) -> None:
    """The projector and its norm, the processor, and what a generation needs, for a checkpoint without the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    save_projector(model, folder / PROJECTOR_FILE)
    processor.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)  # what cannot be saved is known before hours of training


def rounded(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """`tensors` in `dtype`, but a norm after the projector as it is; one that stands under two names stays one."""
    done: dict[tuple[int, torch.Size], torch.Tensor] = {}
    result = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and ".align_norm." not in name:
            place = tensor.data_ptr(), tensor.shape
            tensor = done[place] if place in done else done.setdefault(place, tensor.to(dtype))
        result[name] = tensor
    return result


def name_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Let config.json name the dtype that the weights in `folder` are stored in."""
    config = read_json(folder / "config.json", "the configuration of a model")
    name = str(dtype).removeprefix("torch.")
    for part in (config, config.get("text_config"), config.get("vision_config")):
        if part and "dtype" in part:
            part["dtype"] = name
    config["dtype"] = name
    write_json(folder / "config.json", config)


def _check_exact(here: torch.Tensor, stored: torch.Tensor, name: str, folder: Path) -> None:
    wide = torch.promote_types(here.dtype, stored.dtype)
    if not torch.equal(here.cpu().to(wide), stored.to(wide)):
        raise InputError(
            f"{name} in {folder} is {stored.dtype}, which {here.dtype} does not hold exactly. Resume with the dtype "
            "that the training started with."
        )


def write_start(folder: Path, model: nn.Module, start: str, recipe: dict[str, Any]) -> None:
    """Write which model the training started from, and how it is trained."""
    name = model.config._name_or_path
    write_json(folder / START_FILE, {**provenance(), "model": name, "weights": start, "recipe": recipe})


def check_same_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    """InputError if the checkpoint's training had another value of a field that changes what is computed."""
    if not (folder / START_FILE).is_file():
        return
    before = read_json(folder / START_FILE, "what a checkpoint's training started from").get("recipe", {})
    for name in sorted(set(before) | set(recipe)):
        if name in FREE_FIELDS or name.startswith(FREE_PREFIXES) or before.get(name) == recipe.get(name):
            continue
        values = before.get(name), getattr(recipe.get(name), "value", recipe.get(name))  # an enumeration's
        was, now = ("the default" if value is None else value for value in values)
        raise InputError(
            f"{name} was {was} in the training of {folder}, but is {now} now. A training goes on as it began: pass "
            "the same value, or train into another output_dir."
        )


def complete_folder(folder: Path, config: Any) -> None:
    """Let a processor that transformers 5 saved load in 4.57, and count image tokens as the model does."""
    make_tokenizer_portable(folder)
    complete_processor_files(folder, config)


@contextmanager
def without_zero3(state: AcceleratorState) -> Iterator[None]:
    """In the block, a model is built by this process alone; under ZeRO-3, transformers lets it wait for the others."""
    if state.deepspeed_plugin is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(state.deepspeed_plugin.hf_ds_config)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Remove `folder` if writing it fails, and turn a full disk into an InputError."""
    try:
        yield
    except Exception as error:
        full = [os.strerror(code) for code in FULL]
        no_room = getattr(error, "errno", None) in FULL or any(text in str(error) for text in full)
        no_room |= shutil.disk_usage(folder.parent).free < 2**20  # torch.save does not say why it failed
        shutil.rmtree(folder, ignore_errors=True)
        if not no_room:
            raise
        raise InputError(
            f"There is no room to save a checkpoint in {folder.parent} ({os.strerror(errno.ENOSPC)}). The checkpoints "
            "before it are whole: make room, or set save_total_limit, and resume."
        ) from error


def publish(writing: Path, target: Path) -> None:
    """Rename a whole checkpoint to its name; an older one of the same step goes."""
    old = target.with_name(f"tmp-{target.name}-old")
    if target.exists():
        os.rename(target, old)
    os.rename(writing, target)
    shutil.rmtree(old, ignore_errors=True)


class Termination:
    """Remembers a SIGTERM until the next step ends, when all processes agree to save and to end."""

    def __init__(self):
        self.requested = self.agreed = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM in the block, if this is the main thread; the old handler comes back after it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: setattr(self, "requested", True))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
