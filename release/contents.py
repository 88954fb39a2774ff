"""What of a model folder goes to the Hub: an allow-list of what the package writes, and why the rest stays here."""

import fnmatch
import json
import os
import re
import shlex
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.folders import check_utf8
from llava_norm_align.common.loading import load_config
from llava_norm_align.common.results import FOLDER
from llava_norm_align.common.weights import INDEX_FILE, SINGLE_FILE, read_json
from llava_norm_align.conversion.files import COPIED_NAMES

# The Hub's limit for one file: "In all cases, no single file will exceed 500GB"
# (https://huggingface.co/docs/hub/storage-limits, read in August 2026).
MAX_FILE = 500 * 10**9
SHARD = "20GB"  # what an error advises; well below the 200 GB that the same page recommends
PROJECTOR_FILE = "projector.safetensors"

# names at the top of a folder; the weights are those that the index names
MODEL_FILES = (
    "config.json", "generation_config.json", "README.md",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.spm", "*.tiktoken",
    "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.model", "sentencepiece.bpe.model",
    "chat_template.json", "chat_template.jinja",
    "recipe*.yaml", "recipe*.yml",
)  # fmt: skip
# and papers such as LICENSE, NOTICE.md and LICENSE-llm-llama3.2.txt
PAPER = re.compile(rf"(?:{'|'.join(COPIED_NAMES)})(?:-\w+(?:\.\d+)*)*(?:\.(?:txt|md|pdf|rst))?")
TEMPLATES = "additional_chat_templates"
RESULT_FILES = ("*.json", "*.md", "*.png", "recipe*.yaml", "recipe*.yml")  # in norm_align/ and its diagnosis-OTHER/
OF_A_RUN = "it is the state of a training, which only a resumed run reads"
LOGS = "it is a log"
PICKLE = "it is a pickle, which can run code when it is loaded"
LEFT_OUT = (  # the first pattern that fits says why; a name that ends with / is a folder
    (".env*", "it may hold passwords"),
    (".git/", "it is the history of another repository"),
    (".gitattributes", "the Hub writes its own"),
    (".*", "it is hidden"),
    ("checkpoint-*/", "it is a checkpoint of a training"),
    ("tmp-*/", "it is what a training left half written"),
    ("start.json", OF_A_RUN),
    ("trainer_state.json", OF_A_RUN),
    ("training_args.bin", OF_A_RUN),
    ("optimizer*", OF_A_RUN),
    ("scheduler*", OF_A_RUN),
    ("rng_state*", OF_A_RUN),
    ("scaler.pt", OF_A_RUN),
    ("global_step*", OF_A_RUN),
    ("*.bin", PICKLE),
    ("*.pt", PICKLE),
    ("*.pth", PICKLE),
    ("*.pkl", PICKLE),
    ("*.pickle", PICKLE),
    ("*.ckpt", PICKLE),
    ("adapter_*", "it belongs to an adapter, not to this model"),
    ("*.safetensors", f"the model does not read it ({INDEX_FILE} or {SINGLE_FILE} are its weights)"),
    ("*.index.json", f"the model does not read it: {SINGLE_FILE} holds all weights"),
    ("predictions*.jsonl", "it holds the questions and answers of a test set; evaluation.json has the scores"),
    ("*.ipynb", "it is a notebook"),
    ("*.py", "config.json's auto_map does not name it"),
    ("__pycache__/", "it is a cache"),
    ("*cache*/", "it is a cache"),
    ("runs/", LOGS),
    ("wandb/", LOGS),
    ("*tfevents*", LOGS),
    ("*.log", LOGS),
    ("*", "it is no file that this program writes into a model folder"),
)
# what must not stand in a text: what it looks like, after a character that is no letter or digit; each begins with a
# fixed word, for which re searches fast
SECRETS = {
    "a token of the Hugging Face Hub": ("hf_[A-Za-z0-9]{20}", "api_org_[A-Za-z0-9]{20}"),
    "a private key": ("-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY",),
    "a token of GitHub": ("gh[pousr]_[A-Za-z0-9]{36}", "github_pat_[A-Za-z0-9_]{22}"),
    "a key of an AI service": ("sk-[A-Za-z0-9_-]{32}",),
    "a key of Amazon Web Services": ("AKIA[0-9A-Z]{16}", "ASIA[0-9A-Z]{16}"),
    "a key of Google": ("AIza[0-9A-Za-z_-]{35}",),
    "a token of Slack": ("xox[abeprs]-[A-Za-z0-9-]{10}",),
    "a key of Weights & Biases": (r"WANDB_API_KEY\W{1,5}[0-9a-f]{40}",),
    "a password in an address": (r"://[^\s/:@'\"<>{}]+:[^\s/:@'\"<>{}$]+@",),
}
NO_TEXT = (".safetensors", ".png")
NEVER_EMPTY = (".safetensors", ".json", ".py", ".model", ".spm", ".tiktoken", ".png", ".pdf")
# home folders, of this machine or of the one that a result file was written on
HOME = re.compile(r"(?<![\w.~-])(?:/(?:home|Users)/[^/\s\"'`\\,;:|<>()\[\]{}]+|/root(?![\w.-]))")
PLACE = re.compile(r"(?<![\w./:~<>-])/(?:[\w.-]+/)+[\w.-]+")  # any other absolute path
MAY_NAME_PLACES = ("*.json", "*.md", "*.yaml", "*.yml")
NAMES_NO_PLACE = ("README.md", "tokenizer.json", "vocab.json", "*.index.json")


