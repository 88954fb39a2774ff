"""Training steps of both stages at the shapes of LLaVA-1.5-7B on one GPU, with and without the norm.

usage: python benchmarks/gpu.py [--layers N] [--batch N] [--rounds N] [--out FILE]

Random weights, bfloat16 autocast, PyTorch's fused attention, activation checkpointing, AdamW: stage 1 trains the
projector (and the norm), stage 2 the language model too, its weights in float32 (about 120 GB; out of memory is said).
Each round is one step of the model with the norm and one without. Printed and written: tokens/s, the share of the
FLOP/s of a bfloat16 matrix product of 8192 x 8192 measured here, peak memory. Not yet run on a GPU.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from paired import interval
from shapes import IMAGE_TOKEN, TEXT, VISION, VISUAL_TOKENS
from transformers import CLIPVisionConfig, LlamaConfig

from llava_norm_align import LlavaNormAlignConfig, LlavaNormAlignForConditionalGeneration

TEXT_TOKENS = 128
STAGES = {1: ("multi_modal_projector",), 2: ("multi_modal_projector", "language_model", "lm_head")}
TINY_TEXT = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=IMAGE_TOKEN + 64)
TINY_VISION = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=336, patch_size=14
)
MATRIX = {"cuda": 8192, "cpu": 512}


def build(norm: bool, stage: int, device: str, text: dict, vision: dict) -> LlavaNormAlignForConditionalGeneration:
    config = LlavaNormAlignConfig(
        vision_config=CLIPVisionConfig(**vision).to_dict(),
        text_config=LlamaConfig(**text).to_dict(),
        image_token_index=IMAGE_TOKEN,
        norm_align_type="layer_norm" if norm else "none",
        norm_align_target=1.0 if norm else None,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlavaNormAlignForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in STAGES[stage]))
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model.train()


def flops(model: LlavaNormAlignForConditionalGeneration, batch: int, length: int) -> float:
    """Of one step without what checkpointing computes again: two a weight and token forward, two for the gradient of
    its input, two for its own; attention of the language model besides; the tower forward only."""
    total = 0.0
    text = model.config.get_text_config()
    for name, parameter in model.named_parameters():
        if parameter.ndim != 2 or "embed" in name:
            continue
        if "vision_tower" in name:
            total += 2 * parameter.numel() * batch * (VISUAL_TOKENS + 1)
        else:
            tokens = batch * (VISUAL_TOKENS if "multi_modal_projector" in name else length)
            total += (4 + 2 * parameter.requires_grad) * parameter.numel() * tokens
    return total + 12 * text.num_hidden_layers * text.hidden_size * batch * length**2


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def matrix_flops(device: str) -> float:
    """FLOP/s of a large bfloat16 matrix product, the best of ten."""
    size = MATRIX[device]
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(10):
        synchronize(device)
        began = time.perf_counter()
        left @ right
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * size**3 / min(times)


class Steps:
    """A model, its optimizer and a batch that stays."""

    def __init__(self, norm: bool, stage: int, device: str, batch: int, text: dict, vision: dict):
        self.device, self.length = device, VISUAL_TOKENS + TEXT_TOKENS
        self.model = build(norm, stage, device, text, vision)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0, fused=device == "cuda")
        ids = torch.randint(5, IMAGE_TOKEN - 1, (batch, self.length), device=device)
        ids[:, 1 : VISUAL_TOKENS + 1] = IMAGE_TOKEN
        side = vision["image_size"]
        pixels = torch.randn(batch, 3, side, side, device=device, dtype=torch.bfloat16)
        self.inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
        self.labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)

    def step(self) -> float:
        """Seconds of one step."""
        synchronize(self.device)
        began = time.perf_counter()
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(**self.inputs, labels=self.labels, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        synchronize(self.device)
        return time.perf_counter() - began


def measure_stage(
    stage: int, device: str, batch: int, rounds: int, text: dict, vision: dict, peak: float
) -> dict[str, Any]:
    """Tokens/s, share of `peak` and memory of a stage, with and without the norm.

    One after the other, in two blocks each: two 7B models with their optimizers do not fit beside each other.
    """
    rows: dict[str, list[float]] = {"norm": [], "none": []}
    memory, work, tokens = {}, {}, batch * (VISUAL_TOKENS + TEXT_TOKENS)
    for name in ("norm", "none", "none", "norm"):
        try:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            steps = Steps(name == "norm", stage, device, batch, text, vision)
            work[name] = flops(steps.model, batch, steps.length)
            steps.step()  # a warm-up
            rows[name] += [steps.step() for _ in range(rounds)]
            memory[name] = torch.cuda.max_memory_allocated() if device == "cuda" else None
        except torch.OutOfMemoryError as error:
            return {"stage": stage, "out_of_memory": str(error).splitlines()[0]}
        finally:
            steps = None
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    result: dict[str, Any] = {"stage": stage, "batch": batch, "tokens_per_step": tokens, "seconds": rows}
    for name, values in rows.items():
        median = statistics.median(values)
        result[name] = {
            "tokens_per_second": tokens / median,
            "share_of_matrix_product": work[name] / median / peak,
            "memory_gb": None if memory[name] is None else memory[name] / 1e9,
        }
    ratios = [a / b for a, b in zip(rows["norm"], rows["none"], strict=True)]
    result["norm_over_none"] = {"median": statistics.median(ratios), "interval": interval(ratios)}
    return result


def describe(result: dict[str, Any]) -> str:
    lines = [f"{'stage':6}{'norm':>6}{'tokens/s':>12}{'of product':>12}{'memory':>10}"]
    for stage in result["stages"]:
        if "out_of_memory" in stage:
            lines.append(f"{stage['stage']:<6}out of memory: {stage['out_of_memory']}")
            continue
        for name in ("norm", "none"):
            row = stage[name]
            memory = "-" if row["memory_gb"] is None else f"{row['memory_gb']:.1f} GB"
            share = f"{100 * row['share_of_matrix_product']:.1f} %"
            lines.append(f"{stage['stage']:<6}{name:>6}{row['tokens_per_second']:>12,.0f}{share:>12}{memory:>10}")
        low, high = stage["norm_over_none"]["interval"]
        median = stage["norm_over_none"]["median"]
        lines.append(f"      time of a step with the norm / without: {median:.3f} ({low:.3f} to {high:.3f})")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10, help="steps in each of two blocks")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU: whether it runs")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("there is no GPU here; --tiny tries the program out on a CPU")
    text = {**(TINY_TEXT if options.tiny else TEXT), "num_hidden_layers": options.layers}
    vision = TINY_VISION if options.tiny else VISION
    peak = matrix_flops(device)
    stages = [measure_stage(stage, device, options.batch, options.rounds, text, vision, peak) for stage in STAGES]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    result = {
        "device": name, "torch": torch.__version__, "layers": options.layers, "matrix_product_flops": peak,
        "stages": stages,
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{name}: a bfloat16 matrix product runs at {peak / 1e12:.1f} TFLOP/s")
    print(describe(result))
    return result


if __name__ == "__main__":
    main()
