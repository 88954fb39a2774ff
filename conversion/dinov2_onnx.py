"""A DINOv2 tower out of an ONNX export, as tensors under transformers' on-disk names."""

from pathlib import Path

import numpy as np
import torch

from llava_norm_align.common.errors import InputError

BACKBONE = "backbone."

# DINOv2-S/14 at its native 518 pixels.
CONFIG = {
    "model_type": "dinov2",
    "architectures": ["Dinov2Model"],
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "qkv_bias": True,
    "image_size": 518,
    "patch_size": 14,
}


def read_dinov2(path: Path) -> dict[str, torch.Tensor]:
    """The float32 tensors of `Dinov2Model` in the ONNX file `path`, whose tower lies under `backbone.`.

    Biases, norms and embeddings keep their names in the export. The weights of linear layers are anonymous and
    transposed; the name of the MatMul node that uses one says which it is. The position embeddings are constants that
    a Concat (CLS, [1, 1, D]) and a Reshape (the grid, [1, N, D]) read; they are found by shape.
    """
    import onnx  # of the extra "micro"

    graph = onnx.load(path).graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    tensors = {name.removeprefix(BACKBONE): array for name, array in stored.items() if name.startswith(BACKBONE)}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in stored:
            # "/backbone/encoder/layer.0/mlp/fc1/MatMul" -> "encoder.layer.0.mlp.fc1.weight"
            name = node.name.strip("/").replace("/", ".").removeprefix(BACKBONE).removesuffix(".MatMul")
            tensors[f"{name}.weight"] = stored[node.input[1]].T
    dim, patches = CONFIG["hidden_size"], (CONFIG["image_size"] // CONFIG["patch_size"]) ** 2
    positions = [_constant(stored, "onnx::Concat", (1, 1, dim)), _constant(stored, "onnx::Reshape", (1, patches, dim))]
    tensors["embeddings.position_embeddings"] = np.concatenate(positions, axis=1)  # [1, 1 + N, D]
    tensors["embeddings.mask_token"] = np.zeros((1, dim), np.float32)  # used in pre-training only, not exported
    return {name: torch.from_numpy(np.array(array, order="C")) for name, array in tensors.items()}


def _constant(stored: dict[str, np.ndarray], prefix: str, shape: tuple[int, ...]) -> np.ndarray:
    found = [array for name, array in stored.items() if name.startswith(prefix) and array.shape == shape]
    if len(found) != 1:
        raise InputError(f"The ONNX file has {len(found)} constants {prefix}* of shape {shape}; one was expected.")
    return found[0]