@dataclass(frozen=True)
class Item:
    """One file that goes up."""

    name: str  # its path in the repository, with /
    path: Path
    size: int  # bytes


@dataclass(frozen=True)
class Contents:
    """What goes up, sorted by name; what does not, with the reason; and what the publisher should know."""

    items: list[Item]
    left_out: list[tuple[str, str]]
    notes: list[str] = field(default_factory=list)


def find_contents(folder: Path, token: str | None = None) -> Contents:
    """What of the model in `folder` goes to the Hub; nothing is changed. `token`: one that no text may hold.

    InputError for a folder without safetensors, an empty file of NEVER_EMPTY, one above the Hub's limit, a link to
    what does not go up itself, a file that cannot be read, and a text that holds something like a password.
    """
    folder = Path(folder)
    check_utf8(folder)
    if not os.path.isdir(folder):
        found = f"{folder} is a file" if os.path.exists(folder) else f"There is no folder {folder}"
        raise InputError(f"{found}. Name the folder of a norm-aligned model, as convert and train write it.")
    config = load_config(folder)
    weights, code = weight_names(folder), code_names(config)
    wanted, left_out = {}, []
    for path, name in _walk(folder):
        if name.endswith("/") or not _is_wanted(name, weights | code):
            left_out.append((name, _reason(name)))
        else:
            wanted[name] = path
    for path in wanted.values():
        _check_file(path, folder, wanted)
    items = [Item(name, path, path.stat().st_size) for name, path in wanted.items()]
    missing = sorted((weights | code) - {item.name for item in items})
    if missing:
        raise InputError(f"{folder / missing[0]} is missing, but the model needs it. Convert or download it again.")
    for item in items:
        _check_size(item, folder, weights)
        if item.path.suffix not in NO_TEXT:
            _check_secrets(item.path, token)
    return Contents(sorted(items, key=lambda item: item.name), sorted(left_out), _notes(items))


def without_homes(contents: Contents, scratch: Path) -> Contents:
    """`contents` with copies in `scratch` of the texts that name a home folder, with ~ in its place; notes on other
    absolute paths in result files. The folder itself, and a README.md, are not changed.
    """
    items, notes = [], list(contents.notes)
    home = str(Path.home())
    for item in contents.items:
        if item.name == "README.md" and HOME.search(item.path.read_text(encoding="utf-8", errors="replace")):
            notes.append("README.md names a home folder")
        elif _fits(item.path.name, MAY_NAME_PLACES) and not _fits(item.path.name, NAMES_NO_PLACE):
            text = item.path.read_bytes().decode(errors="surrogateescape")
            hidden = HOME.sub("~", text)
            if len(home) > 1:  # not where it is / itself
                hidden = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?![\w.-])", "~", hidden)
            place = PLACE.search(hidden) if item.name.startswith(f"{FOLDER}/") else None
            if place:
                notes.append(f"{item.name} names a place on a machine: {place[0]}")
            if hidden != text:
                copy = scratch / item.name
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(hidden.encode(errors="surrogateescape"))
                item = Item(item.name, copy, copy.stat().st_size)
                notes.append(f"{item.name} goes up with ~ in place of the home folder")
        items.append(item)
    return Contents(items, contents.left_out, notes)


