"""Two models on the same questions: accuracies, their paired difference, and how sure it is."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from llava_norm_align.common.errors import missing_extra
from llava_norm_align.evaluation.exact_match import wilson_interval

RESAMPLES = 9999
LEAST_SEEDS = 5  # of a side that has several: a bootstrap of fewer is too narrow for a verdict
LEAST_IMAGES = 8  # a bootstrap of fewer is too narrow to be called an interval
CELLS = 2**22  # numbers that a batch of resamples may hold
# bool [seeds, rows]: whether the model of each seed answered each row right; `difference` takes scores in 0..1, too
Right = np.ndarray


def import_statistics() -> None:
    """InputError unless scipy and statsmodels are there: said before hours of work."""
    try:
        import scipy.stats  # noqa: F401
        import statsmodels.stats.contingency_tables  # noqa: F401
    except ImportError as error:
        raise missing_extra(error.name or "scipy", "eval", "Comparing models") from None


def accuracy(right: Right, images: np.ndarray) -> dict[str, Any]:
    """Share of right answers in 0..1, over all seeds, with a 95 % interval. `images` [rows]: see bootstrap.

    One seed: Wilson's interval. Several: a percentile bootstrap over seeds and images.
    """
    seeds, n = right.shape
    return {
        "n": n,
        "accuracy": float(right.mean()),
        "interval": list(wilson_interval(int(right.sum()), n)) if seeds == 1 else bootstrap([right], None, [images]),
        "seeds": [float(share) for share in right.mean(axis=1)],
    }


def difference(first: Sequence[Right], second: Sequence[Right], images: Sequence[np.ndarray]) -> dict[str, Any]:
    """Accuracy of a first model less that of a second; of several tasks, the mean of the tasks' differences.

    `interval`: see bootstrap. `mcnemar_p`: McNemar's exact test, for one seed a side, one task and answers that are
    right or wrong. `resolved`: the interval leaves out 0, that test, if there is one, has p < 0.05, and
    no side has 2 to LEAST_SEEDS - 1 seeds.
    """
    shares = [float(one.mean() - other.mean()) for one, other in zip(first, second, strict=True)]
    ends = bootstrap(first, second, images)
    result: dict[str, Any] = {
        "n": sum(one.shape[1] for one in first),
        "images": sum(len(np.unique(one)) for one in images),
        "difference": sum(shares) / len(shares),
        "interval": ends,
        "only_first_right": None,
        "only_second_right": None,
        "mcnemar_p": None,
    }
    if len(first) == 1 and len(first[0]) == len(second[0]) == 1 and first[0].dtype == second[0].dtype == bool:
        (one,), (other,) = first[0], second[0]
        result["only_first_right"], result["only_second_right"] = int(np.sum(one & ~other)), int(np.sum(other & ~one))
        result["mcnemar_p"] = mcnemar_p(one, other)
    p = result["mcnemar_p"]
    few = any(1 < len(side[0]) < LEAST_SEEDS for side in (first, second))
    result["resolved"] = not few and ends is not None and (ends[0] > 0 or ends[1] < 0) and (p is None or p < 0.05)
    return result


def mcnemar_p(one: np.ndarray, other: np.ndarray) -> float:
    """McNemar's exact two-sided p of two models' right answers, bool [rows] each."""
    from statsmodels.stats.contingency_tables import mcnemar

    table = [[np.sum((one == a) & (other == b)) for b in (True, False)] for a in (True, False)]
    return float(mcnemar(np.array(table), exact=True).pvalue)


def bootstrap(
    first: Sequence[Right], second: Sequence[Right] | None, images: Sequence[np.ndarray]
) -> list[float] | None:
    """The 95 % percentile interval of the mean over tasks of first's accuracy (less second's).

    `images`: for each task [rows], the number of each row's image. Drawn with replacement, and independently of each
    other: the images of each task, each with all its rows and the answers of both models and all seeds (rows of one
    image are alike, so that drawing them apart would give too narrow an interval); and the seeds of each model. One
    seed stays; None if a task has fewer than LEAST_IMAGES.
    """
    from scipy import stats

    sides = [first] if second is None else [first, second]
    rows = [np.bincount(inverse) for inverse in (np.unique(task, return_inverse=True)[1] for task in images)]
    sums = [[_by_image(right, task) for right, task in zip(side, images, strict=True)] for side in sides]
    sizes = [len(side[0]) for side in sides] + [len(counts) for counts in rows]
    drawn = [position for position, size in enumerate(sizes) if size > 1]
    if min(map(len, rows)) < LEAST_IMAGES:
        return None

    def statistic(*indices: np.ndarray, axis: int = -1) -> np.ndarray:  # indices [..., size] of what is drawn
        every = [np.arange(size) for size in sizes]
        for position, index in zip(drawn, indices, strict=True):
            every[position] = index
        total: Any = 0.0
        for sign, seeds, side in zip((1, -1), every, sums, strict=False):
            for picked, counts, right in zip(every[len(sides) :], rows, side, strict=True):
                found = right[seeds[..., :, None], picked[..., None, :]].sum(axis=-1).mean(axis=-1)
                total = total + sign * found / counts[picked].sum(axis=-1)
        return total / len(first)

    cells = sum(right.size for side in sums for right in side)
    found = stats.bootstrap(
        [np.arange(sizes[position]) for position in drawn],
        statistic,
        n_resamples=RESAMPLES,
        batch=max(1, CELLS // cells),
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return [float(found.confidence_interval.low), float(found.confidence_interval.high)]


def _by_image(right: Right, images: np.ndarray) -> np.ndarray:
    """Right answers of each seed about each image [seeds, images]."""
    inverse = np.unique(images, return_inverse=True)[1]
    return np.stack([np.bincount(inverse, weights=seed) for seed in right])
