"""What a diagnosis finds in tiny models of many families, against transformers' own hidden states."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForImageTextToText

from llava_norm_align.common.errors import InputError
from llava_norm_align.diagnosis.measure import measure
from llava_norm_align.diagnosis.structure import find_structure
from llava_norm_align.diagnosis.tokens import GROUPS, Prompt, group_tokens
from tests.helpers import vlms
from tests.helpers.remote import write_remote_vlm
from tests.helpers.vlms import VLMS

BOS, PADS = 1, 3
TEXT_MODELS = {"idefics2": "text_model", "idefics3": "text_model", "smolvlm": "text_model"}

not_in_4 = pytest.mark.skipif(not vlms.TRANSFORMERS_5, reason="transformers 4.57 does not have this family")
each_family = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=not_in_4 if vlm.since_5 else ()) for name, vlm in VLMS.items()]
)


def look(model, inputs):
    """`model` as the diagnosis sees it on one prompt."""
    structure = find_structure(model, inputs)
    measured = measure(model, [Prompt(inputs)], structure)
    parts = dict(norms=measured.norms, dynamics=measured.dynamics)
    return SimpleNamespace(model=model, inputs=inputs, structure=structure, **parts)


@functools.cache
def seen(name):
    return look(*VLMS[name].build())


def summary(found, tap):
    return found.norms[tap].summary()


def hidden_states(model, inputs):
    """[tokens, D]: what transformers says reaches the first decoder layer."""
    inputs = {key: value for key, value in inputs.items() if key != "labels"}
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True).hidden_states[0][0]


def members(name, ids):
    """Which `ids` are visual, newline, bos and text tokens, by what the family is known to do."""
    vlm = VLMS[name]
    places = ids == vlm.placeholder
    newline = torch.zeros_like(places)
    newline[places.nonzero().flatten()[list(vlm.newlines)]] = True
    bos, replaced = ids == BOS, torch.isin(ids, torch.tensor(vlm.replaced, dtype=torch.long))
    return {"visual": places & ~newline, "newline": newline, "bos": bos, "text": ~places & ~bos & ~replaced}


def assert_norms(found, vectors):
    """`found` is the summary of `vectors` [tokens, D], computed here in float64."""
    norms = vectors.double().pow(2).sum(-1).sqrt()
    assert found["n"] == len(norms) > 0
    expected = (norms.mean().item(), norms.std(unbiased=False).item(), norms.max().item())
    assert (found["mean"], found["std"], found["max"]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert found["max_element"] == pytest.approx(vectors.abs().max().item(), rel=1e-6)
    assert found["non_finite"] == found["near_constant"] == 0


@each_family
def test_structure(name):
    found, vlm = seen(name), VLMS[name]
    assert found.structure.projector_name == vlm.projector
    assert found.structure.projector is found.model.get_submodule(vlm.projector)
    text_model = TEXT_MODELS.get(name, "language_model")
    assert found.structure.layers is found.model.get_submodule(f"model.{text_model}.layers")
    assert found.structure.placeholders == (vlm.placeholder,)
    assert found.structure.missing == ()


@each_family
def test_every_token_is_in_the_group_it_belongs_to(name):
    found, vlm = seen(name), VLMS[name]
    hidden = hidden_states(found.model, found.inputs)[None]
    groups = group_tokens(found.structure, Prompt(found.inputs), hidden)
    expected = members(name, found.inputs["input_ids"][0])
    assert {group: groups[group][0].tolist() for group in expected} == {
        group: where.tolist() for group, where in expected.items()
    }
    assert list(groups) == list(GROUPS) and torch.stack([*groups.values()]).sum(0).eq(1).all()
    placeholders = (found.inputs["input_ids"] == vlm.placeholder).sum().item()
    assert groups["visual"].sum().item() == placeholders - len(vlm.newlines) == vlm.visual


@each_family
def test_norms_where_tokens_enter_the_language_model(name):
    found = seen(name)
    hidden, ids = hidden_states(found.model, found.inputs), found.inputs["input_ids"][0]
    reached = []
    handle = found.structure.layers[0].register_forward_pre_hook(lambda module, args: reached.append(args[0][0]))
    assert hidden_states(found.model, found.inputs).equal(reached[0])  # so hidden_states[0] is layer 0's input
    handle.remove()
    for group, where in members(name, ids).items():
        if where.any():
            assert_norms(summary(found, group), hidden[where])
        else:
            assert summary(found, group) is None or summary(found, group)["n"] == 0
    text = members(name, ids)["text"]
    with torch.no_grad():
        assert_norms(summary(found, "text_embedding_output"), found.model.get_input_embeddings()(ids[text]))


@each_family
def test_norms_around_the_projector(name):
    found, vlm = seen(name), VLMS[name]
    vectors = {}

    def keep(module, args, output):
        if args[0].is_floating_point():  # Ovis looks up the markers around an image in the same table
            vectors["encoder_features"] = args[0].flatten(0, -2)
            vectors["projector_output"] = output.flatten(0, -2)

    handle = found.model.get_submodule(vlm.projector).register_forward_hook(keep)
    hidden = hidden_states(found.model, found.inputs)
    handle.remove()
    for tap, expected in vectors.items():
        assert_norms(summary(found, tap), expected)
    assert summary(found, "encoder_features")["n"] == vlm.features
    # all of them, and nothing else, stand at the placeholders
    visual = hidden[members(name, found.inputs["input_ids"][0])["visual"]]
    assert_norms(summary(found, "projector_output"), visual)


@each_family
def test_the_projectors_last_weights_scale_visual_tokens_alone(name):
    before, vlm = seen(name), VLMS[name]
    model, inputs = vlm.build()
    with torch.no_grad():
        for last in vlm.last:
            model.get_submodule(vlm.projector).get_parameter(last).mul_(10)
    after = look(model, inputs)
    factor, rel = (1, 1e-3) if vlm.norm_follows else (10, 1e-5)
    for tap in ("projector_output", "visual"):
        assert summary(after, tap)["mean"] == pytest.approx(factor * summary(before, tap)["mean"], rel=rel)
    for tap in ("text", "text_embedding_output", "encoder_features", "bos", "newline"):
        assert summary(after, tap) == summary(before, tap)


@each_family
def test_only_layers_that_add_visual_features_are_marked(name):
    layers = seen(name).dynamics.layers_summary()
    marked = tuple(layer["layer"] for layer in layers if layer["adds_visual_features"])
    assert marked == VLMS[name].adds
    assert all(math.isfinite(layer[group]["update_norm"]) for layer in layers for group in ("visual", "text"))


@pytest.mark.parametrize("name", ["llava", "llava_next", "idefics3", "deepseek_vl"])
def test_padding_is_shown_apart(name):
    found = seen(name)
    ids, mask = found.inputs["input_ids"], found.inputs["attention_mask"]
    padded = {
        **found.inputs,
        "input_ids": torch.nn.functional.pad(ids, (PADS, 0)),
        "attention_mask": torch.nn.functional.pad(mask, (PADS, 0)),
    }
    again = look(found.model, padded)
    assert summary(again, "padding")["n"] == PADS
    for group in ("visual", "text", "bos", "newline"):
        assert summary(again, group) == summary(found, group)


def test_cross_attention_is_refused():
    model, inputs = vlms.mllama()
    with pytest.raises(InputError, match="cross-attention"):
        find_structure(model, inputs)


@pytest.mark.parametrize("expands", [False, True])
def test_remote_code_with_names_that_nobody_knows(expands, tmp_path):
    inputs = write_remote_vlm(tmp_path / f"remote_{expands}", expands)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / f"remote_{expands}", trust_remote_code=True).eval()
    found = look(model, inputs)
    assert found.structure.layers is model.brain.model.layers
    assert found.structure.projector is None and found.structure.projector_name is None
    assert len(found.structure.missing) == 1 and "projector" in found.structure.missing[0]
    assert found.structure.placeholders == (-200 if expands else vlms.IMAGE,)

    hidden = hidden_states(model, inputs)
    visual = torch.zeros(13, dtype=torch.bool)
    visual[2:6] = True  # after BOS and USER:
    assert len(hidden) == 13
    assert_norms(summary(found, "visual"), hidden[visual])
    assert_norms(summary(found, "bos"), hidden[:1])
    visual[0] = True
    assert_norms(summary(found, "text"), hidden[~visual])
    for tap in ("encoder_features", "projector_output"):
        assert summary(found, tap) is None


def test_a_norm_aligned_model_has_the_norm_of_its_target():
    """The one family whose visual norm is known beforehand."""
    torch.manual_seed(0)
    model, inputs = VLMS["llava_norm_align"].build()
    norm = model.model.multi_modal_projector.align_norm
    with torch.no_grad():
        norm.weight.fill_(1.75 / math.sqrt(vlms.D))
        norm.bias.zero_()
    assert summary(look(model, inputs), "visual")["mean"] == pytest.approx(1.75, rel=1e-3)
