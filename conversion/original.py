"""The layout of the original LLaVA repository, brought into that of transformers (llava-hf).

Followed: haotian-liu/LLaVA, llava/model/builder.py (what a folder holds), llava/model/llava_arch.py and
llava/model/multimodal_projector/builder.py (names and maths of the projector),
llava/model/multimodal_encoder/clip_encoder.py (which hidden states), llava/mm_utils.py (padding of images, tokens
around an image), llava/train/train.py (mm_projector.bin); huggingface/transformers,
src/transformers/models/llava/convert_llava_weights_to_hf.py (names, `<image>`, `<pad>`, a vocabulary padded to 64).
Other than there, nothing is loaded whole and no dtype changes.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import resolve_weights
from llava_norm_align.common.results import write_json
from llava_norm_align.common.weights import (
    INDEX_FILE,
    PICKLED_FILE,
    PICKLED_INDEX_FILE,
    SINGLE_FILE,
    StoredTensor,
    read_json,
    read_weights,
)
from llava_norm_align.conversion.assemble import (
    EMBEDDING,
    Part,
    check_image_size,
    check_loads,
    language_model,
    projector_shapes,
    read_language_model,
    read_vision_tower,
    write_config,
    write_weights,
)
from llava_norm_align.conversion.processor_files import (
    IMAGE_TOKEN,
    PAD_TOKEN,
    VICUNA_TEMPLATE,
    image_processor_config,
    write_generation_config,
    write_tokenizer,
)
from llava_norm_align.conversion.projector_file import PROJECTOR, read_projector, split_projector

PROJECTOR_FILE = "mm_projector.bin"
LORA_FILES = ("adapter_config.json", "non_lora_trainables.bin")
TOWER_PREFIX = "model.vision_tower.vision_tower."
LANGUAGE_MODELS = {"llama": "llama", "mistral": "mistral", "qwen": "qwen2", "qwen2": "qwen2"}
STRATEGIES = {"patch": "default", "cls_patch": "full"}  # mm_vision_select_feature
# LLaVA's own fields among those of its language model, and a setting of generation
OTHER_FIELDS = (
    "mm_", "image_", "tune_", "freeze_", "unfreeze_", "use_mm_", "pretrain_", "tokenizer_", "vision_", "s2",
    "architectures", "max_length",
)  # fmt: skip
ROW_MULTIPLE = 64
NEXT = "llava-hf/llava-v1.6-vicuna-7b-hf"


def is_original(source: Path) -> bool:
    """Whether `source` is in the original repository's layout: a LLaVA, or what its training leaves of one."""
    if source.is_file():
        return source.suffix == ".bin"
    if (source / "non_lora_trainables.bin").is_file():
        return True
    if not (source / "config.json").is_file():
        return (source / PROJECTOR_FILE).is_file()
    config = read_json(source / "config.json", "the configuration of a model")
    return "mm_vision_tower" in config and not isinstance(config.get("text_config"), dict)


def stage_original(
    source: Path, stage: Path, vision: str | None, text: str | None, dry_run: bool = False
) -> tuple[list[str], int]:
    """Write the LLaVA in `source` to the new folder `stage` as a stock one; returns notes, and the rows of its table.

    `source`: a folder in the original layout, whose vision tower is `vision` (a CLIP: folder or Hub id); or an
    mm_projector.bin, or a folder with it and no language model, which is then `text`. Weights are copied as bytes; the
    table and head of the language model get rows for `<image>` and, without a padding token, `<pad>`, up to a multiple
    of 64, each the mean of the others: none of them is ever generated. A tower that was trained along is taken from
    `source`, its config and image processor from `vision`. With `dry_run`, holes stand in for most of the bytes.
    InputError for what the stock class cannot compute.
    """
    source = Path(source)
    config = _read_config(source)
    alone = _find_projector(source)
    _check_settings((source if source.is_dir() else source.parent) / "config.json", config)
    _check_parts(source, config, alone, vision, text)
    projector, trained_tower, stored = _split(source, alone)

    vision_folder = resolve_weights(vision)
    tower = read_vision_tower(vision_folder, trained_tower or None)
    if not tower.config["model_type"].startswith("clip"):
        raise InputError(
            f"{vision} is a {tower.config['model_type']}, but the original LLaVA reads a CLIP as its vision tower. "
            f"Pass the one that {source} was trained with as --vision."
        )
    if alone:
        text_folder = resolve_weights(text)
        llm = read_language_model(text_folder)
    else:
        text_folder = source
        own = {key: value for key, value in config.items() if not key.startswith(OTHER_FIELDS)}
        llm = language_model(source, _language_model_type(source, config), own, stored)
    _check_shapes(source, config, projector, tower, llm, vision, text)
    image_processor = image_processor_config(vision_folder, "clip")
    check_image_size(vision_folder, image_processor, tower.config)
    if config.get("image_aspect_ratio") == "pad":  # to a square, before it is resized
        image_processor |= {"image_processor_type": "LlavaImageProcessor", "do_pad": True}

    stage.mkdir()
    ids = write_tokenizer(stage, text_folder, pad=True, text_config=None if alone else _tokenizer_config(source, llm))
    rows = _count_rows(llm, ids)
    if PAD_TOKEN in ids:
        llm = replace(llm, config={**llm.config, "pad_token_id": ids[PAD_TOKEN]})
    write_config(
        stage,
        tower,
        llm,
        image_processor,
        image_token_id=ids[IMAGE_TOKEN],
        rows=rows,
        strategy=STRATEGIES[config.get("mm_vision_select_feature", "patch")],
        feature_layer=config.get("mm_vision_select_layer", -2),
    )
    _write_generation_config(stage, text_folder, llm, ids)
    write_weights(stage, tower, llm, projector, rows, dry_run)
    check_loads(stage, vision, text or str(source))
    notes = _notes(stage, config, llm, ids, rows, vision, bool(trained_tower))
    return notes, llm.tensors[EMBEDDING].shape[0]


