"""Run by tests in one or more processes: trains tiny LLaVAs on the CPU as a list of runs says.

usage: accelerate launch ... distributed_worker.py REQUEST.json    each process writes its results to REQUEST.RANK.json
A run: {"out": folder, "data": "images" or "mixed", "resume": step, "terminate": [rank, step], "dtype": "bfloat16",
"fields": {...}}, all but "out" optional.
"""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tests.conftest  # noqa: F401

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

from accelerate.state import PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

STATE = {}
if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    # On the CPU, accelerate ignores FSDP without a word, because its list of devices for it has none. Told that the
    # processes are GPUs', it shards, over gloo.
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    STATE = {"use_configured_state": True}

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from llava_norm_align.trl_recipes import monitor  # noqa: E402
from llava_norm_align.trl_recipes.collator import LlavaCollator  # noqa: E402
from llava_norm_align.trl_recipes.trainer import LlavaTrainer  # noqa: E402
from tests.helpers import tiny  # noqa: E402
from tests.helpers.training import arguments, norm_aligned, row, rows  # noqa: E402

monitor.write_curves = lambda *arguments: None  # takes as long as a tiny training
GLOBAL_BATCH = 4
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}ASSISTANT: "
    "{% else %}{% generation %}{{ message['content'][0]['text'] }} </s>{% endgeneration %}{% endif %}{% endfor %}"
)


class AtStep(TrainerCallback):
    """A SIGTERM to this process at the end of a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def mixed_rows():
    """In every four rows, the last two have no image: with two processes, those are the second one's batch."""
    return Dataset.from_list([as_messages(row(number, image=number % 4 < 2)) for number in range(16)])


def as_messages(example):
    image = [{"type": "image", "text": None}] * len(example["images"])
    question = [*image, {"type": "text", "text": example["prompt"][0]["content"]}]
    answer = [{"type": "text", "text": example["completion"][0]["content"]}]
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": example["images"]}


def train(run):
    """Losses, gains and gradient norms by step; what the norm computes in; the exit code, if the run was ended."""
    model = norm_aligned().to(getattr(torch, run.get("dtype", "float32")))
    fields = {"train_sampling_strategy": "sequential"} if run.get("data") == "mixed" else {}
    config = arguments(
        run["out"],
        per_device_train_batch_size=GLOBAL_BATCH // PROCESSES,
        accelerator_config=dict(STATE),
        ddp_backend="gloo" if PROCESSES > 1 else None,
        **{"max_steps": 4, "save_steps": 2, **fields, **run.get("fields", {})},
    )
    processor = tiny.processor()
    collator = None
    if run.get("data") == "mixed":
        collator = LlavaCollator(processor, TEMPLATE, image_in_every_batch=PROCESSES > 1)
    trainer = LlavaTrainer(
        model,
        config,
        train_dataset=mixed_rows() if run.get("data") == "mixed" else rows(16),
        data_collator=collator,
        processing_class=processor,
        callbacks=[AtStep(run["terminate"][1])] if run.get("terminate", [None])[0] == RANK else [],
    )
    norm, computed = trainer.model.model.multi_modal_projector.align_norm, set()
    norm.register_forward_hook(lambda module, inputs, output: computed.add(str(module.weight.dtype)))
    resume = f"{run['out']}/checkpoint-{run['resume']}" if "resume" in run else None
    code = None
    try:
        trainer.train(resume_from_checkpoint=resume)
    except SystemExit as ended:
        code = ended.code
    return {
        "history": [entry for entry in trainer.state.log_history if "loss" in entry],
        "computed": sorted(computed),
        "sharded": type(trainer.model).__name__.startswith("FSDP"),
        "processes": trainer.accelerator.num_processes,
        "code": code,
    }


if __name__ == "__main__":
    request = Path(sys.argv[1])
    results = {name: train(run) for name, run in json.loads(request.read_text()).items()}
    request.with_suffix(f".{RANK}.json").write_text(json.dumps(results))
