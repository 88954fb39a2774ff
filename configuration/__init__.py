from llava_norm_align.configuration.configuration_llava_next_norm_align import LlavaNextNormAlignConfig
from llava_norm_align.configuration.configuration_llava_norm_align import LlavaNormAlignConfig
from llava_norm_align.configuration.configuration_llava_onevision_norm_align import LlavaOnevisionNormAlignConfig
from llava_norm_align.configuration.configuration_vipllava_norm_align import VipLlavaNormAlignConfig

__all__ = [
    "LlavaNextNormAlignConfig",
    "LlavaNormAlignConfig",
    "LlavaOnevisionNormAlignConfig",
    "VipLlavaNormAlignConfig",
]
