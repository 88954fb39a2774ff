"""Tokenizer, chat template and image processor of an assembled LLaVA, as files for transformers 4.57 and 5."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig

from llava_norm_align.common.errors import InputError, missing_extra
from llava_norm_align.common.loading import first_line
from llava_norm_align.common.results import write_json
from llava_norm_align.common.weights import read_json
from llava_norm_align.conversion.processor_fields import (
    IMAGE_PROCESSOR_FILE,
    PROCESSOR_FILE,
    TOKENIZER_FILE,
    check_size,
    image_token,
    make_tokenizer_portable,
)
from llava_norm_align.conversion.verify import quiet_transformers
from llava_norm_align.data.templates import FLATTEN_PARTS

IMAGE_TOKEN = "<image>"
PAD_TOKEN = "<pad>"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
SENTENCEPIECE_FIELDS = (
    "add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "sp_model_kwargs", "use_default_system_prompt",
)  # fmt: skip
OTHER_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "merges.txt")
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

# LLaVA-1.5's vicuna prompt, without the system sentence, as in llava-hf/llava-1.5-7b-hf.
VICUNA_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ message['content'] + ' ' }}
{%- elif message['role'] == 'assistant' -%}
{{ 'ASSISTANT: ' }}{% generation %}{{ message['content'] + (eos_token or '') }}{% endgeneration %}
{%- else -%}{{ 'USER: ' + message['content'] + ' ' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""


def write_tokenizer(
    folder: Path, source: Path, pad: bool = False, text_config: PretrainedConfig | None = None
) -> dict[str, int]:
    """Copy the tokenizer files of `source`, add `<image>` as a special token if it has none; returns added ids.

    The chat template becomes a file of its own, which the processor and the tokenizer both read. `pad`: a tokenizer
    without a padding token gets `<pad>`. `text_config`: whose tokenizer it is, if config.json in `source` is of
    another model. The result has the id of `<image>`, and of `<pad>` if it was added.
    """
    files = source
    if not (source / "tokenizer.json").is_file():
        files = _convert_slow_tokenizer(source, folder / ".tokenizer", text_config)
    tokenizer = read_json(files / "tokenizer.json", "the tokenizer of a language model")
    config = _read_tokenizer_config(files)
    ids = {}
    try:
        ids[IMAGE_TOKEN] = _add_token(tokenizer, config, IMAGE_TOKEN)
        if pad and not config.get("pad_token"):
            ids[PAD_TOKEN] = _add_token(tokenizer, config, PAD_TOKEN)
            config["pad_token"] = PAD_TOKEN
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{source / 'tokenizer.json'} is broken ({error!r}). Download the language model again."
        ) from None
    template = _read_chat_template(source, config)
    for name in OTHER_TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1), encoding="utf-8")
    _write_tokenizer_config(folder, config)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    shutil.rmtree(folder / ".tokenizer", ignore_errors=True)
    return ids


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the special tokens that old checkpoints keep in a file of their own."""
    config = read_json(folder / TOKENIZER_FILE, "the configuration of a tokenizer")
    if (folder / SPECIAL_TOKENS_FILE).is_file():
        special = read_json(folder / SPECIAL_TOKENS_FILE, "the special tokens of a tokenizer")
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            if config.get(name) is None and special.get(name) is not None:
                config[name] = special[name]
    return config


