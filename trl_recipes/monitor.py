"""What the norm, the gradients and the loss do while a LLaVA trains, and alarms on them."""

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.results import FOLDER, provenance, write_json
from llava_norm_align.diagnosis.formats import without_nan
from llava_norm_align.diagnosis.structure import first_list, hidden_states
from llava_norm_align.trl_recipes.curves import write_curves
from llava_norm_align.trl_recipes.groups import describe_groups, float32, total_norm, trained_norm

logger = logging.getLogger(__name__)

GAIN_STEPS = 20  # steps with images and a learning rate above 0, after which a gain that is trained must have moved
RESULT_FILE = "training.json"


class Layer0Norms:
    """Sums of the L2 norms of visual and text tokens at the input of decoder layer 0, tapped in training steps.

    A tap of layer 0 sees what a language model does to its embeddings, such as Gemma's scaling. Left out: padding,
    BOS, LLaVA-NeXT's image_newline, which stands at placeholders but is no visual token, and rows that are not in
    `learned`, as the collator's blank image. The sums stay on the device.
    """

    def __init__(self, model: nn.Module):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.inner = base.model
        self.image_token, self.bos = base.config.image_token_id, base.config.get_text_config().bos_token_id
        self.inputs: tuple[torch.Tensor, torch.Tensor | None] | None = None  # of the forward pass that runs
        self.sums: torch.Tensor | None = None  # [5]: visual norm, visual tokens, text norm, text tokens, all tokens
        self.step_images: torch.Tensor | float = 0.0  # visual tokens of this step so far
        self.learned: torch.Tensor | None = None  # [B], the rows of this batch with a label; None: all
        layers = first_list(base.get_decoder())
        self.handles = [
            self.inner.register_forward_pre_hook(self._enter, with_kwargs=True),
            layers[0].register_forward_pre_hook(self._tap, with_kwargs=True),
        ]

    def take(self) -> list[float] | None:
        """The sums since the last call; None if there was no step."""
        sums, self.sums = self.sums, None
        return None if sums is None else sums.tolist()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        self.inputs = (ids, kwargs.get("attention_mask")) if module.training and ids is not None else None

    @torch.no_grad()
    def _tap(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.inputs is None:
            return
        ids, attention = self.inputs
        self.inputs = None  # in older versions, the hooks of a checkpointed layer run again in the backward pass
        states = hidden_states(args, kwargs)  # [B, T, D]
        real = torch.ones_like(ids, dtype=torch.bool) if attention is None else attention.bool()
        if self.learned is not None:
            real = real & self.learned.to(real.device)[:, None]
        visual = real & (ids == self.image_token)
        text = real & ~visual
        if self.bos is not None:
            text &= ids != self.bos
        newline = getattr(self.inner, "image_newline", None)
        if newline is not None:
            visual &= (states != newline.to(states)).any(dim=-1)
        norms = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32).double()  # [B, T]
        sums = torch.stack([(norms * visual).sum(), visual.sum(), (norms * text).sum(), text.sum(), real.sum()])
        self.sums = sums if self.sums is None else self.sums + sums
        self.step_images = self.step_images + sums[1].float()


