"""Prompts of a diagnosis: model inputs from a processor, and which of their tokens are whose."""

import os

import torch
from PIL import Image
from transformers import ProcessorMixin

from llava_norm_align.common.prompts import prepare_inputs
from llava_norm_align.diagnosis.tokens import SYSTEM, TEMPLATE, TEXT, Prompt

CHARACTER_BYTES = 4  # at most, in UTF-8
BLANK = (127, 127, 127)  # mid-grey, near the mean of most processors


def make_prompt(
    processor: ProcessorMixin,
    question: str,
    image: Image.Image | None,
    device: torch.device,
    dtype: torch.dtype,
    name: str = "",
) -> Prompt:
    """The prompt of one turn by the processor's chat template, with an image or none."""
    inputs = prepare_inputs(processor, [question], None if image is None else [image]).to(device, dtype)
    parts = token_parts(processor, inputs["input_ids"][0], question)
    kept = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    return Prompt(kept, parts, name)


def blank(image: Image.Image) -> Image.Image:
    """A grey image of the same size."""
    return Image.new("RGB", image.size, BLANK)


def token_parts(processor: ProcessorMixin, ids: torch.Tensor, question: str) -> torch.Tensor:
    """TEXT for the tokens of the `question`, SYSTEM for those of the template's system prompt, else TEMPLATE [tokens].

    The tokens are found by their characters without spaces, which no tokenizer changes; a token that holds the end of
    one part and the start of the next belongs to the one that is not template.
    """
    spans = character_spans(processor, ids.tolist())
    text = "".join(text for text, _ in spans)
    parts = torch.full_like(ids, TEMPLATE)
    for wanted, part, find in ((system_prompt(processor), SYSTEM, str.find), (question, TEXT, str.rfind)):
        wanted = without_spaces(wanted).casefold()
        start = find(text, wanted) if wanted else -1
        if start < 0:
            continue
        position = 0
        for piece, tokens in spans:
            if position < start + len(wanted) and position + len(piece) > start:
                parts[tokens] = part
            position += len(piece)
    return parts


def character_spans(processor: ProcessorMixin, ids: list[int]) -> list[tuple[str, slice]]:
    """The text of the tokens, case folded and without spaces, and which tokens it is of: one, or all that share a
    character of several bytes.
    """
    spans, start = [], 0
    for end in range(1, len(ids) + 1):
        piece = processor.tokenizer.decode(ids[start:end])
        if "\ufffd" not in piece[-1:] or end - start == CHARACTER_BYTES or end == len(ids):
            spans.append((without_spaces(piece).casefold(), slice(start, end)))
            start = end
    return spans


def without_spaces(text: str) -> str:
    return "".join(text.split())


def system_prompt(processor: ProcessorMixin) -> str:
    """What the chat template writes before the first user turn's own header; "" if that cannot be told.

    The header is what both user turns of a conversation have before their text.
    """
    turns = [("user", "first-question"), ("assistant", "first-answer"), ("user", "second-question")]
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    try:
        text = processor.apply_chat_template(messages)
        before, rest = text.split(turns[0][1])
        between = rest.split(turns[1][1])[1].split(turns[2][1])[0]
    except Exception:  # no template, or one that refuses such a conversation; templates raise anything
        return ""
    before = before.removeprefix(processor.tokenizer.bos_token or "")
    header = os.path.commonprefix([before[::-1], between[::-1]])
    return before[: len(before) - len(header)]