def _add_token(tokenizer: dict[str, Any], config: dict[str, Any], token: str) -> int:
    """The id of a special token, which is added after all others if the tokenizer has none of that name."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # a unigram model has [piece, score] in the order of the ids
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    added = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    number = (vocabulary | added).get(token, max([*vocabulary.values(), *added.values()]) + 1)
    if token not in added:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"].append({"id": number, "content": token, **flags})
        if "added_tokens_decoder" in config:
            config["added_tokens_decoder"][str(number)] = {"content": token, **flags}
    return number


def _convert_slow_tokenizer(source: Path, scratch: Path, text_config: PretrainedConfig | None) -> Path:
    """tokenizer.json and its configuration for a language model that has only the older files."""
    if (source / "tokenizer.model").is_file():
        for module, package in (("sentencepiece", "sentencepiece"), ("google.protobuf", "protobuf")):
            try:
                importlib.import_module(module)
            except ImportError:
                raise missing_extra(package, "original", f"reading {source / 'tokenizer.model'}") from None
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(source, config=text_config, use_fast=True)
            tokenizer.save_pretrained(scratch)
    except Exception as error:  # every tokenizer class has its own way to fail on missing files
        raise InputError(
            f"There is no tokenizer in {source} that transformers can read ({type(error).__name__}: "
            f"{first_line(error)}): tokenizer.json was expected beside the model's weights. Download it again."
        ) from None
    if not (scratch / "tokenizer.json").is_file():
        raise InputError(
            f"The tokenizer in {source} has no fast form (tokenizer.json). Use a language model that has one."
        )
    if (source / "tokenizer.model").is_file():
        _settle_sentencepiece(source, scratch)
    return scratch


def _settle_sentencepiece(source: Path, folder: Path) -> None:
    """Let a converted Llama tokenizer's tokenizer.json say everything, and split prompts as LLaVA did in training.

    LLaVA tokenizes what follows an image as a text of its own (llava/mm_utils.py, tokenizer_image_token): "\\n" after
    `<image>` starts with a space piece, as every text does; after other special tokens only a `legacy` tokenizer puts
    one. The class LlamaTokenizer is not named, as it would make rules of its own in each transformers line.
    """
    tokenizer = read_json(folder / "tokenizer.json", "a converted tokenizer")
    first = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    if tokenizer["normalizer"] is None and tokenizer["pre_tokenizer"] == first:
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        if read_json(source / TOKENIZER_FILE, "the configuration of a tokenizer").get("legacy", True):
            prepend = {"type": "Prepend", "prepend": "▁"}
            tokenizer |= {"normalizer": {"type": "Sequence", "normalizers": [prepend, space]}, "pre_tokenizer": None}
        else:
            tokenizer["normalizer"] = {"type": "Replace", "pattern": {"Regex": r"\A\n"}, "content": " \n"}
        write_json(folder / "tokenizer.json", tokenizer)
    config = read_json(folder / TOKENIZER_FILE, "a converted tokenizer's configuration")
    config = {key: value for key, value in config.items() if key not in SENTENCEPIECE_FIELDS}
    write_json(folder / TOKENIZER_FILE, {**config, "tokenizer_class": "PreTrainedTokenizerFast"})


def _write_tokenizer_config(folder: Path, config: dict[str, Any]) -> None:
    """The source's settings in names that both lines read, with `<image>` among the special tokens."""
    dropped = ("chat_template", "backend", "is_local", "local_files_only")  # the last three are what 5 adds
    write_json(folder / TOKENIZER_FILE, {key: value for key, value in config.items() if key not in dropped})
    make_tokenizer_portable(folder)
    config = read_json(folder / TOKENIZER_FILE, "the configuration of a tokenizer")
    special = config.get("additional_special_tokens") or []
    config["additional_special_tokens"] = special + [IMAGE_TOKEN] * (IMAGE_TOKEN not in special)
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    config.setdefault("model_input_names", ["input_ids", "attention_mask"])  # 4.57 would add token_type_ids
    config["processor_class"] = "LlavaProcessor"
    write_json(folder / TOKENIZER_FILE, config)


def carry_chat_template(folder: Path) -> list[str]:
    """Write the tokenizer's own chat template where the processor looks for one; returns what was changed, in words.

    A language model's template is made to accept images. Folders whose processor has a template, or whose tokenizer
    has none, stay as they are, as do those with another image token than LLaVA's.
    """
    if not (folder / TOKENIZER_FILE).is_file() or image_token(folder) != IMAGE_TOKEN:
        return []
    if any((folder / name).is_file() for name in ("chat_template.json", "chat_template.jinja")):
        return []
    processor = folder / PROCESSOR_FILE
    if processor.is_file() and read_json(processor, "a part of the processor").get("chat_template"):
        return []
    config = read_json(folder / TOKENIZER_FILE, "a tokenizer's settings")
    if not config.get("chat_template"):
        return []
    (folder / "chat_template.jinja").write_text(_read_chat_template(folder, config), encoding="utf-8")
    return [f"chat_template.jinja: written from {TOKENIZER_FILE}, where the processor does not look for it"]


