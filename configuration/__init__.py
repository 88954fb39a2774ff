from llava_norm_align.configuration.configuration_llava_norm_align import LlavaNormAlignConfig

__all__ = ["LlavaNormAlignConfig"]
