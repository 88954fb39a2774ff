"""A script in a fresh interpreter, with an empty working folder, that ends with this process."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any


class ProcessFailed(Exception):
    """`args`: the code that the process ended with, with a hint in words, and the last line of standard error."""


def run_script(python: Path, script: Path, *arguments: Any, env: dict[str, str], caches: list[str]) -> dict[str, Any]:
    """The JSON object in the last line that `script` prints; ProcessFailed if it ends with another code than 0.

    Behind `arguments` it gets the file descriptor of a pipe that is open as long as this process lives. `env` is its
    environment, to which each of `caches` is added, the name of a variable for a new folder.
    """
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    lifeline, held = os.pipe()
    with open(lifeline), open(held, "w"), tempfile.TemporaryDirectory() as scratch:
        env = env | {name: os.path.join(scratch, name.lower()) for name in caches}
        command = [python, script, *arguments, str(lifeline)]
        done = subprocess.run(command, cwd=scratch, env=env, pass_fds=[lifeline], **options)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        hint = " (a signal; -9 is mostly a lack of memory)" if done.returncode < 0 else ""
        raise ProcessFailed(f"code {done.returncode}{hint}", last)
    return json.loads(done.stdout.splitlines()[-1])