def weight_names(folder: Path) -> set[str]:
    """The weight files that the model loads, and their index; one file goes before an index, as in transformers.

    InputError if there are no safetensors.
    """
    if (folder / SINGLE_FILE).exists():
        return {SINGLE_FILE}
    if (folder / INDEX_FILE).is_file():
        named = read_json(folder / INDEX_FILE, "which file holds which tensor").get("weight_map")
        names = set(map(str, named.values())) if isinstance(named, dict) else {"None"}
        wrong = sorted(name for name in names if not re.fullmatch(r"[\w.-]+\.safetensors", name))
        if wrong or not names:
            raise InputError(
                f"{folder / INDEX_FILE} names {wrong[0] if wrong else 'no file'}; weight_map was expected to name "
                "safetensors files in the same folder. Convert or download the model again."
            )
        return {INDEX_FILE, *names}
    pickled = sorted(path.name for path in folder.glob("*.bin") if path.name != "training_args.bin")
    if pickled:
        raise InputError(
            f"The weights of {folder} are pickled ({pickled[0]}), which runs code when it is loaded; only safetensors "
            "are released. Convert them: llava-norm-align convert writes safetensors, and so does save_pretrained of "
            "a loaded model."
        )
    raise InputError(
        f"{folder} has no weights: {SINGLE_FILE} or {INDEX_FILE} was expected. Name the folder of a whole model."
    )


def code_names(config: dict[str, Any]) -> set[str]:
    """The code files that config.json's auto_map names, and LLaVA's two, on which the other families' build."""
    auto_map = config.get("auto_map") or {}
    modules = {str(name).rpartition("--")[2].partition(".")[0] for name in auto_map.values()}
    if any(module.endswith("_norm_align") for module in modules):
        modules |= {f"{part}_llava_norm_align" for part in ("configuration", "modeling")}
    return {f"{module}.py" for module in modules if re.fullmatch(r"\w+", module)}


def _walk(folder: Path) -> Iterator[tuple[Path, str]]:
    """Each file that may go up, and each file and folder (with / at the end of its name) that never does."""
    for path in sorted(folder.iterdir()):
        if path.name == FOLDER and _is_folder(path):
            for result in sorted(path.iterdir()):
                name = f"{FOLDER}/{result.name}"
                if result.name.startswith("diagnosis-") and _is_folder(result):
                    yield from ((inner, f"{name}/{_shown(inner)}") for inner in sorted(result.iterdir()))
                else:
                    yield result, f"{FOLDER}/{_shown(result)}"
        elif path.name == TEMPLATES and _is_folder(path):
            yield from ((inner, f"{TEMPLATES}/{_shown(inner)}") for inner in sorted(path.iterdir()))
        else:
            yield path, _shown(path)


def _is_folder(path: Path) -> bool:
    """Whether it is a folder; InputError if it is a link to one."""
    if path.is_symlink():
        raise InputError(f"{path} is a link, which is not followed. Put the folder itself there.")
    return path.is_dir()


def _shown(path: Path) -> str:
    return f"{path.name}/" if path.is_dir() else path.name


def _is_wanted(name: str, needed: set[str]) -> bool:
    place, _, last = name.rpartition("/")
    if last.startswith(".") or last == "start.json":
        return False
    if not place:
        return name in needed or name == PROJECTOR_FILE or _fits(name, MODEL_FILES) or is_paper(name)
    return last.endswith(".jinja") if place == TEMPLATES else _fits(last, RESULT_FILES)


