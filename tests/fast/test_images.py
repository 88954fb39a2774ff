"""Every kind of image file becomes RGB, or is refused with one sentence."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.images import open_image

GRADIENT = np.linspace(0, 255, 40, dtype=np.uint8)[None].repeat(30, axis=0)  # grey, [30, 40]


def saved(tmp_path, image, name, **options):
    image.save(tmp_path / name, **options)
    return open_image(tmp_path / name)


def as_grey(image):
    assert image.mode == "RGB"
    channels = np.asarray(image).astype(int)
    assert (channels.max(axis=2) - channels.min(axis=2)).max() <= 2
    return channels[..., 0]


@pytest.mark.parametrize(
    ("mode", "name"), [("RGB", "a.png"), ("CMYK", "a.tif"), ("P", "a.gif"), ("L", "a.webp"), ("RGBA", "a.png")]
)
def test_modes(tmp_path, mode, name):
    image = saved(
        tmp_path, Image.fromarray(GRADIENT).convert(mode), name, **({"lossless": True} if mode == "L" else {})
    )
    assert image.size == (40, 30)
    assert np.abs(as_grey(image) - GRADIENT).max() <= 2


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_sixteen_bits_keep_their_range(tmp_path, name):
    image = saved(tmp_path, Image.fromarray(GRADIENT.astype(np.uint16) * 257), name)
    assert np.abs(as_grey(image) - GRADIENT).max() <= 1


def test_animation_gives_its_first_picture(tmp_path):
    first, second = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    image = saved(tmp_path, first, "a.gif", save_all=True, append_images=[second])
    assert image.getpixel((0, 0)) == (255, 0, 0)


def test_a_photo_taken_sideways_stands_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    assert saved(tmp_path, Image.fromarray(GRADIENT), "a.jpg", exif=exif).size == (30, 40)


def test_one_pixel(tmp_path):
    assert saved(tmp_path, Image.new("RGB", (1, 1), "red"), "a.png").size == (1, 1)


def bomb():
    """A PNG of 60,000 x 60,000 pixels in a few bytes."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def cut():
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(whole, "PNG")
    return whole.getvalue()[:2000]


@pytest.mark.parametrize(
    ("content", "said"),
    [(bomb(), "pixels"), (cut(), "broken image"), (b"text", "not an image"), (b"", "not an image")],
)
def test_bad_files_are_refused(tmp_path, content, said):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(InputError, match=said) as caught:
        open_image(tmp_path / "a.png")
    assert "a.png" in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="no image file"):
        open_image(tmp_path / "none.png")
