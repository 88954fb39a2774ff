"""A projector's file: whichever layout it is in, its tensors are read, loaded and saved bit for bit."""

import os
import stat

import pytest
import torch
from peft import get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llava_norm_align import LlavaNormAlignConfig, LlavaNormAlignForConditionalGeneration
from llava_norm_align.common.errors import InputError
from llava_norm_align.conversion.assemble import assemble
from llava_norm_align.conversion.micro import SHIPPED_PROJECTOR
from llava_norm_align.conversion.projector_file import load_projector, read_projector, read_values, save_projector
from llava_norm_align.trl_recipes.lora import lora_config
from tests.helpers import tiny
from tests.helpers.parts import write_text, write_vision

SHAPES = {"linear_1.weight": (32, 16), "linear_1.bias": (32,), "linear_2.weight": (32, 32), "linear_2.bias": (32,)}
NORM = {"align_norm.weight": (32,), "align_norm.bias": (32,)}
ORIGINAL = {
    "linear_1.weight": "model.mm_projector.0.weight",
    "linear_1.bias": "model.mm_projector.0.bias",
    "linear_2.weight": "model.mm_projector.2.weight",
    "linear_2.bias": "model.mm_projector.2.bias",
}
PREFIX = "multi_modal_projector."


def random_tensors(shapes=SHAPES, dtype=torch.float32, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(file, tensors, prefix=PREFIX, metadata=None):
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, file, metadata=metadata)
    return file


def norm_aligned(seed=0, **fields):
    torch.manual_seed(seed)
    config = tiny.llava_config(LlavaNormAlignConfig, norm_align_target=1.0, **fields)
    return tiny.randomize(LlavaNormAlignForConditionalGeneration(config), seed)


def projector(model):
    """Copies of what it computes with now."""
    return {name: tensor.clone() for name, tensor in model.model.multi_modal_projector.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [PREFIX, "", f"model.{PREFIX}", "mm_projector.bin", "norm"])
def test_every_layout_is_read_bit_for_bit(tmp_path, layout, dtype):
    tensors = random_tensors(dtype=dtype)
    if layout == "mm_projector.bin":
        file = tmp_path / layout
        torch.save({ORIGINAL[name]: tensor for name, tensor in tensors.items()}, file)
    else:
        tensors |= random_tensors(NORM) if layout == "norm" else {}
        file = write(tmp_path / "projector.safetensors", tensors, PREFIX if layout == "norm" else layout)
    read = {name: read_values(tensor) for name, tensor in read_projector(file).items()}
    assert same(read, tensors) and all(read[name].dtype == tensors[name].dtype for name in read)


def test_the_shipped_projector_is_read():
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in read_projector(SHIPPED_PROJECTOR).items()}
    assert shapes == {
        "linear_1.weight": ("BF16", (576, 384)),
        "linear_1.bias": ("BF16", (576,)),
        "linear_2.weight": ("BF16", (576, 576)),
        "linear_2.bias": ("BF16", (576,)),
    }


