"""Train only the projector of a LLaVA (and the norm under it): a plain loop, enough for micro-LLaVA on a laptop.

The projector that ships as conversion/micro_projector.safetensors was made with (transformers 5.24, seed 0):

    python -m llava_norm_align.trl_recipes.projector micro_projector.safetensors --steps 600
"""

import argparse
import logging
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import BatchFeature, PreTrainedModel, ProcessorMixin, get_cosine_schedule_with_warmup

from llava_norm_align.common.errors import CheckFailed
from llava_norm_align.common.loading import load_model, load_processor
from llava_norm_align.common.prompts import render_prompt
from llava_norm_align.conversion.micro import assemble_micro
from llava_norm_align.data.easy_vqa import Row, load_image, load_questions

logger = logging.getLogger(__name__)


def train_projector(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    rows: Sequence[Row],
    *,
    steps: int,
    learning_rate: float = 1e-3,
    batch_size: int = 8,
    warmup_ratio: float = 0.03,
    weight_decay: float = 0.0,
    seed: int = 0,
    save_to: Path | None = None,
    save_every: int = 100,
) -> dict[str, Any]:
    """Train the projector of `model` in place on `rows` and return what happened.

    AdamW with a cosine schedule and no gradient clipping, as LLaVA-1.5's first stage; the loss is on the answer and
    its end of turn only. Tower and language model are frozen. The projector is kept in float32 while it trains and
    multiplied in bfloat16 (autocast); afterwards it has its old dtype again, and a norm under it stays float32. Biases
    and the norm are free of weight decay. `save_to`: a safetensors file, written every `save_every` steps.

    Returned: `losses` and `visual_norms` (mean L2 norm of the projector's output) of each step, `seconds`, `steps`,
    `parameters`, and for a model with a norm `gain` (mean absolute gain before and after). CheckFailed if the loss is
    not finite.
    """
    projector = model.model.multi_modal_projector
    dtypes = {name: parameter.dtype for name, parameter in projector.named_parameters()}
    model.requires_grad_(False).eval()
    projector.float().requires_grad_(True).train()  # gradient compensation is on in training mode only
    norm = getattr(projector, "align_norm", None)
    gain = None if norm is None or not hasattr(norm, "weight") else norm.weight
    start = None if gain is None else gain.detach().clone()

    attention = model.config._attn_implementation
    if model.device.type == "cpu":
        model.set_attn_implementation("eager")  # the backward pass of PyTorch's fused attention is slow there

    optimizer = torch.optim.AdamW(_parameter_groups(projector, weight_decay), lr=learning_rate)
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(warmup_ratio * steps), steps)
    losses: list[float] = []
    visual_norms: list[float] = []
    hook = projector.register_forward_hook(
        lambda module, inputs, output: visual_norms.append(output.detach().float().norm(dim=-1).mean().item())
    )
    began = time.perf_counter()
    try:
        progress = tqdm(
            _batches(rows, steps, batch_size, seed), total=steps, desc="training the projector", disable=None
        )
        for step, batch in enumerate(progress, start=1):
            loss = answer_loss(model, *encode(processor, batch))
            if not torch.isfinite(loss):
                raise CheckFailed(f"The loss is {loss.item()} at step {step}. Train with a smaller learning rate.")
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            progress.set_postfix(loss=f"{losses[-1]:.3f}", visual_norm=f"{visual_norms[-1]:.1f}")
            if save_to is not None and (step % save_every == 0 or step == steps):
                save_projector(model, save_to)
    finally:
        hook.remove()
        model.set_attn_implementation(attention)
        projector.requires_grad_(False).eval()
        for name, parameter in projector.named_parameters():
            parameter.data = parameter.data.to(dtypes[name])
    result = {
        "losses": losses,
        "visual_norms": visual_norms,
        "seconds": time.perf_counter() - began,
        "steps": steps,
        "parameters": sum(parameter.numel() for parameter in projector.parameters()),
    }
    if gain is not None:
        result["gain"] = {"before": start.abs().mean().item(), "after": gain.detach().abs().mean().item()}
        if steps and torch.equal(start, gain.detach().to(start.dtype)):
            logger.warning(
                "The gain of the norm has not moved in %d steps: its updates were rounded away. Keep the norm in "
                "float32 and check that it is among the trained parameters.",
                steps,
            )
    return result


