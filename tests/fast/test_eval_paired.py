"""Paired statistics, against binomial sums by hand and a bootstrap written with numpy alone."""

from math import comb

import numpy as np
import pytest

pytest.importorskip("statsmodels")

from llava_norm_align.evaluation.exact_match import wilson_interval
from llava_norm_align.evaluation.paired import accuracy, bootstrap, difference, mcnemar_p


def answers(both, first, second, neither):
    """Bool [1, n] of two models that have so many rows right together, alone, and not at all."""
    one = np.repeat([True, True, False, False], [both, first, second, neither])
    other = np.repeat([True, False, True, False], [both, first, second, neither])
    return one[None], other[None]


def own_images(*models):
    return [np.arange(right.shape[1]) for right in models]


@pytest.mark.parametrize(("first", "second"), [(9, 2), (2, 9), (0, 0), (5, 5), (30, 12), (6, 0)])
def test_mcnemar_is_a_binomial_test_of_the_rows_that_differ(first, second):
    (one,), (other,) = answers(20, first, second, 13)
    n, least = first + second, min(first, second)
    by_hand = min(1.0, 2 * sum(comb(n, k) for k in range(least + 1)) / 2**n)
    assert mcnemar_p(one, other) == pytest.approx(by_hand, abs=1e-12)


def test_the_difference_of_one_pair():
    one, other = answers(50, 30, 12, 8)
    result = difference([one], [other], own_images(one))
    assert (result["n"], result["images"], result["only_first_right"], result["only_second_right"]) == (
        100,
        100,
        30,
        12,
    )
    assert result["difference"] == pytest.approx(0.18)
    # rows are +1, -1 and 0 at rates .30, .12 and .58: a multinomial, 200,000 draws of it
    draws = np.random.default_rng(5).multinomial(100, [0.30, 0.12, 0.58], 200_000)
    expected = np.percentile((draws[:, 0] - draws[:, 1]) / 100, [2.5, 97.5])
    assert result["interval"] == pytest.approx(expected, abs=0.0101)  # one step of 1 / n
    assert result["resolved"] and result["mcnemar_p"] < 0.05
    assert not difference([one], [one], own_images(one))["resolved"]
    back = difference([other], [one], own_images(one))
    assert back["difference"] == pytest.approx(-0.18) and back["resolved"] and back["interval"][1] < 0


def test_rows_of_one_image_are_drawn_together():
    random = np.random.default_rng(0)
    counts = random.integers(1, 20, 40)
    images = random.permutation(np.repeat(np.arange(40), counts))
    skill = random.random(40)  # rows of an image are alike
    one, other = random.random((1, len(images))) < skill[images], random.random((1, len(images))) < 0.05
    low, high = bootstrap([one], [other], [images * 7])  # the numbers themselves mean nothing

    drawn, random = [], np.random.default_rng(1)
    for _ in range(5_000):  # row by row, without sums for each image
        rows = np.concatenate([np.flatnonzero(images == image) for image in random.integers(0, 40, 40)])
        drawn.append(one[0, rows].mean() - other[0, rows].mean())
    assert (low, high) == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=0.006)
    apart = bootstrap([one], [other], own_images(one))
    assert high - low > 1.15 * (apart[1] - apart[0])


def test_seeds_are_drawn_too():
    random = np.random.default_rng(2)
    rates = np.array([0.5, 0.7, 0.9])
    models = random.random((3, 60)) < rates[:, None]
    baseline = random.random((1, 60)) < 0.6
    result = difference([models], [baseline], own_images(models))
    assert result["difference"] == pytest.approx(models.mean() - baseline.mean())
    assert result["mcnemar_p"] is None and result["only_first_right"] is None

    drawn, random = [], np.random.default_rng(3)
    for _ in range(20_000):
        rows, seeds = random.integers(0, 60, 60), random.integers(0, 3, 3)
        drawn.append(models[seeds][:, rows].mean() - baseline[0, rows].mean())
    assert result["interval"] == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=0.012)
    assert result["interval"][0] < 0 and not result["resolved"]
    low, high = bootstrap([models.mean(axis=0, keepdims=True)], [baseline], own_images(models))  # rows alone
    assert high - low < 0.8 * (result["interval"][1] - result["interval"][0])


def test_the_average_weighs_tasks_alike():
    first, second = answers(4, 4, 0, 8), answers(20, 0, 20, 60)  # +0.25 of 16 rows, -0.20 of 100
    tasks = list(zip(first, second, strict=True))
    result = difference(*tasks, own_images(*tasks[0]))
    assert result["n"] == 116 and result["difference"] == pytest.approx(0.025) and result["mcnemar_p"] is None
    random = np.random.default_rng(4)
    drawn = random.binomial(16, 0.25, 200_000) / 16 - random.binomial(100, 0.2, 200_000) / 100
    assert result["interval"] == pytest.approx(np.percentile(drawn / 2, [2.5, 97.5]), abs=0.012)


def test_few_are_not_resolved():
    one, other = answers(0, 7, 0, 0)
    assert difference([one], [other], own_images(one))["interval"] is None  # 7 images
    one, other = answers(3, 5, 0, 0)
    result = difference([one], [other], own_images(one))  # the interval leaves out 0, but p = 2 / 2**5
    assert result["interval"][0] > 0 and result["mcnemar_p"] == 0.0625 and not result["resolved"]


def test_accuracy():
    one, _ = answers(5, 6, 2, 7)
    assert accuracy(one, np.arange(20)) == {
        "n": 20,
        "accuracy": 0.55,
        "interval": list(wilson_interval(11, 20)),
        "seeds": [0.55],
    }
    several = accuracy(np.concatenate([one, ~one]), np.arange(20))
    assert several["accuracy"] == 0.5 and several["seeds"] == pytest.approx([0.55, 0.45])
    assert several["interval"][0] < 0.4 < 0.6 < several["interval"][1]


def test_two_seeds_that_are_alike_give_no_verdict():
    """A single training of these 9 questions is not resolved (p = 0.0625); its copy adds nothing."""
    one, other = np.array([[True] * 9]), np.array([[False] * 5 + [True] * 4])
    assert not difference([one], [other], own_images(one))["resolved"]
    result = difference([np.repeat(one, 2, axis=0)], [other], own_images(one))
    assert result["interval"][0] > 0 and not result["resolved"]
    five = difference([np.repeat(one, 5, axis=0)], [other], own_images(one))
    assert five["resolved"]
