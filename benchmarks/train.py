"""What our trainer on a norm-aligned model costs beside TRL's SFTTrainer on the stock model.

usage: python benchmarks/train.py [--rounds N] [--steps N]

micro-LLaVA, its projector trained as in LLaVA's first stage on easy-VQA, both in turn with the same rows. Time: the
median step of a run against that of the other run in the same round. Memory: the peak of VmRSS (on a GPU, of what
PyTorch allocated) of a run in a fresh process each.
"""

import argparse
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from datasets import Image, List
from paired import figure, ratio, write_result
from transformers import TrainerCallback
from trl import SFTTrainer

from llava_norm_align.common.loading import load_model, load_processor
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.micro import cached_micro
from llava_norm_align.data.templates import training_template
from llava_norm_align.trl_recipes.collator import LlavaCollator, to_dataset
from llava_norm_align.trl_recipes.config import LlavaSFTConfig
from llava_norm_align.trl_recipes.rows import easy_vqa_rows
from llava_norm_align.trl_recipes.trainer import LlavaTrainer

OURS, PLAIN = "ours", "plain"
MOST = 1.01
PROCESSES = 3


class Clock(TrainerCallback):
    """Seconds of each step; the first is left out."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, *args, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)


def run(kind: str, folder: Path, rows, steps: int, scratch: Path) -> float:
    """Seconds of the median step of a short training of the model in `folder`."""
    model, processor = load_model(folder), load_processor(folder)
    model.set_attn_implementation("eager" if model.device.type == "cpu" else "sdpa")
    arguments = LlavaSFTConfig(
        output_dir=str(scratch), max_steps=steps + 1, per_device_train_batch_size=4, learning_rate=1e-3, seed=0,
        trained_parts=["projector", "norm"], save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1,
        activation_checkpointing=False, assistant_only_loss=kind == PLAIN,
    )  # fmt: skip
    model.requires_grad_(False)
    for parameter in model.model.multi_modal_projector.parameters():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    clock = Clock()
    options = {"model": model, "args": arguments, "processing_class": processor, "callbacks": [clock]}
    if kind == OURS:
        template = training_template(processor)
        trainer = LlavaTrainer(**options, train_dataset=rows, data_collator=LlavaCollator(processor, template))
    else:
        trainer = SFTTrainer(**options, train_dataset=rows.cast_column("images", List(Image())))
    with redirect_stdout(StringIO()):
        trainer.train()
    return statistics.median(clock.seconds[1:])


def peak_gb() -> float:
    """Of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory", choices=(OURS, PLAIN), help="print the peak memory of one run in GB, and end")
    parser.add_argument("--aligned", type=Path, help="a converted micro-LLaVA; default: it is made")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = to_dataset(easy_vqa_rows())
    with tempfile.TemporaryDirectory() as scratch:
        aligned = options.aligned or Path(scratch) / "aligned"
        if options.aligned is None:
            convert(str(cached_micro()), aligned, report=False)
        folders = {OURS: aligned, PLAIN: cached_micro()}
        if options.memory:
            run(options.memory, folders[options.memory], rows, options.steps, Path(scratch) / "out")
            print(peak_gb())
            return
        timings = []
        for number in range(options.rounds + 1):
            row = {}
            for kind in (OURS, PLAIN) if number % 2 else (PLAIN, OURS):  # neither is always the first
                row[kind] = run(kind, folders[kind], rows, options.steps, Path(scratch) / "out")
            if number:  # the first is a warm-up
                timings.append(row)
                print({name: round(value, 4) for name, value in row.items()}, flush=True)
        memory = {kind: [] for kind in folders}
        for _ in range(PROCESSES):
            for kind in folders:
                command = [sys.executable, __file__, "--memory", kind, "--aligned", str(aligned)]
                said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                memory[kind].append(float(said.split()[-1]))
    ratios = [ours / plain for ours, plain in zip(memory[OURS], memory[PLAIN], strict=True)]
    figures = [ratio(timings, OURS, PLAIN, MOST), figure("peak memory, ours / plain", ratios, MOST)]
    write_result("train", timings, figures, steps=options.steps, memory_gb=memory)


if __name__ == "__main__":
    main()
