"""Images from disk, with limits."""

import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from llava_norm_align.common.errors import InputError

MAX_PIXELS = 100_000_000  # 10,000 x 10,000; above it a decoder needs several hundred MB
MAX_BYTES = 100_000_000
MAX_ASPECT = 100  # a processor scales the short side to its size, and the long side with it


def open_image(path: Path | str) -> Image.Image:
    """The image at `path` in RGB, upright by its EXIF data; of an animation the first picture.

    InputError if it is missing, not an image, broken, or larger than the limits.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(
            f"There is no image file at {path}. Name a file that Pillow can read, such as a PNG or a JPEG."
        )
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path} has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are read. Make it smaller.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of broken metadata, and of many pixels: our own limit follows
            image = Image.open(path)
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise InputError(
                    f"{path} is {width} x {height} = {width * height:,} pixels; at most {MAX_PIXELS:,} are read. "
                    "Make it smaller."
                )
            if max(width, height) > MAX_ASPECT * min(width, height):
                raise InputError(
                    f"{path} is {width} x {height} pixels; sides of at most {MAX_ASPECT} to 1 are read. Crop it."
                )
            return _eight_bit(ImageOps.exif_transpose(image)).convert("RGB")
    except Image.DecompressionBombError:
        raise InputError(f"{path} has more than {MAX_PIXELS:,} pixels. Make it smaller.") from None
    except UnidentifiedImageError:
        raise InputError(
            f"{path} is not an image that Pillow can read. Name a PNG, a JPEG or another image."
        ) from None
    except PermissionError:
        raise InputError(f"You may not read {path}. Give yourself the permission, or name another image.") from None
    except (OSError, SyntaxError, ValueError, RuntimeError) as error:  # AVIF's decoder raises the last
        raise InputError(f"{path} is a broken image ({error}). Save it again or name another one.") from None


def image_files(paths: Iterable[Path]) -> list[Path]:
    """`paths` with every folder replaced by the files in it that have the suffix of an image, in order of their names.

    InputError for a folder without one.
    """
    formats, files = Image.registered_extensions(), []
    suffixes = {suffix for suffix, name in formats.items() if name in Image.OPEN}  # of a PDF Pillow is a writer only
    for path in paths:
        found = [path]
        if path.is_dir():
            named = (file for file in path.iterdir() if file.suffix.lower() in suffixes)
            found = sorted(file for file in named if not file.name.startswith(".") and file.is_file())
        if not found:
            raise InputError(
                f"The folder {path} of --images is empty or has no image file. Name a folder with PNG or JPEG "
                "files, or leave it out."
            )
        files += found
    return files


def _eight_bit(image: Image.Image) -> Image.Image:
    """An image of 16 bits a pixel with 8, by its high byte; Pillow's convert("RGB") makes most of it white."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
