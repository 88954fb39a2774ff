"""Photos that come with scikit-image (extra `samples`), for measurements without images of one's own."""

import importlib.util
from pathlib import Path

from llava_norm_align.common.errors import missing_extra

COLOR_PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
# every picture in scikit-image's wheel that a camera, a microscope, a telescope or a scanner took
PHOTOS = (
    *COLOR_PHOTOS,
    "brick.png",
    "camera.png",
    "cell.png",
    "clock_motion.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "page.png",
    "retina.jpg",
    "text.png",
)


def sample_photos(purpose: str, names: tuple[str, ...] = COLOR_PHOTOS) -> list[Path]:
    """Paths of scikit-image's photos, without importing it. InputError, with the `purpose`, if it is not installed."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        raise missing_extra("scikit-image", "samples", f"{purpose} without --images")
    return [Path(spec.origin).parent / "data" / name for name in names]
