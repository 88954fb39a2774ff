"""Faults that are planted in a sound model folder: in its config.json, its weights, its index, its .bin."""

import json
import math
import os
import struct
import zipfile

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.convert import write_json

TABLE = "language_model.model.embed_tokens.weight"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"


def change_config(folder, **fields):
    """Set fields of config.json; None takes one away."""
    content = json.loads((folder / "config.json").read_text())
    for name, value in fields.items():
        content.pop(name) if value is None else content.update({name: value})
    write_json(folder / "config.json", content)


def set_config(folder, **fields):
    """As change_config, but None becomes null."""
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | fields)


def change_text_config(folder, **fields):
    content = json.loads((folder / "config.json").read_text())["text_config"]
    change_config(folder, text_config=content | fields)


def change_tensors(folder, **tensors):
    content = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        content.pop(name) if tensor is None else content.update({name: tensor})
    save_file(content, folder / WEIGHTS, metadata={"format": "pt"})


def change_table(folder, change):
    table = load_file(folder / WEIGHTS)[TABLE]
    change_tensors(folder, **{TABLE: change(table)})


def with_value(value):
    def change(table):
        table[5, 2] = value
        return table

    return change


def with_inf(table):
    return with_value(math.inf)(table)


def cut(path):
    """Half a file, as a download that broke off leaves it."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lie(folder):
    """The header promises one more row than its bytes can hold."""
    content = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header[TABLE]["shape"][0] += 1
    changed = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])


def change_index(folder, change, name=INDEX):
    """`change` is called with the weight map."""
    index = json.loads((folder / name).read_text())
    change(index["weight_map"])
    write_json(folder / name, index)


def misplace(folder):
    """The index places the table in a shard that does not hold it."""
    shards = sorted(folder.glob("model-*.safetensors"))
    other = next(file.name for file in shards if TABLE not in load_file(file))
    change_index(folder, lambda places: places.update({TABLE: other}))


def move_out(folder, absolute=False):
    """The index names a shard outside of the folder, which is there."""
    shard = next(folder.glob("model-00001*"))
    moved = shard.rename(folder.parent / shard.name)
    name = str(moved) if absolute else f"../{moved.name}"
    change_index(folder, lambda places: places.update({t: name for t, f in places.items() if f == shard.name}))


class Runs:
    """What an attacker pickles: a call that leaves a trace."""

    def __init__(self, trace):
        self.trace = str(trace)

    def __reduce__(self):
        return (os.mkdir, (self.trace,))


def change_pickled(folder, change, **options):
    """`change` is called with the state dict in the .bin."""
    tensors = torch.load(folder / PICKLED, weights_only=True)
    change(tensors)
    torch.save(tensors, folder / PICKLED, **options)


def compress(folder):
    """The same records, zipped anew by another program."""
    with zipfile.ZipFile(folder / PICKLED) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(folder / PICKLED, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
