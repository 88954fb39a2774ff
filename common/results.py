"""Result files: JSON with the versions, the weights and the command that they came from."""

import hashlib
import json
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import llava_norm_align

SCHEMA_VERSION = 1
FOLDER = "norm_align"


def provenance() -> dict[str, Any]:
    """Schema version, library versions and the command: the head of every result file."""
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": {
            "llava_norm_align": llava_norm_align.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "command": shlex.join([*_program(), *without_secrets(sys.argv[1:])]),
    }


def _program() -> list[str]:
    """How this process was started: the name of a program, or a module of this package that was run."""
    package, module = __name__.split(".")[0], getattr(sys.modules.get("__main__"), "__spec__", None)
    if module is not None and module.name.startswith(f"{package}."):
        return ["python", "-m", module.name.removesuffix(".__main__")]
    return [Path(sys.argv[0]).name]


def without_secrets(arguments: list[str]) -> list[str]:
    """Arguments of a command, with `...` in place of the value of an option whose name has "token" or "key" in it."""
    shown, hidden = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = name.startswith("--") and {"token", "key"} & set(re.split("[-_]", name.lstrip("-")))
        if hidden and not argument.startswith("--"):
            shown.append("...")
        else:
            shown.append(f"{name}=..." if secret and equals else argument)
        hidden = bool(secret) and not equals
    return shown


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON; see write_text."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write `content` in UTF-8; see write_bytes."""
    write_bytes(path, content.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, then rename; the parent folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.writing")
    partial.write_bytes(content)
    os.replace(partial, path)


def weights_sha256(folder: Path) -> str:
    """Hex sha256 that tells the weights of a model folder: of "sha256  name" lines of its weight files, by name.

    A file in the Hub's cache is a link to a blob that is named by its sha256 and is not read again.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    lines = []
    for path in files:
        blob = path.resolve().name
        lines.append(f"{blob if re.fullmatch('[0-9a-f]{64}', blob) else sha256_file(path)}  {path.name}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
