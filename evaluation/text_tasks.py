"""Text-only tasks through lm-eval: what training did to the language model, beside the one that it came from."""

import difflib
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llava_norm_align.common.errors import InputError, missing_extra
from llava_norm_align.common.loading import load_config, resolve_weights
from llava_norm_align.common.results import write_json
from llava_norm_align.common.weights import read_json
from llava_norm_align.evaluation.extract_lm import extract_lm, is_llava
from llava_norm_align.evaluation.harness import last_words, run_and_show, score_rows

TEXT_TASKS = ("mmlu", "hellaswag", "arc_challenge", "arc_easy", "gsm8k")  # names in lm-eval's own registry
UNTOUCHED = "untouched language model"


def evaluate_text(
    models: Sequence[str],
    *,
    untouched: str | None = None,
    revision: str | None = None,
    tasks: Sequence[str] = TEXT_TASKS,
    limit: int | None = None,
    batch_size: int = 8,
    dtype: str = "auto",
    device: str | None = None,
    scratch: Path | None = None,
    include_path: Path | None = None,
) -> dict[str, Any]:
    """The scores of lm-eval's `tasks` for the language models of `models`; returns settings and rows for JSON.

    `models`: LLaVAs, stock or norm-aligned, whose language models are extracted, one at a time, to `scratch` (default:
    the system's folder for temporary files; it needs the room), or causal language models; folders or Hub ids, the
    first at `revision`. `untouched`: the language model that they started from; the paper's gains on text say nothing
    without it. All run in the dtype of the first, with each task's own prompts, shots and seeds and no chat template.
    `limit`: the first so many questions of each task (of each subject, for mmlu). `device`: as torch names it;
    lm-eval's choice by default. `include_path`: a folder with more lm-eval tasks.
    InputError if lm-eval is not installed, or if it fails.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise missing_extra("lm-eval", "eval", "An evaluation on text tasks")
    sources = [(name, resolve_weights(name, None if number else revision)) for number, name in enumerate(models)]
    configs = [load_config(source) for _, source in sources]
    if untouched is not None:
        sources.append((UNTOUCHED, _resolve_untouched(untouched)))
        configs.append(load_config(sources[-1][1]))
    _check_tasks(tasks, include_path)
    settings: dict[str, Any] = {"tasks": list(tasks), "batch_size": batch_size, "limit": limit, "device": device}
    settings["include_path"] = include_path and str(Path(include_path).resolve())
    if dtype != "auto":
        settings["dtype"] = dtype
    rows: list[dict[str, Any]] = []
    for (name, source), config in zip(sources, configs, strict=True):
        with tempfile.TemporaryDirectory(prefix="text-tasks-", dir=scratch) as place:
            folder = source
            if is_llava(config):
                folder = Path(place, "language-model")
                extract_lm(str(source), folder)
                config = load_config(folder)
            settings.setdefault("dtype", config.get("dtype") or config.get("torch_dtype") or "auto")
            rows += _run(name, folder, settings, Path(place))
    return {
        "models": list(models),
        "untouched": untouched,
        "harness": f"lm-eval {importlib.metadata.version('lm-eval')}",
        "settings": settings,
        "rows": rows,
    }


def text_table(result: dict[str, Any]) -> str:
    """The rows in Markdown: for each task and metric every model's, then the untouched language model's."""
    lines = ["| task | metric | model | score | n |", "| --- | --- | --- | --- | --- |"]
    for task, metric in dict.fromkeys((row["task"], row["metric"]) for row in result["rows"]):
        for row in result["rows"]:
            if (row["task"], row["metric"]) == (task, metric):
                error = "" if row["stderr"] is None else f" +- {row['stderr']:.4f}"
                name = f"{UNTOUCHED} ({result['untouched']})" if row["model"] == UNTOUCHED else row["model"]
                lines.append(f"| {task} | {metric} | {name} | {row['value']:.4f}{error} | {row['n']} |")
        if result["untouched"] is None:
            lines.append(f"| {task} | {metric} | {UNTOUCHED} | missing | |")
    settings = result["settings"]
    limit = f", the first {settings['limit']} questions of each task alone" if settings["limit"] else ""
    lines += ["", f"{result['harness']}, {settings['dtype']}, no chat template{limit}. +-: its standard error."]
    if result["untouched"] is None:
        lines.append(
            "The rows of the untouched language model are missing (--untouched ID): without them nobody can tell a "
            "gain on text from a baseline that forgot."
        )
    return "\n".join(lines) + "\n"


def _check_tasks(tasks: Sequence[str], include_path: Path | None) -> None:
    """InputError with near names for a task that lm-eval does not know; patterns such as mmlu_* are lm-eval's."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise InputError(
            f"--include-path is {include_path}, which is not a folder. Name one with lm-eval tasks (YAML)."
        )
    manager = TaskManager(include_path=include_path and str(include_path))
    for name in tasks:
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise InputError(
                f"lm-eval {importlib.metadata.version('lm-eval')} has no task {name}.{hint} `lm-eval ls tasks` lists "
                "them all; --include-path adds a folder of your own."
            )


def _resolve_untouched(untouched: str) -> Path:
    folder = resolve_weights(untouched)
    if is_llava(load_config(folder)):
        raise InputError(
            f"--untouched {untouched} is a LLaVA, but a language model from before the training was expected. Name "
            "one such as lmsys/vicuna-7b-v1.5."
        )
    return folder


def _run(name: str, folder: Path, settings: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """The rows of one model, from lm-eval in a process of its own."""
    content = {key: value for key, value in settings.items() if key != "dtype" and value is not None}
    # model_args in a file: on the command line, a comma in a path would end it
    content |= {"model": "hf", "model_args": {"pretrained": str(folder.resolve()), "dtype": settings["dtype"]}}
    content["output_path"] = str(scratch / "results.json")
    write_json(scratch / "lm-eval.yaml", content)  # JSON is YAML
    # -P: no module in the working folder may stand in for one of lm-eval's
    command = [sys.executable, "-P", "-m", "lm_eval", "run", "--config", str(scratch / "lm-eval.yaml")]
    code, tail = run_and_show(command)
    found = sorted(scratch.glob("results_*.json"))
    if code or not found:
        raise InputError(
            f"lm-eval failed on {name} ({', '.join(settings['tasks'])}; exit code {code}): {last_words(tail)}. "
            "Check that its data sets can be downloaded, and that the model fits the device."
        )
    return list(read_results(read_json(found[-1], "lm-eval's results"), settings["tasks"], name))


def read_results(results: dict[str, Any], tasks: Sequence[str], model: str) -> Iterator[dict[str, Any]]:
    """The rows of `tasks` in lm-eval's results, as harness.score_rows has them."""
    for task in tasks:
        if task not in results.get("results", {}):
            raise InputError(f"lm-eval's results have no task {task}. Check its version: 0.4.13 or newer is expected.")
        yield from score_rows(results, task, model)
