"""convert against `cp` of the same checkpoint and against loading and saving it, side by side.

usage: python benchmarks/convert.py [--gb N] [--rounds N] [--folder DIR]      DIR: with three times N GB free

The checkpoint has the shapes of LLaVA-1.5-7B in float16, with as many decoder layers as N GB hold (14: all 32). Of a
conversion, `write` is the copy with its checksums, `convert` and `link` are whole conversions without the imports.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from paired import figure, ratio, seconds, write_result
from shapes import IMAGE_TOKEN, TEXT, VISION
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from llava_norm_align.common.weights import StoredTensor, write_header, write_index
from llava_norm_align.conversion.convert import convert

SHARD = 5_000_000_000  # bytes, as published
BLOCK = 2**24
MEMORY_LIMIT = 600_000_000  # bytes of anonymous memory
LINK_LIMIT = 2.0  # seconds


def config_of(gigabytes: float) -> LlavaConfig:
    layer = 2 * (4 * 4096**2 + 3 * 4096 * 11008)
    rest = 2 * (2 * 4096 * 32064) + 650_000_000
    layers = max(1, min(32, round((gigabytes * 1e9 - rest) / layer)))
    return LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION).to_dict(),
        text_config=LlamaConfig(**TEXT, num_hidden_layers=layers, tie_word_embeddings=False).to_dict(),
        image_token_index=IMAGE_TOKEN,
        dtype="float16",
    )


def write_checkpoint(folder: Path, config: LlavaConfig) -> int:
    """Write the checkpoint with random weights, and return its bytes."""
    folder.mkdir()
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in LlavaForConditionalGeneration(config).state_dict().items()}
    shards: list[list[StoredTensor]] = [[]]
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if sum(tensor.nbytes for tensor in shards[-1]) + size > SHARD:
            shards.append([])
        shards[-1].append(StoredTensor(name, "F16", shape, folder, 0, size))
    files = [folder / f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    block = torch.randn(BLOCK // 2).mul(0.02).half().numpy().tobytes()
    for file, shard in zip(files, shards, strict=True):
        with file.open("wb") as out:
            write_header(out, [(tensor.name, tensor) for tensor in shard])
            left = sum(tensor.nbytes for tensor in shard)
            while left:
                left -= out.write(block[: min(len(block), left)])
    write_index(folder, files)
    return sum(file.stat().st_size for file in files)


class AnonymousMemory:
    """The most anonymous memory (RssAnon) that this process had while the block ran, above that at its start."""

    def __enter__(self):
        self.start = self.most = self.now()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.done.set()
        self.thread.join()

    def watch(self):
        while not self.done.wait(0.02):
            self.most = max(self.most, self.now())

    @staticmethod
    def now() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])


def load_and_save(source: Path, target: Path) -> float:
    """Seconds of what a user would write instead, in a process of its own, without its imports."""
    code = (
        "import sys, time, torch\n"
        "from transformers import LlavaForConditionalGeneration as Model\n"
        "began = time.perf_counter()\n"
        "Model.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[2])\n"
        "print(time.perf_counter() - began)"
    )
    done = subprocess.run([sys.executable, "-c", code, source, target], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        source, target = Path(scratch) / "source", Path(scratch) / "target"
        config = config_of(options.gb)
        size = write_checkpoint(source, config)
        rows, memory = [], []

        def fresh() -> None:
            shutil.rmtree(target, ignore_errors=True)
            os.sync()

        for number in range(options.rounds + 1):
            row = {}
            fresh()
            row["cp"] = seconds(lambda: subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True))
            fresh()
            with AnonymousMemory() as used:
                parts = convert(str(source), target, report=False)["seconds"]
            row |= {"write": parts["write"], "verify": parts["verify"], "convert": parts["total"]}
            fresh()
            row["link"] = seconds(lambda: convert(str(source), target, report=False, link=True))
            fresh()
            row["load_and_save"] = load_and_save(source, target)
            print({name: round(value, 2) for name, value in row.items()}, file=sys.stderr)
            if number or options.rounds == 0:  # the first round fills the caches
                rows.append(row)
                memory.append(used.most - used.start)
    figures = [
        ratio(rows, "write", "cp", 1.1),
        figure("link, seconds", [row["link"] for row in rows], LINK_LIMIT),
        figure("anonymous memory of convert, bytes", memory, MEMORY_LIMIT),
    ]
    details = {
        "bytes": size,
        "decoder_layers": config.text_config.num_hidden_layers,
        "convert_by_cp": ratio(rows, "convert", "cp", float("inf"))["median"],
        "convert_by_load_and_save": ratio(rows, "convert", "load_and_save", float("inf"))["median"],
    }
    write_result(f"convert_{options.gb:g}gb", rows, figures, **details)


if __name__ == "__main__":
    main()
