"""What imports what, read from the source, so that imports inside functions count too."""

import ast
import inspect
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import transformers
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
FACE = "llava_norm_align"
# A folder imports itself and what stands before it; of the face, which is imported first, anyone may use __version__.
ORDER = ["common", "data", "configuration", "modeling", "diagnosis", "conversion", "trl_recipes", "evaluation"]
ORDER += ["release", "space", FACE]

CONFIGURATION = "configuration/configuration_llava_norm_align.py"
MODELING = "modeling/modeling_llava_norm_align.py"
FAMILIES = {  # of stock models other than LLaVA, whose two files build on LLaVA's
    name: (f"configuration/configuration_{name}_norm_align.py", f"modeling/modeling_{name}_norm_align.py")
    for name in ("llava_next", "llava_onevision", "vipllava")
}
SHIPPED = {CONFIGURATION: 100, MODELING: 300}  # lines, at most less one
SHIPPED |= {file: limit for files in FAMILIES.values() for file, limit in zip(files, (60, 100), strict=True)}
# Of transformers, the shipped files use top-level names and these.
DEEPER_NAMES = {
    "transformers.models.llava.modeling_llava.LlavaMultiModalProjector",
    "transformers.models.llava_next.modeling_llava_next.LlavaNextMultiModalProjector",
    "transformers.models.llava_onevision.modeling_llava_onevision.LlavaOnevisionMultiModalProjector",
    "transformers.models.vipllava.modeling_vipllava.VipLlavaMultiModalProjector",
    "transformers.conversion_mapping.get_checkpoint_conversion_mapping",
    "transformers.conversion_mapping.register_checkpoint_conversion_mapping",
    "transformers.initialization",
}
ONLY_IN_5 = ("transformers.conversion_mapping", "transformers.initialization")

MODULE_OF = {"pillow": "PIL"}  # where it is not the name of the distribution


def sources(root: Path) -> list[Path]:
    """The .py files of the package under `root`."""
    return sorted(path for folder in ORDER for path in (root / folder).rglob("*.py"))


def imported_names(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in `tree`: `from a.b import c` is a.b.c, `from . import c` is ..c.

    `import llava_norm_align` counts as the names that are used of it.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if alias.name != FACE or alias.asname]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == FACE:
            found.append((node.lineno, f"{FACE}.{node.attr}"))
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found += [(node.lineno, str(arg.value)) for arg in node.args if isinstance(arg, ast.Constant)]
    return found


