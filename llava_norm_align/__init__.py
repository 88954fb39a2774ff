"""Norm-aligned LLaVA: one calibrated LayerNorm after the multimodal projector (arXiv 2512.08374).

`import llava_norm_align` registers the classes with transformers' Auto classes.
"""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout the sub-packages lie beside this folder, not inside it. An installed copy has no setup.cfg beside it.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "setup.cfg").is_file():
    __path__.append(str(_CHECKOUT))

from llava_norm_align.registration import register  # noqa: E402

register()

from llava_norm_align.configuration import (  # noqa: E402
    LlavaNextNormAlignConfig,
    LlavaNormAlignConfig,
    LlavaOnevisionNormAlignConfig,
    VipLlavaNormAlignConfig,
)
from llava_norm_align.modeling import (  # noqa: E402
    LlavaNextNormAlignForConditionalGeneration,
    LlavaNextNormAlignModel,
    LlavaNormAlignForConditionalGeneration,
    LlavaNormAlignModel,
    LlavaOnevisionNormAlignForConditionalGeneration,
    LlavaOnevisionNormAlignModel,
    VipLlavaNormAlignForConditionalGeneration,
    VipLlavaNormAlignModel,
)

__all__ = [
    "LlavaNextNormAlignConfig",
    "LlavaNextNormAlignForConditionalGeneration",
    "LlavaNextNormAlignModel",
    "LlavaNormAlignConfig",
    "LlavaNormAlignForConditionalGeneration",
    "LlavaNormAlignModel",
    "LlavaOnevisionNormAlignConfig",
    "LlavaOnevisionNormAlignForConditionalGeneration",
    "LlavaOnevisionNormAlignModel",
    "VipLlavaNormAlignConfig",
    "VipLlavaNormAlignForConditionalGeneration",
    "VipLlavaNormAlignModel",
    "__version__",
]
