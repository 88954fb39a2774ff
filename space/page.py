"""The page: what stands where, and which button calls what of the desk."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import gradio as gr

from llava_norm_align.space import limits, words
from llava_norm_align.space.desk import Desk, Visit
from llava_norm_align.space.examples import find_examples, micro_note
from llava_norm_align.space.guard import GuardedBlocks, one_sentence
from llava_norm_align.space.models import Shown

HOUR = 3600  # seconds
ONE = {"concurrency_limit": 1, "concurrency_id": "models"}  # of all that computes
AT_ONCE = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
DEFAULT_TOKENS = 64


def build_page(desk: Desk, address: str) -> gr.Blocks:
    """The page of `desk`; `address` is what its example of a program names."""
    with GuardedBlocks(
        title="A LLaVA with and without norm alignment", analytics_enabled=False, delete_cache=(HOUR // 6, HOUR)
    ) as page:
        gr.HTML(words.head(desk.models), elem_id="head")
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Ask", id="ask", elem_id="tab-ask"):
                picture, question = _ask(desk)
            with gr.Tab("See", id="see", elem_id="tab-see") as tab:
                _see(desk, tab, picture, question)
            with gr.Tab("Compare", id="compare", elem_id="tab-compare") as tab:
                _compare(desk, tab)
            with gr.Tab("API", id="api", elem_id="tab-api"):
                _api(desk, address)
    return page


def _ask(desk: Desk) -> tuple[gr.Image, gr.Textbox]:
    """Picture, question and settings; the answers, and the visitor's earlier ones."""
    most = desk.settings.max_new_tokens
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            picture = gr.Image(
                label="Picture", type="filepath", height=280, elem_id="picture", buttons=[],
                sources=["upload", "clipboard", "webcam"], image_mode=None,
            )  # fmt: skip
            question = gr.Textbox(
                label="Question", placeholder="What is in the picture?", max_length=limits.MAX_QUESTION,
                elem_id="question", lines=1, max_lines=4,
            )  # fmt: skip
            with gr.Row():
                ask = gr.Button("Ask", variant="primary", elem_id="ask", min_width=80)
                stop = gr.Button("Stop", elem_id="stop", min_width=60)
                retry = gr.Button("Retry", elem_id="retry", min_width=60)
                clear = gr.Button("Clear", elem_id="clear", min_width=60)
            with gr.Accordion("Settings", open=False, elem_id="settings"):
                tokens = gr.Slider(
                    1, most, min(DEFAULT_TOKENS, most), step=1, label="Longest answer, in tokens", elem_id="tokens"
                )
                temperature = gr.Slider(
                    0, limits.MAX_TEMPERATURE, 0, step=0.1, label="Temperature", elem_id="temperature",
                    info="0: always the likeliest word, so that both models are compared without chance.",
                )  # fmt: skip
            _examples(desk, picture, question)
        with gr.Column(scale=3, min_width=300):
            with gr.Row():
                boxes = [_answer_box(shown) for shown in desk.models]
            gr.HTML(f"<p class='quiet'>{words.ALONE}</p>")
            history = gr.HTML(elem_id="history")
    visit = gr.State(Visit(), time_to_live=HOUR)

    def answer(
        visit: Visit,
        picture: str | None,
        question: str,
        most_tokens: float,
        temperature: float,
        event: gr.EventData,
    ) -> Iterator[Any]:
        ends = visit.ends
        if event.target is retry and visit.asked is not None:
            picture, question = visit.asked.picture, visit.asked.question
        with one_sentence():
            visit.asked = desk.accept(picture, question, most_tokens, temperature)
            yield as_outputs([""] * len(boxes))
            with closing(desk.ask(visit.asked)) as stream:
                for texts in stream:
                    if visit.ends > ends:  # pressed before the page knew how to cancel this answer
                        if visit.asked is None:
                            yield as_outputs([""] * len(boxes))
                        return
                    yield as_outputs(texts)

    def answer_program(picture: str | None, question: str, most_tokens: float, temperature: float) -> Iterator[Any]:
        with one_sentence():
            for texts in desk.ask(desk.accept(picture, question, most_tokens, temperature)):
                yield as_outputs(texts)

    def keep(visit: Visit, *answers: str) -> str:
        visit.keep(answers)
        return words.history(visit.entries, desk.models)

    def stop_answer(visit: Visit, *answers: str) -> str:
        visit.stop()
        return keep(visit, *answers)

    def clear_page(visit: Visit) -> list[Any]:
        visit.clear()
        return [None, "", "", *[""] * len(boxes)]

    inputs = [picture, question, tokens, temperature]
    # One event for all three, so that the page lets none of them begin before the last has ended.
    asks = [ask.click, question.submit, retry.click]
    answered = gr.on(asks, answer, [visit, *inputs], boxes, **ONE, api_visibility="private")
    answered.success(keep, [visit, *boxes], history, **AT_ONCE)
    gr.on([stop.click, clear.click], None, cancels=answered)  # before what else they do: the page goes by this order
    stop.click(stop_answer, [visit, *boxes], history, **AT_ONCE)
    clear.click(clear_page, visit, [picture, question, history, *boxes], **AT_ONCE)
    # a button that nobody sees: for programs, which send all of a question at once
    gr.Button(visible=False).click(answer_program, inputs, boxes, **ONE, api_name="ask")
    return picture, question


