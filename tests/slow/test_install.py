"""The wheel with its core dependencies alone, as pip installs them: no extra, no developer's tool."""

import importlib.metadata
import subprocess

from tests.helpers import install
from tests.helpers.install import Environment, run

NEEDED = {"trl_recipes": ("trl", "peft", "datasets"), "evaluation": ("lmms_eval",), "space": ("gradio",)}  # by folders
IMPORT = f"""
import importlib, sys

for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in {NEEDED}.get(name.split(".")[1], ()):
            raise
"""


def test_core_dependencies_are_enough_to_import_and_to_start(tmp_path):
    for folder in ("clone", "wheels"):
        (tmp_path / folder).mkdir()
    listed = install.listed_files()
    install.copy_checkout(listed, tmp_path / "clone")
    wheel = install.build(tmp_path / "clone", tmp_path / "wheels")["wheel"]

    environment = Environment(tmp_path / "env")
    installed_here = [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "transformers")]
    environment.install(wheel, *installed_here)

    run([environment.python, "-c", IMPORT, *install.module_names(install.packaged_files(listed))], tmp_path)
    assert "convert" in run([environment.scripts / "llava-norm-align", "--help"], tmp_path)
    page = "from llava_norm_align.space.start import main; main()"
    for command, extra in (
        ([environment.scripts / "llava-norm-align", "train", "micro_stage2"], "[train]"),
        ([environment.python, "-c", page], "[app]"),
    ):
        started = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert started.returncode == 2 and extra in started.stderr and "Traceback" not in started.stderr, started
