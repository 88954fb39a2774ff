"""Text-only tasks through lm-eval: what training did to the language model, beside the one that it came from."""

import importlib.metadata
import importlib.util
import math
import os
import subprocess
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

TEXT_TASKS = ("mmlu", "hellaswag", "arc_challenge", "arc_easy", "gsm8k")  # names in lm-eval's own registry
UNTOUCHED = "untouched language model"
TAIL = 4000  # characters of what lm-eval says that are kept for an error


def evaluate_text(
    models: Sequence[str],
    *,
    untouched: str | None = None,
    revision: str | None = None,
    tasks: Sequence[str] = TEXT_TASKS,
    limit: int | None = None,
    batch_size: int = 8,
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
    settings: dict[str, Any] = {"tasks": list(tasks), "batch_size": batch_size, "limit": limit, "device": device}
    settings["include_path"] = include_path and str(Path(include_path).resolve())
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
    code, tail = _run_and_show(command)
    found = sorted(scratch.glob("results_*.json"))
    if code or not found:
        said = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "it said nothing")
        raise InputError(
            f"lm-eval failed on {name} ({', '.join(settings['tasks'])}; exit code {code}): {said[:300].rstrip('.')}. "
            "Check that its data sets can be downloaded, and that the model fits the device."
        )
    return list(read_results(read_json(found[-1], "lm-eval's results"), settings["tasks"], name))


def _run_and_show(command: list[str]) -> tuple[int, str]:
    """Run `command`, all that it says on stderr as it comes; its exit code and the end of what it said."""
    tail = ""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        try:
            while piece := process.stdout.read1():
                text = piece.decode(errors="replace")
                sys.stderr.write(text)
                sys.stderr.flush()
                tail = (tail + text)[-TAIL:]
        except BaseException:  # this process is being ended, which may not reach the other one
            process.terminate()
            raise
    return process.returncode, tail


def read_results(results: dict[str, Any], tasks: Sequence[str], model: str) -> Iterator[dict[str, Any]]:
    """The rows of `tasks` in lm-eval's results: one for each metric and filter, with its standard error and n.

    `metric` is lm-eval's, with the filter of the answer where there is one (as in "exact_match, strict-match"). n is
    the number of questions that were asked, in all subtasks of a group.
    """
    for task in tasks:
        scores = results.get("results", {}).get(task)
        if scores is None:
            raise InputError(f"lm-eval's results have no task {task}. Check its version: 0.4.13 or newer is expected.")
        for key, value in scores.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = scores.get(f"{metric}_stderr,{chosen}")
            known = isinstance(error, (int, float)) and math.isfinite(error)
            yield {
                "model": model,
                "task": task,
                "metric": metric if chosen == "none" else f"{metric}, {chosen}",
                "value": value,
                "stderr": error if known else None,
                "n": _count(results, task),
            }


def _count(results: dict[str, Any], task: str) -> int:
    """The questions of a task, or of all tasks in a group."""
    if task in results["n-samples"]:
        return results["n-samples"][task]["effective"]
    return sum(_count(results, subtask) for subtask in results["group_subtasks"][task])
