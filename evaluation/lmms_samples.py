"""The questions that lmms-eval logged for two models, paired: what the difference of a score is, and how sure."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llava_norm_align.common.errors import InputError
from llava_norm_align.evaluation.paired import difference

SAME = ("input", "target", "input_media")  # of a question for all models; its document is not logged
RIGHT_ANSWERS = "right answers"
Samples = dict[int, dict[str, Any]]  # what was logged of each question, by doc_id


def read_samples(path: Path) -> Samples | None:
    """The lines of a samples file by doc_id; None if a question has several, one for each filter: none is named."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    samples = {row["doc_id"]: row for row in sorted(rows, key=lambda row: row["doc_id"])}
    return samples if len(samples) == len(rows) else None


def score_of(value: Any) -> float | None:
    """How good one answer is by what a task logged of it: a number, a `score`, or an option beside the right one."""
    if isinstance(value, dict):
        if isinstance(value.get("pred"), str) and isinstance(value.get("answer"), str):  # seedbench_2
            return float(value["pred"] == value["answer"])
        value = value.get("score")
    return float(value) if isinstance(value, (bool, int, float)) and math.isfinite(value) else None


def check_same_questions(task: str, first: Samples, other: Samples) -> None:
    """InputError unless both models were asked the same."""
    if first.keys() != other.keys():
        odd = min(first.keys() ^ other.keys())
        raise InputError(
            f"The models were not asked the same questions of {task}: only one has number {odd}. Run both again."
        )
    for number, sample in first.items():
        for key in SAME:
            if sample.get(key) != other[number].get(key):
                raise InputError(
                    f"The models were not asked the same in {task}: the {key} of question {number} differs. Run both "
                    "again, on the same data."
                )


def paired_differences(
    task: str, first: Samples | None, other: Samples | None, values: Mapping[str, tuple[float, float]]
) -> list[dict[str, Any]]:
    """One entry for each metric of `values` (of both models, by lmms-eval) that is a mean of scores of questions.

    If there is none, but each question has one score of 0 or 1, the entry is called RIGHT_ANSWERS: the share of these,
    which lmms-eval's metrics weigh in ways of their own. If there is not even that, the one entry has `reason` and no
    numbers. Questions count as independent of each other, unless the files of their images are logged.
    InputError if the models were not asked the same.
    """
    if first is None or other is None:
        return [{"task": task, "metric": None, "reason": "several filters, whose lines cannot be told apart"}]
    check_same_questions(task, first, other)
    found: list[dict[str, Any]] = []
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    for metric, (value, other_value) in values.items():
        images = _images([sample for sample in first.values() if metric in sample])
        pair = _scores(metric, first), _scores(metric, other)
        if pair[0] is None or pair[1] is None or len(pair[0]) != len(pair[1]):
            continue
        means = math.isclose(pair[0].mean(), value, abs_tol=1e-9)
        means = means and math.isclose(pair[1].mean(), other_value, abs_tol=1e-9)
        known = any(np.array_equal(pair[0], one) and np.array_equal(pair[1], two) for one, two in seen)
        if means and not known:  # pope logs the same scores under five metrics, of which one is their mean
            seen.append(pair)
            found.append(_entry(task, metric, *pair, images))
    if found:
        return found
    pair = _right(values, first), _right(values, other)
    if pair[0] is None or pair[1] is None:
        return [{"task": task, "metric": None, "reason": "no score of single questions is logged"}]
    return [_entry(task, RIGHT_ANSWERS, *pair, _images([*first.values()]))]


def _images(samples: Sequence[dict[str, Any]]) -> np.ndarray:
    """The number of each question's images [questions], by their files; without these a number of its own."""
    numbers: dict[Any, int] = {}
    keys = (tuple(sample.get("input_media") or [sample["doc_id"]]) for sample in samples)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _scores(metric: str, samples: Samples) -> np.ndarray | None:
    """The scores of the questions that have this metric; None if one has no score, or no question has it."""
    scores = [score_of(sample[metric]) for sample in samples.values() if metric in sample]
    return None if not scores or None in scores else np.array(scores, dtype=float)


def _right(metrics: Mapping[str, Any], samples: Samples) -> np.ndarray | None:
    """Whether each answer is right, if all metrics of a question agree that it is 0 or 1."""
    right = []
    for sample in samples.values():
        scores = {score_of(sample[metric]) for metric in metrics if metric in sample}
        if scores not in ({0.0}, {1.0}):
            return None
        right.append(scores == {1.0})
    return np.array(right, dtype=float)


def _entry(task: str, metric: str, first: np.ndarray, other: np.ndarray, images: np.ndarray) -> dict[str, Any]:
    """The statistics of two models' scores [questions]. `images` [questions]: see paired.bootstrap."""
    if np.isin((first, other), (0, 1)).all():
        first, other = first.astype(bool), other.astype(bool)
    return {"task": task, "metric": metric, **difference([first[None]], [other[None]], [images])}
