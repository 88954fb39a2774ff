"""The wheel with its core dependencies alone, as pip installs them: no extra, no developer's tool."""

import importlib.metadata

from tests.helpers import install
from tests.helpers.install import Environment, run

IMPORT = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"


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
