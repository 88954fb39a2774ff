"""What a card says of a model's answers: scores for the metadata, tables with intervals, and what they do not show."""

import copy
import re
from typing import Any

from huggingface_hub import EvalResult

from llava_norm_align.common.results import FOLDER
from llava_norm_align.diagnosis.formats import counted, escape, finite, markdown_table
from llava_norm_align.evaluation import report
from llava_norm_align.evaluation.lmms import lmms_table
from llava_norm_align.evaluation.text_tasks import text_table
from llava_norm_align.release.card_results import Results, public, short, written

TASK = "image-text-to-text"
NONE = "## Evaluation\n\nNo evaluation of these weights lies in the folder, which so does not say how well it answers."


def scores(results: Results) -> list[EvalResult]:
    """The model's own scores, for the model-index of the front matter, which has a place for the name of a metric but
    none for its interval: the name says it.
    """
    found = []
    if results.evaluation:
        found += written(results, "evaluation", lambda content: _own_scores(content, results.weights))
    for name, task in (("text", "text-generation"), ("lmms", TASK)):
        if getattr(results, name):
            found += written(results, name, lambda content, task=task: _harness_scores(content, results.weights, task))
    return found


def evaluation(results: Results) -> str:
    """The section; that nothing was measured, if so."""
    parts = [written(results, "evaluation", _own_text)] if results.evaluation else []
    for name in ("text", "lmms"):
        if getattr(results, name):
            told = written(results, name, lambda content, name=name: _harness_text(content, name, results.weights))
            parts.append(told)
    return "\n\n".join(["## Evaluation", *parts]) if parts else NONE


def _own_scores(content: dict[str, Any], weights: str) -> list[EvalResult]:
    """Of these weights alone, where the evaluation is of several seeds; the interval is that of all its seeds."""
    seed = [folder["weights_sha256"] for folder in content["models"][0]["folders"]].index(weights)
    first = [one for one in content["scores"] if one["model"] == 0 and one["type"] is None]
    limit = content["settings"]["limit"]
    found = []
    for one in first:
        ends = one["interval"] if len(one["seeds"]) == 1 else None
        error = "" if ends is None else f", 95 % interval {ends[0]:.4g} to {ends[1]:.4g}"
        found.append(score(TASK, one["task"], "accuracy", one["seeds"][seed], one["n"], limit, error))
    return found


def _harness_scores(content: dict[str, Any], weights: str, task: str) -> list[EvalResult]:
    own = {name for name, digest in content["weights_sha256"].items() if digest == weights}
    limit = content["settings"].get("limit")
    found = []
    for row in content["rows"]:
        if row["model"] in own and finite(row["value"]) is not None:
            error = "" if row.get("stderr") is None else f", standard error {row['stderr']:.4g}"
            found.append(score(task, row["task"], row["metric"], row["value"], row["n"], limit, error))
    return found


def score(
    task: str, dataset: str, metric: str, value: float, n: int | None, limit: int | None, error: str = ""
) -> EvalResult:
    """A plain float: YAML would write numpy's numbers as Python objects. `error`: words on it, for its name."""
    questions = "" if n is None else f", {counted(int(n), 'question')}"
    part = "" if limit is None else f", the first {int(limit)} only"
    return EvalResult(
        task_type=task,
        dataset_type=_identifier(dataset),
        dataset_name=f"{short(dataset, 60)}{part}",
        metric_type=_identifier(metric),
        metric_name=f"{short(metric, 60)}{questions}{error}",
        metric_value=round(float(value), 6),
    )


def _identifier(name: Any) -> str:
    """`name` in the characters that the Hub takes in an identifier."""
    text = re.split(r"[/\\]", str(name).rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:60] or "unnamed"


def _own_text(content: dict[str, Any]) -> str:
    """The tables of evaluation.md with names that anyone may read, and its notes."""
    shown = copy.deepcopy(content)
    for model in shown["models"]:
        model |= {"label": public(model["label"], 60), "method": escape(model["method"])}
        for folder in model["folders"]:
            folder |= {"name": public(folder["name"], 60)} | {key: int(folder[key]) for key in ("failed", "empty")}
    seeds = len(shown["models"][0]["folders"])
    shown["models"][0]["label"] = "this model" if seeds == 1 else f"this training ({seeds} seeds)"
    shown["tasks"] = {public(name): task for name, task in content["tasks"].items()}
    for one in [*shown["scores"], *shown["differences"]]:
        one["task"] = public(one["task"])
        one["type"] = one["type"] if one["type"] is None else escape(one["type"])
    for one in shown["differences"]:
        if one["mcnemar_p"] is not None:
            one |= {key: int(one[key]) for key in ("only_first_right", "only_second_right")}
    generation = content["settings"]["generation"]
    intro = (
        f"Greedy answers of at most {counted(int(generation['max_new_tokens']), 'token')}, dtype "
        f"{escape(generation['dtype'])}; percent of right answers with the 95 % interval."
    )
    parts = [intro, markdown_table(report.score_rows(shown, str))]
    if shown["differences"]:
        title = report.difference_title(shown, str)
        parts += [f"Differences: {title}.", markdown_table(report.difference_rows(shown, str))]
    parts.append("\n".join(f"- {note}" for note in report.notes(shown)))
    parts.append(f"How it was measured: [{FOLDER}/evaluation.md]({FOLDER}/evaluation.md).")
    return "\n\n".join(part for part in parts if part)


def _harness_text(content: dict[str, Any], name: str, weights: str) -> str:
    """The tables and notes of evaluation-text.md or evaluation-lmms.md, with names that anyone may read."""
    fit, table = (public, text_table) if name == "text" else (short, lmms_table)  # the latter escapes names itself
    names = {typed: fit(shown) for typed, shown in _names(content, weights).items()}
    shown = copy.deepcopy(content) | {"models": [names[typed] for typed in content["models"]]}
    for row in shown["rows"]:
        row |= {key: fit(row[key]) for key in ("task", "metric")} | {"model": names[row["model"]], "n": int(row["n"])}
    shown["harness"], shown["settings"]["dtype"] = (
        fit(one) for one in (content["harness"], content["settings"]["dtype"])
    )
    limit = content["settings"].get("limit")
    shown["settings"]["limit"] = None if limit is None else int(limit)
    if name == "text":
        shown["untouched"] = content["untouched"] and public(content["untouched"])
    else:
        shown["settings"]["tasks"] = list(map(short, content["settings"]["tasks"]))
        own = content["weights_sha256"].get(content["models"][0]) == weights
        shown["differences"] = content["differences"] if own else []  # they are the first model's
        shown["differences"] = [one | {"baseline": names[one["baseline"]]} for one in shown["differences"]]
    parts = [f"### {escape(short(content['harness']))}", table(shown).strip()]
    more = f"{FOLDER}/evaluation-{name}.json"
    return "\n\n".join([*parts, f"The numbers: [{more}]({more})."])


def _names(content: dict[str, Any], weights: str) -> dict[str, str]:
    """What the tables call each model: its short name, and digits of its weights where another has the same."""
    hashes = content["weights_sha256"]
    typed = list(dict.fromkeys([*content["models"], *(row["model"] for row in content["rows"])]))
    names = {name: "this model" if hashes.get(name) == weights else short(name, 60) for name in typed}
    alike = [shown for shown in names.values() if list(names.values()).count(shown) > 1]
    for number, (name, shown) in enumerate(names.items(), start=1):
        if shown in alike:
            names[name] = f"{shown} ({number}, weights {str(hashes.get(name))[:8]})"
    return names
