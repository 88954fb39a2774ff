"""The license of a released model and the model on the Hub that it comes from: carried on or given, never guessed."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import HFValidationError, validate_repo_id

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.results import FOLDER
from llava_norm_align.common.weights import read_json
from llava_norm_align.diagnosis.formats import find, printable
from llava_norm_align.release.contents import is_paper

# The Hub's identifiers, of https://huggingface.co/docs/hub/repositories-licenses in August 2026; huggingface_hub has
# no list of them.
LICENSES = frozenset(
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openmdw-1.0 openmdw-1.1 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
    fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown
    other
    """.split()
)
ASK = "Pass it with --license, such as --license apache-2.0, --license llama3.2 or, with its text in a file LICENSE, "
ASK += "--license my-own-license"
STEPS = 5  # folders that a model may have come through
SECONDS = 10  # for an answer of the Hub


@dataclass
class Origin:
    """What is known of the model that a folder came from."""

    hub_id: str | None = None  # the nearest one on the Hub
    license: dict[str, Any] = field(default_factory=dict)  # license, license_name, license_link of its card
    language: list[str] = field(default_factory=list)
    card: str | None = None  # whose card says so, in words
    unasked: str | None = None  # the model that the Hub was asked for in vain, and why
    notes: list[str] = field(default_factory=list)


def find_license(given: str | None, folder: Path, origin: Origin) -> dict[str, str | list[str]]:
    """The fields of the front matter that name the license: the `given` one, else the origin's.

    InputError if there is none, or if one that the Hub has no identifier for comes without its text.
    """
    if given is None:
        if not origin.license:
            why = "no card of its base model says it"
            if origin.unasked:
                why = f"the Hub could not be asked for that of its base model, {origin.unasked}"
            raise InputError(f"The license of {folder} is not known: {why}. {ASK}.")
        return origin.license
    name = given.strip()
    if name.lower() in LICENSES - {"other"}:
        return {"license": name.lower()}
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")
    if not slug or slug == "other":
        raise InputError(f"--license is {given!r}, which names no license. {ASK}.")
    texts = sorted(path.name for path in folder.glob("LICEN[SC]E*") if is_paper(path.name) and path.is_file())
    if not texts:
        raise InputError(
            f"--license is {given!r}, which is none of the Hub's identifiers, so its text has to be in the model, but "
            f"there is no LICENSE in {folder}. Put it there, or pass one of "
            "https://huggingface.co/docs/hub/repositories-licenses, such as apache-2.0."
        )
    return {"license": "other", "license_name": slug, "license_link": texts[0]}


def find_origin(folder: Path, own_card: dict[str, Any] | None, base_model: str | None = None) -> Origin:
    """Where the model in `folder` comes from: by its result files, and those of the folders that they name.

    `own_card`: the front matter of a card in the folder that is the base model's, or an earlier one of its own.
    `base_model`: the id on the Hub, if it is given. The Hub is asked where nothing here answers; without a connection
    what only it knows stays unknown.
    """
    origin = Origin(hub_id=base_model)
    _take(origin, own_card, "the README.md in the folder", folder, None)
    if base_model is not None:
        _ask_hub(origin, base_model, folder, sure=True)
        return origin
    place = folder
    for _ in range(STEPS):
        name, on_hub = named_base(place)
        if name is None:
            break
        cached = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", name)
        if cached and is_hub_id(f"{cached[1]}/{cached[2]}"):
            name, on_hub = f"{cached[1]}/{cached[2]}", True
        if not on_hub and os.path.isdir(name):
            place = Path(name)
            _take(origin, front_of(place / "README.md"), f"the README.md of {place.name}", folder, None)
            continue
        if is_hub_id(name) and on_hub is not False:
            _ask_hub(origin, name, folder, sure=bool(on_hub))
        break
    return origin


def named_base(folder: Path) -> tuple[str | None, bool | None]:
    """The model that the one in `folder` was made of, as it was typed, and whether that was on the Hub, if known."""
    for file, key in (("training.json", "model"), ("merge.json", "base"), ("calibration.json", "source")):
        path = folder / FOLDER / file
        content = read_json(path, "a result file") if path.is_file() else {}
        if isinstance(content.get(key), str):
            on_hub = content.get(f"{key}_on_hub")
            return content[key], on_hub if isinstance(on_hub, bool) else None
    return None, None


