"""The processor and tokenizer files of a LLaVA, completed so that transformers 4.57 and 5 load and count alike."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PretrainedConfig

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.results import write_json
from llava_norm_align.common.weights import read_json

PROCESSOR_FILE = "processor_config.json"
IMAGE_PROCESSOR_FILE = "preprocessor_config.json"
TOKENIZER_FILE = "tokenizer_config.json"
JSON_FILES = (
    PROCESSOR_FILE,
    IMAGE_PROCESSOR_FILE,
    TOKENIZER_FILE,
    "tokenizer.json",
    "special_tokens_map.json",
    "chat_template.json",
    "generation_config.json",
)


def count_additional_tokens(vision_config: PretrainedConfig) -> int | None:
    """Tokens that the vision tower adds to its patches: 1 for a CLS token, more with registers, 0 for SigLIP.

    Counted on a model without memory (meta device) rather than looked up by model type. None if the tower cannot be
    called with plain pixels.
    """
    return _count_additional_tokens(vision_config.to_json_string(use_diff=False), type(vision_config))


@cache
def _count_additional_tokens(content: str, config_class: type[PretrainedConfig]) -> int | None:
    vision_config = config_class.from_dict(json.loads(content))
    try:
        height, width = _sides(vision_config.image_size)
        patch_height, patch_width = _sides(vision_config.patch_size)
        with torch.device("meta"), torch.no_grad():
            tower = AutoModel.from_config(vision_config).eval()
            pixels = torch.empty(1, vision_config.num_channels, height, width)
            tokens = tower(pixel_values=pixels).last_hidden_state.shape[1]
    except Exception:  # whatever a tower that we do not know raises
        return None
    return tokens - (height // patch_height) * (width // patch_width)


def _sides(size: int | list[int] | tuple[int, ...]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def processor_fields(config: PretrainedConfig) -> dict[str, Any]:
    """The processor's fields that decide how many image tokens a prompt gets, from the model's own config."""
    # VipLLaVA has no such field: it always leaves out the first token
    strategy = getattr(config, "vision_feature_select_strategy", "default")
    fields: dict[str, Any] = {
        "processor_class": processor_class(config),
        "vision_feature_select_strategy": strategy,
    }
    additional = count_additional_tokens(config.vision_config)
    if additional is None:
        return fields
    (height, width), (patch_height, patch_width) = map(
        _sides, (config.vision_config.image_size, config.vision_config.patch_size)
    )
    if fields["processor_class"] == "LlavaOnevisionProcessor":
        patches = (height // patch_height) * (width // patch_width)
        return fields | {"num_image_tokens": patches + additional}
    return fields | {"patch_size": patch_height, "num_additional_image_tokens": additional}


def processor_class(config: PretrainedConfig) -> str:
    """The processor of a family; LLaVA with a Pixtral tower has another, which is never changed."""
    family = config.model_type.removesuffix("_norm_align")
    return {"llava_next": "LlavaNextProcessor", "llava_onevision": "LlavaOnevisionProcessor"}.get(
        family, "LlavaProcessor"
    )


def check_processor_files(folder: Path, config: PretrainedConfig) -> None:
    """InputError if a JSON file of the processor or tokenizer in `folder` is broken; none of them must exist.

    The tokenizer must give the image token the id that `config` has for it.
    """
    for path in (folder / name for name in JSON_FILES):
        content = read_json(path, "a part of the processor") if path.is_file() else {}
        if path.name in (PROCESSOR_FILE, IMAGE_PROCESSOR_FILE):
            nested = content.get("image_processor") or {}
            if not isinstance(nested, dict):
                raise InputError(
                    f"image_processor in {path} is {json.dumps(nested)[:80]}, but an object was expected. "
                    "Download the file again."
                )
            check_size(path, content.get("size"))
            check_size(path, nested.get("size"))
    if not (folder / "tokenizer.json").is_file():
        return
    token, ids = image_token(folder), token_ids(folder / "tokenizer.json")
    if ids.get(token) != config.image_token_id:
        found = f"the id {ids[token]}" if token in ids else "no id"
        raise InputError(
            f"The tokenizer in {folder / 'tokenizer.json'} gives the image token {token} {found}, but "
            f"image_token_index in config.json is {config.image_token_id}. They must be the same: correct "
            "config.json, or download the model again."
        )


def image_token(folder: Path) -> str:
    """The placeholder of an image in a prompt: what the processor's files say, else `<image>`."""
    for name in (PROCESSOR_FILE, TOKENIZER_FILE):
        content = read_json(folder / name, "a part of the processor") if (folder / name).is_file() else {}
        token = content.get("image_token")
        if token:
            return token["content"] if isinstance(token, dict) else token
    return "<image>"


