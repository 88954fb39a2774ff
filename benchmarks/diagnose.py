"""What a diagnosis costs beside bare forward passes, what memory it takes, and how exact its quantiles are.

usage: python benchmarks/diagnose.py [--rounds N] [--hidden N] [--layers N]

Time: measure() (norms, cosines and angles of all layers) beside forward passes of the same model on the same inputs,
in turn: micro-LLaVA on photos, and a random LLaVA in bfloat16 of width --hidden with 576 visual tokens. Memory: the
peak of VmRSS in diagnose_model on 8 and then on 512 image files, with a tiny random model, a fresh process each time.
Quantiles: LogHistogram's rank beside that of numpy's quantile, on a million heavy-tailed values.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from paired import figure, ratio, seconds, write_result
from PIL import Image
from shapes import IMAGE_TOKEN, VISUAL_TOKENS
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from llava_norm_align.common.images import open_image
from llava_norm_align.common.loading import load_model, load_processor
from llava_norm_align.common.samples import PHOTOS, sample_photos
from llava_norm_align.conversion.micro import IMAGE_SIDE, cached_micro
from llava_norm_align.diagnosis.diagnose import QUESTION, diagnose_model
from llava_norm_align.diagnosis.measure import measure
from llava_norm_align.diagnosis.prompts import make_prompt
from llava_norm_align.diagnosis.running import LogHistogram
from llava_norm_align.diagnosis.structure import find_structure, forward_options
from llava_norm_align.diagnosis.tokens import Prompt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOST_TIME = 1.2  # of the bare forward passes
PROMPTS = {"micro": 6, "wide": 2}  # forward passes in one timing
TEXT_TOKENS = 64
FEW, MANY = 8, 512  # images
MOST_GROWTH = 20  # MB
# glibc gives back what is freed: what its arenas keep for later differs by 40 MB from one process to the next
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
PROCESSES = 5
VALUES, SEEDS, QUANTILES = 1_000_000, 10, (0.01, 0.5, 0.99)
MOST_RANK_ERROR = 0.5  # percent


def random_llava(vision: dict, text: dict, image_token: int, dtype: torch.dtype) -> LlavaForConditionalGeneration:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(patch_size=14, **vision).to_dict(),
        text_config=LlamaConfig(**text).to_dict(),
        image_token_index=image_token,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(DEVICE):
        model = LlavaForConditionalGeneration(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def micro() -> tuple[LlavaForConditionalGeneration, list[Prompt]]:
    """micro-LLaVA and its prompts for photos."""
    folder = cached_micro()
    model, processor = load_model(folder, device=DEVICE), load_processor(folder)
    photos = sample_photos("A benchmark", PHOTOS[: PROMPTS["micro"]])
    return model, [make_prompt(processor, QUESTION, open_image(path), model.device, model.dtype) for path in photos]


def wide(hidden: int, layers: int) -> tuple[LlavaForConditionalGeneration, list[Prompt]]:
    """A LLaVA with Llama's proportions, a small tower, random weights, and random prompts."""
    vision = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, image_size=336)
    text = dict(hidden_size=hidden, intermediate_size=hidden * 43 // 16, num_attention_heads=hidden // 128)
    text |= dict(num_hidden_layers=layers, vocab_size=32064)
    model, prompts = random_llava(vision, text, IMAGE_TOKEN, torch.bfloat16), []
    for _ in range(PROMPTS["wide"]):
        ids = torch.randint(5, 31999, (1, VISUAL_TOKENS + TEXT_TOKENS))
        ids[0, 5 : 5 + VISUAL_TOKENS] = IMAGE_TOKEN
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs["pixel_values"] = torch.randn(1, 3, 336, 336, dtype=torch.bfloat16)
        prompts.append(Prompt({name: value.to(DEVICE) for name, value in inputs.items()}))
    return model, prompts


@torch.no_grad()
def time_rows(name: str, model: LlavaForConditionalGeneration, prompts: list[Prompt], rounds: int) -> list[dict]:
    """Seconds of measure() and of the bare forward passes, round by round."""
    structure, options, rows = find_structure(model, prompts[0].inputs), forward_options(model), []

    def bare() -> None:
        for prompt in prompts:
            model(**prompt.inputs, **options)

        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def measured() -> None:
        measure(model, prompts, structure).ratio()  # waits for the device

    actions = [(f"{name}_measure", measured), (f"{name}_bare", bare)]
    for number in range(rounds + 1):
        row = {key: seconds(action) for key, action in (actions if number % 2 else actions[::-1])}
        print({key: round(value, 3) for key, value in row.items()}, file=sys.stderr, flush=True)
        if number:  # the first is a warm-up
            rows.append(row)
    return rows


def memory_growth() -> dict[str, float]:
    """Peak of resident memory in a diagnosis of 8 images and of 512, in MB, in this process."""
    processor = load_processor(cached_micro())
    size = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=16, num_attention_heads=4)
    vision, text = size | {"image_size": IMAGE_SIDE}, size | {"vocab_size": len(processor.tokenizer)}
    model = random_llava(vision, text, processor.tokenizer.convert_tokens_to_ids("<image>"), torch.float32)
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.png" for number in range(MANY)]
        for file in files:
            sides = random.integers(32, 160, size=2)
            Image.fromarray(random.integers(256, size=(*sides, 3), dtype=np.uint8)).save(file)

        def peak(images: int) -> float:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
            diagnose_model(model, processor, files[:images], name="tiny")
            return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6

        for _ in range(2):  # warm-up
            peak(FEW)
        return {"resident_mb_8_images": peak(FEW), "resident_mb_512_images": peak(MANY)}


