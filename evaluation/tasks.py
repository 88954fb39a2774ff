"""Test sets: easy-VQA and files in LLaVA's JSON, as rows of one question with one answer each."""

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.results import sha256_file
from llava_norm_align.data import easy_vqa, llava_json
from llava_norm_align.evaluation.matching import LETTERS, chosen, normalise

SHAPES = ("circle", "rectangle", "triangle")
MATCHES = ("exact", "normalised")  # what "match" of a row may be; with "choices" it is "choice"
OPTIONS = "Answer with the option's letter from the given choices directly."  # LLaVA-1.5's, arXiv 2310.03744


@dataclass(frozen=True, slots=True)
class Question:
    """One row of a test set. `prompt` has the options if there are any; `match`: see matching.is_right."""

    id: str
    image: Path | None
    prompt: str
    answer: str
    type: str | None = None
    match: str = "normalised"
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """A test set. `sha256`: of its rows and the bytes of their images, by which two runs are told apart."""

    name: str
    rows: tuple[Question, ...]
    sha256: str


def load_tasks(names: Sequence[str], images: Path | None = None, limit: int | None = None) -> list[Task]:
    """The test sets `names`: keys of TASKS, or files in the form of docs/evaluate.md; of each the first `limit` rows.

    One name may hold several with commas between them.

    `images`: the folder that image paths in the files start from, by default each file's own. InputError for an
    unknown name, a set without rows, an id that comes twice, a row of another form and an image that is not there.
    """
    names = [part for name in names for part in ([name] if Path(name).is_file() else name.split(",")) if part]
    if not names:
        raise InputError(f"--tasks names no test set. Name {_known()}.")
    if limit is not None and limit < 1:
        raise InputError(f"--limit is {limit}, but at least 1 row was expected. Raise it, or leave it out.")
    found = []
    for name in names:
        if name in GROUPS:
            raise InputError(f"--tasks names {name} among others, but a group runs alone. Run evaluate for it apart.")
        rows = TASKS[name]() if name in TASKS else _read_file(name, images)
        label = name if name in TASKS else Path(name).stem
        if label in (task.name for task in found):
            raise InputError(f"--tasks names two test sets called {label}. Rename a file, or leave one out.")
        _check(rows, name)
        rows = rows[:limit]
        found.append(Task(label, tuple(rows), _digest(rows)))
    return found


def load_easy_vqa() -> list[Question]:
    """easy-VQA's 9,673 test questions in the order of the package; the types are shape, colour and yes/no."""
    return [
        Question(str(index), row.image, row.question, row.answer, _easy_type(row.answer))
        for index, row in enumerate(easy_vqa.load_questions("test", yes_no=True))
    ]


TASKS: dict[str, Callable[[], list[Question]]] = {"easy-vqa": load_easy_vqa}
GROUPS = ("paper", "llava", "lmms", "text")  # what groups.evaluate_any runs in a harness


def _easy_type(answer: str) -> str:
    return "yes/no" if answer in ("yes", "no") else "shape" if answer in SHAPES else "colour"


def _known() -> str:
    return f"{', '.join(TASKS)}, a JSON file of questions, or a group: paper, llava, text (docs/evaluate.md)"


def _read_file(name: str, images: Path | None) -> list[Question]:
    path = Path(name)
    if not path.is_file() and path.suffix != ".json" and "/" not in name:
        near = difflib.get_close_matches(name.lower(), [*TASKS, *GROUPS], n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise InputError(f"--tasks names {name}, which is not known. Name {_known()}.{hint}")
    folder = (images or path.parent).absolute()
    if images is not None and not images.is_dir():
        raise InputError(f"--images is {images}, which is not a folder. Name the folder that image paths start from.")
    text, _ = llava_json.read_text(path)
    rows = []
    for index, (_, _, entry) in enumerate(llava_json.entries(text, path)):
        row, faults = llava_json.parse_row(entry, index, folder)
        sentence = faults[0].sentence if faults else None
        if row is not None and sentence is None:
            sentence = _other_form(row, entry)
        if row is None or sentence is not None:
            id = faults[0].id if faults else row.id
            raise InputError(
                f"Row {index} of {path} (from 0, id {id}) is no question with an answer: {sentence} "
                "Correct the row, or leave it out."
            )
        rows.append(_question(row, entry))
    return rows


def _other_form(row: llava_json.Row, entry: dict[str, Any]) -> str | None:
    """What is wrong with a row of LLaVA's JSON as a row of a test set."""
    if len(row.turns) != 2:
        return f"It has {len(row.turns)} turns, but one of human and one of gpt were expected."
    if not row.turns[0].text.strip():
        return "Its question is empty."
    kind, match, choices = (entry.get(key) for key in ("type", "match", "choices"))
    if kind is not None and (not isinstance(kind, str) or not kind.strip()):
        return f"Its type is {kind!r}, but a name was expected."
    answer = row.turns[1].text
    if choices is None:
        if match is not None and match not in MATCHES:
            return f"Its match is {match!r}, but {' or '.join(MATCHES)} was expected."
        if match != "exact" and not normalise(answer):
            return f'Its answer {answer!r} has only articles and punctuation; "match": "exact" was expected.'
        return None
    if match is not None:
        return "It has both match and choices; options are always compared by their letters."
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice.strip() for choice in choices):
        return "Its choices are no list of texts."
    if not 2 <= len(choices) <= len(LETTERS):
        return f"It has {len(choices)} choices, but 2 to {len(LETTERS)} were expected."
    if len(set(choices)) < len(choices):
        return "Two of its choices are the same."
    if chosen(answer, choices) is None:
        return f"Its answer {answer!r} is neither the letter nor the text of one of its choices."
    return None


def _question(row: llava_json.Row, entry: dict[str, Any]) -> Question:
    prompt, answer = (turn.text for turn in row.turns)
    question = Question(row.id, row.image, prompt, answer, entry.get("type"), entry.get("match") or "normalised")
    if "choices" not in entry or entry["choices"] is None:
        return question
    options = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, entry["choices"], strict=False)]
    return replace(
        question, prompt="\n".join([prompt, *options, OPTIONS]), match="choice", choices=tuple(entry["choices"])
    )


def _check(rows: Sequence[Question], name: str) -> None:
    if not rows:
        raise InputError(f"The test set {name} has 0 rows. Name one with questions.")
    id, count = Counter(row.id for row in rows).most_common(1)[0]
    if count > 1:
        raise InputError(f"The id {id} occurs {count} times in the test set {name}. Give each row an id of its own.")
    present = {image: image.is_file() for image in {row.image for row in rows if row.image is not None}}
    missing = [row for row in rows if not present.get(row.image, True)]
    if missing:
        raise InputError(
            f"{len(missing)} rows of the test set {name} name an image that is not there, such as {missing[0].image} "
            f"(id {missing[0].id}). Name the folder that the paths start from with --images, or correct the rows."
        )
    for row in rows:
        if row.image is not None and present.pop(row.image, False):
            try:
                Image.open(row.image).close()  # the header alone
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                raise InputError(
                    f"{row.image}, of row {row.id} of the test set {name}, is no image that can be read "
                    f"({type(error).__name__}). Repair it, or leave the row out."
                ) from None


def _digest(rows: Sequence[Question]) -> str:
    hashes: dict[Path | None, str | None] = {None: None}
    lines = []
    for row in rows:
        if row.image not in hashes:
            hashes[row.image] = sha256_file(row.image)
        lines.append(json.dumps(asdict(row) | {"image": hashes[row.image]}, sort_keys=True) + "\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()