def _read_config(source: Path) -> dict[str, Any]:
    """The original config.json; empty for a projector alone, which need not have one."""
    folder = source if source.is_dir() else source.parent
    for name in LORA_FILES:
        if source.is_dir() and (source / name).is_file():
            raise InputError(
                f"{source} holds LoRA weights ({name}) without the model they belong to. Merge them first with "
                "scripts/merge_lora_weights.py of the LLaVA repository, then convert the result."
            )
    if (folder / "config.json").is_file() or not (source.is_file() or (source / PROJECTOR_FILE).is_file()):
        config = read_json(folder / "config.json", "the configuration of a LLaVA in the original layout")
        return config if source.is_dir() or "mm_vision_tower" in config else {}
    return {}


def _find_projector(source: Path) -> Path | None:
    """The file of a projector alone; None for a folder with a language model."""
    if source.is_file():
        return source
    whole = any((source / name).is_file() for name in (SINGLE_FILE, INDEX_FILE, PICKLED_FILE, PICKLED_INDEX_FILE))
    return None if whole or not (source / PROJECTOR_FILE).is_file() else source / PROJECTOR_FILE


def _check_settings(path: Path, config: dict[str, Any]) -> None:
    """InputError for a LLaVA that computes what transformers' LLaVA cannot."""
    ratio, merge = str(config.get("image_aspect_ratio")), str(config.get("mm_patch_merge_type"))
    for found, wrong, remedy in (
        (
            f"mm_projector_type {config.get('mm_projector_type')}",
            config.get("mm_projector_type") not in (None, "mlp2x_gelu"),
            "transformers' LLaVA has mlp2x_gelu alone: two linear layers, a GELU between. Use a checkpoint with it",
        ),
        (
            f"image_aspect_ratio {ratio}, mm_patch_merge_type {merge}",
            ratio not in ("None", "pad", "square") or merge not in ("None", "flat"),
            f"this is LLaVA-1.6 (NeXT), which cuts images into tiles. Use its transformers version, such as {NEXT}",
        ),
        (
            "mm_use_im_start_end true",
            config.get("mm_use_im_start_end"),
            "its prompts put <im_start> and <im_end> around an image, which the processor does not write. Use a "
            "checkpoint that was trained without them, as LLaVA-1.5 was",
        ),
        (
            f"mm_resampler_type {config.get('mm_resampler_type')}",
            config.get("mm_resampler_type"),
            "transformers' LLaVA has no resampler. Use a checkpoint without one",
        ),
        (
            "s2 true",
            config.get("s2"),
            "transformers' LLaVA sees an image at one scale. Use a checkpoint without s2",
        ),
        (
            f"mm_vision_select_feature {config.get('mm_vision_select_feature')!r}",
            config.get("mm_vision_select_feature", "patch") not in STRATEGIES,
            f"one of {', '.join(STRATEGIES)} was expected. Correct it, or download the model again",
        ),
        (
            f"mm_vision_select_layer {config.get('mm_vision_select_layer')!r}",
            not isinstance(config.get("mm_vision_select_layer", -2), int),
            "the number of a layer, such as -2, was expected. Correct it, or download the model again",
        ),
    ):
        if wrong:
            raise InputError(f"{path} says {found}: {remedy}.")


def _check_parts(
    source: Path, config: dict[str, Any], alone: Path | None, vision: str | None, text: str | None
) -> None:
    """InputError unless just the parts that `source` lacks are named."""
    if vision is None:
        tower = config.get("mm_vision_tower") or "openai/clip-vit-large-patch14-336"
        raise InputError(
            f"{source} is in the layout of the original LLaVA repository, which keeps the vision tower apart. Pass "
            f"--vision {tower}, or the folder that holds it."
        )
    if alone and text is None:
        raise InputError(
            f"{alone} is a projector alone. Pass the language model that it was trained with as --text (a folder or "
            "Hub id, such as lmsys/vicuna-7b-v1.5)."
        )
    if text is not None and not alone:
        raise InputError(f"{source} holds its own language model, so --text {text} has no use. Leave it out.")


