"""The page's examples on micro-LLaVA: what it says to be right is answered rightly, and the photo is not.

The wheels come from the folder in LLAVA_NORM_ALIGN_WHEELS, or from pip.
"""

import os
from pathlib import Path

import pytest

pytest.importorskip("gradio")

from llava_norm_align.common.images import open_image
from llava_norm_align.conversion.micro import DINOV2, SMOLLM2, find_wheel
from llava_norm_align.evaluation.answer import answer
from llava_norm_align.space.desk import Desk
from llava_norm_align.space.examples import find_examples, micro_note
from llava_norm_align.space.models import load_models
from llava_norm_align.space.settings import Settings


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Without configuration, and without a trained folder in the working folder."""
    folder = os.environ.get("LLAVA_NORM_ALIGN_WHEELS")
    wheels = Path(folder) if folder else {find_wheel(wheel).parent for wheel in (SMOLLM2, DINOV2)}.pop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAVA_NORM_ALIGN_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.chdir(tmp_path_factory.mktemp("work"))
        loaded = load_models(Settings(wheels=wheels))
        again = load_models(Settings(wheels=wheels))
    assert [one.folder for one in loaded] == [one.folder for one in again]
    return loaded


def test_examples_are_answered_as_the_page_says(models):
    said = {}
    for example in find_examples(models):
        image = open_image(example.picture)
        for one in models:
            text = answer(one.model, one.processor, image, example.question, max_new_tokens=16)
            said[example.picture.name, one.aligned] = text == example.right
    assert len(said) == 10
    rights = {name for (name, _), right in said.items() if right}
    assert rights == {"6.png", "8.png", "11.png", "3.png"}
    assert {key for key, right in said.items() if not right} == {
        ("3.png", True),  # the note under the examples says so
        ("coffee.png", False),
        ("coffee.png", True),
    }
    assert "yellow circle" in micro_note(models)


def test_the_picture_shows_the_gap_and_the_norm_closes_it(models):
    example = find_examples(models)[0]
    stock, aligned = Desk(models, Settings()).numbers(str(example.picture), example.question)
    assert stock["ratio"]["mean"] > 3 and 0.8 < aligned["ratio"]["mean"] < 1.5
    assert len(stock["layers"]) == 30 and stock["attention"]["map"]["rows"] == 8
