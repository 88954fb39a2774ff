"""Configuration of a ViP-LLaVA whose visual tokens are norm-aligned (arXiv 2512.08374)."""

import transformers
from packaging.version import Version
from transformers import VipLlavaConfig

from llava_norm_align.configuration.configuration_llava_norm_align import NormAlignConfigMixin, auto_map


class VipLlavaNormAlignConfig(NormAlignConfigMixin, VipLlavaConfig):
    """VipLlavaConfig and the norm_align_ fields of NormAlignConfigMixin."""

    model_type = "vipllava_norm_align"
    AUTO_MAP = auto_map(model_type, "VipLlavaNormAlign")
    __init__ = NormAlignConfigMixin.__init__  # transformers 5 generates one for a class without its own

    if Version(transformers.__version__) < Version("5.0.0.dev0"):  # 5 writes the singular and reads both
        attribute_map = {**VipLlavaConfig.attribute_map, "vision_feature_layer": "vision_feature_layers"}
