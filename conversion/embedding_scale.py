"""Whether a language model scales its embeddings after the table, measured on the installed transformers."""

from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModel, PretrainedConfig

from llava_norm_align.diagnosis.structure import first_list, layer0_input

LARGE = 2**20  # elements; a decoder layer's matrices stay without memory, embedding and scale buffers are real
TOLERANCE = 1e-3  # relative
ROWS = 16


@dataclass(frozen=True)
class EmbeddingScale:
    """Factors between a token's vector and its hidden state at decoder layer 0."""

    text: float  # from the row of the embedding table
    image: float  # from the projector's output, which LLaVA passes as inputs_embeds

    @property
    def is_one(self) -> bool:
        return abs(self.text - 1) < TOLERANCE and abs(self.image - 1) < TOLERANCE


class _LargeTensorsOnMeta(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if (
            func is torch.empty
            and torch.Size(args[0] if args and not isinstance(args[0], int) else args).numel() > LARGE
        ):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def measure_embedding_scale(text_config: PretrainedConfig) -> EmbeddingScale | None:
    """The factors of a language model, from its class with one layer and random embeddings; None if there are none.

    Families differ, and so do transformers versions: for LLaVA with Gemma 2, 4.57 scales text and image by sqrt(D), 5
    only the text. None means that layer 0's input is not a multiple of the embedding, or that the class cannot be
    called in this way.
    """
    try:
        with _LargeTensorsOnMeta():
            model = AutoModel.from_config(_with_one_layer(text_config), dtype=torch.float32).eval()
        table = model.get_input_embeddings().weight.data.normal_()
        ids = torch.arange(ROWS)[None]
        layers = first_list(model)
        embeds = model.get_input_embeddings()(ids)  # what LLaVA puts the image features into
        states = layer0_input(model, layers, inputs_embeds=embeds)
        text, image = _factor(table[None], states), _factor(embeds, states)
    except Exception:  # any error of a class that we do not know means only that it was not measured
        return None
    return EmbeddingScale(text, image) if text and image else None


def _with_one_layer(text_config: PretrainedConfig) -> PretrainedConfig:
    """The same architecture and width with one layer and a few rows."""
    content = text_config.to_dict()
    layers = content["num_hidden_layers"]
    for name, value in content.items():
        if isinstance(value, list) and len(value) == layers:  # layer_types and the like
            content[name] = value[:1]
    content |= {"num_hidden_layers": 1, "vocab_size": ROWS}
    content |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))  # outside of so small a vocabulary
    return type(text_config).from_dict(content)


def _factor(vectors: torch.Tensor, states: torch.Tensor) -> float | None:
    """k with states = k vectors, None if there is no such k."""
    factor = ((vectors * states).sum() / vectors.square().sum()).item()
    residual = (states - factor * vectors).norm() / states.norm()
    return factor if residual < TOLERANCE else None
