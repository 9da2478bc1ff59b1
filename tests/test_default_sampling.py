"""Sampling parameters of generation_config.json: defaults of `load`, `generate` and `serve` alone.

Tests that compare a text compare a call that leaves parameters out with a call that states them
all.
"""

import ast
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import specjax
from specjax.cli.main import main
from specjax.cli.plan.on_prompts import OnPrompts
from specjax.cli.serve import ServeConfig, engine_options
from specjax.errors import InputError
from specjax.evaluation import losslessness
from specjax.models.transformer import Target
from specjax.pipeline import TextGenerator
from specjax.ray import Generate
from specjax.sampling import GREEDY, Sampling
from specjax.serving import ClientDrafts, Engine
from tests.cli.test_evaluate import lossless, of_texts, write_source
from tests.conftest import ASSETS
from tests.serving.http.made_up import MadeUpEngine
from tests.serving.http.test_app import ask, chat, service_of

FILE = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
DEFAULTS = Sampling(0.6, 20, 0.95)
COUNT = 12


def with_file(directory: str | Path, copy: Path, **fields: Any) -> str:
    """Return a copy of a checkpoint with other fields in its generation_config.json."""
    shutil.copytree(directory, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **fields}))
    return str(copy)


def names_of(cases: Any) -> list[str]:
    """Return a name for each case: the settings that it states."""
    stated = [case[0].items() if isinstance(case[0], dict) else [case[0]] for case in cases]
    return [
        " ".join(re.findall(r"[\w.]+", str(list(settings)))) or "nothing" for settings in stated
    ]


@pytest.fixture(scope="module")
def directory(tiny_pair, tmp_path_factory) -> str:
    return with_file(tiny_pair[0], tmp_path_factory.mktemp("sampled") / "target", **FILE)


@pytest.fixture(scope="module")
def generate(directory) -> TextGenerator:
    return specjax.load(directory)


def options_of(generate: TextGenerator, monkeypatch, **options: Any) -> Sampling:
    """Return the sampling parameters of a call, without any computation."""
    samplings = []

    class EnoughError(Exception):
        pass

    def start(self, prompts, options, **_) -> None:
        samplings.append(options.sampling)
        raise EnoughError

    monkeypatch.setattr(TextGenerator, "start", start)
    for call in (generate, generate.stream):
        with pytest.raises(EnoughError):
            call("import os", **options)
    assert samplings[0] == samplings[1]
    return samplings[0]


# --- merging --------------------------------------------------------------------------------------

MERGED = [
    ({}, DEFAULTS),
    ({"temperature": 0.7}, Sampling(0.7, 20, 0.95)),
    ({"top_k": 5}, Sampling(0.6, 5, 0.95)),
    ({"top_k": 0}, Sampling(0.6, 0, 0.95)),
    ({"top_p": 1.0, "min_p": 0.1}, Sampling(0.6, 20, 1.0, 0.1)),
    ({"temperature": None, "top_k": None, "top_p": None, "min_p": None}, DEFAULTS),
    ({"temperature": 0}, GREEDY),
    ({"temperature": [0, 0]}, Sampling([0, 0])),
    ({"temperature": [0, 1]}, Sampling([0, 1], 20, 0.95)),
    ({"temperature": 0, "top_p": 0.5}, Sampling(0, top_p=0.5)),
]


@pytest.mark.parametrize(("stated", "merged"), MERGED, ids=names_of(MERGED))
def test_what_a_call_states_wins_setting_by_setting(stated, merged) -> None:
    assert DEFAULTS.with_explicit(**stated) == merged


def test_settings_of_a_call_are_checked_before_they_are_merged() -> None:
    for name in vars(GREEDY):
        for value in ("3", True, {}):
            with pytest.raises(InputError, match=rf"^{name}="):
                DEFAULTS.with_explicit(**{name: value})
    assert Sampling(0.0, top_k=5).with_explicit() == GREEDY  # a file that says temperature 0
    assert Sampling(0.0, top_k=5).with_explicit(temperature=1.0) == Sampling(1.0, top_k=5)


# --- in Python ------------------------------------------------------------------------------------


def test_load_takes_them_from_the_targets_file(generate, directory, tiny_pair, tmp_path) -> None:
    assert generate.default_sampling == DEFAULTS
    assert "default_sampling=Sampling(temperature=0.6" in repr(generate)
    assert specjax.load(directory, generation_config=None).default_sampling is None
    without_file = specjax.load(tiny_pair[0])
    assert without_file.default_sampling is None
    assert "default_sampling" not in repr(without_file)
    assert specjax.load(directory, tiny_pair[1]).default_sampling == DEFAULTS
    for wrong in ("none", True, 3, "vllm"):
        with pytest.raises(InputError, match=r"generation_config=.*must be 'auto', or None"):
            specjax.load(directory, generation_config=wrong)  # pyright: ignore[reportArgumentType]
    off = with_file(tiny_pair[0], tmp_path / "off", **FILE | {"do_sample": False})
    assert specjax.load(off).default_sampling is None


