"""L2 norms of visual and text tokens where they enter the language model."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel


class _Reached(Exception):
    """Ends a forward pass once the tapped tensor is there."""


def decoder_layers(language_model: torch.nn.Module) -> torch.nn.ModuleList:
    """The decoder layers of a language model without head: its first list of modules."""
    return next(module for module in language_model.modules() if isinstance(module, torch.nn.ModuleList))


@torch.no_grad()
def layer0_input(model: torch.nn.Module, layers: torch.nn.ModuleList, **inputs: torch.Tensor) -> torch.Tensor:
    """The hidden states [batch, tokens, D] that reach decoder layer 0 when `model` is called; no layer runs."""
    reached = []

    def tap(module, args, kwargs):
        reached.append(args[0] if args else kwargs["hidden_states"])
        raise _Reached

    handle = layers[0].register_forward_pre_hook(tap, with_kwargs=True)
    try:
        model(**inputs)
    except _Reached:
        pass
    finally:
        handle.remove()
    return reached[0]


def layer0_norms(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """L2 norms (float64) at the input of decoder layer 0, over the batch: {"visual": [tokens], "text": [tokens]}.

    `inputs` are a processor's, on the model's device. Visual tokens stand at the image placeholder's id, but for
    image_newline rows (LLaVA-NeXT, LLaVA-OneVision), which share it and do not come from the projector; text tokens
    are the others that the attention mask does not leave out as padding.
    """
    hidden = layer0_input(model, decoder_layers(model.get_decoder()), **inputs)
    norms = torch.linalg.vector_norm(hidden.double(), dim=-1)  # [batch, tokens]
    visual = inputs["input_ids"] == model.config.image_token_id
    text = ~visual if inputs.get("attention_mask") is None else ~visual & inputs["attention_mask"].bool()
    newline = getattr(model.base_model, "image_newline", None)
    if newline is not None:
        away = torch.linalg.vector_norm(hidden.double() - newline.to(hidden).double(), dim=-1)
        visual &= away > 1e-3 * torch.linalg.vector_norm(newline.double())
    return {"visual": norms[visual].cpu(), "text": norms[text].cpu()}
