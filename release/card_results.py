"""The result files of a model folder that a card speaks of, and names in them made fit for the public."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import load_config
from llava_norm_align.common.results import FOLDER, SCHEMA_VERSION, weights_sha256
from llava_norm_align.common.weights import read_json, read_weights
from llava_norm_align.conversion.projector_file import NORM, read_values
from llava_norm_align.diagnosis.formats import escape, find, find_list, printable, shorten
from llava_norm_align.modeling.families import ALIGNED_TYPES

FILES = {  # attribute of Results: file, and who writes it
    "calibration": ("calibration.json", "convert"),
    "merged": ("merge.json", "merge"),
    "training": ("training.json", "train"),
    "diagnosis": ("diagnosis.json", "diagnose"),
    "evaluation": ("evaluation.json", "evaluate"),
    "text": ("evaluation-text.json", "evaluate --tasks text"),
    "lmms": ("evaluation-lmms.json", "evaluate --tasks paper"),
}


@dataclass
class Results:
    """What is known of a model. A file that is missing, or of other weights than the folder's, is None."""

    folder: Path
    config: dict[str, Any]
    weights: str  # common.results.weights_sha256
    moved: bool | None  # whether the norm is another one than at its start; None if it has no weights
    calibration: dict[str, Any] | None = None
    merged: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    diagnosis: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    lmms: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def untrained(self) -> bool:
        """Whether nothing says that the model was trained with its norm."""
        trained = self.merged or self.moved or (self.training and not self.doubted)
        return not trained and self.config.get("norm_align_type") != "none"

    @property
    def doubted(self) -> bool:
        """Whether training.json, which names no weights, may be of other ones: the norm is where it was inserted."""
        return self.training is not None and self.merged is None and self.moved is False


def read_results(folder: Path) -> Results:
    """The result files of the norm-aligned model in `folder`. InputError for a broken file, or for another model."""
    config = load_config(folder)
    if config["model_type"] not in ALIGNED_TYPES:
        raise InputError(
            f"{folder} is a {config['model_type']}, but a norm-aligned model was expected, as convert and train write "
            "it. Name the folder of one."
        )
    results = Results(folder, config, weights_sha256(folder), norm_moved(folder))
    for name, (file, verb) in FILES.items():
        path = folder / FOLDER / file
        if not path.is_file():
            continue
        content = read_json(path, f"what {verb} writes")
        if content.get("schema_version") != SCHEMA_VERSION:
            found = content.get("schema_version")
            results.notes.append(
                f"{FOLDER}/{file} has schema_version {found!r}, not {SCHEMA_VERSION}: not in the card, though the "
                "file goes up"
            )
        elif name in ("diagnosis", "evaluation", "text", "lmms") and results.weights not in measured(name, content):
            results.notes.append(
                f"{FOLDER}/{file} is of other weights than those in the folder: not in the card, though the file goes "
                f"up, and what was written with it. Run {verb} again, or remove it"
            )
        else:
            setattr(results, name, content)
    if results.doubted:
        results.notes.append(
            f"{FOLDER}/training.json tells of a training, but the norm has not moved from its start: the card says "
            "that these may not be the weights that it made"
        )
    return results


def measured(name: str, content: dict[str, Any]) -> list[Any]:
    """The hashes of the weights that a result file is about: of the model itself, not of its baselines."""
    if name == "diagnosis":
        return [find(content, "model", "weights_sha256")]
    if name == "evaluation":
        first = (find_list(content, "models") or [None])[0]
        return [find(one, "weights_sha256") for one in find_list(first, "folders")]
    hashes = find(content, "weights_sha256")
    return list(hashes.values()) if isinstance(hashes, dict) else []


def norm_moved(folder: Path) -> bool | None:
    """Whether the norm's gain differs between channels, or its bias from 0; an untrained one does neither."""
    tensors = read_weights(folder).tensors
    norm = {
        name.rpartition(NORM)[2]: read_values(tensor) for name, tensor in tensors.items() if f".{NORM}" in f".{name}"
    }
    if "weight" not in norm:
        return None
    gain = norm["weight"]
    return bool(gain.min() < gain.max()) or bool(norm.get("bias", torch.zeros(1)).any())


def short(name: Any, length: int = 80) -> str:
    """A name as anyone may read it: of a path its last part alone, or the id in a path of the Hub's cache."""
    text = printable(name)
    if text.startswith(("/", ".", "~")) or text.count("/") > 1 or "\\" in text:
        cached = re.search(r"models--([^/\s]+?)--([^/\s]+)", text)
        text = f"{cached[1]}/{cached[2]}" if cached else re.split(r"[/\\]", text.rstrip("/\\"))[-1]
    return shorten(text, length)


def public(name: Any, length: int = 80) -> str:
    """`short`, in plain Markdown."""
    return escape(short(name, length))


def written(results: Results, name: str, section: Callable[[dict[str, Any]], Any]) -> Any:
    """`section` of the result file `name`. InputError if the file lacks what its verb writes."""
    file, verb = FILES[name]
    try:
        return section(getattr(results, name))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise InputError(
            f"{results.folder / FOLDER / file} is not as {verb} writes it ({type(error).__name__}: {error}). Run "
            f"{verb} again, or remove the file."
        ) from error
