"""How many tokens a row has once its image is expanded, by the model's own tokenizer, processor and chat template."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

from jinja2 import TemplateError
from PIL import Image
from transformers import ProcessorMixin

from llava_norm_align.common.errors import InputError
from llava_norm_align.data.llava_json import Row, Turn, as_messages
from llava_norm_align.data.templates import leading_bos, render, training_template

TRIAL_SIZES = ((480, 360), (360, 480), (1600, 400))  # if the tokens of an image hang on its size, these differ
MARK = " \n\ue000{}\ue001\n "  # stands for a text, of which a template may strip the white space


class TokenCounter:
    """Counts tokens for one processor. InputError if it cannot expand an image or has no chat template.

    `stage`: 1 is LLaVA's plain format (the image, the answer and a line end), 2 the chat template. `template`: its
    name or file, as training takes it; None: the processor's own. `image_tokens`: of every image, or None if the
    number hangs on the image's size, which is slower to count.
    """

    def __init__(self, processor: ProcessorMixin, stage: int = 2, template: str | Path | None = None):
        self.processor, self.tokenizer, self.stage = processor, processor.tokenizer, stage
        self.image_token = getattr(processor, "image_token", "<image>")
        self.template = None if stage == 1 else _template(processor, template)
        self.added, self.frame = lru_cache(None)(self._added), lru_cache(None)(self._frame)
        self.bos = leading_bos(processor)
        try:
            self.trials = [self.added(size) for size in TRIAL_SIZES]
        except Exception as error:  # such as a processor without patch_size
            raise InputError(
                f"The processor cannot expand an image into tokens ({type(error).__name__}: {error}). "
                "Repair its files: patch_size and vision_feature_select_strategy must be set."
            ) from error
        self.image_tokens = self.trials[0] + 1 if len(set(self.trials)) == 1 else None

    def _added(self, size: tuple[int, int]) -> int:
        """Tokens that an image of `size` (width, height) adds to its one placeholder."""
        whole = self.processor(text=[self.image_token], images=[Image.new("RGB", size)])["input_ids"][0]
        return len(whole) - len(self.tokenizer([self.image_token])["input_ids"][0])

    def count(self, rows: Sequence[Row], sizes: Sequence[tuple[int, int] | None]) -> list[int | None]:
        """Tokens of each row, whose image has the size in `sizes`.

        None for a row whose text does not have one placeholder of the model for its image, and none without one: it
        spells the placeholder out.
        """
        if self.stage == 1:  # training tokenises the answer apart from what stands before it
            texts = [f"{row.turns[1].text}\n" for row in rows]
            start, placeholders = self._lengths([self.bos + self.image_token])[0], 0
        else:
            texts = [self._render(row) for row in rows]
            texts = [text if text.startswith(self.bos) else self.bos + text for text in texts]
            start, placeholders = 0, 1
        counts = []
        for row, size, text, length in zip(rows, sizes, texts, self._lengths(texts), strict=True):
            with_image = row.image is not None
            added = self.added(TRIAL_SIZES[0] if self.image_tokens else size) if with_image else 0
            as_expected = text.count(self.image_token) == placeholders * with_image
            counts.append(start + length + added if as_expected else None)
        return counts

    def _lengths(self, texts: list[str]) -> list[int]:
        if not self.tokenizer.is_fast:
            options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
            return [len(ids) for ids in self.tokenizer(texts, **options)["input_ids"]]
        # the same without offsets, masks and Python's own integers, which take half of the time
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return [len(encoding) for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _render(self, row: Row) -> str:
        """The row in the chat template.

        A template is rendered once for each sequence of turns, with marks, and the texts are put in their places:
        rendering each row would take longer than tokenising it. A row with an empty text or with "<", on which some
        templates decide (`</think>`), is rendered itself.
        """
        texts = [turn.text for turn in row.turns]
        frame = self.frame(tuple((turn.role, turn.image) for turn in row.turns))
        if frame is None or not all(texts) or any("<" in text for text in texts):
            return self._rendered(row)
        pieces, strips = frame
        if strips:
            texts = [text.strip() for text in texts]
        return pieces[0] + "".join([text + piece for text, piece in zip(texts, pieces[1:], strict=True)])

    def _frame(self, turns: tuple[tuple[str, bool], ...]) -> tuple[list[str], bool] | None:
        """What the template puts around the texts of such turns, and whether it strips them; None if it does more."""
        marks = [MARK.format(number) for number in range(len(turns))]
        bare = [mark.strip() for mark in marks]
        text = self._rendered(_with_texts(turns, marks))
        strips = any(mark not in text for mark in marks)
        if strips and self._rendered(_with_texts(turns, bare)) != text:
            return None
        pieces = []
        for mark in bare if strips else marks:
            piece, found, text = text.partition(mark)
            if not found:
                return None
            pieces.append(piece)
        pieces.append(text)
        return None if any("\ue000" in piece for piece in pieces) else (pieces, strips)

    def _rendered(self, row: Row) -> str:
        try:
            return render(self.template, self.processor, as_messages(row))[0]
        except (TemplateError, TypeError) as error:
            raise InputError(
                f"The chat template cannot render a row ({error}). It must take content as a list of image and text "
                "parts, as LLaVA's processors do."
            ) from error

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 of what the counts depend on."""
        if self.tokenizer.is_fast:
            words = json.loads(self.tokenizer.backend_tokenizer.to_str())
            words |= {"truncation": None, "padding": None}  # left there by earlier calls
        else:
            words = self.tokenizer.get_vocab()
        content = [words, self.template, self.image_token, self.bos, self.trials, self.stage]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _with_texts(turns: Sequence[tuple[str, bool]], texts: Sequence[str]) -> Row:
    return Row("", tuple(Turn(role, text, image) for (role, image), text in zip(turns, texts, strict=True)), None)


def _template(processor: ProcessorMixin, choice: str | Path | None) -> str:
    if choice is not None:
        return training_template(processor, choice)
    template = processor.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    if not template:
        raise InputError(
            "The processor has no chat template. Choose vicuna_v1, as LLaVA-1.5, or a Jinja file, with "
            "--chat-template-path."
        )
    return template
