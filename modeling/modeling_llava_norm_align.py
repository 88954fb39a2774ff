"""LLaVA with a norm after the multimodal projector that gives visual tokens the L2 norm of text embeddings.

Method: arXiv 2512.08374. The classes are transformers' own (models/llava/modeling_llava.py); no forward is
copied. Checkpoints of stock LLaVA, in the key names of transformers 4 and 5, plus `align_norm` load without a change.
"""

import json
import math
import os
import re
import sys
from pathlib import Path

import torch
import transformers
from packaging.version import Version
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration, LlavaModel, PreTrainedModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from llava_norm_align.configuration.configuration_llava_norm_align import LlavaNormAlignConfig

TRANSFORMERS_5 = Version(transformers.__version__) >= Version("5.0.0.dev0")
if TRANSFORMERS_5:
    from transformers import initialization as init
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
else:
    from torch.nn import init

# transformers 5 saves CLIP and SigLIP towers without the `vision_model.` level that 4.57 has. Saving in 4.57 undoes
# the renaming by stripping "^" and parentheses from the pattern, so its dots are not escaped.
VISION_WITHOUT_LEVEL = (
    "^vision_tower.(?!vision_model)(?=pre_layrnorm|post_layernorm|head|encoder.layers|embeddings.class_embedding"
    "|embeddings.patch_embedding[.]|embeddings.position_embedding[.])"
)


class ScaleGradient(torch.autograd.Function):
    """Identity whose backward multiplies the gradient by `factor`, a detached tensor taken in forward."""

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
    """y = gain * normalize(x) + bias over the last dimension, in fp32; the result has the dtype of x.

    In training, the gradient of normalize(x) is divided by max(mean|gain|, floor) (Global Weight Compensation).
    """

    def __init__(self, config):
        size, bias = config.text_config.hidden_size, config.norm_align_bias
        super().__init__(size, eps=config.norm_align_eps, bias=bias, dtype=torch.float32)
        self.normalize = F.rms_norm if config.norm_align_type == "rms_norm" else F.layer_norm
        self.gradient_compensation = config.norm_align_gradient_compensation
        self.compensation_floor = config.norm_align_compensation_floor

    def forward(self, x):  # [..., D] -> [..., D]
        dtype = x.dtype
        if dtype == torch.float16:  # one inf would turn the whole token into NaN
            x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        x = self.normalize(x.float(), self.normalized_shape, eps=self.eps)
        if self.training and self.gradient_compensation:
            x = ScaleGradient.apply(x, 1 / self.weight.detach().abs().mean().clamp_min(self.compensation_floor))
        x = x * self.weight
        if self.bias is not None:
            x = x + self.bias
        return x.to(dtype)


class NormAlignScale(nn.Module):
    """y = scale * x, a fixed factor: the control without normalization."""

    def __init__(self, config):
        super().__init__()
        self.scale = config.norm_align_scale

    def forward(self, x):
        return x * self.scale


ALIGN_NORMS = {
    "layer_norm": NormAlignLayerNorm,
    "rms_norm": NormAlignLayerNorm,
    "scale": NormAlignScale,
    "none": lambda config: nn.Identity(),
}


class NormAlignProjectorMixin:
    """A stock family's projector, then `align_norm`."""

    def __init__(self, config):
        super().__init__(config)
        config.check_norm_align()
        self.align_norm = ALIGN_NORMS[config.norm_align_type](config)

    def forward(self, image_features):  # [images, patches, D_vision] -> [images, patches, D_text]
        return self.align_norm(super().forward(image_features))


class NormAlignPreTrainedMixin:
    """What both model classes need: the gain's start, the norm in fp32, the guard on loading, the code when saving."""

    @torch.no_grad()
    def _init_weights(self, module):
        if not isinstance(module, NormAlignLayerNorm):
            return super()._init_weights(module)
        target = self.config.norm_align_target
        init.constant_(module.weight, 1.0 if target is None else target / math.sqrt(module.normalized_shape[0]))
        if module.bias is not None:
            init.zeros_(module.bias)

    def _keep_norm_in_fp32(self):
        # on the instance, because transformers 4.57 refuses a name that no module has
        if self.config.norm_align_type in ("layer_norm", "rms_norm"):
            self._keep_in_fp32_modules_strict = ["align_norm"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """As in transformers, but a missing, unexpected or mismatched tensor is a RuntimeError, not a printed report.

        A PEFT adapter's base model loads first, under the same guard; the adapter follows.
        """
        source = pretrained_model_name_or_path
        return_info = kwargs.pop("output_loading_info", False)
        adapter_name = kwargs.pop("adapter_name", "default")
        adapter_kwargs = dict(kwargs.pop("adapter_kwargs", None) or {})
        adapter = adapter_kwargs.pop("_adapter_model_path", None)
        if adapter is None and is_adapter_folder(source):
            adapter = source
            source = json.loads(Path(adapter, "adapter_config.json").read_text())["base_model_name_or_path"]
        # transformers would raise on another shape before it says which tensor has it
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            model, info = super().from_pretrained(source, *model_args, **kwargs)
        except SafetensorError as error:
            raise RuntimeError(
                f"The weight file {damaged_file(source)} is cut or damaged ({error}). Download or convert it again."
            ) from error
        if getattr(model, "_hf_peft_config_loaded", False):  # transformers 5 then reports on the adapter alone
            raise RuntimeError(
                f"{source} holds an adapter, so its base model was not checked. Load the base model from a folder or "
                "Hub id of its own, then call model.load_adapter(...)."
            )
        check_loading_info(model, info, source)
        if adapter is not None:
            token = kwargs.get("token")
            model.load_adapter(adapter, adapter_name=adapter_name, adapter_kwargs={"token": token, **adapter_kwargs})
        return (model, info) if return_info else model

    def save_pretrained(self, save_directory, *args, push_to_hub=False, **kwargs):
        """As in transformers; the folder also holds the code files, so that it loads with trust_remote_code."""
        for path in Path(save_directory).glob("*.safetensors"):
            if path.stat().st_nlink > 1:  # written in place, it would change the model that it was linked from
                path.unlink()
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True) and Path(save_directory, "config.json").is_file():
            save_code(save_directory, type(self))
        if push_to_hub:  # on its own, so that the code files are part of the upload
            names = ("commit_message", "private", "token", "revision", "create_pr", "max_shard_size")
            options = {name: kwargs[name] for name in names if name in kwargs}
            self.push_to_hub(kwargs.get("repo_id", Path(save_directory).name), **options)


