"""A question about an image as model inputs."""

from collections.abc import Sequence

from PIL import Image
from transformers import BatchFeature, ProcessorMixin

LEAST_SIDE = 4  # pixels; processors take a side of 1 or 3 for the color channels
PLAIN_TEMPLATE = "USER: {image}\n{question} ASSISTANT:"  # LLaVA-1.5's, for its processors without a chat template


def render_prompt(processor: ProcessorMixin, question: str, with_image: int = True) -> str:
    """The prompt text of one turn by the processor's chat template, up to where the answer starts.

    `with_image`: how many images stand before the question.
    """
    if getattr(processor, "chat_template", None) is None:
        images = [image_token(processor)] * with_image
        if "Llava" not in type(processor).__name__:  # PaliGemma and other base models know no turns
            return "".join(images) + question
        return PLAIN_TEMPLATE.format(image="\n".join(images), question=question).replace("USER: \n", "USER: ")
    content = [{"type": "image"}] * with_image
    content.append({"type": "text", "text": question})
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def prepare_inputs(
    processor: ProcessorMixin,
    questions: Sequence[str],
    images: Sequence[Image.Image | Sequence[Image.Image]] | None,
    answers: Sequence[str] | None = None,
) -> BatchFeature:
    """Left-padded input ids, attention mask and pixel values of one question per row, with one image each or none.

    If a row of `images` is a list, an image token in its question is the place of an image, in order, and those
    without a place come first. `answers`: what follows each prompt.
    """
    texts = [
        render_prompt(processor, question, 0 if images is None else _without_place(processor, question, images[row]))
        for row, question in enumerate(questions)
    ]
    if answers is not None:
        texts = [text + answer for text, answer in zip(texts, answers, strict=True)]
    texts = [without_doubled_bos(processor, text) for text in texts]
    processor.tokenizer.padding_side = "left"
    if processor.tokenizer.pad_token is None:  # Pixtral's has none; what pads is masked
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    pictures = {} if images is None else {"images": [_prepared(row) for row in images]}
    inputs = processor(text=texts, **pictures, padding=True, return_tensors="pt")
    inputs.pop("labels", None)  # PaliGemma's, of which a model computes a loss
    return inputs


def without_doubled_bos(processor: ProcessorMixin, text: str) -> str:
    """`text` without the BOS that a template writes, where the tokenizer writes one, too, as Llama 3's do."""
    tokenizer = processor.tokenizer
    if tokenizer.bos_token and tokenizer.bos_token_id in tokenizer("").input_ids:
        return text.removeprefix(tokenizer.bos_token)
    return text


def image_token(processor: ProcessorMixin) -> str:
    """What stands for an image in a prompt's text."""
    return getattr(processor, "image_token", "<image>")


def _without_place(processor: ProcessorMixin, question: str, images: Image.Image | Sequence[Image.Image]) -> int:
    """How many of a question's images have no place in its text."""
    if isinstance(images, Image.Image):
        return 1
    return len(images) - question.count(image_token(processor))


def _prepared(images: Image.Image | Sequence[Image.Image]) -> Image.Image | list[Image.Image]:
    return _wide_enough(images) if isinstance(images, Image.Image) else [_wide_enough(image) for image in images]


def _wide_enough(image: Image.Image) -> Image.Image:
    """The image, enlarged by a whole factor if a side is under LEAST_SIDE."""
    factor = -(-LEAST_SIDE // min(image.size))
    return image if factor == 1 else image.resize([side * factor for side in image.size], Image.Resampling.NEAREST)
