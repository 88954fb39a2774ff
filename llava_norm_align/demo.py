"""The demo: a real small LLaVA measured, converted, trained and asked."""

import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, ProcessorMixin

from llava_norm_align.common.folders import check_target, new_folder
from llava_norm_align.common.images import open_image
from llava_norm_align.common.loading import load_model, load_processor
from llava_norm_align.common.results import FOLDER, provenance, weights_sha256, write_json
from llava_norm_align.common.samples import sample_photos
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.micro import cached_micro
from llava_norm_align.data.easy_vqa import Row, load_questions
from llava_norm_align.diagnosis.describe import verdict_sentence
from llava_norm_align.diagnosis.diagnose import diagnose_model
from llava_norm_align.diagnosis.files import write_diagnosis
from llava_norm_align.evaluation.answer import answer
from llava_norm_align.evaluation.exact_match import exact_match
from llava_norm_align.trl_recipes.train import import_training, train

STOCK, CONVERTED, TRAINED = "stock", "converted", " + training"
RECIPE = "micro_stage1"  # as LLaVA-1.5's first stage
DTYPE = "float32"  # which every CPU computes fast; bfloat16 takes one without its arithmetic many times as long
ROWS = 4  # half the recipe's, which takes half the time
DIAGNOSED = 32  # pictures
DIAGNOSIS = "diagnosis"  # folder of the plots


