"""evaluation.md and the terminal's tables: accuracies as in the paper's Table 4, differences, caveats."""

from collections.abc import Callable
from typing import Any

from llava_norm_align.diagnosis.formats import code_block, counted, escape, markdown_table, printable, text_table

NAME = 40  # columns


def markdown(result: dict[str, Any]) -> str:
    """The content of evaluation.md."""
    parts = ["## Evaluation\n", markdown_table(score_rows(result, escape)), ""]
    types = type_rows(result, escape)
    if types:
        parts += ["### By question type\n", markdown_table(types), ""]
    if result["differences"]:
        parts += [f"### {difference_title(result, escape)}\n", markdown_table(difference_rows(result, escape)), ""]
    parts += [f"- {escape(note)}" for note in notes(result)]
    for overlay in result["diagnoses"]:
        if overlay["table"]:
            parts += [f"\n### Diagnosis beside that of {escape(overlay['baseline'])}\n", _block(overlay["table"])]
            parts += [f"\n![{path.rpartition('/')[2]}]({path})" for path in overlay["plots"]]
        if overlay["missing"]:
            parts.append(f"\nNo diagnosis beside that of {escape(overlay['baseline'])}: {escape(overlay['missing'])}")
    parts += ["\n### How it was measured\n", *_facts(result), "\nTo repeat it:\n", code_block(result["command"])]
    return "\n".join(parts) + "\n"


def text(result: dict[str, Any]) -> str:
    """The tables for a terminal."""
    parts = ["Accuracy in percent (95 % interval)", text_table(score_rows(result, printable))]
    types = type_rows(result, printable)
    if types:
        parts += ["", "By question type", text_table(types)]
    if result["differences"]:
        parts += ["", difference_title(result, printable), text_table(difference_rows(result, printable))]
    parts += ["", *notes(result)]
    for overlay in result["diagnoses"]:
        parts += ["", overlay["table"] or "No diagnoses beside each other:"]
        parts += [overlay["missing"]] if overlay["missing"] else []
    return "\n".join(parts)


def score_rows(result: dict[str, Any], name: Callable[[Any], str]) -> list[list[str]]:
    """A row for each model, a column for each test set, and their mean; the last row counts the questions."""
    average = result["average"]
    rows = [["model", "method", *map(name, result["tasks"]), *(["Avg"] if average else [])]]
    for position, model in enumerate(result["models"]):
        cells = [_share(score) for score in _scores(result, position, None)]
        mean = [f"{100 * average['accuracy'][position]:.2f}"] if average else []
        rows.append([name(model["label"]), name(model["method"]), *cells, *mean])
    counts = [f"{task['rows']:,}" for task in result["tasks"].values()]
    rows.append(["questions", "", *counts, *([""] if average else [])])
    return rows


def type_rows(result: dict[str, Any], name: Callable[[Any], str]) -> list[list[str]]:
    """A row for each task and question type, a column for each model; none if no task has types."""
    kinds = [(s["task"], s["type"], s["n"]) for s in result["scores"] if s["type"] is not None and s["model"] == 0]
    if not kinds:
        return []
    rows = [["task: type", "n", *(name(model["label"]) for model in result["models"])]]
    for task, kind, n in kinds:
        cells = [_share(s) for s in result["scores"] if (s["task"], s["type"]) == (task, kind)]
        rows.append([f"{name(task)}: {name(kind)}", f"{n:,}", *cells])
    return rows


def difference_title(result: dict[str, Any], name: Callable[[Any], str]) -> str:
    return f"{name(result['models'][0]['label'])} less its baselines, in percentage points (95 % interval)"


