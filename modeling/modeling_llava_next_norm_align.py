"""LLaVA-NeXT with a norm after the multimodal projector (arXiv 2512.08374); no forward is copied."""

from transformers import LlavaNextForConditionalGeneration, LlavaNextModel
from transformers.models.llava_next.modeling_llava_next import LlavaNextMultiModalProjector

from llava_norm_align.configuration.configuration_llava_next_norm_align import LlavaNextNormAlignConfig

# 4.57 copies the files that this one imports, and not what those import
from llava_norm_align.configuration.configuration_llava_norm_align import NormAlignConfigMixin  # noqa: F401
from llava_norm_align.modeling.modeling_llava_norm_align import (
    NormAlignInnerMixin,
    NormAlignOuterMixin,
    NormAlignProjectorMixin,
    accept_stock_keys,
)


class LlavaNextNormAlignMultiModalProjector(NormAlignProjectorMixin, LlavaNextMultiModalProjector):
    """LLaVA-NeXT's projector, then `align_norm`."""


class LlavaNextNormAlignModel(NormAlignInnerMixin, LlavaNextModel):
    """Vision tower, projector with norm, language model; no head."""

    config_class = LlavaNextNormAlignConfig
    projector_class = LlavaNextNormAlignMultiModalProjector


class LlavaNextNormAlignForConditionalGeneration(NormAlignOuterMixin, LlavaNextForConditionalGeneration):
    """Norm-aligned LLaVA-NeXT that generates text: inputs and outputs of LlavaNextForConditionalGeneration."""

    config_class = LlavaNextNormAlignConfig
    model_class = LlavaNextNormAlignModel


accept_stock_keys(LlavaNextNormAlignForConditionalGeneration)
