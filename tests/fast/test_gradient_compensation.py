"""Global Weight Compensation against a reference written with plain tensors and torch.autograd.grad."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from llava_norm_align import LlavaNormAlignConfig
from llava_norm_align.modeling import modeling_llava_norm_align as modeling
from llava_norm_align.modeling.modeling_llava_norm_align import NormAlignLayerNorm
from tests.helpers import tiny

D, FLOOR, EPS = 32, 1e-3, 1e-5
GAINS = {"mixed signs": torch.linspace(-0.5, 0.7, D), "under the floor": torch.linspace(-6e-4, 4e-4, D)}


def norm_layer(gain, **fields):
    norm = NormAlignLayerNorm(tiny.llava_config(LlavaNormAlignConfig, **fields)).train()
    with torch.no_grad():
        norm.weight.copy_(GAINS[gain])
        norm.bias.copy_(torch.linspace(0.2, -0.1, D))
    return norm


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, D, generator=generator) * 3 + 1, torch.randn(2, 5, D, generator=generator)


def reference(x, grad_y, gain, kind="layer_norm"):
    """Gradients of x, gain and bias by the paper's rule: grad_xhat = (grad_y * gain) / max(mean|gain|, floor)."""
    x = x.detach().clone().requires_grad_()
    centred = x - x.mean(-1, keepdim=True) if kind == "layer_norm" else x
    xhat = centred / (centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    mu = max(gain.abs().mean().item(), FLOOR)
    (grad_x,) = torch.autograd.grad(xhat, x, grad_outputs=grad_y * gain / mu)
    return grad_x, (grad_y * xhat.detach()).sum((0, 1)), grad_y.sum((0, 1))


def gradients(norm, x, grad_y, call=lambda norm, x: norm(x)):
    x = x.detach().clone().requires_grad_()
    call(norm, x).backward(grad_y)
    return x.grad, norm.weight.grad, norm.bias.grad


def assert_follows_the_reference(norm, gain, call=lambda norm, x: norm(x), kind="layer_norm"):
    x, grad_y = batch(0)
    for found, expected in zip(gradients(norm, x, grad_y, call), reference(x, grad_y, GAINS[gain], kind), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


CALLS = {
    "plain": lambda norm, x: norm(x),
    "checkpoint": lambda norm, x: checkpoint(norm, x, use_reentrant=False),
    "reentrant checkpoint": lambda norm, x: checkpoint(norm, x, use_reentrant=True),
    "deepcopy": lambda norm, x: norm(x),
    "compiled": lambda norm, x: torch.compile(norm, fullgraph=True)(x),
}


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("call", CALLS)
def test_gradients_follow_the_reference(call, gain):
    norm = norm_layer(gain)
    assert_follows_the_reference(copy.deepcopy(norm) if call == "deepcopy" else norm, gain, CALLS[call])


@pytest.mark.parametrize("gain", GAINS)
def test_rms_norm_too(gain):
    assert_follows_the_reference(norm_layer(gain, norm_align_type="rms_norm"), gain, kind="rms_norm")


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_accumulated_gradients_are_the_sum(use_reentrant):
    norm, expected = norm_layer("mixed signs"), None
    for seed in (0, 1, 2):
        x, grad_y = batch(seed)
        x.requires_grad_()
        out = norm(x) if use_reentrant is None else checkpoint(norm, x, use_reentrant=use_reentrant)
        out.backward(grad_y)
        parts = reference(x, grad_y, GAINS["mixed signs"])
        torch.testing.assert_close(x.grad, parts[0], rtol=1e-5, atol=1e-6)
        expected = parts[1:] if expected is None else [a + b for a, b in zip(expected, parts[1:], strict=True)]
    torch.testing.assert_close(norm.weight.grad, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.bias.grad, expected[1], rtol=1e-5, atol=1e-5)


def test_mu_is_taken_in_forward():
    """Sharding may release the gain, and an optimizer change it, before the backward pass reaches this layer."""
    norm, (x, grad_y) = norm_layer("mixed signs"), batch(0)
    x.requires_grad_()
    out = norm(x)
    norm.weight.data = 100 * norm.weight.data  # the product's own backward sees this; mu must not
    out.backward(grad_y)
    expected = 100 * reference(x, grad_y, GAINS["mixed signs"])[0]
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fields", [{"norm_align_gradient_compensation": False}, {}])
def test_absent_when_switched_off_and_in_eval_mode(fields):
    norm, (x, grad_y) = norm_layer("mixed signs", **fields), batch(0)
    norm.train(bool(fields))
    plain = torch.nn.LayerNorm(D, eps=EPS)
    plain.load_state_dict(norm.state_dict())
    for found, expected in zip(gradients(norm, x, grad_y), gradients(plain, x, grad_y), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_forward_is_the_same_in_training_and_eval_mode():
    norm, (x, _) = norm_layer("mixed signs"), batch(0)
    assert norm(x).equal(norm.eval()(x))


def scaled(change):
    """NormAlignLayerNorm.forward with a planted fault."""

    def forward(self, x):
        xhat = torch.nn.functional.layer_norm(x, self.normalized_shape, eps=self.eps)
        return change(self, xhat)

    return forward


def undetached(norm, xhat):
    mu = norm.weight.abs().mean().clamp_min(FLOOR)
    return (xhat / mu + (xhat - xhat / mu).detach()) * norm.weight + norm.bias


FAULTS = {
    "mu is not detached": undetached,
    "|mean g| for mean |g|": lambda norm, xhat: (
        modeling.ScaleGradient.apply(xhat, 1 / norm.weight.detach().mean().abs().clamp_min(FLOOR)) * norm.weight
        + norm.bias
    ),
    "no floor": lambda norm, xhat: (
        modeling.ScaleGradient.apply(xhat, 1 / norm.weight.detach().abs().mean()) * norm.weight + norm.bias
    ),
    "factor also on g": lambda norm, xhat: (
        modeling.ScaleGradient.apply(xhat * norm.weight, 1 / norm.weight.detach().abs().mean().clamp_min(FLOOR))
        + norm.bias
    ),
}


def test_the_faults_harness_passes_without_a_fault(monkeypatch):
    sound = lambda norm, xhat: (  # noqa: E731
        modeling.ScaleGradient.apply(xhat, 1 / norm.weight.detach().abs().mean().clamp_min(FLOOR)) * norm.weight
        + norm.bias
    )
    monkeypatch.setattr(NormAlignLayerNorm, "forward", scaled(sound))
    for gain in GAINS:
        assert_follows_the_reference(norm_layer(gain), gain)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, monkeypatch):
    monkeypatch.setattr(NormAlignLayerNorm, "forward", scaled(FAULTS[fault]))
    gain = "under the floor" if fault == "no floor" else "mixed signs"
    with pytest.raises(AssertionError):
        assert_follows_the_reference(norm_layer(gain), gain)
