"""What the norm with gradient compensation adds to a training step and to generation at hidden size 4096, as ratios.

usage: python benchmarks/norm_overhead.py [--layers N] [--pairs N] [--alone]

--alone: the norm's own forward and backward pass beside a stock step. On a busy machine two steps differ by more than
the norm costs; its own time bounds what it adds.

A LLaVA with the shapes of LLaVA-1.5-7B but N decoder layers (default 2: the fewer, the more the norm weighs), random
weights, bfloat16; the projector trains, as in the first stage. Both models share tower and language model.
"""

import argparse

import torch
from paired import ratio, seconds, write_result
from shapes import IMAGE_TOKEN, TEXT, VISION, VISUAL_TOKENS
from transformers import CLIPVisionConfig, LlamaConfig, LlavaForConditionalGeneration

from llava_norm_align import LlavaNormAlignConfig, LlavaNormAlignForConditionalGeneration

TEXT_TOKENS, NEW_TOKENS = 64, 32


def build(norm_type: str, layers: int) -> LlavaForConditionalGeneration:
    config = LlavaNormAlignConfig(
        vision_config=CLIPVisionConfig(**VISION).to_dict(),
        text_config=LlamaConfig(**TEXT, num_hidden_layers=layers, attn_implementation="eager").to_dict(),
        image_token_index=IMAGE_TOKEN,
        norm_align_type=norm_type,
        norm_align_target=1.0 if norm_type == "layer_norm" else None,
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    model = LlavaNormAlignForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    model.requires_grad_(False).model.multi_modal_projector.requires_grad_(True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    aligned, stock = build("layer_norm", options.layers), build("none", options.layers)
    stock.model.vision_tower, stock.lm_head = aligned.model.vision_tower, aligned.lm_head
    stock.model.language_model = aligned.model.language_model
    ids = torch.randint(5, 31999, (1, VISUAL_TOKENS + TEXT_TOKENS))
    ids[0, 1 : VISUAL_TOKENS + 1] = IMAGE_TOKEN
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 336, 336, dtype=torch.bfloat16)}
    inputs["attention_mask"] = torch.ones_like(ids)

    def train(model):
        model.train()
        model.zero_grad()
        model(**inputs, labels=ids.masked_fill(ids == IMAGE_TOKEN, -100)).loss.backward()

    def generate(model):
        model.eval()
        with torch.inference_mode():
            model.generate(**inputs, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)

    details = {"decoder_layers": options.layers, "visual_tokens": VISUAL_TOKENS, "new_tokens": NEW_TOKENS}
    if options.alone:
        norm = aligned.model.multi_modal_projector.align_norm.train()
        x = torch.randn(1, VISUAL_TOKENS, TEXT["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(x)
        actions = {"norm_alone": lambda: norm(x).backward(grad), "train_stock": lambda: train(stock)}
        rows = [{name: seconds(action) for name, action in actions.items()} for _ in range(options.pairs + 1)][1:]
        write_result("norm_alone", rows, [ratio(rows, "norm_alone", "train_stock", 0.01)], **details)
        return

    rows = []
    for number in range(options.pairs + 1):
        row, pair = {}, [("norm", aligned), ("stock", stock)]
        for name, model in pair if number % 2 else reversed(pair):  # neither is always the first
            row[f"train_{name}"] = seconds(lambda model=model: train(model))
            row[f"generate_{name}"] = seconds(lambda model=model: generate(model))
        if number:  # the first is a warm-up
            rows.append(row)
            print({name: round(value, 3) for name, value in row.items()}, flush=True)
    figures = [
        ratio(rows, "train_norm", "train_stock", 1.01),
        ratio(rows, "generate_norm", "generate_stock", 1.01),
    ]
    write_result("norm_overhead", rows, figures, **details)


if __name__ == "__main__":
    main()
