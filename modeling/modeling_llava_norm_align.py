import math

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration, LlavaModel, LlavaPreTrainedModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from llava_norm_align.configuration.configuration_llava_norm_align import LlavaNormAlignConfig

TRANSFORMERS_5 = Version(transformers.__version__) >= Version("5.0.0.dev0")
# transformers 5 writes CLIP and SigLIP towers without the `vision_model.` level that 4.57 expects
VISION_5_TO_4 = ("vision_tower.(?!vision_model)(?=pre_layrnorm|post_layernorm|head|encoder.layers|embeddings.class_embedding"
                 "|embeddings.patch_embedding[.]|embeddings.position_embedding[.])")


class ScaleGradient(torch.autograd.Function):
    """Identity whose backward multiplies the gradient by `factor`."""

    @staticmethod
    def forward(x, factor):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad * factor, None


class NormAlignLayerNorm(nn.LayerNorm):
    def __init__(self, config):
        super().__init__(config.text_config.hidden_size, eps=config.norm_align_eps, bias=config.norm_align_bias)
        self.compensate, self.floor = config.norm_align_gradient_compensation, config.norm_align_compensation_floor

    def forward(self, x):  # [..., D] -> [..., D]
        normed = F.layer_norm(x.float(), self.normalized_shape, eps=self.eps)
        if self.training and self.compensate:
            normed = ScaleGradient.apply(normed, 1 / self.weight.detach().abs().mean().clamp_min(self.floor))
        out = normed * self.weight
        return (out + self.bias if self.bias is not None else out).to(x.dtype)


class LlavaNormAlignMultiModalProjector(LlavaMultiModalProjector):
    def __init__(self, config):
        super().__init__(config)
        self.align_norm = NormAlignLayerNorm(config)

    def forward(self, image_features):
        return self.align_norm(super().forward(image_features))


class InitializesNorm:
    """Gain starts at target / sqrt(D); must come before the parent's rule for LayerNorm."""

    @torch.no_grad()
    def _init_weights(self, module):
        if not isinstance(module, NormAlignLayerNorm):
            return super()._init_weights(module)
        target = self.config.norm_align_target
        gain = 1.0 if target is None else target / math.sqrt(module.normalized_shape[0])
        if TRANSFORMERS_5:
            from transformers import initialization as init
        else:
            from torch.nn import init
        init.constant_(module.weight, gain)
        if module.bias is not None:
            init.zeros_(module.bias)


class LlavaNormAlignModel(InitializesNorm, LlavaModel):
    config_class = LlavaNormAlignConfig
    if not TRANSFORMERS_5:
        _checkpoint_conversion_mapping = {"^" + VISION_5_TO_4: "vision_tower.vision_model.", **LlavaModel._checkpoint_conversion_mapping}

    def __init__(self, config):
        super().__init__(config)
        self.multi_modal_projector = LlavaNormAlignMultiModalProjector(config)
        self._keep_in_fp32_modules_strict = ["align_norm"]
        self.post_init()


class LlavaNormAlignForConditionalGeneration(InitializesNorm, LlavaForConditionalGeneration):
    config_class = LlavaNormAlignConfig
    if not TRANSFORMERS_5:
        _checkpoint_conversion_mapping = {"^" + VISION_5_TO_4: "model.vision_tower.vision_model.",
                                          **LlavaForConditionalGeneration._checkpoint_conversion_mapping}

    def __init__(self, config):
        LlavaPreTrainedModel.__init__(self, config)
        self.model = LlavaNormAlignModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self._keep_in_fp32_modules_strict = ["align_norm"]
        self.post_init()


if TRANSFORMERS_5:  # custom code shares LLaVA's renaming of checkpoint keys only when it is registered
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

    register_checkpoint_conversion_mapping("llava_norm_align", get_checkpoint_conversion_mapping("llava"), overwrite=True)
    register_checkpoint_conversion_mapping("LlavaNormAlignModel", get_checkpoint_conversion_mapping("LlavaModel"), overwrite=True)