BAD_TENSORS = {
    "a layer lost": ({"linear_2.weight": None}, "has the projector tensors linear_1.bias"),
    "a third layer": ({"linear_3.weight": torch.ones(2)}, "linear_3.weight.* were expected"),
    "norm in half precision": ({"align_norm.weight": torch.ones(32).bfloat16()}, "align_norm.weight in BF16"),
    "a bias without a gain": ({"align_norm.bias": torch.ones(32)}, "no align_norm.weight"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_what_is_no_projector_is_refused(tmp_path, case):
    changes, message = BAD_TENSORS[case]
    tensors = {name: tensor for name, tensor in (random_tensors() | changes).items() if tensor is not None}
    with pytest.raises(InputError, match=message):
        read_projector(write(tmp_path / "projector.safetensors", tensors))


def test_files_of_something_else_are_refused(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        read_projector(tmp_path)
    with pytest.raises(InputError, match="is missing"):
        read_projector(tmp_path / "none.safetensors")
    (tmp_path / "broken.safetensors").write_text("no")
    with pytest.raises(InputError, match="cut or damaged"):
        read_projector(tmp_path / "broken.safetensors")
    tiny.stock_llava().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"holds \d+ tensor\(s\) beside the projector.*whole model"):
        read_projector(tmp_path / "model.safetensors")
    three = {f"model.mm_projector.{i}.{kind}": torch.ones(2) for i in (0, 2, 4) for kind in ("weight", "bias")}
    torch.save(three, tmp_path / "mm_projector.bin")
    with pytest.raises(InputError, match="below mm_projector, but 0.bias, 0.weight, 2.bias, 2.weight were expected"):
        read_projector(tmp_path / "mm_projector.bin")


@pytest.mark.parametrize("kind", ["stock", "layer_norm", "rms_norm", "none", "llava_next", "vipllava"])
def test_what_is_saved_is_loaded_exactly(tmp_path, kind):
    def model(seed):
        if kind in ("layer_norm", "rms_norm", "none"):
            return norm_aligned(seed, norm_align_type=kind)
        return tiny.stock_llava(seed=seed, kind="llava" if kind == "stock" else kind)

    one, other, file = model(1), model(2), tmp_path / "projector.safetensors"
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    save_projector(one, file)
    assert load_projector(other, file) == []
    assert same(projector(other), projector(one))
    moved = {name for name, tensor in other.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if "multi_modal_projector." in name or "image_newline" in name}
    if kind == "llava_next":
        assert torch.equal(other.model.image_newline, one.model.image_newline)
    assert ("align_norm.weight" in read_projector(file)) == (kind in ("layer_norm", "rms_norm"))


def test_the_file_has_published_names_and_an_ordinary_mode(tmp_path):
    model, file = norm_aligned().bfloat16(), tmp_path / "projector.safetensors"
    gain = model.model.multi_modal_projector.align_norm.weight.clone()
    file.write_text("an older one")
    save_projector(model, file, {"command": "train"})
    saved = load_file(file)
    assert set(saved) == {PREFIX + name for name in SHAPES | NORM}
    assert saved[f"{PREFIX}align_norm.weight"].dtype == torch.float32  # also of a norm that was rounded in memory
    assert torch.equal(saved[f"{PREFIX}align_norm.weight"], gain.float())
    assert saved[f"{PREFIX}linear_1.weight"].dtype == torch.bfloat16
    with safe_open(file, framework="pt") as content:
        described = content.metadata()
    assert described == {
        "format": "pt", "command": "train", "norm_align_type": "layer_norm", "norm_align_target": "1.0",
    }  # fmt: skip
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_in_peft_the_trained_copy_is_meant(tmp_path):
    model, file = norm_aligned(), tmp_path / "projector.safetensors"
    adapted = get_peft_model(model, lora_config(model, rank=2))
    wrapper = model.model.multi_modal_projector
    with torch.no_grad():
        wrapper.modules_to_save["default"].align_norm.weight.add_(1)
    save_projector(adapted, file)
    trained = wrapper.modules_to_save["default"].state_dict()
    assert same({name.removeprefix(PREFIX): tensor for name, tensor in load_file(file).items()}, trained)
    old = wrapper.original_module.align_norm.weight.clone()
    load_projector(adapted, write(file, random_tensors(SHAPES | NORM)))
    assert torch.equal(trained["align_norm.weight"], random_tensors(SHAPES | NORM)["align_norm.weight"])
    assert torch.equal(wrapper.original_module.align_norm.weight, old)


def test_a_dtype_that_does_not_hold_the_values_becomes_float32(tmp_path):
    tensors = random_tensors()
    tensors["linear_1.bias"] = tensors["linear_1.bias"].bfloat16().float()
    model = norm_aligned().bfloat16()
    notes = load_projector(model, write(tmp_path / "projector.safetensors", tensors))
    assert len(notes) == 2 and "has no norm: the model's own stays" in notes[0]
    assert "float32 now are linear_1.weight, linear_2.bias, linear_2.weight" in notes[1]
    loaded = projector(model)
    assert all(torch.equal(loaded[name].float(), tensor) for name, tensor in tensors.items())
    assert loaded["linear_1.bias"].dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.lm_head.parameters()} == {torch.bfloat16}


REFUSED = {
    "shape": (norm_aligned, SHAPES | {"linear_2.weight": (32, 31)}, r"linear_2.weight in .* \[32, 31\].*\[32, 32\]"),
    "other tower": (norm_aligned, SHAPES | {"linear_1.weight": (32, 8)}, r"linear_1.weight in .* is \[32, 8\]"),
    "no bias": (norm_aligned, {n: s for n, s in SHAPES.items() if "bias" not in n}, "is absent, but .* it is .32"),
    "stock": (tiny.stock_llava, SHAPES | NORM, "holds a norm, but .* has none with weights. Convert that model first"),
    "scale": (
        lambda: norm_aligned(norm_align_type="scale", norm_align_scale=2.0),
        SHAPES | NORM,
        "has none with weights",
    ),
    "bias of the norm": (
        lambda: norm_aligned(norm_align_bias=False),
        SHAPES | NORM,
        r"holds align_norm.bias \[32\], align_norm.weight \[32\], but the norm of .* has align_norm.weight \[32\]",
    ),
    "norm's shape": (norm_aligned, SHAPES | {n: (16,) for n in NORM}, r"align_norm.weight \[16\], but .* \[32\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_projector_of_another_model_is_refused_before_anything_changes(tmp_path, case):
    make, shapes, message = REFUSED[case]
    model, file = make(), write(tmp_path / "projector.safetensors", random_tensors(shapes))
    before = projector(model)
    with pytest.raises(InputError, match=message):
        load_projector(model, file)
    assert same(projector(model), before)


def test_a_norm_of_another_type_is_refused(tmp_path):
    save_projector(norm_aligned(norm_align_type="rms_norm"), tmp_path / "projector.safetensors")
    with pytest.raises(
        InputError, match="a norm of the type rms_norm, but the model's is layer_norm.*--norm rms_norm"
    ):
        load_projector(norm_aligned(), tmp_path / "projector.safetensors")


def test_assemble_takes_the_original_repositorys_file(tmp_path):
    vision, text, tensors = write_vision(tmp_path / "vision"), write_text(tmp_path / "text"), random_tensors()
    torch.save({ORIGINAL[name]: tensor for name, tensor in tensors.items()}, tmp_path / "mm_projector.bin")
    folder = assemble(tmp_path / "llava", str(vision), str(text), tmp_path / "mm_projector.bin")
    written = load_file(folder / "model.safetensors")
    assert all(torch.equal(written[PREFIX + name], tensor) for name, tensor in tensors.items())
    with_norm = write(tmp_path / "projector.safetensors", random_tensors(SHAPES | NORM))
    with pytest.raises(InputError, match="holds a norm beside the projector.*convert the result with --projector"):
        assemble(tmp_path / "other", str(vision), str(text), with_norm)
    assert not (tmp_path / "other").exists()
