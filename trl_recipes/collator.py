"""Rows with images as the tensors of a batch, with LLaVA's labels: TRL's vision collator, and what it lacks."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from transformers import BatchFeature, ProcessorMixin

from llava_norm_align.common.errors import InputError, missing_extra
from llava_norm_align.common.images import open_image
from llava_norm_align.common.loading import first_line
from llava_norm_align.data.llava_json import Row, as_messages
from llava_norm_align.data.templates import leading_bos, render

if TYPE_CHECKING:
    from datasets import Dataset

PLAIN = "plain"
IGNORED = -100
CHUNK = 10_000  # rows that are Python objects at one time; in the dataset they need a tenth of the memory


class LlavaCollator:
    """Conversational rows -> `input_ids`, `attention_mask` and `labels` [B, L], padded on the right, `pixel_values`.

    Rows are TRL's: `messages`, or `prompt` and `completion`, which are joined; `images` is a list of paths or PIL
    images, and empty or absent in a row of text alone. Both sorts may stand in one batch.

    `template`: a chat template with marks (data/templates.py). Every answer and its end of turn is supervised, as in
    LLaVA's second stage. Or "plain", LLaVA's first stage: the human text is dropped, so that a row is the image and
    its caption. The caption and the "\\n" after it are supervised; there is no end of turn to learn, as in LLaVA,
    because this stage trains the projector alone. Where the tokenizer puts a BOS token before a text, a row gets it.

    `image_in_every_batch`: a batch of text alone gets one more row, a black image without labels. Under FSDP and
    ZeRO-3 all processes must run the vision tower together, and wait forever for one whose batch has no image.

    InputError for a row that is longer than `max_length` tokens (nothing is cut), has no supervised token, or has
    image tokens in its labels.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        template: str,
        max_length: int | None = None,
        image_in_every_batch: bool = False,
    ):
        try:
            from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
        except ImportError:
            raise missing_extra("trl", "train", "making batches of rows") from None
        self.processor = processor
        self.max_length = max_length
        self.image_in_every_batch = image_in_every_batch
        self.plain = template == PLAIN
        if self.plain:
            self.collate = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
            return
        text, _ = render(template, processor, [{"role": "user", "content": [{"type": "text", "text": ""}]}])
        self.collate = DataCollatorForVisionLanguageModeling(
            processor, assistant_only_loss=True, chat_template=leading_bos(processor, text) + template
        )

    def __call__(self, examples: Sequence[dict[str, Any]]) -> BatchFeature:
        rows = [
            {
                "messages": example.get("messages") or [*example["prompt"], *example["completion"]],
                "images": [_opened(image) for image in _images(example)],
            }
            for example in examples
        ]
        blank = self.image_in_every_batch and not any(row["images"] for row in rows)
        whole = [self._plain(row) if self.plain else row for row in rows + [_blank_row()] * blank]
        try:
            batch = self.collate(whole)
        except ValueError as error:  # such as a literal image token in a text
            names = "; ".join(_name(row) for row in rows[:8])
            raise InputError(
                f"No batch can be made of these rows ({first_line(error)}): {names}. Correct them, or leave them out."
            ) from error
        if blank:
            batch["labels"][-1] = IGNORED
        self._check(batch, rows)
        return batch

    def _plain(self, row: dict[str, Any]) -> dict[str, Any]:
        """TRL's row of texts: it tokenizes prompt and completion apart, as LLaVA does what follows an image."""
        if len(row["images"]) != 1 or len(row["messages"]) != 2:
            raise InputError(
                f"{_name(row)} has {len(row['images'])} images and {len(row['messages'])} turns; the first stage "
                "takes one image and one answer. Leave the row out, or train the second stage on it."
            )
        prompt = leading_bos(self.processor) + self.processor.image_token
        return {"prompt": prompt, "completion": _text(row["messages"][1]) + "\n", "images": row["images"]}

    def _check(self, batch: BatchFeature, rows: Sequence[dict[str, Any]]) -> None:
        lengths = batch["attention_mask"].sum(dim=1).tolist()
        supervised = (batch["labels"] != IGNORED).sum(dim=1).tolist()
        image_tokens = batch["labels"] == self.processor.image_token_id
        if image_tokens.any():
            row = rows[int(image_tokens.any(dim=1).nonzero()[0])]
            raise InputError(
                f"{_name(row)} has {self.processor.image_token} in an answer, so {int(image_tokens.sum())} image "
                "tokens would be learned. Take it out of the answer."
            )
        for row, length, count in zip(rows, lengths, supervised, strict=False):
            if self.max_length is not None and length > self.max_length:
                raise InputError(
                    f"{_name(row)} has {length:,} tokens, more than max_length {self.max_length:,}; cutting it would "
                    "drop image or answer. Raise max_length, or leave out such rows: check-data lists them."
                )
            if count == 0:
                raise InputError(f"{_name(row)} has no answer to learn from. Give it one, or leave it out.")


def to_dataset(rows: Iterable[Row]) -> "Dataset":
    """Rows of LLaVA's JSON as a dataset for SFTTrainer: `messages` in parts, `images` as a list of paths.

    `words` counts those of all turns: what LLaVA sorts rows by. All rows have `messages`, single questions too: a file
    mixes both sorts, and a dataset has one sort of columns.
    """
    from datasets import Dataset, Features, List, Value, concatenate_datasets

    part = {"type": Value("string"), "text": Value("string")}
    features = Features(
        {
            "messages": List({"role": Value("string"), "content": List(part)}),
            "images": List(Value("string")),
            "words": Value("int32"),
        }
    )
    rows, parts = iter(rows), []
    while chunk := list(itertools.islice(rows, CHUNK)):
        content = {
            "messages": [as_messages(row) for row in chunk],
            "images": [[] if row.image is None else [str(row.image)] for row in chunk],
            "words": [sum(len(turn.text.split()) for turn in row.turns) for row in chunk],
        }
        parts.append(Dataset.from_dict(content, features=features))
    if not parts:
        raise InputError("The data has no rows. Name a file that has some.")
    return concatenate_datasets(parts)


def _blank_row() -> dict[str, Any]:
    turns = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "."}]
    return {"messages": turns, "images": [Image.new("RGB", (8, 8))]}


def _images(example: dict[str, Any]) -> list[Any]:
    if example.get("image") is not None:
        return [example["image"]]
    return example.get("images") or []


def _opened(image: Any) -> Any:
    return open_image(image) if isinstance(image, (str, Path)) else image


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(p["text"] for p in content if p["type"] == "text")


def _name(row: dict[str, Any]) -> str:
    """How a row is told in a message: a batch does not know its number."""
    texts = [_text(message) for message in row["messages"]]
    return f"The row that begins {next((text for text in texts if text), '')[:60]!r}"
