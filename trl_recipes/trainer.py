"""TRL's SFTTrainer for LLaVAs: parts with their own learning rates, exact resume, checkpoints that load alone."""

import logging
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from huggingface_hub import HfApi
from peft import PeftModel
from torch import nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, TrainerCallback, TrainerState
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy, rotate_checkpoints
from transformers.utils import PushInProgress
from trl import SFTTrainer

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.loading import first_line
from llava_norm_align.data.sampler import ModalityLengthSampler
from llava_norm_align.modeling import FAMILIES
from llava_norm_align.trl_recipes import checkpoints, groups
from llava_norm_align.trl_recipes.config import LlavaSFTConfig, changed_fields
from llava_norm_align.trl_recipes.monitor import Monitor

logger = logging.getLogger(__name__)

EXIT_TERMINATED = 143  # 128 + SIGTERM


class LlavaTrainer(SFTTrainer):
    """SFTTrainer for a stock or norm-aligned LLaVA, given as a model, with its processor as `processing_class`.

    Trained are `args.trained_parts`, or with `peft_config` what PEFT lets train. The norm is float32, a frozen tower
    runs without gradients. Every checkpoint is a model folder of its own; the first is written before the first step.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, args: LlavaSFTConfig, **kwargs: Any):
        _check_model(model)
        check_rows(kwargs.get("train_dataset"))
        self.start = checkpoints.fingerprint(model)
        norm = groups.trained_norm(model)
        norm_start = (
            {} if norm is None else {name: tensor.detach().clone() for name, tensor in norm.named_parameters()}
        )
        if kwargs.get("peft_config") is None and not isinstance(model, PeftModel):
            groups.freeze(model, args.trained_parts)
        self.recipe: dict[str, Any] = {}  # fields of the script, for training.json
        self.final_dtype: torch.dtype | None = None  # set at the end: what the finished model is stored in
        self.saving_checkpoint = False
        self.termination = checkpoints.Termination()
        self.gradient_norms: dict[str, torch.Tensor] = {}  # of each part, before clipping
        super().__init__(model=model, args=args, **kwargs)
        if isinstance(self.model, PeftModel) and args.bf16 and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            groups.in_float32(self.model)  # TRL makes what QLoRA trains bfloat16
        if not self.is_deepspeed_enabled:  # which keeps float32 copies of its bfloat16 weights
            groups.restore_norms(self.model, norm_start)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # their checkpoints hold all weights anyway
            args.save_projector_only = False
        if self.accelerator.is_fsdp2:
            groups.prepare_fsdp(self.accelerator.state.fsdp_plugin, self.model)
        groups.check_lora_targets(self.model)
        groups.run_tower_without_grad(self.model)
        self.monitor = Monitor(self)
        self.add_callback(_SaveAtStart(self))
        self.add_callback(self.monitor)
        self.add_callback(_SaveOnTermination(self))

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **kwargs: Any) -> Any:
        """As in transformers; True resumes from the newest whole checkpoint in output_dir.

        InputError for a checkpoint that is cut or of another model. After a SIGTERM the next step is the last: it is
        saved, and the program ends with exit code 143.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = checkpoints.last_checkpoint(Path(self.args.output_dir))
        if resume_from_checkpoint:
            folder = Path(resume_from_checkpoint)
            checkpoints.check_whole(folder)
            checkpoints.check_same_recipe(folder, self.whole_recipe())
            checkpoints.check_same_start(folder, self.model, self.start)
            if self._is_finished(folder):
                return None
            self._total_train_tokens = _last_logged(folder, "num_tokens")
        try:
            with self.termination.listening():
                result = super().train(resume_from_checkpoint=str(resume_from_checkpoint or "") or None, **kwargs)
            self.monitor.write(completed=True)
            return result
        except CheckFailed:
            self.monitor.write(completed=False)
            raise
        finally:
            self.monitor.close()

    def whole_recipe(self) -> dict[str, Any]:
        """The fields that do not have their default, the script's too."""
        return {**self.recipe, **changed_fields(self.args)}

    def _is_finished(self, folder: Path) -> bool:
        """Whether the checkpoint has all steps; then the model gets its weights, and no step is left to do."""
        state = TrainerState.load_from_json(os.path.join(folder, checkpoints.STATE_FILE))
        if not 0 < self.args.max_steps <= state.global_step:
            return False
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise InputError(f"{folder} has all {state.global_step} steps. Raise max_steps to train on.")
        logger.warning("%s has all %d steps: no step is left to do.", folder, state.global_step)
        self._load_exactly(folder)
        self.state = state
        return True

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.monitor.see_batch(inputs)
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.monitor.loss = self.monitor.loss + loss
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # a training step, not an evaluation or the end
            logs |= self.monitor.numbers()
        super().log(logs, start_time)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        if not self.args.group_by_modality_length:
            return super()._get_train_sampler(train_dataset)
        args, rows = self.args, self.train_dataset
        group = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
        has_image = [bool(images) for images in rows["images"]]
        return ModalityLengthSampler(rows["words"], has_image, group, seed=args.data_seed or args.seed)

    # Parts

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            if self.accelerator.is_fsdp2:
                groups.shard_norms(self.model, self.accelerator.state.fsdp_plugin)
            super().create_optimizer(model)  # two groups, decayed or not
            rates = self.args.part_learning_rates()
            groups.split_optimizer(self.optimizer, self.model if model is None else model, rates)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        if self.is_deepspeed_enabled:
            return super()._clip_grad_norm(model)
        self.gradient_norms = groups.gradient_norms(model)
        if not self.args.clip_by_group:
            return super()._clip_grad_norm(model)
        groups.clip_parts(model, self.gradient_norms, self.args.max_grad_norm)
        return groups.total_norm(self.gradient_norms)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | float | None = None) -> Any:
        if grad_norm is None and not self.is_deepspeed_enabled:  # nothing was clipped
            self.gradient_norms = groups.gradient_norms(model)
            return groups.total_norm(self.gradient_norms)
        return super()._get_grad_norm(model, grad_norm)

    # Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """transformers' own, into `tmp-checkpoint-N`, which is renamed when it is whole."""
        step = self.state.global_step
        target = Path(self._get_output_dir(trial), f"checkpoint-{step}")
        writing = target.with_name(f"tmp-{target.name}")
        if self.args.should_save:
            shutil.rmtree(writing, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.store_flos()
        with checkpoints.disk_errors(writing):
            self.saving_checkpoint = True
            try:
                self.save_model(str(writing), _internal_call=True)
            finally:
                self.saving_checkpoint = False
            # To read an optimizer that has not stepped, FSDP2 makes it step, and Adam's first update is another one
            if not self.args.save_only_model and not (self.is_fsdp_enabled and step == 0):
                self._save_optimizer_and_scheduler(str(writing))
                self._save_scaler(str(writing))
                self._save_rng_state(str(writing))
            if self.args.should_save:
                checkpoints.write_start(writing, self.model, self.start, self.whole_recipe())
                self._note_best(target)
                self._collect_callback_states()
                self.state.save_to_json(str(writing / checkpoints.STATE_FILE))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoints.publish(writing, target)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(target.parent, self.args.save_total_limit, best_model_checkpoint=best)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))
        if self.termination.agreed:
            self._finish_current_push()
            raise SystemExit(EXIT_TERMINATED)

    def _note_best(self, target: Path) -> None:
        best = target.with_name(f"checkpoint-{self.state.best_global_step}")
        if self.state.best_global_step and (best == target or best.is_dir()):
            self.state.best_model_checkpoint = str(best)

    def _collect_callback_states(self) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                known = self.state.stateful_callbacks.get(name)
                if isinstance(known, list):
                    known.append(state)
                else:
                    self.state.stateful_callbacks[name] = state

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        if self.is_deepspeed_enabled:  # every process asks for the norm; under ZeRO-3 only the first has the rest
            norm = groups.float32_norm(self.model)
            state_dict = state_dict and {**state_dict, **norm}
        if self.args.save_projector_only and self.saving_checkpoint:
            if self.args.should_save:
                checkpoints.save_projector_folder(folder, self.model, self.processing_class)
        elif self.final_dtype is not None and not isinstance(self.model, PeftModel):
            state_dict = self.model.state_dict() if state_dict is None else state_dict
            super()._save(output_dir, checkpoints.rounded(state_dict, self.final_dtype))
            if self.args.should_save:
                checkpoints.name_dtype(folder, self.final_dtype)
        else:
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle that names this machine's folders
            if isinstance(self.model, PeftModel) and os.path.isabs(self.model.name_or_path or ""):
                (folder / "README.md").unlink(missing_ok=True)  # PEFT's, which names the base's folder
            with checkpoints.without_zero3(self.accelerator.state):
                checkpoints.complete_folder(folder, self.model.config)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint without what only a resumed run needs, so that it loads from the Hub.

        transformers pushes output_dir, without the model's code, and with its arguments in a pickle.
        """
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        running = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if running and not self.args.hub_always_push:
            return
        self._finish_current_push()
        view = Path(self.args.output_dir, "_push")  # links that stay when the checkpoint is rotated away
        shutil.rmtree(view, ignore_errors=True)
        shutil.copytree(checkpoint_folder, view, copy_function=os.link)
        push = partial(
            HfApi(token=self.args.hub_token).upload_folder,
            repo_id=self.hub_model_id,
            revision=self.args.hub_revision,
            folder_path=view,
            run_as_future=True,
        )
        message = f"Training in progress, step {self.state.global_step}"
        jobs = [push(commit_message=message, ignore_patterns=checkpoints.RESUME_FILES)]
        if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            last = self.args.hub_strategy == HubStrategy.CHECKPOINT
            name = "last-checkpoint" if last else Path(checkpoint_folder).name
            jobs.append(push(commit_message=f"{message}, checkpoint", path_in_repo=name))
        self.push_in_progress = PushInProgress(jobs)

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        if self.is_world_process_zero():
            shutil.rmtree(Path(self.args.output_dir, "_push"), ignore_errors=True)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_world_process_zero():
            for cut in Path(self.args.output_dir).glob("tmp-checkpoint-*"):  # what a killed run left
                shutil.rmtree(cut)
        return super().push_to_hub(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:  # in its own format, under the names in memory
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._load_exactly(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            self._load_exactly(Path(self.state.best_model_checkpoint))

    def _load_exactly(self, folder: Path) -> None:
        if isinstance(self.model, PeftModel):
            checkpoints.load_adapter_weights(self.model, folder)
        elif (folder / checkpoints.PROJECTOR_FILE).is_file():
            checkpoints.load_projector_exactly(self.model, folder)
        else:
            checkpoints.load_weights(self.model, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except ValueError as error:
            raise InputError(
                f"The optimizer in {checkpoint} is of other parameter groups ({first_line(error)}). Resume with the "
                "trained_parts that the training started with."
            ) from error


class _SaveAtStart(TrainerCallback):
    """Saves before the first step, so that a model that cannot be saved is known before hours of training."""

    def __init__(self, trainer: LlavaTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0 and args.save_strategy != "no":
            try:
                self.trainer._save_checkpoint(self.trainer.model_wrapped, trial=None)
            except (ValueError, TypeError) as error:
                raise InputError(
                    f"The model cannot be saved, so it is not trained: {first_line(error)} Correct the file that is "
                    "named there in the model folder, such as generation_config.json."
                ) from error


class _SaveOnTermination(TrainerCallback):
    """Saves at the end of the step in which any process was told to end."""

    def __init__(self, trainer: LlavaTrainer):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        termination, accelerator = self.trainer.termination, self.trainer.accelerator
        termination.agreed = termination.requested
        if accelerator.num_processes > 1:
            requested = torch.tensor(float(termination.requested), device=accelerator.device)
            termination.agreed = accelerator.reduce(requested).item() > 0
        if termination.agreed:
            control.should_save = control.should_log = True


def check_family(model_type: str) -> None:
    """InputError unless models of `model_type` can be trained."""
    family = model_type.removesuffix("_norm_align")
    if family not in FAMILIES:
        raise InputError(f"{family} is no LLaVA; one of {', '.join(FAMILIES)} was expected, stock or norm-aligned.")


def _check_model(model: Any) -> None:
    config = getattr(model, "config", None)
    check_family(getattr(config, "model_type", type(model).__name__))
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise InputError(
            "The model is in float16, in which the projector's gradients overflow. Load it with dtype=torch.bfloat16, "
            "or float32."
        )


def check_rows(rows: Any) -> None:
    if isinstance(rows, Dataset) and not len(rows):
        raise InputError("The training data is empty: rows with images were expected. Name another data file.")
    columns = getattr(rows, "column_names", None)
    if columns is not None and not {"image", "images"} & set(columns):
        raise InputError(
            f"The training data has the columns {', '.join(columns)}, but none called image or images. Rename the "
            "column, or give text-only rows an empty list `images`."
        )


def _last_logged(folder: Path, key: str) -> float:
    history = TrainerState.load_from_json(os.path.join(folder, checkpoints.STATE_FILE)).log_history
    return next((entry[key] for entry in reversed(history) if key in entry), 0)