def test_a_target_that_is_loaded_already_has_none(generate, directory, tiny_pair) -> None:
    target = Target.from_pretrained(directory)
    assert specjax.load(target, tokenizer=directory).default_sampling is None
    assert specjax.load(generate.target, tokenizer=generate.tokenizer).default_sampling is None
    # The file of a tokenizer or of a drafter does not count.
    assert specjax.load(tiny_pair[0], tokenizer=directory).default_sampling is None
    assert specjax.load(tiny_pair[0], directory).default_sampling is None


@pytest.mark.parametrize(("stated", "merged"), MERGED, ids=names_of(MERGED))
def test_a_call_and_a_stream_have_them(generate, monkeypatch, stated, merged) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if stated.get("top_p") == 0.5 else "error")
        assert options_of(generate, monkeypatch, **stated) == merged


def test_without_a_file_calls_are_greedy(tiny_pair, directory, monkeypatch) -> None:
    for plain in (specjax.load(tiny_pair[0]), specjax.load(directory, generation_config=None)):
        assert options_of(plain, monkeypatch) == GREEDY
        assert options_of(plain, monkeypatch, temperature=0.7) == Sampling(0.7)


def test_only_what_the_call_states_is_named_as_not_read(generate) -> None:
    with (
        pytest.warns(UserWarning, match=r"^top_p: ignored at temperature 0") as warned,
        pytest.raises(InputError),
    ):
        generate("x", temperature=0, top_p=0.5, max_new_tokens=0)
    assert len(warned) == 1


def test_what_is_not_applied_is_said_once(tiny_pair, tmp_path) -> None:
    fields = FILE | {"num_beams": 4, "suppress_tokens": [3]}
    penalised = with_file(tiny_pair[0], tmp_path / "penalised", **fields)
    with pytest.warns(
        UserWarning,
        match=r"fields are not applied: num_beams 4, suppress_tokens \[3\]$",
    ) as warned:
        assert specjax.load(penalised).default_sampling == DEFAULTS
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specjax.load(penalised, generation_config=None)


def test_bad_values_are_refused_before_any_weights_are_read(tiny_pair, tmp_path) -> None:
    hot = with_file(tiny_pair[0], tmp_path / "hot", **FILE | {"temperature": "hot"})
    (Path(hot) / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(
        InputError, match=r"generation_config\.json: temperature='hot': must be a number"
    ):
        specjax.load(hot)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        specjax.load(hot, generation_config=None)


@pytest.mark.full
def test_a_text_with_defaults_is_the_text_with_the_same_settings(generate, directory) -> None:
    plain = specjax.load(directory, generation_config=None)
    settings = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    by_default = [
        generate("import os", seed=seed, max_new_tokens=COUNT).tokens for seed in range(3)
    ]
    assert by_default == [
        plain("import os", seed=seed, max_new_tokens=COUNT, **settings).tokens for seed in range(3)
    ]
    greedy = plain("import os", max_new_tokens=COUNT).tokens
    assert generate("import os", temperature=0, seed=1, max_new_tokens=COUNT).tokens == greedy
    assert len({*by_default, greedy}) == 4


# --- the engine, and HTTP -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(generate):
    with Engine(generate, rows=1, widths=(1,), drafts=(None,), capacity=64) as running:
        yield running


@pytest.mark.full
def test_an_engine_has_those_of_its_generator(generate, engine) -> None:
    settings = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}

    def tokens(**options: Any) -> tuple[int, ...]:
        return engine.submit("import os", max_new_tokens=COUNT, **options).result().tokens

    for seed in range(3):
        text = tokens(seed=seed)
        assert text == tokens(seed=seed, **settings)
        assert text == generate("import os", seed=seed, max_new_tokens=COUNT, rule="coupled").tokens
    greedy = tokens(temperature=0)
    plain = specjax.load(generate.target, tokenizer=generate.tokenizer)
    assert greedy == plain("import os", max_new_tokens=COUNT).tokens
    assert tokens(temperature=1.5, top_k=1, seed=3) == greedy != text


