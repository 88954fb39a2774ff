"""A question about an image as model inputs."""

from collections.abc import Sequence

from PIL import Image
from transformers import BatchFeature, ProcessorMixin

LEAST_SIDE = 4  # pixels; processors take a side of 1 or 3 for the color channels
PLAIN_TEMPLATE = "USER: {image}\n{question} ASSISTANT:"  # LLaVA-1.5's, for its processors without a chat template


def render_prompt(processor: ProcessorMixin, question: str, with_image: bool = True) -> str:
    """The prompt text of one turn by the processor's chat template, up to where the answer starts."""
    if getattr(processor, "chat_template", None) is None:
        image = getattr(processor, "image_token", "<image>") if with_image else ""
        if "Llava" not in type(processor).__name__:  # PaliGemma and other base models know no turns
            return image + question
        return PLAIN_TEMPLATE.format(image=image, question=question).replace("USER: \n", "USER: ")
    content = [{"type": "image"}] if with_image else []
    content.append({"type": "text", "text": question})
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def prepare_inputs(
    processor: ProcessorMixin, questions: Sequence[str], images: Sequence[Image.Image] | None
) -> BatchFeature:
    """Left-padded input ids, attention mask and pixel values of one question per row, with one image each or none."""
    texts = [render_prompt(processor, question, images is not None) for question in questions]
    tokenizer = processor.tokenizer
    if tokenizer.bos_token and tokenizer.bos_token_id in tokenizer("").input_ids:  # as Llama 3's, whose template
        texts = [text.removeprefix(tokenizer.bos_token) for text in texts]  # writes one, too
    processor.tokenizer.padding_side = "left"
    if processor.tokenizer.pad_token is None:  # Pixtral's has none; what pads is masked
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    pictures = {} if images is None else {"images": [_wide_enough(image) for image in images]}
    inputs = processor(text=texts, **pictures, padding=True, return_tensors="pt")
    inputs.pop("labels", None)  # PaliGemma's, of which a model computes a loss
    return inputs


def _wide_enough(image: Image.Image) -> Image.Image:
    """The image, enlarged by a whole factor if a side is under LEAST_SIDE."""
    factor = -(-LEAST_SIDE // min(image.size))
    return image if factor == 1 else image.resize([side * factor for side in image.size], Image.Resampling.NEAREST)
