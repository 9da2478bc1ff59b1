"""Compare what is read of published config.json files with transformers' models of the same files.

``python -m tests.models.families.hub_files DIRECTORY`` prints a line for each file: the number of
parameters, which must be that of transformers' text model, or why it is refused.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

from specjax.models import config_json
from specjax.models.fields import CheckpointError
from specjax.models.published import parameter_count
from specjax.models.quantization import published as quantized

END = "_config.json"


def files(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the content of each ``NAME_config.json`` in ``directory``, by name."""
    contents = {}
    for path in sorted(directory.glob(f"*{END}")):
        if not path.name.endswith(f"_hf_quant{END}"):
            contents[path.name.removesuffix(END)] = json.loads(path.read_text())
    return contents


def quantizations(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the content of each ``NAME_hf_quant_config.json`` in ``directory``, by name."""
    end = f"_{quantized.MODELOPT_FILE}"
    paths = sorted(directory.glob(f"*{end}"))
    return {path.name.removesuffix(end): json.loads(path.read_text()) for path in paths}


def of_transformers(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json as transformers reads the same model.

    The fields of quantization are left out.
    """
    raw = copy.deepcopy({name: raw[name] for name in raw if name != "quantization_config"})
    if raw["model_type"] in ("kimi_k2", "mimo"):  # transformers has no class of these names
        raw["model_type"] = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}[raw["model_type"]]
    if raw["model_type"] == "step3p7" and "text_config" not in raw:
        # Of such a file transformers reads no field of the text, so they are nested for it.
        inner = raw | {"model_type": "step3p5", "n_routed_experts": raw.get("num_experts")}
        raw = {"model_type": "step3p7", "text_config": inner}
    return raw


def model_class(raw: dict[str, Any]) -> Any:
    """Return transformers' class that makes the model of the fields that it reads."""
    import transformers

    sees = "text_config" in raw
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def count_by_transformers(raw: dict[str, Any]) -> int:
    """Return the number of parameters of transformers' text model of a config.json.

    No memory is allocated for them. Tied parameters count once.
    """
    import transformers

    from tests.with_torch import torch

    raw = of_transformers(raw)
    config = transformers.AutoConfig.for_model(**raw)
    with torch.device("meta"):
        model = model_class(raw).from_config(config)
    decoder = model.get_decoder()
    parameters = {id(value): value for value in decoder.parameters()}
    head = model.get_output_embeddings().weight
    # Step-3.7 has the field for its text alone.
    has_field = hasattr(config, "tie_word_embeddings")
    if not (config if has_field else config.get_text_config()).tie_word_embeddings:
        parameters[id(head)] = head
    # These are stored too.
    buffers = [
        value
        for name, value in decoder.named_buffers()
        if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar"))
    ]
    return sum(value.numel() for value in (*parameters.values(), *buffers))


def outcome(
    raw: dict[str, Any], quantization: dict[str, Any] | None = None
) -> tuple[int | None, str]:
    """Return the number of parameters that are read and a summary; None if the file is refused.

    ``quantization`` is the content of the hf_quant_config.json beside it, if there is one.
    """
    try:
        config = config_json.parse_config(copy.deepcopy(raw))
        if quantization is not None:
            beside = raw.get("quantization_config")
            quantized.of_modelopt_file(quantization, quantized.MODELOPT_FILE, beside)
    except CheckpointError as error:
        return None, f"refused: {str(error).removeprefix('config.json: ')}"
    count = parameter_count(config)
    return count, f"{count:,} parameters, read as {config.model_type}"


def main(directory: Path) -> None:
    """Print the outcome of each file."""
    contents, accepted, beside = files(directory), 0, quantizations(directory)
    for name, raw in contents.items():
        count, summary = outcome(raw, beside.get(name))
        if count is not None:
            accepted += 1
            theirs = count_by_transformers(raw)
            summary += " (as in transformers)" if theirs == count else f", BUT {theirs:,} there"
        print(f"{name}: {summary}", flush=True)
    print(f"{accepted} of {len(contents)} files are accepted")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
