"""TRL's launch files, which train on many devices as they are: accelerate and transformers parse them."""

from pathlib import Path

import pytest

pytest.importorskip("trl")

import trl
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin

from llava_norm_align.trl_recipes import groups
from tests.helpers import tiny
from tests.helpers.training import norm_aligned

FOLDER = Path(trl.__path__[0], "accelerate_configs")


@pytest.mark.parametrize("name", ["multi_gpu", "fsdp2", "zero2", "zero3"])
def test_accelerate_knows_every_key(name):
    file = FOLDER / f"{name}.yaml"
    config = load_config_from_file(str(file))  # a ValueError for an unknown key
    written = yaml.safe_load(file.read_text())
    assert isinstance(config, ClusterConfig)
    assert config.mixed_precision == "bf16"
    assert written.keys() <= set(vars(config)) | {"compute_environment"}
    assert config.distributed_type.value == written["distributed_type"]
    for key in ("fsdp_config", "deepspeed_config"):
        assert getattr(config, key) == written.get(key, {})


def test_zero_needs_nothing_of_its_own():
    deepspeed = yaml.safe_load((FOLDER / "zero3.yaml").read_text())["deepspeed_config"]
    assert deepspeed["zero3_save_16bit_model"]  # without it a checkpoint would hold no model


@pytest.mark.parametrize("make", [norm_aligned, tiny.stock_llava, lambda: tiny.stock_llava("siglip", "qwen2")])
def test_fsdp2_finds_the_layers_of_any_llava(make):
    """By accelerate's default, a layer of CLIP's text side is looked for, and not found."""
    model = make()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    groups.prepare_fsdp(plugin, model)
    names = plugin.transformer_cls_names_to_wrap
    assert {"LlamaDecoderLayer", "Qwen2DecoderLayer"} & set(names)
    assert {"CLIPEncoderLayer", "SiglipEncoderLayer"} & set(names)
    plugin.set_auto_wrap_policy(model)
    asked = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["CLIPEncoderLayer"]
    )
    groups.prepare_fsdp(asked, model)
    assert asked.transformer_cls_names_to_wrap == ["CLIPEncoderLayer"]
