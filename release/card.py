"""The model card of a release: what it says comes from result files in the folder; what is not known is left out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from llava_norm_align.common.errors import InputError
from llava_norm_align.release import card_sections as sections
from llava_norm_align.release.card_check import MARK, check_card, read_front, validate_card_online
from llava_norm_align.release.card_evaluation import evaluation, scores
from llava_norm_align.release.card_license import Origin, find_license, find_origin, front_of, is_hub_id, is_of_base
from llava_norm_align.release.card_results import Results, read_results, written

__all__ = ["MARK", "Card", "build_card", "check_card", "validate_card_online"]

CARD = "README.md"
OURS = ("norm-align", "norm_align", "2512.08374")  # a card of such a model has one of these words


@dataclass(frozen=True)
class Card:
    """The text of README.md as it goes up, and what the publisher should know of it."""

    text: str
    notes: list[str] = field(default_factory=list)


def build_card(
    folder: Path,
    *,
    repo_id: str,
    license: str | None = None,
    base_model: str | None = None,
    language: Sequence[str] = (),
    tried: Sequence[str] = (),
) -> Card:
    """The card of the norm-aligned model in `folder` as `repo_id`; nothing is written.

    `license`: an identifier of the Hub, or a name whose text lies in LICENSE; by default that of the base model's
    card. `base_model`: its id on the Hub. `language`: codes such as en. `tried`: what the model was loaded with
    before this release, such as "Python 3.11.7, transformers 5.24.0, torch 2.13.0".
    A README.md that was written by hand is checked and kept; the base model's, which convert copied, gives its
    license.
    InputError for a license that is not known, a broken result file, and a card that the Hub would refuse.
    """
    folder = Path(folder)
    if not is_hub_id(repo_id):
        raise InputError(f"{repo_id!r} is no name of a model on the Hub. Pass one such as user/my-model.")
    own = _read_own(folder)
    if own is not None and own.lstrip().startswith("---"):
        read_front(own, str(folder / CARD))  # not ours to replace before it can be read
    if own is not None and _is_by_hand(own, folder, repo_id):
        return _keep(own, folder, license, base_model, language)
    results = read_results(folder)
    if base_model is not None and not is_hub_id(base_model):
        raise InputError(
            f"--base-model is {base_model!r}, but the id of a model on the Hub was expected, such as "
            "llava-hf/llava-1.5-7b-hf. Correct it, or leave it out for a base that is not on the Hub."
        )
    front = front_of(folder / CARD) if own is not None else None
    origin = find_origin(folder, front, base_model)
    metadata: dict[str, Any] = find_license(license, folder, origin)
    data = ModelCardData(
        **metadata,
        library_name="transformers",
        pipeline_tag="image-text-to-text",
        base_model=origin.hub_id,
        language=list(language) or origin.language or None,
        tags=["llava", "llava-norm-align", "vision-language-model"],
        model_name=repo_id.rpartition("/")[2],
        eval_results=scores(results) or None,
    )
    if data.eval_results is None:
        data.pop("model_name")
    text = f"---\n{data.to_yaml()}\n---\n\n{_body(results, repo_id, origin, tried)}\n"
    check_card(text, f"the card of {repo_id}")
    notes = [*results.notes, *(origin.notes if license is None else _without_license(origin.notes))]
    if own is not None and MARK not in own:
        whose = "is the base model's card" if is_of_base(folder) else (
            f"names neither norm-align nor {repo_id}, and its base model's folder is not here: it is taken for the "
            "base model's card"
        )  # fmt: skip
        notes.append(
            f"{CARD} in {folder} {whose}, and the one that is made goes up in its place. To keep yours, name "
            f"{repo_id} in it"
        )
    if origin.hub_id is None:
        notes.append("base_model is left out, as no id on the Hub is known. Pass it with --base-model")
    return Card(text, notes)


def _is_by_hand(own: str, folder: Path, repo_id: str) -> bool:
    """Whether somebody wrote the README.md for this model. convert copies the base's, and a trainer writes its own."""
    if MARK in own or "generated_from_trainer" in own:
        return False
    # without the base's folder nobody can say whose it is; it is replaced then, with a note
    return any(word in own for word in (*OURS, repo_id)) or is_of_base(folder) is False


def _read_own(folder: Path) -> str | None:
    """The README.md in the folder; InputError if it is no UTF-8."""
    path = folder / CARD
    try:
        return path.read_bytes().decode("utf-8-sig") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start}). Save it as UTF-8.") from None


def _keep(own: str, folder: Path, license: str | None, base_model: str | None, language: Sequence[str]) -> Card:
    """A card by hand, checked. InputError if an option says something else than it does."""
    check_card(own, str(folder / CARD))
    front = read_front(own)
    for option, field_name, value in (
        ("--license", "license", license),
        ("--base-model", "base_model", base_model),
        ("--language", "language", list(language) or None),
    ):
        found = front.get(field_name)
        if value is not None and found != value and [found] != value:
            raise InputError(
                f"{option} is {value}, but {folder / CARD}, which was written by hand, says {field_name}: {found}. "
                "Change it there and leave the option out, or remove the file to let a card be made."
            )
    return Card(own, [f"{CARD} was written by hand: it goes up as it is"])


def _body(results: Results, repo_id: str, origin: Origin, tried: Sequence[str]) -> str:
    def of(name: str) -> str:
        """A section on a result file, which may be odd."""
        return written(results, name, lambda _: getattr(sections, name)(results))

    parts = [
        MARK,
        sections.heading(results, repo_id, origin),
        sections.loading(results, repo_id, tried),
        of("calibration"),
        of("diagnosis"),
        evaluation(results),
        of("training"),
        sections.limits(results),
        sections.CITATION,
    ]
    return "\n\n".join(part for part in parts if part)


def _without_license(notes: Sequence[str]) -> list[str]:
    return [note for note in notes if not note.startswith(("license ", "the Hub could not be asked for the license"))]
