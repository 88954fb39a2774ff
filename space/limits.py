"""What a visitor may send. What is refused is told in one sentence that names no path."""

import os
import warnings
from pathlib import Path

from PIL import Image
from transformers import ProcessorMixin

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.images import MAX_ASPECT, open_image
from llava_norm_align.common.prompts import image_token

MAX_BYTES = 10 * 2**20  # "10 MB", as Gradio counts them, too
MAX_PIXELS = 25_000_000  # a decoded one takes 75 MB
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_QUESTION = 1000  # characters
MAX_TEMPERATURE = 2.0
MIN_TEMPERATURE = 0.01  # below, 0 is meant: dividing by less overflows, and chance is gone long before
NOT_READABLE = "The picture cannot be read; send a whole PNG, JPEG, WebP, GIF or BMP file."


class Refused(Exception):
    """A sentence for the visitor."""


def open_picture(path: str | None) -> Image.Image:
    """The picture that a visitor sent, in RGB and upright. Refused if there is none, or if it is beyond the limits."""
    if path is None:
        raise Refused("There is no picture; add one, then ask again.")
    check_picture(path)
    try:
        return open_image(Path(path))
    except InputError:
        raise Refused(NOT_READABLE) from None


def check_picture(path: str) -> None:
    """Refused beyond the limits, by the file's header, and for other formats than FORMATS.

    No decoder of another format is tried.
    """
    if not os.path.isfile(path):
        raise Refused("The picture is no longer here; add it again.")
    if os.path.getsize(path) > MAX_BYTES:
        raise Refused(f"The picture has more than {MAX_BYTES // 2**20} MB; send a smaller one.")
    too_many = f"The picture has more than {MAX_PIXELS // 1_000_000} million pixels; send a smaller one."
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of many pixels: our own limit follows
            with Image.open(path, formats=FORMATS) as image:
                width, height = image.size
    except Image.DecompressionBombError:
        raise Refused(too_many) from None
    except (OSError, SyntaxError, ValueError, RuntimeError):  # UnidentifiedImageError is an OSError
        raise Refused(NOT_READABLE) from None
    if width * height > MAX_PIXELS:
        raise Refused(too_many)
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise Refused(f"One side of the picture is more than {MAX_ASPECT} times the other; crop it.")


def check_question(question: str | None) -> str:
    """The question without spaces around it. Refused if it is empty, too long, or not text."""
    question = (question or "").replace("\0", "").strip()
    if not question:
        raise Refused("There is no question; type one about the picture.")
    if len(question) > MAX_QUESTION:
        raise Refused(f"The question has more than {MAX_QUESTION:,} characters; shorten it.")
    try:
        question.encode()
    except UnicodeEncodeError:
        raise Refused("The question holds characters that are not text; type it again.") from None
    return question


def check_tokens(processor: ProcessorMixin, question: str) -> None:
    """Refused if the question holds a sign that the model does not read as text, such as the place of a picture."""
    signs = {image_token(processor), *processor.tokenizer.all_special_tokens}
    if any(sign and sign in question for sign in signs):
        raise Refused(
            "The question holds a sign that the model does not read as text, such as an image tag; remove it."
        )


def check_sampling(max_new_tokens: float | None, temperature: float | None, most: int) -> tuple[int, float]:
    """The numbers. Refused unless 1 <= max_new_tokens <= `most` and 0 <= temperature <= MAX_TEMPERATURE."""
    # The page's sliders check both as well, but NaN passes them, and the desk is called without Gradio, too.
    if not isinstance(max_new_tokens, (int, float)) or not 1 <= max_new_tokens <= most:
        raise Refused(f"The longest answer must have a number of tokens from 1 to {most}.")
    if not isinstance(temperature, (int, float)) or not 0 <= temperature <= MAX_TEMPERATURE:
        raise Refused(f"The temperature must be a number from 0 to {MAX_TEMPERATURE:g}.")
    return int(max_new_tokens), float(temperature) if temperature >= MIN_TEMPERATURE else 0.0
