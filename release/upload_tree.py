"""The files of a release here and on the Hub: which are the same, which are to go, whether it is another model."""

import fnmatch
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.results import FOLDER, sha256_file
from llava_norm_align.conversion.files import COPIED_NAMES
from llava_norm_align.release.card_check import MARK
from llava_norm_align.release.contents import MODEL_FILES, RESULT_FILES, TEMPLATES, Item
from llava_norm_align.release.upload_errors import UNTOUCHED

# Weights that transformers would load in place of the new ones, or onto them.
WEIGHTS = re.compile(
    r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)|(model|pytorch_model)\.(safetensors|bin)\.index\.json"
    r"|adapter_model\.(safetensors|bin)|adapter_config\.json"
)
ANY_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt")
IDENTITY = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")


def list_files(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    """The files at a revision by path."""
    entries = api.list_repo_tree(repo_id, recursive=True, revision=revision)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def remote_hash(file: RepoFile) -> str:
    """sha256 of a large file's content, git's blob id of any other."""
    return file.lfs.sha256 if file.lfs else file.blob_id


def local_hash(path: Path, large: bool) -> str:
    """The same of a file here."""
    if large:
        return sha256_file(path)
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@cache
def _hash_once(path: Path, large: bool, changed: int) -> str:
    """local_hash of a file that was `changed` (ns) last: large ones are compared with several commits."""
    return local_hash(path, large)


def is_same(item: Item, file: RepoFile | None) -> bool:
    """Whether the Hub's file has the item's content."""
    if file is None or file.size != item.size:
        return False
    return remote_hash(file) == _hash_once(item.path, bool(file.lfs), item.path.stat().st_mtime_ns)


def split(items: Sequence[Item], files: Mapping[str, RepoFile]) -> tuple[list[Item], list[Item]]:
    """The items that the Hub does not have, and those that it has."""
    changed, unchanged = [], []
    for item in items:
        (unchanged if is_same(item, files.get(item.name)) else changed).append(item)
    return changed, unchanged


def left_over(items: Sequence[Item], files: Mapping[str, RepoFile]) -> list[str]:
    """Files on the Hub of the kinds that a release writes, and that this one does not have; never the README."""
    others = sorted(set(files) - {item.name for item in items} - {"README.md"})
    return [path for path in others if is_ours(path)]


def is_ours(path: str) -> bool:
    """Weights, configs, processor, code, results: left over, they would be read in place of the new ones.

    Not the texts of licences and the like: nobody reads them in place of another, and somebody may have to have them.
    """
    place, _, name = path.rpartition("/")
    if not place:
        model = _fits(name, MODEL_FILES) and not name.startswith(COPIED_NAMES)
        return model or bool(WEIGHTS.fullmatch(name))
    if place == TEMPLATES:
        return name.endswith(".jinja")
    return bool(re.fullmatch(rf"{FOLDER}(/diagnosis-[^/]+)?", place)) and _fits(name, RESULT_FILES)


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_replaceable(
    api: HfApi, repo_id: str, revision: str, files: Mapping[str, RepoFile], items: Sequence[Item]
) -> None:
    """InputError for a repository that holds another model, or a README that somebody wrote by hand."""
    other = _other_model(api, repo_id, revision, files, items)
    if other:
        raise InputError(
            f"{repo_id} on the Hub holds another model: {other}. Release under another name, or pass --overwrite to "
            f"replace it in one commit (its history stays). {UNTOUCHED}"
        )
    if _loses_readme(api, repo_id, revision, files, items):
        raise InputError(
            f"{repo_id} on the Hub has a README.md that somebody wrote by hand, and the generated card would replace "
            f"it. Download it into the folder to keep it, or pass --overwrite (its history stays). {UNTOUCHED}"
        )


def _other_model(
    api: HfApi, repo_id: str, revision: str, files: Mapping[str, RepoFile], items: Sequence[Item]
) -> str | None:
    """How the Hub's model differs from ours, in words; None for the same one or none."""
    if "config.json" not in files:
        weights = [path for path in sorted(files) if path.endswith(ANY_WEIGHTS)]
        return f"it has weights ({weights[0]}) and no config.json" if weights else None
    item = next(item for item in items if item.name == "config.json")
    if is_same(item, files["config.json"]):
        return None
    ours, theirs = json.loads(item.path.read_text()), _read(api, repo_id, revision, "config.json")
    try:
        return ", ".join(differences(ours, json.loads(theirs))) or None
    except (ValueError, AttributeError):
        return "its config.json is no model's"


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Where two configs are of different models. A size that one leaves out is its type's own, so counts as equal."""
    pairs = [("model_type", ours.get("model_type"), theirs.get("model_type"))]
    pairs.append(("architectures", ours.get("architectures"), theirs.get("architectures")))
    for part in ("text_config", "vision_config"):
        mine, other = ours.get(part) or {}, theirs.get(part) or {}
        pairs += [(f"{part}.{name}", mine.get(name), other.get(name)) for name in IDENTITY]
    return [
        f"{name} is {other!r} there and {mine!r} here"
        for name, mine, other in pairs
        if None not in (mine, other) and mine != other
    ]


def _loses_readme(
    api: HfApi, repo_id: str, revision: str, files: Mapping[str, RepoFile], items: Sequence[Item]
) -> bool:
    """A README on the Hub without our mark is somebody's work, unless it is front matter alone or a trainer's."""
    item = next((item for item in items if item.name == "README.md"), None)
    if item is None or "README.md" not in files or is_same(item, files["README.md"]):
        return False
    if MARK not in item.path.read_text():
        return False  # written by hand here, too
    text = _read(api, repo_id, revision, "README.md")
    if MARK in text:
        return False
    found = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    body = text[found.end() :] if found else text
    return bool(body.strip()) and "generated_from_trainer" not in _tags(found[1] if found else "")


def _tags(front_matter: str) -> Sequence[str]:
    import yaml  # comes with huggingface_hub

    try:
        return (yaml.safe_load(front_matter) or {}).get("tags") or []
    except (yaml.YAMLError, AttributeError):
        return []


def _read(api: HfApi, repo_id: str, revision: str, path: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = api.hf_hub_download(repo_id, path, revision=revision, local_dir=folder)
        return Path(file).read_text(errors="replace")
