"""A benchmark program in a process of its own, and what its results say."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TAIL = 20_000  # characters of what a program says that are kept for an error


def run_and_show(command: list[str], folder: Path | None = None) -> tuple[int, str]:
    """Run `command` in `folder`, all that it says on stderr as it comes; its exit code and the end of what it said."""
    tail = ""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
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


def last_words(tail: str) -> str:
    """The last line of what a program said, of at most 300 characters and without its final dot."""
    said = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "it said nothing")
    return said[:300].rstrip(".")


def score_rows(results: dict[str, Any], task: str, model: str) -> Iterator[dict[str, Any]]:
    """The rows of `task` in a harness's results: one for each metric and filter, with its standard error and n.

    `metric` is the harness's, with the filter of the answer where there is one (as in "exact_match, strict-match"). n
    is the number of questions that were asked, in all subtasks of a group.
    """
    scores = results["results"][task]
    for key, value in scores.items():
        metric, comma, chosen = key.partition(",")
        if not comma or "_stderr" in metric or not isinstance(value, (int, float)):
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
