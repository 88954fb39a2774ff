"""The result files of the norm-aligned model's folder: its evaluation as tables, its training as curves."""

from collections.abc import Sequence

from llava_norm_align.common.errors import InputError
from llava_norm_align.diagnosis.formats import escape
from llava_norm_align.release import card_evaluation
from llava_norm_align.release.card_results import Results, read_results
from llava_norm_align.space.figures import svg
from llava_norm_align.space.models import Shown
from llava_norm_align.trl_recipes.curves import draw_curves

NO_ALIGNED = (
    "This page shows a stock model alone, so there is nothing to compare. Start it with a norm-aligned model as "
    "`--aligned` (environment: `LLAVA_NORM_ALIGN_ALIGNED`)."
)
NO_EVALUATION = (
    "The model's folder holds no evaluation of these weights. `llava-norm-align evaluate MODEL --baseline OTHER "
    "--tasks easy-vqa` writes one, with paired differences and intervals, and this page then shows it."
)
NO_TRAINING = (
    "The model's folder holds no record of a training. A norm that was put into a trained model and not trained "
    "afterwards changes its answers, and mostly for the worse."
)
UNREADABLE = "The result files in the model's folder cannot be read. `llava-norm-align doctor` looks at them."
TITLE = "<h3>Training</h3>"
LINKS = ("How it was measured: [", "The numbers: [")  # of a card, to files beside it


def compare(models: Sequence[Shown]) -> tuple[str, str]:
    """(Markdown of the evaluation, HTML of the training's curves) of the norm-aligned model."""
    aligned = next((shown for shown in models if shown.aligned), None)
    if aligned is None:
        return NO_ALIGNED, ""
    try:
        results = read_results(aligned.folder)
        named = f"*This model* is {escape(aligned.name)}.\n\n" if results.evaluation else ""
        return named + evaluation(results), curves(results)
    except (InputError, LookupError, TypeError, ValueError, AttributeError):  # a file that another hand wrote
        return UNREADABLE, ""


def evaluation(results: Results) -> str:
    """The tables and their notes as Markdown."""
    if not (results.evaluation or results.text or results.lmms):
        return NO_EVALUATION
    parts = card_evaluation.evaluation(results).split("\n\n")[1:]  # without the title
    return "\n\n".join(part for part in parts if not part.startswith(LINKS))


def curves(results: Results) -> str:
    """The training's curves as HTML, or why there are none."""
    figure = draw_curves((results.training or {}).get("history") or [])
    if figure is None:
        return f"{TITLE}<p>{NO_TRAINING}</p>"
    steps = int(results.training["steps"])
    caption = f"{steps} steps: loss; norms where tokens enter the language model; the norm layer; gradients by part."
    return f"{TITLE}<p class='quiet'>{caption}</p>{svg(figure, 'Curves of the training: loss, norms, gradients')}"
