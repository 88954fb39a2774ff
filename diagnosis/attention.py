"""How much the answer looks at the image: the attention of the last prompt token (the paper's appendix D)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from llava_norm_align.diagnosis.structure import Structure, forward_options, hidden_states
from llava_norm_align.diagnosis.tokens import Prompt, group_tokens

# Which tile of a tiled image is the whole one, by model_type. LLaVA-NeXT and LLaVA-OneVision are known by their
# image_newline rows.
WHOLE_IMAGE = {
    "aya_vision": "last",
    "cohere2_vision": "last",
    "gemma3": "first",  # pan and scan
    "idefics3": "last",
    "internvl": "last",
    "llama4": "last",
    "ovis2": "first",
    "perception_lm": "first",
    "smolvlm": "last",
}
RESAMPLERS = ("Perceiver", "Resampler", "QFormer")  # their tokens have no place in the image


@torch.no_grad()
def attention(
    model: PreTrainedModel, structure: Structure, prompts: Iterable[Prompt]
) -> tuple[dict[str, Any] | None, list[str]]:
    """The attention that the last token of each prompt pays, mean over heads, and a sentence for what is missing.

    image_share: for each decoder layer the share that goes to visual tokens, mean over images; None for a layer
    without attention weights (linear attention, remote code without eager attention). image_tokens_share: the share
    of visual tokens among all. map: over the image grid of the first image whose grid is known, mean over heads and
    layers; its sum is that image's mean share, or the whole-image tile's part of it where the image is tiled
    ("tile": True). The result is None if no layer gives weights or no prompt has visual tokens.

    The language model runs with eager attention meanwhile. Of its weights, [1, heads, T, T] in one layer at a time,
    only the last row is kept.
    """
    shares, token_shares, image_map, no_grid, without_any = [], [], None, "", 0
    with eager_attention(model, structure.layers) as eager, _LastRows(structure, eager) as seen:
        for prompt in prompts:
            rows, members = seen.run(model, prompt)
            visual = members["visual"][0].cpu()  # [T]
            if not visual.any():
                continue
            if not any(row is not None for row in rows):
                without_any += 1
                continue
            shares.append([None if row is None else row[visual].sum().item() for row in rows])
            token_shares.append(visual.double().mean().item())
            given = [row for row in rows if row is not None]
            if image_map is None:
                grid, no_grid = image_grid(model, visual, members["newline"][0].cpu(), prompt.inputs)
                if grid is not None:
                    values = torch.stack(given).mean(dim=0)[grid]  # [rows, columns]
                    image_map = {"image": prompt.name, "rows": grid.shape[0], "columns": grid.shape[1]}
                    image_map |= {"tile": grid.numel() < visual.sum().item(), "values": values.tolist()}
    if not shares and not without_any:
        return None, ["The attention is not shown: no prompt has visual tokens."]
    if not shares:
        name = type(model).__name__
        return None, [f"The attention is not shown: no decoder layer of {name} gives finite attention weights."]
    layers = [_mean(layer) for layer in zip(*shares, strict=True)]
    without = [str(number) for number, share in enumerate(layers) if share is None]
    missing = []
    if without_any:
        missing.append(f"{without_any} images are left out of the attention: no decoder layer gives finite weights.")
    if without:
        missing.append(f"These decoder layers give no finite attention weights: {', '.join(without)}.")
    if image_map is None:
        missing.append(f"There is no map of the attention over the image: {no_grid}.")
    return {
        "images": len(shares),
        "from": "last prompt token",
        "image_share": layers,
        "image_tokens_share": sum(token_shares) / len(token_shares),
        "map": image_map,
    }, missing


@contextmanager
def eager_attention(model: PreTrainedModel, layers: torch.nn.ModuleList) -> Iterator[bool]:
    """Meanwhile eager attention in the language model that `layers` belong to; the vision encoder stays as it is.

    False for a model that cannot change its attention, as remote code and older models.
    """
    around = [
        module
        for module in model.modules()  # from the outside in
        if isinstance(module, PreTrainedModel) and any(part is layers for part in module.modules())
    ]
    language_model, before = around[-1], around[-1].config._attn_implementation
    language_model.set_attn_implementation("eager")
    try:
        yield language_model.config._attn_implementation == "eager"
    finally:
        language_model.set_attn_implementation(before)


class _LastRows(ExitStack):
    """Hooks that keep the last row of each decoder layer's attention weights, mean over heads."""

    def __init__(self, structure: Structure, eager: bool):
        super().__init__()
        self.structure, self.eager = structure, eager
        self.prompt: Prompt | None = None
        self.members: dict[str, torch.Tensor] = {}  # group: [1, T]
        self.rows: list[torch.Tensor | None] = []

    def __enter__(self) -> "_LastRows":
        first = self.structure.layers[0].register_forward_pre_hook(self.on_first, with_kwargs=True)
        self.callback(first.remove)
        for number, layer in enumerate(self.structure.layers):
            for module in layer.modules():
                if "Attention" in type(module).__name__:
                    self.callback(module.register_forward_hook(self.on_attention(number)).remove)
                    if self.eager:  # else the model made no causal mask for weights: they would be wrong
                        self.callback(module.register_forward_pre_hook(ask_for_weights, with_kwargs=True).remove)
        return self

    def run(self, model: PreTrainedModel, prompt: Prompt) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor]]:
        """Of each layer its row [T] (fp32, CPU) or None, and the groups of the tokens."""
        self.prompt, self.rows = prompt, [None] * len(self.structure.layers)
        model(**prompt.inputs, **forward_options(model))
        return self.rows, self.members

    def on_first(self, module, args, kwargs) -> None:
        self.members = group_tokens(self.structure, self.prompt, hidden_states(args, kwargs))

    def on_attention(self, number: int):
        def hook(module, args, output) -> None:
            tokens = self.members["visual"].shape[1]
            for part in output if isinstance(output, tuple) else ():
                if isinstance(part, torch.Tensor) and part.dim() == 4 and part.shape[-2:] == (tokens, tokens):
                    row = part[0, :, -1].float().mean(dim=0).cpu()
                    self.rows[number] = row if row.isfinite().all() else None

        return hook


