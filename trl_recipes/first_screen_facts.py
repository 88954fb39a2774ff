"""What the first screen tells, read back from the model, optimizer, data loader and engine that were built."""

import os
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from torch import nn
from torch.nn import functional as F

from llava_norm_align.common.errors import InputError
from llava_norm_align.trl_recipes.collator import IGNORED
from llava_norm_align.trl_recipes.first_screen_text import mark_supervised
from llava_norm_align.trl_recipes.groups import describe_groups, float32, size, trained_norm

ADAM_STATE = 8  # bytes a trained parameter: two float32 averages
ZERO_STATE = 12  # and the float32 weights, which ZeRO keeps with them


def read_back(trainer: Any, loader: Any) -> dict[str, Any]:
    """All that is known before the first batch. With sharded weights, every process must ask."""
    model, accelerator = trainer.model, trainer.accelerator
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    groups = describe_groups(trainer.model, trainer.optimizer)
    return {
        "model": base.config._name_or_path,
        "class": type(base).__name__.removeprefix("FSDP"),  # FSDP2 makes a class of its own
        "parameters": sum(row["parameters"] for row in groups),
        "device": _device(trainer.args.device),
        "processes": accelerator.num_processes,
        "distributed": _distributed(trainer),
        "groups": groups,
        "norm": norm_facts(base),
        "lora": lora_facts(model),
        "optimizer": optimizer_facts(trainer),
        "clipping": clipping(trainer),
        "batch": batch_facts(trainer, loader),
        "schedule": schedule_facts(trainer),
        "mixed_precision": accelerator.mixed_precision,
        "checkpointing": _checkpointing(trainer),
        "tower_without_grad": any(
            name.endswith("vision_tower") and "forward" in vars(module) for name, module in base.named_modules()
        ),
    }


def _device(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _distributed(trainer: Any) -> str | None:
    state = trainer.accelerator.state
    if trainer.is_deepspeed_enabled:
        return f"DeepSpeed ZeRO-{trainer.model_wrapped.zero_optimization_stage()}"  # not run
    if trainer.is_fsdp_enabled:
        return f"FSDP{state.fsdp_plugin.fsdp_version}"
    return None if trainer.accelerator.num_processes == 1 else "DDP"


def _checkpointing(trainer: Any) -> bool:
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    own = any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())
    return own or bool(plugin is not None and plugin.activation_checkpointing)


def norm_facts(base: nn.Module) -> dict[str, Any]:
    """The module after the projector that is in use: its type, mean |g|, and whether GWC is on."""
    norm = trained_norm(base)
    if norm is not None:
        return {
            "type": "rms_norm" if norm.normalize is F.rms_norm else "layer_norm",
            "gain": float32(norm.weight).abs().mean().item(),
            "gwc": norm.gradient_compensation,
            "floor": norm.compensation_floor,
        }
    weightless = [module for name, module in base.named_modules() if name.endswith("align_norm")]
    if not weightless:
        return {"type": None}
    return {"type": "scale", "scale": weightless[0].scale} if hasattr(weightless[0], "scale") else {"type": "none"}


def lora_facts(model: nn.Module) -> dict[str, Any] | None:
    """Ranks and layers of the adapters that were put in."""
    if not hasattr(model, "peft_config"):
        return None
    layers = [name for name, module in model.named_modules() if getattr(module, "lora_A", None)]
    ranks = (
        {rank for name, module in model.named_modules() for rank in getattr(module, "r", {}).values()}
        if layers
        else set()
    )
    return {
        "ranks": sorted(ranks),
        "layers": len(layers),
        "names": sorted({name.rpartition(".")[2] for name in layers}),
    }


def optimizer_facts(trainer: Any) -> dict[str, Any]:
    optimizer = trainer.optimizer
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):  # accelerate's, DeepSpeed's
        optimizer = optimizer.optimizer
    group = optimizer.param_groups[0]
    return {"name": type(optimizer).__name__, **{key: group[key] for key in ("betas", "eps") if key in group}}


def clipping(trainer: Any) -> dict[str, Any]:
    """What the training loop does, or DeepSpeed's engine, which clips on its own."""
    args = trainer.args
    limit = trainer.model_wrapped.gradient_clipping() if trainer.is_deepspeed_enabled else args.max_grad_norm
    if not limit or limit <= 0:
        return {"kind": "off"}
    return {"kind": "part" if args.clip_by_group else "global", "limit": float(limit)}


def batch_facts(trainer: Any, loader: Any) -> dict[str, Any]:
    """Rows of an optimizer step: of a device, processes, accumulated, and of the data."""
    processes = trainer.accelerator.num_processes
    per_device = getattr(loader, "total_batch_size", trainer.state.train_batch_size * processes) // processes
    accumulated = trainer.args.gradient_accumulation_steps
    if trainer.is_deepspeed_enabled:
        accumulated = trainer.model_wrapped.gradient_accumulation_steps()
    rows, total = trainer.train_dataset, per_device * processes * accumulated
    return {
        "per_device": per_device,
        "accumulated": accumulated,
        "total": total,
        "rows": len(rows) if hasattr(rows, "__len__") else None,
    }


