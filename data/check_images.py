"""The images that a data file names: where they lie, and what their headers say."""

import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from PIL import Image

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.images import MAX_ASPECT, MAX_BYTES, MAX_PIXELS, open_image

MIN_SIDE = 28  # pixels; two patches of 14, below which there is nothing to see
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)  # EXIF: the values whose picture lies on its side


@dataclass(frozen=True, slots=True)
class ImageFile:
    """(width, height) of an upright image, or its fault as (kind, sentence); `stamp` tells if the file changed."""

    stamp: str
    size: tuple[int, int] | None = None
    fault: tuple[str, str] | None = None


class ImageFolder:
    """The folder that a data file's image paths start from. InputError if it cannot be read."""

    def __init__(self, folder: Path | str, decode: bool = False, follow_links: bool = False):
        self.folder, self.decode, self.follow_links = Path(folder), decode, follow_links
        if not self.folder.is_dir():
            raise InputError(f"There is no image folder {folder}. Name the folder that the image paths start from.")
        if not os.access(self.folder, os.R_OK | os.X_OK):
            raise InputError(f"You may not read the image folder {folder}. Give yourself the permission.")
        self.root = os.path.realpath(self.folder)
        self.real_parent = lru_cache(None)(os.path.realpath)  # rows share few folders, and resolving one is slow

    def inspect(self, name: str) -> ImageFile:
        """What is wrong with the image `name`, if anything: its header is read, and its pixels with `decode`."""
        path = os.path.join(self.root, name)
        try:
            status = os.stat(path)
        except OSError as error:
            return ImageFile(
                "missing", fault=("missing_image", f"Its image {name} cannot be found: {error.strerror}.")
            )
        stamp = f"{status.st_size} {status.st_mtime_ns}"
        if not stat.S_ISREG(status.st_mode):
            return ImageFile(stamp, fault=("missing_image", f"Its image {name} is not a file."))
        if not self.follow_links and not self._real(path).startswith(os.path.join(self.root, "")):
            sentence = f"Its image {name} is a link that leads out of the image folder."
            return ImageFile(stamp, fault=("outside_folder", sentence))
        try:
            size = open_image(path).size if self.decode else _header_size(path, status.st_size)
        except Exception as error:  # every decoder has its own way to fail on a broken file
            reason = str(error).replace(path, name).split(". ")[0].rstrip(".")
            return ImageFile(stamp, fault=("broken_image", f"Its image {name} cannot be read: {reason}."))
        if min(size) < MIN_SIDE:
            sentence = f"Its image {name} is {size[0]} x {size[1]} pixels; {MIN_SIDE} a side is the least."
            return ImageFile(stamp, fault=("tiny_image", sentence))
        return ImageFile(stamp, size)

    def stamp(self, name: str) -> str:
        """Bytes and time of the last change of an image file, as `inspect` has it."""
        try:
            status = os.stat(os.path.join(self.root, name))
        except OSError:
            return "missing"
        return f"{status.st_size} {status.st_mtime_ns}"

    def _real(self, path: str) -> str:
        if os.path.islink(path):
            return os.path.realpath(path)
        parent, name = os.path.split(path)
        return os.path.join(self.real_parent(parent), name)


def _header_size(path: str, size_in_bytes: int) -> tuple[int, int]:
    """(width, height) by the header, upright. InputError above the limits of common.images."""
    if size_in_bytes > MAX_BYTES:
        raise InputError(f"It has {size_in_bytes:,} bytes; at most {MAX_BYTES:,} are read")
    with Image.open(path) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise InputError(f"{width} x {height} pixels; at most {MAX_PIXELS:,} are read")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise InputError(f"{width} x {height} pixels; sides of at most {MAX_ASPECT} to 1 are read")
        if "exif" in image.info and image.getexif().get(ORIENTATION) in TURNED:  # without it, getexif may read pixels
            return height, width
        return width, height


def listing_sha256(stamps: Iterable[tuple[str, str]]) -> str:
    """Hex sha256 of the (name, stamp) of image files, by name."""
    return hashlib.sha256("".join(f"{name}\0{stamp}\n" for name, stamp in sorted(stamps)).encode()).hexdigest()
