"""Checkpoints that the compressed-tensors library writes of a small random Llama."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.with_torch import torch  # compressed-tensors needs it

# isort: split
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    generate_gparam,
    is_module_quantized,
)
from compressed_tensors.quantization.utils.helpers import maybe_pad_tensor_for_block_quant
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS = np.array([[1, 17, 80, 3, 44, 9, 9, 60]])
SIZES = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
TOKEN = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
FLOAT_TOKEN = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
STATIC = QuantizationArgs(num_bits=8, type="float", strategy="tensor")


def scheme(
    bits: int,
    strategy: str,
    inputs: QuantizationArgs | None = None,
    layout: str | None = None,
    targets=("Linear",),
    **arguments: Any,
) -> QuantizationScheme:
    """Return the library's description of how matrices are quantized."""
    weights = QuantizationArgs(num_bits=bits, strategy=strategy, **arguments)
    return QuantizationScheme(
        targets=list(targets), weights=weights, input_activations=inputs, format=layout
    )


def grouped(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a matrix with axes that share a scale, and these axes."""
    match args.strategy:
        case "tensor":
            return weight, (0, 1)
        case "channel":
            return weight, (1,)
        case "group" | "tensor_group":
            return weight.unflatten(-1, (-1, args.group_size)), (2,)
    rows, columns = args.block_structure
    padded = maybe_pad_tensor_for_block_quant(weight, tuple(args.block_structure))
    return padded.unflatten(-1, (-1, columns)).unflatten(0, (-1, rows)), (1, 3)


def write(directory: Path, schemes: list[QuantizationScheme], **sizes: Any) -> LlamaForCausalLM:
    """Write a checkpoint of a model whose linear layers are quantized as the ``schemes`` say.

    Returns the model in floats, with the weights that the library itself reads from the checkpoint.
    """
    torch.manual_seed(0)
    config = LlamaConfig(**(SIZES | sizes))
    model = LlamaForCausalLM(config)
    groups = {f"group_{i}": layer_scheme for i, layer_scheme in enumerate(schemes)}
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]), show_progress=False
    )
    for module in filter(is_module_quantized, model.modules()):
        args = module.quantization_scheme.weights
        values, axes = grouped(module.weight.detach(), args)
        whole = None
        if args.strategy == "tensor_group":  # NVFP4 has a scale of the whole matrix too
            whole = generate_gparam(module.weight.detach().amin(), module.weight.detach().amax())
            module.weight_global_scale.data = whole
        scale, zero = calculate_qparams(values.amin(axes), values.amax(axes), args, whole)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape)
        module.weight_zero_point.data = zero.reshape(module.weight_scale.shape)
        if hasattr(module, "input_scale"):
            module.input_scale.data = torch.full_like(module.input_scale, 0.01)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)
    compressor.decompress_model(model)
    floats = LlamaForCausalLM(config)
    state = model.state_dict()
    floats.load_state_dict({name: state[name] for name in floats.state_dict()})
    return floats


def logits(model: LlamaForCausalLM) -> np.ndarray:
    """Return the logits of the `PROMPTS`."""
    with torch.no_grad():
        return model(torch.tensor(PROMPTS)).logits.numpy()
