"""Image benchmarks through lmms-eval: the scores of several models, and the first one's paired differences."""

import difflib
import importlib.metadata
import importlib.util
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import check_placement, load_config, resolve_weights
from llava_norm_align.common.results import write_json
from llava_norm_align.common.weights import read_json
from llava_norm_align.diagnosis.formats import escape, markdown_table
from llava_norm_align.evaluation.harness import last_words, run_and_show, score_rows
from llava_norm_align.evaluation.lmms_samples import RIGHT_ANSWERS, Samples, paired_differences, read_samples
from llava_norm_align.evaluation.paired import import_statistics
from llava_norm_align.evaluation.report import verdict

# names in lmms-eval's own registry
PAPER_TASKS = ("mmbench_en_dev", "mmstar", "pope", "seedbench_2", "ocrbench", "scienceqa_img", "ai2d")
LLAVA_TASKS = (*PAPER_TASKS, "mme", "gqa", "textvqa_val", "vqav2_val")
JUDGED = "mmbench_en_dev"
MODEL = "llava_norm_align"
NOT_INSTALLED = (
    "This evaluation needs lmms-eval, which is not installed here. It wants an environment of its own: pip install "
    "torch, then pip install --no-deps -r constraints/lmms.txt -e . in a clone (docs/evaluate.md)."
)
# a task's metric for the table of all, and what makes percent of it (MME's is a sum of points); others: their first
HEADLINES = {
    "mmbench_en_dev": ("gpt_eval_score", 1),
    "mmstar": ("average", 100),
    "pope": ("pope_accuracy", 100),
    "seedbench_2": ("seed_all", 100),
    "ocrbench": ("ocrbench_accuracy", 100),
    "scienceqa_img": ("exact_match", 100),
    "ai2d": ("exact_match, flexible-extract", 100),
    "mme": ("mme_perception_score", 1),
    "gqa": ("exact_match", 100),
    "textvqa_val": ("exact_match", 100),
    "vqav2_val": ("exact_match", 100),
}
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
RETRIED = re.compile(r"RetryError\[.* raised (\w+)>\]")
ERROR = re.compile(r"^(?:Error: |[^|]*\| ERROR +\| [^-]* - (?:Error during evaluation: )?)(.*)")


