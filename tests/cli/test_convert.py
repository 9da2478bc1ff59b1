"""Check ``specjax convert``, which also cuts parts of a target, and ``train --dry-run``.

A conversion to another layout and back gives the same bits.
"""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import text
from specjax.cli.main import main
from specjax.drafters import Eagle, Eagle3, MixtureOfAttentions
from specjax.drafts.shapes import Chain
from specjax.models.calibration import calibrate, windows
from specjax.models.quantization import QuantizedMatrix
from specjax.models.quantization.schemes import SCHEMES
from specjax.models.quantization.weights import dequantize_matrix
from specjax.models.transformer import Target
from tests.conftest import save_tiny, tiny_target


@pytest.fixture
def drafter(tmp_path):
    eagle3 = Eagle3.init(
        tiny_target(), jax.random.key(0), Chain(3), ids=np.arange(1, 9), taps=(0, 1, 2)
    )
    eagle3.save_pretrained(tmp_path / "ours", dtype=jnp.bfloat16)
    return tmp_path / "ours"


def test_there_and_back_again_is_the_same_to_the_bit(drafter, tmp_path, capsys) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    words = ["convert", "--drafter", str(drafter), "--output", str(there)]
    assert main([*words, "--target", "some/target"]) == 0
    assert (
        "layout speculators, bfloat16; eagle_aux_hidden_state_layer_ids=[0, 1, 2]: the layers that"
        " are entered" in (" ".join(capsys.readouterr().out.split()))
    )
    config = json.loads((there / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert main(["convert", "--drafter", str(there), "--to", "eagle3", "--output", str(back)]) == 0
    assert "[-1, 0, 1]: the layers whose output is read" in " ".join(
        capsys.readouterr().out.split()
    )
    for file in drafter.iterdir():
        assert file.read_bytes() == (back / file.name).read_bytes()


def test_what_cannot_be_converted_is_refused(drafter, tmp_path, capsys) -> None:
    assert main(["convert", "--drafter", str(drafter), "--output", str(drafter)]) == 2
    assert "is the drafter's directory" in capsys.readouterr().err
    assert main(["convert", "--output", "x"]) == 2
    assert "drafter=''" in capsys.readouterr().err
    save_tiny(tmp_path / "model")
    assert (
        main(["convert", "--drafter", str(tmp_path / "model"), "--output", str(tmp_path / "x")])
        == 2
    )
    assert (
        "it is not a drafter trained for its target, so there is nothing to convert; give one of"
        in capsys.readouterr().err
    )


def test_mixture_of_attentions_goes_to_the_authors_layouts_and_back(tmp_path, capsys) -> None:
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    MixtureOfAttentions.init(target, jax.random.key(0)).save_pretrained(
        tmp_path / "specjax", dtype=jnp.bfloat16
    )
    of_target = ("--target", str(tmp_path / "target"))
    before = "specjax"
    for place, layout in (("vllm", "vllm"), ("authors", "authors"), ("vllm again", "vllm")):
        step = ("--drafter", str(tmp_path / before), "--to", layout)
        assert main(["convert", *step, "--output", str(tmp_path / place), *of_target]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert (
            f"layout {layout}, bfloat16; target layer inference is not in it: load it with tli=0"
            in out
        )
        before = place
    kinds = {
        name: json.loads((tmp_path / name / "config.json").read_text())["architectures"]
        for name in ("vllm", "authors")
    }
    assert kinds == {"vllm": ["MOASpecModel"], "authors": ["MOASpec"]}
    for file in (tmp_path / "vllm").iterdir():
        assert file.read_bytes() == (tmp_path / "vllm again" / file.name).read_bytes()


def test_a_published_mixture_of_attentions_keeps_the_layers_that_its_name_says(
    tmp_path, capsys
) -> None:
    """Convert to our own layout: the layouts of the authors have no field for the layers."""
    published = MixtureOfAttentions.init(tiny_target(), jax.random.key(0), tli=1)
    published.save_pretrained(tmp_path / "published", layout="vllm")
    line = ["convert", "--drafter", f"moa,tli=1:{tmp_path / 'published'}"]
    assert main([*line, "--to", "specjax", "--output", str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    assert MixtureOfAttentions.from_pretrained(tmp_path / "ours").config.tli == 1


def test_a_layout_that_a_drafter_lacks_is_refused(drafter, tmp_path, capsys) -> None:
    Eagle.init(tiny_target(), jax.random.key(0)).save_pretrained(tmp_path / "eagle")
    for place, words in (
        (
            "eagle",
            (
                "it is an EAGLE drafter, which has a single layout, so there is nothing to convert;"
                " give one of"
            ),
        ),
        (
            "ours",
            "to='vllm': an EAGLE-3 drafter is written as eagle3, speculators: give one of these",
        ),
    ):
        line = ["convert", "--drafter", str(tmp_path / place), "--to", "vllm"]
        assert main([*line, "--output", str(tmp_path / "x")]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()


@pytest.mark.full
def test_a_dry_run_says_what_a_run_takes_and_takes_nothing(tmp_path, capsys) -> None:
    target = save_tiny(tmp_path / "target", num_layers=1)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"output: {tmp_path}/run\nmethod: {{name: eagle3, target: {target}, steps: 2,"
        " draft_vocab_size: 100}\nsteps: 10\ndata: {source: nowhere, window: 16, batch: 2}\n"
    )
    assert main(["train", "--config", str(file), "--dry-run"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "d2t │ 100 │ frozen" in out
    assert "fc │ 16 x 16 │" in out.replace("params.fc", "fc")
    assert "tokens [2, 17]" in out
    assert "10 steps of 2 x 16 tokens, 320 in total. Nothing was trained." in out
    assert not (tmp_path / "run").exists()


# --- parts of a target ----------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path):
    """Return a target in bfloat16 of three layers, with all files beside its weights."""
    directory = save_tiny(tmp_path / "target", num_layers=3)
    Target.from_pretrained(directory).save_pretrained(directory, dtype=jnp.bfloat16)
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 5], "temperature": 0.6})
    )
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    )
    return directory


def cut(capsys, target, drafter: str, output) -> str:
    line = ["convert", "--client-parts", "--target", str(target), "--drafter", drafter]
    assert main([*line, "--output", str(output)]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.full
def test_a_client_has_of_the_target_what_its_drafter_needs(served, tmp_path, capsys) -> None:
    whole = Target.from_pretrained(served, dtype=np.float32)
    key, vocabulary = jax.random.key(0), {"vocab_size": 3072}
    MixtureOfAttentions.init(whole, key, tli=1).save_pretrained(tmp_path / "moa")
    Eagle3.init(whole, key, ids=np.arange(1, 99), taps=(0, 1, 2)).save_pretrained(
        tmp_path / "eagle3"
    )
    save_tiny(tmp_path / "model", num_layers=1)
    drafters = {
        f"moa:{tmp_path}/moa": (2, 3),
        f"{tmp_path}/eagle3": (3, 3),
        f"draft-model:{tmp_path}/model": (3, 3),
    }
    # This layout has no field for tli.
    MixtureOfAttentions.from_pretrained(tmp_path / "moa").save_pretrained(
        tmp_path / "vllm", layout="vllm"
    )
    drafters |= {f"moa,tli=2:{tmp_path}/vllm": (1, 3)}
    for number, (name, layers) in enumerate({**drafters, "prompt-lookup": (3, 3)}.items()):
        output = tmp_path / f"part {number}"
        out = cut(capsys, served, name, output)
        part = Target.from_pretrained(output, dtype=np.float32)
        assert (part.config, part.held, part.fingerprint()) == (
            whole.config,
            layers,
            whole.fingerprint(),
        )
        assert part.config.eos_token_ids == (2, 5)
        assert part.config.vocab_size == vocabulary["vocab_size"]
        assert jax.tree.all(jax.tree.map(np.array_equal, part.params, whole.part(layers).params))
        ours, theirs = (text.load_tokenizer(directory) for directory in (output, served))
        messages = [{"role": "user", "content": "import os"}]
        assert text.encode_chat(ours, messages) == text.encode_chat(theirs, messages)
        assert (output / "generation_config.json").read_bytes() == (
            served / "generation_config.json"
        ).read_bytes()
        size, whole_size = (
            (where / "model.safetensors").stat().st_size for where in (output, served)
        )
        match = re.search(
            r"bfloat16; ([0-9.]+) MB, ([0-9.]+)% of the ([0-9.]+) MB of the target; fingerprint"
            r" (\w+)",
            out,
        )
        assert match and match[4] == whole.fingerprint(), out
        np.testing.assert_allclose(
            [float(match[1]), float(match[3])], [size / 1e6, whole_size / 1e6], atol=0.051
        )
        np.testing.assert_allclose(float(match[2]), 100 * size / whole_size, atol=0.051)


def test_what_needs_the_target_itself_has_no_part_of_it(served, tmp_path, capsys) -> None:
    output = tmp_path / "part"
    line = ["convert", "--client-parts", "--target", str(served), "--output", str(output)]
    for name in ("early-exit:2", "streaming:64", "snapkv"):
        assert main([*line, "--drafter", name]) == 2
        assert f"drafter='{name}': needs the target itself while it drafts" in " ".join(
            capsys.readouterr().err.split()
        )
    assert main(line) == 2
    assert "drafter='': give" in capsys.readouterr().err
    assert (
        main(["convert", "--client-parts", "--drafter", "prompt-lookup", "--output", str(output)])
        == 2
    )
    assert "target='': give" in capsys.readouterr().err
    assert main([*line, "--drafter", "prompt-lookup", "--output", str(served)]) == 2
    assert "is the target itself" in capsys.readouterr().err
    (served / "tokenizer.json").unlink()
    assert main([*line, "--drafter", "prompt-lookup"]) == 2
    assert "has no tokenizer" in " ".join(capsys.readouterr().err.split())
    assert not output.exists()


def test_a_part_is_refused_as_a_target_and_as_a_draft_model(served, tmp_path, capsys) -> None:
    part = tmp_path / "part"
    cut(capsys, served, "prompt-lookup", part)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"output: {tmp_path}/run\nmethod: {{name: eagle3, target: {part}, steps: 2,"
        " draft_vocab_size: 100}\nsteps: 10\ndata: {source: nowhere, window: 16, batch: 2}\n"
    )
    (tmp_path / "prompts.txt").write_text("import os\n")
    prompts = ["--prompts", str(tmp_path / "prompts.txt")]
    for line in (
        ["generate", "--prompt", "x", "--target", str(part)],
        ["generate", "--prompt", "x", "--target", str(served), "--drafter", str(part)],
        ["serve", "--port", "0", "--target", str(part)],
        [
            *("evaluate", "--questions", prompts[1], "--target", str(part)),
            *("--drafter", "prompt-lookup"),
        ],
        ["plan", "measure", *prompts, "--target", str(part), "--drafter", "prompt-lookup"],
        ["train", "--config", str(file)],
        ["train", "--config", str(file), "--dry-run"],
        [
            *("convert", "--client-parts", "--target", str(part), "--drafter", "prompt-lookup"),
            *("--output", str(tmp_path / "x")),
        ],
    ):
        assert main(line) == 2, line
        error = " ".join(capsys.readouterr().err.split())
        assert (
            "is a part of a target (embedding, final norm, head, and none of the 3 layers)" in error
        ), (line, error)
        assert "give the whole target that it was cut from" in error


@pytest.mark.full
@pytest.mark.thorough_except("int8", "w8a8")
@pytest.mark.parametrize("weights", ["int8", "w8a8", "int4", "fp8"])
def test_a_model_is_written_with_quantized_weights(tmp_path, capsys, weights) -> None:
    save_tiny(tmp_path / "model")
    step = ("--target", str(tmp_path / "model"), "--quantize", weights, "--output")
    assert main(["convert", *step, str(tmp_path / "quantized")]) == 0
    assert f"quantized: {weights}, " in " ".join(capsys.readouterr().out.split())
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert [group["targets"] for group in config["config_groups"].values()] == [["Linear"]]
    scheme = replace(SCHEMES[weights], vocabulary=None)
    quantized = Target.from_pretrained(tmp_path / "model", weights=scheme)
    read = Target.from_pretrained(tmp_path / "quantized")
    for layer, expected_layer in zip(
        read.params["layers"], quantized.params["layers"], strict=True
    ):
        if weights != "fp8":  # fp8 is read as floats on a CPU
            assert jax.tree.all(jax.tree.map(np.array_equal, layer, expected_layer))
        np.testing.assert_allclose(wide(layer["down"]), wide(expected_layer["down"]), rtol=1e-6)
    assert main(["convert", *step, str(tmp_path / "all"), "--vocabulary"]) == 0
    assert isinstance(Target.from_pretrained(tmp_path / "all").params["embed"], QuantizedMatrix)


@pytest.mark.full
@pytest.mark.parametrize(
    "weights",
    ["int4", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("int8", "fp8"))],
)
def test_a_model_is_written_with_quantized_weights_chosen_by_a_text(
    tmp_path, capsys, weights
) -> None:
    save_tiny(tmp_path / "model")
    Target.from_pretrained(tmp_path / "model").save_pretrained(
        tmp_path / "model", dtype=jnp.bfloat16
    )
    samples = ["import os\nimport sys\n", "def f(x):\n    return x\n"] * 20
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": sample}) + "\n" for sample in samples)
    )
    step = ["convert", "--target", str(tmp_path / "model"), "--quantize", weights]
    step += ["--calibrate", str(tmp_path / "texts.jsonl"), "--output", str(tmp_path / "quantized")]
    assert main(step) == 0
    tokenizer = text.load_tokenizer(tmp_path / "model")
    tokens = windows([text.encode(tokenizer, sample) for sample in samples])
    assert f"quantized: {weights}, calibrated on {tokens.size:,} tokens, " in " ".join(
        capsys.readouterr().out.split()
    )
    calibrated = calibrate(
        Target.from_pretrained(tmp_path / "model"),
        replace(SCHEMES[weights], vocabulary=None),
        tokens,
    )
    read = Target.from_pretrained(tmp_path / "quantized")
    stored = jax.tree.leaves(
        Target.from_pretrained(tmp_path / "quantized", dtype=jnp.bfloat16, weights="stored")
    )
    assert {leaf.dtype.name for leaf in stored} >= {"bfloat16"}
    plain = Target.from_pretrained(
        tmp_path / "model", weights=replace(SCHEMES[weights], vocabulary=None)
    )
    for layer, expected_layer, nearest_layer in zip(
        *(model.params["layers"] for model in (read, calibrated, plain)), strict=True
    ):
        for name in ("q", "down"):
            np.testing.assert_allclose(wide(layer[name]), wide(expected_layer[name]), rtol=1e-6)
            assert not np.allclose(wide(layer[name]), wide(nearest_layer[name]))


