"""What scaled visual tokens do to a trained model: why it needs training after a norm was inserted."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from llava_norm_align.diagnosis.agreement import kl_nats, log_probabilities
from llava_norm_align.diagnosis.structure import Structure, forward_options, hidden_states
from llava_norm_align.diagnosis.tokens import Prompt, group_tokens
from llava_norm_align.diagnosis.verdicts import bootstrap_interval

SWEEP = tuple(2.0**power for power in range(-6, 3))  # 1/64 to 4


@torch.no_grad()
def probe(
    model: PreTrainedModel, structure: Structure, prompts: Iterable[Prompt], matching_factor: float
) -> dict[str, Any] | None:
    """Multiply the visual tokens by each factor of SWEEP, and by `matching_factor` (the text's mean norm over theirs),
    where they enter decoder layer 0, and compare the next token at the end of the prompt with factor 1.

    Of each factor: visual_norm, the mean L2 norm of the scaled tokens; kl_nats, the mean KL(factor 1 || factor), with
    its 95 % bootstrap `interval` over images (None under 8 images); top1_agreement, the share of prompts with the same
    first choice. What is not finite, as after an overflow of fp16, is None. Prompts without visual tokens, and those
    whose logits are not finite at factor 1, are left out of `images`; None if all are. One forward pass
    per factor and prompt, and no logits are kept.

    Only what enters layer 0 is scaled: features that a model adds again in later layers (DeepStack) keep their size.
    """
    factors = sorted({*SWEEP, matching_factor} - {1.0})
    kl: dict[float, list[float]] = {factor: [] for factor in factors}
    same: dict[float, list[bool]] = {factor: [] for factor in factors}
    norms, options = [], forward_options(model)
    with _ScaledVisualTokens(structure) as scaled:
        for prompt in prompts:
            scaled.start(prompt)
            logits = model(**prompt.inputs, **options).logits[0, -1]
            if not scaled.visual.any() or not logits.isfinite().all():
                continue
            norms.append(scaled.norm)
            reference, first = log_probabilities(logits), logits.argmax().item()
            for factor in factors:
                scaled.factor = factor
                logits = model(**prompt.inputs, **options).logits[0, -1]
                kl[factor].append(kl_nats(reference, log_probabilities(logits)))
                same[factor].append(logits.argmax().item() == first)
    if not norms:
        return None
    kl[1.0], same[1.0], norm = [0.0] * len(norms), [True] * len(norms), _mean(norms)
    rows = []
    for factor in sorted(kl):
        mean = _mean(kl[factor])
        rows.append(
            {
                "factor": factor,
                "visual_norm": None if norm is None else factor * norm,
                "kl_nats": mean,
                "interval": None if mean is None else bootstrap_interval(np.positive, kl[factor]),
                "top1_agreement": None if mean is None else _mean(same[factor]),
            }
        )
    return {"images": len(norms), "matching_factor": matching_factor, "factors": rows}


class _ScaledVisualTokens:
    """A hook that multiplies the visual tokens of a prompt by `factor` where they enter decoder layer 0."""

    def __init__(self, structure: Structure):
        self.structure, self.factor = structure, 1.0

    def start(self, prompt: Prompt) -> None:
        """The next forward pass is the first one of `prompt`, with factor 1."""
        self.prompt, self.visual, self.factor = prompt, None, 1.0

    def __enter__(self) -> "_ScaledVisualTokens":
        self.handle = self.structure.layers[0].register_forward_pre_hook(self.hook, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.handle.remove()

    def hook(self, module, args, kwargs):
        hidden = hidden_states(args, kwargs)
        if self.visual is None:
            self.visual = group_tokens(self.structure, self.prompt, hidden)["visual"]  # [1, T]
            self.norm = torch.linalg.vector_norm(hidden[self.visual].float(), dim=-1).mean().item()
        if self.factor == 1.0:
            return None
        scaled = torch.where(self.visual[..., None], hidden * self.factor, hidden)
        args = tuple(scaled if value is hidden else value for value in args)
        return args, {name: scaled if value is hidden else value for name, value in kwargs.items()}


def _mean(values: list[float]) -> float | None:
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else None
