"""The package built from a copy of the checkout, and virtual environments to install it in."""

import os
import shutil
import subprocess
import sys
import sysconfig
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Nothing but what the environment under test brings.
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # building overwrites sys.argv
build_meta.build_wheel(folder)
build_meta.build_editable(folder)
"""


def run(command: list, cwd: Path) -> str:
    """stdout of `command`, which must succeed."""
    done = subprocess.run(command, cwd=cwd, env=ENVIRON, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def listed_files() -> list[str]:
    """The files of this checkout that git has or would add."""
    listed = run(["git", "ls-files", "-co", "--exclude-standard"], ROOT).splitlines()
    return [file for file in listed if (ROOT / file).is_file()]


def packaged_files(listed: list[str]) -> dict[str, str]:
    """{file in the wheel: file in the checkout}: all that lies in the folders of setup.cfg, at any depth."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = dict(line.split(" = ") for line in setup["options"]["package_dir"].split("\n") if line)
    return {
        f"{package.replace('.', '/')}{file.removeprefix(folder)}": file
        for package, folder in folders.items()
        for file in listed
        if file.startswith(f"{folder}/")
    }


def module_names(packaged: dict[str, str]) -> dict[str, str]:
    """{dotted name of each module but __main__, which would run: its file in the wheel}."""
    files = [file for file in packaged if file.endswith(".py") and not file.endswith("/__main__.py")]
    return {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in files}


def copy_checkout(listed: list[str], clone: Path) -> None:
    """A copy, in which building may leave what it likes."""
    for file in listed:
        (clone / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, clone / file)


def build(clone: Path, folder: Path) -> dict[str, Path]:
    """The wheel, and the one that pip makes for an editable install; built without the network."""
    run([sys.executable, "-c", BUILD, folder], clone)
    editable = next(folder.glob("*editable*"))
    (wheel,) = set(folder.iterdir()) - {editable}
    return {"wheel": wheel, "editable": editable}


class Environment:
    """A virtual environment that begins empty; after `see_dependencies` it has what the tests' own environment has."""

    def __init__(self, folder: Path):
        run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
        self.scripts = folder / "bin"
        self.python = self.scripts / "python"
        self.site = Path(
            run([self.python, "-c", "import sysconfig as s; print(s.get_path('purelib'))"], folder).strip()
        )

    def install(self, *arguments: str | Path) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", self.python]
        run([*pip, "install", *arguments], self.site)

    def see_dependencies(self) -> None:
        # A folder that a .pth names is searched, but its own .pth files, such as an editable install's, are not read.
        (self.site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