def _read_chat_template(source: Path, config: dict[str, Any]) -> str:
    """The language model's own template made to accept image parts, or LLaVA-1.5's."""
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (source / "chat_template.jinja").is_file():
        template = (source / "chat_template.jinja").read_text(encoding="utf-8")
    template = template or VICUNA_TEMPLATE
    return template if IMAGE_TOKEN in template else FLATTEN_PARTS + template


def image_processor_config(source: Path, family: str) -> dict[str, Any]:
    """preprocessor_config.json for a tower of `family` (clip, siglip, dinov2), with the values that `source` gives.

    `size` and `crop_size` are always dicts: vLLM reads `crop_size` even where nothing is cropped, as for SigLIP.
    """
    if (source / IMAGE_PROCESSOR_FILE).is_file():
        found = read_json(source / IMAGE_PROCESSOR_FILE, "an image processor's configuration")
    else:
        found = read_json(source / PROCESSOR_FILE, "preprocessor_config.json (how the tower's images are prepared)")
        found = found.get("image_processor")
    if not isinstance(found, dict) or "size" not in found:
        raise InputError(
            f"The image processor's configuration in {source} has no size. Download the vision tower again."
        )
    check_size(source / IMAGE_PROCESSOR_FILE, found["size"])
    size = found["size"]
    side = size if isinstance(size, int) else size.get("shortest_edge", size.get("height"))
    crop = found.get("crop_size") or side
    if family == "siglip":
        kind, size = "SiglipImageProcessor", _square(size)
        crop = size
    else:
        kind, crop = "CLIPImageProcessor", _square(crop)
        size = {"shortest_edge": side} if isinstance(side, int) else size
    return {
        "image_processor_type": kind,
        "processor_class": "LlavaProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": size,
        "resample": found.get("resample", 3),  # bicubic, as all three families were trained
        "do_center_crop": family != "siglip",
        "crop_size": crop,
        "do_rescale": True,
        "rescale_factor": found.get("rescale_factor", 1 / 255),
        "do_normalize": True,
        "image_mean": found.get("image_mean", [0.5] * 3 if family == "siglip" else CLIP_MEAN),
        "image_std": found.get("image_std", [0.5] * 3 if family == "siglip" else CLIP_STD),
    }


def _square(size: int | dict[str, int]) -> dict[str, int]:
    return (
        {"height": size, "width": size}
        if isinstance(size, int)
        else {"height": size["height"], "width": size["width"]}
    )


def write_processor(
    folder: Path, image_processor: dict[str, Any], patch_size: int, strategy: str, extra_tokens: int
) -> None:
    """The processor and image processor files. `extra_tokens`: how many the tower puts before its patches (CLS)."""
    write_json(folder / IMAGE_PROCESSOR_FILE, image_processor)
    content = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE_TOKEN,
        "patch_size": patch_size,
        "num_additional_image_tokens": extra_tokens,
        "vision_feature_select_strategy": strategy,
    }
    write_json(folder / PROCESSOR_FILE, content)


def write_generation_config(folder: Path, source: Path, text_config: dict[str, Any]) -> None:
    """The language model's own, without the sampling values that `save_pretrained` refuses when nothing is sampled."""
    if (source / "generation_config.json").is_file():
        config = read_json(source / "generation_config.json", "a generation configuration")
    else:
        config = {
            key: text_config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in text_config
        }
    if not config.get("do_sample"):
        config = {
            key: value
            for key, value in config.items()
            if key not in ("temperature", "top_p", "top_k", "min_p", "typical_p")
        }
    write_json(folder / "generation_config.json", config)