def memory_rows() -> list[dict[str, float]]:
    rows = []
    for _ in range(PROCESSES):
        command = [sys.executable, __file__, "--memory"]
        done = subprocess.run(command, env={**os.environ, **ALLOCATOR}, stdout=subprocess.PIPE, text=True, check=True)
        few, many = map(float, done.stdout.split()[-2:])
        rows.append({"resident_mb_8_images": few, "resident_mb_512_images": many})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def rank_error(seed: int) -> float:
    """The largest distance of a quantile's rank from the rank that was asked for, in percent of the values."""
    random, worst = np.random.default_rng(seed), 0.0
    for values in (
        random.lognormal(sigma=2, size=VALUES),
        1 + random.pareto(1.2, size=VALUES),
        np.abs(random.standard_t(2, size=VALUES)),
    ):
        histogram = LogHistogram()
        for piece in torch.from_numpy(values).split(50_000):
            histogram.add(piece)
        values.sort()
        for q in QUANTILES:
            rank, wanted = np.searchsorted(values, [histogram.quantile(q), np.quantile(values, q)])
            worst = max(worst, 100 * abs(int(rank) - int(wanted)) / VALUES)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(*memory_growth().values())
        return
    load = [os.getloadavg()[0]]
    rows = time_rows("micro", *micro(), options.rounds)
    rows_wide = time_rows("wide", *wide(options.hidden, options.layers), options.rounds)
    memory, errors = memory_rows(), [rank_error(seed) for seed in range(SEEDS)]
    load.append(os.getloadavg()[0])
    growth = [row["resident_mb_512_images"] - row["resident_mb_8_images"] for row in memory]
    figures = [
        ratio(rows, "micro_measure", "micro_bare", MOST_TIME),
        ratio(rows_wide, "wide_measure", "wide_bare", MOST_TIME),
        figure("growth of resident memory from 8 to 512 images, MB", growth, MOST_GROWTH),
        figure("rank error of p1, p50 and p99, worst of three distributions, percent", errors, MOST_RANK_ERROR),
    ]
    rows = [one | two for one, two in zip(rows, rows_wide, strict=True)]
    details = {
        "device": DEVICE,
        "threads": torch.get_num_threads(),
        "forward_passes": PROMPTS,
        "wide": {"hidden_size": options.hidden, "decoder_layers": options.layers, "visual_tokens": VISUAL_TOKENS},
        "worst_rank_error_percent": max(errors),
        "worst_growth_mb": max(growth),
        "load_average_start_end": load,
        "memory": memory,
    }
    write_result("diagnose", rows, figures, **details)


if __name__ == "__main__":
    main()