def schedule_facts(trainer: Any) -> dict[str, Any]:
    """Steps, epochs, and the warm-up that the scheduler was built with."""
    state, scheduler = trainer.state, trainer.lr_scheduler
    factors = getattr(getattr(scheduler, "scheduler", scheduler), "lr_lambdas", None)
    warm_up = getattr(factors[0], "keywords", {}).get("num_warmup_steps", 0) if factors else None
    if warm_up is None:
        warm_up = trainer.args.get_warmup_steps(state.max_steps)
    name = str(getattr(trainer.args.lr_scheduler_type, "value", trainer.args.lr_scheduler_type))
    return {"name": name, "steps": state.max_steps, "warm_up": int(warm_up)}


# The first batch


def first_batch(trainer: Any, size: int) -> dict[str, Any]:
    """The first `size` rows of the data as the collator makes them: the first in words, and what is supervised.

    They are read beside the data loader, which draws its rows at random.
    """
    dataset = trainer.train_dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        rows = list(dataset.take(size))
    else:
        rows = [dataset[number] for number in range(min(size, len(dataset)))]
    batch = trainer.data_collator(rows)
    ids, labels, real = (batch[name][: len(rows)] for name in ("input_ids", "labels", "attention_mask"))
    image_token = trainer.model.config.image_token_id
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    kept = real[0].bool()
    return {
        "text": mark_supervised(tokenizer, ids[0][kept].tolist(), (labels[0][kept] != IGNORED).tolist(), image_token),
        "tokens": real.sum(dim=1).tolist(),
        "supervised": (labels != IGNORED).sum(dim=1).tolist(),
        "image_tokens": ((ids == image_token) & real.bool()).sum(dim=1).tolist(),
        "image_labels": (labels == image_token).sum(dim=1).tolist(),
    }


def check_batch(batch: Mapping[str, Any]) -> None:
    """InputError for image tokens in the labels, or for a row without a label."""
    for number, (count, images) in enumerate(zip(batch["supervised"], batch["image_labels"], strict=True)):
        if images:
            raise InputError(
                f"Row {number} of the data has {images} image tokens in its labels, so the model would learn to write "
                "them. Write rows as prompt and completion, or use LlavaCollator."
            )
        if count == 0:
            raise InputError(
                f"Row {number} of the data has no supervised token among its {batch['tokens'][number]:,}: there is no "
                "answer, max_length cut it, or the chat template does not mark it. Correct the row, or raise "
                "max_length."
            )


def projector_tensors(trainer: Any) -> dict[str, torch.Tensor]:
    """The projector's tensors and its norm's, under their names in the module, on the CPU; every process must ask."""
    prefix = ".multi_modal_projector."
    return {
        name.rpartition(prefix)[2]: float32(parameter).cpu()
        for name, parameter in trainer.model.named_parameters()
        if prefix in f".{name}"
    }


# What it takes


def peak_memory(trainer: Any) -> list[dict[str, Any]]:
    """The most bytes that each GPU of the run had allocated, or each process on CPUs; every process must ask."""
    accelerator, device = trainer.accelerator, trainer.args.device
    several = accelerator.num_processes > 1
    if device.type == "cuda":
        numbers = [device.index or 0] if several else range(torch.cuda.device_count())
        peaks = [(n, torch.cuda.max_memory_allocated(n), torch.cuda.mem_get_info(n)[1]) for n in numbers]
        peaks = [peak for peak in peaks if several or peak[1]]
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        peaks = [(0, peak, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    if several:
        peaks = accelerator.gather(torch.tensor(peaks, dtype=torch.int64, device=device)).tolist()
    return [{"device": device.type, "number": n, "peak": peak, "total": total} for n, peak, total in peaks]


def disk_needed(trainer: Any, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes that the checkpoints of the whole run take, each with the optimizer's state, and the finished model.

    A new checkpoint is written before an old one goes. `available` counts the checkpoints that are there.
    """
    args, model = trainer.args, trainer.model
    sizes = {
        int(path.name.removeprefix("checkpoint-")): folder_size(path)
        for path in Path(args.output_dir).glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit()
    }
    trained = sum(row["parameters"] for row in groups if not row.get("frozen"))
    state = 0 if args.save_only_model else (ZERO_STATE if trainer.is_deepspeed_enabled else ADAM_STATE) * trained
    checkpoint = max((size + state * (step == 0) for step, size in sizes.items()), default=0)  # step 0 has no state
    kept = _saves(trainer)
    if args.save_total_limit is not None:
        kept = min(kept, args.save_total_limit + 1)
    finished = sum(size(parameter) * parameter.element_size() for parameter in model.parameters())
    if hasattr(model, "peft_config"):
        finished = sum(
            parameter.numel() * parameter.element_size() for parameter in model.parameters() if parameter.requires_grad
        )
    return {
        "checkpoints": kept,
        "checkpoint": checkpoint,
        "with_optimizer": not args.save_only_model,
        "finished": finished,
        "needed": kept * checkpoint + finished,
        "available": shutil.disk_usage(args.output_dir).free + sum(sizes.values()),
    }


def _saves(trainer: Any) -> int:
    """The number of checkpoints that the run writes, the one before the first step among them."""
    state, strategy = trainer.state, trainer.args.save_strategy
    if strategy == "no":
        return 0
    if strategy == "epoch":
        return 1 + state.num_train_epochs
    every = state.save_steps if strategy == "steps" else state.eval_steps
    return 1 + -(-state.max_steps // max(1, int(every or state.max_steps)))


def folder_size(folder: Path) -> int:
    """Bytes of the files under `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
