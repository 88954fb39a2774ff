"""How far two models, or two states of one, agree on the next token: KL divergence and first choices."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Log softmax [vocabulary], float64 on the CPU, of one position's logits [vocabulary]."""
    return torch.log_softmax(logits.cpu().double(), dim=-1)


def kl_nats(old: torch.Tensor, new: torch.Tensor) -> float:
    """KL(old || new) in nats of two distributions, both log probabilities [vocabulary]."""
    possible = old != -math.inf  # 0 log 0 = 0
    return torch.nn.functional.kl_div(new[possible], old[possible], log_target=True, reduction="sum").item()


def read_answers(
    model: torch.nn.Module, prompts: Iterable[Mapping[str, torch.Tensor]], answers: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each prompt followed by its answer [1, answer tokens] (teacher forcing): the log probabilities of the next
    token at the end of the prompt [vocabulary], and the first choice at each position of the answer [answer tokens].
    """
    read = []
    for inputs, answer in zip(prompts, answers, strict=True):
        length = answer.shape[1]
        forced = inputs | {
            "input_ids": torch.cat([inputs["input_ids"], answer], dim=1),
            "attention_mask": torch.cat([inputs["attention_mask"], torch.ones_like(answer)], dim=1),
        }
        logits = model(**forced).logits[0, -length - 1 : -1]
        read.append((log_probabilities(logits[0]), logits.argmax(-1).cpu()))
    return read


def compare_answers(
    before: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, Any]:
    """Compare two results of read_answers.

    kl_nats: mean over prompts of KL(before || after) of the next token at the end of the prompt.
    top1_agreement: the share of the answer_positions at which both put the same token first; positions of all prompts
    weigh the same. same_answers: the prompts of which all positions agree.
    """
    kl = [kl_nats(old, new) for (old, _), (new, _) in zip(before, after, strict=True)]
    same = [old == new for (_, old), (_, new) in zip(before, after, strict=True)]
    return {
        "kl_nats": sum(kl) / len(kl),
        "answer_positions": len(torch.cat(same)),
        "top1_agreement": torch.cat(same).double().mean().item(),
        "same_answers": sum(bool(one.all()) for one in same),
    }