def is_paper(name: str) -> bool:
    """Whether a file of that name at the top of a folder is a license or notice, which goes up."""
    return PAPER.fullmatch(name) is not None


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _reason(name: str) -> str:
    last = name.rstrip("/").rpartition("/")[2] + ("/" if name.endswith("/") else "")
    return next(why for pattern, why in LEFT_OUT if fnmatch.fnmatchcase(last, pattern))


def _check_file(path: Path, folder: Path, wanted: Collection[str]) -> None:
    """InputError unless `path` may be read and is a plain file, or a link to one of those `wanted` in the folder; in a
    snapshot of the Hub's cache, to a blob of that cache, too.
    """
    place = folder.resolve()
    blobs = place.parent.parent / "blobs" if place.parent.name == "snapshots" else None
    try:
        target = path.resolve(strict=True)
        if not target.is_relative_to(place) and target.parent != blobs:
            raise InputError(
                f"{path} is a link that leads out of the folder, to {target}. Put the file itself there: cp -L."
            )
        if target.parent != blobs and target.relative_to(place).as_posix() not in wanted:
            raise InputError(
                f"{path} is a link to {target}, which does not go up itself. Put the file that is meant there."
            )
        if not stat.S_ISREG(target.stat().st_mode):
            raise InputError(f"{path} is neither a file nor a folder. Remove it.")
        path.open("rb").close()
    except (FileNotFoundError, RuntimeError):  # RuntimeError: links in a circle
        raise InputError(f"{path} is a link to nothing. Put the file itself there, or remove the link.") from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}). Give yourself the permission, or copy the model anew."
        ) from None


def _check_size(item: Item, folder: Path, weights: Collection[str]) -> None:
    if item.size == 0 and item.path.suffix in NEVER_EMPTY:
        raise InputError(f"The file {item.path} is empty. Convert or download the model again, or remove the file.")
    if item.size > MAX_FILE:
        advice = "Remove it."
        if item.name in weights:
            advice = f"Save the model in smaller files and release those: {reshard_command(folder)}"
        raise InputError(
            f"{item.path} has {item.size / 1e9:.1f} GB, but the Hub takes files of up to {MAX_FILE / 1e9:g} GB. "
            f"{advice}"
        )


def reshard_command(folder: Path) -> str:
    """A command that writes the model in `folder` beside it, in smaller files, all other files as they are."""
    source, target = (json.dumps(f"{folder.absolute()}{end}", ensure_ascii=False) for end in ("", "-shards"))
    code = (
        "import shutil, llava_norm_align; from transformers import AutoModelForImageTextToText as Auto; "
        f'Auto.from_pretrained({source}, dtype="auto").save_pretrained({target}, max_shard_size="{SHARD}"); '
        f"shutil.copytree({source}, {target}, dirs_exist_ok=True, "
        'ignore=shutil.ignore_patterns("*.safetensors*", "checkpoint-*"))'
    )
    return f"python -c {shlex.quote(code)}"


def _check_secrets(path: Path, token: str | None) -> None:
    """InputError, which does not show it, if a line of `path` holds `token` or something like a password."""
    text = path.read_bytes().decode(errors="replace")
    places = [(text.find(token), "the token that you are logged in with")] if token else []
    places += [
        (match.start(), what)
        for what, patterns in SECRETS.items()
        for pattern in patterns
        for match in re.finditer(pattern, text)
        if what == "a password in an address" or not text[match.start() - 1 : match.start()].isalnum()
    ]
    for start, what in sorted(place for place in places if place[0] >= 0):
        raise InputError(
            f"Line {text.count(chr(10), 0, start) + 1} of {path} holds {what}, which everyone could read. Remove it "
            "there, and make a new one, as this one may be known already."
        )


def _notes(items: list[Item]) -> list[str]:
    """What the publisher should know of files that go up."""
    notes = []
    for item in items:
        if item.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            notes.append(
                f"{item.name} has {item.size / 1e9:.1f} GB: above {constants.MAX_HTTP_DOWNLOAD_SIZE / 1e9:g} GB only "
                "those with hf_xet can download it"
            )
        if os.path.basename(item.name) == "attention_map.png":
            notes.append(f"{item.name} shows one of the images that were diagnosed")
    return notes
