"""The tokenizer's class in tokenizer_config.json: by it, transformers reads tokenizer.json or makes its own rules."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.results import write_json
from llava_norm_align.common.weights import read_json
from llava_norm_align.conversion.processor_fields import TOKENIZER_FILE

# For stock models of these types, transformers 5 reads tokenizer.json as it is, whatever class is named
# (MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS in its tokenization_auto.py). It does not know our types, and follows the
# name there: LlamaTokenizer, say, puts no space piece before the text after `<image>`. Of a stock llava_onevision it
# takes the class, too.
READ_BY_FILE = ("llava", "llava_next", "vipllava")
FILE_CLASS = "PreTrainedTokenizerFast"  # in both lines: tokenizer.json as it is
# In 4.57 these read tokenizer.json, too, but pad on the left if nothing is said, and put bos and eos as the settings
# say. 4.57 takes LlamaTokenizer for a LLaVA that names no class.
LLAMA_CLASSES = (None, "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")


def match_stock_tokenizer(folder: Path, kind: str) -> list[str]:
    """Let a norm-aligned model's tokenizer give the ids of a stock model of model_type `kind`; returns what changed.

    Folders without tokenizer.json and tokenizers with code of their own stay as they are. InputError if a file is
    broken.
    """
    settings = _read_settings(folder)
    named = settings.get("tokenizer_class")
    if (named is not None and kind not in READ_BY_FILE) or named == FILE_CLASS or settings.get("auto_map"):
        return []
    notes = _contradictions(folder, settings) if _is_llama(named) else []
    if not read_by_file(folder):
        return []
    reason = (
        f"transformers 5 gives a norm-aligned {kind} the ids of a stock one, which it reads by tokenizer.json alone"
    )
    return [f"{TOKENIZER_FILE}: tokenizer_class {json.dumps(named)} -> {FILE_CLASS}, so that {reason}", *notes]


def missing_file(folder: Path, kind: str) -> list[str]:
    """In words, that a tokenizer without tokenizer.json gives other ids than that of a stock `kind`, if it may."""
    if kind not in READ_BY_FILE or not (folder / "tokenizer.model").is_file() or (folder / "tokenizer.json").is_file():
        return []
    return [
        f"there is no tokenizer.json, and transformers 5 reads tokenizer.model by other rules than of a stock {kind}. "
        "For its token ids, write the file (AutoTokenizer.from_pretrained(SRC).save_pretrained(SRC)) and convert again"
    ]


def read_by_file(folder: Path) -> bool:
    """Name the class with which both lines read tokenizer.json as it is; False if there is no such file.

    The model's inputs and padding on the left, which the class named before had in 4.57, are written out.
    """
    if not (folder / "tokenizer.json").is_file():
        return False
    settings = _read_settings(folder)
    if _is_llama(settings.get("tokenizer_class")):
        settings.setdefault("padding_side", "left")
    settings.setdefault("model_input_names", ["input_ids", "attention_mask"])  # 4.57 would add token_type_ids
    write_json(folder / TOKENIZER_FILE, {**settings, "tokenizer_class": FILE_CLASS})
    return True


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_FILE
    return read_json(path, "a tokenizer's settings") if path.is_file() else {}


def _is_llama(name: str | None) -> bool:
    return (name and name.removesuffix("Fast")) in LLAMA_CLASSES


def _contradictions(folder: Path, settings: dict[str, Any]) -> list[str]:
    """In words, that 4.57 puts bos and eos by the settings of the stock model, and tokenizer.json puts others."""
    path = folder / "tokenizer.json"
    if "add_bos_token" not in settings or not path.is_file():
        return []
    said = [_added(settings, "bos"), "word", _added(settings, "eos")]
    put = _tried(path)
    if put == list(filter(None, said)):
        return []
    return [
        f"tokenizer.json makes {put} of a word, whatever add_bos_token and add_eos_token say in {TOKENIZER_FILE}: so "
        "does transformers 5 with the stock model, but 4.57 follows these settings there"
    ]


def _added(settings: dict[str, Any], name: str) -> str | None:
    """The token `name`, "bos" or "eos", if the settings add it."""
    token = settings.get(f"{name}_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if settings.get(f"add_{name}_token") else None


def _tried(path: Path) -> list[str]:
    """What the last step of a tokenizer.json makes of "word", which is one token here."""
    model = {"type": "WordLevel", "vocab": {"word": 0}, "unk_token": "word"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "decoder"))
    parts |= {"version": "1.0", "added_tokens": [], "model": model}
    parts["post_processor"] = read_json(path, "the tokenizer of a language model").get("post_processor")
    try:
        return Tokenizer.from_str(json.dumps(parts)).encode("word").tokens
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(f"{path} is broken ({error}). Download the language model again.") from None