def manifest() -> Any:
    """The ModelManifest that lmms-eval reads through the entry point: where the class of MODEL is."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(MODEL, simple_class_path="llava_norm_align.evaluation.lmms_model.LlavaNormAlign")


def evaluate_lmms(
    models: Sequence[str],
    *,
    tasks: Sequence[str],
    revision: str | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | None = None,
    four_bit: bool = False,
    trust_remote_code: bool = False,
    scratch: Path | None = None,
    include_path: Path | None = None,
) -> dict[str, Any]:
    """Run lmms-eval's `tasks` on each of `models`; returns models, harness, settings, rows and differences for JSON.

    `models`: folders or Hub ids, the first at `revision`. `tasks`: names of tasks, groups or tags of lmms-eval, or of
    the folder `include_path`. `limit`: the first so many questions of each task. `scratch`: the folder for logs while
    it runs. The rows are lmms-eval's own scores; `differences` are of the first model to each other one, paired by
    question (lmms_samples.paired_differences).
    InputError if lmms-eval is not installed, for unknown tasks, or if it fails.
    """
    if importlib.util.find_spec("lmms_eval") is None:
        raise InputError(NOT_INSTALLED)
    check_placement(dtype, device, device_map, four_bit)
    if len(models) > 1:
        import_statistics()
    sources = [resolve_weights(name, None if number else revision) for number, name in enumerate(models)]
    for source in sources:
        load_config(source)
    loading = {"dtype": dtype, "device": device, "device_map": device_map}
    loading |= {"load_in_4bit": four_bit or None, "trust_remote_code": trust_remote_code or None}
    loading = {key: value for key, value in loading.items() if value is not None}
    if include_path is not None and not Path(include_path).is_dir():
        raise InputError(
            f"--include-path is {include_path}, which is not a folder. Name one with lmms-eval tasks (YAML)."
        )
    folders = [] if include_path is None else [str(Path(include_path).resolve())]
    with tempfile.TemporaryDirectory(prefix="lmms-", dir=scratch) as made:
        place = Path(made).resolve()
        (place / "tasks").mkdir()
        asked = find_tasks(tasks, folders, place / "tasks")
        config = {"tasks": ",".join(asked), "batch_size": batch_size, "limit": limit}
        config["include_path"] = [*folders, str(place / "tasks")]
        outcomes = [
            _run(name, source, config, loading, place / str(number))
            for number, (name, source) in enumerate(zip(models, sources, strict=True))
        ]
    reported = {name: asked.get(name, name) for results, _ in outcomes for name in results["results"]}
    rows = [
        row | {"task": asked[task]}
        for name, (results, _) in zip(models, outcomes, strict=True)
        for task in asked
        for row in score_rows(results, task, name)
    ]
    differences = []
    for name, outcome in zip(models[1:], outcomes[1:], strict=True):
        for task in sorted(outcomes[0][1], key=lambda task: [*asked, task].index(task)):
            entries = _differences(task, outcomes[0], outcome)
            differences += [{"baseline": name} | entry | {"task": reported[task]} for entry in entries]
    return {
        "models": list(models),
        "harness": f"lmms-eval {importlib.metadata.version('lmms-eval')}",
        "settings": {
            "tasks": list(asked.values()),
            "limit": limit,
            "batch_size": batch_size,
            **loading,
            "include_path": include_path and folders[0],
            "llava_prompts": [task for name, task in asked.items() if name != task],
        },
        "rows": rows,
        "differences": differences,
    }


def find_tasks(names: Sequence[str], folders: Sequence[str], place: Path) -> dict[str, str]:
    """{name to run: name to report} of each task or group; a tag stands for its tasks.

    The two differ for a task that has prompts for LLaVA and none for models that it does not know (seedbench_2): it
    runs as a copy, written to `place`, that has LLaVA's for all. InputError for unknown names, with similar ones.
    """
    from loguru import logger

    logger.disable("lmms_eval")  # of every file that is no task
    try:
        from lmms_eval.tasks import TaskManager

        manager = TaskManager(include_path=list(folders))
    finally:
        logger.enable("lmms_eval")
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise InputError(
                f"lmms-eval {importlib.metadata.version('lmms-eval')} has no task {name}.{hint} Choose a name that "
                "lmms-eval tasks prints."
            )
    index = manager.task_index
    each = [task for name in names for task in (index[name]["task"] if index[name]["type"] == "tag" else [name])]
    return {_with_prompts(manager, task, place): task for task in each}


def _with_prompts(manager: Any, task: str, place: Path) -> str:
    from lmms_eval.utils import load_yaml_config

    if manager.task_index[task]["type"] != "task":
        return task
    path = manager.task_index[task]["yaml_path"]
    prompts = load_yaml_config(path, mode="simple").get("lmms_eval_specific_kwargs") or {}
    if "llava" not in prompts or {"default", "dataset", MODEL} & {*prompts}:
        return task
    name = f"{task}_as_llava"
    content = {"include": path, "task": name, "lmms_eval_specific_kwargs": {"default": prompts["llava"]}}
    write_json(place / f"{name}.yaml", content)  # JSON is YAML
    return name


def _run(
    name: str, source: Path, config: dict[str, Any], loading: dict[str, Any], place: Path
) -> tuple[dict[str, Any], dict[str, Samples | None]]:
    """The results and the samples of one model, from lmms-eval in a process of its own in the new folder `place`.

    All paths that lmms-eval gets are short names in `place`: it splits some of its arguments at commas.
    """
    place.mkdir()
    (place / "model").symlink_to(source.resolve(), target_is_directory=True)
    arguments = ",".join(f"{key}={value}" for key, value in {"pretrained": "model", **loading}.items())
    config = {key: value for key, value in config.items() if value is not None}
    config |= {"model": MODEL, "model_args": arguments, "output_path": "results", "log_samples": True}
    write_json(place / "lmms-eval.yaml", config | {"timezone": "UTC"})
    # -P: no module in the working folder may stand in for one of lmms-eval's; -u: its last words come last
    command = [sys.executable, "-P", "-u", "-m", "lmms_eval", "--config", "lmms-eval.yaml"]
    code, tail = run_and_show(command, place)
    found = list((place / "results").rglob("*_results.json"))
    if code or not found:  # after an error of its own it ends with code 0
        raise InputError(
            f"lmms-eval failed on {name} ({config['tasks']}; exit code {code}): {_error_in(tail)}. Check that its "
            "data sets can be downloaded, and that the model fits the device."
        )
    results = read_json(found[0], "lmms-eval's results")
    files = {task: list((place / "results").rglob(f"*_samples_{task}.jsonl")) for task in results["configs"]}
    missing = [task for task, logged in files.items() if not logged]
    if missing:
        raise InputError(f"lmms-eval logged no answers to {', '.join(missing)}: {_error_in(tail)}. Run it again.")
    return results, {task: read_samples(logged[0]) for task, logged in files.items()}


def _error_in(tail: str) -> str:
    """The last error that lmms-eval told, or its last line; of what it tried in vain several times, the reason."""
    plain = COLOURS.sub("", tail)
    lines = plain.splitlines()
    errors = [found[1].partition(". Please set `--verbosity")[0] for found in map(ERROR.match, lines) if found]
    retried = RETRIED.match(errors[-1]) if errors else None
    if retried:
        errors += [line for line in lines if re.match(rf"(?:\w+\.)*{retried[1]}: ", line)]
    return last_words(errors[-1] if errors else plain)


def _differences(
    task: str, first: tuple[dict[str, Any], dict[str, Any]], other: tuple[dict[str, Any], dict[str, Any]]
) -> list[dict[str, Any]]:
    (results, samples), (other_results, other_samples) = first, other
    values = [
        {row["metric"].partition(", ")[0]: row["value"] for row in score_rows(found, task, "")}
        for found in (results, other_results)
    ]
    both = {metric: (value, values[1][metric]) for metric, value in values[0].items() if metric in values[1]}
    return paired_differences(task, samples[task], other_samples[task], both)


def lmms_table(result: dict[str, Any]) -> str:
    """In Markdown: a table like the paper's Table 4, the differences, and all scores as lmms-eval gives them."""
    tasks, first = result["settings"]["tasks"], escape(result["models"][0])
    parts = [markdown_table(_headline_rows(result)), ""]
    if result["differences"]:
        head = ["task", "metric", "baseline", "n", "difference (95 % interval)", "McNemar's p", ""]
        parts += [f"{first} less the other models, question by question:", ""]
        parts += [markdown_table([head, *map(_difference_row, result["differences"])]), ""]
    scores = sorted(result["rows"], key=lambda row: (tasks.index(row["task"]), row["metric"]))  # models in their order
    parts += [markdown_table([["task", "metric", "model", "score", "n"], *map(_score_row, scores)]), ""]
    return "\n".join([*parts, *(f"- {escape(note)}" for note in _notes(result))]) + "\n"