def encode(processor: ProcessorMixin, rows: Sequence[Row]) -> tuple[BatchFeature, list[int]]:
    """Left-padded inputs that end with the answers, and each answer's number of tokens (its end of turn included)."""
    prompts = [render_prompt(processor, row.question) for row in rows]
    answers = [_completion(processor, row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
    processor.tokenizer.padding_side = "left"
    inputs = processor(
        text=[prompt + answer for prompt, answer in zip(prompts, answers, strict=True)],
        images=[load_image(row.image) for row in rows],
        padding=True,
        return_tensors="pt",
    )
    return inputs, [len(ids) for ids in processor.tokenizer(answers, add_special_tokens=False).input_ids]


def answer_loss(model: PreTrainedModel, inputs: BatchFeature, lengths: list[int]) -> torch.Tensor:
    """Mean cross-entropy over the last `lengths[i]` tokens of each row i."""
    inputs = inputs.to(model.device)
    ids = inputs["input_ids"]  # [B, L], padded on the left
    answers = (
        torch.arange(ids.shape[1], device=ids.device)
        >= ids.shape[1] - torch.tensor(lengths, device=ids.device)[:, None]
    )
    with torch.autocast(model.device.type, torch.bfloat16):
        hidden_states = model.model(**inputs, use_cache=False).last_hidden_state  # [B, L, D]
        # The head sees only the positions before an answer's tokens; a slice [B, k, D] would make PyTorch copy the
        # head's weight B times on CPU.
        logits = model.lm_head(hidden_states[:, :-1][answers[:, 1:]])  # [sum(lengths), V]
    return F.cross_entropy(logits.float(), ids[answers])


def save_projector(model: PreTrainedModel, file: Path, metadata: dict[str, str] | None = None) -> None:
    """The projector (and the norm under it) as a safetensors file under its names in a published LLaVA."""
    tensors = model.model.multi_modal_projector.state_dict(prefix="multi_modal_projector.")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        file,
        metadata={"format": "pt", **(metadata or {})},
    )


def _parameter_groups(projector: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    linear = [module.weight for module in projector.modules() if isinstance(module, nn.Linear)]
    others = [parameter for parameter in projector.parameters() if all(parameter is not weight for weight in linear)]
    return [{"params": linear, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _batches(rows: Sequence[Row], steps: int, batch_size: int, seed: int) -> Iterator[list[Row]]:
    """`steps` batches; every row once before any comes again."""
    generator, order = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        while len(order) < batch_size:
            order += torch.randperm(len(rows), generator=generator).tolist()
        yield [rows[i] for i in order[:batch_size]]
        del order[:batch_size]


def _completion(processor: ProcessorMixin, row: Row, prompt: str) -> str:
    """What follows `prompt` when the assistant gives the answer, up to its end of turn."""
    end = processor.tokenizer.eos_token
    if getattr(processor, "chat_template", None) is None:
        return f" {row.answer}{end}"
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row.question}]}
    assistant = {"role": "assistant", "content": [{"type": "text", "text": row.answer}]}
    text = processor.apply_chat_template([user, assistant])
    if not text.startswith(prompt):  # a template whose answers do not follow its own generation prompt
        return f" {row.answer}{end}"
    return text.removeprefix(prompt).partition(end)[0] + end


def main(arguments: list[str] | None = None) -> None:
    """Make the projector of micro-LLaVA from a fresh one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", type=Path, help="the safetensors file to write (bfloat16)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--wheels", type=Path, help="a folder with the package wheels, for machines without a registry"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = assemble_micro(Path(scratch) / "micro", wheels=options.wheels, projector=None)
        model, processor = load_model(folder), load_processor(folder)
    rows = load_questions("train")
    result = train_projector(
        model,
        processor,
        rows,
        steps=options.steps,
        learning_rate=options.learning_rate,
        batch_size=options.batch_size,
        seed=options.seed,
        save_to=options.out,
    )
    command = (
        f"python -m llava_norm_align.trl_recipes.projector {options.out.name} --steps {options.steps} "
        f"--learning-rate {options.learning_rate} --batch-size {options.batch_size} --seed {options.seed}"
    )
    save_projector(model, options.out, {"command": command, "torch": torch.__version__})
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    last = result["losses"][-50:]
    logger.info("loss %.4f (mean of the last %d steps)", sum(last) / len(last), len(last))
    logger.info("visual norm %.2f -> %.2f", result["visual_norms"][0], result["visual_norms"][-1])
    logger.info("%d steps in %.0f s", result["steps"], result["seconds"])


if __name__ == "__main__":
    main()
