"""What must be the same for two models' answers to be compared: generation, prompt and image preprocessing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, ProcessorMixin

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import load_processor
from llava_norm_align.common.prompts import render_prompt, without_doubled_bos

# settings of an image processor that have an effect only while a switch is on
SWITCHED = {
    "do_resize": ("size", "resample"),
    "do_center_crop": ("crop_size",),
    "do_rescale": ("rescale_factor",),
    "do_normalize": ("image_mean", "image_std"),
    "do_pad": ("pad_size",),
}
NAMES = ("processor_class", "image_processor_type", "auto_map")  # the class that was loaded stands in for them


def generation_settings(
    folder: Path, config: Mapping[str, Any], dtype: str, four_bit: bool, max_new_tokens: int, trust_remote_code: bool
) -> dict[str, Any]:
    """How a model generates: greedy, and what may differ from one checkpoint to another. Its weights are not read."""
    try:
        own = GenerationConfig.from_pretrained(folder)
    except OSError:  # it has none
        loaded = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        own = GenerationConfig.from_model_config(loaded)
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    named = config.get("dtype") or config.get("torch_dtype") or "auto"
    return {
        "do_sample": False,
        "num_beams": 1,
        "max_new_tokens": max_new_tokens,
        "eos_token_id": sorted({end for end in ends if end is not None}),
        "dtype": named if dtype == "auto" else dtype,
        "load_in_4bit": four_bit,
    }


def prompt_template(processor: ProcessorMixin) -> dict[str, str]:
    """The prompt of a question with an image and of one without."""
    return {
        name: without_doubled_bos(processor, render_prompt(processor, "{question}", with_image))
        for name, with_image in (("with_image", True), ("without_image", False))
    }


def image_processing(processor: ProcessorMixin) -> dict[str, Any]:
    """The settings of a processor's image processor that have an effect, as JSON knows them."""
    image_processor = processor.image_processor
    settings = json.loads(json.dumps(image_processor.to_dict(), default=str))
    idle = {name for switch, names in SWITCHED.items() if not settings.get(switch) for name in names}
    kept = {
        name: value
        for name, value in settings.items()
        if value is not None and value is not False and name not in idle | {*NAMES} and not name.startswith("_")
    }
    return {"class": type(image_processor).__name__, **dict(sorted(kept.items()))}


def model_settings(
    folder: Path,
    config: Mapping[str, Any],
    *,
    dtype: str,
    four_bit: bool,
    max_new_tokens: int,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """All settings of a model that another must share; nothing large is loaded."""
    processor = load_processor(folder, trust_remote_code)
    return {
        "generation": generation_settings(folder, config, dtype, four_bit, max_new_tokens, trust_remote_code),
        "prompt": prompt_template(processor),
        "image_processing": image_processing(processor),
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }


def check_comparable(name: str, settings: Mapping[str, Any], other_name: str, other: Mapping[str, Any]) -> None:
    """InputError with the first setting in which two models differ."""
    difference = first_difference(settings, other)
    if difference is None:
        return
    setting, here, there = difference
    remedy = {
        "generation.dtype": "Pass --dtype with the one that both are to be loaded in.",
        "generation.eos_token_id": "Make generation_config.json of the two the same.",
    }.get(setting, "Make the processor's files of the two the same, or compare other models.")
    raise InputError(
        f"{name} and {other_name} cannot be compared fairly: {setting} is {here} in the first and {there} in the "
        f"second. {remedy}"
    )


def first_difference(one: Any, other: Any, name: str = "") -> tuple[str, str, str] | None:
    """The dotted name of the first setting that differs, and both values in short; None if all are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            found = first_difference(one.get(key), other.get(key), f"{name}.{key}".lstrip("."))
            if found:
                return found
        return None
    return None if one == other else (name, _short(one), _short(other))


def _short(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."
