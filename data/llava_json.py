"""LLaVA's JSON: a list of {"id", "image" (optional), "conversations": [{"from": "human" | "gpt", "value"}, ...]}.

Read as it is in blip_laion_cc_sbu_558k.json and llava_v1_5_mix665k.json; other fields are left alone.
"""

import hashlib
import json
import os.path
import re
import reprlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_norm_align.common.errors import InputError

IMAGE = "<image>"  # where the image stands in a value
ROLES = {"human": "user", "gpt": "assistant"}
FORMAT = 'LLaVA\'s JSON was expected: one list of {"id", "image", "conversations"}'
decoder = json.JSONDecoder()
skip_space = re.compile(r"[ \t\n\r]*").match


@dataclass(frozen=True, slots=True)
class Turn:
    """One side's text, without `<image>`. `image`: the image stands before this text."""

    role: str  # user or assistant
    text: str
    image: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation. `image` is an absolute path; None in a row of text alone."""

    id: str
    turns: tuple[Turn, ...]
    image: Path | None


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with the row at `index`, which counts from 0. `kind`: see docs/check-data.md."""

    index: int
    id: str | None
    kind: str
    sentence: str


def read_llava_json(path: Path | str, image_folder: Path | str, skip: Collection[int] = ()) -> Iterator[Row]:
    """The rows of `path` in its order, with images as paths below `image_folder`; no image is looked at.

    `skip`: positions (from 0) that are left out. InputError at the first row that has a fault in its structure, and
    for a file that is not LLaVA's JSON.
    """
    text, _ = read_text(path)
    folder = Path(image_folder).absolute()
    for index, (_, _, entry) in enumerate(entries(text, path)):
        if index in skip:
            continue
        row, faults = parse_row(entry, index, folder)
        if faults:
            raise InputError(
                f"Row {index} of {path} (from 0, id {faults[0].id}) has a fault: {faults[0].sentence} "
                "Find all faults and write a file without them: check-data with --clean."
            )
        yield row


def as_messages(row: Row) -> list[dict[str, Any]]:
    """The turns as transformers' chat templates take them: content is a list of image and text parts."""
    return [
        {
            "role": turn.role,
            "content": [{"type": "image"}] * turn.image + [{"type": "text", "text": turn.text}],
        }
        for turn in row.turns
    ]


def fits_stage_1(row: Row) -> bool:
    """Whether the row is one image and one answer."""
    return row.image is not None and len(row.turns) == 2


def parse_row(entry: Any, index: int, folder: Path) -> tuple[Row | None, list[Fault]]:
    """The row and the faults of its structure, at most one of each kind; None if its types are wrong."""
    sentence = _wrong_type(entry)
    id = _readable_id(entry)
    if sentence:
        return None, [Fault(index, id, "wrong_type", sentence)]
    name, turns = entry.get("image"), entry["conversations"]
    role_order = _role_order([turn["from"] for turn in turns])
    found = {
        "outside_folder": name and _outside(name),
        "role_order": role_order,
        # a turn that is lost or has the wrong role takes its `<image>` along
        "image_count": None if role_order else _image_count(turns, name is not None),
        "empty_answer": _empty_answer(turns),
    }
    faults = [Fault(index, id, kind, sentence) for kind, sentence in found.items() if sentence]
    row = Row(id, tuple(map(_turn, turns)), None if name is None else folder / name)
    return row, faults


def _turn(turn: dict[str, str]) -> Turn:
    role, value = ROLES.get(turn["from"], turn["from"]), turn["value"]
    if IMAGE not in value:
        return Turn(role, value)
    return Turn(role, value.replace(IMAGE, "").strip(), image=True)  # as LLaVA does, wherever `<image>` stands


def _readable_id(entry: Any) -> str | None:
    id = entry.get("id") if isinstance(entry, dict) else None
    return str(id) if _is_text(id) or (isinstance(id, int) and not isinstance(id, bool)) else None


