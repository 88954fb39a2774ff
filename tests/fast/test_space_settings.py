"""Flags and variables that the page is started with, and the models that they name."""

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("gradio")

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.revisions import split_revision
from llava_norm_align.space import models
from llava_norm_align.space.models import find_models, load_models, training
from llava_norm_align.space.settings import Settings, read_settings
from tests.helpers import space


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return space.build(tmp_path_factory.mktemp("space"))


def found(root, *names):
    return find_models(Settings(**{name: str(root / folder) for name, folder in names}), print)


def test_a_flag_goes_before_its_variable():
    variables = {"LLAVA_NORM_ALIGN_BASE": "me/base", "LLAVA_NORM_ALIGN_ALIGNED": "me/one@ab12"}
    variables |= {"LLAVA_NORM_ALIGN_QUEUE": "3", "LLAVA_NORM_ALIGN_WHEELS": "/wheels"}
    settings = read_settings(["--aligned", "other", "--max-new-tokens", "9"], variables)
    expected = Settings("me/base", "other", wheels=Path("/wheels"), queue=3, max_new_tokens=9)
    assert settings == expected
    assert read_settings([], {"LLAVA_NORM_ALIGN_BASE": ""}) == Settings()


@pytest.mark.parametrize("value", ["many", "-1", "1.5", "0", "99999999"])
def test_a_number_that_is_none_is_refused(value):
    with pytest.raises(InputError, match="--queue is .* a whole number from 1 to 100000 was expected"):
        read_settings([f"--queue={value}"], {})


def test_a_revision_follows_the_id(tmp_path, monkeypatch):
    assert split_revision("me/model@v1.0") == ("me/model", "v1.0")
    assert split_revision("me/model") == ("me/model", None)
    monkeypatch.chdir(tmp_path)
    Path("a@b").mkdir()
    assert split_revision("a@b") == ("a@b", None)
    for wrong in ("@v1", "me/model@"):
        with pytest.raises(InputError, match="ID@REVISION"):
            split_revision(wrong)


def test_names_are_never_paths(root):
    shown = found(root, ("base", "base"), ("aligned", "aligned"))
    assert [(one.name, one.aligned) for one in shown] == [("base", False), ("aligned", True)]


def test_one_model_is_shown_alone(root):
    assert [one.aligned for one in found(root, ("base", "base"))] == [False]
    assert [one.aligned for one in found(root, ("aligned", "aligned"))] == [True]


def test_a_control_without_a_norm_is_a_base(root, tmp_path):
    folder = shutil.copytree(root / "aligned", tmp_path / "control")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_align_type": "none"}))
    assert [one.aligned for one in found(tmp_path, ("base", "control"))] == [False]


@pytest.mark.parametrize("others", [(), (("base", "base"),)])
def test_a_stock_model_in_the_place_of_the_aligned_one_is_refused(root, others):
    with pytest.raises(InputError, match="is a llava without a norm .* Convert it"):
        found(root, *others, ("aligned", "base"))


@pytest.mark.parametrize("others", [(), (("aligned", "aligned"),)])
def test_an_aligned_model_in_the_place_of_the_base_is_refused(root, others):
    with pytest.raises(InputError, match="has a norm after its projector; .* Pass it as --aligned"):
        found(root, ("base", "aligned"), *others)


def test_a_missing_model_is_told_with_what_to_set(root):
    with pytest.raises(InputError) as error:
        found(root, ("aligned", "nothing/here"))
    for words in ("--aligned (LLAVA_NORM_ALIGN_ALIGNED)", "There is no folder", "to see micro-LLaVA"):
        assert words in str(error.value)


def test_without_names_micro_llava_is_shown(root, monkeypatch):
    monkeypatch.setattr(models, "default_models", lambda wheels, echo: (root / "base", root / "aligned"))
    shown = find_models(Settings(), print)
    assert [(one.name, one.aligned, one.micro) for one in shown] == [
        ("micro-LLaVA", False, True),
        ("micro-LLaVA with a norm", True, True),
    ]


def test_micro_llava_computes_in_float32_unless_told_otherwise(root, tmp_path, monkeypatch):
    folders = [shutil.copytree(root / name, tmp_path / name) for name in ("base", "aligned")]
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    monkeypatch.setattr(models, "default_models", lambda wheels, echo: folders)
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        assert [one.model.dtype for one in load_models(Settings(dtype=dtype))] == [expected] * 2
    named = load_models(Settings(base=str(folders[0]), aligned=str(folders[1])))  # what config.json says
    assert [one.model.dtype for one in named] == [torch.bfloat16] * 2


def test_training_is_read_from_the_folder(root, tmp_path):
    folder = shutil.copytree(root / "aligned", tmp_path / "aligned")
    assert training(folder) == (None, False)
    file = folder / "norm_align" / "training.json"
    file.parent.mkdir()
    for data, drawings in (("easy-vqa-yes-no", True), ("rows.json", False)):
        file.write_text(json.dumps({"schema_version": 1, "steps": 100, "recipe": {"data_path": data}}))
        assert training(folder) == (100, drawings)
