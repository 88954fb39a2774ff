"""The models that the page shows: found and loaded once, shared by all visitors."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, ProcessorMixin

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import (
    check_placement,
    check_vision_language,
    first_line,
    load_model,
    load_processor,
    out_of_memory,
    resolve_weights,
)
from llava_norm_align.common.results import FOLDER
from llava_norm_align.common.revisions import split_revision
from llava_norm_align.common.weights import read_json
from llava_norm_align.diagnosis.formats import find
from llava_norm_align.modeling.families import has_norm
from llava_norm_align.space.defaults import default_models
from llava_norm_align.space.settings import ALIGNED, BASE, Settings

MICRO_NAMES = ("micro-LLaVA", "micro-LLaVA with a norm")  # stock, norm-aligned


@dataclass(frozen=True)
class Shown:
    """A model on the page."""

    name: str  # a Hub id with its revision, or the last part of a folder: never a path
    aligned: bool
    trained_steps: int | None  # of training with its norm; None: nothing in the folder says
    folder: Path
    model: PreTrainedModel
    processor: ProcessorMixin
    micro: bool = False  # micro-LLaVA, or trained on the same drawings
    # where the model computes: one request at a time, always in one thread, as the C library keeps memory for each
    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    @property
    def role(self) -> str:
        """The head of its column."""
        return "Norm-aligned" if self.aligned else "Base"


@dataclass(frozen=True)
class _Found:
    name: str
    folder: Path
    config: dict[str, Any]
    micro: bool = False

    @property
    def aligned(self) -> bool:
        return has_norm(self.config)


def load_models(settings: Settings, echo: Callable[[str], None] = lambda line: None) -> list[Shown]:
    """The base and the norm-aligned model, or the one that was named. InputError for models that cannot be shown."""
    check_placement(settings.dtype, settings.device)
    shown = []
    for found in find_models(settings, echo):
        echo(f"Loading {found.name}")
        try:
            # every CPU computes float32 fast, and bfloat16 takes one without its arithmetic several times as long
            dtype = "float32" if found.micro and settings.dtype == "auto" else settings.dtype
            model = load_model(found.folder, dtype, settings.device)
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise InputError(
                f"The memory does not suffice for {found.name} ({first_line(error)}). Pass --dtype bfloat16, --device "
                "cpu, only one of --base and --aligned, or a smaller model."
            ) from error
        steps, drawings = training(found.folder)
        processor, micro = load_processor(found.folder), found.micro or drawings
        shown.append(Shown(found.name, found.aligned, steps, found.folder, model, processor, micro))
    if all(one.model.device.type == "cpu" for one in shown):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(shown)))  # they answer at the same time
    return shown


def find_models(settings: Settings, echo: Callable[[str], None]) -> list[_Found]:
    """The one or two models that `settings` name, base first; without any, micro-LLaVA's."""
    if settings.base is None and settings.aligned is None:
        folders = default_models(settings.wheels, echo)
        return [
            _Found(name, folder, check_vision_language(folder), True)
            for name, folder in zip(MICRO_NAMES, folders, strict=True)
        ]
    wanted = ((settings.base, "--base", BASE, False), (settings.aligned, "--aligned", ALIGNED, True))
    return [_find(*one) for one in wanted if one[0] is not None]


def _find(model: str, option: str, variable: str, aligned: bool) -> _Found:
    name, revision = split_revision(model)
    try:
        folder = resolve_weights(name, revision)
        config = check_vision_language(folder)
    except InputError as error:
        raise InputError(
            f"{option} ({variable}): {error} Or set neither {BASE} nor {ALIGNED} to see micro-LLaVA."
        ) from error
    found = _Found(Path(name).resolve().name if Path(name).is_dir() else model, folder, config)
    if aligned and not found.aligned:
        raise InputError(
            f"{option} ({variable}): {model} is a {config['model_type']} without a norm after its projector; a "
            "norm-aligned model was expected. Convert it with `llava-norm-align convert`, or pass it as --base."
        )
    if found.aligned and not aligned:
        raise InputError(
            f"{option} ({variable}): {model} has a norm after its projector; a model without one was expected. "
            "Pass it as --aligned."
        )
    return found


def training(folder: Path) -> tuple[int | None, bool]:
    """The steps that the model in `folder` was trained for (None: nothing says), and if on easy-VQA's drawings."""
    file = folder / FOLDER / "training.json"
    if not file.is_file():
        return None, False
    content = read_json(file, "what train writes")
    steps, data = content.get("steps"), find(content, "recipe", "data_path")
    return steps if isinstance(steps, int) else None, str(data).startswith("easy-vqa")
