"""The stock families that can be norm-aligned. This file does not ship to the Hub."""

from typing import Any

from llava_norm_align.modeling.modeling_llava_next_norm_align import LlavaNextNormAlignForConditionalGeneration
from llava_norm_align.modeling.modeling_llava_norm_align import LlavaNormAlignForConditionalGeneration
from llava_norm_align.modeling.modeling_llava_onevision_norm_align import (
    LlavaOnevisionNormAlignForConditionalGeneration,
)
from llava_norm_align.modeling.modeling_vipllava_norm_align import VipLlavaNormAlignForConditionalGeneration

# stock model_type -> our class; its `model_class` is the inner model, its `config_class` the configuration
FAMILIES = {
    "llava": LlavaNormAlignForConditionalGeneration,
    "llava_next": LlavaNextNormAlignForConditionalGeneration,
    "llava_onevision": LlavaOnevisionNormAlignForConditionalGeneration,
    "vipllava": VipLlavaNormAlignForConditionalGeneration,
}
ALIGNED_TYPES = tuple(f"{family}_norm_align" for family in FAMILIES)


def has_norm(config: dict[str, Any]) -> bool:
    """Whether a config.json tells of a norm after the projector: not so in a control, of type "none"."""
    return config.get("model_type") in ALIGNED_TYPES and config.get("norm_align_type") != "none"
