"""config.json of a converted model: the source's, with the fields of the norm."""

from pathlib import Path
from typing import Any

from llava_norm_align.common.results import write_json
from llava_norm_align.conversion.processor_fields import count_additional_tokens
from llava_norm_align.conversion.source import Source
from llava_norm_align.conversion.verify import quiet_transformers
from llava_norm_align.modeling.modeling_llava_norm_align import save_code

DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def write_config(folder: Path, stock: Source, fields: dict[str, Any] | None) -> list[str]:
    """Write the source's config.json with every field it has, and ours (None: it stays stock); returns notes."""
    notes, config = [], dict(stock.raw_config)
    if fields is not None:
        config |= {
            "model_type": stock.config.model_type,
            "architectures": [stock.model_class.__name__],
            "auto_map": stock.config.AUTO_MAP,
            **fields,
        }
        save_code(folder, stock.model_class)
    notes += _name_stored_dtypes(config, stock)
    text_config = config["text_config"]
    if stock.head_is_tied and not (config.get("tie_word_embeddings") and text_config.get("tie_word_embeddings")):
        config |= {"tie_word_embeddings": True, "text_config": {**text_config, "tie_word_embeddings": True}}
        notes.append("config.json: tie_word_embeddings -> true at the top and in text_config; there is no lm_head")
    with quiet_transformers():
        without_cls = count_additional_tokens(stock.config.vision_config) == 0
        if getattr(stock.config, "vision_feature_select_strategy", None) == "default" and without_cls:
            notes.append(
                'vision_feature_select_strategy is "default", which drops the first patch of a vision tower without a '
                "CLS token; kept, as the model was trained with it"
            )
    write_json(folder / "config.json", config)
    return notes


def _name_stored_dtypes(config: dict[str, Any], stock: Source) -> list[str]:
    """Let the parts of `config` name the dtype that their tensors are stored in; returns what was changed, in words.

    Some published checkpoints name another one there. With dtype="auto" 4.57 loads the parts so, and fails on images.
    """
    changes = []
    for part, mark in (("text_config", "language_model."), ("vision_config", "vision_tower.")):
        stored = {DTYPE_NAMES.get(tensor.dtype) for name, tensor in stock.weights.tensors.items() if mark in name}
        for key in ("torch_dtype", "dtype"):
            named = config[part].get(key)
            if named and len(stored) == 1 and not stored & {named, None}:
                config[part] = {**config[part], key: min(stored)}
                changes.append(f"config.json: {part}.{key} {named} -> {min(stored)}, as its weights are stored")
    return changes
