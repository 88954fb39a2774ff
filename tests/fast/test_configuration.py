import json
import math

import pytest
from transformers import AutoConfig

from llava_norm_align import LlavaNormAlignConfig
from tests.helpers import tiny

FIELDS = {
    "norm_align_type": "rms_norm",
    "norm_align_bias": False,
    "norm_align_eps": 1e-6,
    "norm_align_target": 1.09,
    "norm_align_gradient_compensation": False,
    "norm_align_compensation_floor": 1e-4,
}
LLAVA_FIELDS = {
    "image_seq_length": 77,
    "projector_hidden_act": "relu",
    "vision_feature_layer": [-2, -1],
    "multimodal_projector_bias": False,
}


def test_defaults_are_the_papers():
    config = LlavaNormAlignConfig()
    assert config.norm_align_type == "layer_norm"
    assert config.norm_align_bias is True
    assert config.norm_align_eps == 1e-5
    assert config.norm_align_target is None and config.norm_align_scale is None
    assert config.norm_align_gradient_compensation is True
    assert config.norm_align_compensation_floor == 1e-3


@pytest.mark.parametrize(
    ("field", "bad", "allowed"),
    [
        ("norm_align_type", "LayerNorm", "'layer_norm', 'rms_norm', 'scale', 'none'"),
        ("norm_align_type", None, "'layer_norm'"),
        ("norm_align_bias", 1, "True or False"),
        ("norm_align_bias", "yes", "True or False"),
        ("norm_align_eps", 0, "positive"),
        ("norm_align_eps", -1e-5, "positive"),
        ("norm_align_eps", "1e-5", "positive"),
        ("norm_align_eps", True, "positive"),
        ("norm_align_target", 0.0, "positive"),
        ("norm_align_target", -1, "positive"),
        ("norm_align_target", math.nan, "positive"),
        ("norm_align_target", math.inf, "positive"),
        ("norm_align_target", "1.0", "positive"),
        ("norm_align_target", 1e300, "1e30"),  # its gain would overflow fp32
        ("norm_align_target", 1e-300, "1e-30"),  # its gain would be 0
        ("norm_align_target", 10**400, "1e30"),
        ("norm_align_scale", 0.5, "None"),  # the type is layer_norm
        ("norm_align_gradient_compensation", "no", "True or False"),
        ("norm_align_compensation_floor", 0, "positive"),
        ("norm_align_compensation_floor", math.nan, "positive"),
    ],
)
def test_a_bad_value_names_field_value_and_what_is_allowed(field, bad, allowed):
    with pytest.raises(ValueError) as error:
        LlavaNormAlignConfig(**{field: bad})
    message = str(error.value)
    assert message.startswith(f"{field} is {bad!r}; allowed: ") and allowed in message


@pytest.mark.parametrize("bad", [None, 0, -1.0, math.inf, math.nan, "2"])
def test_a_scale_needs_its_factor(bad):
    with pytest.raises(ValueError, match="norm_align_scale"):
        LlavaNormAlignConfig(norm_align_type="scale", norm_align_scale=bad)
    assert LlavaNormAlignConfig(norm_align_type="scale", norm_align_scale=2).norm_align_scale == 2


def test_a_misspelt_field_is_named():
    with pytest.raises(ValueError, match="norm_align_typ is not a field"):
        LlavaNormAlignConfig(norm_align_typ="none")


def test_a_bad_value_is_not_saved(tmp_path):
    config = LlavaNormAlignConfig()
    config.norm_align_eps = -1
    with pytest.raises(ValueError, match="norm_align_eps is -1"):
        config.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_round_trip_keeps_every_field(tmp_path):
    config = tiny.llava_config(LlavaNormAlignConfig, **{**LLAVA_FIELDS, **FIELDS})
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is LlavaNormAlignConfig
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "llava_norm_align"
    for field, value in {**LLAVA_FIELDS, **FIELDS, "image_token_index": tiny.IMAGE_TOKEN_ID}.items():
        assert getattr(again, field) == value, field

    def public(config):
        return {name: value for name, value in config.to_dict().items() if not name.startswith("_")}

    assert public(again) == public(config)


@pytest.mark.parametrize("name", ["image_token_index", "image_token_id"])
def test_both_names_of_the_image_token(name, tmp_path):
    config = LlavaNormAlignConfig(**{name: 7})
    config.save_pretrained(tmp_path)
    again = LlavaNormAlignConfig.from_pretrained(tmp_path)
    assert (config.image_token_index, config.image_token_id) == (7, 7)
    assert (again.image_token_index, again.image_token_id) == (7, 7)


def test_auto_map_names_the_files_of_its_own_folder():
    """Also when the configuration came from a Hub id, where transformers prefixes the entries with the repository."""
    config = LlavaNormAlignConfig(auto_map={"AutoConfig": "someone/else--configuration.Other"})
    assert config.auto_map["AutoConfig"] == "configuration_llava_norm_align.LlavaNormAlignConfig"
    assert config.auto_map["AutoModel"].endswith(".LlavaNormAlignModel")  # vLLM builds the inner model from it
    for name in ("AutoModelForImageTextToText", "AutoModelForVision2Seq"):
        assert config.auto_map[name].endswith(".LlavaNormAlignForConditionalGeneration")


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_rotary_settings_written_by_either_line_are_read(family):
    """transformers 5 writes `rope_parameters` only; 4.57 would silently fall back to its default base."""
    legacy = tiny.text_config(family).to_dict()
    rope = legacy.pop("rope_parameters", None) or {
        "rope_theta": legacy["rope_theta"],
        **(legacy.get("rope_scaling") or {"rope_type": "default"}),
    }
    written_by_5 = {name: value for name, value in legacy.items() if name not in ("rope_theta", "rope_scaling")}
    text = LlavaNormAlignConfig(text_config={**written_by_5, "rope_parameters": rope}).text_config
    assert (getattr(text, "rope_parameters", None) or {"rope_theta": text.rope_theta})["rope_theta"] == 50_000.0
    scaling = getattr(text, "rope_scaling", None) or {}
    assert scaling.get("factor") == (8.0 if family == "llama" else None)
