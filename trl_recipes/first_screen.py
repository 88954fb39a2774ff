"""What a training is, told before its first step and measured in its first two."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerState

from llava_norm_align.common.errors import NormAlignError
from llava_norm_align.trl_recipes import first_screen_facts as facts
from llava_norm_align.trl_recipes import first_screen_text as text
from llava_norm_align.trl_recipes.reload import reload_checkpoint
from llava_norm_align.trl_recipes.trainer import LlavaTrainer

TIMED_STEPS = 2
WARM_UP = 1.5  # a first step that takes this many times the second one is left out of the estimate


class FirstScreen(TrainerCallback):
    """Tells what is trained and how, checks the first rows and the first checkpoint, then times two steps.

    Add it to `trainer` after its own callbacks. All numbers come from the model, optimizer, scheduler, data loader and
    engine that were built, and are in `result` too. Nothing of it draws random numbers or rows of the sampler, so the
    training is the same without it. `notes` are sentences to tell; with `dry_run` the training stops after two steps.

    Before the first step, InputError for image tokens in the labels or a row without supervised tokens, CheckFailed
    for a checkpoint that does not load again.
    """

    def __init__(
        self, trainer: LlavaTrainer, echo: Callable[[str], None], dry_run: bool = False, notes: Sequence[str] = ()
    ):
        self.trainer, self.echo, self.dry_run, self.notes = trainer, echo, dry_run, list(notes)
        self.result: dict[str, Any] = {}
        self.timing = False

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        read = facts.read_back(self.trainer, train_dataloader)
        self.result = {**read, "notes": self.notes, "resumed_at": state.global_step, "timed": []}
        projector = facts.projector_tensors(self.trainer) if args.save_projector_only else None
        self._on_main_process(lambda: self._tell(projector))
        self.timing = True
        self._start_step()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.timing:
            timed = self.result["timed"]
            seconds = self._now() - self.began
            timed.append({"seconds": seconds, "tokens": int(self.trainer._total_train_tokens - self.tokens)})
            if len(timed) == TIMED_STEPS or state.global_step >= state.max_steps:
                self.timing = False
                self._estimate(state)
            self._start_step()
        if self.dry_run and not self.timing:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.dry_run and not self.timing:
            control.should_save = control.should_evaluate = False

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._start_step()  # a step's time is without what is done between steps

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._start_step()

    def _start_step(self) -> None:
        if self.timing:
            self.began, self.tokens = self._now(), self.trainer._total_train_tokens

    def _now(self) -> float:
        """Seconds, once the device has done what it was given; later steps do not wait for it."""
        if self.trainer.args.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.args.device)
        return time.perf_counter()

    def _tell(self, projector: dict[str, torch.Tensor] | None) -> None:
        result, args = self.result, self.trainer.args
        self.echo(text.describe(result))
        result["first_batch"] = facts.first_batch(self.trainer, result["batch"]["per_device"])
        self.echo(text.describe_batch(result["first_batch"]))
        facts.check_batch(result["first_batch"])
        saved = result["resumed_at"] == 0 and args.save_strategy != "no"
        folder = Path(args.output_dir, "checkpoint-0")
        result["checkpoint"] = reload_checkpoint(folder, projector) if saved else None
        self.echo(text.describe_checkpoint(result["checkpoint"]))

    def _estimate(self, state: TrainerState) -> None:
        result = self.result
        seconds = [step["seconds"] for step in result["timed"]]
        warm_up = len(seconds) > 1 and seconds[0] > WARM_UP * seconds[1]
        a_step = seconds[-1] if warm_up else sum(seconds) / len(seconds)
        steps = state.max_steps - result["resumed_at"]
        result["estimate"] = {
            "seconds_per_step": a_step,
            "first_left_out": warm_up,
            "steps": steps,
            "hours": a_step * steps / 3600,
        }
        result["memory"] = facts.peak_memory(self.trainer)
        if self.trainer.is_world_process_zero():
            result["disk"] = facts.disk_needed(self.trainer, result["groups"])
            self.echo(text.describe_estimate(result))
            if self.dry_run:
                self.echo(text.line("dry run", f"stopped after step {state.global_step}; nothing is kept"))

    def _on_main_process(self, check: Callable[[], None]) -> None:
        """Run `check` on the main process; its error ends all of them."""
        found: list[NormAlignError | None] = [None]
        if self.trainer.is_world_process_zero():
            try:
                check()
            except NormAlignError as error:
                found[0] = error
        if self.trainer.accelerator.num_processes > 1:
            broadcast_object_list(found)
        if found[0] is not None:
            raise found[0]