def wide(matrix):
    return np.asarray(dequantize_matrix(matrix) if isinstance(matrix, QuantizedMatrix) else matrix)


def test_a_drafter_is_written_with_quantized_weights(drafter, tmp_path) -> None:
    step = (
        *("--drafter", str(drafter), "--to", "eagle3", "--quantize", "int8"),
        *("--output", str(tmp_path / "quantized")),
    )
    assert main(["convert", *step]) == 0
    read, whole = Eagle3.from_pretrained(tmp_path / "quantized"), Eagle3.from_pretrained(drafter)
    assert isinstance(read.params["fc"], QuantizedMatrix)
    np.testing.assert_allclose(
        wide(read.params["fc"]),
        whole.params["fc"],
        atol=0.01 * float(jnp.abs(whole.params["fc"]).max()),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--quantize", "int3", "--target", "embedded", "--output", "x"),
            "quantize='int3': must be one of 'int8', 'w8a8'",
        ),
        (("--quantize", "int8", "--output", "x"), "target='': give a directory"),
        (
            ("--calibrate", "x.jsonl", "--target", "a", "--output", "x"),
            "calibrate='x.jsonl': needs quantize",
        ),
        (
            (
                *("--calibrate", "x", "--quantize", "int8", "--drafter", "embedded:eagle3"),
                *("--output", "x"),
            ),
            "calibrate='x': it is for targets: leave it out",
        ),
        (
            (
                *("--calibrate", "no/where", "--quantize", "int8", "--target", "embedded"),
                *("--output", "x"),
            ),
            "calibrate='no/where': it has no files",
        ),
        (
            (
                *("--vocabulary", "--target", "embedded", "--drafter", "embedded:eagle3"),
                *("--output", "x"),
            ),
            "vocabulary: it needs quantize",
        ),
        (
            (
                *("--quantize", "int8", "--client-parts", "--target", "a", "--drafter", "b"),
                *("--output", "x"),
            ),
            "extract the client's parts",
        ),
    ],
)
def test_what_cannot_be_made_quantized_is_refused(arguments, message, capsys) -> None:
    assert main(["convert", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_text_that_says_too_little_is_refused(tmp_path, capsys) -> None:
    step = ["convert", "--target", "embedded", "--quantize", "int4"]
    step += ["--output", str(tmp_path / "quantized"), "--calibrate"]
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "Hello"}]})
    )
    for name, content, message in (
        (
            "empty.txt",
            "",
            "0 tokens, fewer than the 512 inputs of the widest matrix: give more text",
        ),
        (
            "short.txt",
            "import os\n",
            "tokens, fewer than the 512 inputs of the widest matrix: give more text",
        ),
        ("chats.jsonl", None, "holds conversations, and the target has no chat template"),
        ("damaged.jsonl", "{", "damaged.jsonl:1: not JSON"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        assert main([*step, str(tmp_path / name)]) == 2
        printed = " ".join(capsys.readouterr().err.split())
        assert message in printed
        assert name == "damaged.jsonl" or f"calibrate='{tmp_path / name}': " in printed
    assert not (tmp_path / "quantized").exists()