class NormAlignInnerMixin(NormAlignPreTrainedMixin):
    """Makes a stock family's model without head build `projector_class`."""

    def __init__(self, config):
        super().__init__(config)
        self.multi_modal_projector = self.projector_class(config)
        self._keep_norm_in_fp32()
        self.post_init()


class NormAlignOuterMixin(NormAlignPreTrainedMixin):
    """Makes a stock family's model that generates text build `model_class`, then the head as it does."""

    def __init__(self, config):
        PreTrainedModel.__init__(self, config)  # the parent's own __init__ would build the language model twice
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self._keep_norm_in_fp32()
        self.post_init()


def accept_stock_keys(outer):
    """Let `outer` and its inner model load the key names of the stock family, in whichever line they were written.

    The names of classes and model types are the stock family's with NormAlign or norm_align added.
    """
    inner, model_type = outer.model_class, outer.config_class.model_type
    if not TRANSFORMERS_5:
        for cls, prefix in ((inner, ""), (outer, "model.")):
            without_level = {VISION_WITHOUT_LEVEL: f"{prefix}vision_tower.vision_model."}
            cls._checkpoint_conversion_mapping = without_level | cls._checkpoint_conversion_mapping
        return
    stock_type = model_type.removesuffix("_norm_align")
    for ours, stock in (  # 5 renames keys by class name or model type, and skips custom code that is not registered
        (model_type, stock_type),
        (outer.__name__, stock_type),  # for a config.json of another model type
        (inner.__name__, inner.__name__.replace("NormAlign", "")),
    ):
        register_checkpoint_conversion_mapping(ours, get_checkpoint_conversion_mapping(stock), overwrite=True)


class LlavaNormAlignMultiModalProjector(NormAlignProjectorMixin, LlavaMultiModalProjector):
    """LLaVA's projector, then `align_norm`."""


class LlavaNormAlignModel(NormAlignInnerMixin, LlavaModel):
    """Vision tower, projector with norm, language model; no head."""

    config_class = LlavaNormAlignConfig
    projector_class = LlavaNormAlignMultiModalProjector


class LlavaNormAlignForConditionalGeneration(NormAlignOuterMixin, LlavaForConditionalGeneration):
    """Norm-aligned LLaVA that generates text: inputs and outputs of LlavaForConditionalGeneration."""

    config_class = LlavaNormAlignConfig
    model_class = LlavaNormAlignModel


accept_stock_keys(LlavaNormAlignForConditionalGeneration)


def check_loading_info(model, info, source):
    """Raise RuntimeError unless every tensor of `model` came from the checkpoint `source`, and none was left over."""
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    mismatched = {str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"]}
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:  # tied, so the checkpoint needs none
        missing -= {"lm_head.weight"}
    if isinstance(model, NormAlignInnerMixin):  # the head of a full checkpoint
        unexpected -= {"lm_head.weight", "language_model.lm_head.weight"}
    if not (missing or unexpected or mismatched):
        return
    if missing and all(".align_norm." in key for key in missing) and not (unexpected or mismatched):
        raise RuntimeError(
            f"{source} has no align_norm tensors: it is not converted. "
            "Run: llava-norm-align convert SOURCE TARGET, and load TARGET."
        )
    found = [
        f"{len(keys)} {kind} ({', '.join(sorted(keys)[:5])}{', ...' if len(keys) > 5 else ''})"
        for kind, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
        if keys
    ]
    raise RuntimeError(
        f"{source} does not hold the weights of this model. Tensors: {'; '.join(found)}. Likely the checkpoint is "
        "incomplete, was written for another model or config.json was changed. Download or convert it again."
    )


def is_adapter_folder(folder):
    """True for a local folder that holds a PEFT adapter and no model."""
    return os.path.isfile(os.path.join(folder or "", "adapter_config.json")) and not os.path.isfile(
        os.path.join(folder, "config.json")
    )


def damaged_file(folder):
    """The first safetensors file in a local `folder` that cannot be opened, else `folder`."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError:
            return path
    return folder


def save_code(folder, model_class):
    """Write the files that hold `model_class`, its configuration and what they build on into `folder`, flat."""
    classes = (*model_class.__mro__, *model_class.config_class.__mro__)
    for module in {cls.__module__ for cls in classes if cls.__module__.endswith("_norm_align")}:
        path = Path(sys.modules[module].__file__)
        code = path.read_text(encoding="utf-8")
        code = re.sub(r"^from llava_norm_align\.\w+\.", "from .", code, flags=re.MULTILINE)
        Path(folder, path.name).write_text(code, encoding="utf-8")
