"""A LLaVA's projector, with the norm after it, as a file of its own: read, loaded into a model, saved from one."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import nn

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.results import write_bytes
from llava_norm_align.common.weights import StoredTensor, read_header, read_pickled

PROJECTOR = "multi_modal_projector."
NEWLINE = "image_newline"  # LLaVA-NeXT's and OneVision's row between lines of patches, trained with the projector
NORM = "align_norm."
# llava-hf's names: whole ones, or (in a projector's file) bare
OUR_NAME = re.compile(
    rf"(?:.*\.)?{re.escape(PROJECTOR)}(.+)|((?:linear_1|linear_2|align_norm)\.\w+)|(?:.*\.)?({NEWLINE})"
)
# the original repository's: nn.Sequential(Linear, GELU, Linear)
ORIGINAL_NAME = re.compile(r"(?:.*\.)?mm_projector\.(.+)")
ORIGINAL_LAYERS = {
    "0.weight": "linear_1.weight",
    "0.bias": "linear_1.bias",
    "2.weight": "linear_2.weight",
    "2.bias": "linear_2.bias",
}
LAYERS = {f"{layer}.{kind}" for layer in ("linear_1", "linear_2") for kind in ("weight", "bias")}
OTHERS = {f"{layer}.{kind}" for layer in ("align_norm", "projector_layernorm") for kind in ("weight", "bias")}
OTHERS |= {NEWLINE}
PICKLED = (".bin", ".pt", ".pth")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_projector(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a projector's file, by their names in a projector; none of their values is read.

    `file`: what `save_projector` wrote, any safetensors file with llava-hf's names, or LLaVA's mm_projector.bin.
    Returned: linear_1.weight [D, D_vision], linear_1.bias [D], linear_2.weight [D, D], linear_2.bias [D]; what the
    file has of the norm, align_norm.weight and align_norm.bias [D], in float32; of VipLLaVA projector_layernorm.*, of
    LLaVA-NeXT and OneVision image_newline [D]. InputError for anything else.
    """
    file = Path(file)
    if file.is_dir():
        raise InputError(f"{file} is a folder, but the file of a projector was expected. Name the file itself.")
    read_file = read_pickled if file.suffix in PICKLED else read_header
    projector, rest = split_projector({tensor.name: tensor for tensor in read_file(file)}, file)
    if rest:
        raise InputError(
            f"{file} holds {len(rest)} tensor(s) beside the projector, such as {min(rest)}: it is a whole model, or "
            "was trained with <im_start> and <im_end>. Use the file of a projector that was trained without them."
        )
    return projector


