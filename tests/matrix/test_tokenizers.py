"""Whichever line converted a LLaVA or saved its processor again: both give the token ids of the stock folder."""

import json
import shutil

import pytest

from llava_norm_align.common.loading import load_config
from llava_norm_align.configuration.configuration_llava_norm_align import LlavaNormAlignConfig
from llava_norm_align.trl_recipes.checkpoints import complete_folder
from tests.helpers import lines
from tests.helpers.published import write_published

TEXTS = ["USER: <image>\nWhat is in the picture? ASSISTANT:", "<image>What</s>do you <image> see", " caf\u00e9 12"]
NAMES = ["llava-1.5-7b-hf", "llava-interleave-qwen-0.5b-hf"]

pytestmark = pytest.mark.skipif(
    not all(python.exists() for python in lines.PYTHONS.values()), reason="needs .venv and .venv-tf4: run `make test`"
)


def read(line, root, folder, **more):
    task = {"do": "token_ids", "folder": str(folder), "texts": TEXTS, "only_tokenizer": False, **more}
    return lines.run_alone([task], root, lines.PYTHONS[line])[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("writer", lines.PYTHONS)
def test_both_lines_read_what_either_converted_and_saved(tmp_path, name, writer):
    stock, model, saved = write_published(name, tmp_path / "stock"), tmp_path / "model", tmp_path / "saved"
    lines.run("convert", stock, model, "--no-report", line=writer)
    expected = {line: read(line, tmp_path, stock) for line in lines.PYTHONS}
    assert expected["4"]["ids"] == expected["5"]["ids"]
    saved.mkdir()
    for path in [model / "config.json", *model.glob("*.py")]:
        shutil.copy(path, saved)
    for line in lines.PYTHONS:
        assert read(line, tmp_path, model) == expected[line]
    assert read(writer, tmp_path, model, save=str(saved)) == read(writer, tmp_path, saved) == expected[writer]
    config = {key: value for key, value in load_config(saved).items() if key not in ("model_type", "auto_map")}
    complete_folder(saved, LlavaNormAlignConfig.from_dict(config))  # as a training does with its checkpoints
    assert json.loads((saved / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    for line in lines.PYTHONS:
        assert read(line, tmp_path, saved) == expected[line]
