"""A checkpoint of a projector alone is read back bit for bit; what differs is refused."""

import pytest
import torch

pytest.importorskip("trl")

from safetensors.torch import load_file, save_file

from llava_norm_align.common.errors import CheckFailed
from llava_norm_align.trl_recipes.reload import reload_checkpoint
from tests.helpers import tiny
from tests.helpers.training import norm_aligned


@pytest.fixture
def projector_folder(tmp_path):
    """What a checkpoint of the projector alone holds, and the tensors of the model."""
    model = norm_aligned()
    tensors = {name: tensor.detach().clone() for name, tensor in model.model.multi_modal_projector.named_parameters()}
    save_file({f"multi_modal_projector.{name}": t for name, t in tensors.items()}, tmp_path / "projector.safetensors")
    tiny.processor().save_pretrained(tmp_path)
    model.generation_config.save_pretrained(tmp_path)
    return tmp_path, tensors


def test_a_projector_is_read_back_bit_for_bit(projector_folder):
    folder, tensors = projector_folder
    assert "ok, 6 tensors of the projector bit for bit, LlavaProcessor" in reload_checkpoint(folder, tensors)["how"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("a bit", "align_norm.weight in .* is not the model's"),
        ("rounded", "linear_1.weight in .* is not the model's"),
        ("missing", "differ in linear_2.bias"),
        ("no file", "projector.safetensors is missing"),
        ("no processor", "has no processor"),
        ("no generation config", "generation configuration"),
    ],
)
def test_a_projector_that_differs_is_refused(projector_folder, fault, message):
    folder, tensors = projector_folder
    file = folder / "projector.safetensors"
    stored = load_file(file)
    if fault == "a bit":
        weight = stored["multi_modal_projector.align_norm.weight"]
        weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
    elif fault == "rounded":
        stored["multi_modal_projector.linear_1.weight"] = stored["multi_modal_projector.linear_1.weight"].bfloat16()
    elif fault == "missing":
        del stored["multi_modal_projector.linear_2.bias"]
    save_file(stored, file)
    if fault == "no file":
        file.unlink()
    elif fault == "no processor":
        (folder / "processor_config.json").unlink()
    elif fault == "no generation config":
        (folder / "generation_config.json").unlink()
    with pytest.raises(CheckFailed, match=message):
        reload_checkpoint(folder, tensors)


def test_a_checkpoint_in_shards_is_left_to_resuming(tmp_path):
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    assert "not reloaded: its weights are sharded" in reload_checkpoint(tmp_path)["how"]