def split_projector(
    stored: Mapping[str, StoredTensor], source: Path
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The projector among the tensors of `source`, by their names in a projector, and the other tensors as they are.

    InputError if it is no LLaVA's: two linear layers, with biases in the original repository's layout.
    """
    original = {match[1]: tensor for name, tensor in stored.items() if (match := ORIGINAL_NAME.fullmatch(name))}
    rest = {name: tensor for name, tensor in stored.items() if not ORIGINAL_NAME.fullmatch(name)}
    if original:
        expected, projector = set(ORIGINAL_LAYERS), original
    else:
        names = {name: match[1] or match[2] or match[3] for name in rest if (match := OUR_NAME.fullmatch(name))}
        projector = {ours: rest.pop(name) for name, ours in names.items()}
        expected = LAYERS
    unknown = set(projector) - expected - (set() if original else OTHERS)
    needed = expected if original else {"linear_1.weight", "linear_2.weight"}
    if unknown or not needed <= set(projector):
        below = "mm_projector" if original else PROJECTOR.rstrip(".")
        raise InputError(
            f"{source} has the projector tensors {', '.join(sorted(projector)) or 'none'} below {below}, but "
            f"{', '.join(sorted(expected))} were expected (mlp2x_gelu). Use a checkpoint with such a projector."
        )
    if original:
        return {ORIGINAL_LAYERS[name]: tensor for name, tensor in projector.items()}, rest
    _check_norm(projector, source)
    return projector, rest


def _check_norm(projector: Mapping[str, StoredTensor], source: Path) -> None:
    norm = norm_of(projector)
    if norm and "align_norm.weight" not in norm:
        raise InputError(f"{source} has align_norm.bias, but no align_norm.weight. Save the projector again.")
    for name, tensor in norm.items():
        if tensor.dtype != "F32":
            raise InputError(
                f"{source} holds {name} in {tensor.dtype}, but the norm must be in F32. Save it from a model whose "
                "norm was trained in float32."
            )


def norm_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a projector's tensors that belong to its norm."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(NORM)}


def read_values(tensor: StoredTensor) -> torch.Tensor:
    """A stored tensor in memory. InputError if it is quantised."""
    if tensor.dtype not in DTYPES:
        raise InputError(f"{tensor.name} in {tensor.file} is {tensor.dtype}: quantised. Use the file before that.")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        values = torch.frombuffer(bytearray(file.read(tensor.nbytes)), dtype=DTYPES[tensor.dtype])
    return values.view(tensor.shape)


def read_metadata(file: Path) -> dict[str, str]:
    """What `save_projector` wrote beside the tensors; empty for other files."""
    if Path(file).suffix in PICKLED:
        return {}
    with safe_open(file, framework="pt") as content:
        return content.metadata() or {}


def check_fits(projector: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], file: Path) -> None:
    """InputError unless `projector`, read from `file`, has the names and `shapes` of a model's (without its norm)."""
    found = {name: tensor.shape for name, tensor in projector.items() if not name.startswith(NORM)}
    shapes = {name: tuple(shape) for name, shape in shapes.items() if not name.startswith(NORM)}
    if NEWLINE not in found:  # the model's own stays
        shapes.pop(NEWLINE, None)
    differing = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
    if differing:
        name = differing[0]
        here, there = (list(places[name]) if name in places else "absent" for places in (found, shapes))
        raise InputError(
            f"{name} in {file} is {here}, but in the model it is {there} ({len(differing)} tensor(s) differ). Name "
            "the projector that was trained for this vision tower and language model."
        )


def check_norm_type(file: Path, norm_type: str) -> None:
    """InputError if the norm in `file` was trained as one of another type."""
    found = read_metadata(file).get("norm_align_type", norm_type)
    if found != norm_type:
        raise InputError(
            f"{file} holds a norm of the type {found}, but the model's is {norm_type}. Convert the model with "
            f"--norm {found}, or name another file."
        )


@torch.no_grad()
def load_projector(model: nn.Module, file: Path) -> list[str]:
    """Give a loaded LLaVA the projector in `file`, bit for bit; returns notes for the user.

    A parameter whose dtype does not hold the file's values exactly becomes float32, which a note says; that runs under
    autocast, or after `model.to`. If the file has a norm, the model must have one of the same type, in which it goes,
    in float32. Without one, the model's own stays. InputError, before anything changes, for another shape.
    """
    file = Path(file)
    stored, own = read_projector(file), _tensors(model)
    check_fits(stored, {name: tensor.shape for name, tensor in own.items()}, file)
    notes, norm, own_norm = [], norm_of(stored), norm_of(own)
    if norm and not own_norm:
        raise InputError(
            f"{file} holds a norm, but {_name(model)} has none with weights. Convert that model first "
            "(llava-norm-align convert), or name a projector without a norm."
        )
    if norm:
        check_norm_type(file, model.config.norm_align_type)
        if {name: tensor.shape for name, tensor in norm.items()} != {n: tuple(t.shape) for n, t in own_norm.items()}:
            raise InputError(
                f"{file} holds {_listed(norm)}, but the norm of {_name(model)} has {_listed(own_norm)}. Convert the "
                "model with the same --bias or --no-bias."
            )
    elif own_norm:
        notes.append(f"{file.name} has no norm: the model's own stays")
    if NEWLINE in own and NEWLINE not in stored:
        notes.append(f"{file.name} has no {NEWLINE}: the model's own stays")
    widened = []
    for name, values in {name: read_values(tensor) for name, tensor in stored.items()}.items():
        parameter = own[name]
        if not torch.equal(values.to(parameter.dtype).to(values.dtype), values):
            parameter.data = parameter.data.float()
            widened.append(name)
        parameter.data.copy_(values)
    if widened:
        notes.append(f"{file.name} is not exact in the model's dtype: float32 now are {', '.join(widened)}")
    return notes


def save_projector(
    model: nn.Module, file: Path, metadata: Mapping[str, str] | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write the projector of a LLaVA, and the norm after it, as a safetensors file, under llava-hf's names.

    Of a model in PEFT the trained copy is written. `dtype`: None leaves the model's. The norm is float32; its
    type and its start stand in the metadata. The file is written beside `file` and renamed.
    """
    tensors = _tensors(model)
    content = {
        name if name == NEWLINE else PROJECTOR + name: tensor.to(torch.float32 if name in norm_of(tensors) else dtype)
        for name, tensor in tensors.items()
    }
    content = {name: tensor.detach().contiguous().cpu() for name, tensor in content.items()}
    fields = ("norm_align_type", "norm_align_target") if norm_of(tensors) else ()
    described = {name: str(value) for name in fields if (value := getattr(model.config, name)) is not None}
    write_bytes(Path(file), save(content, metadata={"format": "pt", **described, **(metadata or {})}))


def _tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a projector's file holds, by their names in it; in PEFT those of the trained copy."""
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        if name.endswith("multi_modal_projector"):
            copies = getattr(module, "modules_to_save", None)
            found |= dict((copies[module.active_adapters[0]] if copies else module).named_parameters())
    if not found:
        raise InputError(f"{_name(model)} has no multi_modal_projector. Name a LLaVA.")
    newline = [parameter for name, parameter in model.named_parameters() if name.rpartition(".")[2] == NEWLINE]
    return found | ({NEWLINE: newline[0]} if newline else {})


def _name(model: nn.Module) -> str:
    return getattr(model.config, "_name_or_path", "") or type(model).__name__


def _listed(norm: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in sorted(norm.items()))
