"""The command line as a user meets it."""

import json
import os
import subprocess
import sys

import pytest

from specjax.cli import generate
from specjax.cli.generate import GenerateConfig
from specjax.cli.main import main, parse_options
from specjax.planning.choice import Candidate, Comparison, TrialAcceptance
from specjax.training.config import TrainConfig
from specjax.tree import StaticTree
from tests.conftest import ASSETS, tiny_target

CONFIGS = ASSETS.parents[1] / "configs"
PROMPT = "def main():\n    parser = argparse"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_streams_the_text_that_json_reports(capsys) -> None:
    common = ("generate", "--prompt", PROMPT, "--max-new-tokens", "24", "--drafter", str(ASSETS / "draft"))
    code, out, err = run(capsys, *common)
    assert code == 0
    assert "acceptance length" in err
    code, as_json, _ = run(capsys, *common, "--json")
    record = json.loads(as_json)
    assert out.rstrip("\n") == record["text"].rstrip("\n")
    assert len(record["token_ids"]) == record["statistics"]["emitted"] <= 24
    assert record["statistics"]["acceptance_length"] > 1
    assert record["prompt"] == PROMPT


def test_the_off_switch_says_what_it_measured(capsys) -> None:
    arguments = (
        "generate",
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "8",
        "--drafter",
        "early-exit:11",
        "--only-if-faster",
        "--json",
    )
    code, out, err = run(capsys, *arguments)
    assert code == 0
    assert "x with the drafter; decoding plainly" in err
    assert json.loads(out)["statistics"]["drafted"] == 0


def test_compiled_programs_are_kept_between_processes(tmp_path, monkeypatch) -> None:
    script = "from specjax.cli.main import main; import jax; main(['plan', '--cost', '0.1']); jax.jit(lambda x: x * 2)(1.0)"
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "1", "HOME": str(tmp_path)}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True)
    assert list((tmp_path / ".cache" / "specjax" / "compiled").iterdir())


@pytest.mark.parametrize("drafter", ["prompt-lookup", "early-exit:4", "embedded:draft"])
def test_every_drafter_gives_the_same_greedy_tokens(capsys, drafter) -> None:
    arguments = ("generate", "--prompt", PROMPT, "--max-new-tokens", "20", "--json", "--drafter")
    _, plain, _ = run(capsys, *arguments, "none")
    _, out, _ = run(capsys, *arguments, drafter)
    assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]


def test_a_file_of_prompts_is_one_batch(capsys, tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPT}) + "\n\n" + json.dumps({"text": "import os\n"}) + "\n")
    _, out, _ = run(capsys, "generate", "--prompts-file", str(file), "--max-new-tokens", "12", "--json")
    record = json.loads(out)
    assert [output["prompt"] for output in record["outputs"]] == [PROMPT, "import os\n"]
    _, alone, _ = run(capsys, "generate", "--prompt", PROMPT, "--max-new-tokens", "12", "--json")
    assert record["outputs"][0]["token_ids"] == json.loads(alone)["token_ids"]
    assert record["statistics"]["emitted"] == sum(len(output["token_ids"]) for output in record["outputs"])


def test_a_config_file_and_an_option_that_overrides_it(tmp_path) -> None:
    file = tmp_path / "generate.yaml"
    file.write_text("temperature: 0.5\ntop_k: 7\n")
    config = parse_options(GenerateConfig, ["--config", str(file), "--top-k", "9"], prog="x")
    assert (config.temperature, config.top_k) == (0.5, 9)
    train = parse_options(TrainConfig, ["--config", str(CONFIGS / "demo_target.yaml"), "--optimizer.clip", "2"], prog="x")
    assert (train.optimizer.clip, train.optimizer.method, train.method.name) == (2.0, "muon", "lm")