def _headline_rows(result: dict[str, Any]) -> list[list[str]]:
    """A row for each model, a column for each task that has a score."""
    rows = [["model"], *([escape(name)] for name in result["models"])]
    for task in result["settings"]["tasks"]:
        scores = [row for row in result["rows"] if row["task"] == task]
        if not scores:
            continue
        metric, factor = HEADLINES.get(task, (scores[0]["metric"], 1))
        rows[0].append(f"{escape(task)}: {escape(metric)}{' (%)' if factor == 100 else ''}")
        for row, name in zip(rows[1:], result["models"], strict=True):
            values = [one["value"] for one in scores if (one["model"], one["metric"]) == (name, metric)]
            row.append(f"{factor * values[0]:.2f}" if values else "-")
    return rows


def _difference_row(one: dict[str, Any]) -> list[str]:
    if one["metric"] is None:
        return [escape(one["task"]), "", escape(one["baseline"]), "", f"not paired: {escape(one['reason'])}", "", ""]
    ends = one["interval"]
    interval = "" if ends is None else f" ({ends[0]:+.4f} to {ends[1]:+.4f})"
    p = "-" if one["mcnemar_p"] is None else f"{one['mcnemar_p']:.4f}"
    words = [escape(one[key]) for key in ("task", "metric", "baseline")]
    return [*words, f"{one['n']:,}", f"{one['difference']:+.4f}{interval}", p, verdict(one)]


def _score_row(one: dict[str, Any]) -> list[str]:
    error = "" if one["stderr"] is None else f" +- {one['stderr']:.4f}"
    words = [escape(one[key]) for key in ("task", "metric", "model")]
    return [*words, f"{one['value']:.4f}{error}", f"{one['n']:,}"]


def _notes(result: dict[str, Any]) -> list[str]:
    """How it was measured, and what the numbers do not show."""
    settings = result["settings"]
    limit = f", the first {settings['limit']} questions of each task alone" if settings["limit"] else ""
    notes = [f"{result['harness']}, dtype {settings['dtype']}{limit}. +-: lmms-eval's standard error."]
    if settings["llava_prompts"]:
        notes.append(f"{', '.join(settings['llava_prompts'])}: with the prompts that lmms-eval has for LLaVA.")
    if JUDGED in settings["tasks"]:
        notes.append(
            f"{JUDGED}: an answer that names no option goes to an OpenAI model (OPENAI_API_KEY); without a key "
            "lmms-eval gives it a random option."
        )
    if result["differences"]:
        notes.append(
            "Differences take questions as independent unless lmms-eval logs the files of their images; where they "
            "share images, intervals and p are too sure. One training of each model: another seed may turn the sign."
        )
    if any(one["metric"] == RIGHT_ANSWERS for one in result["differences"]):
        notes.append(f"{RIGHT_ANSWERS}: their plain share; lmms-eval's metric of that task weighs them by category.")
    return notes
