"""What each decoder layer does to visual and to text tokens (arXiv 2512.08374).

A layer turns a token h into h + u. C = ||u|| is the update's norm and phi the angle between h and u; the token turns
by atan2(C sin phi, ||h|| + C cos phi). A token with a large norm turns less, if C and phi do not depend on the token.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from llava_norm_align.common.errors import InputError
from llava_norm_align.diagnosis.running import LogHistogram, widest_float
from llava_norm_align.diagnosis.verdicts import judge_a1, judge_a2

MEANS = (
    "hidden_norm",  # of the layer's input
    "update_norm",  # C
    "relative_update",  # the token's own C / ||h||
    "cosine_adjacent",  # of the layer's input and output
    "cosine_layer0",  # of the first layer's input and this one's output
    "update_angle_degrees",  # phi
    "rotation_degrees",
)
MEDIAN_BINS_PER_OCTAVE = 128  # a histogram for each layer and modality: 0.13 MB
SAME_NORM = 1e-6  # relative; the same hidden states may be summed in another order on another device


class TokensChanged(InputError):
    """A decoder layer drops, adds or resizes tokens."""


class LayerDynamics:
    """Gathers from the layers' inputs and outputs, image by image; keeps a few numbers for each image and layer.

    For each image: begin(), add() for each layer in any order, end(). Only layers_summary() waits for the device.
    """

    def __init__(self, layers: int, groups: Sequence[str] = ("visual", "text")) -> None:
        self.groups = tuple(groups)
        self.images = 0
        self._layers = layers
        self._means: list[torch.Tensor] = []  # of each image, on layer 0's device: [MEANS, layers, groups]
        self._medians = [LogHistogram(MEDIAN_BINS_PER_OCTAVE, rows=layers) for _ in groups]
        self._adds_visual_features: torch.Tensor | None = None  # bool [layers]

    def begin(self, hidden: torch.Tensor, members: Mapping[str, torch.Tensor]) -> None:
        """Start an image: the input of layer 0 [1, T, D], and which tokens are in which group, bool [1, T].

        A group that is missing or empty gets no numbers from this image.
        """
        first = torch.nn.functional.normalize(hidden[0].detach().float(), dim=-1, eps=0)  # NaN for a zero vector
        self._device = first.device
        self._first = {first.device: first}
        self._members = [members.get(group) for group in self.groups]
        self._products: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """Take a layer's input and output, [1, T, D] each, on any device. TokensChanged if their shapes differ."""
        if after.device not in self._first:
            self._first[after.device] = self._first[self._device].to(after.device)
        first = self._first[after.device]
        if not before.shape == after.shape == (1, *first.shape):
            raise TokensChanged(
                f"Decoder layer {layer} turns hidden states of shape {list(before.shape)} into {list(after.shape)}, "
                f"but {[1, *first.shape]} reached layer 0. Layers that drop, add or resize tokens "
                "cannot be compared token by token: measure the norms alone."
            )
        before, after = before[0].to(after.device).float(), after[0].float()
        update = after - before
        norm = torch.linalg.vector_norm(before, dim=1)
        along = (before * update).sum(dim=1) / norm  # of the update, along the token: C cos phi
        # C sin phi from the vectors themselves: from C and a float32 cosine, small angles would be lost.
        across = torch.linalg.vector_norm(torch.addcmul(update, before, (along / norm)[:, None], value=-1), dim=1)
        self._products[layer] = torch.stack(
            [
                norm,
                torch.linalg.vector_norm(after, dim=1),
                torch.linalg.vector_norm(update, dim=1),
                along,
                across,
                (first * after).sum(dim=1),
            ]
        )

    @torch.no_grad()
    def end(self) -> None:
        """The image is through: keep its means."""
        tokens = next(iter(self._first.values())).shape[0]
        never = torch.full((6, tokens), torch.nan, device=self._device)  # a layer that was not called
        products = [self._products.get(layer, never).to(self._device) for layer in range(self._layers)]
        empty = torch.zeros(tokens, dtype=torch.bool, device=self._device)
        members = [empty if group is None else group[0].to(self._device) for group in self._members]
        self._keep(torch.stack(products, dim=1).to(widest_float(self._device)), members)
        self.images += 1
        self._products, self._first, self._members = {}, {}, []

    def _keep(self, products: torch.Tensor, members: list[torch.Tensor]) -> None:
        norm, norm_after, update_norm, along, across, along_first = products  # [layers, T] each
        finite = norm.isfinite() & norm_after.isfinite()
        # A zero vector has no angle: such a token counts in the norms only.
        turned = torch.where((norm > 0) & (norm_after > 0), torch.atan2(across, norm + along), torch.nan)
        angle = torch.where((norm > 0) & (update_norm > 0), torch.atan2(across, along), torch.nan)
        of_tokens = [
            norm,
            update_norm,
            update_norm / norm,
            turned.cos(),
            along_first / norm_after,
            angle.rad2deg(),
            turned.rad2deg(),
        ]
        values = torch.stack(of_tokens)  # as in MEANS: [MEANS, layers, T]
        valid = finite & values.isfinite()
        weights = torch.stack(members, dim=1).to(values)  # [T, groups]
        self._means.append((torch.where(valid, values, 0) @ weights) / (valid.to(values) @ weights))
        for histogram, member in zip(self._medians, members, strict=True):
            histogram.add(torch.where(finite & member, norm, torch.nan))
        if "visual" in self.groups:
            same = torch.isclose(norm[1:], norm_after[:-1], rtol=SAME_NORM, atol=0, equal_nan=True)
            called = ~products[0].isnan().all(dim=1)
            added = (~same & members[self.groups.index("visual")]).any(dim=1) & called[1:] & called[:-1]
            added = torch.nn.functional.pad(added, (0, 1))  # nothing follows the last layer
            seen = self._adds_visual_features
            self._adds_visual_features = added if seen is None else seen | added.to(seen.device)

    def image_means(self, name: str, group: str) -> np.ndarray:
        """One of MEANS of a group: [images, layers], NaN where an image has no such token."""
        place, column = MEANS.index(name), self.groups.index(group)
        kept = [means[place, :, column].to(self._device) for means in self._means]
        return torch.stack(kept).cpu().double().numpy() if kept else np.empty((0, self._layers))

    def layers_summary(self) -> list[dict]:
        """For each layer {"layer", "adds_visual_features", "visual", "text", "a1", "a2"}, JSON-ready.

        A group is None where no image has finite tokens of it, else MEANS as means over images of the image's mean
        over tokens, with "hidden_norm_median" over all tokens and "rotation_predicted_degrees": by the formula, from
        the layer's C and phi (groups weigh the same) and the group's own norm. Norms are L2, angles in degrees.
        `adds_visual_features` is true where the layer's output differs, at visual tokens, from what reaches the next
        layer (DeepStack).
        """
        samples = {group: {name: self.image_means(name, group) for name in MEANS} for group in self.groups}
        added = [False] * self._layers if self._adds_visual_features is None else self._adds_visual_features.tolist()
        return [
            {"layer": layer, "adds_visual_features": added[layer], **self._layer_summary(layer, samples)}
            for layer in range(self._layers)
        ]

    def _layer_summary(self, layer: int, samples: dict[str, dict[str, np.ndarray]]) -> dict:
        summary = {}
        means = {group: {name: _mean(samples[group][name][:, layer]) for name in MEANS} for group in self.groups}
        measured = [group for group in self.groups if means[group]["hidden_norm"] is not None]
        norm = _mean([means[group]["update_norm"] for group in measured])
        angle = _mean([means[group]["update_angle_degrees"] for group in measured])
        for place, group in enumerate(self.groups):
            summary[group] = None
            if group in measured:
                predicted = _rotation(means[group]["hidden_norm"], norm, angle)
                median = self._medians[place].quantile(0.5, row=layer)
                summary[group] = {
                    **means[group],
                    "hidden_norm_median": median,
                    "rotation_predicted_degrees": predicted,
                }
        if {"visual", "text"} <= set(self.groups):
            for key, judge, name in (("a1", judge_a1, "update_norm"), ("a2", judge_a2, "update_angle_degrees")):
                summary[key] = judge(samples["visual"][name][:, layer], samples["text"][name][:, layer])
        return summary


def _mean(values: Sequence[float | None] | np.ndarray) -> float | None:
    """The mean of the numbers that there are; None if there are none."""
    numbers = np.asarray([value for value in values if value is not None and math.isfinite(value)])
    return float(numbers.mean()) if len(numbers) else None


def _rotation(hidden_norm: float, update_norm: float | None, angle: float | None) -> float | None:
    """The paper's effective rotation in degrees; None if no token was updated."""
    if update_norm is None or angle is None:
        return None
    phi = math.radians(angle)
    along, across = update_norm * math.cos(phi), update_norm * math.sin(phi)
    return math.degrees(math.atan2(across, hidden_norm + along))
