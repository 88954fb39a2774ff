"""What the page says, in HTML."""

from collections.abc import Sequence
from html import escape

from llava_norm_align.space.models import Shown

INTRO = (
    "A LLaVA turns a picture into tokens and puts them before the question. Those visual tokens are often many times "
    "longer (in L2 norm) than text tokens. Norm alignment puts one normalising layer between picture and language "
    "model, so that both start with about the same length. <b>Pick an example or add a picture, ask both models, then "
    "open See</b> for what the layer does to this very picture."
)
ONE_STOCK = (
    "This page was started with a stock model alone. It cannot show what norm alignment changes: neither a second "
    "answer nor lengths to compare. Start it with a norm-aligned model as <code>--aligned</code>."
)
ONE_ALIGNED = (
    "This page was started with a norm-aligned model alone, so there is no base to compare it with. Start it with the "
    "stock model as <code>--base</code>."
)
UNTRAINED = (
    "Its folder holds no record of a training: a layer that is put into a trained model and not trained afterwards "
    "changes what the language model sees, and costs right answers. It shows the lengths, not how good the method is."
)
TRAINED = (
    "It was trained for {steps} steps with its layer. If the base was not trained the same way, a better or worse "
    "answer is not the layer's doing alone."
)
ALONE = "Each question stands alone: the models see one picture and one question, not what was asked before."

LEGEND = (
    "The picture and the question of the first tab, measured in each model. Blue: tokens of the picture; orange: "
    "tokens of the question. Length means L2 norm."
)
DASHED = " Dashed: the norm-aligned model."
NOTHING_TO_SEE = "<p class='hint'>Add a picture and a question on the first tab, then measure.</p>"
CONTESTED = """
<h3>What is contested</h3>
<p>That visual tokens are longer than text tokens is easily measured. That this harms a model is the claim of one paper
(arXiv 2512.08374). An independent re-examination finds that rescaling the visual tokens of a trained model, without
training it again, moves its answers far; and in some models the lengths meet after the first layer.</p>
<p>One picture and one question show no more than themselves: <code>llava-norm-align diagnose</code> measures many
pictures, with intervals and controls.</p>
"""
# Of each plot: its title, what to look for, and what to look for where two models are drawn.
CAPTIONS = {
    "norms": (
        "Lengths where tokens enter",
        "Share of tokens by length at layer 0, on a log axis. Blue far to the right of orange is the gap.",
        "With the norm, dashed blue lies beside orange.",
    ),
    "layers": (
        "Lengths by layer",
        "Mean length at the input of each layer, on a log axis. See where the lines meet, and if they part again.",
        "",
    ),
    "rotation": (
        "Turns by layer",
        "Mean angle between what goes into a layer and what comes out. The paper says that long tokens turn less: "
        "then blue runs below orange in the first layers.",
        "With the norm, dashed blue should do so less.",
    ),
    "shares": (
        "How much the prompt looks at the picture",
        "The share of the last prompt token's attention that goes to the picture. It shows where a layer looks, not "
        "what it takes from there.",
        "",
    ),
    "attention": (
        "Where it looks",
        "The same attention over the part of the picture that the models see, mean over heads and layers: the more "
        "orange a patch, the more. An orange patch does not make an answer right.",
        "",
    ),
}

API = """
### From a program

Asking and seeing work from a program, too, with `pip install gradio_client`:

```python
from gradio_client import Client, handle_file

client = Client("{address}")
print(client.predict(api_name="/models"))
job = client.submit(handle_file("photo.jpg"), "What is in the picture?", {tokens}, 0.0, api_name="/ask")
for said in job:        # {said}, as the words come
    print(said)
print(client.predict(handle_file("photo.jpg"), "What is in the picture?", api_name="/see"))
```

| endpoint | takes | gives |
|---|---|---|
| `/ask` | picture, question, tokens of the longest answer (1 to {tokens}), temperature (0: always the likeliest \
word; to 2) | {said}: the text so far, many times; the last is the answer |
| `/see` | picture, question | a list with a diagnosis for each model: `norms`, `ratio`, `layers`, `attention`, \
and what is `missing` |
| `/models` | nothing | name, kind and training steps of each model, and the limits |

Pictures are uploaded files (PNG, JPEG, WebP, GIF or BMP; at most {megabytes} MB and {megapixels} million pixels);
addresses are not fetched. Questions have at most {characters} characters. One request runs at a time, {queue} may
wait, and more are turned away. Pictures are deleted after an hour; questions and answers are written to no file.
"""


def head(models: Sequence[Shown]) -> str:
    """Title, purpose, and what the models are."""
    note = ""
    if len(models) == 1:
        note = ONE_ALIGNED if models[0].aligned else ONE_STOCK
    else:
        aligned = models[1]
        steps = aligned.trained_steps
        note = f"<b>{escape(aligned.name)}.</b> " + (UNTRAINED if steps is None else TRAINED.format(steps=steps))
    return f"<h1>A LLaVA with and without norm alignment</h1><p>{INTRO}</p><p class='quiet note'>{note}</p>"


def legend(models: int) -> str:
    """What the colours of the plots mean."""
    return LEGEND + (DASHED if models > 1 else "")


def seen(picture: str, question: str) -> str:
    """Which picture (a data: address) and question were measured."""
    return f"<p class='seen'><img src='{picture}' alt=''><span>{escape(question)}</span></p>"


def plots(drawn: dict[str, str], models: int) -> str:
    """The plots with their captions as HTML."""
    parts = []
    for name, figure in drawn.items():
        title, alone, two = CAPTIONS[name]
        caption = f"{alone} {two}" if models > 1 else alone
        parts.append(f"<section id='plot-{name}'><h3>{title}</h3><p class='quiet'>{caption}</p>{figure}</section>")
    return f"<div class='plots'>{''.join(parts)}</div>"


def history(entries: Sequence[dict], models: Sequence[Shown]) -> str:
    """A visitor's earlier questions as a table, the newest first."""
    if not entries:
        return ""
    columns = "".join(f"<th>{shown.role}</th>" for shown in models)
    rows = "".join(
        f"<tr><td><img src='{entry['picture']}' alt=''></td><td>{escape(entry['question'])}</td>"
        f"{''.join(f'<td>{escape(text)}</td>' for text in entry['answers'])}</tr>"
        for entry in reversed(entries)
    )
    return (
        "<h3>Your questions</h3><div class='scroll'><table class='history'><thead><tr><th></th><th>Question</th>"
        f"{columns}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
