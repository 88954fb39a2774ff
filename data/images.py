"""Images padded to a square, as LLaVA-1.5's second stage prepares them."""

import copy

from transformers import LlavaImageProcessor, ProcessorMixin

from llava_norm_align.common.errors import InputError

KINDS = ("CLIPImageProcessor", "SiglipImageProcessor", "BitImageProcessor", "LlavaImageProcessor")
SETTINGS = ("do_resize", "size", "resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")


def with_square_images(processor: ProcessorMixin) -> ProcessorMixin:
    """A copy of `processor` that pads each image to a square with its mean colour before its own steps.

    Its image processor is transformers' LlavaImageProcessor with `do_pad` and the old one's settings (LLaVA's
    image_aspect_ratio "pad"), so a saved folder loads in 4.57 and 5. InputError for an image processor that does more
    than resize, crop and normalise, such as LLaVA-NeXT's, which cuts tiles.
    """
    old = processor.image_processor.to_dict()
    kind = old["image_processor_type"].removesuffix("Fast")
    if kind not in KINDS:
        raise InputError(
            f"The image processor is a {kind}, which prepares images in its own way; padding to a square needs one of "
            f"{', '.join(KINDS)}. Leave the padding out for this model."
        )
    settings = {name: old[name] for name in SETTINGS if old.get(name) is not None}
    settings["crop_size"] = old.get("crop_size") or _square(old["size"])
    settings["do_center_crop"] = bool(old.get("do_center_crop"))
    padded = copy.copy(processor)
    padded.image_processor = LlavaImageProcessor(do_pad=True, do_convert_rgb=True, **settings)
    return padded


def _square(size: dict[str, int]) -> dict[str, int]:
    """The size of what is not cropped: the processors of LLaVA read it from `crop_size`."""
    side = size.get("shortest_edge")
    return {"height": size.get("height", side), "width": size.get("width", side)}
