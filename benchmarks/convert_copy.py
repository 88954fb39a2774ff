"""The write of a conversion (copy and hash) against `cp` of the same checkpoint, as a ratio.

usage: python benchmarks/convert_copy.py [FOLDER]      FOLDER: with 6 GB free (default: the temporary folder)
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from paired import compare, summarise
from safetensors.torch import load_file, save_file

from llava_norm_align.common.weights import read_weights, write_index
from llava_norm_align.conversion.files import copy_with_digests
from llava_norm_align.conversion.micro import cached_micro

PAIRS = 10
TABLE_BYTES = 2_000_000_000


def write_source(folder: Path) -> None:
    """micro-LLaVA with a text table of 2 GB."""
    shutil.copytree(cached_micro(), folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(key for key in tensors if key.endswith("embed_tokens.weight"))
    width = tensors[name].shape[1]
    rows = TABLE_BYTES // (2 * width)
    tensors[name] = torch.randn(rows, width, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    save_file({name: tensors.pop(name)}, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    write_index(folder, sorted(folder.glob("model-*.safetensors")))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"vocab_size": 49153', f'"vocab_size": {rows}'))


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as scratch:
        source, copy, written = (Path(scratch) / name for name in ("source", "copy", "written"))
        write_source(source)
        files = read_weights(source).files
        size = sum(file.stat().st_size for file in files)
        written.mkdir()

        def cp():
            shutil.rmtree(copy, ignore_errors=True)
            subprocess.run(["cp", "-r", source, copy], check=True)

        def write():
            copy_with_digests({file.name: file for file in files}, written)

        rows = compare(write, cp, PAIRS)
        summarise("convert_write", rows, 1.1, first="copy and hash", second="cp -r", bytes=size)


if __name__ == "__main__":
    main()
