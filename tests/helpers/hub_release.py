"""Small folders with the names of a released model, and their release to the loopback Hub from this process."""

import json
import os
import time

from huggingface_hub import HfApi, constants

from llava_norm_align.release.card_check import MARK
from llava_norm_align.release.contents import Item
from llava_norm_align.release.upload import Target, open_access, upload
from llava_norm_align.release.verify import check_remote

CONFIG = {
    "model_type": "llava_norm_align",
    "architectures": ["LlavaNormAlignForConditionalGeneration"],
    "text_config": {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64},
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 16, "num_hidden_layers": 2},
}
CARD = f"---\nlicense: apache-2.0\ntags:\n- llava-norm-align\n---\n{MARK}\n# A model\n"
MESSAGE = "Release"
SHARD = 60_000  # bytes


def shard(number, count):
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_folder(folder, shards=3, size=SHARD, card=CARD, **fields):
    """Random weights in `shards` files, with `fields` in place of config.json's."""
    (folder / "norm_align").mkdir(parents=True)
    for number in range(1, shards + 1):
        (folder / shard(number, shards)).write_bytes(os.urandom(size))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"shards": shards}))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    (folder / "norm_align" / "training.json").write_text('{"schema_version": 1}\n')
    (folder / "README.md").write_text(card)
    return folder


def items_of(folder):
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [Item(path.relative_to(folder).as_posix(), path, path.stat().st_size) for path in paths]


def contents(folder):
    return {item.name: item.path.read_bytes() for item in items_of(folder)}


def in_process(monkeypatch, home, xet=False):
    """Let this process use a Hub, with no login of its own; waits take no time. Returns the list of waits."""
    waits = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not xet)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(home / "home"))  # of hf_xet
    sleep = time.sleep
    monkeypatch.setattr("time.sleep", lambda seconds: waits.append(seconds) if seconds >= 1 else sleep(seconds))
    return waits


def release(hub, folder, name="me/x", token="hf_write", said=None, **options):
    """open_access, upload and check_remote. `said`: a list that gets every line."""
    said = [] if said is None else said
    api, target, items = HfApi(endpoint=hub.address, token=token), Target(name, **options), items_of(folder)
    access = open_access(target, api, items, said.append)
    pushed = upload(api, target, access, items, MESSAGE, said.append)
    check_remote(api, pushed, items)
    return pushed
