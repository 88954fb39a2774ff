"""Do the paper's assumptions hold? Bootstrap intervals over images, and a verdict a layer (arXiv 2512.08374).

A1: a layer's update has one norm C for visual and text tokens. A2: it has one angle phi to the token. A verdict is
about the 95 % interval, not about the mean: few or scattered images leave it undecided.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

LEAST_IMAGES = 8
RESAMPLES = 2000
A1_RANGE = (0.8, 1.25)  # of the ratio of the update norms, visual over text
A2_RANGE = (-5.0, 5.0)  # degrees between the update angles, visual minus text
VERDICTS = ("holds", "fails", "undecided", "none")
BLOCK = 2**16  # picked images at a time, so that memory does not follow the number of images


def bootstrap_interval(
    statistic: Callable[..., np.ndarray], *samples: np.ndarray, level: float = 0.95, seed: int = 0
) -> list[float] | None:
    """The percentile interval [low, high] of `statistic`, by 2,000 resamples of the images with replacement.

    `samples` are one number an image, [images] each, paired: a resample picks the same images in all. `statistic`
    gets the samples' means, [resamples] each, and returns [resamples], such as `lambda visual, text: visual / text`.
    Images with NaN or inf in a sample are left out. None for under 8 images, or if the statistic is not finite.
    """
    stacked = np.stack([np.asarray(sample, dtype=np.float64) for sample in samples])
    stacked = stacked[:, np.isfinite(stacked).all(axis=0)]
    images = stacked.shape[1]
    if images < LEAST_IMAGES:
        return None
    generator = np.random.default_rng(seed)
    means, rows = [], max(1, BLOCK // images)
    for start in range(0, RESAMPLES, rows):
        picked = generator.integers(images, size=(min(rows, RESAMPLES - start), images))
        means.append(np.stack([sample[picked].mean(axis=1) for sample in stacked]))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(*np.concatenate(means, axis=1))
    if not np.isfinite(values).all():
        return None
    return [float(np.quantile(values, (1 - level) / 2)), float(np.quantile(values, (1 + level) / 2))]


def verdict(interval: Sequence[float] | None, low: float, high: float) -> str:
    """ "holds" if the interval lies in [low, high], "fails" if wholly outside, else "undecided"; "none" for None."""
    if interval is None:
        return "none"
    if low <= interval[0] and interval[1] <= high:
        return "holds"
    return "fails" if interval[1] < low or interval[0] > high else "undecided"


def judge_a1(visual: np.ndarray, text: np.ndarray) -> dict:
    """A1 at one layer, from each image's mean update norm [images]: {"ratio", "interval", "verdict"}."""
    ratio = _statistic_of_means(np.divide, visual, text)
    interval = bootstrap_interval(np.divide, visual, text)
    return {"ratio": ratio, "interval": interval, "verdict": verdict(interval, *A1_RANGE)}


def judge_a2(visual: np.ndarray, text: np.ndarray) -> dict:
    """A2 at one layer, from each image's mean update angle [images] in degrees.

    Returns {"difference_degrees", "interval", "verdict"}.
    """
    difference = _statistic_of_means(np.subtract, visual, text)
    interval = bootstrap_interval(np.subtract, visual, text)
    return {"difference_degrees": difference, "interval": interval, "verdict": verdict(interval, *A2_RANGE)}


def count_verdicts(layers: Sequence[dict], images: int) -> dict:
    """How many layers got which verdict: {"images", "least_images", "a1": {"holds": n, ...}, "a2": {...}}."""
    counts = {name: Counter(layer[name]["verdict"] for layer in layers) for name in ("a1", "a2")}
    found = {name: {word: count[word] for word in VERDICTS} for name, count in counts.items()}
    return {"images": images, "least_images": LEAST_IMAGES, **found}


def _statistic_of_means(statistic: Callable[..., np.ndarray], visual: np.ndarray, text: np.ndarray) -> float | None:
    """`statistic` of the two means over the images that have both; None if there is no such number."""
    both = np.isfinite(visual) & np.isfinite(text)
    if not both.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        value = statistic(visual[both].mean(), text[both].mean())
    return float(value) if np.isfinite(value) else None
