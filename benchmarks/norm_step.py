"""What the norm with gradient compensation adds to a training step and to generation on micro-LLaVA, as ratios.

usage: python benchmarks/norm_step.py
"""

import tempfile
from pathlib import Path

import torch
from paired import compare, summarise

from llava_norm_align.common.loading import load_model, load_processor
from llava_norm_align.common.prompts import prepare_inputs
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.micro import cached_micro
from llava_norm_align.data.easy_vqa import load_image, load_questions
from llava_norm_align.trl_recipes.projector import answer_loss, encode

PAIRS = 20


def main() -> None:
    rows = load_questions("train")[:8]
    with tempfile.TemporaryDirectory() as folder:
        convert(str(cached_micro()), Path(folder) / "converted", report=False)
        processor = load_processor(Path(folder) / "converted")
        aligned, stock = load_model(Path(folder) / "converted"), load_model(cached_micro())
    inputs, lengths = encode(processor, rows)
    photo = prepare_inputs(processor, [rows[0].question], [load_image(rows[0].image)]).to(stock.dtype)

    def train(model):
        model.zero_grad()
        answer_loss(model, inputs, lengths).backward()

    def generate(model):
        with torch.inference_mode():
            model.generate(**photo, do_sample=False, min_new_tokens=32, max_new_tokens=32)

    for model in (aligned, stock):
        model.requires_grad_(False).model.multi_modal_projector.float().requires_grad_(True).train()
    steps = compare(lambda: train(aligned), lambda: train(stock), PAIRS)
    summarise("norm_training_step", steps, 1.01, first="norm with compensation", second="stock", batch=len(rows))
    for model in (aligned, stock):
        model.model.multi_modal_projector.to(torch.bfloat16).eval()
    aligned.model.multi_modal_projector.align_norm.float()
    answers = compare(lambda: generate(aligned), lambda: generate(stock), PAIRS)
    summarise("norm_generation", answers, 1.01, first="norm", second="stock", new_tokens=32)


if __name__ == "__main__":
    main()
