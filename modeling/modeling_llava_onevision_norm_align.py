"""LLaVA-OneVision with a norm after the multimodal projector (arXiv 2512.08374); no forward is copied."""

from transformers import LlavaOnevisionForConditionalGeneration, LlavaOnevisionModel
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionMultiModalProjector

# 4.57 copies the files that this one imports, and not what those import
from llava_norm_align.configuration.configuration_llava_norm_align import NormAlignConfigMixin  # noqa: F401
from llava_norm_align.configuration.configuration_llava_onevision_norm_align import LlavaOnevisionNormAlignConfig
from llava_norm_align.modeling.modeling_llava_norm_align import (
    NormAlignInnerMixin,
    NormAlignOuterMixin,
    NormAlignProjectorMixin,
    accept_stock_keys,
)


class LlavaOnevisionNormAlignMultiModalProjector(NormAlignProjectorMixin, LlavaOnevisionMultiModalProjector):
    """LLaVA-OneVision's projector, then `align_norm`."""


class LlavaOnevisionNormAlignModel(NormAlignInnerMixin, LlavaOnevisionModel):
    """Vision tower, projector with norm, language model; no head."""

    config_class = LlavaOnevisionNormAlignConfig
    projector_class = LlavaOnevisionNormAlignMultiModalProjector


class LlavaOnevisionNormAlignForConditionalGeneration(NormAlignOuterMixin, LlavaOnevisionForConditionalGeneration):
    """Norm-aligned LLaVA-OneVision that generates text, with the inputs and outputs of the stock class."""

    config_class = LlavaOnevisionNormAlignConfig
    model_class = LlavaOnevisionNormAlignModel


accept_stock_keys(LlavaOnevisionNormAlignForConditionalGeneration)
