"""Tokenizers with the JSON structure of published ones and a few hundred tokens: bytes, some words, filler.

Each has the layout of its original: where special tokens lie, what is added behind the base vocabulary, and how text
is split. `BASE` maps the published size of the base vocabulary to the one here.
"""

import itertools
import json
import string
import struct
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BASE = {"llama2": (32000, 512), "llama3": (128000, 512), "qwen2": (151643, 512), "tekken": (131072, 1512)}
WORDS = "USER ASSISTANT user assistant What Which is in the picture do you see was this taken Count from one to ten"
GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = [
    "<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{n}|>" for n in range(4)),
    "<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>",
    *(f"<|reserved_special_token_{n}|>" for n in range(5, 251)),
]  # fmt: skip
TEKKEN_SPECIAL = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", *(f"<SPECIAL_{n}>" for n in range(17, 1000)),
]  # fmt: skip


def write_tokenizer(folder: Path, kind: str, settings: dict, added: dict[str, int]) -> dict[str, int]:
    """Write tokenizer.json, tokenizer_config.json (from `settings`) and what else `kind` has; returns the ids."""
    if kind == "llama2":
        backend, special = llama2(), ["<unk>", "<s>", "</s>", "<image>", "<pad>"]
    elif kind == "llama3":
        backend, special = llama3(), [*LLAMA3_SPECIAL, "<unk>", "<image>", "<pad>"]
    elif kind == "qwen2":
        backend, special = qwen2(), sorted(added, key=added.get)
    else:
        backend, special = tekken(), TEKKEN_SPECIAL
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if kind == "llama3":
        backend.post_processor = starts_with("<|begin_of_text|>", backend)
    backend.save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    decoder = {str(backend.token_to_id(token)): {"content": token, **flags} for token in special}
    write_json(folder / "tokenizer_config.json", settings | {"added_tokens_decoder": decoder})
    content = json.loads(backend.to_str())["model"]
    if kind == "llama2":
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(content["vocab"]))
    if kind == "qwen2":
        write_json(folder / "vocab.json", content["vocab"])
        merges = (" ".join(merge) for merge in content["merges"])
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return backend.get_vocab()


def llama2() -> Tokenizer:
    """SentencePiece BPE: byte fallback, spaces as U+2581, `<s>` in front."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocabulary |= {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    merges = grow(vocabulary, "▁", ["▁", *string.ascii_letters], BASE["llama2"][1])
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.post_processor = starts_with("<s>", backend)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def llama3() -> Tokenizer:
    return byte_level(BASE["llama3"][1], "{1,3}", ignore_merges=True)


def qwen2() -> Tokenizer:
    backend = byte_level(BASE["qwen2"][1], "")
    backend.normalizer = normalizers.NFC()
    backend.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return backend


def tekken() -> Tokenizer:
    """Mistral's: a thousand special tokens before the bytes."""
    backend = byte_level(BASE["tekken"][1], "", TEKKEN_SPECIAL, ignore_merges=True)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def byte_level(size: int, digits: str, first: list[str] = (), ignore_merges: bool = False) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(first)}
    merges = grow(vocabulary, "Ġ", sorted(pre_tokenizers.ByteLevel.alphabet()), size)
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    split = pre_tokenizers.Split(Regex(GPT4_SPLIT % digits), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def grow(vocabulary: dict[str, int], space: str, alphabet: list[str], size: int) -> list[tuple[str, str]]:
    """Add `alphabet`, the words, and pairs of letters up to `size` tokens; returns the merges that make them."""
    merges = []
    for token in alphabet:
        vocabulary.setdefault(token, len(vocabulary))
    words = [space + word for word in WORDS.split()]
    pairs = ("".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2))
    for text in itertools.chain(words, pairs):
        for end in range(2, len(text) + 1):
            if text[:end] not in vocabulary and len(vocabulary) < size:
                vocabulary[text[:end]] = len(vocabulary)
                merges.append((text[: end - 1], text[end - 1]))
    assert len(vocabulary) == size
    return merges


def starts_with(token: str, backend: Tokenizer) -> processors.TemplateProcessing:
    pair = f"{token}:0 $A:0 {token}:1 $B:1"
    return processors.TemplateProcessing(f"{token}:0 $A:0", pair, [(token, backend.token_to_id(token))])


def sentencepiece_model(vocabulary: dict[str, int]) -> bytes:
    """The protobuf of a SentencePiece BPE model: pieces with score and type, and the trainer's model type."""
    pieces = b""
    for piece, number in sorted(vocabulary.items(), key=lambda item: item[1]):
        text, kind = piece.encode(), 1
        if number < 3:
            kind = 2 if number == 0 else 3  # unknown, control
        elif piece.startswith("<0x"):
            kind = 6  # byte
        score = struct.pack("<f", -float(number))
        body = b"\x0a" + bytes([len(text)]) + text + b"\x15" + score + b"\x18" + bytes([kind])
        pieces += b"\x0a" + bytes([len(body)]) + body
    return pieces + b"\x12\x02\x18\x02"  # trainer_spec { model_type: BPE }


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
