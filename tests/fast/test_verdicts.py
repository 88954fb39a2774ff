"""A1 and A2 on decoders of which they are true, or not, by construction; bootstrap intervals."""

import math
import tracemalloc

import numpy as np
import pytest
import torch

from llava_norm_align.diagnosis.dynamics import LayerDynamics
from llava_norm_align.diagnosis.verdicts import bootstrap_interval, count_verdicts, judge_a1, judge_a2, verdict

D, LAYERS, VISUAL, TEXT = 32, 4, 12, 5
MEMBERS = {"visual": torch.arange(VISUAL + TEXT)[None] < VISUAL, "text": torch.arange(VISUAL + TEXT)[None] >= VISUAL}


def decode(image, update):
    """A decoder of LAYERS layers. `update(layer)`: C and phi (degrees) of visual tokens, then of text tokens.

    Each token's update has that norm and that angle to it, in a random direction. Visual tokens start with norm 40,
    text tokens with 2. Yields each layer's input and output [1, T, D].
    """
    generator = torch.Generator().manual_seed(image)
    hidden = torch.randn(VISUAL + TEXT, D, generator=generator, dtype=torch.float64)
    hidden *= torch.where(MEMBERS["visual"][0], 40.0, 2.0)[:, None] / hidden.norm(dim=1, keepdim=True)
    for layer in range(LAYERS):
        (visual_norm, visual_phi), (text_norm, text_phi) = update(layer)
        norm = torch.where(MEMBERS["visual"][0], visual_norm, text_norm)[:, None]
        phi = torch.where(MEMBERS["visual"][0], math.radians(visual_phi), math.radians(text_phi))[:, None]
        unit = hidden / hidden.norm(dim=1, keepdim=True)
        across = torch.randn(hidden.shape, generator=generator, dtype=torch.float64)
        across -= (across * unit).sum(dim=1, keepdim=True) * unit
        across /= across.norm(dim=1, keepdim=True)
        after = hidden + norm * (phi.cos() * unit + phi.sin() * across)
        yield hidden[None].float(), after[None].float()
        hidden = after


def measure(images, update):
    """`update(image, layer)` as in decode: the summary of the layers."""
    dynamics = LayerDynamics(LAYERS)
    for image in range(images):
        for layer, (before, after) in enumerate(decode(image, lambda layer, image=image: update(image, layer))):
            if layer == 0:
                dynamics.begin(before, MEMBERS)
            dynamics.add(layer, before, after)
        dynamics.end()
    return dynamics.layers_summary()


def same(image, layer):
    """One C and one phi a layer, of every token."""
    return (1.0 + layer, 70 + 10 * layer), (1.0 + layer, 70 + 10 * layer)


def different(image, layer):
    """Visual tokens get three times the update, at 30 degrees more."""
    return (3.0 + 3 * layer, 100 + 10 * layer), (1.0 + layer, 70 + 10 * layer)


def scattered(image, layer):
    """From one image to the next, the ratio is 0.8 or 1.8 and the difference -1 or 13 degrees."""
    return (0.8 + image % 2, 79 + 14 * (image % 2)), (1.0, 80)


def test_a_decoder_that_updates_every_token_alike():
    layers = measure(8, same)
    for index, layer in enumerate(layers):
        assert layer["a1"]["verdict"] == layer["a2"]["verdict"] == "holds"
        assert layer["a1"]["ratio"] == pytest.approx(1, rel=1e-5)
        assert layer["a1"]["interval"] == pytest.approx([1, 1], rel=1e-5)
        assert layer["a2"]["interval"] == pytest.approx([0, 0], abs=1e-3)
        for group in ("visual", "text"):
            assert layer[group]["update_norm"] == pytest.approx(1 + index, rel=1e-4)
            assert layer[group]["update_angle_degrees"] == pytest.approx(70 + 10 * index, rel=1e-4)
            # All norms of a modality are equal: the formula is exact.
            assert layer[group]["rotation_predicted_degrees"] == pytest.approx(
                layer[group]["rotation_degrees"], rel=1e-4
            )
        assert layer["visual"]["rotation_degrees"] < layer["text"]["rotation_degrees"] / 3  # the paper's inertia
        assert not layer["adds_visual_features"]
    counts = {"holds": LAYERS, "fails": 0, "undecided": 0, "none": 0}
    assert count_verdicts(layers, 8) == {"images": 8, "least_images": 8, "a1": counts, "a2": counts}


def test_a_decoder_that_updates_visual_tokens_more():
    layers = measure(8, different)
    for layer in layers:
        assert layer["a1"]["verdict"] == layer["a2"]["verdict"] == "fails"
        assert layer["a1"]["ratio"] == pytest.approx(3, rel=1e-4)
        assert layer["a2"]["difference_degrees"] == pytest.approx(30, rel=1e-3)
        predicted, turned = (layer["visual"][f"rotation{which}_degrees"] for which in ("_predicted", ""))
        assert abs(predicted - turned) > 0.2 * turned  # what the formula predicts is off where A1 and A2 fail
    assert count_verdicts(layers, 8)["a2"]["fails"] == LAYERS


