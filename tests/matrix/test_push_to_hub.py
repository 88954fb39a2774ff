"""A training with push_to_hub leaves a repository that loads with one line, without the package, in both lines."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

from tests.helpers import hub, lines
from tests.helpers.training import stored

PUSH = """
import sys
from tests.helpers.training import norm_aligned, trainer

from pathlib import Path

fields = dict(save_steps=1, push_to_hub=True, hub_always_push=True)
every = dict(hub_model_id="me/every", hub_strategy="checkpoint")
trainer(norm_aligned(), sys.argv[1] + "-every", max_steps=2, save_total_limit=1, **every, **fields).train()
run = trainer(norm_aligned(), sys.argv[1], max_steps=3, hub_model_id="me/x", **fields)
run.train()
Path(sys.argv[1], "tmp-checkpoint-9").mkdir()  # as of a killed run
Path(sys.argv[1], "tmp-checkpoint-9", "optimizer.pt").touch()
run.push_to_hub()
"""
LOAD = """
import json, sys
sys.modules["llava_norm_align"] = None
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained("me/x", trust_remote_code=True)
processor = AutoProcessor.from_pretrained("me/x", trust_remote_code=True)
norm = model.model.multi_modal_projector.align_norm
print(json.dumps([type(model).__name__, str(norm.weight.dtype), norm.weight.tolist(), processor.patch_size]))
"""


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pushed")
    with hub.running(folder / "hub") as server:
        hub.run([sys.executable, "-c", PUSH, folder / "out"], server, folder / "home", os.environ, lines.ROOT)
        yield folder / "out", server


MODEL = [
    ".gitattributes", "chat_template.jinja", "config.json", "configuration_llava_norm_align.py",
    "generation_config.json", "model.safetensors", "modeling_llava_norm_align.py", "processor_config.json",
    "tokenizer.json", "tokenizer_config.json",
]  # fmt: skip


def test_what_the_repository_holds(pushed):
    folder, server = pushed
    files = server.files("me/x")
    assert sorted(files) == sorted([*MODEL, "README.md", "norm_align/curves.png", "norm_align/training.json"])
    del files["norm_align/training.json"]  # the recipe names the folders of data and output
    for name, content in files.items():
        for place in (folder.parent, lines.ROOT, Path.home(), hub.TOKEN):
            assert str(place).encode() not in content, name
    assert server.titles("me/x")[1:-1] == [f"Training in progress, step {step}" for step in range(4)]
    assert not (folder / "_push").exists()


def test_each_checkpoint_is_whole_on_the_hub(pushed):
    folder, server = pushed
    files = server.files("me/every")
    last = {name.removeprefix("last-checkpoint/"): files.pop(name) for name in list(files) if "last-" in name}
    assert sorted(files) == MODEL
    here = folder.with_name("out-every") / "checkpoint-2"
    assert set(last) == {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()}
    assert {"optimizer.pt", "trainer_state.json"} < set(last)
    for name in MODEL[1:]:
        assert files[name] == last[name] == (here / name).read_bytes()


@pytest.mark.parametrize("line", ["4", "5"])
def test_it_loads_with_one_line_in_a_fresh_home(pushed, tmp_path, line):
    folder, server = pushed
    printed = hub.run([lines.PYTHONS[line], "-c", LOAD], server, tmp_path / "home", os.environ, tmp_path)
    name, dtype, gain, patch_size = json.loads(printed)
    assert (name, dtype, patch_size) == ("LlavaNormAlignForConditionalGeneration", "torch.float32", 14)
    trained = stored(folder / "checkpoint-3")["multi_modal_projector.align_norm.weight"]
    assert gain == trained.tolist()
    assert gain != stored(folder / "checkpoint-0")["multi_modal_projector.align_norm.weight"].tolist()


def test_a_name_that_is_not_there(pushed, tmp_path):
    _, server = pushed
    wrong = LOAD.replace("me/x", "me/y")
    with pytest.raises(AssertionError, match="not a valid model identifier|Repository Not Found"):
        hub.run([sys.executable, "-c", wrong], server, tmp_path, os.environ, tmp_path)
