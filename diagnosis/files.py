"""The files of a diagnosis: images in; JSON, Markdown and plots out."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from llava_norm_align.common.errors import InputError, missing_extra
from llava_norm_align.common.images import image_files, open_image
from llava_norm_align.common.results import FOLDER, write_json, write_text
from llava_norm_align.common.samples import PHOTOS, sample_photos
from llava_norm_align.diagnosis.markdown import markdown
from llava_norm_align.diagnosis.plots import write_plots


def find_images(paths: Sequence[Path], limit: int) -> list[Path]:
    """The first `limit` image files of `paths`: files as they are named, of folders those with an image's suffix."""
    if not paths:
        return sample_photos("A diagnosis", PHOTOS)[:limit]
    files = image_files(paths)[:limit]
    for path in files:
        open_image(path)  # a broken one ends the run before the model is loaded
    return files


def result_folder(name: str, folder: Path, out: Path | None) -> Path:
    """Where the result files of model `name` go: a folder that can be written, or made; else InputError."""
    target = out or (folder / FOLDER if Path(name).is_dir() else Path(f"{name.split('/')[-1]}-{FOLDER}"))
    try:
        made = [place for place in (target, *target.parents) if not place.exists()]
        target.mkdir(parents=True, exist_ok=True)
        (target / ".writable").touch()
        (target / ".writable").unlink()
        for place in made:  # a run that fails later leaves nothing
            place.rmdir()
    except OSError as error:
        raise InputError(
            f"The folder {target} cannot be written ({error.strerror}); the result files go there. Name another --out."
        ) from None
    return target


def mapped_image(result: dict[str, Any], files: Sequence[Path]) -> Image.Image | None:
    """The image that the attention map is of."""
    shown = ((result["attention"] or {}).get("map") or {}).get("image")
    return next((open_image(path) for path in files if path.name == shown), None)


def write_diagnosis(
    result: dict[str, Any], folder: Path, image: Image.Image | None = None, other: dict[str, Any] | None = None
) -> list[Path]:
    """Write diagnosis.json, diagnosis.md and the plots into `folder`; their paths. Without matplotlib, no plots."""
    plots = []
    if importlib.util.find_spec("matplotlib") is not None:
        plots = write_plots(result, folder, image, other)
    else:
        result["missing"].append(str(missing_extra("matplotlib", "plots", "A plot")))
    write_json(folder / "diagnosis.json", result)
    write_text(folder / "diagnosis.md", markdown(result, plots, other))
    return [folder / "diagnosis.json", folder / "diagnosis.md", *plots]
