"""The norms that the paper publishes (arXiv 2512.08374, tables 1 and 2): reference rows, not expectations."""

import re
from pathlib import Path
from typing import Any

SOURCE = "arXiv 2512.08374"
NOTE = "which size of the model, which images and which prompts the paper used is not known"

# Table 1: L2 norms (mean, standard deviation) of the features of vision encoders, before they are part of a VLM.
ENCODERS = {
    "CLIP-ViT-L/14": (29.30, 17.12),
    "SigLIP-SO400M-384": (71.78, 13.95),
    "SigLIP2-SO400M-384": (59.37, 106.08),
    "MoonViT": (72.17, 7.13),
}
# Table 2: L2 norms (mean, standard deviation) around the projector; of text tokens only the mean is there.
MODELS = {
    "LLaVA-v1.5": {"before_projector": (28.71, 16.87), "after_projector": (39.96, 45.58), "text": 1.08, "ratio": 37},
    "Qwen-2.5-VL": {
        "before_projector": (3484.24, 3882.82),
        "after_projector": (56.88, 25.73),
        "text": 0.86,
        "ratio": 66,
    },
    "Kimi-VL": {"before_projector": (137.93, 34.43), "after_projector": (4.78, 2.21), "text": 0.85, "ratio": 5.6},
    "GLM-4.1V": {"before_projector": (47.44, 4.58), "after_projector": (4.58, 2.03), "text": 0.80, "ratio": 5.7},
}
# The ids under which those who trained a model of table 2, or llava-hf, publish it: (model, model type, id).
IDS = (
    ("LLaVA-v1.5", "llava", r"llava-hf/llava-1\.5-(7b|13b)-hf"),
    ("LLaVA-v1.5", "llava", r"liuhaotian/llava-v1\.5-(7b|13b)"),
    ("Qwen-2.5-VL", "qwen2_5_vl", r"qwen/qwen2\.5-vl-(3b|7b|32b|72b)-instruct"),
    ("Kimi-VL", "kimi_vl", r"moonshotai/kimi-vl-a3b-(instruct|thinking)"),
    ("GLM-4.1V", "glm4v", r"(zai-org|thudm)/glm-4\.1v-9b-(base|thinking)"),
)


def published_row(name: str, model_type: str) -> dict[str, Any] | None:
    """The row of table 2 for a Hub id or folder `name` and its config's `model_type`; None if the paper has none.

    A Hub id matches with its owner, as anyone may publish a fine-tuned model under the same name; a folder by its own
    name, or by the id in a Hub cache's path. Norms are (mean, standard deviation) as lists, `text` a mean.
    """
    name = name.rstrip("/")
    cached = re.search(r"(?:^|/)models--(.+?)--([^/]+)", name)
    if cached:
        name = f"{cached[1]}/{cached[2]}"
    owner, _, last = name.rpartition("/")
    is_folder = not cached and (owner.count("/") > 0 or owner in ("", ".", "..", "~") or Path(name).is_dir())
    for model, its_type, pattern in IDS:
        if is_folder:
            found, pattern = last, pattern.partition("/")[2]
        else:
            found = name
        if model_type == its_type and re.fullmatch(pattern, found, re.IGNORECASE):
            row = {key: list(value) if isinstance(value, tuple) else value for key, value in MODELS[model].items()}
            return {"source": f"{SOURCE}, table 2", "model": model, **row, "note": NOTE}
    return None
