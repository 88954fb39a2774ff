"""The parts of a vision-language model that a diagnosis taps, found by running it once: no code per model."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from llava_norm_align.common.errors import InputError

# Names of the module between the vision encoder and the language model, as transformers' families and remote code
# call it; the first that a model has is taken.
PROJECTORS = (
    "multi_modal_projector",
    "connector",  # Idefics, SmolVLM
    "aligner",  # DeepSeek-VL, Janus
    "visual.merger",  # Qwen-VL, GLM-4V
    "visual_embeddings_table",  # Ovis: a vocabulary of visual words
    "embed_vision",  # Gemma 3n
    "language_projection",  # BLIP-2
    "vision_embed_tokens",  # Fuyu
    "image_to_text_projection",  # Kosmos-2
    "mm_projector",  # the original LLaVA
    "mlp1",  # the original InternVL
)
NEWLINES = 2  # LLaVA-NeXT has one learned row that stands at placeholders but is no visual token; others have two
TOLERANCE = 1e-3  # relative


class Reached(Exception):
    """Ends a forward pass once the tapped tensor is there."""


@dataclass(frozen=True)
class Structure:
    """Where the visual tokens of a model come from and where they enter its language model."""

    layers: torch.nn.ModuleList  # the decoder layers of the language model
    embeddings: torch.nn.Module  # of the text
    projector: torch.nn.Module | None  # its input are the encoder's features, its output the visual tokens
    projector_name: str | None  # in the model
    placeholders: tuple[int, ...]  # ids of the tokens at whose positions visual tokens stand
    newlines: torch.Tensor  # [0 to 2, D]: rows at layer 0 that stand at placeholders but do not come from the image
    markers: tuple[int, ...]  # ids of Ovis' visual indicators: rows of the visual table, but the same for every image
    bos_token_id: int | None
    missing: tuple[str, ...]  # a sentence for each part that was not found


@torch.no_grad()
def find_structure(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> Structure:
    """The structure of `model`, seen on the model `inputs` of one prompt with one image (batch of 1).

    Visual tokens are the positions whose hidden state at the input of decoder layer 0 changes with the image; their
    token ids are the placeholders. Rows with such an id that do not change, as LLaVA-NeXT's image_newline, are no
    visual tokens. InputError for a model without visual tokens in the residual stream: a text-only model, an
    encoder-decoder, or one that reads the image through cross-attention.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(
            f"{type(model).__name__} is an encoder-decoder; a decoder whose residual stream holds text and visual "
            "tokens was expected. Name a model of the LLaVA kind."
        )
    layers = decoder_layers(model, inputs)
    if any("cross_attn" in name or "cross_attention" in name for name, _ in layers.named_modules()):
        raise InputError(
            f"{type(model).__name__} reads the image through cross-attention: no visual token enters the residual "
            "stream of its language model, so there is no norm gap to measure. Name a model of the LLaVA kind."
        )
    hidden = layer0_input(model, layers, **inputs)[0]
    changed = (hidden != layer0_input(model, layers, **_other_image(inputs))[0]).any(dim=-1).cpu()  # [T]
    if not changed.any():
        raise InputError(
            f"No hidden state at the input of {type(model).__name__}'s first decoder layer changes with the image; "
            "visual tokens were expected there. Name a model that puts them into the residual stream."
        )
    ids = expand_at(int(changed.nonzero()[0]), inputs["input_ids"][0].cpu(), len(hidden))
    placeholders = ids[changed].unique()
    still = torch.isin(ids, placeholders) & ~changed
    newlines = hidden[still.to(hidden.device)].unique(dim=0)
    if len(newlines) > NEWLINES:  # a discrete code that happens to be the same for two images
        newlines = newlines[:0]
    name, projector = _find_projector(model)
    missing = []
    if projector is None:
        missing.append(
            f"The projector of {type(model).__name__} has no name that is known here, so the encoder's features and "
            "the projector's output are not measured; what reaches decoder layer 0 is."
        )
    text_config = model.config.get_text_config()
    return Structure(
        layers=layers,
        embeddings=model.get_input_embeddings(),
        projector=projector,
        projector_name=name,
        placeholders=tuple(placeholders.tolist()),
        newlines=newlines,
        markers=tuple(getattr(model.config, "visual_indicator_token_ids", None) or ()),
        bos_token_id=getattr(text_config, "bos_token_id", None),
        missing=tuple(missing),
    )


def expand_at(place: int, values: torch.Tensor, length: int) -> torch.Tensor:
    """`values` [tokens] with the one at `place` repeated until there are `length`, as in a model that replaces one
    placeholder by all visual tokens itself.
    """
    more = length - len(values)
    return torch.cat([values[:place], values[place].expand(more + 1), values[place + 1 :]])


def decoder_layers(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.nn.ModuleList:
    """The decoder layers of the language model: the first list of modules in what get_decoder() returns, or, where
    that is the model itself, the list whose first module is the last one to be called with states of its width.
    """
    decoder = model.get_decoder()
    if decoder is not None and decoder not in (model, model.base_model):
        return first_list(decoder)
    width, called = model.get_input_embeddings().weight.shape[-1], []

    def seen(layers):
        def hook(module, args, kwargs):
            states = hidden_states(args, kwargs)
            if states is not None and states.dim() == 3 and states.shape[-1] == width:
                called.append(layers)

        return hook

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    inner = {id(module) for layers in lists for layer in layers for module in layer.modules()}
    handles = [
        layers[0].register_forward_pre_hook(seen(layers), with_kwargs=True)
        for layers in lists
        if id(layers) not in inner
    ]
    try:
        model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not called:
        raise InputError(
            f"No decoder layers were found in {type(model).__name__}: no list of modules is called with hidden states "
            f"[batch, tokens, {width}]. Name a model of the LLaVA kind."
        )
    return called[-1]


def first_list(decoder: torch.nn.Module) -> torch.nn.ModuleList:
    """The decoder layers of a language model without head: its first list of modules."""
    return next(module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList))


def hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The first tensor that a module is called with."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)


@torch.no_grad()
def layer0_input(model: torch.nn.Module, layers: torch.nn.ModuleList, **inputs: torch.Tensor) -> torch.Tensor:
    """The hidden states [batch, tokens, D] that reach decoder layer 0 when `model` is called; no layer runs."""
    reached = []

    def tap(module, args, kwargs):
        reached.append(hidden_states(args, kwargs))
        raise Reached

    handle = layers[0].register_forward_pre_hook(tap, with_kwargs=True)
    try:
        model(**inputs)
    except Reached:
        pass
    finally:
        handle.remove()
    return reached[0]


def forward_options(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments with which a forward pass keeps no cache and computes the logits of the last position only."""
    accepted = inspect.signature(model.forward).parameters
    return {name: value for name, value in (("use_cache", False), ("logits_to_keep", 1)) if name in accepted}


def input_device(model: PreTrainedModel) -> torch.device:
    """Where the model's inputs go. Of an offloaded model, whose device is "meta", accelerate moves them on."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def accepted_inputs(model: PreTrainedModel) -> set[str] | None:
    """The names of the inputs that `model` takes; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _other_image(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same prompt with noise on the image."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: value + torch.randn(value.shape, generator=generator).to(value) if _is_image(name, value) else value
        for name, value in inputs.items()
    }


def _is_image(name: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1 and "mask" not in name


def _find_projector(model: PreTrainedModel) -> tuple[str | None, torch.nn.Module | None]:
    modules = dict(model.named_modules())
    for known in PROJECTORS:
        for name, module in modules.items():
            if f".{name}".endswith(f".{known}"):
                return name, module
    return None, None
