"""The models of an evaluation, found and checked before any of them is loaded."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import check_vision_language, resolve_weights
from llava_norm_align.common.results import sha256_file, weights_sha256
from llava_norm_align.evaluation.settings import check_comparable, model_settings


@dataclass(frozen=True)
class Folder:
    """One trained model. `settings`: what others must share; the hashes tell it from others."""

    name: str  # as it was passed
    path: Path
    revision: str | None
    settings: dict[str, Any]
    weights: str
    config: str

    @property
    def label(self) -> str:
        """Its last folder, or its Hub id."""
        return Path(self.name).resolve().name if os.path.isdir(self.name) else self.name

    @property
    def tag(self) -> str:
        """What its files are called: the label and eight digits of its hashes."""
        digest = hashlib.sha256(f"{self.weights}{self.config}".encode()).hexdigest()[:8]
        return f"{re.sub(r'[^A-Za-z0-9.-]+', '_', self.label)[-80:].strip('._')}-{digest}"


@dataclass
class Candidate:
    """One row of the table: a model, or several of the same training with other seeds."""

    folders: list[Folder]
    method: str  # "no norm", "layer_norm + GWC", ...
    predictions: list[Path] = field(default_factory=list)  # a file for each folder

    def label(self, others: Sequence["Candidate"]) -> str:
        """What tables call it: the short name of its first folder, or all of it where another has the same."""
        first = self.folders[0]
        alike = any(other is not self and other.folders[0].label == first.label for other in others)
        seeds = f" ({len(self.folders)} seeds)" if len(self.folders) > 1 else ""
        return f"{first.name if alike else first.label}{seeds}"


def split_seeds(argument: str) -> list[str]:
    """The models that `argument` names: one, or seeds of one training with commas between them."""
    if os.path.exists(argument):
        return [argument]
    names = argument.split(",")
    if not all(names):
        raise InputError(f"{argument!r} names an empty model. Name folders or Hub ids, single commas between them.")
    return names


def find_candidates(
    model: str, baselines: Sequence[str], *, revision: str | None, trust_remote_code: bool, **generation: Any
) -> list[Candidate]:
    """The model and its baselines. InputError if one cannot be loaded, comes twice, or does not compare with others.

    `generation`: dtype, four_bit and max_new_tokens (settings.model_settings).
    """
    candidates = []
    for position, argument in enumerate((model, *baselines)):
        folders, method = [], None
        for name in split_seeds(argument):
            asked = None if position else revision
            path = resolve_weights(name, asked)
            config = check_vision_language(path, trust_remote_code)
            method = method or method_of(config)
            if method != method_of(config):
                raise InputError(
                    f"{argument} names seeds of one training, but {name} has {method_of(config)} and the first "
                    f"{method}. Name them apart, with --baseline."
                )
            settings = model_settings(path, config, trust_remote_code=trust_remote_code, **generation)
            folders.append(
                Folder(name, path, asked, settings, weights_sha256(path), sha256_file(path / "config.json"))
            )
        candidates.append(Candidate(folders, method or ""))
    first, *others = [folder for candidate in candidates for folder in candidate.folders]
    seen = {(first.weights, first.config): first.name}
    for other in others:
        check_comparable(first.name, first.settings, other.name, other.settings)
        twin = seen.get((other.weights, other.config))
        seen[other.weights, other.config] = other.name
        if twin is not None:
            raise InputError(f"{twin} and {other.name} are the same model, weights and configuration. Leave one out.")
    return candidates


def method_of(config: Mapping[str, Any]) -> str:
    """The paper's name of what stands after the projector."""
    kind = config.get("norm_align_type", "none")
    if kind == "none":
        return "no norm"
    name = "norm" if kind == "layer_norm" else kind
    compensated = kind != "scale" and config.get("norm_align_gradient_compensation", True)
    return f"{name} + GWC" if compensated else name