@pytest.mark.full
def test_a_server_has_those_of_its_engine(engine) -> None:
    service = service_of(engine)
    request = {"prompt": "import os", "max_tokens": COUNT, "seed": 3}

    def text(**body: Any) -> str:
        answer = ask(service, **request, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    assert (
        text()
        == text(temperature=0.6, top_k=20, top_p=0.95)
        == text(temperature=None, top_k=None, top_p=None, min_p=None)
    )
    assert text() == engine.submit("import os", max_new_tokens=COUNT, seed=3).result().text
    assert text(temperature=1.0, top_k=-1, top_p=1) != text()
    assert (
        text(temperature=0)
        == engine.submit("import os", max_new_tokens=COUNT, temperature=0).result().text
    )


OF_REQUESTS = [
    (stated, merged) for stated, merged in MERGED if not isinstance(stated.get("temperature"), list)
]


@pytest.mark.parametrize("call", [ask, chat])
@pytest.mark.parametrize(("stated", "merged"), OF_REQUESTS, ids=names_of(OF_REQUESTS))
def test_a_request_states_what_goes_over_the_models_own(call, stated, merged) -> None:
    engine = MadeUpEngine()
    engine.default_sampling = DEFAULTS
    assert call(engine, **stated).status_code == 200
    settings = engine.submitted[0].settings
    assert Sampling(**{name: settings[name] for name in vars(GREEDY)}) == merged


@pytest.mark.parametrize("call", [ask, chat])
def test_a_request_to_a_model_without_defaults_has_temperature_1(call) -> None:
    for stated, merged in (
        ({}, Sampling(1.0)),
        ({"temperature": None, "top_p": 0.9}, Sampling(1.0, top_p=0.9)),
    ):
        engine = MadeUpEngine()
        assert call(engine, **stated).status_code == 200
        settings = engine.submitted[0].settings
        assert Sampling(**{name: settings[name] for name in vars(GREEDY)}) == merged


# --- commands -------------------------------------------------------------------------------------


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main([*arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def generating(target: str, *options: str) -> tuple[str, ...]:
    settings = ("--prompt", "import os", "--max-new-tokens", str(COUNT), "--seed", "1")
    return ("generate", "--target", target, *settings, *options)


@pytest.fixture
def drawn_with(monkeypatch) -> list[Sampling]:
    """Return a list that a command adds its sampling parameters to, and end the command there."""
    samplings = []

    def start(self, prompts, options, **_) -> None:
        samplings.append(options.sampling)
        raise InputError("enough")

    monkeypatch.setattr(TextGenerator, "start", start)
    return samplings


IN_FORCE = "specjax: {} from generation_config.json; --generation-config none for greedy"
OF_COMMANDS = [
    ((), DEFAULTS, IN_FORCE.format("temperature 0.6, top_k 20, top_p 0.95")),
    (("--temperature", "0.7"), Sampling(0.7, 20, 0.95), IN_FORCE.format("top_k 20, top_p 0.95")),
    (("--top-k", "0", "--top-p", "1"), Sampling(0.6), IN_FORCE.format("temperature 0.6")),
    (("--temperature", "1", "--top-k", "5", "--top-p", "0.5"), Sampling(1.0, 5, 0.5), None),
    (("--temperature", "0"), GREEDY, None),
    (
        ("--temperature", "0", "--min-p", "0.1"),
        Sampling(0.0, min_p=0.1),
        "specjax: --min-p: ignored at --temperature 0, ",
    ),
    (("--generation-config", "none"), GREEDY, None),
    (("--generation-config", "none", "--temperature", "0.7"), Sampling(0.7), None),
    (
        ("--generation-config", "none", "--top-k", "5"),
        Sampling(0.0, 5),
        "specjax: --top-k: ignored at --temperature 0, ",
    ),
]


@pytest.mark.parametrize(("options", "sampling", "line"), OF_COMMANDS, ids=names_of(OF_COMMANDS))
def test_generate_has_them_and_says_so(
    directory, drawn_with, capsys, options, sampling, line
) -> None:
    status, _, errors = run(capsys, *generating(directory, *options))
    assert status == 2 and drawn_with == [sampling]
    lines = [
        text
        for text in errors.splitlines()
        if "generation_config.json" in text or "ignored" in text
    ]
    assert [text.startswith(line or "") for text in lines] == [True] * (line is not None)


def test_generate_names_what_is_not_applied(tiny_pair, tmp_path, drawn_with, capsys) -> None:
    penalised = with_file(
        tiny_pair[0],
        tmp_path / "penalised",
        **FILE,
        num_beams=4,
        no_repeat_ngram_size=3,
    )
    _, _, errors = run(capsys, *generating(penalised))
    line = "these fields are not applied: no_repeat_ngram_size 3, num_beams 4"
    assert [line in text for text in errors.splitlines()].count(True) == 1
    assert (
        "not applied" not in run(capsys, *generating(penalised, "--generation-config", "none"))[2]
    )
    (Path(penalised) / "generation_config.json").write_text(json.dumps(FILE | {"top_p": 2}))
    status, _, errors = run(capsys, *generating(penalised))
    assert (
        status == 2
        and "generation_config.json: top_p=2: must be" in errors
        and "--generation-config none" in errors
    )
    assert drawn_with == [DEFAULTS, GREEDY]
    run(capsys, *generating(penalised, "--generation-config", "none"))
    assert drawn_with == [DEFAULTS, GREEDY, GREEDY]


@pytest.mark.full
def test_generate_writes_the_text_of_the_same_settings(directory, capsys) -> None:
    def tokens(*options: str) -> list[int]:
        status, out, errors = run(capsys, *generating(directory, "--json", *options))
        assert status == 0, errors
        return json.loads(out)["token_ids"]

    stated = (
        *("--temperature", "0.6", "--top-k", "20", "--top-p", "0.95"),
        *("--generation-config", "none"),
    )
    assert (
        tokens()
        == tokens(*stated)
        != tokens("--temperature", "0")
        == tokens("--generation-config", "none")
    )


def test_serve_has_them_and_says_so(directory, monkeypatch) -> None:
    lines = []
    monkeypatch.setattr("specjax.cli.defaults.say", lines.append)
    arguments, _ = engine_options(ServeConfig(target=directory, capacity=64))
    assert arguments["target"].default_sampling == DEFAULTS
    assert lines == [
        "temperature 0.6, top_k 20, top_p 0.95 from generation_config.json; --generation-config"
        " none for temperature 1"
    ]
    arguments, _ = engine_options(
        ServeConfig(target=directory, capacity=64, generation_config="none")
    )
    assert arguments["target"].default_sampling is None and len(lines) == 1


# --- nobody else ----------------------------------------------------------------------------------


@pytest.fixture
def unreadable(tiny_pair, tmp_path) -> str:
    """Return a target whose sampling parameters cannot be read without an error."""
    target = with_file(tiny_pair[0], tmp_path / "unreadable", **FILE | {"temperature": "hot"})
    with pytest.raises(InputError, match="temperature='hot'"):
        specjax.load(target)
    return target


def test_what_states_its_own_settings_does_not_read_them(
    unreadable, tmp_path, monkeypatch, capsys
) -> None:
    def check(*_, **options):
        raise InputError(f"enough: {options['settings']}")

    monkeypatch.setattr(losslessness, "check", check)
    assert main(lossless(unreadable)) == 2
    assert f"enough: {losslessness.SETTINGS}" in capsys.readouterr().err
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\n")
    pair, _, options = OnPrompts(
        target=unreadable, drafter="prompt-lookup", prompts=str(prompts)
    ).load("plan theory")
    assert pair.default_sampling is None and options.sampling == GREEDY


@pytest.mark.full
def test_texts_that_are_written_anew_do_not_depend_on_them(unreadable, tiny_pair, tmp_path) -> None:
    source = tmp_path / "texts.jsonl"
    write_source(source, ["def one(): pass", "import os, sys"])
    outputs = []
    for target in (unreadable, tiny_pair[0]):
        output = tmp_path / f"{Path(target).name}.jsonl"
        assert main(of_texts(target, source, "--output", str(output))) == 0
        with Generate(target, rows=1, max_new_tokens=6, capacity=32) as generate:
            batch = generate({"prompt": ["import os"]})
        outputs.append((output.read_text(), list(batch["tokens"][0])))
    assert outputs[0] == outputs[1]


def test_every_other_caller_of_load_states_that_it_does_not_read_them() -> None:
    readers = {"specjax/cli/generate.py", "specjax/cli/serve.py"}
    loads = {"pipeline.load", "specjax.load"}
    root, calls = ASSETS.parents[1], {}
    for folder in ("specjax", "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            source = path.read_text()
            if not re.search(r"(pipeline|specjax)\.load\(", source):
                continue
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in loads:
                    stated = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    calls_of_file = calls.setdefault(str(path.relative_to(root)), [])
                    calls_of_file.append(stated.get("generation_config"))
    assert readers < calls.keys()
    assert {path for path, stated in calls.items() if set(stated) != {"None"}} == readers


@pytest.mark.full
def test_an_engine_reads_none_for_a_client(generate) -> None:
    """Check that a client's text does not depend on the file of the server.

    A client states all its parameters.
    """
    assert generate.default_sampling == DEFAULTS
    sizes: dict[str, Any] = {"rows": 1, "widths": (1,), "drafts": (None,), "capacity": 64}
    with Engine(generate, **sizes, clients=ClientDrafts()) as engine:
        row = engine.open_row([5, 6, 7], max_new_tokens=4, listener=lambda event: None)
        assert row.settings["sampling"] == GREEDY.of_row()
        stated = engine.open_row(
            [5, 6, 7], max_new_tokens=4, temperature=0.9, listener=lambda event: None
        )
        assert stated.settings["sampling"] == Sampling(temperature=0.9).of_row()
        stated.close()
        row.close()
