"""The wheel's content, and the ways in which the package can be installed."""

import importlib.util
import json
import os
import subprocess
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from llava_norm_align import __version__
from tests.helpers import install
from tests.helpers.install import Environment, run

IMPORT = """
import importlib, json, sys
print(json.dumps({name: importlib.import_module(name).__file__ for name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def listed():
    return install.listed_files()


@pytest.fixture(scope="module")
def packaged(listed):
    return install.packaged_files(listed)


@pytest.fixture(scope="module")
def clone(listed, tmp_path_factory):
    clone = tmp_path_factory.mktemp("clone")
    install.copy_checkout(listed, clone)
    return clone


@pytest.fixture(scope="module")
def wheels(clone, tmp_path_factory):
    return install.build(clone, tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def environments(wheels, tmp_path_factory):
    """What is installed: Environment, all with the dependencies."""
    folder = tmp_path_factory.mktemp("environments")
    made = {name: Environment(folder / name) for name in ("wheel", "editable", "nothing")}
    for name, wheel in wheels.items():
        made[name].install("--no-deps", "--no-index", wheel)
    for environment in made.values():
        environment.see_dependencies()
    return made


def test_wheel_holds_the_mapped_folders_and_nothing_else(wheels, packaged):
    with zipfile.ZipFile(wheels["wheel"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == set(packaged)


def test_wheel_metadata(wheels):
    info = f"llava_norm_align-{__version__}.dist-info"
    with zipfile.ZipFile(wheels["wheel"]) as wheel:
        metadata = message_from_bytes(wheel.read(f"{info}/METADATA"))
        names = {name.removeprefix(f"{info}/") for name in wheel.namelist() if name.startswith(info)}
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert (metadata["Name"], metadata["Version"]) == ("llava-norm-align", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"licenses/LICENSE", "licenses/THIRD_PARTY.md"} <= names
    assert entry_points.split() == [
        *("[console_scripts]", "llava-norm-align", "=", "llava_norm_align.cli:main"),
        *("[lmms_eval.models]", "llava_norm_align", "=", "llava_norm_align.evaluation.lmms:manifest"),
    ]


def test_wheel_adds_one_package_to_an_empty_environment(wheels, tmp_path):
    environment = Environment(tmp_path / "env")
    assert os.listdir(environment.site) == []
    environment.install("--no-deps", "--no-index", wheels["wheel"])
    assert set(os.listdir(environment.site)) == {"llava_norm_align", f"llava_norm_align-{__version__}.dist-info"}


# the extra `train`
NEED_TRL = {
    f"llava_norm_align.trl_recipes.{name}"
    for name in ("arguments", "config", "first_screen", "first_screen_facts", "output", "rows", "sft", "trainer")
}


# lmms-eval, in an environment of its own
NEED_LMMS_EVAL = {"llava_norm_align.evaluation.lmms_model"}


@pytest.mark.parametrize(
    ("installed", "in_clone"),
    [("editable", False), ("wheel", False), ("wheel", True), ("nothing", True)],
    ids=["editable", "wheel", "wheel inside the clone", "nothing installed, inside the clone"],
)
def test_every_module_imports(installed, in_clone, environments, packaged, clone, tmp_path):
    """All from one place: a clone that shadows an installed wheel does so for every module."""
    environment = environments[installed]
    from_clone = installed == "editable" or in_clone
    expected = {
        name: (clone / packaged[file] if from_clone else environment.site / file).resolve()
        for name, file in install.module_names(packaged).items()
        if (name not in NEED_TRL or importlib.util.find_spec("trl"))
        and (name not in NEED_LMMS_EVAL or importlib.util.find_spec("lmms_eval"))
        and (not name.startswith("llava_norm_align.space.") or importlib.util.find_spec("gradio"))
    }
    assert {"llava_norm_align.cli", "llava_norm_align.common.folders"} <= set(expected)
    out = run([environment.python, "-c", IMPORT, *expected], clone if in_clone else tmp_path)
    found = {name: Path(file).resolve() for name, file in json.loads(out.splitlines()[-1]).items()}
    assert found == expected


def test_nothing_is_installed_in_the_environments_of_these_tests(environments, tmp_path):
    """Outside of the clone the package is not found: otherwise the cases above would show nothing."""
    command = [environments["nothing"].python, "-c", "import safetensors, llava_norm_align"]
    done = subprocess.run(command, cwd=tmp_path, env=install.ENVIRON, capture_output=True, text=True)
    assert "No module named 'llava_norm_align'" in done.stderr


def test_the_program_of_the_wheel_starts(environments, tmp_path):
    out = run([environments["wheel"].scripts / "llava-norm-align", "--help"], tmp_path)
    for verb in ("assemble", "convert", "ask", "demo"):
        assert verb in out


def test_the_data_files_of_the_wheel_are_those_of_the_checkout(environments, packaged, clone):
    data = {file: source for file, source in packaged.items() if not file.endswith(".py")}
    assert "llava_norm_align/conversion/micro_projector.safetensors" in data
    for file, source in data.items():
        assert (environments["wheel"].site / file).read_bytes() == (clone / source).read_bytes()
