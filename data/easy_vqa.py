"""easy-VQA: questions about coloured shapes on 64 x 64 images (the package easy-vqa, MIT)."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from PIL import Image

from llava_norm_align.common.errors import missing_extra
from llava_norm_align.common.images import open_image


@dataclass(frozen=True)
class Row:
    """One question about one image."""

    image: Path
    question: str
    answer: str


def load_questions(split: Literal["train", "test"], yes_no: bool = False) -> list[Row]:
    """The questions of `split` in the order of the package: 10,168 for training and 2,537 for testing.

    Their answers are a shape or a colour (11 in all). `yes_no=True` adds those answered yes or no: 38,575 and 9,673.
    """
    try:
        import easy_vqa
    except ImportError:
        raise missing_extra("easy-vqa", "micro", "loading easy-VQA's questions") from None

    train = split == "train"
    questions = easy_vqa.get_train_questions() if train else easy_vqa.get_test_questions()
    images = easy_vqa.get_train_image_paths() if train else easy_vqa.get_test_image_paths()
    rows = [Row(Path(images[image]), question, answer) for question, answer, image in zip(*questions, strict=True)]
    return [row for row in rows if yes_no or row.answer not in ("yes", "no")]


@lru_cache(maxsize=16)
def load_image(path: Path) -> Image.Image:
    """The image of a row; questions about one image follow each other, so the last ones are kept."""
    return open_image(path)
