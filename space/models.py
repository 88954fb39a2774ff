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
from llava_norm_align.common.weights import read_json
from llava_norm_align.modeling.families import FAMILIES
from llava_norm_align.space.defaults import default_models
from llava_norm_align.space.settings import ALIGNED, BASE, Settings, split_revision

ALIGNED_TYPES = {f"{family}_norm_align" for family in FAMILIES}
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
    micro: bool = False
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
        return self.config["model_type"] in ALIGNED_TYPES


def load_models(settings: Settings, echo: Callable[[str], None] = lambda line: None) -> list[Shown]:
    """The base and the norm-aligned model, or the one that was named. InputError for models that cannot be shown."""
    check_placement(settings.dtype, settings.device)
    shown = []
    for found in find_models(settings, echo):
        echo(f"Loading {found.name}")
        try:
            model = load_model(found.folder, settings.dtype, settings.device)
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise InputError(
                f"The memory does not suffice for {found.name} ({first_line(error)}). Pass --dtype bfloat16, --device "
                "cpu, only one of --base and --aligned, or a smaller model."
            ) from error
        processor = load_processor(found.folder)
        shown.append(
            Shown(found.name, found.aligned, trained_steps(found.folder), found.folder, model, processor, found.micro)
        )
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
    found = [
        _find(model, option, variable)
        for model, option, variable in ((settings.base, "--base", BASE), (settings.aligned, "--aligned", ALIGNED))
        if model is not None
    ]
    if len(found) == 2 and not found[1].aligned:
        raise InputError(
            f"{settings.aligned} is a {found[1].config['model_type']}, which has no norm after its projector; a "
            "norm-aligned model was expected as --aligned. Convert it with `llava-norm-align convert`, or leave "
            "--aligned out to show the base alone."
        )
    return found


def _find(model: str, option: str, variable: str) -> _Found:
    name, revision = split_revision(model)
    try:
        folder = resolve_weights(name, revision)
        config = check_vision_language(folder)
    except InputError as error:
        raise InputError(
            f"{option} ({variable}): {error} Or set neither {BASE} nor {ALIGNED} to see micro-LLaVA."
        ) from error
    is_folder = Path(name).is_dir()
    return _Found(Path(name).resolve().name if is_folder else model, folder, config)


def trained_steps(folder: Path) -> int | None:
    """How many steps the model in `folder` was trained for, by its training.json; None without one."""
    file = folder / FOLDER / "training.json"
    if not file.is_file():
        return None
    steps = read_json(file, "what train writes").get("steps")
    return steps if isinstance(steps, int) else None