def test_one_assumption_may_hold_without_the_other():
    (layer, *_) = measure(9, lambda image, layer: ((1.1, 90), (1.0, 80)))
    assert (layer["a1"]["verdict"], layer["a2"]["verdict"]) == ("holds", "fails")
    (layer, *_) = measure(9, lambda image, layer: ((0.5, 83), (1.0, 80)))
    assert (layer["a1"]["verdict"], layer["a2"]["verdict"]) == ("fails", "holds")


def test_an_interval_that_straddles_the_limit_decides_nothing():
    for layer in measure(10, scattered):
        assert layer["a1"]["verdict"] == layer["a2"]["verdict"] == "undecided"
        assert layer["a1"]["ratio"] == pytest.approx(1.3, rel=1e-4)
        assert 0.8 < layer["a1"]["interval"][0] < 1.25 < layer["a1"]["interval"][1]
        assert layer["a2"]["difference_degrees"] == pytest.approx(6, rel=1e-3)
        assert -5 < layer["a2"]["interval"][0] < 5 < layer["a2"]["interval"][1]


def test_no_verdict_under_eight_images():
    layers = measure(7, same)
    for layer in layers:
        assert layer["a1"] == {"ratio": pytest.approx(1, rel=1e-5), "interval": None, "verdict": "none"}
        assert (layer["a2"]["interval"], layer["a2"]["verdict"]) == (None, "none")
    assert count_verdicts(layers, 7)["a1"] == {"holds": 0, "fails": 0, "undecided": 0, "none": LAYERS}


@pytest.mark.parametrize(
    "interval, expected",
    [
        ([0.8, 1.25], "holds"),
        ([0.79, 1.0], "undecided"),
        ([1.0, 1.26], "undecided"),
        ([0.5, 2.0], "undecided"),
        ([0.1, 0.8], "undecided"),
        ([0.1, 0.79], "fails"),
        ([1.26, 9.0], "fails"),
        (None, "none"),
    ],
)
def test_verdict(interval, expected):
    assert verdict(interval, 0.8, 1.25) == expected


def test_the_interval_of_a_mean_is_the_normal_one():
    """For 100 numbers the percentile bootstrap is close to mean +- 1.96 standard errors."""
    values = np.random.default_rng(0).normal(5, 2, size=100)
    error = values.std() / 10
    low, high = bootstrap_interval(lambda mean: mean, values)
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)
    assert [low, high] == bootstrap_interval(lambda mean: mean, values)  # seeded
    assert [low, high] != bootstrap_interval(lambda mean: mean, values, seed=1)
    narrow = bootstrap_interval(lambda mean: mean, values, level=0.5)
    assert narrow[1] - narrow[0] == pytest.approx(2 * 0.674 * error, rel=0.15)


def test_images_are_resampled_in_pairs_and_the_ratio_is_of_means():
    text = np.array([1.0, 2, 3, 4, 5, 60, 7, 8])
    assert bootstrap_interval(np.divide, 3 * text, text) == pytest.approx([3, 3])
    assert bootstrap_interval(np.subtract, text + 2, text) == pytest.approx([2, 2])
    visual = np.array([10.0, 2, 3, 4, 5, 6, 7, 8])
    assert judge_a1(visual, text)["ratio"] == pytest.approx(visual.sum() / text.sum())


def test_images_that_lack_a_modality_are_left_out():
    text = np.arange(1.0, 10)
    visual = 2 * text
    visual[3] = np.nan
    found = judge_a1(visual, text)
    assert (found["ratio"], found["interval"], found["verdict"]) == (2, pytest.approx([2, 2]), "fails")
    visual[4] = np.inf  # 7 of 9 images are left
    assert judge_a1(visual, text) == {"ratio": 2, "interval": None, "verdict": "none"}
    none = np.full(9, np.nan)
    assert judge_a2(none, text) == {"difference_degrees": None, "interval": None, "verdict": "none"}


def test_a_layer_without_updates_of_text_gets_no_verdict():
    found = judge_a1(np.ones(9), np.zeros(9))
    assert found == {"ratio": None, "interval": None, "verdict": "none"}


def test_memory_of_the_bootstrap_does_not_follow_the_images():
    values = np.random.default_rng(0).normal(size=20_000)
    tracemalloc.start()
    low, high = bootstrap_interval(lambda mean: mean, values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert low < values.mean() < high
    assert peak < 10e6  # 2,000 resamples at once would take 640 MB
