"""The two supported transformers lines as interpreters, and scripts run in them without the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = {"4": ROOT / ".venv-tf4/bin/python", "5": ROOT / ".venv/bin/python"}  # as `make test` builds them
PYTHONS[transformers.__version__[0]] = Path(sys.executable)  # the line under test, which may be the newest release


def run_alone(tasks, folder, python=sys.executable, timeout=1200):
    """Run alone.py, where llava_norm_align cannot be imported, on `tasks` (JSON) and return its results."""
    request, answer = Path(folder, "request.json"), Path(folder, "answer.json")
    request.write_text(json.dumps(tasks))
    answer.unlink(missing_ok=True)
    script = Path(__file__).with_name("alone.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(Path(folder, "modules"))}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(python), str(script), str(request), str(answer)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(answer.read_text())


def run(*arguments, line="5"):
    """The program in one transformers line: its standard output, and exit code 0."""
    command = [PYTHONS[line], "-m", "llava_norm_align", *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