PAIR = ("generate", "--prompt", "def main():", "--drafter", "embedded:draft")
FAULTS = [
    (["generate"], "prompt: give either"),
    (["generate", "--prompt", ""], "prompt: give either"),
    (["generate", "--prompt", "x", "--prompts-file", "y"], "prompt: give either"),
    (["generate", "--prompts-file", "nothing.txt"], "prompts_file='nothing.txt': no such file"),
    (["generate", "--prompt", "x", "--target", "./nothing"], "'./nothing' is not a directory"),
    (["generate", "--prompt", "x", "--drafter", "early-exit"], "write early-exit:LAYERS"),
    (["generate", "--prompt", "x", "--drafter", "early-exit:12"], "EarlyExit(layers=12): the target has 12"),
    (["generate", "--prompt", "x", "--draft", "chain:0"], "drafter='none': draft=chain:0"),
    ([*PAIR, "--draft", "chain:0"], "Chain(length=0)"),
    ([*PAIR, "--draft", "chain:100000"], "makes 100001 nodes"),
    ([*PAIR, "--draft", "sampled:100,100,100"], "makes 1010101 nodes"),
    ([*PAIR, "--drafter", "early-exit:²"], "write early-exit:LAYERS"),
    (["plan", "--cost", "0.1", "--batch", "0"], "batch=0: give at least one number of rows"),
    ([*PAIR, "--draft", "bush"], "draft='bush': must be chain:LENGTH"),
    ([*PAIR, "--draft", "sampled:2,x"], "draft='sampled:2,x': must be"),
    ([*PAIR, "--draft", "complete:2,0"], "widths=(2, 0)"),
    ([*PAIR, "--draft", "complete:4000"], "4000 children of a node, but the vocabulary has 3072"),
    ([*PAIR, "--draft", "dynamic:2,3,99"], "nodes must be at least depth + 1 = 4"),
    ([*PAIR, "--draft", "chain:1023"], "1023 deep, but below a prompt of"),
    ([*PAIR, "--show-tree", "tree.gif"], "show_tree='tree.gif': the name must end in .png"),
    (["generate", "--prompt", "x", "--drafter", "prompt-lookup", "--draft", "eagle"], "prompt lookup copies one continuation"),
    (["generate", "--prompt", "x", "--show-tree", "x.png"], "drafter='none': show_tree=x.png"),
    (["plan", "--measure", "--target", "embedded"], "measure: give --target, --drafter and --prompts"),
    (["plan", "--cost", "0.1", "--prompts", "x"], "prompts=x: is not read without --measure"),
    (["plan", "--measure", "--chip", "a100"], "chip=a100: is not read with --measure"),
    (["generate", "--prompt", "x", "--temperature", "-1"], "temperature=-1"),
    (["generate", "--prompt", "x", "--top-p", "0"], "top_p=0"),
    (["generate", "--prompt", "x", "--dtype", "int8"], "dtype='int8'"),
    (["generate", "--prompt", "x", "--target", "embedded:other"], "embedded checkpoint 'other'"),
    (["generate", "--prompt", "x", "--max-new-tokens", "5000"], "1024 positions"),
    (["generate", "--config", "nothing.yaml"], "nothing.yaml: no such file"),
    (["generate", "--config"], "--config: give the path"),
    (["generate", "--config", str(ASSETS)], "cannot be read as a text file"),
    (["generate", "--prompts-file", str(ASSETS / "target" / "model.safetensors")], "not UTF-8 text"),
    (["generate", "--prompt", "x", "--mesh", "0", "1"], "each axis is at least 1"),
    (["train", "--teacher", "x"], "objective=lm has no teacher"),
    (["train", "--objective", "distill"], "teacher=''"),
    (["dance"], "'dance' is not a command"),
]


@pytest.mark.parametrize(("arguments", "message"), FAULTS)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_draft_of_another_vocabulary_is_refused_before_its_weights(capsys, tmp_path) -> None:
    tiny_target().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    code, _, err = run(capsys, "generate", "--prompt", "x", "--drafter", str(tmp_path))
    assert code == 2
    assert "drafter has a vocabulary of 11 tokens and target one of 3072" in err


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "specjax", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "demo, generate, train" in done.stdout


def test_a_draft_tree_is_drawn(tmp_path, capsys) -> None:
    picture = tmp_path / "tree.png"
    options = ["generate", "--target", "embedded", "--drafter", "embedded:draft", "--prompt", "class Stack:", "--json"]
    assert main([*options, "--draft", "dynamic:3,3,9", "--show-tree", str(picture), "--max-new-tokens", "8"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    captured = capsys.readouterr()
    assert f"picture: {picture}" in captured.err
    assert json.loads(captured.out)["statistics"]["drafted"] > 0


def test_auto_takes_what_the_comparison_finds_fastest(monkeypatch, capsys) -> None:
    for draft, words in ((StaticTree(((0,), (1,))), "static tree, 3 nodes, 1 deep"), (None, "plain decoding")):
        found = Comparison(TrialAcceptance((), (), {}), {}, {}, (Candidate(draft, 2.0, 1.0, 1.5),))
        monkeypatch.setattr(generate, "compare_drafts", lambda *_, found=found, **__: found)
        options = ["--target", "embedded", "--drafter", "embedded:draft", "--draft", "auto", "--json"]
        assert main(["generate", *options, "--prompt", "x", "--max-new-tokens", "8"]) == 0
        captured = capsys.readouterr()
        assert f"draft: {words}" in captured.err
        statistics = json.loads(captured.out)["statistics"]
        assert statistics["drafted"] == (0 if draft is None else 2 * statistics["steps"])


def test_plan_measures_this_machine(tmp_path, capsys) -> None:
    prompts, picture = tmp_path / "prompts.txt", tmp_path / "plan.png"
    prompts.write_text("def main():\nimport os\n")
    options = [
        "--target",
        "embedded",
        "--drafter",
        "embedded:draft",
        "--prompts",
        str(prompts),
        "--batch",
        "1",
        "--longest",
        "2",
    ]
    assert main(["plan", "--measure", *options, "--plot", str(picture)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "T_V ms by nodes: 1:" in printed
    assert "Best with 1 row:" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