def layer_of(name: str) -> str:
    """The folder that the dotted name `name` of our package lies in."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ORDER else FACE


def wrong_imports(root: Path) -> list[str]:
    """Imports against ORDER and relative imports in the package under `root`, as `file:line name`."""
    wrong = []
    for path in sources(root):
        relative = path.relative_to(root)
        for line, name in imported_names(ast.parse(path.read_text())):
            ours = name.split(".")[0] == FACE and name != f"{FACE}.__version__"
            against = ours and ORDER.index(layer_of(name)) > ORDER.index(relative.parts[0])
            if against or name.startswith("."):
                wrong.append(f"{relative}:{line} {name}")
    return wrong


def test_imports_run_one_way():
    assert len(sources(ROOT)) > 10
    assert wrong_imports(ROOT) == []


@pytest.mark.parametrize(
    ("file", "code", "name"),
    [
        ("common/x.py", "def f():\n    from llava_norm_align.modeling import y", "llava_norm_align.modeling.y"),
        ("common/x.py", "from llava_norm_align import data", "llava_norm_align.data"),
        ("common/x.py", "import llava_norm_align as face", "llava_norm_align"),
        ("common/x.py", "import llava_norm_align\nllava_norm_align.LlavaConfig", "llava_norm_align.LlavaConfig"),
        ("data/x.py", "import llava_norm_align.configuration.y as z", "llava_norm_align.configuration.y"),
        ("modeling/x.py", "if 1:\n    from llava_norm_align.diagnosis.y import z", "llava_norm_align.diagnosis.y.z"),
        ("conversion/x.py", "from llava_norm_align import registration", "llava_norm_align.registration"),
        ("evaluation/x.py", "importlib.import_module('llava_norm_align.cli')", "llava_norm_align.cli"),
        ("evaluation/x.py", "from .y import z", ".y.z"),
        ("llava_norm_align/x.py", "from . import cli", "..cli"),
    ],
)
def test_planted_wrong_imports_are_found(tmp_path, file, code, name):
    path = tmp_path / file
    path.parent.mkdir()
    path.write_text(code)
    assert [found.split()[1] for found in wrong_imports(tmp_path)] == [name]


def test_imports_along_the_order_are_allowed(tmp_path):
    allowed = {
        "common/x.py": "from llava_norm_align import __version__",
        "conversion/x.py": "import llava_norm_align\nprint(llava_norm_align.__version__)",
        "data/x.py": "from llava_norm_align.common.errors import InputError\nfrom llava_norm_align.data import y",
        "release/x.py": "import json\nimport llava_norm_align.modeling\nimport llava_norm_align.evaluation.y",
        "llava_norm_align/cli.py": "from llava_norm_align import registration, release\nimport common",
    }
    for file, code in allowed.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(code)
    assert wrong_imports(tmp_path) == []


def names_at_import(tree: ast.AST) -> set[str]:
    """First parts of what a module imports when it is itself imported: neither in a function nor in a try."""
    names = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {name.split(".")[0] for _, name in imported_names(node)}
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Try)):
            names |= names_at_import(node)
    return names


def test_modules_import_with_the_core_dependencies_alone():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    core = {Requirement(line).name for line in setup["options"]["install_requires"].split("\n") if line}
    allowed = {MODULE_OF.get(name, name) for name in core} | sys.stdlib_module_names | {FACE}
    beyond = {}
    for path in sources(ROOT):
        file = str(path.relative_to(ROOT))
        # programs that run with their extra only, and the class that lmms-eval imports
        if file.startswith(("trl_recipes/", "space/")) or file == "evaluation/lmms_model.py":
            continue
        if names := names_at_import(ast.parse(path.read_text())) - allowed:
            beyond[file] = names
    assert beyond == {}


def deeper_attributes(tree: ast.AST) -> set[str]:
    """Uses such as `transformers.utils.x`, written out after `import transformers`."""
    chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {chain for chain in chains if re.fullmatch(r"transformers(\.\w+){2,}", chain)}


def transformers_names(file: str) -> set[str]:
    names = {name for _, name in imported_names(ast.parse((ROOT / file).read_text()))}
    return {name for name in names if name.startswith("transformers.")}


@pytest.mark.parametrize("file", SHIPPED)
def test_shipped_files_use_public_names_of_transformers(file):
    names = transformers_names(file)
    assert names
    assert {name for name in names if name.count(".") > 1} | (names & set(ONLY_IN_5)) <= DEEPER_NAMES
    assert deeper_attributes(ast.parse((ROOT / file).read_text())) == set()


def test_the_deeper_names_are_used():
    """A name that is no longer used leaves the list above."""
    assert DEEPER_NAMES <= set().union(*map(transformers_names, SHIPPED))


def test_deeper_attributes_are_found():
    tree = ast.parse("import transformers\ntransformers.__version__\nx = transformers.utils.logging.get_logger()")
    assert deeper_attributes(tree) == {"transformers.utils.logging", "transformers.utils.logging.get_logger"}


@pytest.mark.parametrize("name", sorted(set().union(*map(transformers_names, SHIPPED))))
def test_names_of_transformers_exist_here(name):
    if name.startswith(ONLY_IN_5) and Version(transformers.__version__) < Version("5"):
        pytest.skip("used with transformers 5 only")
    module, attribute = name.rsplit(".", 1)
    found = {}
    exec(f"from {module} import {attribute}", found)
    assert not inspect.ismodule(found[attribute]) or name in DEEPER_NAMES


def test_shipped_files_import_nothing_else_of_ours():
    """A released folder holds LLaVA's two files, and its family's two, and nothing more."""
    modules = {f"{FACE}.{file.removesuffix('.py').replace('/', '.')}": file for file in SHIPPED}
    ours = {
        file: {
            modules.get(name.rpartition(".")[0], name)
            for _, name in imported_names(ast.parse((ROOT / file).read_text()))
            if name.startswith(FACE)
        }
        for file in SHIPPED
    }
    expected = {CONFIGURATION: set(), MODELING: {CONFIGURATION}}
    for configuration, modeling in FAMILIES.values():
        expected |= {configuration: {CONFIGURATION}, modeling: {configuration, CONFIGURATION, MODELING}}
    assert ours == expected


def test_files_are_short():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    lines = {file: len((ROOT / file).read_text().splitlines()) for file in listed if (ROOT / file).is_file()}
    assert MODELING in lines
    assert {file: n for file, n in lines.items() if n > 400} == {}
    assert {file: lines[file] for file, limit in SHIPPED.items() if lines[file] >= limit} == {}
