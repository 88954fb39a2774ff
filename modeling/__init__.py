from llava_norm_align.modeling.modeling_llava_norm_align import (
    LlavaNormAlignForConditionalGeneration,
    LlavaNormAlignModel,
    NormAlignLayerNorm,
)

__all__ = ["LlavaNormAlignForConditionalGeneration", "LlavaNormAlignModel", "NormAlignLayerNorm"]
