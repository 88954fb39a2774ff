"""Configuration of a LLaVA-OneVision whose visual tokens are norm-aligned (arXiv 2512.08374)."""

from transformers import LlavaOnevisionConfig

from llava_norm_align.configuration.configuration_llava_norm_align import NormAlignConfigMixin, auto_map


class LlavaOnevisionNormAlignConfig(NormAlignConfigMixin, LlavaOnevisionConfig):
    """LlavaOnevisionConfig and the norm_align_ fields of NormAlignConfigMixin."""

    model_type = "llava_onevision_norm_align"
    AUTO_MAP = auto_map(model_type, "LlavaOnevisionNormAlign")
    __init__ = NormAlignConfigMixin.__init__  # transformers 5 generates one for a class without its own
