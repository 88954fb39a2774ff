"""Exact match of short answers by greedy generation, with an interval."""

import math
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, ProcessorMixin

from llava_norm_align.common.errors import InputError
from llava_norm_align.data.easy_vqa import Row, load_image
from llava_norm_align.evaluation.generate import answer_batch, greedy
from llava_norm_align.evaluation.matching import normalise

Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


def exact_match(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    rows: Sequence[Row],
    *,
    batch_size: int = 32,
    max_new_tokens: int = 8,
    progress: bool = True,
) -> dict[str, Any]:
    """Ask `model` every question; an answer is right if it is the row's, both normalised (matching.normalise).

    Returned: `accuracy` in 0..1, its 95 % Wilson `interval`, `correct`, `total`, and `predictions`, the model's words
    for each row in order.
    """
    if not rows:
        raise InputError("There are no questions to ask. Give at least one row.")
    predictions: list[str] = []
    with (
        greedy(model, processor, max_new_tokens),
        tqdm(total=len(rows), desc="answering", disable=None if progress else True) as bar,
    ):
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            images = [load_image(row.image) for row in batch]
            predictions += answer_batch(model, processor, [row.question for row in batch], images)
            bar.update(len(batch))
    correct = sum(normalise(said) == normalise(row.answer) for said, row in zip(predictions, rows, strict=True))
    return {
        "accuracy": correct / len(rows),
        "interval": wilson_interval(correct, len(rows)),
        "correct": correct,
        "total": len(rows),
        "predictions": predictions,
    }


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson's score interval: it stays inside 0..1 and works at 0 and 1)."""
    share, square = correct / total, Z_95**2
    centre = (share + square / (2 * total)) / (1 + square / total)
    half = Z_95 / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)
