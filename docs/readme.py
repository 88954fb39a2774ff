"""Run the README's blocks and write what they print between its markers.

usage: python docs/readme.py

A marker is <!-- output of: COMMAND --> or, right after a python block, <!-- output of the block above -->; everything
up to <!-- end of output --> is replaced. The README's plot is one that the demo made.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(
    r"(?P<code>```python\n(?P<python>(?:(?!```).)*)```\n\n)?"
    r"(?P<marker><!-- output of(?:: (?P<command>.*?)| the block above) -->\n).*?(?P<end><!-- end of output -->)",
    re.DOTALL,
)


def run(command: list[str] | str) -> str:
    """What `command` prints on standard output, without paths of this machine."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
    }
    print(f"running: {command}", file=sys.stderr)
    done = subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    output = done.stdout.replace(f"{ROOT}/", "").replace(str(Path.home()), "~")
    return "\n".join(line.rstrip() for line in output.strip().splitlines())


def replace(match: re.Match) -> str:
    command = match["command"]
    output = run(command) if command else run([sys.executable, "-c", match["python"]])
    return f"{match['code'] or ''}{match['marker']}```text\n{output}\n```\n{match['end']}"


PLOT = "norms_by_layer.png"

if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(MARKED.sub(replace, readme.read_text(encoding="utf-8")), encoding="utf-8")
    shutil.copy(ROOT / "demo/diagnosis/converted" / PLOT, ROOT / "docs" / PLOT)  # the demo's, before and after
