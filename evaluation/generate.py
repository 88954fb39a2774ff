"""Greedy answers to many questions in batches; none that fails stops the others."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import GenerationConfig, PreTrainedModel, ProcessorMixin

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.images import open_image
from llava_norm_align.common.loading import first_line, out_of_memory
from llava_norm_align.common.prompts import prepare_inputs


@dataclass(frozen=True, slots=True)
class Said:
    """An answer; or, with `text` None, why there is none."""

    text: str | None
    seconds: float  # a batch's time, divided by its rows
    error: str | None = None


@contextmanager
def greedy(model: PreTrainedModel, processor: ProcessorMixin, max_new_tokens: int, **asked: Any) -> Iterator[None]:
    """Within the block, `model.generate` is plain greedy search, whatever the checkpoint's generation_config asks for.

    Only its end tokens are kept: a repetition penalty, say, would change the answers of one model and not of another.
    `asked`: fields of a GenerationConfig that are to differ from plain greedy search, such as num_beams.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(
        **{"do_sample": False, "num_beams": 1, **asked},
        max_new_tokens=max_new_tokens,
        eos_token_id=own.eos_token_id,
        bos_token_id=own.bos_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
    )
    # Prefill hands the head a strided slice [B, 1, D]; PyTorch's CPU matmul would then copy its weight B times.
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda module, inputs: (inputs[0].contiguous(), *inputs[1:])
    )
    try:
        yield
    finally:
        hook.remove()
        model.generation_config = own


@torch.inference_mode()
def answer_batch(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    prompts: Sequence[str],
    images: Sequence[Image.Image | Sequence[Image.Image]] | None,
) -> list[str]:
    """The answers to `prompts` as text without special tokens. `images`: see prepare_inputs. Call within `greedy`."""
    inputs = prepare_inputs(processor, prompts, images).to(model.device, model.dtype)
    ids = model.generate(**inputs)
    new = ids[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in processor.batch_decode(new, skip_special_tokens=True)]


def answer_rows(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    prompts: Sequence[str],
    images: Sequence[Path | None],
    batch_size: int,
) -> Iterator[list[tuple[int, Said]]]:
    """Yield (position, answer) of every row, a batch at a time; call it within `greedy`.

    Rows with an image and rows without do not share a batch. A batch that fails is asked again row by row, and the
    rows that fail then carry their error. InputError if the memory does not suffice.
    """
    kinds = ([i for i, image in enumerate(images) if (image is None) == without] for without in (False, True))
    for rows in kinds:
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            said = _try(model, processor, [prompts[i] for i in batch], [images[i] for i in batch])
            if said[0].error is not None and len(batch) > 1:
                said = [_try(model, processor, [prompts[i]], [images[i]])[0] for i in batch]
            yield list(zip(batch, said, strict=True))


def _try(
    model: PreTrainedModel, processor: ProcessorMixin, prompts: Sequence[str], images: Sequence[Path | None]
) -> list[Said]:
    started = time.perf_counter()
    try:
        opened = None if images[0] is None else [open_image(image) for image in images]
        texts: list[str | None] = [*answer_batch(model, processor, prompts, opened)]
        error = None
    except Exception as reason:  # every model and processor has its own way to fail
        if out_of_memory(reason):
            raise InputError(
                f"The memory did not suffice for {len(prompts)} questions at once ({first_line(reason)}). Lower "
                "--batch-size, or pass --dtype bfloat16, --load-in-4bit or --device-map auto; the run goes on where "
                "it stopped."
            ) from reason
        texts, error = [None] * len(prompts), f"{type(reason).__name__}: {first_line(reason)}"
    seconds = (time.perf_counter() - started) / len(prompts)
    return [Said(text, seconds, error) for text in texts]
