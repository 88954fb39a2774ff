"""The fields of a LLaVA training: TRL's, with LLaVA's defaults, and what belongs to the projector's norm."""

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from trl import SFTConfig

from llava_norm_align.common.errors import InputError
from llava_norm_align.trl_recipes.groups import PARTS

NUMBERS = (
    ("per_device_train_batch_size", lambda value: value >= 1, "1 row or more"),
    ("gradient_accumulation_steps", lambda value: value >= 1, "1 or more"),
    ("dataloader_num_workers", lambda value: value >= 0, "0 or more processes"),
    ("learning_rate", lambda value: 0 <= value < math.inf, "0 or more"),
    ("weight_decay", lambda value: 0 <= value < math.inf, "0 or more"),
    ("warmup_steps", lambda value: 0 <= value < math.inf, "0 or more"),
    ("max_grad_norm", lambda value: 0 <= value < math.inf, "0 (no clipping) or more"),
    ("max_steps", lambda value: value == -1 or value >= 1, "1 or more, or -1 for num_train_epochs,"),
    ("num_train_epochs", lambda value: 0 < value < math.inf, "more than 0"),
)


@dataclass
class LlavaSFTConfig(SFTConfig):
    """SFTConfig for LlavaTrainer. What is refused here is refused before a model is loaded: InputError.

    TRL's fields whose defaults differ: `max_grad_norm` 0 (LLaVA does not clip), `max_length` None (TRL's 1024 cuts
    images and answers), checkpointing on and not reentrant.
    """

    max_grad_norm: float = field(default=0.0, metadata={"help": "Clip gradients to this L2 norm. 0: do not clip."})
    max_length: int | None = field(default=None, metadata={"help": "Refuse rows of more tokens. None: any length."})
    activation_checkpointing: bool | None = field(
        default=True, metadata={"help": "Recompute activations in the backward pass: less memory, slower."}
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = field(
        default_factory=lambda: {"use_reentrant": False},
        metadata={"help": "Reentrant checkpointing warns on every layer of a frozen tower."},
    )
    trained_parts: list[str] = field(
        default_factory=lambda: ["projector", "norm", "llm"],
        metadata={"help": f"The parts that are trained, of: {', '.join(PARTS)}. All others are frozen."},
    )
    projector_learning_rate: float | None = field(
        default=None, metadata={"help": "Of the projector without its norm. None: learning_rate."}
    )
    norm_learning_rate: float | None = field(
        default=None, metadata={"help": "Of the norm after the projector. None: learning_rate."}
    )
    vision_learning_rate: float | None = field(
        default=None, metadata={"help": "Of the vision tower, if it is trained. None: learning_rate."}
    )
    clip_by_group: bool = field(
        default=False, metadata={"help": "Clip each part to max_grad_norm on its own, instead of all together."}
    )
    group_by_modality_length: bool = field(
        default=False, metadata={"help": "Rows with images, or text alone, of similar length in a step."}
    )
    save_projector_only: bool = field(
        default=False, metadata={"help": "Checkpoints hold the projector and its norm, not the whole model."}
    )
    norm_ratio_band: list[float] = field(
        default_factory=lambda: [0.2, 5.0],
        metadata={"help": "Visual norm / text norm of a norm-aligned model outside of this band is reported."},
    )

    def __post_init__(self):
        if self.fp16:
            raise InputError(
                "fp16 is true, but the projector's gradients overflow in float16 within a few steps. "
                "Set bf16: true and leave out fp16."
            )
        for name, fits, expected in NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not fits(value):
                raise InputError(f"{name} is {value}, but {expected} was expected. Correct it, or leave it out.")
        unknown = [part for part in self.trained_parts or () if part not in PARTS]
        if unknown or not self.trained_parts:
            found = repr(unknown[0]) if unknown else "nothing"
            raise InputError(f"trained_parts names {found}; one or more of {', '.join(PARTS)} were expected.")
        if self.clip_by_group and not self.max_grad_norm > 0:
            raise InputError(
                f"clip_by_group is true, but max_grad_norm is {self.max_grad_norm}, which clips nothing. Set "
                "max_grad_norm to the largest gradient norm that a part may have, such as 1.0."
            )
        if self.clip_by_group and (self.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"):
            raise InputError(
                "clip_by_group is true, but DeepSpeed clips all gradients together in its engine. Leave out "
                "clip_by_group, or train with DDP or FSDP2."
            )
        if self.clip_by_group and os.environ.get("FSDP_VERSION", "2") == "1":
            raise InputError("clip_by_group is true, but FSDP 1 mixes the parts' gradients. Use fsdp_version: 2.")
        if len(self.norm_ratio_band) != 2 or not 0 < self.norm_ratio_band[0] < self.norm_ratio_band[1]:
            raise InputError(
                f"norm_ratio_band is {self.norm_ratio_band}; two positive numbers, low and high, were expected."
            )
        self.dataloader_num_workers = min(self.dataloader_num_workers, os.cpu_count() or 1)  # more would only wait
        if not torch.cuda.is_available():
            self.tf32 = None  # it is a mode of NVIDIA's GPUs
        if not torch.accelerator.is_available():
            self.use_cpu = True  # without saying so, transformers refuses bf16 there
        super().__post_init__()

    def part_learning_rates(self) -> dict[str, float]:
        """The peak learning rate of each part."""
        own = {
            "projector": self.projector_learning_rate,
            "norm": self.norm_learning_rate,
            "vision": self.vision_learning_rate,
        }
        return {part: self.learning_rate if own.get(part) is None else own[part] for part in PARTS}


def changed_fields(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that do not have their default; secrets are left out."""
    changed = {}
    for f in dataclasses.fields(config):
        if not f.init or "token" in f.name.split("_") or f.name.startswith("gradient_checkpointing"):
            continue  # the last is an old name of activation_checkpointing
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        value = getattr(config, f.name)
        if value != default and isinstance(value, (int, float, str, list, tuple)):
            changed[f.name] = value
    return changed
