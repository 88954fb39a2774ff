"""What layers do to tokens, against numpy in float64 on small tensors."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from llava_norm_align.common.errors import InputError
from llava_norm_align.diagnosis.dynamics import MEANS, LayerDynamics

D = 24


def random(seed, *shape, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def masks(tokens, **places):
    """{"visual": bool [1, T], ...} from the places of each group's tokens."""
    members = {group: torch.zeros(1, tokens, dtype=torch.bool) for group in places}
    for group, at in places.items():
        members[group][0, at] = True
    return members


def states(seed, tokens=9, layers=3, dtype=torch.float32):
    """The input of layer 0 and each layer's output: [1, T, D] each; tokens' norms from 3 to 30."""
    scale = torch.linspace(1, 8, tokens)[:, None]
    states = [random(seed, 1, tokens, D) * scale]
    for layer in range(layers):
        states.append(states[-1] + random(100 * seed + layer, 1, tokens, D, scale=layer + 0.5))
    return [state.to(dtype) for state in states]


def run(dynamics, states, members):
    dynamics.begin(states[0], members)
    for layer, (before, after) in enumerate(zip(states, states[1:], strict=False)):
        dynamics.add(layer, before, after)
    dynamics.end()


@np.errstate(invalid="ignore")
def token_numbers(first, before, after):
    """MEANS of each token, by the definitions, in float64: {name: [tokens]}."""
    first, before, after = (state[0].double().numpy() for state in (first, before, after))
    update = after - before

    def norm(x):
        return np.sqrt((x * x).sum(axis=-1))

    def cosine(x, y):
        return (x * y).sum(axis=-1) / norm(x) / norm(y)

    return {
        "hidden_norm": norm(before),
        "update_norm": norm(update),
        "relative_update": norm(update) / norm(before),
        "cosine_adjacent": cosine(before, after),
        "cosine_layer0": cosine(first, after),
        "update_angle_degrees": np.degrees(np.arccos(cosine(before, update))),
        "rotation_degrees": np.degrees(np.arccos(cosine(before, after))),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_means_of_tokens_then_of_images(dtype):
    places = [{"visual": [0, 1, 2, 5], "text": [3, 8]}, {"visual": [6], "text": [0, 2, 4, 7]}]
    images = [states(seed, dtype=dtype) for seed in (1, 2)]
    dynamics = LayerDynamics(3)
    for image, where in zip(images, places, strict=True):
        run(dynamics, image, masks(9, **where))
    assert dynamics.images == 2
    found = dynamics.layers_summary()
    json.dumps(found, allow_nan=False)
    assert [layer["layer"] for layer in found] == [0, 1, 2]
    for index, layer in enumerate(found):
        tokens = [token_numbers(image[0], image[index], image[index + 1]) for image in images]
        for group in ("visual", "text"):
            assert set(layer[group]) == {*MEANS, "hidden_norm_median", "rotation_predicted_degrees"}
            for name in MEANS:
                expected = np.mean([one[name][where[group]].mean() for one, where in zip(tokens, places, strict=True)])
                assert layer[group][name] == pytest.approx(expected, rel=2e-6), (index, group, name)
            norms = [one["hidden_norm"][where[group]] for one, where in zip(tokens, places, strict=True)]
            assert layer[group]["hidden_norm_median"] == pytest.approx(np.median(np.concatenate(norms)), rel=0.01)


def test_the_prediction_is_the_formula_with_the_layers_own_update():
    dynamics, image = LayerDynamics(3), states(3)
    run(dynamics, image, masks(9, visual=[0, 1, 2, 5, 6], text=[3]))
    for layer in dynamics.layers_summary():
        # Five visual tokens and one of text weigh the same in the layer's C and phi.
        norm = (layer["visual"]["update_norm"] + layer["text"]["update_norm"]) / 2
        phi = np.radians((layer["visual"]["update_angle_degrees"] + layer["text"]["update_angle_degrees"]) / 2)
        for group in ("visual", "text"):
            expected = np.degrees(np.angle(layer[group]["hidden_norm"] + norm * np.exp(1j * phi)))
            assert layer[group]["rotation_predicted_degrees"] == pytest.approx(expected, rel=1e-12)


def test_a_known_triangle():
    """A 3-4-5 triangle: h of norm 3, an update of norm 4 at 90 degrees; and one of norm 4 that turns h round."""
    before = torch.tensor([[[0.0, 3, 0, 0], [0, 1, 0, 0]]])
    after = torch.tensor([[[4.0, 3, 0, 0], [0, -3, 0, 0]]])
    dynamics = LayerDynamics(1)
    run(dynamics, [before, after], masks(2, visual=[0], text=[1]))
    (layer,) = dynamics.layers_summary()
    visual, text = layer["visual"], layer["text"]
    assert (visual["hidden_norm"], visual["update_norm"]) == (3, 4)
    assert visual["relative_update"] == pytest.approx(4 / 3)
    assert visual["update_angle_degrees"] == pytest.approx(90)
    assert visual["rotation_degrees"] == pytest.approx(math.degrees(math.atan2(4, 3)))
    assert visual["cosine_adjacent"] == pytest.approx(0.6)
    assert (text["update_norm"], text["relative_update"]) == (4, 4)
    for name in ("update_angle_degrees", "rotation_degrees"):
        assert text[name] == pytest.approx(180)
    assert text["cosine_layer0"] == pytest.approx(-1)
    # The layer's C is 4 and its phi 135 degrees. For text the denominator of tan(theta) is negative.
    assert visual["rotation_predicted_degrees"] == pytest.approx(math.degrees(math.atan(8**0.5 / (3 - 8**0.5))))
    assert text["rotation_predicted_degrees"] == pytest.approx(180 - math.degrees(math.atan(8**0.5 / (8**0.5 - 1))))


@pytest.mark.parametrize("share, phi", [(1e-4, 90), (1e-3, 5), (0.5, 0.01), (0.5, 179.99), (3, 0.01)])
def test_small_angles_are_exact(share, phi):
    """Where acos of a float32 cosine gives 0 or 0.02 degrees."""
    before = random(4, 1, 50, D, scale=20).double()
    across = random(5, 1, 50, D).double()
    unit = before / before.norm(dim=-1, keepdim=True)
    across -= (across * unit).sum(dim=-1, keepdim=True) * unit
    across /= across.norm(dim=-1, keepdim=True)
    angle = math.radians(phi)
    size = share * before.norm(dim=-1, keepdim=True)
    after = before + size * (math.cos(angle) * unit + math.sin(angle) * across)
    dynamics = LayerDynamics(1)
    run(dynamics, [before.float(), after.float()], masks(50, visual=list(range(50))))
    # The angles of what float32 holds: sides and distance from the axis in float64.
    h, u = before.float().double().numpy()[0], (after.float().double() - before.float().double()).numpy()[0]
    length = np.sqrt((h**2).sum(axis=1))
    along = (h * u).sum(axis=1) / length
    off = np.sqrt(((u - along[:, None] * h / length[:, None]) ** 2).sum(axis=1))
    visual = dynamics.layers_summary()[0]["visual"]
    assert visual["rotation_degrees"] == pytest.approx(np.degrees(np.arctan2(off, length + along)).mean(), rel=1e-3)
    assert visual["update_angle_degrees"] == pytest.approx(np.degrees(np.arctan2(off, along)).mean(), rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_token_that_is_not_finite_is_left_out(bad):
    image = states(6)
    broken = [state.clone() for state in image]
    for state in broken[2:]:  # from the output of layer 1 on
        state[0, 2, 5] = bad
    dynamics = LayerDynamics(3)
    run(dynamics, broken, masks(9, visual=[0, 2, 4], text=[2]))
    found = dynamics.layers_summary()
    for index, kept in ((0, [0, 2, 4]), (1, [0, 4]), (2, [0, 4])):
        expected = token_numbers(image[0], image[index], image[index + 1])
        for name in MEANS:
            assert found[index]["visual"][name] == pytest.approx(expected[name][kept].mean(), rel=2e-6), (index, name)
    assert found[0]["text"] is not None
    assert found[1]["text"] is found[2]["text"] is None
    assert found[1]["a1"] == {"ratio": None, "interval": None, "verdict": "none"}
    json.dumps(found, allow_nan=False)


def test_a_zero_vector_counts_in_the_norms_and_has_no_angle():
    image = states(7, layers=2)
    image[0][0, 1] = 0
    image[1][0, 1] = 0  # no update of a zero vector, then one
    image[1][0, 3] = image[0][0, 3]  # a token that layer 0 leaves as it is
    dynamics = LayerDynamics(2)
    run(dynamics, image, masks(9, visual=[1, 2, 3], text=[1]))
    found = dynamics.layers_summary()
    token = {name: values[2] for name, values in token_numbers(*image[:1], *image[:2]).items()}
    visual = found[0]["visual"]
    assert visual["update_norm"] == pytest.approx(token["update_norm"] / 3, rel=1e-6)
    assert visual["update_angle_degrees"] == pytest.approx(token["update_angle_degrees"], rel=1e-6)
    assert visual["rotation_degrees"] == pytest.approx(token["rotation_degrees"] / 2, rel=1e-6)
    assert visual["cosine_adjacent"] == pytest.approx((token["cosine_adjacent"] + 1) / 2, rel=1e-6)
    text = found[0]["text"]
    assert (text["hidden_norm"], text["update_norm"], text["hidden_norm_median"]) == (0, 0, 0)
    assert text["relative_update"] is text["rotation_degrees"] is text["cosine_layer0"] is None
    json.dumps(found, allow_nan=False)


def test_a_token_that_a_layer_takes_to_zero():
    image = states(7, layers=1)
    image[1][0, 4] = 0
    dynamics = LayerDynamics(1)
    run(dynamics, image, masks(9, visual=[4], text=[3, 4]))
    (layer,) = dynamics.layers_summary()
    assert layer["visual"]["update_angle_degrees"] == pytest.approx(180, abs=1e-4)
    assert layer["visual"]["rotation_degrees"] is layer["visual"]["cosine_adjacent"] is None
    expected = token_numbers(image[0], *image)["rotation_degrees"][3]
    assert layer["text"]["rotation_degrees"] == pytest.approx(expected, rel=1e-6)


def test_a_prompt_without_visual_tokens():
    for members in (masks(9, text=[1, 2]), masks(9, text=[1, 2], visual=[])):
        dynamics, image = LayerDynamics(3), states(8)
        run(dynamics, image, members)
        for index, layer in enumerate(dynamics.layers_summary()):
            expected = token_numbers(image[0], image[index], image[index + 1])
            assert layer["visual"] is None
            assert layer["text"]["update_norm"] == pytest.approx(expected["update_norm"][[1, 2]].mean(), rel=2e-6)
            assert layer["text"]["rotation_predicted_degrees"] > 0
            assert (layer["a1"]["verdict"], layer["a2"]["verdict"]) == ("none", "none")


def test_other_groups_and_images_of_other_lengths():
    dynamics = LayerDynamics(2, groups=("text",))
    for tokens in (4, 9):
        run(dynamics, states(tokens, tokens=tokens, layers=2), masks(tokens, text=[0, 1]))
    assert dynamics.image_means("hidden_norm", "text").shape == (2, 2)
    assert [set(layer) for layer in dynamics.layers_summary()] == [{"layer", "adds_visual_features", "text"}] * 2
    nothing = LayerDynamics(2).layers_summary()
    assert [layer["visual"] for layer in nothing] == [None, None]


def test_a_layer_that_is_not_called_has_no_numbers():
    dynamics, image = LayerDynamics(3), states(9)
    dynamics.begin(image[0], masks(9, visual=[0], text=[1]))
    dynamics.add(2, image[2], image[3])
    dynamics.add(0, image[0], image[1])  # any order
    dynamics.end()
    found = dynamics.layers_summary()
    assert found[1]["visual"] is found[1]["text"] is None
    assert found[2]["text"]["hidden_norm"] == pytest.approx(image[2][0, 1].norm().item(), rel=1e-6)
    assert not any(layer["adds_visual_features"] for layer in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
def test_features_added_between_layers_are_marked_at_the_layer_before(dtype, in_place):
    """DeepStack: after layers 0 and 1, and not in each image."""
    dynamics = LayerDynamics(5)
    members = masks(9, visual=[2, 3, 4], text=[0, 1, 7, 8])
    for number in range(3):
        hidden = states(number, dtype=dtype)[0]
        dynamics.begin(hidden, members)
        for layer in range(5):
            before, hidden = hidden, hidden + random(layer, 1, 9, D).to(dtype)
            dynamics.add(layer, before, hidden)
            if number == 1 and layer in (0, 1):
                hidden = hidden if in_place else hidden.clone()
                hidden[0, 3] += random(layer, D, scale=0.05).to(dtype)
            if layer == 3:  # not of visual tokens
                hidden[0, 0] += 1
        dynamics.end()
    marks = [layer["adds_visual_features"] for layer in dynamics.layers_summary()]
    assert marks == [True, True, False, False, False]


def test_hidden_states_that_change_in_place_later_do_not_count():
    image, members = states(10, layers=1), masks(9, visual=[0, 1], text=[2])
    expected = token_numbers(image[0], *image)
    dynamics = LayerDynamics(1)
    dynamics.begin(image[0], members)
    dynamics.add(0, image[0], image[1])
    image[0] += 1
    image[1] -= 1
    dynamics.end()
    (layer,) = dynamics.layers_summary()
    assert layer["visual"]["cosine_layer0"] == pytest.approx(expected["cosine_layer0"][:2].mean(), rel=1e-6)
    assert layer["visual"]["update_norm"] == pytest.approx(expected["update_norm"][:2].mean(), rel=1e-6)


def test_layers_that_drop_tokens_are_refused():
    dynamics, image = LayerDynamics(3), states(11)
    dynamics.begin(image[0], masks(9, visual=[0]))
    dynamics.add(0, image[0], image[1])
    for before, after in ((image[1], image[2][:, 3:]), (image[1][:, 3:], image[2][:, 3:])):
        with pytest.raises(InputError, match=r"layer 1 .*\[1, 9, 24\] reached layer 0.* norms alone"):
            dynamics.add(1, before, after)
    dynamics.begin(image[0][None], masks(9, visual=[0]))  # several streams, as in Gemma3n
    with pytest.raises(InputError, match="norms alone"):
        dynamics.add(0, image[0].expand(2, 1, 9, D), image[1].expand(2, 1, 9, D))


def test_no_layer_waits_for_the_device():
    with FakeTensorMode():  # refuses .item(), bool(tensor) and indexing by a mask
        dynamics = LayerDynamics(3)
        image = [torch.empty(1, 9, D, dtype=torch.bfloat16) for _ in range(4)]
        members = {"visual": torch.empty(1, 9, dtype=torch.bool), "text": torch.empty(1, 9, dtype=torch.bool)}
        for _ in range(3):
            run(dynamics, image, members)


def test_layers_on_other_devices():
    """The meta device stands in for a second one: torch refuses to mix it with the CPU."""
    dynamics, image = LayerDynamics(3), states(12)
    dynamics.begin(image[0], masks(9, visual=[0]))
    dynamics.add(0, image[0], image[1])
    dynamics.add(1, image[1], image[2].to("meta"))
    dynamics.add(2, image[2].to("meta"), image[3].to("meta"))


def test_memory_follows_neither_tokens_nor_images():
    def size(dynamics):
        return len(pickle.dumps(dynamics))

    dynamics, image = LayerDynamics(3), states(13, tokens=600)
    members = masks(600, visual=list(range(500)), text=[510, 520])
    run(dynamics, image, members)
    one, short = size(dynamics), LayerDynamics(3)
    run(short, states(13, tokens=6), masks(6, visual=[0, 1], text=[2, 3]))
    assert one == pytest.approx(size(short), abs=100)
    for _ in range(20):
        run(dynamics, image, members)
    assert (size(dynamics) - one) / 20 < 1000  # bytes an image
