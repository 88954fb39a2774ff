"""The folder of a Space: the page, what it installs, and this package's source as a plain folder."""

import importlib.metadata
import importlib.util
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llava_norm_align.common.errors import InputError, missing_extra
from llava_norm_align.common.results import write_text
from llava_norm_align.common.revisions import split_revision

# What the page imports, at the versions that are installed here. gradio is the Space's sdk, too.
REQUIREMENTS = ("accelerate", "gradio", "huggingface_hub", "jinja2", "matplotlib", "numpy", "packaging", "pillow")
REQUIREMENTS += ("safetensors", "tokenizers", "torch", "tqdm", "transformers", "typer")
EXAMPLES = ("easy-vqa", "scikit-image")  # drawings, photos
# Of the versions that ZeroGPU has (3.10 and 3.12), the one that this package runs on.
PYTHON = "3.12"
LICENSE = "apache-2.0"  # of the source, and so of the page
PACKAGE = "llava_norm_align"
PARTS = ("common", "data", "configuration", "modeling", "diagnosis", "conversion", "trl_recipes", "evaluation")
PARTS += ("release", "space")
SUFFIXES = (".py", ".jinja", ".yaml")  # no weights: the models come from the Hub
MARK = "<!-- llava-norm-align space -->"
APP = '''\
"""Starts the page; which models it shows can be changed by the variables of the same names in the Space's settings."""

import os

try:
    import spaces  # noqa: F401  # ZeroGPU's, which wants to be imported before torch
except ImportError:
    pass

{variables}

from llava_norm_align.space.start import main

if __name__ == "__main__":
    main()
'''
README = """\
# {title}

{mark}

A norm-aligned LLaVA{beside}: ask about an image, and see the norms of that image's tokens.

That a norm gap costs image information is what [arXiv 2512.08374](https://arxiv.org/abs/2512.08374) argues; the claim
is contested, and the page shows measurements, not promises.

Models: {models}
"""


def write_space(folder: Path, space_id: str, model: str, base: str | None = None, license: str = LICENSE) -> None:
    """Write the Space `space_id` into the empty `folder`.

    `model` and `base`: Hub ids, of a fixed revision as ID@REVISION. `license`: an identifier of the Hub's.
    InputError if a package that the page needs is not installed here, as its version is not known then, or if the text
    of the source's license is missing.
    """
    named = {"LLAVA_NORM_ALIGN_ALIGNED": model} | ({"LLAVA_NORM_ALIGN_BASE": base} if base else {})
    models = list(dict.fromkeys(split_revision(name)[0] for name in named.values()))
    pins = pinned([*REQUIREMENTS, *EXAMPLES])
    lines = [f"os.environ.setdefault({json.dumps(name)}, {json.dumps(value)})" for name, value in named.items()]
    write_text(folder / "app.py", APP.format(variables="\n".join(lines)))
    write_text(folder / "requirements.txt", "\n".join(f"{name}=={version}" for name, version in pins.items()) + "\n")
    write_text(folder / "README.md", _readme(space_id, models, base, license, pins["gradio"]))
    copy_source(folder / PACKAGE)
    shutil.copyfile(license_text(), folder / PACKAGE / "LICENSE")


def pinned(names: Sequence[str]) -> dict[str, str]:
    """The versions that are installed here, without what names a build, such as +cpu."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            raise missing_extra(name, "app", "The folder of a Space") from None
    return versions


def copy_source(target: Path) -> None:
    """This package with its parts in one folder, as a wheel has it."""
    names = {"": PACKAGE} | {part: f"{PACKAGE}.{part}" for part in PARTS}
    places = {part: Path(importlib.util.find_spec(name).origin).parent for part, name in names.items()}
    for part, place in places.items():
        for path in sorted(place.rglob("*")):
            name = path.relative_to(place)
            nested = not part and name.parts[0] in PARTS  # a wheel's parts lie inside the package
            if path.suffix in SUFFIXES and path.is_file() and not nested and "__pycache__" not in name.parts:
                (target / part / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / part / name)


def license_text() -> Path:
    """The file of the source's license: beside its parts in a checkout or a Space, in the metadata of a wheel."""
    parts = Path(importlib.util.find_spec(f"{PACKAGE}.common").origin).parent.parent
    places = [parts / "LICENSE"]
    with suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.distribution("llava-norm-align")
        places += [Path(installed.locate_file(file)) for file in installed.files or [] if file.name == "LICENSE"]
    for place in places:
        if place.is_file():
            return place
    raise InputError(
        f"The LICENSE of llava-norm-align is neither in {parts} nor in the metadata of an installed package, and the "
        "source may not be passed on without it. Install the package anew."
    )


def _readme(space_id: str, models: Sequence[str], base: str | None, license: str, gradio: str) -> str:
    import yaml  # comes with huggingface_hub

    title = space_id.rpartition("/")[2]
    front = {
        "title": title,
        "emoji": "📏",
        "colorFrom": "blue",
        "colorTo": "yellow",
        "sdk": "gradio",
        "sdk_version": gradio,
        "python_version": PYTHON,
        "app_file": "app.py",
        "pinned": False,
        "license": license,
        "models": list(models),
        "short_description": "A LLaVA with norm-aligned visual tokens",
    }
    beside = " beside its base" if base else ""
    body = README.format(title=title, mark=MARK, beside=beside, models=", ".join(models))
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n{body}"