def run(
    target: Path, *, steps: int, questions: int, wheels: Path | None, overwrite: bool, echo: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Run the demo into the folder `target`; returns the rows of its table. `echo` gets every line for the user."""
    check_target(target, overwrite)
    import_training()  # minutes before it starts
    coffee = next(path for path in sample_photos("The demo") if path.stem == "coffee")
    started = time.perf_counter()
    echo("[1/6] micro-LLaVA: SmolLM2-135M-Instruct and a DINOv2-S with a trained projector")
    stock = cached_micro(wheels)
    test = sample(load_questions("test"), questions)
    rows: dict[str, dict[str, Any]] = {}

    with new_folder(target, overwrite) as folder:
        model, processor = load_model(stock, DTYPE), load_processor(stock)
        echo(f"[2/6] Norms at layer 0, and {questions} questions of easy-VQA, stock")
        rows[STOCK], before = measure(STOCK, model, processor, test)
        echo(describe_norms(before))
        echo(describe_verdicts(before))
        echo("[3/6] Convert: a LayerNorm after the projector, calibrated to the text embeddings")
        summary = convert(str(stock), folder / CONVERTED, report=False)
        echo(f"      target norm {summary['calibration']['target_norm']:.4f}, {summary['seconds']['total']:.1f} s")
        models = {STOCK: model, CONVERTED: load_model(folder / CONVERTED, DTYPE)}
        rows[CONVERTED], after = measure(CONVERTED, models[CONVERTED], processor, test)
        echo(describe_norms(after))
        echo(describe_verdicts(after))
        write_diagnosis(before, folder / DIAGNOSIS / STOCK)
        write_diagnosis(after, folder / DIAGNOSIS / CONVERTED, other=before)

        for number, (name, untrained) in enumerate({STOCK: stock, CONVERTED: folder / CONVERTED}.items(), start=4):
            echo(f"[{number}/6] Train the projector for {steps} steps of {ROWS} rows, {name}: the recipe {RECIPE}")
            trained = folder / f"{name}-trained"
            seconds = train_briefly(untrained, trained, steps)
            models[name] = load_model(trained, DTYPE)
            row, diagnosis = measure(name + TRAINED, models[name], processor, test)
            rows[name + TRAINED] = row | {"training_seconds": seconds}
            diagnosis["model"]["weights_sha256"] = weights_sha256(trained)
            write_diagnosis(diagnosis, trained / FOLDER)
            echo(describe_norms(diagnosis))

        asked = ((test[0].image, test[0].question, test[0].answer), (coffee, "what color is the saucer?", "red"))
        for image, question, right in asked:
            echo(f"[6/6] {image.name}, asked: {question}  (right: {right})")
            for name, network in models.items():
                said = answer(network, processor, open_image(image), question, max_new_tokens=16)
                echo(f"      {name + TRAINED}: {said}")
        ordered = [{"model": name, **rows[name]} for name in (STOCK, STOCK + TRAINED, CONVERTED, CONVERTED + TRAINED)]
        write_json(folder / "demo.json", {**provenance(), "steps": steps, "seed": 0, "rows": ordered})

    echo("")
    echo(table(ordered))
    echo("")
    echo(f"One seed, {questions} questions, {steps} steps: this shows the tool, it does not compare the methods.")
    echo("The projector was trained on drawings of coloured shapes alone: what it says of a photo is a guess.")
    echo(f"The models are in {target}: {CONVERTED}, {STOCK}-trained, {CONVERTED}-trained; the numbers in demo.json,")
    echo(f"the diagnoses with their plots in {target / DIAGNOSIS}: before and after the conversion.")
    echo(f"Done in {time.perf_counter() - started:.0f} s. Ask one yourself:")
    echo(f'    llava-norm-align ask {target / (CONVERTED + "-trained")} {test[0].image} "{test[0].question}"')
    return ordered


def train_briefly(model: Path, target: Path, steps: int) -> float:
    """Train `model` by the recipe, its own projector to start with; returns the seconds of the training alone."""
    options = ("--fresh_projector", False, "--max_steps", steps, "--per_device_train_batch_size", ROWS)
    options += ("--save_strategy", "no")
    with redirect_stdout(StringIO()):  # the numbers of each step, which are in training.json too
        train(RECIPE, "--model_name_or_path", model, "--output_dir", target, *options, echo=lambda line: None)
    history = json.loads((target / FOLDER / "training.json").read_text(encoding="utf-8"))["history"]
    return next(entry["train_runtime"] for entry in history if "train_runtime" in entry)


def sample(rows: Sequence[Row], count: int) -> list[Row]:
    """`count` of `rows`, the same in every run."""
    return random.Random(0).sample(list(rows), min(count, len(rows)))


def measure(
    name: str, model: PreTrainedModel, processor: ProcessorMixin, rows: Sequence[Row]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row of the table: exact match with its 95 % interval and norms at layer 0; and the diagnosis."""
    images = list(dict.fromkeys(row.image for row in rows))[:DIAGNOSED]
    result = diagnose_model(model, processor, images, name=name)
    norms = {f"{kind}_norm": result["norms"][kind]["mean"] for kind in ("visual", "text")}
    return {**exact_match(model, processor, rows), **norms}, result


def describe_norms(result: dict[str, Any]) -> str:
    """The ratio that the diagnosis found."""
    visual, text = (result["norms"][kind]["mean"] for kind in ("visual", "text"))
    line = f"      visual tokens {visual:.2f}, text tokens {text:.2f}: ratio {result['ratio']['mean']:.2f}"
    interval = result["ratio"]["interval"]
    return line if interval is None else f"{line} (95 % interval {interval[0]:.2f} to {interval[1]:.2f})"


def describe_verdicts(result: dict[str, Any]) -> str:
    """How the paper's assumptions fare."""
    return "\n".join(f"      {verdict_sentence(result, name)}" for name in ("a1", "a2"))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a plain-text table."""
    lines = [
        f"{'':22}{'exact match (95 % interval)':>30}{'visual norm':>13}{'text norm':>11}{'ratio':>8}{'training':>10}"
    ]
    for row in rows:
        low, high = row["interval"]
        match = f"{row['accuracy']:.3f} ({low:.3f} to {high:.3f})"
        ratio = row["visual_norm"] / row["text_norm"]
        seconds = f"{row['training_seconds']:.0f} s" if "training_seconds" in row else "-"
        norms = f"{row['visual_norm']:>13.2f}{row['text_norm']:>11.2f}{ratio:>8.2f}"
        lines.append(f"{row['model']:22}{match:>30}{norms}{seconds:>10}")
    return "\n".join(lines)
