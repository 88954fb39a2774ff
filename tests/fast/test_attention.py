"""The attention of the last prompt token, against transformers' own output_attentions."""

import copy
import json
import re

import pytest
import torch
import transformers
from transformers import LlavaConfig, LlavaForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llava_norm_align.diagnosis.attention import attention, image_grid
from llava_norm_align.diagnosis.structure import find_structure, layer0_input
from llava_norm_align.diagnosis.tokens import Prompt, group_tokens
from tests.helpers import tiny
from tests.helpers.vlms import VLMS

SCATTERED = ("glm4v", "idefics2", "fast_vlm")  # pixels not as an image; a resampler; convolutions
IMAGE = tiny.IMAGE_TOKEN_ID
TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5


def prompts(images=2):
    processor = tiny.processor()
    return [Prompt(dict(tiny.prompt_with_image(processor, seed)), name=f"{seed}.png") for seed in range(images)]


def last_rows(model, inputs):
    """[layers, T]: the last row of the attention, mean over heads, as an eager copy of the whole model returns it."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        weights = eager(**inputs, output_attentions=True).attentions
    return torch.stack([layer[0, :, -1].mean(dim=0) for layer in weights])


def test_the_shares_and_the_map_are_those_that_transformers_returns():
    model, asked = tiny.stock_llava(), prompts()
    found, missing = attention(model, find_structure(model, asked[0].inputs), asked)
    rows = [last_rows(model, prompt.inputs) for prompt in asked]
    visual = asked[0].inputs["input_ids"][0] == IMAGE
    expected = torch.stack([row[:, visual].sum(dim=1) for row in rows]).mean(dim=0)
    torch.testing.assert_close(torch.tensor(found["image_share"]), expected, rtol=1e-5, atol=1e-7)
    assert 0.05 < min(found["image_share"]) and max(found["image_share"]) < 0.95
    assert found["image_tokens_share"] == pytest.approx(visual.double().mean().item())
    assert (found["images"], found["from"], missing) == (2, "last prompt token", [])
    shown = found["map"]
    assert (shown["image"], shown["rows"], shown["columns"], shown["tile"]) == ("0.png", 2, 2, False)
    grid = rows[0][:, visual].mean(dim=0).reshape(2, 2)
    torch.testing.assert_close(torch.tensor(shown["values"]), grid, rtol=1e-5, atol=1e-7)
    json.dumps(found, allow_nan=False)


def test_one_layer_by_hand():
    """Softmax of q k / sqrt(d) of layer 0, with rotary embeddings written out."""
    model, (prompt,) = tiny.stock_llava(family="mistral"), prompts(1)
    found, _ = attention(model, find_structure(model, prompt.inputs), [prompt])
    decoder = model.get_decoder()
    layer = decoder.layers[0]
    with torch.no_grad():
        hidden = model(**prompt.inputs, output_hidden_states=True).hidden_states[0]
        states = layer.input_layernorm(hidden)[0]
        query, key = (
            module(states).view(len(states), -1, 8) for module in (layer.self_attn.q_proj, layer.self_attn.k_proj)
        )
    frequency = 50_000.0 ** (-torch.arange(4) / 4)  # the base of tiny.text_config
    angle = torch.arange(len(states))[:, None, None] * frequency
    turned = []
    for vectors in (query, key):
        first, second = vectors[..., :4], vectors[..., 4:]
        turned.append(
            torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)
        )
    query, key = turned[0][-1], turned[1].repeat_interleave(2, dim=1)  # 4 heads share 2 keys
    weights = torch.softmax(torch.einsum("hd,thd->ht", query, key) / 8**0.5, dim=-1)
    visual = prompt.inputs["input_ids"][0] == IMAGE
    assert found["image_share"][0] == pytest.approx(weights[:, visual].sum(dim=1).mean().item(), rel=1e-5)


def test_the_model_is_as_before_also_after_an_error():
    model, asked = tiny.stock_llava(), prompts()
    structure = find_structure(model, asked[0].inputs)
    with torch.no_grad():
        before = model(**asked[0].inputs).logits

    def broken():
        yield asked[0]
        assert model.get_decoder().config._attn_implementation == "eager"
        raise KeyboardInterrupt

    def check():
        assert model.get_decoder().config._attn_implementation == "sdpa"
        assert model.config._attn_implementation == "sdpa"
        assert model.model.vision_tower.config._attn_implementation == "sdpa"
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in structure.layers.modules())
        with torch.no_grad():
            assert torch.equal(model(**asked[0].inputs).logits, before)

    attention(model, structure, asked)
    check()
    with pytest.raises(KeyboardInterrupt):
        attention(model, structure, broken())
    check()


def test_newline_rows_are_no_image_and_the_map_is_the_whole_image_tile():
    model = tiny.stock_llava(kind="llava_onevision")
    prompt = Prompt(tiny.tiled_inputs(seed=1), name="tiled.png")
    found, missing = attention(model, find_structure(model, prompt.inputs), [prompt])
    rows = last_rows(model, prompt.inputs)
    newline = [2 + 4 + 4, 2 + 4 + 9]  # after the whole image and each row of 4 patches
    visual = [place for place in range(2, 16) if place not in newline]
    torch.testing.assert_close(torch.tensor(found["image_share"]), rows[:, visual].sum(dim=1), rtol=1e-5, atol=1e-7)
    assert found["map"]["tile"] is True and missing == []
    expected = rows[:, 2:6].mean(dim=0).reshape(2, 2)
    torch.testing.assert_close(torch.tensor(found["map"]["values"]), expected, rtol=1e-5, atol=1e-7)


# rows, columns, whether the map is of one tile, and which of the tokens at placeholders is the first of it
GRIDS = {
    "llava_next": (2, 2, True, 0),
    "llava_onevision": (2, 2, True, 0),
    "qwen2_vl": (2, 3, False, 0),
    "qwen2_5_vl": (2, 3, False, 0),
    "qwen3_vl": (2, 3, False, 0),
    "glm4v": (2, 3, False, 0),
    "internvl": (2, 2, True, 4),
    "idefics2": None,  # a resampler's tokens have no place
    "idefics3": (2, 2, True, 16),
    "smolvlm": (2, 2, True, 16),
    "aya_vision": (2, 2, True, 8),
    "cohere2_vision": (2, 2, True, 4),
}


def family(name):
    """A tiny model of a family of VLMS and its inputs."""
    vlm = VLMS[name]
    if vlm.since_5 and not TRANSFORMERS_5:
        pytest.skip("not in this version of transformers")
    return vlm.build()


@pytest.mark.parametrize("name", VLMS)
def test_every_family_gives_what_transformers_returns(name):
    model, inputs = family(name)
    found, missing = attention(model, find_structure(model, inputs), [Prompt(inputs)])
    rows = last_rows(model, inputs)
    places = (inputs["input_ids"][0] == VLMS[name].placeholder).nonzero()[:, 0]
    visual = [place for number, place in enumerate(places.tolist()) if number not in VLMS[name].newlines]
    torch.testing.assert_close(torch.tensor(found["image_share"]), rows[:, visual].sum(dim=1), rtol=1e-5, atol=1e-6)
    grid = GRIDS.get(name, GRIDS.get(name.removesuffix("_norm_align"), (2, 2, False, 0)))
    if grid is None:
        assert found["map"] is None and "not patches of the image" in missing[0]
        return
    height, width, tile, first = grid
    is_visual, is_newline = torch.zeros(2, rows.shape[1], dtype=torch.bool)
    is_visual[visual] = True
    is_newline[[place for place in places.tolist() if place not in visual]] = True
    covered, _ = image_grid(model, is_visual, is_newline, inputs)
    assert covered.flatten().tolist() == visual[first : first + height * width]
    shown = found["map"]
    assert (shown["rows"], shown["columns"], shown["tile"], missing) == (height, width, tile, [])
    expected = rows[:, visual].mean(dim=0)[first : first + height * width].reshape(height, width)
    torch.testing.assert_close(torch.tensor(shown["values"]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in VLMS if "qwen" not in name and name not in SCATTERED])
def test_a_corner_of_the_image_is_that_corner_of_the_map(name):
    """Without attention in the vision encoder, a change of one quarter of the image changes one visual token."""
    model, inputs = family(name)
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            if re.search(r"(vision_tower|vision_model|vision_encoder).*(out_proj|projection_layer|o_proj)", parameter):
                value.zero_()
    structure = find_structure(model, inputs)
    hidden = layer0_input(model, structure.layers, **inputs)
    members = group_tokens(structure, Prompt(inputs), hidden)
    grid, _ = image_grid(model, members["visual"][0], members["newline"][0], inputs)
    pixels = inputs["pixel_values"]
    height, width = (side // 2 for side in pixels.shape[-2:])
    for row in range(2):
        for column in range(2):
            other = pixels.clone()  # the whole image may be any tile: change them all
            other[..., row * height : (row + 1) * height, column * width : (column + 1) * width] += 1
            changed = layer0_input(model, structure.layers, **{**inputs, "pixel_values": other}) != hidden
            expected = torch.zeros(2, 2, dtype=torch.bool)
            expected[row, column] = True
            assert torch.equal(changed[0].any(dim=-1)[grid], expected)


def test_without_a_known_grid_there_is_a_reason():
    def reason(model, inputs, visual=None):
        visual = inputs["input_ids"][0] == IMAGE if visual is None else visual
        grid, why = image_grid(model, visual, torch.zeros_like(visual), inputs)
        assert grid is None
        return why

    model, inputs = family("qwen2_vl")
    wrong = {**inputs, "image_grid_thw": torch.tensor([[1, 4, 8]])}
    assert reason(model, wrong) == "6 visual tokens do not fit image_grid_thw [4, 8]"
    inputs.pop("image_grid_thw")
    assert reason(model, inputs) == "the model's inputs do not say where its visual tokens lie"
    model, inputs = family("llava")
    places = (inputs["input_ids"][0] == IMAGE).nonzero()[:, 0]
    three = torch.zeros_like(inputs["input_ids"][0], dtype=torch.bool).index_fill(0, places[:3], True)
    assert reason(model, inputs, three) == "3 visual tokens are no square"
    model, inputs = family("internvl")
    seven = (inputs["input_ids"][0] == IMAGE).index_fill(0, torch.tensor([1]), False)
    assert reason(model, inputs, seven) == "7 visual tokens do not fit 2 tiles"
    model.config.model_type = "some_vlm"
    assert reason(model, inputs) == "which of the 2 tiles of an image is the whole one is not known of some_vlm"


def llava_with(kind, implementation="sdpa", **fields):
    """A tiny LLaVA around another language model."""
    sizes = dict(vocab_size=tiny.VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    text = CONFIG_MAPPING[kind](**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0, **fields)
    config = tiny.llava_config(LlavaConfig, text_config=text)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration._from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize(
    ("kinds", "without"),
    [(["conv", "full_attention"], [0]), (["full_attention", "conv"], [1])],
)
def test_a_layer_without_attention_has_no_share(kinds, without):
    model = llava_with("lfm2", intermediate_size=64, num_key_value_heads=2, layer_types=kinds)
    (prompt,) = prompts(1)
    found, missing = attention(model, find_structure(model, prompt.inputs), [prompt])
    assert [number for number, share in enumerate(found["image_share"]) if share is None] == without
    assert missing == [f"These decoder layers give no finite attention weights: {without[0]}."]
    share = found["image_share"][1 - without[0]]
    assert sum(map(sum, found["map"]["values"])) == pytest.approx(share, rel=1e-5)  # the mean of one layer


def test_a_model_without_attention_weights_is_a_sentence():
    model, (prompt,) = tiny.stock_llava(), prompts(1)
    with torch.no_grad():
        model.get_decoder().layers[0].self_attn.q_proj.weight.fill_(torch.nan)  # every layer after it is NaN too
    structure = find_structure(model, prompt.inputs)
    found, missing = attention(model, structure, [prompt])
    assert found is None
    assert missing == [
        "The attention is not shown: no decoder layer of LlavaForConditionalGeneration gives finite attention weights."
    ]
    ids = torch.tensor([[1, 5, 6]])
    text = Prompt({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert attention(model, structure, [text]) == (None, ["The attention is not shown: no prompt has visual tokens."])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_weights_that_an_older_model_drops(implementation):
    """StableLM of transformers 4.57 gives weights when asked only, and cannot change to eager attention."""
    model = llava_with("stablelm", implementation, intermediate_size=64, num_key_value_heads=2)
    (prompt,) = prompts(1)
    found, missing = attention(model, find_structure(model, prompt.inputs), [prompt])
    if implementation == "sdpa" and not TRANSFORMERS_5:  # it would give weights here too, without a causal mask
        assert found is None and missing[0].startswith("The attention is not shown: no decoder layer of")
        return
    assert missing == []
    visual = prompt.inputs["input_ids"][0] == IMAGE
    expected = last_rows(model, prompt.inputs)[:, visual].sum(dim=1)
    torch.testing.assert_close(torch.tensor(found["image_share"]), expected, rtol=1e-5, atol=1e-7)