def as_outputs(texts: list[str]) -> Any:
    """The answers as Gradio takes them: a single one not as a list."""
    return texts if len(texts) > 1 else texts[0]


def _answer_box(shown: Shown) -> gr.Textbox:
    return gr.Textbox(
        label=f"{shown.role}: {shown.name}",
        lines=5,
        max_lines=16,
        interactive=False,
        elem_id="answer-aligned" if shown.aligned else "answer-base",
        elem_classes="answer",
        placeholder="The answer appears here.",
        buttons=[],  # with one, Gradio leaves the box without its label for those who do not see it
        min_width=220,
    )


def _examples(desk: Desk, picture: gr.Image, question: gr.Textbox) -> None:
    found = find_examples(desk.models)
    if not found:
        return
    with_answers = any(example.right for example in found)
    right = gr.Textbox(label="Right answer", visible=False, elem_id="right")
    rows = [[str(one.picture), one.question, *([one.right] if with_answers else [])] for one in found]
    gr.Examples(rows, [picture, question, *([right] if with_answers else [])], label="Examples", elem_id="examples")
    if with_answers:
        gr.HTML(f"<p class='quiet'>{micro_note(desk.models)}</p>")


def _see(desk: Desk, tab: gr.Tab, picture: gr.Image, question: gr.Textbox) -> None:
    """What the picture and question of the first tab do in the models; measured when the tab is opened."""
    with gr.Row(elem_id="see-top"):
        gr.HTML(f"<p class='quiet'>{words.legend(len(desk.models))}</p>", elem_classes="words", min_width=280)
        measure = gr.Button("Measure", variant="primary", elem_id="measure", scale=0, min_width=140)
    table, plots = gr.HTML(elem_id="see-table"), gr.HTML(elem_id="see-plots")
    gr.HTML(words.CONTESTED, elem_id="contested", elem_classes="words")
    numbers, shown = gr.JSON(visible=False), gr.State(None)

    def show(picture: str | None, question: str) -> tuple[Any, ...]:
        if not picture or not (question or "").strip():
            return words.NOTHING_TO_SEE, "", None, None
        with one_sentence():
            return *desk.see(picture, question), (picture, question)

    def show_if_new(picture: str | None, question: str, shown: Any) -> tuple[Any, ...]:
        if shown is not None and shown == (picture, question):
            return tuple(gr.skip() for _ in range(4))
        return show(picture, question)

    def see_numbers(picture: str | None, question: str) -> list[dict[str, Any]]:
        with one_sentence():
            return desk.numbers(picture, question)

    outputs = [table, plots, numbers, shown]
    private = {"show_progress_on": table, "api_visibility": "private"}
    measure.click(show, [picture, question], outputs, **ONE, **private)
    tab.select(show_if_new, [picture, question, shown], outputs, **ONE, **private)
    # a button that nobody sees: its input takes uploads only, as the visible one's does
    gr.Button(visible=False).click(see_numbers, [picture, question], numbers, **ONE, api_name="see")


def _compare(desk: Desk, tab: gr.Tab) -> None:
    """The result files of the norm-aligned model; read when the tab is opened first."""
    evaluation = gr.Markdown(elem_id="evaluation", elem_classes="words")
    curves = gr.HTML(elem_id="curves", elem_classes="words")

    def compare() -> tuple[str, str]:
        with one_sentence():
            return desk.compare()

    tab.select(compare, None, [evaluation, curves], queue=False, api_visibility="private")


def _api(desk: Desk, address: str) -> None:
    about = desk.about()
    said = "the answer" if len(desk.models) == 1 else "(base, norm-aligned)"
    facts = {"tokens": about["limits"]["max_new_tokens"], "queue": about["limits"]["waiting"]} | about["limits"]
    gr.Markdown(words.API.format(address=address, said=said, **facts), elem_id="api-words", elem_classes="words")
    gr.api(desk.about, api_name="models")