def difference_rows(result: dict[str, Any], name: Callable[[Any], str]) -> list[list[str]]:
    """A row for each baseline, task and type."""
    rows = [["task: type", "baseline", "n", "difference", "only model / only baseline right", "McNemar's p", ""]]
    means = [{"task": "Avg", "type": None, **one} for one in (result["average"] or {"differences": []})["differences"]]
    entries = sorted([*result["differences"], *means], key=lambda one: one["baseline"])
    for one in entries:
        baseline = result["models"][one["baseline"]]["label"]
        what = name(one["task"]) if one["type"] is None else f"{name(one['task'])}: {name(one['type'])}"
        p = one["mcnemar_p"]
        only = "-" if p is None else f"{one['only_first_right']} / {one['only_second_right']}"
        rows.append([what, name(baseline), f"{one['n']:,}", _points(one), only, _p(p), verdict(one)])
    return rows


def verdict(one: dict[str, Any]) -> str:
    """What a difference shows: the model is higher or lower, or nothing."""
    if not one["resolved"]:
        return "not resolved"
    return "higher" if one["difference"] > 0 else "lower"


def notes(result: dict[str, Any]) -> list[str]:
    """What the numbers do not show."""
    models = result["models"]
    found = []
    limit = result["settings"]["limit"]
    if limit is not None:
        found.append(f"Only the first {counted(limit, 'row')} of each test set were asked (--limit).")
    if result["differences"]:
        compared = len(result["differences"])
        found.append(
            "not resolved: the interval holds 0 or is missing, McNemar's exact p is 0.05 or more, or a model has 2 to "
            "4 seeds; the data do not say which model is better, and not that they are equal."
        )
        if all(len(model["folders"]) == 1 for model in models):
            found.append(
                "One training of each model: the intervals cover the choice of questions, not that of the seed. "
                "Another seed may turn the sign."
            )
        else:
            found.append(
                "The intervals cover the choice of questions and, of each model with several, that of its seeds; with "
                "few seeds they are too narrow, as a bootstrap of few is."
            )
        if any(one["images"] < one["n"] for one in result["differences"]):
            found.append(
                "Some questions share an image: the intervals of differences draw them together; those of accuracies "
                "of one training, and McNemar's p, take questions as independent and so are too sure."
            )
        if result["average"] and result["average"]["shared_images"]:
            found.append(
                "Some test sets share images, which the interval of Avg takes for different ones: too narrow."
            )
        if compared > 1:
            found.append(
                f"{compared} comparisons without a correction: of true zeros, about 1 in 20 is resolved by chance."
            )
    for model in models:
        for folder in model["folders"]:
            if folder["failed"] or folder["empty"]:
                found.append(
                    f"{folder['name']}: {folder['failed']} failed and {folder['empty']} empty answers count as wrong."
                )
    return found


def _facts(result: dict[str, Any]) -> list[str]:
    settings = result["settings"]
    generation = settings["generation"]
    facts = [
        f"greedy, at most {counted(generation['max_new_tokens'], 'token')} an answer, dtype {generation['dtype']}"
        f"{', 4 bits' if generation['load_in_4bit'] else ''}, batches of {settings['batch_size']}",
        f"prompt: {settings['prompt']['with_image']}",
        *(f"{name}: {task['rows']:,} rows, sha256 {task['sha256']}" for name, task in result["tasks"].items()),
        *(
            f"{folder['name']}: weights, sha256 {folder['weights_sha256']}; answers in {folder['predictions']}"
            for model in result["models"]
            for folder in model["folders"]
        ),
        ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
    ]
    return [f"- {escape(fact)}" for fact in facts]


def _scores(result: dict[str, Any], model: int, kind: str | None) -> list[dict[str, Any]]:
    return [one for one in result["scores"] if one["model"] == model and one["type"] == kind]


def _share(score: dict[str, Any]) -> str:
    value = f"{100 * score['accuracy']:.2f}"
    ends = score["interval"]
    return value if ends is None else f"{value} ({100 * ends[0]:.2f} to {100 * ends[1]:.2f})"


def _points(one: dict[str, Any]) -> str:
    value = f"{100 * one['difference']:+.2f}"
    ends = one["interval"]
    return value if ends is None else f"{value} ({100 * ends[0]:+.2f} to {100 * ends[1]:+.2f})"


def _p(p: float | None) -> str:
    if p is None:
        return "-"
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def _block(lines: str) -> str:
    return f"```text\n{lines.replace('`', chr(39))}\n```"