class Monitor(TrainerCallback, ExportableState):
    """Adds its numbers to what the trainer logs, raises alarms, and writes the result files at the end.

    Logged (see `numbers`): gain, bias_norm, visual_norm, text_norm, norm_ratio, gradient_norm_PART,
    projector_gradient_share, tokens_per_second. A loss of 0, a loss or a gradient that is not finite ends the run with
    CheckFailed before it reaches the weights; the other alarms are warnings, each given once, and in the result file.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.alarms: list[dict[str, Any]] = []
        self.norms: Layer0Norms | None = None
        self.loss: torch.Tensor | float = 0.0  # of this step so far, summed over its micro-batches
        self.gain_start: torch.Tensor | None = None
        self.gain_steps = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.close()
        kept = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and isinstance(kept, dict):  # of the run that is resumed
            self.alarms = list(kept["attributes"]["alarms"])
        self.norms = Layer0Norms(self.trainer.accelerator.unwrap_model(self.trainer.model))
        self.gain_start, self.gain_steps, self.loss = self._gain(), 0, 0.0
        self.logged_at = time.perf_counter()

    def see_batch(self, inputs: dict[str, Any]) -> None:
        """Called with each batch before its forward pass."""
        self.norms.learned = (inputs["labels"] != -100).any(dim=1) if "labels" in inputs else None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"args": {}, "attributes": {"alarms": list(self.alarms)}}

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        norms = self.trainer.gradient_norms
        seen = [torch.as_tensor(number, device=args.device).float() for number in (self.loss, self.norms.step_images)]
        seen = torch.stack(seen)
        if self.trainer.accelerator.num_processes > 1:
            seen = self.trainer.accelerator.reduce(seen, reduction="mean")
        loss, images, *values = torch.stack([*seen, *(norm.to(seen) for norm in norms.values())]).tolist()  # one wait
        self.loss = self.norms.step_images = 0.0
        step = state.global_step + 1
        self._check_loss(step, loss, dict(zip(norms, values, strict=True)))
        for part, norm in zip(norms, values, strict=True):
            if norm == 0 and (part == "llm" or images):
                self._warn(
                    f"zero gradient: {part}",
                    step,
                    f"No gradient reached the {part} at step {step}: it does not learn. Check that it is in use, and "
                    "that the loss depends on it.",
                )
        rates = [group["lr"] for group in self.trainer.optimizer.param_groups if group.get("name") == "norm"]
        self.gain_steps += bool(images and rates and rates[0] > 0)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.gain_steps == GAIN_STEPS:
            self._check_gain(state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.gain_steps:
            self._check_gain(state.global_step)

    def numbers(self) -> dict[str, float]:
        """What is logged since the last call: means over the steps, gradient norms before clipping of the last one.

        `projector_gradient_share` is the squared norm of the projector's gradient, without its norm's, over that of
        all parts, so that the parts' shares add up to 1. `gain` is mean |g|, `bias_norm` the L2 norm of the bias.
        """
        numbers: dict[str, float] = {}
        norm = trained_norm(self.trainer.model)
        if norm is not None:
            numbers["gain"] = float32(norm.weight).abs().mean().item()
            if norm.bias is not None:
                numbers["bias_norm"] = float32(norm.bias).norm().item()
        numbers |= self._token_numbers()
        gradients = self.trainer.gradient_norms
        numbers |= {f"gradient_norm_{part}": norm.item() for part, norm in gradients.items()}
        total = total_norm(gradients).item() if gradients else 0.0
        if "projector" in gradients and total > 0:
            numbers["projector_gradient_share"] = (gradients["projector"].item() / total) ** 2
        return numbers

    def _token_numbers(self) -> dict[str, float]:
        sums = self.norms.take() if self.norms is not None else None
        if self.trainer.accelerator.num_processes > 1:
            mine = torch.tensor(sums or [0.0] * 5, device=self.trainer.accelerator.device)
            sums = self.trainer.accelerator.reduce(mine).tolist()
        if sums is None:
            return {}
        now = time.perf_counter()
        numbers = {"tokens_per_second": sums[4] / (now - self.logged_at)}
        self.logged_at = now
        if sums[3]:
            numbers["text_norm"] = sums[2] / sums[3]
        if sums[1]:
            numbers["visual_norm"] = sums[0] / sums[1]
        if sums[1] and sums[3] and sums[2] > 0:
            numbers["norm_ratio"] = numbers["visual_norm"] / numbers["text_norm"]
            self._check_ratio(numbers["norm_ratio"])
        return numbers

    # Alarms

    def _warn(self, name: str, step: int, message: str) -> None:
        if all(alarm["name"] != name for alarm in self.alarms):
            self.alarms.append({"name": name, "step": step, "message": message})
            logger.warning(message)

    def _check_loss(self, step: int, loss: float, norms: dict[str, float]) -> None:
        wrong = [part for part, norm in norms.items() if not math.isfinite(norm)]
        if loss == 0:
            found = "0: no token of its rows is trained. Check the rows' answers and the chat template"
        elif not math.isfinite(loss):
            found = f"{loss}. Train with a smaller learning rate, or a longer warm-up"
        elif wrong:
            found = f"{loss:g}, but the gradient of the {wrong[0]} is {norms[wrong[0]]}. Use a smaller learning rate"
        else:
            return
        message = f"The loss is {found}."
        kept = sorted(Path(self.trainer.args.output_dir).glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
        if kept:
            message += f" The weights of step {step} were not changed; the last good checkpoint is {kept[-1]}."
        message = f"Step {step}: {message}"
        self.alarms.append({"name": "loss", "step": step, "message": message})
        raise CheckFailed(message)

    def _check_ratio(self, ratio: float) -> None:
        low, high = self.trainer.args.norm_ratio_band
        if trained_norm(self.trainer.model) is not None and not low <= ratio <= high:
            self._warn(
                "ratio",
                self.trainer.state.global_step,
                f"Visual tokens have {ratio:.3g} times the norm of text tokens at step "
                f"{self.trainer.state.global_step}, outside of {low:g} to {high:g}: the model is no longer "
                "norm-aligned. Use a smaller norm_learning_rate.",
            )

    def _check_gain(self, step: int) -> None:
        if self.gain_start is not None and torch.equal(self.gain_start, self._gain()):
            self._warn(
                "gain",
                step,
                f"The gain of the norm has not moved in {self.gain_steps} steps: its updates were rounded away, or no "
                "gradient reaches it. Keep the norm in float32 and among the trained parts.",
            )

    def _gain(self) -> torch.Tensor | None:
        norm = trained_norm(self.trainer.model)
        return None if norm is None or not norm.weight.requires_grad else float32(norm.weight).clone()

    # The end

    def close(self) -> None:
        """Remove the hooks."""
        if self.norms is not None:
            self.norms.remove()
            self.norms = None

    def write(self, completed: bool) -> None:
        """Write training.json and curves.png into `norm_align/` of output_dir (rank 0)."""
        trainer = self.trainer
        if not trainer.is_world_process_zero():
            return
        history = without_nan(trainer.state.log_history)
        result = {
            **provenance(),
            "model": trainer.model.config._name_or_path,
            "model_type": trainer.model.config.model_type,
            "completed": completed,
            "steps": trainer.state.global_step,
            "recipe": trainer.whole_recipe(),
            "groups": describe_groups(trainer.model, trainer.optimizer) if trainer.optimizer is not None else [],
            "alarms": self.alarms,
            "history": history,
        }
        folder = Path(trainer.args.output_dir, FOLDER)
        write_json(folder / RESULT_FILE, result)
        try:
            write_curves(history, folder / "curves.png")
        except InputError as error:  # without matplotlib
            logger.warning("%s", error)
