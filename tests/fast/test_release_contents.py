"""What of a model folder goes to the Hub, what stays, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llava_norm_align.common.errors import InputError
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.doctor import examine
from llava_norm_align.release import contents
from llava_norm_align.release.contents import find_contents, without_homes
from tests.helpers.convert import tiny_llava

MODEL = {
    "chat_template.json", "config.json", "configuration_llava_norm_align.py", "generation_config.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    "modeling_llava_norm_align.py", "norm_align/calibration.json", "preprocessor_config.json", "processor_config.json",
    "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
RESULTS = {
    "COPYING.rst", "LICENSE", "LICENSE-MIT", "LICENSE-llm-llama3.2.txt", "NOTICE.md", "README.md", "USE_POLICY.pdf",
    "norm_align/curves.png", "norm_align/diagnosis.json", "norm_align/diagnosis.md",
    "norm_align/diagnosis-stock-0a1b2c3d/norms_by_layer.png", "norm_align/evaluation.json",
    "norm_align/training.json", "projector.safetensors", "recipe.yaml",
    "sentencepiece.bpe.model", "source.spm", "tokenizer.model",
}  # fmt: skip
STAYS = {  # what lies there: a word of the reason
    ".env": "passwords",
    ".git/": "history",
    ".gitattributes": "Hub",
    "LICENSE.ipynb": "notebook",
    "LICENSE.pkl": "pickle",
    "LICENSE.safetensors": "does not read",
    "LICENSE-x.pkl": "pickle",
    "LICENSE_KEY": "no file",
    "NOTICE.json": "no file",
    "adapter_model.safetensors": "adapter",
    "checkpoint-3/": "checkpoint",
    "events.out.tfevents.1": "log",
    "evil.model": "no file",
    "explore.ipynb": "notebook",
    "helper.py": "auto_map",
    "model-old.safetensors": "does not read",
    "norm_align/.env": "passwords",
    "norm_align/deep/": "no file",
    "norm_align/predictions.jsonl": "test set",
    "norm_align/start.json": "training",
    "optimizer.bin": "training",
    "optimizer.pt": "training",
    "pytorch_model.bin": "pickle",
    "rng_state.pth": "training",
    "runs/": "log",
    "scheduler.pt": "training",
    "secrets.txt": "no file",
    "state.pkl": "pickle",
    "train.log": "log",
    "trainer_state.json": "training",
    "training_args.bin": "training",
    "wandb/": "log",
    "weights.ckpt": "pickle",
}
SECRETS = {  # made up, put together here so that no scanner takes this file for a leak
    "Hugging Face": "hf_" + "aB3dE6gH" * 4,
    "private key": "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    "GitHub": "ghp_" + "a1B2c3D4e" * 4,
    "AI service": "sk-proj-" + "a1B2c3D4" * 4,
    "Amazon": "AKIA" + "ABCDEFGH" * 2,
    "Google": "AIza" + "a1B2c3D" * 5,
    "Slack": "xoxb-" + "1234567890-abc",
    "Weights & Biases": "WANDB_API_KEY=" + "0123456789" * 4,
    "password in an address": "https://bob:" + "hunter2@example.org/data",
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    root = tmp_path_factory.mktemp("contents")
    tiny_llava(root / "stock")
    (root / "stock" / "special_tokens_map.json").write_text("{}")  # 4.57 saves one
    convert(str(root / "stock"), root / "model", report=False)
    return root / "model"


@pytest.fixture
def folder(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "model")


def names(found):
    return {item.name for item in found.items}


def write(folder, name, text="x"):
    path = folder / name
    if name.endswith("/"):
        path.mkdir(parents=True)
        path = path / "file.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_converted_folder_goes_up_whole(converted):
    found = find_contents(converted)
    assert names(found) == MODEL
    assert found.left_out == [] and found.notes == []
    assert [item.size for item in found.items] == [(converted / item.name).stat().st_size for item in found.items]
    assert found.items == sorted(found.items, key=lambda item: item.name)


def test_results_go_up_and_the_rest_stays_with_a_reason(folder):
    for name in (*RESULTS, *STAYS):
        write(folder, name)
    found = find_contents(folder)
    assert names(found) == MODEL | RESULTS
    reasons = dict(found.left_out)
    assert set(reasons) == set(STAYS)
    assert {name: word for name, word in STAYS.items() if word not in reasons[name]} == {}


def test_one_weight_file_goes_before_an_index(folder):
    shutil.copyfile(folder / "model-00001-of-00002.safetensors", folder / "model.safetensors")
    found = find_contents(folder)
    assert {name for name in names(found) if "safetensors" in name} == {"model.safetensors"}
    assert {name for name, _ in found.left_out} == {name for name in MODEL if "safetensors" in name}


def test_the_family_pairs_go_up(folder):
    config = json.loads((folder / "config.json").read_text())
    pair = ["configuration_vipllava_norm_align", "modeling_vipllava_norm_align"]
    config["auto_map"] = {"AutoConfig": f"{pair[0]}.A", "AutoModel": f"me/other--{pair[1]}.B"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"{pair[0]}.py is missing"):
        find_contents(folder)
    for name in pair:
        write(folder, f"{name}.py")
    assert names(find_contents(folder)) == MODEL | {f"{name}.py" for name in pair}


@pytest.mark.parametrize("what", SECRETS)
@pytest.mark.parametrize("name", ["norm_align/training.json", "README.md", "tokenizer.model"])
def test_a_secret_is_named_by_file_and_line_alone(folder, what, name):
    write(folder, name, f"one\ntwo\n  x: {SECRETS[what]}\n")
    with pytest.raises(InputError) as caught:
        find_contents(folder)
    message = str(caught.value)
    assert what in message and f"Line 3 of {folder / name}" in message
    assert SECRETS[what][8:] not in message


def test_the_token_of_the_user_is_found_in_any_form(folder):
    write(folder, "norm_align/training.json", '{\n"x": "odd form 17"}')
    find_contents(folder)
    with pytest.raises(InputError, match="Line 2 .* logged in") as caught:
        find_contents(folder, token="odd form 17")
    assert "odd form" not in str(caught.value)


def test_words_that_only_look_like_secrets_go_up(folder):
    fine = ["hf_hub_download", "the hf_ prefix", "sk-learn", "https://example.org/a:b@c", "git@github.com:me/x.git",
            "http://localhost:8080/@x", "https://${USER}:${TOKEN}@example.org", "risk-" + "a" * 40]  # fmt: skip
    write(folder, "README.md", "\n".join(fine))
    assert "README.md" in names(find_contents(folder))


def test_weights_as_bin_only(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(InputError, match="has no weights: model.safetensors"):
        find_contents(folder)
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pickled \(pytorch_model.bin\).* llava-norm-align convert"):
        find_contents(folder)


@pytest.mark.parametrize(
    ("weight_map", "found"),
    [(None, "None"), ({}, "no file"), ({"a": "../x.safetensors"}, "../x"), ({"a": ["x"]}, r"\['x'\]")],
)
def test_an_index_that_names_no_files(folder, weight_map, found):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match=f"names .*{found}"):
        find_contents(folder)


def test_missing_and_empty_weights(folder):
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="model-00002-of-00002.safetensors is empty"):
        find_contents(folder)
    write(folder, "model-00002-of-00002.safetensors")
    for name in ("tokenizer.model", "norm_align/training.json", "norm_align/curves.png", "LICENSE.pdf"):
        empty = write(folder, name, "")
        with pytest.raises(InputError, match=f"The file {empty} is empty"):
            find_contents(folder)
        empty.unlink()
    write(folder, "NOTICE", "")
    assert "NOTICE" in names(find_contents(folder))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match="model-00002-of-00002.safetensors is missing"):
        find_contents(folder)


def test_links(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "weights").write_text("x")
    (folder / "notes.txt").symlink_to(outside / "weights")  # it stays, wherever it leads
    (folder / "NOTICE").symlink_to("config.json")
    (folder / "norm_align" / "curves.json").symlink_to("../config.json")
    assert {"NOTICE", "norm_align/curves.json"} < names(find_contents(folder))
    assert "notes.txt" in dict(find_contents(folder).left_out)
    link = folder / "LICENSE"
    for name in (".env", "LICENSE.pkl", "drafts/recipe.json"):
        write(folder, name, "PASSWORD=1")
        link.symlink_to(name)
        with pytest.raises(InputError, match=f"{link} is a link to .*{name}, which does not go up itself"):
            find_contents(folder)
        link.unlink()
    for target, words in ((outside / "weights", "out of the folder"), ("gone", "to nothing"), ("LICENSE", "nothing")):
        link.symlink_to(target)
        with pytest.raises(InputError, match=f"{link} is a link .*{words}"):
            find_contents(folder)
        link.unlink()
    shutil.move(folder / "norm_align", outside / "norm_align")
    (folder / "norm_align").symlink_to(outside / "norm_align")
    with pytest.raises(InputError, match="norm_align is a link, which is not followed"):
        find_contents(folder)


def test_a_snapshot_in_the_cache_of_the_hub(folder, tmp_path):
    """It is made of links to blobs; a link elsewhere in the cache is as any other."""
    repository = tmp_path / "models--me--x"
    snapshot = repository / "snapshots" / "0a1b"
    (repository / "blobs").mkdir(parents=True)
    for number, path in enumerate(path for path in folder.rglob("*") if path.is_file()):
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = shutil.copyfile(path, repository / "blobs" / str(number))
        link.symlink_to(os.path.relpath(blob, link.parent))
    found = find_contents(snapshot)
    assert names(found) == MODEL
    assert [item.size for item in found.items] == [(folder / item.name).stat().st_size for item in found.items]
    (snapshot / "LICENSE").symlink_to(write(repository, "refs/main"))
    with pytest.raises(InputError, match="LICENSE is a link that leads out"):
        find_contents(snapshot)


def test_what_is_no_file_or_cannot_be_read(folder, monkeypatch):
    os.mkfifo(folder / "LICENSE")
    with pytest.raises(InputError, match="LICENSE is neither a file nor a folder"):
        find_contents(folder)
    (folder / "LICENSE").unlink()

    opened = Path.open

    def refuse(path, *args, **kwargs):
        if path.name == "generation_config.json":  # root may read everything, so the system cannot refuse it here
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"generation_config.json cannot be read \(Permission denied\)"):
        find_contents(folder)


def test_no_folder_and_a_file(tmp_path):
    file = write(tmp_path, "x.txt")
    for name, words in ((tmp_path / "none", "There is no folder"), (file, "is a file"), (file / "a", "no folder")):
        with pytest.raises(InputError, match=f"{words}.*Name the folder of a norm-aligned model"):
            find_contents(name)


def test_a_folder_that_is_no_model(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(InputError, match="no config.json"):
        find_contents(tmp_path)


def test_a_file_over_the_limit_is_refused_with_a_command_that_helps(folder, monkeypatch):
    """The command is run, in smaller files than it says, and gives the same model."""
    size = max(item.size for item in find_contents(folder).items if "safetensors" in item.name)
    monkeypatch.setattr(contents, "MAX_FILE", size - 1)
    monkeypatch.setattr(contents, "SHARD", "60KB")
    with pytest.raises(InputError, match="the Hub takes files of up to") as caught:
        find_contents(folder)
    os.truncate(write(folder, "tokenizer.model"), size)
    for name in ("model-00001-of-00002", "model-00002-of-00002"):
        os.rename(folder / f"{name}.safetensors", folder / f"{name}.kept")
        os.truncate(write(folder, f"{name}.safetensors"), 1)
    with pytest.raises(InputError, match="tokenizer.model has .* files of up to .* GB. Remove it"):
        find_contents(folder)
    (folder / "tokenizer.model").unlink()
    for name in ("model-00001-of-00002", "model-00002-of-00002"):
        os.rename(folder / f"{name}.kept", folder / f"{name}.safetensors")
    command = str(caught.value).partition("release those: ")[2]
    assert command.startswith("python -c '")
    write(folder, "checkpoint-1/")
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True, capture_output=True)
    smaller = folder.with_name("model-shards")
    found = find_contents(smaller)
    assert len([name for name in names(found) if name.endswith(".safetensors")]) > 2
    assert names(found) - set(os.listdir(smaller)) == {"norm_align/calibration.json"} and found.left_out == []
    assert [check for check in examine(smaller, load=False) if check.status == "failed"] == []
    for name in MODEL - {name for name in MODEL if "safetensors" in name}:
        assert (smaller / name).read_bytes() == (folder / name).read_bytes()
    assert tensors(smaller) == tensors(folder)


def tensors(folder):
    """What is stored, whatever the names: each tensor's dtype, shape and bytes."""
    stored = [tensor for path in folder.glob("*.safetensors") for tensor in load_file(path).values()]
    return sorted((str(one.dtype), tuple(one.shape), one.numpy().tobytes()) for one in stored)


