"""ViP-LLaVA with a norm after the multimodal projector (arXiv 2512.08374); no forward is copied."""

from transformers import VipLlavaForConditionalGeneration, VipLlavaModel
from transformers.models.vipllava.modeling_vipllava import VipLlavaMultiModalProjector

# 4.57 copies the files that this one imports, and not what those import
from llava_norm_align.configuration.configuration_llava_norm_align import NormAlignConfigMixin  # noqa: F401
from llava_norm_align.configuration.configuration_vipllava_norm_align import VipLlavaNormAlignConfig
from llava_norm_align.modeling.modeling_llava_norm_align import (
    NormAlignInnerMixin,
    NormAlignOuterMixin,
    NormAlignProjectorMixin,
    accept_stock_keys,
)


class VipLlavaNormAlignMultiModalProjector(NormAlignProjectorMixin, VipLlavaMultiModalProjector):
    """ViP-LLaVA's projector, then `align_norm`."""


class VipLlavaNormAlignModel(NormAlignInnerMixin, VipLlavaModel):
    """Vision tower, projector with norm, language model; no head."""

    config_class = VipLlavaNormAlignConfig
    projector_class = VipLlavaNormAlignMultiModalProjector


class VipLlavaNormAlignForConditionalGeneration(NormAlignOuterMixin, VipLlavaForConditionalGeneration):
    """Norm-aligned ViP-LLaVA that generates text: inputs and outputs of VipLlavaForConditionalGeneration."""

    config_class = VipLlavaNormAlignConfig
    model_class = VipLlavaNormAlignModel


accept_stock_keys(VipLlavaNormAlignForConditionalGeneration)