def _language_model_type(source: Path, config: dict[str, Any]) -> str:
    """transformers' model type of the language model, from the class LlavaLlamaForCausalLM or the type llava_llama."""
    name = (config.get("architectures") or [""])[0]
    match = re.fullmatch(r"Llava(\w+?)ForCausalLM", str(name))
    kind = match[1].lower() if match else str(config.get("model_type")).removeprefix("llava").strip("_") or "llama"
    if kind not in LANGUAGE_MODELS:
        raise InputError(
            f"{source} is a LLaVA of model_type {config.get('model_type')} ({name or 'no architectures named'}); in "
            f"the original layout those with {', '.join(sorted(set(LANGUAGE_MODELS.values())))} are read. Use a "
            "version that was saved by transformers' LlavaForConditionalGeneration."
        )
    return LANGUAGE_MODELS[kind]


def _split(
    source: Path, alone: Path | None
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Projector (in llava-hf's names), vision tower (in its own names) and language model of a checkpoint."""
    if alone:
        return {PROJECTOR + name: tensor for name, tensor in read_projector(alone).items()}, {}, {}
    stored = read_weights(source).tensors
    if "model.image_newline" in stored:
        raise InputError(
            f"The weights in {source} have model.image_newline: this is LLaVA-1.6 (NeXT), which cuts images into "
            f"tiles. Use its transformers version, such as {NEXT}."
        )
    projector, rest = split_projector(stored, source)
    tower = {n.removeprefix(TOWER_PREFIX): tensor for n, tensor in rest.items() if n.startswith(TOWER_PREFIX)}
    llm = {name: tensor for name, tensor in rest.items() if not name.startswith(TOWER_PREFIX)}
    return {PROJECTOR + name: tensor for name, tensor in projector.items()}, tower, llm


def _check_shapes(
    source: Path,
    config: dict[str, Any],
    projector: dict[str, StoredTensor],
    tower: Part,
    llm: Part,
    vision: str,
    text: str | None,
) -> None:
    """InputError unless the projector leads from this tower to this language model."""
    dim, width = projector[PROJECTOR + "linear_1.weight"].shape
    if tower.config["hidden_size"] != width:
        raise InputError(
            f"The tower {vision} is {tower.config['hidden_size']} wide, but the projector in {source} takes {width} "
            f"(mm_hidden_size). Pass the tower that it was trained with"
            f"{' as --vision: ' + str(config['mm_vision_tower']) if config.get('mm_vision_tower') else ''}."
        )
    if llm.config["hidden_size"] != dim:
        raise InputError(
            f"The language model {text or source} is {llm.config['hidden_size']} wide, but the projector in {source} "
            f"makes tokens of {dim}. {'Pass the one it was trained with as --text' if text else 'Download it again'}."
        )
    for name, shape in projector_shapes(tower, llm).items():
        if projector[PROJECTOR + name].shape != shape:
            raise InputError(
                f"{name} of the projector in {source} is {list(projector[PROJECTOR + name].shape)}, but {list(shape)} "
                "was expected. Download it again."
            )


def _tokenizer_config(source: Path, llm: Part) -> PretrainedConfig:
    """A config by which transformers finds the tokenizer's class: that of LLaVA is unknown or misleads."""
    return AutoConfig.for_model("llama" if (source / "tokenizer.model").is_file() else llm.config["model_type"])


def _count_rows(llm: Part, ids: dict[str, int]) -> int:
    """The rows of the text table, with those that the added tokens need, up to a multiple of 64."""
    rows = llm.tensors[EMBEDDING].shape[0]
    needed = max(ids.values()) + 1
    return rows if needed <= rows else -(-needed // ROW_MULTIPLE) * ROW_MULTIPLE


def _write_generation_config(stage: Path, text_folder: Path, llm: Part, ids: dict[str, int]) -> None:
    write_generation_config(stage, text_folder, llm.config)
    if PAD_TOKEN in ids:
        config = read_json(stage / "generation_config.json", "a generation configuration")
        write_json(stage / "generation_config.json", {**config, "pad_token_id": ids[PAD_TOKEN]})


def _notes(
    stage: Path, config: dict[str, Any], llm: Part, ids: dict[str, int], rows: int, vision: str, trained: bool
) -> list[str]:
    trained_with = config.get("mm_vision_tower")
    notes = [f"vision tower: {vision}" + (f"; the model was trained with {trained_with}" if trained_with else "")]
    if trained:
        notes[0] += "; its weights are those in the checkpoint, where it was trained along"
    if not config:
        notes.append("no config.json beside the projector: LLaVA-1.5's hidden states (-2, patches) are taken")
    before = llm.tensors[EMBEDDING].shape[0]
    tokens = ", ".join(f"{token} {number}" for token, number in ids.items())
    notes.append(f"token ids: {tokens}" + (f"; vocabulary {before} -> {rows}" if rows != before else ""))
    if config.get("image_aspect_ratio") == "pad":
        notes.append("images are padded to a square, as in training (image_aspect_ratio pad)")
    if (stage / "chat_template.jinja").read_text(encoding="utf-8").endswith(VICUNA_TEMPLATE):
        notes.append(
            "the tokenizer has no chat template: LLaVA-1.5's (vicuna) was written; if the model was trained with "
            "another prompt, edit chat_template.jinja"
        )
    return notes