def ask_for_weights(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """A forward pre-hook: older attention modules drop their weights unless they are asked for them."""
    return args, {**kwargs, "output_attentions": True} if "output_attentions" in kwargs else kwargs


def image_grid(
    model: PreTrainedModel, visual: torch.Tensor, newline: torch.Tensor, inputs: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor | None, str]:
    """The positions [rows, columns] in the prompt of the tokens that cover the whole image, or None and the reason.

    `visual` and `newline` [T] say which tokens are such; `inputs` are of one image. Of an image in tiles, it is the
    tile with the whole image.
    """
    places = visual.nonzero()[:, 0]
    count = len(places)
    if any(word in type(module).__name__ for module in model.modules() for word in RESAMPLERS):
        return None, "its visual tokens are not patches of the image"
    for name in ("image_grid_thw", "image_grid_hws"):  # patches before the merge: Qwen-VL and GLM-4V, Kimi-VL
        if name in inputs:
            height, width = inputs[name][0, -2:].tolist()
            merge = math.isqrt(height * width // count)
            if height * width == count * merge**2:
                return places.view(height // merge, width // merge), ""
            return None, f"{count} visual tokens do not fit {name} {[height, width]}"
    pixels = next((value for value in inputs.values() if value.dim() >= 4 and value.is_floating_point()), None)
    if pixels is None:
        return None, "the model's inputs do not say where its visual tokens lie"
    tiles = math.prod(pixels.shape[:-3])
    runs = [len(run) for run in torch.tensor_split(places, (places.diff() > 1).nonzero()[:, 0] + 1)]
    if tiles == 1 and len(runs) > 1 and len(set(runs)) == 1:  # Pixtral: a token ends each row
        return places.view(len(runs), runs[0]), ""
    if tiles > 1:
        kind = getattr(model.config, "model_type", None)
        if newline.any():  # the whole image, then the rows of the others, of which each ends with a newline row
            places = places[: runs[0] - runs[-1]] if len(runs) > 1 else places[:0]
        elif kind not in WHOLE_IMAGE:
            return None, f"which of the {tiles} tiles of an image is the whole one is not known of {kind}"
        elif count % tiles:
            return None, f"{count} visual tokens do not fit {tiles} tiles"
        else:
            size = count // tiles
            places = places[:size] if WHOLE_IMAGE[kind] == "first" else places[-size:]
    side = math.isqrt(len(places))
    if side == 0 or side**2 != len(places):
        return None, f"{len(places)} visual tokens are no square"
    return places.view(side, side), ""


def _mean(shares: tuple[float | None, ...]) -> float | None:
    """Mean over the images that have one of a layer's share; None if none has."""
    given = [share for share in shares if share is not None]
    return sum(given) / len(given) if given else None
