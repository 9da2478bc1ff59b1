"""Check the command line as a user meets it."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax.cli import generate
from specjax.cli.generate import GenerateConfig
from specjax.cli.main import COMMANDS, Command, Group, find_command, main, parse_options
from specjax.cli.plan import contexts as plan_contexts
from specjax.drafters import MixtureOfAttentions
from specjax.drafts.shapes import StaticTree
from specjax.models.transformer import Target
from specjax.planning import choice
from specjax.planning.choice import Candidate, DraftComparison, TrialAcceptance
from specjax.planning.contexts import TRIAL_TOKENS, MeasuredContexts
from specjax.planning.costs import Costs
from specjax.training import loop
from tests.cli.conftest import end_at
from tests.conftest import ASSETS, tiny_target

CONFIGS = ASSETS.parents[1] / "configs"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def generate_with(pair: tuple[str, str], *options: str) -> tuple[str, ...]:
    """Return a command for eight tokens after one prompt.

    The sizes are the same in every test here, so that the tests share compiled programs.
    """
    words = ("generate", "--target", pair[0], "--prompt", "def main():")
    return (*words, "--max-new-tokens", "8", *options)


@pytest.mark.full
def test_generate_streams_the_text_that_json_reports(capsys, tiny_pair) -> None:
    arguments = generate_with(tiny_pair, "--drafter", tiny_pair[1])
    code, out, err = run(capsys, *arguments)
    assert code == 0
    assert "acceptance length" in err
    code, as_json, _ = run(capsys, *arguments, "--json")
    record = json.loads(as_json)
    assert out == record["text"] + "\n"
    assert len(record["token_ids"]) == record["statistics"]["emitted"] == 8
    assert record["prompt"] == "def main():"


@pytest.mark.full
def test_generate_with_a_drafter_whose_name_has_a_setting(capsys, tiny_pair, tmp_path) -> None:
    target = Target.from_pretrained(tiny_pair[0])
    MixtureOfAttentions.init(target, jax.random.key(0), tli=1).save_pretrained(
        tmp_path / "moa", layout="vllm"
    )
    _, plain, _ = run(capsys, *generate_with(tiny_pair, "--json"))
    name = f"moa,tli=1:{tmp_path / 'moa'}"
    code, drafted, _ = run(
        capsys, *generate_with(tiny_pair, "--drafter", name, "--draft", "chain:2", "--json")
    )
    assert code == 0 and json.loads(drafted)["text"] == json.loads(plain)["text"]
    code, _, err = run(
        capsys, *generate_with(tiny_pair, "--drafter", name.replace("tli=1", "tli=9"), "--json")
    )
    assert code == 2 and "tli=9: the target has" in " ".join(err.split())


@pytest.mark.full
def test_generate_with_a_cache_in_8_bits(capsys, tiny_pair) -> None:
    target = specjax.Target.from_pretrained(tiny_pair[0], cache_dtype="int8")
    records = []
    for options in ((), ("--drafter", "early-exit:1")):
        code, out, _ = run(
            capsys, *generate_with(tiny_pair, "--cache-dtype", "int8", "--json", *options)
        )
        assert code == 0
        records.append(json.loads(out))
    assert records[0]["token_ids"] == records[1]["token_ids"]
    prompt = np.array([records[0]["prompt_token_ids"]])
    expected = specjax.generate(target, None, prompt, max_new_tokens=8)
    assert records[0]["token_ids"] == expected.tokens[0, prompt.shape[1] :].tolist()


@pytest.mark.full
def test_the_off_switch_says_what_it_measured(capsys, tiny_pair, monkeypatch) -> None:
    """Check that the off switch measures, prints the result, and decodes plainly.

    Whether it measures well is tested elsewhere: beside other work, the times of a tiny model say
    little.
    """
    measured = []
    measure = generate.trial_speedup
    monkeypatch.setattr(
        generate, "trial_speedup", lambda *a, **o: measured.append(measure(*a, **o)) or 0.93
    )
    arguments = generate_with(tiny_pair, "--drafter", "early-exit:1", "--only-if-faster", "--json")
    code, out, err = run(capsys, *arguments)
    assert code == 0
    assert measured[0] > 0
    assert "expected: 0.93x with the drafter; decoding plainly" in err
    assert json.loads(out)["statistics"]["drafted"] == 0


@pytest.mark.full
def test_compiled_programs_are_kept_between_processes(tmp_path, monkeypatch) -> None:
    command = "main(['plan', 'theory', '--cost', '0.1'])"
    script = (
        f"from specjax.cli.main import main; import jax; {command}; jax.jit(lambda x: x * 2)(1.0)"
    )
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "1", "HOME": str(tmp_path)}
    environment.pop("JAX_COMPILATION_CACHE_DIR")  # that of the tests
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True)
    assert list((tmp_path / ".cache" / "specjax" / "compiled").iterdir())


@pytest.mark.full
def test_every_drafter_gives_the_same_greedy_tokens(capsys, tiny_pair) -> None:
    names = (
        "prompt-lookup",
        "prompt-lookup:2",
        "early-exit:1",
        tiny_pair[1],
        f"draft-model:{tiny_pair[1]}",
    )
    outputs = {}
    for name in ("none", *names):
        code, out, _ = run(capsys, *generate_with(tiny_pair, "--drafter", name, "--json"))
        assert code == 0
        outputs[name] = json.loads(out)
    for name in names:
        assert outputs[name]["token_ids"] == outputs["none"]["token_ids"], name
    assert (
        outputs["none"]["statistics"]["drafted"]
        == 0
        < outputs["early-exit:1"]["statistics"]["drafted"]
    )


@pytest.mark.full
def test_a_corpus_changes_no_text(capsys, tmp_path, tiny_pair) -> None:
    _, plain, _ = run(capsys, *generate_with(tiny_pair, "--json"))
    (tmp_path / "a.py").write_text("def main():\n    pass\n")
    options = "--drafter", "suffix", "--corpus", str(tmp_path / "a.py"), "--json"
    code, out, _ = run(capsys, *generate_with(tiny_pair, *options))
    assert code == 0
    assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]
    assert json.loads(out)["statistics"]["drafted"] > 0


@pytest.mark.full
def test_a_file_of_prompts_is_one_batch(capsys, tmp_path, tiny_pair) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        json.dumps({"prompt": "def main():"}) + "\n\n" + json.dumps({"text": "import os\n"}) + "\n"
    )
    options = ("generate", "--target", tiny_pair[0], "--prompts-file", str(file))
    options += ("--max-new-tokens", "8")
    _, out, _ = run(capsys, *options, "--json")
    record = json.loads(out)
    assert [output["prompt"] for output in record["outputs"]] == ["def main():", "import os\n"]
    _, alone, _ = run(capsys, *generate_with(tiny_pair, "--json"))
    assert record["outputs"][0]["token_ids"] == json.loads(alone)["token_ids"]
    assert record["statistics"]["emitted"] == sum(
        len(output["token_ids"]) for output in record["outputs"]
    )
    _, out, _ = run(capsys, *options)
    assert out == "".join(
        f"--- {output['prompt']}\n{output['text']}\n" for output in record["outputs"]
    )


def test_generation_ends_at_the_checkpoints_end_token_unless_told_otherwise(
    capsys, tmp_path, tiny_pair
) -> None:
    _, whole, _ = run(capsys, *generate_with(tiny_pair, "--json"))
    tokens = json.loads(whole)["token_ids"]
    ending = str(end_at(Path(tiny_pair[0]), tmp_path / "ending", tokens[3]))
    _, out, _ = run(capsys, *generate_with((ending, ""), "--json"))
    assert json.loads(out)["token_ids"] == tokens[: tokens.index(tokens[3]) + 1]
    _, out, _ = run(capsys, *generate_with((ending, ""), "--json", "--ignore-eos"))
    assert json.loads(out)["token_ids"] == tokens


def test_generation_ends_before_a_stop_string(capsys, tiny_pair) -> None:
    """Check a stop string, which may be the end of a turn of several tokens."""
    _, whole, _ = run(capsys, *generate_with(tiny_pair, "--json"))
    text = json.loads(whole)["text"]
    stop = text[3:6]
    _, out, _ = run(capsys, *generate_with(tiny_pair, "--json", "--stop", "never there", stop))
    assert json.loads(out)["text"] == text[: text.find(stop)]
    assert len(json.loads(out)["token_ids"]) < len(json.loads(whole)["token_ids"])
    _, out, _ = run(capsys, *generate_with(tiny_pair, "--stop", stop))
    assert out == text[: text.find(stop)] + "\n"
    # It is refused before anything is read.
    code, _, err = run(capsys, *generate_with(("./nothing", ""), "--stop", ""))
    assert code == 2 and "stop=" in err


@pytest.mark.full
def test_settings_that_greedy_decoding_does_not_read_are_named(capsys, tiny_pair) -> None:
    command = ("generate", "--prompt", "x", "--target", tiny_pair[0], "--max-new-tokens", "8")
    _, _, err = run(capsys, *command, "--top-p", "0.9", "--min-p", "0.1")
    assert (
        "specjax: --top-p, --min-p: ignored at --temperature 0, which is greedy" in err.splitlines()
    )
    _, _, err = run(capsys, *command, "--top-p", "0.9", "--temperature", "0.1")
    assert "ignored" not in err


def test_trained_drafters_of_different_tokenizers_are_refused_before_their_weights(
    capsys, tmp_path, tiny_pair
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(tiny_pair[1], draft)
    (draft / "config.json").write_text(
        json.dumps({"model_type": "llama", "speculators_model_type": "eagle3"})
    )
    (draft / "model.safetensors").write_bytes(b"never read")
    file = draft / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    first, second = (
        next(token for token, i in vocab.items() if i == number) for number in (100, 101)
    )
    vocab[first], vocab[second] = 101, 100
    file.write_text(json.dumps(content))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("x")
    for command in (
        ("generate", "--prompt", "x"),
        ("plan", "measure", "--prompts", str(prompts)),
    ):
        code, _, err = run(
            capsys, *command, "--target", tiny_pair[0], "--drafter", f"eagle3:{draft}"
        )
        assert code == 2
        assert (
            f"tokenizers: id 100 is {first!r} for the target and {second!r} for the drafter" in err
        )
        assert len(err.splitlines()) == 1


def test_a_config_file_and_an_option_that_overrides_it(tmp_path) -> None:
    file = tmp_path / "generate.yaml"
    file.write_text("temperature: 0.5\ntop_k: 7\n")
    config = parse_options(GenerateConfig, ["--config", str(file), "--top-k", "9"], prog="x")
    assert (config.temperature, config.top_k) == (0.5, 9)
    train = parse_options(
        COMMANDS["train"].config,
        ["--config", str(CONFIGS / "demo_target.yaml"), "--optimizer.clip", "2"],
        prog="x",
    )
    assert (train.optimizer.clip, train.optimizer.method, train.method.name) == (2.0, "muon", "lm")


PAIR = ("generate", "--prompt", "def main():", "--drafter", "embedded:draft")
FAULTS = [
    (["generate"], "prompt: give either"),
    (["generate", "--prompt", ""], "prompt: give either"),
    (["generate", "--prompt", "x", "--prompts-file", "y"], "prompt: give either"),
    (["generate", "--prompts-file", "nothing.txt"], "prompts_file='nothing.txt': no such file"),
    (["generate", "--prompt", "x", "--target", "./nothing"], "'./nothing' is not a directory"),
    (["generate", "--prompt", "x", "--drafter", "early-exit"], "write early-exit:LAYERS"),
    (
        ["generate", "--prompt", "x", "--drafter", "early-exit:12"],
        "EarlyExit(layers=12): the target has 12",
    ),
    (["generate", "--prompt", "x", "--draft", "chain:0"], "drafter='none': draft=chain:0"),
    ([*PAIR, "--draft", "chain:0"], "Chain(length=0)"),
    ([*PAIR, "--draft", "chain:100000"], "makes 100001 nodes"),
    ([*PAIR, "--draft", "sampled:100,100,100"], "makes 1010101 nodes"),
    ([*PAIR, "--drafter", "early-exit:²"], "write early-exit:LAYERS"),
    (["plan", "roofline", "--batch", "0"], "batch=0: give at least one number of rows"),
    ([*PAIR, "--draft", "bush"], "draft='bush': must be chain:LENGTH"),
    ([*PAIR, "--draft", "sampled:2,x"], "draft='sampled:2,x': must be"),
    ([*PAIR, "--draft", "complete:2,0"], "widths=(2, 0)"),
    ([*PAIR, "--draft", "complete:4000"], "a node has 4000 children, but the vocabulary has 3072"),
    ([*PAIR, "--draft", "dynamic:2,3,99"], "nodes must be at least depth + 1 = 4"),
    ([*PAIR, "--show-tree", "tree.gif"], "show_tree='tree.gif': the name must end in .png"),
    (
        ["generate", "--prompt", "x", "--drafter", "prompt-lookup", "--draft", "eagle"],
        "prompt lookup copies one continuation",
    ),
    (["generate", "--prompt", "x", "--show-tree", "x.png"], "drafter='none': show_tree=x.png"),
    (
        ["plan", "measure", "--target", "embedded"],
        "measure: give --target, --drafter and --prompts",
    ),
    (
        ["plan", "contexts", "--prompts", "x"],
        "contexts=(), budgets=(128, 256, 512): give numbers of tokens",
    ),
    (
        ["plan", "contexts", "--contexts", "64", "--prompts", "x"],
        "contexts: give --target, --drafter and --prompts",
    ),
    (["plan", "measure", "--longest", "0"], "longest=0: must be at least 1 and at most 256"),
    (
        ["plan", "dance"],
        "'dance' is not a command; the commands of specjax plan are theory, roofline,",
    ),
    (["generate", "--prompt", "x", "--temperature", "-1"], "temperature=-1"),
    (["generate", "--prompt", "x", "--top-p", "0"], "top_p=0"),
    (["generate", "--prompt", "x", "--dtype", "int8"], "dtype='int8'"),
    (["generate", "--prompt", "x", "--target", "embedded:other"], "embedded checkpoint 'other'"),
    (["generate", "--prompt", "x", "--max-new-tokens", "5000"], "1024 positions"),
    (["generate", "--config", "nothing.yaml"], "nothing.yaml: no such file"),
    (["generate", "--config"], "--config: give the path"),
    (["generate", "--config", str(ASSETS)], "cannot be read as a text file"),
    (
        ["generate", "--prompts-file", str(ASSETS / "target" / "model.safetensors")],
        "not UTF-8 text",
    ),
    (["generate", "--prompt", "x", "--mesh", "0", "1"], "each axis must be at least 1"),
    (["train", "--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
    (["dance"], "'dance' is not a command"),
    (["genrate", "--prompt", "x"], "; did you mean generate?"),
    (["plan", "Roofline"], "; did you mean roofline?"),
    (["help", "evalute"], "; did you mean evaluate?"),
    (
        ["generate", "--prompt", "x", "--seed", "-1"],
        "seed=-1: must be a whole number, at least 0 and below 2**63",
    ),
    (["generate", "--prompt", "x", "--seed", str(2**63)], "seed=9223372036854775808: must be"),
    (["demo", "--seed", "-1"], "seed=-1: must be"),
    (["demo", "--repeats", "0"], "repeats=0: must be"),
    (
        ["generate", "--prompt", "x", "--temperature", "1e300"],
        "temperature=1e+300: must be at most",
    ),
    (["generate", "--prompt", "x", "--top-k", str(2**200)], "top_k="),
    (
        ["generate", "--prompt", "x", "--max-new-tokens", str(2**63)],
        "max_new_tokens=9223372036854775808: must be at most",
    ),
    (["generate", "--prompt", "\udc80"], "prompt: character 0 is not valid Unicode"),
    (["generate", "--prompt", "x", "--target", "~nobody-of-that-name/x/y"], "is not a directory"),
    (["generate", "--prompt", "x", "--target", "x" * 5000], "is not a directory"),
    (["generate", "--prompts-file", "x" * 5000], "cannot be read"),
    ([*PAIR, "--drafter", "bush"], "drafter='bush': no method of that name, no directory"),
    (
        [*PAIR, "--drafter", "bush:4"],
        "methods: prompt-lookup or prompt-lookup:MAX_NGRAM; token-recycling or",
    ),
    ([*PAIR, "--drafter", "prompt-lookup:0"], "write prompt-lookup:MAX_NGRAM"),
    ([*PAIR, "--drafter", "draft-model:"], "write draft-model:DIRECTORY"),
    (["plan", "theory", "--cost", "0.1", "--longest", str(2**32)], "at most 256"),
    (["plan", "roofline", "--batch", str(2**64)], "give at most"),
]


@pytest.mark.parametrize(("arguments", "message"), FAULTS)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def leaves(commands: Mapping[str, Command | Group], *before: str) -> Iterator[tuple[str, ...]]:
    """Yield the words that name each command."""
    for name, command in commands.items():
        yield from (
            leaves(command.commands, *before, name)
            if isinstance(command, Group)
            else [(*before, name)]
        )


WITHOUT_JAX = [
    ["--help"],
    ["-h"],
    ["help"],
    [],
    ["--version"],
    ["-V"],
    ["plan"],
    ["plan", "--help"],
    ["help", "plan"],
    ["dance"],
]


def test_what_lists_commands_imports_neither_jax_nor_a_command() -> None:
    """Check the imports, because they take seconds.

    The names of commands and of their options must be known without the commands.
    """
    script = (
        "import sys\nfrom specjax.__main__ import main\n"
        f"for words in {WITHOUT_JAX!r}:\n    sys.argv[1:] = words\n    main()\n"
        "print('loaded:', *sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.rpartition("loaded: ")[2].split())
    assert not loaded & {"jax", "jaxlib", "numpy", "flax", "transformers", "rich", "tyro"}
    assert {name for name in loaded if name.startswith("specjax.cli.")} <= {
        "specjax.cli.main",
        "specjax.cli.interrupts",
    }


@pytest.mark.parametrize("words", list(leaves(COMMANDS)), ids=" ".join)
def test_every_command_is_where_the_table_says(words) -> None:
    command = find_command(words)[1]
    assert isinstance(command, Command)
    assert is_dataclass(command.config) and callable(command.run)
    assert command.run.__module__ == f"specjax.cli.{command.module}"


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_the_version_is_printed(capsys, word) -> None:
    assert run(capsys, word) == (0, f"specjax {specjax.__version__}\n", "")


def test_help_is_a_command_too(capsys) -> None:
    _, listed, _ = run(capsys, "--help")
    assert run(capsys, "help") == (0, listed, "")
    assert "specjax --version" in listed
    assert (
        run(capsys, "help", "plan") == run(capsys, "plan", "help") == run(capsys, "plan", "--help")
    )
    shown = []
    for words in (["help", "plan", "theory"], ["plan", "theory", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        shown.append((ended.value.code, capsys.readouterr().out))
    assert shown[0] == shown[1] and "--cost" in shown[0][1]


@pytest.mark.parametrize(
    "words", sorted(set(leaves(COMMANDS)) - {("demo",), ("serve",), ("env",)}), ids=" ".join
)
def test_a_command_that_is_told_nothing_says_what_it_needs(
    capsys, monkeypatch, tmp_path, words
) -> None:
    """Run every command without options, except those that need none.

    A command must not start work that takes long.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "train", lambda config: pytest.fail(f"a training began: {config}"))
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and ("give" in err or "name" in err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "goes_on"),
    [("train", True), ("regenerate", True), ("generate", False), ("convert", False)],
)
def test_an_interrupted_command_says_whether_it_can_be_continued(
    capsys, monkeypatch, name, goes_on
) -> None:
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(f"specjax.cli.{name}"), f"run_{name}", interrupted)
    code, _, err = run(capsys, name)
    assert code == 130
    assert (
        err == f"specjax: interrupted{'; the same command continues the run' if goes_on else ''}\n"
    )


