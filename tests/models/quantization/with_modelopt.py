"""Checkpoints that NVIDIA's ModelOpt writes, and the weights and logits that it means by them.

    python -m venv ENV
    ENV/bin/pip install nvidia-modelopt==0.47.0 transformers==5.24.0
    ENV/bin/python -m tests.models.quantization.with_modelopt FOLDER
    SPECJAX_MODELOPT=FOLDER python -m pytest tests/models/quantization/test_with_modelopt.py

ModelOpt stays in an environment of its own, because it has its own limits on versions; a CPU
suffices. The third line quantizes small random models with ModelOpt's configurations, and exports
them with its ``export_hf_checkpoint``. It writes each to FOLDER/NAME. FOLDER/NAME.safetensors has
the exported matrices in float32, by ModelOpt's ``dequantize``, and the logits of transformers'
model with these weights: nothing else is quantized there, in particular no activations. The last
line compares them with what specjax reads. (ModelOpt also simulates quantized weights before the
export. In FP8 that is no reference: of the small Llama, 0.3% of the simulated weights are one step
away from the exported ones in float32, and 4% in bfloat16.)

``--recorded`` writes fewer and smaller checkpoints, those that are in the repository:

    ENV/bin/python -m tests.models.quantization.with_modelopt --recorded \
        tests/models/quantization/of_modelopt
"""

import argparse
import copy
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import modelopt
import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
RECORDED_SIZES = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# By name: transformers' class of the model, and fields of its config.json beside `SIZES`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3_moe": ("Qwen3Moe", MIXTURE | {"num_experts": 4}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "max_position_embeddings": 131072}),
    "qwen3_5": (
        "Qwen3_5",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        MIXTURE
        | {
            "hybrid_override_pattern": "ME*E",
            "num_hidden_layers": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32,
            "moe_latent_size": 32,
        },
    ),
}


def mixed() -> dict[str, Any]:
    """Return a configuration with attention in FP8, the rest in NVFP4, and an FP8 cache."""
    stated = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    stated["quant_cfg"] += [
        {"quantizer_name": f"*self_attn*{name}_quantizer", "cfg": {"num_bits": (4, 3)}}
        for name in ("weight", "input", "[kv]_bmm")
    ]
    return stated


CONFIGURATIONS = {
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
    "w4a16_nvfp4": mtq.W4A16_NVFP4_CFG,
    "mlp_nvfp4": mtq.NVFP4_MLP_ONLY_CFG,
    "fp8": mtq.FP8_DEFAULT_CFG,
    "fp8_per_channel": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "mixed": mixed(),
}
CASES = [
    *(("llama", name) for name in CONFIGURATIONS),
    *((model, name) for model in list(MODELS)[1:] for name in ("nvfp4", "fp8")),
]
RECORDED = [("llama", "nvfp4"), ("llama", "fp8"), ("qwen3_moe", "nvfp4")]


def random_model(name: str, sizes: dict[str, Any]) -> torch.nn.Module:
    """Return a model in bfloat16; its first matrices have a block of zeros, and a tiny one."""
    torch.manual_seed(0)
    of_class, fields = MODELS[name]
    config_class = getattr(transformers, f"{of_class}TextConfig", None)
    config_class = config_class or getattr(transformers, f"{of_class}Config")
    architecture = f"{of_class}ForCausalLM"
    config = config_class(**(SIZES | fields | sizes), architectures=[architecture])
    model = getattr(transformers, architecture)(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module.in_features >= 32:
                module.weight[0, :16] = 0
                module.weight[1, :16] *= 1e-9
        for parameter in model.parameters():
            if parameter.ndim == 1:  # a norm, a bias: no two are alike
                parameter.add_(torch.empty_like(parameter).uniform_(-0.1, 0.1))
    return model


def dequantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the quantized matrices of an exported file in float32, by ModelOpt's functions."""
    floats = {}
    for name, stored in tensors.items():
        scale_name = f"{name}_scale" if f"{name}_scale" in tensors else f"{name}_weight_scale"
        if stored.dtype not in (torch.uint8, torch.float8_e4m3fn) or scale_name not in tensors:
            continue
        scale = tensors[scale_name]
        if stored.dtype == torch.float8_e4m3fn:
            by_output = scale[:, None] if stored.ndim == 2 and scale.ndim == 1 else scale
            matrix = FP8QTensor(stored.shape, torch.float32, stored)
            floats[name] = matrix.dequantize(torch.float32, scale=by_output)
            continue
        # ModelOpt quantizes the transpose of experts [experts, in, out].
        packed, scale = (
            tensor.transpose(1, 2).contiguous() if stored.ndim == 3 else tensor
            for tensor in (stored, scale)
        )
        shape = torch.Size((*packed.shape[:-1], 2 * packed.shape[-1]))
        weights = NVFP4QTensor(shape, torch.float32, packed).dequantize(
            torch.float32,
            scale=scale,
            double_scale=tensors[f"{scale_name}_2"],
            block_sizes={-1: 16},
        )
        floats[name] = weights.transpose(1, 2) if stored.ndim == 3 else weights
    return {name: weights.contiguous() for name, weights in floats.items()}


def logits_with(directory: Path, floats: dict[str, torch.Tensor], prompts: torch.Tensor):
    """Return the logits of transformers' model with the weights ``floats``, in float32."""
    tensors = load_file(directory / "model.safetensors") | floats
    is_scale = {name for name in tensors if name.endswith(("_scale", "_scale_2"))}
    weights = {name: tensors[name].float() for name in tensors.keys() - is_scale}
    with tempfile.TemporaryDirectory() as folder:
        raw = json.loads((directory / "config.json").read_text())
        raw.pop("quantization_config")
        Path(folder, "config.json").write_text(json.dumps(raw))
        save_file(weights, Path(folder, "model.safetensors"), {"format": "pt"})
        model_class = getattr(transformers, raw["architectures"][0])
        model, loading = model_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    problems = {kind: names for kind, names in loading.items() if names}
    assert not problems, problems
    with torch.no_grad():
        return model(prompts, use_cache=False).logits


def write(folder: Path, model_name: str, configuration: str, sizes: dict[str, Any]) -> None:
    """Write one checkpoint and what its numbers mean."""
    model = random_model(model_name, sizes)
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    texts = torch.randint(0, vocabulary, (4, 32), generator=generator)
    stated = copy.deepcopy(CONFIGURATIONS[configuration])
    mtq.quantize(model, stated, lambda model: model(texts, use_cache=False))
    name = f"{model_name}-{configuration}"
    directory = folder / name
    shutil.rmtree(directory, ignore_errors=True)
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=directory)
    floats = dequantized(load_file(directory / "model.safetensors"))
    prompts = texts[:2, :8].contiguous()
    results = floats | {"prompts": prompts, "logits": logits_with(directory, floats, prompts)}
    versions = {
        "nvidia-modelopt": modelopt.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    save_file(results, folder / f"{name}.safetensors", versions)
    print(name, len(floats), "matrices")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--only", default="", help="the beginning of names")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    sizes = RECORDED_SIZES if arguments.recorded else {}
    if arguments.recorded:
        MODELS["qwen3_moe"][1].update(num_experts=2, moe_intermediate_size=16)
    for model, configuration in RECORDED if arguments.recorded else CASES:
        if f"{model}-{configuration}".startswith(arguments.only):
            write(arguments.folder, model, configuration, sizes)


if __name__ == "__main__":
    main()
