"""A model against its baselines on the same questions, with paired statistics."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.folders import locked
from llava_norm_align.common.loading import check_placement, load_model, load_processor
from llava_norm_align.common.results import provenance, write_json, write_text
from llava_norm_align.diagnosis.files import result_folder
from llava_norm_align.evaluation import report
from llava_norm_align.evaluation.candidates import Candidate, Folder, find_candidates
from llava_norm_align.evaluation.generate import Said, answer_rows, greedy
from llava_norm_align.evaluation.matching import is_right
from llava_norm_align.evaluation.overlay import write_overlay
from llava_norm_align.evaluation.paired import accuracy, difference, import_statistics
from llava_norm_align.evaluation.predictions import Key, PredictionsFile, read_predictions
from llava_norm_align.evaluation.tasks import Question, Task, load_tasks

MOST_FAILED = 0.01  # of all rows, without an answer or with an empty one
BATCH_SIZE, MAX_NEW_TOKENS = 8, 16


def evaluate(
    model: str,
    tasks: Sequence[str],
    *,
    baselines: Sequence[str] = (),
    images: Path | None = None,
    limit: int | None = None,
    batch_size: int = BATCH_SIZE,
    max_new_tokens: int = MAX_NEW_TOKENS,
    out: Path | None = None,
    overwrite: bool = False,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | None = None,
    four_bit: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    echo: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Let `model` and `baselines` answer `tasks` greedily; write evaluation.json and .md; the former's content.

    A model is a folder, a Hub id, or several with commas between them: seeds of one training. Each row's answer is
    kept in predictions.jsonl as it comes (one file a model), and a run that was stopped goes on there; `overwrite`:
    start afresh. The files go to `out`, by default norm_align/ in the model's folder, or ./NAME-norm_align of a Hub
    id. docs/evaluate.md has the form of `tasks` and of the files. `echo` gets the tables.

    InputError for models that do not compare fairly and for other bad input, before a model is loaded; CheckFailed
    if more than 1 % of a model's answers are empty or failed.
    """
    for name, value in (("--batch-size", batch_size), ("--max-new-tokens", max_new_tokens)):
        if value < 1:
            raise InputError(f"{name} is {value}, but at least 1 was expected. Raise it, or leave it out.")
    check_placement(dtype, device, device_map, four_bit)
    if baselines or "," in model:
        import_statistics()
    loaded = load_tasks(tasks, images, limit)
    candidates = find_candidates(
        model,
        baselines,
        revision=revision,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        four_bit=four_bit,
        max_new_tokens=max_new_tokens,
    )
    first = candidates[0].folders[0]
    target = result_folder(first.name, first.path, out)
    with _made(target), locked(target / "predictions"):
        plans = []
        for candidate in candidates:
            for folder in candidate.folders:
                path = target / ("predictions.jsonl" if folder is first else f"predictions-{folder.tag}.jsonl")
                candidate.predictions.append(path)
                plans.append(_plan(path, folder, loaded, batch_size, overwrite, echo))
        for plan in plans:
            plan.complete(batch_size, dtype, device, device_map, four_bit, trust_remote_code)
        answers = {plan.path: plan.answers for plan in plans}
        result = {
            **provenance(),
            "settings": {**first.settings, "limit": limit, "batch_size": batch_size},
            "tasks": {task.name: {"rows": len(task.rows), "sha256": task.sha256} for task in loaded},
            "models": [_describe(candidate, candidates, answers) for candidate in candidates],
            **_statistics(candidates, loaded, answers),
        }
        result["diagnoses"] = [write_overlay(candidates[0], other, target) for other in candidates[1:]]
        write_json(target / "evaluation.json", result)
        write_text(target / "evaluation.md", report.markdown(result))
    echo(report.text(result))
    echo(f"Written: {target / 'evaluation.json'}, evaluation.md and {len(plans)} predictions file(s) beside them")
    return result


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make `folder`; it goes again if the block left it empty."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()


class _Plan:
    """What one model has answered, and what it has still to be asked."""

    def __init__(self, path: Path, folder: Folder, tasks: Sequence[Task], settings: dict[str, Any]):
        self.path, self.folder, self.settings = path, folder, settings
        self.rows: dict[Key, Question] = {(task.name, row.id): row for task in tasks for row in task.rows}
        self.answers: dict[Key, dict[str, Any]] = {}

    def complete(
        self,
        batch_size: int,
        dtype: str,
        device: str | None,
        device_map: str | None,
        four_bit: bool,
        trust_remote_code: bool,
    ) -> None:
        """Ask what is missing, and write it down batch by batch. CheckFailed once too much of it fails."""
        todo = [key for key in self.rows if key not in self.answers]
        if not todo:
            _check_failures(self)
            return
        place = self.folder.path
        model = load_model(
            place, dtype, device, device_map=device_map, four_bit=four_bit, trust_remote_code=trust_remote_code
        )
        processor = load_processor(place, trust_remote_code)
        rows = [self.rows[key] for key in todo]
        done = len(self.rows) - len(todo)
        bar = tqdm(total=len(self.rows), initial=done, desc=self.folder.label, unit="question", disable=None)
        longest = self.settings["generation"]["max_new_tokens"]
        file = PredictionsFile(self.path, self.settings, self.answers.values())
        with bar, file, greedy(model, processor, longest):
            prompts, images = [row.prompt for row in rows], [row.image for row in rows]
            for batch in answer_rows(model, processor, prompts, images, batch_size):
                new = {todo[i]: _row(todo[i], rows[i], said) for i, said in batch}
                file.add(new.values())
                self.answers |= new
                bar.update(len(new))
                _check_failures(self)


