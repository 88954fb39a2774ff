"""One answer to a question about an image, piece by piece."""

from collections.abc import Callable

import torch
from PIL import Image
from transformers import PreTrainedModel, ProcessorMixin, TextStreamer

from llava_norm_align.common.prompts import prepare_inputs


class _Pieces(TextStreamer):
    def __init__(self, processor: ProcessorMixin, on_text: Callable[[str], None]):
        super().__init__(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.on_text(text)


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    image: Image.Image,
    question: str,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    on_text: Callable[[str], None] = lambda piece: None,
) -> str:
    """The model's answer as text. Greedy at temperature 0, else sampled; `on_text` gets every piece as it comes."""
    inputs = prepare_inputs(processor, [question], [image]).to(model.device, model.dtype)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    pieces: list[str] = []

    def take(piece: str) -> None:
        pieces.append(piece)
        on_text(piece)

    model.generate(**inputs, **sampling, max_new_tokens=max_new_tokens, streamer=_Pieces(processor, take))
    return "".join(pieces).strip()
