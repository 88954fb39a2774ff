"""`.bin` weights: read by offset they are what torch.load reads, and nothing but tensors is taken."""

import io
import json
import os
import pickle
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.serialization import config as serialization_config

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.weights import (
    DTYPE_NAMES,
    copy_bytes,
    is_alias,
    read_pickled,
    read_weights,
    write_renamed,
)


def tensor_of(stored):
    """The tensor of the bytes that `stored` points to."""
    out = io.BytesIO()
    copy_bytes(stored, out)
    dtype = next(dtype for dtype, name in DTYPE_NAMES.items() if name == stored.dtype)
    data = out.getvalue()
    return torch.frombuffer(bytearray(data), dtype=dtype).view(stored.shape) if data else torch.empty(stored.shape)


def bits(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def many_kinds():
    """Tensors of every dtype, and the views and shared storages that a model's state dict can hold."""
    torch.manual_seed(0)
    big = torch.randn(40, 16)
    kinds = {str(dtype): (torch.rand(3, 5) * 100).to(dtype) for dtype in DTYPE_NAMES}
    return kinds | {
        "big": big,
        "rows of big": big[7:11],
        "the end of big": big[-1],
        "alias of big": big,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "one row": torch.randn(6, 4)[:, 1:2].t()[:, :1],  # strides that no neighbour uses
    }


def test_every_tensor_is_what_torch_loads(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save(many_kinds(), path)
    expected = torch.load(path, weights_only=True)
    weights = read_weights(tmp_path)
    assert weights.pickled and weights.index is None and weights.files == [path]
    assert set(weights.tensors) == set(expected)
    for name, stored in weights.tensors.items():
        tensor = tensor_of(stored)
        assert stored.name == name and stored.shape == tuple(expected[name].shape)
        assert stored.nbytes == expected[name].nbytes
        if stored.nbytes:
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(bits(tensor), bits(expected[name])), name
    assert is_alias(weights.tensors["big"], weights.tensors["alias of big"])
    assert not is_alias(weights.tensors["big"], weights.tensors["rows of big"])
    assert not is_alias(weights.tensors["empty"], weights.tensors["empty"])


def test_bytes_are_copied_into_safetensors(tmp_path):
    kinds = {name: tensor for name, tensor in many_kinds().items() if name != "empty"}
    torch.save(kinds, tmp_path / "pytorch_model.bin")
    stored = read_weights(tmp_path).tensors
    write_renamed(tmp_path / "new.safetensors", [(f"new {name}", tensor) for name, tensor in stored.items()])
    written = load_file(tmp_path / "new.safetensors")
    assert len(written) == len(kinds)
    for name, tensor in kinds.items():
        assert written[f"new {name}"].dtype == tensor.dtype
        assert torch.equal(bits(written[f"new {name}"]), bits(tensor))


@pytest.mark.parametrize("alignment", [64, 4096])
def test_padding_and_other_devices_do_not_move_the_offsets(tmp_path, monkeypatch, alignment):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    tensors = {f"layer {number}": torch.randn(number + 1, 3) for number in range(20)}
    with serialization_config.patch({"save.storage_alignment": alignment}):
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    stored = read_weights(tmp_path).tensors
    assert min(tensor.offset for tensor in stored.values()) % alignment == 0
    assert all(torch.equal(tensor_of(stored[name]), tensor) for name, tensor in tensors.items())


def write_shards(folder, shards, index_file="pytorch_model.bin.index.json"):
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"pytorch_model-{number:05}-of-{len(shards):05}.bin"
        torch.save(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / index_file).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards_and_which_format_wins(tmp_path):
    shards = [{"a": torch.randn(4), "b": torch.randn(2, 2)}, {"c": torch.randn(3)}]
    write_shards(tmp_path, shards)
    weights = read_weights(tmp_path)
    assert weights.pickled and len(weights.files) == 2 and set(weights.index["weight_map"]) == {"a", "b", "c"}
    for name, tensor in (shards[0] | shards[1]).items():
        assert torch.equal(tensor_of(weights.tensors[name]), tensor)
    torch.save({"one file": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert set(read_weights(tmp_path).tensors) == {"one file"}  # before an index, as transformers reads it
    save_file({"safe": torch.ones(1)}, tmp_path / "model.safetensors")
    weights = read_weights(tmp_path)
    assert set(weights.tensors) == {"safe"} and not weights.pickled


@pytest.mark.parametrize(
    ("message", "damage"),
    [
        ("1 weight file.*missing, such as", lambda folder, index: index.update(c="gone.bin")),
        ("must lie in the folder itself", lambda folder, index: index.update(c="../outside.bin")),
        ("must lie in the folder itself", lambda folder, index: index.update(c=str(folder / "x.bin"))),
        ("1 tensor.*does not hold them, such as d", lambda folder, index: index.update(d=index["a"])),
        ("does not hold them, such as c", lambda folder, index: index.update(c=index["a"])),
        ("leaves out 1 tensor.*such as b", lambda folder, index: index.pop("b")),
        ("but a file name was expected", lambda folder, index: index.update(b=3)),
        ("has no weight_map", lambda folder, index: index.clear()),
    ],
)
def test_an_index_that_disagrees_is_refused(tmp_path, message, damage):
    folder = tmp_path / "model"
    index = write_shards(folder, [{"a": torch.randn(4), "b": torch.randn(2, 2)}, {"c": torch.randn(3)}])
    shutil.copy(folder / index["a"], tmp_path / "outside.bin")
    damage(folder, index)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(InputError, match=message):
        read_weights(folder)


class Runs:
    """What an attacker pickles: a call that leaves a trace."""

    def __init__(self, trace):
        self.trace = str(trace)

    def __reduce__(self):
        return (os.mkdir, (self.trace,))


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def flip(path):
    """Damage the pickle inside the zip, whose checksum torch does not read."""
    data = bytearray(path.read_bytes())
    start = data.index(b"collections")
    data[start : start + 4] = b"\xff\x00\x01\xfe"
    path.write_bytes(data)


def repack(path, compression):
    """Write the same records by another program's rules."""
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def compressed(path):
    torch.save({"a": torch.ones(100)}, path)
    repack(path, zipfile.ZIP_DEFLATED)


def legacy(path):
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)


def big_endian(path):
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, b"big" if name.endswith("byteorder") else data)


def torchscript(path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))


REFUSED = {
    "a call": (r"mkdir.*nothing of it was run", lambda p: torch.save({"a": Runs(p.parent / "trace")}, p)),
    "a class": ("holds more than tensors.*pathlib", lambda p: torch.save({"a": p}, p)),
    "a plain pickle": ("not in the zip format", lambda p: p.write_bytes(pickle.dumps(Runs(p.parent / "trace")))),
    "the format before 1.6": ("older", legacy),
    "a pointer": ("Git LFS", lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")),
    "an empty file": ("not in the zip format", lambda p: p.write_bytes(b"")),
    "half a file": ("cut or damaged", lambda p: cut(p, p.stat().st_size // 2)),
    "a missing end": ("cut or damaged", lambda p: cut(p, -30)),
    "a damaged pickle": ("cut or damaged|holds more than tensors", flip),
    "compressed": ("cut or damaged.*uncompressed", compressed),
    "big-endian": ("big-endian", big_endian),
    "TorchScript": (r"more than tensors \(TorchScript\)", torchscript),
    "no dict": ("holds a list", lambda p: torch.save([torch.ones(3)], p)),
    "one tensor": ("holds a .*Tensor", lambda p: torch.save(torch.ones(3), p)),
    "nested": ("'model': dict.*training checkpoint", lambda p: torch.save({"model": {"a": torch.ones(3)}}, p)),
    "an optimizer's state": ("'epoch': int", lambda p: torch.save({"a": torch.ones(3), "epoch": 1}, p)),
    "no name": ("3: ", lambda p: torch.save({3: torch.ones(3)}, p)),
    "transposed": ("transposed", lambda p: torch.save({"a": torch.ones(3, 2).t()}, p)),
    "every second": ("transposed", lambda p: torch.save({"a": torch.ones(8)[::2]}, p)),
    "expanded": ("shared elements", lambda p: torch.save({"a": torch.ones(1, 4).expand(3, 4)}, p)),
    "sparse": ("sparse", lambda p: torch.save({"a": torch.eye(3).to_sparse()}, p)),
    "complex": ("complex64.*safetensors does not know", lambda p: torch.save({"a": torch.ones(2) + 1j}, p)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_but_dense_tensors_by_name_is_refused(tmp_path, case):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(3), "b": torch.nn.Parameter(torch.ones(2, 2))}, path)
    message, write = REFUSED[case]
    write(path)
    with pytest.raises(InputError, match=message) as caught:
        read_weights(tmp_path)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "trace").exists()


def test_a_repacked_file_is_read_right_or_refused(tmp_path):
    """torch computes offsets from its own way of packing; what another program packed must not be misread."""
    path = tmp_path / "pytorch_model.bin"
    tensors = {f"layer {number}": torch.randn(number + 1, 3) for number in range(5)}
    torch.save(tensors, path)
    repack(path, zipfile.ZIP_STORED)
    assert all(torch.equal(torch.load(path, weights_only=True)[name], tensor) for name, tensor in tensors.items())
    try:
        stored = {tensor.name: tensor for tensor in read_pickled(path)}
    except InputError as error:
        assert "uncompressed record" in str(error)
    else:
        assert all(torch.equal(tensor_of(stored[name]), tensor) for name, tensor in tensors.items())


def test_no_weights_at_all(tmp_path):
    (tmp_path / "consolidated.00.pth").write_bytes(b"")
    with pytest.raises(InputError, match=r"no weights in .*model.safetensors, pytorch_model.bin"):
        read_weights(tmp_path)


def test_without_the_offsets_of_newer_torch(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    load = torch.load

    def older(*args, **options):
        content = load(*args, **options)
        for tensor in content.values():
            del tensor.untyped_storage()._checkpoint_offset
        return content

    monkeypatch.setattr(torch, "load", older)
    with pytest.raises(InputError, match="Install torch 2.7"):
        read_weights(tmp_path)