def _plan(
    path: Path,
    folder: Folder,
    tasks: Sequence[Task],
    batch_size: int,
    overwrite: bool,
    echo: Callable[[str], None],
) -> _Plan:
    settings = {
        "model": {"weights_sha256": folder.weights, "config_sha256": folder.config},
        "test_sets": {task.name: {"rows": len(task.rows), "sha256": task.sha256} for task in tasks},
        **folder.settings,
        "batch_size": batch_size,  # in bfloat16 a few answers depend on it
    }
    plan = _Plan(path, folder, tasks, settings)
    if overwrite:
        return plan
    plan.answers, cut = read_predictions(path, settings, plan.rows)
    for key, row in plan.answers.items():
        row["correct"] = _right(plan.rows[key], row["prediction"])
    if cut:
        echo(f"The last line of {path} was cut off, as by a kill; it is dropped, and its question asked again.")
    if plan.answers:
        echo(f"{path} has {len(plan.answers):,} of {len(plan.rows):,} answers of {folder.label}; they are kept.")
    return plan


def _row(key: Key, question: Question, said: Said) -> dict[str, Any]:
    row = {
        "task": key[0],
        "id": key[1],
        "type": question.type,
        "prompt": question.prompt,
        "answer": question.answer,
        "prediction": said.text,
        "correct": _right(question, said.text),
        "seconds": round(said.seconds, 4),
    }
    return row if said.error is None else row | {"error": said.error}


def _right(question: Question, said: str | None) -> bool:
    return said is not None and is_right(said, question.answer, question.match, question.choices)


def _failures(answers: dict[Key, dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows that failed, and those with an empty answer."""
    failed = [row for row in answers.values() if row["prediction"] is None]
    return failed, [row for row in answers.values() if row["prediction"] == ""]


def _check_failures(plan: _Plan) -> None:
    failed, empty = _failures(plan.answers)
    if len(failed) + len(empty) <= MOST_FAILED * len(plan.rows):
        return
    reasons = [f"{row['id']} of {row['task']}: {row['error']}" for row in failed[:3]]
    reasons += [f"{row['id']} of {row['task']}: no words" for row in empty[: 3 - len(reasons)]]
    raise CheckFailed(
        f"{plan.folder.name} left more than 1 % of {len(plan.rows):,} questions without an answer: {len(failed)} "
        f"failed and {len(empty)} were empty of the {len(plan.answers):,} asked ({'; '.join(reasons)}). A score would "
        f"hide that, so none is written; the answers are in {plan.path}. Check the model with ask and doctor."
    )


def _describe(
    candidate: Candidate, candidates: Sequence[Candidate], answers: dict[Path, dict[Key, Any]]
) -> dict[str, Any]:
    folders = []
    for folder, path in zip(candidate.folders, candidate.predictions, strict=True):
        failed, empty = _failures(answers[path])
        folders.append(
            {
                "name": folder.name,
                "revision": folder.revision,
                "weights_sha256": folder.weights,
                "predictions": path.name,
                "failed": len(failed),
                "empty": len(empty),
                "seconds": round(sum(row["seconds"] for row in answers[path].values()), 1),
            }
        )
    role = "model" if candidate is candidates[0] else "baseline"
    return {"label": candidate.label(candidates), "role": role, "method": candidate.method, "folders": folders}


def _statistics(
    candidates: Sequence[Candidate], tasks: Sequence[Task], answers: dict[Path, dict[Key, Any]]
) -> dict[str, Any]:
    """`scores` of every model and `differences` of the first to each other, by task and type; and over the tasks."""
    scores, differences = [], []
    wholes: list[list[np.ndarray]] = [[] for _ in candidates]
    all_images: list[np.ndarray] = []
    for task in tasks:
        types = list(dict.fromkeys(row.type for row in task.rows if row.type is not None))
        right = [
            np.array([[answers[path][task.name, row.id]["correct"] for row in task.rows] for path in one.predictions])
            for one in candidates
        ]
        images = _images(task)
        all_images.append(images)
        for whole, array in zip(wholes, right, strict=True):
            whole.append(array)
        for kind in (None, *types):
            picked = np.array([kind is None or row.type == kind for row in task.rows])
            where = {"task": task.name, "type": kind}
            parts = [array[:, picked] for array in right]
            shown = images[picked]
            scores += [where | {"model": position} | accuracy(part, shown) for position, part in enumerate(parts)]
            differences += [
                where | {"baseline": position} | difference(parts[:1], [part], [shown])
                for position, part in enumerate(parts[1:], start=1)
            ]
    average = None
    if len(tasks) > 1:
        shown = [{row.image for row in task.rows if row.image is not None} for task in tasks]
        average = {
            "shared_images": len(set().union(*shown)) < sum(map(len, shown)),
            "accuracy": [float(np.mean([array.mean() for array in whole])) for whole in wholes],
            "differences": [
                {"baseline": position} | difference(wholes[0], whole, all_images)
                for position, whole in enumerate(wholes[1:], start=1)
            ],
        }
    return {"scores": scores, "differences": differences, "average": average}


def _images(task: Task) -> np.ndarray:
    """The number of each row's image; a row without one has a number of its own."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(row.image or row.id, len(numbers)) for row in task.rows])
