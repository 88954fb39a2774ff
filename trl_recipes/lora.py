"""LoRA for a LLaVA: adapters in the language model, and the projector with its norm trained whole."""

from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from llava_norm_align.common.errors import InputError


def lora_config(
    model: PreTrainedModel,
    rank: int = 128,
    alpha: int = 256,
    dropout: float = 0.05,
    target_modules: str | list[str] | None = None,
    **fields: Any,
) -> LoraConfig:
    """LoRA on every linear layer of the language model, not on its head, or on `target_modules`; `fields` are PEFT's.

    PEFT's "all-linear" would hit the vision tower and the projector too. The projector is one of `modules_to_save`, so
    that it and its norm are trained, saved and merged as they are. The defaults are LLaVA-1.5's. InputError without a
    language model.
    """
    layers = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if ".language_model." in f".{name}" and isinstance(module, nn.Linear)
    }
    if not layers:
        raise InputError(f"{type(model).__name__} has no linear layers in a language_model. Train it without LoRA.")
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=target_modules or rf"(.*\.)?language_model\..*\.({'|'.join(sorted(layers))})",
        modules_to_save=["multi_modal_projector"],
        task_type="CAUSAL_LM",
        **fields,
    )


def four_bit_config(compute_dtype: torch.dtype = torch.bfloat16) -> BitsAndBytesConfig:
    """QLoRA's 4 bits (NF4) for the language model alone: a projector in 4 bits could not be trained."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    )