def _is_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 can hold; half a surrogate pair from an escape in the JSON cannot."""
    if not isinstance(value, str):
        return False
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def _wrong_type(entry: Any) -> str | None:
    if not isinstance(entry, dict):
        return f"The row is {_short(entry)}, but an object was expected."
    if _readable_id(entry) is None:
        return f"Its id is {_short(entry.get('id'))}, but text or a whole number was expected."
    name, turns = entry.get("image"), entry.get("conversations")
    if name is not None and not (_is_text(name) and name and "\0" not in name):
        return f"Its image is {_short(name)}, but the path of a file was expected."
    if not isinstance(turns, list):
        return f"Its conversations are {_short(turns)}, but a list was expected."
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            return f"Its turn {number} is {_short(turn)}, but an object with from and value was expected."
        for field in ("from", "value"):
            if not _is_text(turn.get(field)):
                return f"The {field} of its turn {number} is {_short(turn.get(field))}, but text was expected."
    return None


def _outside(name: str) -> str | None:
    if os.path.isabs(name):
        return f"Its image {name} is an absolute path, but one inside of the image folder was expected."
    if os.path.normpath(name).split("/")[0] == "..":
        return f"Its image {name} leads out of the image folder."
    return None


def _role_order(roles: list[str]) -> str | None:
    if not roles:
        return "It has no turns; human and gpt in turn were expected."
    for number, role in enumerate(roles):
        expected = "gpt" if number % 2 else "human"
        if role != expected:
            return f"Its turn {number} is from {_short(role)}, but {expected} was expected."
    return "Its last turn is from human, but an answer from gpt was expected." if len(roles) % 2 else None


def _image_count(turns: list[dict[str, str]], has_image: bool) -> str | None:
    count = sum(turn["value"].count(IMAGE) for turn in turns)
    if count != has_image:
        images = "one image" if has_image else "no image"
        return f"It has {count} {IMAGE} and {images}; one {IMAGE} for each image was expected."
    if any(IMAGE in turn["value"] for turn in turns if turn["from"] == "gpt"):
        return f"Its {IMAGE} stands in an answer, but a human turn was expected to have it."
    return None


def _empty_answer(turns: list[dict[str, str]]) -> str | None:
    for number, turn in enumerate(turns):
        if turn["from"] == "gpt" and not turn["value"].strip():
            return f"The answer in its turn {number} is empty."
    return None


def _short(value: Any) -> str:
    return "missing" if value is None else reprlib.repr(value)


def read_text(path: Path | str) -> tuple[str, str]:
    """The text of a data file and the hex sha256 of its bytes. InputError if it cannot be read as UTF-8."""
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise InputError(f"The data file {path} {what}. Name a file in LLaVA's JSON format.")
    try:
        content = path.read_bytes()
        return content.decode("utf-8-sig"), hashlib.sha256(content).hexdigest()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start:,}). Save it as UTF-8.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}). Name another file, or mend this one.") from None


def entries(text: str, path: Path | str) -> Iterator[tuple[int, int, Any]]:
    """(start, end, value) of each element of the JSON list in `text`, parsed one by one; `path` is for messages."""
    at = skip_space(text).end()
    if text[at : at + 1] != "[":
        raise _no_list(text, at, path)
    at = skip_space(text, at + 1).end()
    if text[at : at + 1] == "]":
        raise InputError(f"{path} holds an empty list. {FORMAT}.")
    index = 0
    while True:
        value, end = _decode(text, at, path, f" in row {index} (from 0)")
        yield at, end, value
        at = skip_space(text, end).end()
        mark = text[at : at + 1]
        if mark == "]":
            break
        if mark != ",":
            place = f"after row {index} (from 0)"
            raise InputError(f"{path} is not JSON: {place} a comma or ] was expected, but {mark or 'its end'!r} came.")
        at, index = skip_space(text, at + 1).end(), index + 1
    if skip_space(text, at + 1).end() != len(text):
        raise InputError(f"{path} goes on after the end of its list. {FORMAT}, and nothing after it.")


def _decode(text: str, at: int, path: Path | str, where: str) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, at)
    except RecursionError:
        raise InputError(f"{path} is nested too deeply{where} to be read. {FORMAT}.") from None
    except ValueError as error:  # not JSON, or a number of thousands of digits
        raise InputError(f"{path} is not JSON{where}: {error}. {FORMAT}.") from None


def _no_list(text: str, at: int, path: Path | str) -> InputError:
    if at == len(text):
        return InputError(f"{path} is empty. {FORMAT}.")
    value, end = _decode(text, at, path, "")
    another = text.startswith("{", skip_space(text, end).end())
    if isinstance(value, dict) and (another or Path(path).suffix == ".jsonl"):
        return InputError(f"{path} holds JSON lines. {FORMAT}; write the lines into one, with commas between them.")
    kind = "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
    return InputError(f"{path} holds {kind}. {FORMAT}.")