def token_ids(tokenizer: Path) -> dict[str, int]:
    """The id of every token in a tokenizer.json. InputError if it does not say."""
    content = read_json(tokenizer, "the tokenizer of a language model")
    try:
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # a unigram model has [piece, score] in the order of the ids
            vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
        return vocabulary | {token["content"]: token["id"] for token in content["added_tokens"]}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{tokenizer} is broken ({error!r}). Download the language model again.") from None


def check_size(path: Path, size: Any) -> None:
    """InputError unless the image processor in `path` has a size that transformers can read, or none."""
    values = size.values() if isinstance(size, dict) else [size]
    if not all(value is None or isinstance(value, int) for value in values):
        raise InputError(
            f"The image processor in {path} has the size {json.dumps(size)[:80]}, but a number or an object such as "
            '{"height": 336, "width": 336} was expected. Correct it or download the file again.'
        )


def complete_processor_files(folder: Path, config: PretrainedConfig) -> list[str]:
    """Write the LLaVA fields into the processor files of `folder`; returns what was changed, in words.

    Without them the processor fails, or counts one image token too few. With `processor_class`, 4.57's AutoProcessor
    does not ask about the remote code in config.json. `crop_size` is what vLLM reads for LLaVA with every tower. Files
    of another processor class (Pixtral's) and folders without an image processor are left as they are.
    """
    processor, image_processor, tokenizer = (
        read_json(folder / name, "a part of the processor") if (folder / name).is_file() else {}
        for name in (PROCESSOR_FILE, IMAGE_PROCESSOR_FILE, TOKENIZER_FILE)
    )
    nested = processor.get("image_processor") or {}  # transformers 5 has it in one file
    classes = [
        content["processor_class"]
        for content in (processor, image_processor, tokenizer)
        if content.get("processor_class")
    ]
    if not (image_processor or nested) or (classes and classes[0] != processor_class(config)):
        return []
    changes = []
    for name, value in processor_fields(config).items():
        if processor.get(name) != value:
            changes.append(f"{PROCESSOR_FILE}: {name} {json.dumps(processor.get(name))} -> {json.dumps(value)}")
            processor[name] = value
    for content, name in ((nested, PROCESSOR_FILE), (image_processor, IMAGE_PROCESSOR_FILE)):
        plain = processor_class(config) == "LlavaProcessor"
        if plain and content.get("size") and not content.get("crop_size"):
            content["crop_size"] = _crop_size(content["size"])
            changes.append(f"{name}: crop_size null -> {json.dumps(content['crop_size'])}")
    if changes:
        write_json(folder / PROCESSOR_FILE, processor)
    if image_processor:
        write_json(folder / IMAGE_PROCESSOR_FILE, image_processor)
    return changes


def _crop_size(size: int | dict[str, int]) -> dict[str, int]:
    if isinstance(size, int):
        return {"height": size, "width": size}
    side = size.get("shortest_edge")
    return {"height": size.get("height", side), "width": size.get("width", side)}


def make_tokenizer_portable(folder: Path) -> list[str]:
    """Let transformers 4.57 load a tokenizer that 5 saved; returns what was changed, in words.

    4.57 has no class TokenizersBackend, and reads `extra_special_tokens` as a dict. The names written here are read
    alike by both.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return []
    content, changes = read_json(path, "a tokenizer's settings"), []
    if content.get("tokenizer_class") == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
        content.setdefault("model_input_names", ["input_ids", "attention_mask"])  # 4.57 would add token_type_ids
        changes.append(f"{TOKENIZER_FILE}: tokenizer_class TokenizersBackend -> PreTrainedTokenizerFast")
    if isinstance(content.get("extra_special_tokens"), list):
        extra = content.pop("extra_special_tokens")
        known = content.get("additional_special_tokens") or []
        content["additional_special_tokens"] = known + [token for token in extra if token not in known]
        changes.append(f"{TOKENIZER_FILE}: the list extra_special_tokens -> additional_special_tokens")
    if changes:
        write_json(path, content)
    return changes
