"""The parts of a LLaVA that are trained or frozen, each with its own learning rate and gradient norm."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from llava_norm_align.common.errors import InputError

PARTS = ("llm", "projector", "norm", "vision")


def part_of(name: str) -> str:
    """The part that the parameter `name` belongs to, also under the prefixes of PEFT, DDP and FSDP."""
    path = f".{name}."
    if ".align_norm." in path:
        return "norm"
    if ".multi_modal_projector." in path or ".image_newline." in path:  # LLaVA-NeXT's row between lines of patches
        return "projector"
    return "vision" if ".vision_tower." in path else "llm"


def freeze(model: PreTrainedModel, trained: Collection[str]) -> None:
    """Let only the parts `trained` require gradients. InputError if the model has none of them."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) in trained)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"trained_parts is {', '.join(trained)}, but {type(model).__name__} has no parameters there. Name "
            "another part, or train a model with a norm (llava-norm-align convert)."
        )


def run_tower_without_grad(model: nn.Module) -> None:
    """Let a frozen vision tower keep no activations, whatever requires gradients inside of it.

    With checkpointing, transformers makes the outputs of the patch embedding require gradients.
    """
    for name, module in model.named_modules():
        if name.endswith("vision_tower") and not any(parameter.requires_grad for parameter in module.parameters()):
            module.forward = torch.no_grad()(module.forward)


def align_norms(model: nn.Module) -> Iterator[nn.Module]:
    """The norms with weights after the projector: at most one, or with PEFT's modules_to_save the old and the new."""
    for name, module in model.named_modules():
        if name.endswith("align_norm") and getattr(module, "weight", None) is not None:
            yield module


def trained_norm(model: nn.Module) -> nn.Module | None:
    """The norm that is in use: with PEFT's modules_to_save the trained copy."""
    norms = sorted(align_norms(model), key=lambda norm: norm.weight.requires_grad)
    return norms[-1] if norms else None


def in_float32(model: nn.Module) -> None:
    """Make what is trained float32: in bfloat16, small updates would be rounded away."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@torch.no_grad()
def restore_norms(model: nn.Module, start: Mapping[str, torch.Tensor]) -> None:
    """Make the norms float32 with the tensors `start`: model.to(bfloat16) and TRL's QLoRA round them."""
    for norm in align_norms(model):
        for name, tensor in start.items():
            parameter = getattr(norm, name)
            parameter.data = tensor.to(parameter.device, torch.float32, copy=True)


def float32(parameter: torch.Tensor) -> torch.Tensor:
    """All of a parameter that FSDP2 or ZeRO sharded, under ZeRO of its float32 master: every process must ask."""
    if hasattr(parameter, "_z3_optimizer") or hasattr(parameter, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_fp32_param

        master = safe_get_full_fp32_param(parameter)
        if master is not None:
            return master
    if hasattr(parameter, "ds_id"):  # ZeRO-3, not trained
        from deepspeed.zero import GatheredParameters

        with GatheredParameters(parameter):
            return parameter.detach().clone().float()
    parameter = parameter.detach()
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).float()


def float32_norm(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the norm in float32, by their names in `model`: DeepSpeed's bfloat16 rounds them."""
    return {name: float32(tensor) for name, tensor in model.named_parameters() if part_of(name) == "norm"}


def prepare_fsdp(plugin: Any, model: nn.Module) -> None:
    """Let accelerate's FSDP2 `plugin` shard a LLaVA.

    By default it wraps `_no_split_modules`, where CLIP names a text layer that no LLaVA has, which is an error. Its
    loading from rank 0 alone cannot take a norm that is sharded already.
    """
    plugin.cpu_ram_efficient_loading = False
    if plugin.transformer_cls_names_to_wrap is None:
        present = {type(module).__name__ for module in model.modules()}
        plugin.transformer_cls_names_to_wrap = sorted(present & set(model._no_split_modules))


def shard_norms(model: nn.Module, plugin: Any) -> None:
    """Make each norm an FSDP2 unit of its own, before accelerate shards the rest, so that it computes in float32.

    With mixed precision, accelerate has every unit gathered, and its gradient reduced, in bfloat16.
    """
    for norm in align_norms(model):
        fully_shard(norm, offload_policy=plugin.cpu_offload)


def check_lora_targets(model: nn.Module) -> None:
    """InputError if a LoRA adapter sits in the vision tower or the projector."""
    hit = [
        name
        for name, _ in model.named_parameters()
        if ".lora_" in name and part_of(name) in ("vision", "projector", "norm")
    ]
    if hit:
        raise InputError(
            f"LoRA's target_modules hit {len(hit) // 2} layers of the vision tower or the projector, such as "
            f"{hit[0].partition('.lora_')[0]}; only the language model's were expected. Use lora_config(model), or a "
            "pattern that names language_model."
        )


def split_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, rates: Mapping[str, float]) -> None:
    """Split the parameter groups of a new `optimizer` by part, each with its learning rate and the part's `name`."""
    parts = {parameter: part_of(name) for name, parameter in model.named_parameters()}
    groups = list(optimizer.param_groups)
    optimizer.param_groups.clear()
    for part in PARTS:
        for group in groups:
            parameters = [parameter for parameter in group["params"] if parts[parameter] == part]
            if parameters:
                count = sum(map(size, parameters))  # ZeRO leaves a process its share in the group
                optimizer.add_param_group(
                    {**group, "params": parameters, "lr": rates[part], "name": part, "parameters": count}
                )


def describe_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What `optimizer` trains and what is frozen, read back from both: a row a group, then one a frozen part."""
    rows = [
        {
            "part": group.get("name", "?"),
            "parameters": group.get("parameters") or sum(size(parameter) for parameter in group["params"]),
            "dtypes": _dtypes(group["params"]),
            "learning_rate": float(group.get("initial_lr", group["lr"])),
            "weight_decay": float(group["weight_decay"]),
        }
        for group in optimizer.param_groups
    ]
    for part in PARTS:
        frozen = [
            parameter
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad and part_of(name) == part
        ]
        if frozen:
            count = sum(size(parameter) for parameter in frozen)
            rows.append({"part": part, "parameters": count, "dtypes": _dtypes(frozen), "frozen": True})
    return rows


def size(parameter: torch.Tensor) -> int:
    """The number of weights: ZeRO-3 leaves 0 of them here, and two of 4 bits are packed into a byte."""
    count = getattr(parameter, "ds_numel", None) or parameter.numel()
    return 2 * count * parameter.element_size() if type(parameter).__name__ == "Params4bit" else count


def _dtypes(parameters: list[nn.Parameter]) -> list[str]:
    return sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})


def gradient_norms(model: nn.Module) -> dict[str, torch.Tensor]:
    """The L2 norm of the gradient of each trained part, on its device; 0 where no gradient arrived."""
    return {part: _norm(parameters) for part, parameters in _trained(model).items()}


def clip_parts(model: nn.Module, norms: Mapping[str, torch.Tensor], max_norm: float) -> None:
    """Scale the gradient of each part whose norm exceeds `max_norm` down to it."""
    for part, parameters in _trained(model).items():
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norms[part])


def total_norm(norms: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The L2 norm of all gradients from the parts' norms."""
    return torch.stack(list(norms.values())).norm()


def _trained(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    parts: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts.setdefault(part_of(name), []).append(parameter)
    return parts


def _norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device)
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2's gradients are sharded
