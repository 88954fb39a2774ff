"""Which tokens of a prompt are visual, the user's text, template, system prompt, beginning of sequence or padding."""

from dataclasses import dataclass

import torch

from llava_norm_align.diagnosis.structure import TOLERANCE, Structure, expand_at

GROUPS = ("visual", "text", "template", "system", "bos", "newline", "padding")
VISUAL, TEXT, TEMPLATE, SYSTEM, BOS, NEWLINE, PADDING = range(len(GROUPS))


@dataclass(frozen=True)
class Prompt:
    """The inputs of a model for one prompt, with one image or none."""

    inputs: dict[str, torch.Tensor]  # on the model's device, batch of 1
    parts: torch.Tensor | None = None  # [tokens]: TEXT, TEMPLATE or SYSTEM for each id; None: all of it is TEXT
    name: str = ""  # of the image


def group_tokens(structure: Structure, prompt: Prompt, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """{group: which positions [1, tokens] belong to it} for each of GROUPS; every position is in exactly one.

    `hidden` [1, tokens, D] is the input of decoder layer 0, on whose device the answer is. Newline rows (LLaVA-NeXT,
    LLaVA-OneVision) share the placeholder's id and are known by their value.
    """
    ids, parts, mask = prompt.inputs["input_ids"][0], prompt.parts, prompt.inputs.get("attention_mask")
    device, length = hidden.device, hidden.shape[1]
    placeholders = torch.tensor(structure.placeholders, device=ids.device)
    if parts is None:
        parts = torch.full_like(ids, TEXT)
    if mask is not None:
        parts = parts.to(ids.device).masked_fill(mask[0] == 0, PADDING)
    if len(ids) != length:
        place = int(torch.isin(ids, placeholders).nonzero()[0])
        ids, parts = expand_at(place, ids, length), expand_at(place, parts, length)
    group, ids = parts.to(device).clone(), ids.to(device)
    kept = group != PADDING
    group[kept & torch.isin(ids, torch.tensor(structure.markers, device=device, dtype=ids.dtype))] = TEMPLATE
    if structure.bos_token_id is not None:
        first = (kept & (ids == structure.bos_token_id)).nonzero()[:1, 0]  # ChatML writes the same id before each turn
        group[first] = BOS
    places = kept & torch.isin(ids, placeholders.to(device))
    group[places] = VISUAL
    for row in structure.newlines.to(hidden):
        away = torch.linalg.vector_norm((hidden[0] - row).float(), dim=-1)
        group[places & (away < TOLERANCE * torch.linalg.vector_norm(row.float()))] = NEWLINE
    return {name: (group == index)[None] for index, name in enumerate(GROUPS)}
