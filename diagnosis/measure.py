"""Norms and layer statistics of a vision-language model, by hooks: three taps, and one hook a decoder layer."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from accelerate.utils import align_module_device
from transformers import PreTrainedModel

from llava_norm_align.diagnosis.dynamics import LayerDynamics
from llava_norm_align.diagnosis.running import CHUNK, RunningNorms, widest_float
from llava_norm_align.diagnosis.structure import Reached, Structure, find_structure, forward_options, hidden_states
from llava_norm_align.diagnosis.tokens import GROUPS, Prompt, group_tokens
from llava_norm_align.diagnosis.verdicts import bootstrap_interval

TAPS = ("encoder_features", "projector_output", "text_embedding_output", *GROUPS)
UNUSED = 1e-6  # a row of the table with a smaller norm is unused: Llama-3's reserved rows are exact zeros


@dataclass
class Measured:
    """What the hooks saw. `norms` of TAPS; the groups' are those at the input of decoder layer 0."""

    dynamics: LayerDynamics
    norms: dict[str, RunningNorms] = field(default_factory=lambda: {name: RunningNorms() for name in TAPS})
    # of each prompt: sum of the visual norms, number of visual tokens, and both of text
    sums: list[torch.Tensor] = field(default_factory=list)

    def ratio(self) -> dict[str, Any]:
        """Visual over text norm at layer 0: of the means over all tokens, with its 95 % bootstrap interval over
        images (None under 8), and of the medians. None where a group has no finite token.
        """
        norms = {name: self.norms[name].summary() or {} for name in ("visual", "text")}
        samples = torch.stack(self.sums).cpu().double().numpy().T  # [4, prompts]
        return {
            "mean": _ratio(norms["visual"].get("mean"), norms["text"].get("mean")),
            "interval": bootstrap_interval(lambda v, vn, t, tn: v / vn / (t / tn), *samples),
            "median": _ratio(norms["visual"].get("median"), norms["text"].get("median")),
        }


@torch.no_grad()
def measure(model: PreTrainedModel, prompts: Iterable[Prompt], structure: Structure, layers: bool = True) -> Measured:
    """Run `model` on each prompt and measure: encoder features, projector output, the text embeddings' output, every
    group of tokens at the input of decoder layer 0 and, with `layers`, what every decoder layer does to them.

    Without `layers`, no decoder layer runs. A prompt leaves a few numbers in memory.
    """
    result = Measured(LayerDynamics(len(structure.layers)))
    options = forward_options(model)
    with _Hooks(result, structure, layers) as hooks:
        for prompt in prompts:
            hooks.prompt = prompt
            try:
                model(**prompt.inputs, **options)
            except Reached:
                pass
            if layers:
                result.dynamics.end()
    return result


def measure_layer0(model: PreTrainedModel, inputs: Iterable[dict[str, torch.Tensor]]) -> Measured:
    """The norms of TAPS for model `inputs`, batch of 1 each, of which the first has an image; no decoder layer runs.

    Every token that is not visual, padding or the beginning of the sequence counts as text.
    """
    inputs = iter(inputs)
    first = next(inputs)
    structure = find_structure(model, first)
    return measure(model, (Prompt(one) for one in chain([first], inputs)), structure, layers=False)


class _Hooks(ExitStack):
    """The hooks of a measurement; they write into `result` and are removed at the end."""

    def __init__(self, result: Measured, structure: Structure, layers: bool):
        super().__init__()
        self.result, self.structure, self.with_layers = result, structure, layers
        self.prompt: Prompt | None = None
        self.embedded: torch.Tensor | None = None

    def __enter__(self) -> "_Hooks":
        structure = self.structure
        if structure.projector is not None:
            self._keep(structure.projector.register_forward_hook(self.on_projector, with_kwargs=True))
        self._keep(structure.embeddings.register_forward_hook(self.on_embeddings))
        self._keep(structure.layers[0].register_forward_pre_hook(self.on_first, with_kwargs=True))
        if self.with_layers:
            for number, layer in enumerate(structure.layers):
                self._keep(layer.register_forward_hook(self.on_layer(number), with_kwargs=True))
        return self

    def _keep(self, handle: Any) -> None:
        self.callback(handle.remove)

    def on_projector(self, module, args, kwargs, output) -> None:
        features = hidden_states(args, kwargs)
        if features is None or not features.is_floating_point():  # Ovis looks up its markers in the visual table
            return
        self.result.norms["encoder_features"].add(features)
        for tokens in tensors(output):
            self.result.norms["projector_output"].add(tokens)

    def on_embeddings(self, module, args, output) -> None:
        self.embedded = output

    def on_first(self, module, args, kwargs) -> None:
        hidden, norms = hidden_states(args, kwargs), self.result.norms
        members = group_tokens(self.structure, self.prompt, hidden)
        for name, where in members.items():
            norms[name].add(hidden[where])
        self.result.sums.append(torch.stack([*_sum(hidden[members["visual"]]), *_sum(hidden[members["text"]])]))
        if self.embedded is not None and self.embedded.shape == hidden.shape:
            norms["text_embedding_output"].add(self.embedded[members["text"].to(self.embedded.device)])
        self.embedded = None
        if not self.with_layers:
            raise Reached
        self.result.dynamics.begin(hidden, members)

    def on_layer(self, number: int):
        def hook(module, args, kwargs, output) -> None:
            self.result.dynamics.add(number, hidden_states(args, kwargs), next(tensors(output)))

        return hook


def _sum(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum and the number of the finite L2 norms of vectors [N, D]."""
    norms = torch.linalg.vector_norm(vectors.float(), dim=-1)
    finite = norms.isfinite()
    return torch.where(finite, norms, 0).sum(), finite.sum()


def _ratio(visual: float | None, text: float | None) -> float | None:
    return visual / text if visual is not None and text else None


def tensors(output: Any) -> Iterable[torch.Tensor]:
    """The tensors in what a module returns: one, or those of a tuple, a list or a model output."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from tensors(item)
    elif hasattr(output, "to_tuple"):
        yield from tensors(output.to_tuple())


@torch.no_grad()
def table_norms(embeddings: torch.nn.Module) -> dict[str, Any] | None:
    """Norms of all rows of a text embedding table, and "mean_of_used_rows", the paper's T; None for a quantised one.

    An offloaded table is brought in for the time (accelerate).
    """
    norms = RunningNorms()
    with align_module_device(embeddings):
        table = embeddings.weight
        if not table.is_floating_point() or table.is_meta:
            return None
        norms.add(table)
        wide, chunks = widest_float(table.device), table.split(max(1, CHUNK // table.shape[-1]))
        lengths = torch.cat([torch.linalg.vector_norm(rows.to(wide), dim=-1) for rows in chunks])
    used = lengths[(lengths > UNUSED) & lengths.isfinite()]
    return {**norms.summary(), "mean_of_used_rows": used.mean().item() if len(used) else None}
