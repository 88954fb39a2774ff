from llava_norm_align.modeling.families import FAMILIES
from llava_norm_align.modeling.modeling_llava_next_norm_align import (
    LlavaNextNormAlignForConditionalGeneration,
    LlavaNextNormAlignModel,
)
from llava_norm_align.modeling.modeling_llava_norm_align import (
    LlavaNormAlignForConditionalGeneration,
    LlavaNormAlignModel,
    NormAlignLayerNorm,
)
from llava_norm_align.modeling.modeling_llava_onevision_norm_align import (
    LlavaOnevisionNormAlignForConditionalGeneration,
    LlavaOnevisionNormAlignModel,
)
from llava_norm_align.modeling.modeling_vipllava_norm_align import (
    VipLlavaNormAlignForConditionalGeneration,
    VipLlavaNormAlignModel,
)

__all__ = [
    "FAMILIES",
    "LlavaNextNormAlignForConditionalGeneration",
    "LlavaNextNormAlignModel",
    "LlavaNormAlignForConditionalGeneration",
    "LlavaNormAlignModel",
    "LlavaOnevisionNormAlignForConditionalGeneration",
    "LlavaOnevisionNormAlignModel",
    "NormAlignLayerNorm",
    "VipLlavaNormAlignForConditionalGeneration",
    "VipLlavaNormAlignModel",
]