def is_of_base(folder: Path) -> bool | None:
    """Whether the README.md in `folder` is, byte for byte, that of a folder which its model came from; None if no such
    folder is here.
    """
    place, found = folder, None
    for _ in range(STEPS):
        name, on_hub = named_base(place)
        if name is None or on_hub or not os.path.isdir(name) or os.path.samefile(name, folder):
            break
        place, readme = Path(name), Path(name, "README.md")
        found = bool(found) or (readme.is_file() and readme.read_bytes() == (folder / "README.md").read_bytes())
    return found


def front_of(path: Path) -> dict[str, Any] | None:
    """The front matter of another model's card; None if it cannot be read, which is not ours to mend."""
    try:
        text = path.read_text(encoding="utf-8")
        if not text.lstrip().startswith("---"):  # huggingface_hub would print a warning
            return None
        return ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # YAML, Unicode and huggingface_hub each have errors of their own
        return None


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a model on the Hub, with its owner."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) is not None  # some versions let a line end pass


def _ask_hub(origin: Origin, name: str, folder: Path, sure: bool) -> None:
    """Take over what the Hub says of the model `name`. Unless it is `sure` that it is on the Hub, it is the origin
    only if the Hub knows it: a folder may have had a name of that form.
    """
    try:
        data = HfApi().model_info(name, timeout=SECONDS).card_data
    except Exception as error:  # offline, unknown, gated: each version has errors of its own
        status = getattr(getattr(error, "response", None), "status_code", None)
        why = type(error).__name__ if status is None else f"{type(error).__name__}, status {status}"
        origin.unasked = f"{printable(name)} ({why})"
        if sure:
            origin.hub_id = name
            if not origin.license:
                origin.notes.append(f"the Hub could not be asked for the license of {name} ({why})")
        else:
            origin.notes.append(
                f"{printable(name)} is what the model was made of, but it is no folder here, and the Hub did not say "
                f"that it has it ({why}): base_model is left out. Pass it with --base-model"
            )
        return
    if not sure:
        origin.notes.append(
            f"base_model is {name}: the result files name it, it is no folder here, and the Hub has it. If it is "
            "another one, pass --base-model"
        )
    origin.hub_id = name
    _take(origin, data.to_dict() if data else None, f"the card of {name} on the Hub", folder, name)


def _take(origin: Origin, front: dict[str, Any] | None, card: str, folder: Path, hub_id: str | None) -> None:
    """Carry license and languages of a card on, unless a nearer one had them."""
    found = find(front, "license")
    names = found if isinstance(found, list) else [found]
    if (
        not origin.license
        and names
        and all(isinstance(name, str) and name in LICENSES - {"unknown"} for name in names)
    ):
        origin.license = {"license": found}
        origin.card = card
        if "other" in names:
            _take_other(origin, front or {}, folder, hub_id)
        if origin.license:
            origin.notes.append(f"license {printable(', '.join(names))}, from {card}")
    spoken = find(front, "language")
    spoken = [spoken] if isinstance(spoken, str) else spoken
    if not origin.language and isinstance(spoken, list):
        origin.language = [one for one in spoken if isinstance(one, str) and re.fullmatch(r"[a-z]{2,3}", one)]


def _take_other(origin: Origin, front: dict[str, Any], folder: Path, hub_id: str | None) -> None:
    """Name and place of a license without an identifier; without a name it is not known which one it is."""
    name, link = front.get("license_name"), front.get("license_link")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9.-]+", name):
        origin.license = {}
        return
    origin.license["license_name"] = name
    if isinstance(link, str) and re.fullmatch(r"https://[^\s<>\"']+", link):
        origin.license["license_link"] = link
    elif isinstance(link, str) and re.fullmatch(r"[\w.-]+", link):
        if is_paper(link) and (folder / link).is_file():
            origin.license["license_link"] = link
        elif hub_id:
            origin.license["license_link"] = f"https://huggingface.co/{hub_id}/blob/main/{link}"
