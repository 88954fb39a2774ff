"""The diagnoses of two models on one set of plots, where both were diagnosed."""

import os
from pathlib import Path
from typing import Any

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.results import FOLDER
from llava_norm_align.diagnosis.compare import FILE, compare, read_diagnosis
from llava_norm_align.diagnosis.plots import write_plots
from llava_norm_align.evaluation.candidates import Candidate, Folder


def write_overlay(model: Candidate, baseline: Candidate, target: Path) -> dict[str, Any]:
    """Plots of both diagnoses into `target`/diagnosis-BASELINE and a table; `missing` says why there is none.

    Of several seeds the first is shown.
    """
    one, other = model.folders[0], baseline.folders[0]
    result: dict[str, Any] = {"baseline": other.name, "table": None, "plots": [], "missing": None}
    try:
        mine, theirs = _read(one, target), _read(other, None)
        result["table"] = compare(mine, theirs)
        folder = target / f"diagnosis-{other.tag}"
        result["plots"] = [str(path.relative_to(target)) for path in write_plots(mine, folder, other=theirs)]
    except InputError as error:  # what was answered is not lost for want of a plot
        result["missing"] = str(error)
    return result


def _read(folder: Folder, target: Path | None) -> dict[str, Any]:
    own = folder.path / FOLDER if os.path.isdir(folder.name) else Path(f"{folder.name.split('/')[-1]}-{FOLDER}")
    places = [place for place in (target, own) if place is not None and (place / FILE).is_file()]
    if not places:
        raise InputError(f"{folder.name} has no {FILE}. Run `llava-norm-align diagnose {folder.name}` to see it here.")
    content = read_diagnosis(places[0] / FILE)
    if content["model"].get("weights_sha256") != folder.weights:
        raise InputError(
            f"{places[0] / FILE} is of other weights than those of {folder.name}. Run diagnose on it again."
        )
    return content
