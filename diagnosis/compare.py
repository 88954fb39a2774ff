"""Two diagnoses side by side: one of this run and one read from a file."""

from pathlib import Path
from typing import Any

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.results import FOLDER, SCHEMA_VERSION
from llava_norm_align.common.weights import read_json
from llava_norm_align.diagnosis import formats
from llava_norm_align.diagnosis.describe import ASSUMPTIONS, NORMS, first_rotations, layers_named
from llava_norm_align.diagnosis.formats import find, find_interval, find_list, find_number, number

FILE = "diagnosis.json"
KEYS = {"model": dict, "norms": dict, "layers": list, "verdicts": dict}  # what a comparison needs, besides "ratio"
NAME = 22  # columns
AGAIN = "Run `llava-norm-align diagnose` on that model again, and name the new file."


def read_diagnosis(path: Path) -> dict[str, Any]:
    """The diagnosis in `path`: a diagnosis.json, its folder, or the folder of a model that was diagnosed.

    InputError if it is missing, not JSON, of another schema version, or lacks what a comparison needs.
    """
    if path.is_dir():
        candidates = [path / FILE, path / FOLDER / FILE]
        found = next((candidate for candidate in candidates if candidate.exists()), None)
        if found is None:
            raise InputError(
                f"There is no {FILE} in {path} or its folder {FOLDER}; --compare takes what diagnose wrote. "
                "Run `llava-norm-align diagnose` on that model first, or name another file."
            )
        path = found
    content = read_json(path, "the diagnosis that --compare takes")
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        found = "no schema_version" if version is None else f"schema_version {version!r}"
        raise InputError(f"{path} has {found}, but {SCHEMA_VERSION} was expected. {AGAIN}")
    wrong = [key for key, kind in KEYS.items() if not isinstance(content.get(key), kind)]
    wrong += [key for key in ("ratio",) if key not in content]
    if wrong:
        raise InputError(
            f"{path} lacks {', '.join(wrong)}, or holds something else there, but a diagnosis was expected. {AGAIN}"
        )
    return content


def compare(result: dict[str, Any], other: dict[str, Any]) -> str:
    """A table of two diagnoses: norms, ratio, verdicts and the rotation in the first quarter of the layers."""
    both = (result, other)
    names = [formats.model_name(one, NAME) for one in both]
    rows = [["", f"this: {names[0]}", f"other: {names[1]}"]]
    for key, name in NORMS.items():
        means = [find_number(one, "norms", key, "mean") for one in both]
        if any(mean is not None for mean in means):
            rows.append([f"mean norm: {name}", *map(number, means)])
    rows.append(["ratio visual / text, layer 0", *map(ratio_cell, both)])
    rows.append(["decoder layers", *(formats.count(len(find_list(one, "layers"))) for one in both)])
    rows += [
        [f"{key.upper()}: holds, fails, undecided", *(verdicts_cell(one, key) for one in both)] for key in ASSUMPTIONS
    ]
    for index, kind in enumerate(("visual", "text")):
        rows.append([f"mean rotation of {kind} tokens", *(rotation_cell(one, index) for one in both)])
    rows.append(["images", *(formats.count(find_number(one, "images", "count")) for one in both)])
    notes = [
        f"The {what} differ, so part of the differences may be theirs."
        for what, keys in (("images", ("images", "names")), ("prompts", ("prompt",)))
        if find(result, *keys) != find(other, *keys)
    ]
    return "\n".join(["Compared", formats.text_table(rows), *notes])


def ratio_cell(result: dict[str, Any]) -> str:
    """The ratio with its interval."""
    interval = find_interval(result, "ratio", "interval")
    ends = f" ({number(interval[0])} to {number(interval[1])})" if interval else ""
    return f"{number(find_number(result, 'ratio', 'mean'))}{ends}"


def rotation_cell(result: dict[str, Any], index: int) -> str:
    """The mean rotation of visual (0) or text (1) tokens in the first quarter of the layers."""
    layers = find_list(result, "layers")
    angle = first_rotations(layers)[index]
    return "-" if angle is None else f"{angle:.1f} degrees ({layers_named(layers)})"


def verdicts_cell(result: dict[str, Any], assumption: str) -> str:
    """How many layers an assumption holds at, fails at, and is undecided at."""
    images, least = (find_number(result, "verdicts", key) for key in ("images", "least_images"))
    if images is not None and least is not None and images < least:
        return f"no verdict ({formats.counted(images, 'image')})"
    counts = [find_number(result, "verdicts", assumption, verdict) for verdict in ("holds", "fails", "undecided")]
    return ", ".join("-" if count is None else f"{count:g}" for count in counts)
