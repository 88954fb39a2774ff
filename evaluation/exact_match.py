"""Exact match of short answers by greedy generation, with an interval."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, ProcessorMixin

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.prompts import prepare_inputs
from llava_norm_align.data.easy_vqa import Row, load_image

Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


@torch.inference_mode()
def exact_match(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    rows: Sequence[Row],
    *,
    batch_size: int = 32,
    max_new_tokens: int = 8,
    progress: bool = True,
) -> dict[str, Any]:
    """Ask `model` every question and compare its greedy answer with the right one, case, spaces and a final dot apart.

    Returned: `accuracy` in 0..1, its 95 % Wilson `interval`, `correct`, `total`, and `predictions`, the model's words
    for each row in order.
    """
    if not rows:
        raise InputError("There are no questions to ask. Give at least one row.")
    predictions: list[str] = []
    # Prefill hands the head a strided slice [B, 1, D]; PyTorch's CPU matmul would then copy its weight B times.
    hook = model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0].contiguous(), *inputs[1:]))
    try:
        with tqdm(total=len(rows), desc="answering", disable=None if progress else True) as bar:
            for start in range(0, len(rows), batch_size):
                batch = rows[start : start + batch_size]
                inputs = prepare_inputs(
                    processor, [row.question for row in batch], [load_image(row.image) for row in batch]
                )
                inputs = inputs.to(model.device)
                ids = model.generate(
                    **inputs,
                    do_sample=False,
                    max_new_tokens=max_new_tokens,
                    pad_token_id=processor.tokenizer.pad_token_id,
                )
                new = ids[:, inputs["input_ids"].shape[1] :]
                predictions += [text.strip() for text in processor.batch_decode(new, skip_special_tokens=True)]
                bar.update(len(batch))
    finally:
        hook.remove()
    correct = sum(normalise(said) == normalise(row.answer) for said, row in zip(predictions, rows, strict=True))
    return {
        "accuracy": correct / len(rows),
        "interval": wilson_interval(correct, len(rows)),
        "correct": correct,
        "total": len(rows),
        "predictions": predictions,
    }


def normalise(answer: str) -> str:
    """An answer in lower case, without surrounding spaces and one final dot."""
    return answer.strip().lower().removesuffix(".").rstrip()


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson's score interval: it stays inside 0..1 and works at 0 and 1)."""
    share, square = correct / total, Z_95**2
    centre = (share + square / (2 * total)) / (1 + square / total)
    half = Z_95 / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)
