"""The plots of a diagnosis: what they show, and what they bear."""

import math
import sys
import warnings

import matplotlib
import numpy as np
import pytest
from PIL import Image

from llava_norm_align.common.errors import InputError
from llava_norm_align.diagnosis.plots import write_plots
from tests.helpers import diagnosis_result

PLOTS = ["layer0_norms.png", "norms_by_layer.png", "cosine_by_layer.png", "attention_map.png"]
BLUE, VERMILION = (0, 114, 178), (213, 94, 0)  # the lines of visual and of text tokens


def drawn(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def has(pixels, colour):
    return bool((np.abs(pixels - colour).max(axis=2) < 12).sum() > 30)


@pytest.fixture(scope="module")
def plots(tmp_path_factory):
    """The plots of the full result, drawn while matplotlib's settings are those of a dark theme."""
    folder = tmp_path_factory.mktemp("plots")
    with matplotlib.rc_context({"figure.facecolor": "black", "axes.facecolor": "black", "text.color": "white"}):
        before = dict(matplotlib.rcParams)
        assert write_plots(diagnosis_result.full(), folder) == [folder / name for name in PLOTS]
        assert dict(matplotlib.rcParams) == before
    return folder


def test_plots_are_small_light_pngs(plots):
    assert sorted(path.name for path in plots.iterdir()) == sorted(PLOTS)
    for name in PLOTS:
        assert (plots / name).stat().st_size < 100_000
        with Image.open(plots / name) as image:
            assert image.format == "PNG" and image.size == (960, 1024 if name == "attention_map.png" else 624)
        pixels = drawn(plots / name)
        assert (pixels.min(axis=2) > 240).mean() > 0.5 and (pixels[[0, 0, -1, -1], [0, -1, 0, -1]] > 250).all()
        assert has(pixels, BLUE) and has(pixels, VERMILION) == (name != "attention_map.png")


@pytest.mark.parametrize(
    ("path", "value", "differ"),
    [
        (("layers", 2, "visual", "hidden_norm"), 400.0, "norms_by_layer.png"),
        (("layers", 2, "text", "cosine_adjacent"), -0.5, "cosine_by_layer.png"),
        (("histograms", "text", "counts"), [9, 22, 41], "layer0_norms.png"),
        (("attention", "image_share", 0), 0.9, "attention_map.png"),
        (("attention", "map", "values", 0), [0.2, 0.0, 0.0], "attention_map.png"),
    ],
)
def test_plots_follow_the_numbers(path, value, differ, plots, tmp_path):
    write_plots(diagnosis_result.changed(path, value), tmp_path)
    assert [name for name in PLOTS if (drawn(tmp_path / name) != drawn(plots / name)).any()] == [differ]


def test_layers_that_add_visual_features_are_marked(plots, tmp_path):
    write_plots(diagnosis_result.changed(("layers", 1, "adds_visual_features"), False), tmp_path)
    for name in ("norms_by_layer.png", "cosine_by_layer.png"):
        assert (drawn(tmp_path / name) != drawn(plots / name)).any()


def test_plots_with_a_picture_and_a_second_model(plots, tmp_path):
    other = diagnosis_result.with_layers(9)
    other["model"]["name"] = "/models/$\\frac{" + "long-" * 30 + "$_模型_\x00"
    other["attention"]["image_share"][3] = None
    picture = Image.effect_noise((700, 500), 90).convert("L")
    with warnings.catch_warnings(action="error"):
        written = write_plots(diagnosis_result.full(), tmp_path, picture, other)
    assert [path.name for path in written] == PLOTS
    for name in PLOTS:
        assert (drawn(tmp_path / name) != drawn(plots / name)).any()
        assert (tmp_path / name).stat().st_size < 100_000


def test_plots_leave_out_what_is_null(tmp_path):
    for name in PLOTS:
        (tmp_path / name).write_bytes(b"of an earlier run")
    written = write_plots(diagnosis_result.nulls(), tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(written) == [tmp_path / name for name in sorted(PLOTS[1:3])]
    for path in written:
        assert not has(drawn(path), BLUE) and has(drawn(path), VERMILION)
    nothing = {"layers": [], "histograms": None, "attention": None}
    assert write_plots(nothing, tmp_path) == [] == list(tmp_path.iterdir())


def with_strange(value):
    result = diagnosis_result.full()
    result["layers"][1]["visual"]["hidden_norm"] = result["histograms"]["visual"]["edges"][0] = value
    return result


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0, "words"])
def test_what_has_no_place_on_a_log_axis_is_left_out(value, plots, tmp_path):
    with warnings.catch_warnings(action="error"):
        write_plots(with_strange(value), tmp_path / "strange")
        write_plots(with_strange(None), tmp_path / "null")
    for name in PLOTS[:2]:
        assert (drawn(tmp_path / "strange" / name) == drawn(tmp_path / "null" / name)).all()
        assert (drawn(tmp_path / "null" / name) != drawn(plots / name)).any()


def test_plots_bear_nan(tmp_path):
    result = diagnosis_result.full()
    result["layers"][1]["text"]["cosine_adjacent"] = math.nan
    result["attention"]["image_share"][1] = result["attention"]["map"]["values"][0][0] = math.nan
    with warnings.catch_warnings(action="error"):
        assert len(write_plots(result, tmp_path)) == 4


def test_one_layer_and_a_map_of_one_row(tmp_path):
    result = diagnosis_result.with_layers(1)
    result["attention"]["map"]["values"] = [[0.001] * 300]
    with warnings.catch_warnings(action="error"):
        assert len(write_plots(result, tmp_path, Image.new("RGBA", (1, 1)))) == 4


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"A plot needs matplotlib.*pip install 'llava-norm-align\[plots\]'"):
        write_plots(diagnosis_result.full(), tmp_path)