def test_very_large_files_are_told(folder, monkeypatch):
    monkeypatch.setattr(contents.constants, "MAX_HTTP_DOWNLOAD_SIZE", 10_000)
    write(folder, "norm_align/attention_map.png")
    notes = find_contents(folder).notes
    assert any("model-00001-of-00002.safetensors" in note and "hf_xet" in note for note in notes)
    assert any("attention_map.png shows one of the images" in note for note in notes)


def test_home_folders_go_up_as_a_tilde(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/srv/people/ann")
    told = {
        "a": "/srv/people/ann/models/x", "b": "/home/bob/data and /Users/Carl D/x", "c": "/root/x", "d": "/rooted/y",
        "e": "https://example.org/home/bob/x", "f": "/srv/people/annette", "g": "/data/llava/rows.json",
    }  # fmt: skip
    text = json.dumps(told)
    write(folder, "norm_align/training.json", text)
    write(folder, "README.md", "in /home/bob")
    before = find_contents(folder)
    after = without_homes(before, tmp_path / "copies")
    assert [(item.name, item.path) for item in before.items if item not in after.items] == [
        ("norm_align/training.json", folder / "norm_align" / "training.json")
    ]
    [changed] = [item for item in after.items if item not in before.items]
    assert changed.path.is_relative_to(tmp_path / "copies") and changed.size == changed.path.stat().st_size
    assert json.loads(changed.path.read_text()) == told | {
        "a": "~/models/x", "b": "~/data and ~ D/x", "c": "~/x",
    }  # fmt: skip
    assert (folder / "norm_align" / "training.json").read_text() == text
    assert any("training.json goes up with ~" in note for note in after.notes)
    assert any("names a place on a machine: /" in note for note in after.notes)
    assert "README.md names a home folder" in after.notes
    assert names(after) == names(before) and after.left_out == before.left_out
