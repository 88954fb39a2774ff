"""Images padded to a square with the mean colour, against padding by hand with PIL and numpy."""

import json

import numpy as np
import pytest
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    BitImageProcessor,
    CLIPImageProcessor,
    SiglipImageProcessor,
)

from llava_norm_align.common.errors import InputError
from llava_norm_align.data.images import with_square_images
from tests.helpers import tiny

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
SQUARE = {"height": 28, "width": 28}
CLIP = dict(size={"shortest_edge": 28}, crop_size=SQUARE, image_mean=MEAN, image_std=STD)
IMAGE_PROCESSORS = {
    "clip": lambda: CLIPImageProcessor(**CLIP),
    "dinov2": lambda: BitImageProcessor(**CLIP),
    "siglip": lambda: SiglipImageProcessor(
        size={"height": 28, "width": 28}, image_mean=[0.5] * 3, image_std=[0.25] * 3
    ),
}


def processor(name="clip"):
    made = tiny.processor(tower="siglip" if name == "siglip" else "clip")
    made.image_processor = IMAGE_PROCESSORS[name]()
    return made


def picture(width, height):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def by_hand(image, mean, std):
    """[3, 28, 28]: the image in the middle of a square of the mean colour, resized by PIL, normalized."""
    side = max(image.size)
    square = Image.new("RGB", (side, side), tuple(int(value * 255) for value in mean))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    pixels = np.asarray(square.resize((28, 28), Image.Resampling.BICUBIC), dtype=np.float64) / 255
    return ((pixels - mean) / std).transpose(2, 0, 1)


@pytest.mark.parametrize("size", [(52, 40), (37, 64), (30, 30), (51, 20)])
@pytest.mark.parametrize("name", IMAGE_PROCESSORS)
def test_pixels_are_those_of_padding_by_hand(name, size):
    mean, std = ([0.5] * 3, [0.25] * 3) if name == "siglip" else (MEAN, STD)
    image = picture(*size)
    inputs = with_square_images(processor(name))(text="<image> what", images=image, return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 3, 28, 28)
    np.testing.assert_allclose(inputs["pixel_values"][0].numpy(), by_hand(image, mean, std), atol=1e-5)
    assert (inputs["input_ids"] == tiny.IMAGE_TOKEN_ID).sum() == 4


def test_the_processor_that_was_given_still_crops():
    made, image = processor(), picture(52, 40)
    before = made.image_processor(image, return_tensors="pt")["pixel_values"]
    with_square_images(made)
    after = made.image_processor(image, return_tensors="pt")["pixel_values"]
    assert (after == before).all()
    assert not np.allclose(after[0].numpy(), by_hand(image, MEAN, STD), atol=0.1)


@pytest.mark.parametrize("name", IMAGE_PROCESSORS)
def test_a_saved_folder_brings_the_padding(name, tmp_path):
    padded, image = with_square_images(processor(name)), picture(52, 40)
    padded.save_pretrained(tmp_path / "whole")
    padded.image_processor.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["image_processor_type"] == (
        "LlavaImageProcessor"  # a name that both transformers lines know
    )
    expected = padded.image_processor(image, return_tensors="pt")["pixel_values"]
    for loaded in (
        AutoImageProcessor.from_pretrained(tmp_path),
        AutoProcessor.from_pretrained(tmp_path / "whole").image_processor,
        with_square_images(AutoProcessor.from_pretrained(tmp_path / "whole")).image_processor,
    ):
        assert loaded.do_pad is True
        assert (loaded(image, return_tensors="pt")["pixel_values"] == expected).all()


def test_tiles_are_refused():
    with pytest.raises(InputError, match="LlavaNextImageProcessor, .* Leave the padding out"):
        with_square_images(tiny.processor(kind="llava_next"))
