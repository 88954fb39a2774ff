"""Pictures and questions to start with, and the answer that is right."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.samples import sample_photos
from llava_norm_align.data.easy_vqa import load_questions
from llava_norm_align.space.models import Shown

# Test images of easy-VQA: of the first three, micro-LLaVA and its conversion say the right answer; of the fourth the
# conversion does only after training (tests/real/test_space_micro.py).
DRAWINGS = (("6.png", "what is the blue shape?"), ("8.png", "what color is the shape?"))
DRAWINGS += (("11.png", "what is the black shape?"), ("3.png", "what color is the circle?"))
PHOTO = ("coffee.png", "what color is the saucer?", "red")  # which none of them answers rightly
TRAINED_ON = "micro-LLaVA was trained on drawings of coloured shapes alone; what it says of a photo is a guess."
UNTRAINED = " Of the yellow circle, the model whose norm was not trained says another colour."


@dataclass(frozen=True)
class Example:
    """`right` is "" where nobody said what is right."""

    picture: Path
    question: str
    right: str


def find_examples(models: Sequence[Shown]) -> list[Example]:
    """easy-VQA's and a photo for micro-LLaVA; photos for other models. None where their packages are missing."""
    try:
        photos = {path.name: path for path in sample_photos("The page")}
        if not any(shown.micro for shown in models):
            names = ("coffee.png", "astronaut.png", "chelsea.png")
            return [Example(photos[name], "What is in the picture?", "") for name in names]
        rows = {(row.image.name, row.question): row for row in load_questions("test")}
    except InputError:
        return []
    drawings = [Example(rows[key].image, rows[key].question, rows[key].answer) for key in DRAWINGS]
    name, question, right = PHOTO
    return [*drawings, Example(photos[name], question, right)]


def micro_note(models: Sequence[Shown]) -> str:
    """What to expect of micro-LLaVA's examples."""
    untrained = any(shown.aligned and shown.trained_steps is None for shown in models)
    return TRAINED_ON + (UNTRAINED if untrained else "")
