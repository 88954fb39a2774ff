"""The doctor's last checks: a folder loads alone in a fresh process of some interpreter, and answers once."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.fresh_process import ProcessFailed, run_script
from llava_norm_align.conversion.doctor_checks import Failed, NotRun, Patient
from llava_norm_align.conversion.doctor_processor import has_processor, has_tokenizer

SCRIPT = Path(__file__).with_name("answer_alone.py")
NEEDED = ("transformers", "torch")
PROBE = (
    "import importlib.util, json; "
    f"print(json.dumps([name for name in {NEEDED} if importlib.util.find_spec(name) is None]))"
)


def check_pythons(pythons: Sequence[Path]) -> list[Path]:
    """The interpreters as absolute paths; InputError for what is no Python with transformers and torch."""
    return [_check_python(Path(python)) for python in pythons]


def _check_python(python: Path) -> Path:
    found = shutil.which(python)
    if found is None:
        raise InputError(
            f"--python {python}: there is no program at this path. Name an interpreter, such as venv/bin/python."
        )
    found = Path(os.path.abspath(found))  # a virtual environment's own link, not what it points to
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace", "timeout": 60}
    try:
        done = subprocess.run([found, "-c", PROBE], cwd=os.sep, env=_environment(found), **options)
        missing = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise InputError(
            f"--python {python}: this program is no Python interpreter. Name one, such as venv/bin/python."
        ) from None
    if missing:
        raise InputError(f"--python {python}: not installed there: {' and '.join(missing)}. Install first.")
    return found


def tokenizer_elsewhere(folder: Path, pythons: Sequence[Path]) -> list[str]:
    """What the tokenizer loads as in each of `pythons`, in words. Failed if it does not load in one."""
    results = [run_alone(folder, python, "tokenizer") for python in pythons]
    return [f"{result['tokenizer']} in transformers {result['transformers']}" for result in results]


def check_alone(patient: Patient, python: Path, load: bool) -> str:
    """The folder loads and answers once in a fresh process of `python`: the answer, versions and seconds in words."""
    if not load:
        raise NotRun("left out by --no-load")
    patient.require(1, 2, 3, 5, 6, 7)
    prompt = "image" if has_processor(patient) else "text" if has_tokenizer(patient) else "ids"
    result = run_alone(patient.folder, python, prompt)
    versions = ", ".join(f"{name} {result[name]}" for name in ("transformers", "torch"))
    asked = f"without an image ({result['note']})" if result["note"] else "about an image"
    return (
        f"Python {result['python']}, {versions}: {' and '.join(result['classes'])} answered {result['answer']!r} when "
        f"asked {asked}, on {result['device']}, in {result['seconds']:.1f} s"
    )


def run_alone(folder: Path, python: Path, prompt: str) -> dict[str, Any]:
    """The result of answer_alone.py in a fresh process, which ends with this one; else Failed with its last line."""
    caches = ["HF_MODULES_CACHE"]
    try:
        return run_script(python, SCRIPT, folder.resolve(), prompt, env=_environment(python), caches=caches)
    except ProcessFailed as error:
        code, last = error.args
        raise Failed(f"{python} ended with {code}: {last}") from None


def _environment(python: Path) -> dict[str, str]:
    """This process's, without network. What is set for this Python (PYTHONPATH) is nothing to another one."""
    same = python == Path(sys.executable)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") or (same and name == "PYTHONPATH")
    }
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