def test_a_draft_of_another_vocabulary_is_refused_before_its_weights(capsys, tmp_path) -> None:
    tiny_target().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    code, _, err = run(capsys, "generate", "--prompt", "x", "--drafter", str(tmp_path))
    assert code == 2
    assert "drafter has a vocabulary of 11 tokens and target one of 3072" in err


@pytest.mark.full
def test_the_module_runs_as_a_program_and_says_what_each_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specjax", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    for name, command in COMMANDS.items():
        assert f"  {name:<10} {command.about}\n" in done.stdout
        assert len(command.about.split()) > 5


@pytest.mark.full
def test_a_draft_tree_is_drawn(tmp_path, capsys, tiny_pair) -> None:
    picture = tmp_path / "tree.png"
    options = ("--drafter", tiny_pair[1], "--draft", "dynamic:3,3,9", "--show-tree", str(picture))
    assert main([*generate_with(tiny_pair), *options, "--json"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    captured = capsys.readouterr()
    assert f"picture: {picture}" in captured.err
    assert json.loads(captured.out)["statistics"]["drafted"] > 0


@pytest.mark.full
def test_auto_takes_what_the_comparison_finds_fastest(monkeypatch, capsys, tiny_pair) -> None:
    for draft, words in (
        (StaticTree(((0,), (1,))), "static tree, 3 nodes, 1 deep"),
        (None, "plain decoding"),
    ):
        comparison = DraftComparison(
            TrialAcceptance((), (), {}), {}, {}, (Candidate(draft, 2.0, 1.0, 1.5),)
        )
        monkeypatch.setattr(choice, "compare_drafts", lambda *_, result=comparison, **__: result)
        options = ("--drafter", tiny_pair[1], "--draft", "auto", "--json")
        assert main([*generate_with(tiny_pair, *options)]) == 0
        captured = capsys.readouterr()
        assert f"draft: {words}" in captured.err
        statistics = json.loads(captured.out)["statistics"]
        assert statistics["drafted"] == (0 if draft is None else 2 * statistics["steps"])


@pytest.mark.thorough
def test_plan_measures_this_machine(tmp_path, capsys, tiny_pair) -> None:
    prompts, picture = tmp_path / "prompts.txt", tmp_path / "plan.png"
    prompts.write_text("def main():\nimport os\n")
    pair = ("--target", tiny_pair[0], "--drafter", tiny_pair[1], "--prompts", str(prompts))
    assert (
        main(["plan", "measure", *pair, "--batch", "1", "--longest", "2", "--plot", str(picture)])
        == 0
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "T_V ms by nodes: 1:" in printed
    assert "Best with 1 row:" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def made_up(
    target, drafter, texts, *, contexts, batches, budgets, longest, options
) -> MeasuredContexts:
    """Return made-up contexts in place of `measure_contexts`.

    Two rows are as fast as one, and a token of the drafter takes a tenth of the target's time.
    """
    assert texts.shape == (2, max(contexts)) and options.max_new_tokens == TRIAL_TOKENS
    costs = {
        (context, batch): Costs(verify={1: 1.0, longest + 1: 1.0}, draft_time=0.0)
        for context in contexts
        for batch in batches
    }
    survival = {
        (context, budget): (0.8,) * longest
        for context in contexts
        for budget in budgets
        if budget < context
    }
    return MeasuredContexts(
        costs, {(budget, batch): 0.1 for budget in budgets for batch in batches}, survival
    )


@pytest.mark.parametrize("clock", ["made up", pytest.param("real", marks=pytest.mark.thorough)])
def test_plan_measures_contexts(tmp_path, capsys, monkeypatch, tiny_pair, clock) -> None:
    if clock == "made up":
        monkeypatch.setattr(plan_contexts, "measure_contexts", made_up)
    prompts, picture = tmp_path / "prompts.txt", tmp_path / "plan.png"
    prompts.write_text(
        "import os, sys, re, json, itertools, functools, collections\n" * 2 + "def main(): pass\n"
    )
    options = ["--contexts", "6", "12", "--budgets", "5", "--batch", "1", "2", "--longest", "2"]
    options += ["--prompts", str(prompts)]
    command = ["plan", "contexts", "--target", tiny_pair[0], *options]
    assert main([*command, "--drafter", "streaming", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in printed.splitlines()
        if line.startswith("│")
    ]
    assert [line[:2] for line in lines] == [["6", "1"], ["6", "2"], ["12", "1"], ["12", "2"]]
    if clock == "made up":  # 1 + 2 * 0.8 tokens in the time of 2 * 0.1 + 1
        assert all("2.17" in " ".join(line) for line in lines), lines
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*command, "--drafter", "prompt-lookup"]) == 2
    assert "give streaming or snapkv" in capsys.readouterr().err
    assert main([*command, "--drafter", "streaming", "--contexts", "4000"]) == 2
    assert "no prompt has 4000 tokens" in capsys.readouterr().err
