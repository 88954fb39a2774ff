"""predictions.jsonl: what a model answered, one line a row, kept as it comes so that a run can go on.

The first line holds the settings of the run; a file of other settings is not gone on with.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.results import SCHEMA_VERSION, provenance, write_text
from llava_norm_align.evaluation.settings import first_difference

Key = tuple[str, str]  # the task's name and the row's id
AFRESH = "Name another --out, or start afresh with --overwrite."


def read_predictions(path: Path, settings: Mapping[str, Any], keys: Iterable[Key]) -> tuple[dict[Key, Any], bool]:
    """The answers in `path` by task and id, and whether its last line was cut off, as a kill may leave it.

    A line of a row that failed is left out, so that the row is asked again. InputError if the file is of other
    settings, or broken otherwise than in its last line: a line that is no JSON, a row that comes twice or is not
    among `keys`.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}, False
    *lines, rest = content.split(b"\n")
    cut = bool(rest)
    if not lines:  # the header itself was cut off: nothing is lost
        return {}, cut
    parsed = [_parse(line, number, path) for number, line in enumerate(lines, start=1)]
    head, rows = parsed[0], parsed[1:]
    if head.get("schema_version") != SCHEMA_VERSION or not isinstance(head.get("settings"), dict):
        raise InputError(f"The first line of {path} is not the head of a predictions file. {AFRESH}")
    difference = first_difference(head["settings"], settings)
    if difference:
        name, there, here = difference
        raise InputError(
            f"{path} holds answers of a run with another {name}: {there} there, {here} now. Its answers cannot be "
            f"mixed with new ones. {AFRESH}"
        )
    known, found = set(keys), {}
    for number, row in enumerate(rows, start=2):
        key = (row.get("task"), row.get("id"))
        if key not in known or not isinstance(row.get("prediction"), (str, type(None))):
            raise InputError(f"Line {number} of {path} is no answer to a question of this test set. {AFRESH}")
        if key in found:
            raise InputError(f"Line {number} of {path} answers {key[1]} of {key[0]} a second time. {AFRESH}")
        found[key] = row
    return {key: row for key, row in found.items() if row["prediction"] is not None}, cut


def _parse(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise InputError(
            f"Line {number} of {path} is not a JSON object, and it is not a last line that a kill cut off: the file "
            f"is damaged. {AFRESH}"
        )
    return content


class PredictionsFile:
    """Appends whole lines; each call of `add` is on the disk when it returns."""

    def __init__(self, path: Path, settings: Mapping[str, Any], kept: Iterable[Mapping[str, Any]]):
        """Start `path` with the head and the rows `kept` of an earlier run, in one step."""
        head = {**provenance(), "settings": settings}
        write_text(path, "".join(_line(content) for content in (head, *kept)))
        self._file = path.open("ab")

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._file.write("".join(map(_line, rows)).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> "PredictionsFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
