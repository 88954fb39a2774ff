"""Prompts of a diagnosis: model inputs from a processor, and which of their tokens are whose."""

import os
from collections.abc import Collection

import torch
from PIL import Image
from transformers import ProcessorMixin

from llava_norm_align.common.prompts import prepare_inputs, render_prompt
from llava_norm_align.diagnosis.tokens import SYSTEM, TEMPLATE, TEXT, Prompt

FIRST, ANSWER, SECOND = "first-question", "first-answer", "second-question"
CHARACTER_BYTES = 4  # at most, in UTF-8
BLANK = (127, 127, 127)  # mid-grey, near the mean of most processors


def make_prompt(
    processor: ProcessorMixin,
    question: str,
    image: Image.Image | None,
    device: torch.device,
    dtype: torch.dtype,
    name: str = "",
    accepted: Collection[str] | None = None,
) -> Prompt:
    """The prompt of one turn by the processor's chat template, with an image or none.

    `accepted`: the names of the inputs that the model takes; others that the processor makes are dropped. None: all.
    """
    inputs = prepare_inputs(processor, [question], None if image is None else [image])
    parts = token_parts(processor, inputs["input_ids"][0], question)
    kept = {
        key: value.to(device, dtype if value.is_floating_point() else None)
        for key, value in inputs.items()
        if isinstance(value, torch.Tensor) and (accepted is None or key in accepted)
    }
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
    system, tail = (without_spaces(part).casefold() for part in around_question(processor))
    asked = without_spaces(question).casefold()
    place = text.rfind(asked + tail)  # with what follows it, in which a short question may stand again
    if place < 0:
        place = text.rfind(asked)
    for start, wanted, part in ((text.find(system), system, SYSTEM), (place, asked, TEXT)):
        position = 0
        for piece, tokens in spans:
            if wanted and start >= 0 and position < start + len(wanted) and position + len(piece) > start:
                parts[tokens] = part
            position += len(piece)
    return parts


def character_spans(processor: ProcessorMixin, ids: list[int]) -> list[tuple[str, slice]]:
    """The text of the tokens, case folded and without spaces, and which tokens it is of: one, or all that share a
    character of several bytes.
    """
    spans, start = [], 0
    for end in range(1, len(ids) + 1):
        known = min(ids[start:end]) >= 0  # the original LLaVA's placeholder is -200
        piece = processor.tokenizer.decode(ids[start:end]) if known else ""
        if "\ufffd" not in piece[-1:] or end - start == CHARACTER_BYTES or end == len(ids):
            spans.append((without_spaces(piece).casefold(), slice(start, end)))
            start = end
    return spans


def without_spaces(text: str) -> str:
    return "".join(text.split())


def around_question(processor: ProcessorMixin) -> tuple[str, str]:
    """The system prompt, which is what a prompt has before the first user turn's own header; and what follows the
    question. Each is "" if it cannot be told. The header is what both user turns of a conversation have before their
    text.
    """
    tail = ""
    try:
        tail = render_prompt(processor, FIRST, with_image=False).split(FIRST)[1]
        turns = [("user", FIRST), ("assistant", ANSWER), ("user", SECOND)]
        messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
        before, rest = processor.apply_chat_template(messages).split(FIRST)
        between = rest.split(ANSWER)[1].split(SECOND)[0]
    except Exception:  # no template, or one that refuses such a conversation; templates raise anything
        return "", tail
    before = before.removeprefix(processor.tokenizer.bos_token or "")
    header = os.path.commonprefix([before[::-1], between[::-1]])
    return before[: len(before) - len(header)], tail
