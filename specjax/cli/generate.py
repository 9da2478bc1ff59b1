"""The command ``specjax generate``: generate text from a target, with or without a drafter."""

import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specjax import pipeline, text
from specjax.cli.defaults import GenerationConfig, loading_options, say_defaults
from specjax.cli.grammars import read_grammar
from specjax.decoding.options import GenerationOptions
from specjax.drafters import CompressedCache, Drafter
from specjax.drafts.names import parse_shape
from specjax.errors import InputError
from specjax.models.quantization import schemes
from specjax.models.quantized_cache import CacheType
from specjax.planning.choice import fastest_drafter
from specjax.planning.costs import trial_speedup
from specjax.processes import speaks
from specjax.progress import waiting
from specjax.reports import pictures
from specjax.reports.snapshot import take_snapshot
from specjax.sampling import GREEDY, Rule, Sampling
from specjax.templates import check_is_chat
from specjax.token_biases import TokenBiases


@dataclass(frozen=True)
class GenerateConfig:
    """Generate text. It is printed while it is generated.

    Attributes:
        target: the model to generate from, a directory, a hub id, or a folder in a bucket (s3://,
            gs://); "embedded" is the small model that comes with specjax.
        drafter: the drafter as METHOD:WHERE, such as draft-model:Qwen/Qwen3-0.6B, early-exit:4
            (layers), prompt-lookup, or streaming:256 or snapkv:256 (the target with a KV cache of
            that many tokens). Also the directory or hub id of a checkpoint, whose config.json gives
            the method; or "none" for plain decoding. A draft model with a different tokenizer
            drafts only the tokens that both vocabularies share. These must be at least half of the
            smaller vocabulary, except with draft-model-intersect:WHERE. moa,tli=LAYERS:WHERE is a
            published Mixture of Attentions with target layer inference.
        corpus: text files that the drafter suffix drafts from beside the text itself, of at most 16
            MiB together.
        prompt: text to continue.
        prompts_file: file with one prompt per line (plain text, or JSON with "prompt" or "text"),
            instead of prompt; they are decoded as one batch.
        chat: apply the model's chat template to the prompt.
        chat_template: file with a Jinja chat template that replaces the tokenizer's own.
        chat_template_kwargs: variables for the chat template, as JSON: '{"enable_thinking":
            false}'.
        draft: shape of the drafts; the default is the drafter's own. One of chain:LENGTH,
            chain:LENGTH,P (ends after the first token with a probability below P), complete:4,2,1,
            sampled:4,2,1, eagle, medusa, dynamic, dynamic:TOP_K,DEPTH,NODES. "auto" measures and
            uses the fastest; for a compressed cache it also measures a few budgets.
        show_tree: draw the draft with the most accepted tokens in the first steps (of the first
            prompt) to this .png, .pdf or .svg file.
        only_if_faster: measure first, and decode plainly if the drafter would not be faster on
            these prompts.
        max_new_tokens: maximum number of tokens to generate per prompt.
        temperature: sampling temperature; 0 is greedy. This option, the next three and
            repetition_penalty default to the target's own values, see generation_config; otherwise
            to greedy decoding.
        top_k: sample from this many most likely tokens; 0 is no limit.
        top_p: sample from the most likely tokens with this total probability, in (0, 1]; 1 is no
            limit.
        min_p: minimum probability of a token relative to the most likely one, in [0, 1]; 0 is no
            limit.
        presence_penalty: is subtracted from the logits of tokens that were generated, from -2 to 2;
            0 is none.
        frequency_penalty: is subtracted for each time that a token was generated, from -2 to 2; 0
            is none.
        repetition_penalty: divides the positive logits of tokens of the prompt and the output, and
            multiplies the negative ones; 1 is none.
        bad_words: words that must not be generated.
        generation_config: "auto" uses temperature, top_k, top_p, min_p and repetition_penalty of
            the target's generation_config.json for options that are not given, if the file has
            do_sample true; "none" ignores the file.
        seed: random seed.
        rule: how tokens are sampled and drafts verified; every rule is exact. The default is the
            best rule for the draft shape. With "coupled", the text is the same with every
            drafter. "independent" samples each token with new random numbers and verifies with
            the rule for the draft shape. "block" and "rejection" are two such rules, for chains
            only.
        ignore_eos: continue after an end-of-sequence token.
        stop: stop strings; the text ends before the first of them. Use one for the end of a turn if
            the model has no token for it.
        json_schema: file with a JSON schema; the text is JSON that the schema accepts.
        regex: regular expression that the whole text matches.
        choice: the text is one of these.
        grammar_after: text or added token, such as </think>, after which the grammar of the three
            options before begins; what comes before it is free.
        thinking_budget: largest number of tokens of each thought; then its end is written. 0 ends a
            thought at once.
        thought_tokens: texts that begin and end a thought, such as "<think>" "</think>"; the
            default is what the tokenizer's response template or chat template has.
        json: print one JSON object with token ids, text and statistics at the end.
        dtype: data type of the params, float32, bfloat16 or float16; the default is float32 on CPUs
            and bfloat16 elsewhere.
        weights: "int8", "w8a8", "int4" or "fp8" quantizes the weights, so that they are read
            faster; "float" dequantizes a quantized checkpoint; "stored" keeps the weights as they
            are.
        cache_dtype: data type of the target's KV cache: "float" is that of the params; "int8" needs
            about half of the memory of bfloat16, or a quarter of float32's. The text is then that
            of plain decoding with such a cache.
        precision: "highest" makes float32 products exact on TPUs and GPUs; the default is faster
            and less precise.
        mesh: number of devices of each mesh axis, data and model.
    """

    target: str = "embedded"
    drafter: str = "none"
    corpus: tuple[str, ...] = ()
    prompt: str = ""
    prompts_file: str = ""
    chat: bool = False
    chat_template: str = ""
    chat_template_kwargs: str = ""
    draft: str = ""
    show_tree: str = ""
    only_if_faster: bool = False
    max_new_tokens: int = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    bad_words: tuple[str, ...] = ()
    generation_config: GenerationConfig = "auto"
    seed: int = 0
    rule: Rule | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    json_schema: str = ""
    regex: str = ""
    choice: tuple[str, ...] = ()
    grammar_after: str = ""
    thinking_budget: int | None = None
    thought_tokens: tuple[str, str] | None = None
    json: bool = False
    dtype: str = ""
    weights: str = schemes.AS_STORED
    cache_dtype: CacheType = "float"
    precision: Literal["default", "highest"] = "default"
    mesh: tuple[int, int] = (1, 1)


def load_generator(config: GenerateConfig) -> pipeline.TextGenerator:
    """Load the target with its tokenizer, and the drafter.

    Every config.json is read before any weights.
    """
    options = loading_options(config)
    if config.drafter == "none":
        for name in ("draft", "only_if_faster", "show_tree"):
            if getattr(config, name) != getattr(GenerateConfig, name):
                raise InputError(
                    f"drafter='none': {name}={getattr(config, name)} needs a drafter; name one, or"
                    " leave it out"
                )
    shape = parse_shape(config.draft) if config.draft not in ("", "auto") else None
    return pipeline.load(config.target, config.drafter, draft=shape, **options)


def read_prompts(config: GenerateConfig) -> list[str]:
    """Return the prompts of the command line.

    Raises:
        InputError: there are no prompts, or they are given in two ways.
    """
    if bool(config.prompt) == bool(config.prompts_file):
        raise InputError("prompt: give either --prompt TEXT (not empty) or --prompts-file FILE")
    return (
        [config.prompt] if config.prompt else text.read_prompts("prompts_file", config.prompts_file)
    )


def run_generate(config: GenerateConfig) -> None:
    """Run ``specjax generate``."""
    prompts = read_prompts(config)
    read_options(config)  # refuse invalid options before anything is loaded
    text.check_stop(config.stop)
    check_is_chat(config.chat, config.chat_template, config.chat_template_kwargs)
    if config.show_tree:
        pictures.check_path("show_tree", config.show_tree)
    generator = load_generator(config)
    options = read_options(config, generator.default_sampling)
    say_sampling(config, generator.default_sampling, options)
    ids = [generator.encode(prompt, config.chat) for prompt in prompts]
    generator = replace(generator, drafter=_settle_drafter(config, generator, ids, options))

    streams = len(prompts) == 1 and not config.json
    started = time.perf_counter()
    with waiting("compiling" if streams else "compiling and generating"):
        steps = pipeline.LOOK_EVERY if streams or config.stop else None
        run = generator.start(ids, options, stop=config.stop, steps=steps, is_chat=config.chat)
        pieces_by_step = iter(run)
        first = next(pieces_by_step)
    for pieces in itertools.chain([first], pieces_by_step):
        if streams:
            print(pieces[0], end="", flush=True)
    seconds = time.perf_counter() - started
    total = run.statistics
    assert total is not None

    if config.json:
        outputs = [
            {
                "prompt": prompt,
                "prompt_token_ids": prompt_ids,
                "token_ids": list(generation.tokens),
                "text": generation.text,
                "statistics": asdict(generation.statistics),
                **(
                    {}
                    if options.grammar is None
                    else {"grammar_completed": generation.grammar_completed}
                ),
            }
            for prompt, prompt_ids, generation in zip(prompts, ids, run.generations, strict=True)
        ]
        content = (
            outputs[0] if len(outputs) == 1 else {"outputs": outputs, "statistics": asdict(total)}
        )
        print(json.dumps(content | {"seconds": round(seconds, 4)}))
        return
    if streams:
        print()
    else:
        for prompt, generation in zip(prompts, run.generations, strict=True):
            print(f"--- {prompt}\n{generation.text}")
    print(
        f"{total.emitted} tokens in {seconds:.1f} s (compilation included); acceptance length "
        f"{total.acceptance_length:.2f}"
        + (f", acceptance rate {total.acceptance_rate:.2f}" if total.drafted else ""),
        file=sys.stderr,
    )
    names = () if generator.drafter is None else generator.drafter.part_names
    counts = zip(names, total.accepted_by, total.accepted_only_by, strict=True)
    for name, accepted, only in counts:
        print(
            f"{name} drafted {accepted} of the {total.accepted} accepted tokens, {only} of them"
            " alone",
            file=sys.stderr,
        )


def read_options(
    config: GenerateConfig, default_sampling: Sampling | None = None
) -> GenerationOptions:
    """Return the options of the generation, with the target's defaults; refuse invalid ones."""
    options = pipeline.settings(
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        eos_token_ids=() if config.ignore_eos else None,
        rule=config.rule,
        grammar=read_grammar(config.json_schema, config.regex, config.choice, config.grammar_after),
        bad_words=config.bad_words,
        thinking_budget=config.thinking_budget,
        thought_tokens=config.thought_tokens,
        **vars((default_sampling or GREEDY).with_explicit(**_stated(config))),
    )
    options.sampling.rows(1)
    return options


def _stated(config: GenerateConfig) -> dict[str, Any]:
    """Return the sampling parameters of the command line; None for options that were not given."""
    return {name: getattr(config, name) for name in vars(GREEDY)}


def say_sampling(
    config: GenerateConfig, default_sampling: Sampling | None, options: GenerationOptions
) -> None:
    """Print which of the target's defaults apply, and which options have no effect."""
    say_defaults(default_sampling, "greedy", _stated(config))
    if unread := pipeline.unread_settings(options.sampling):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unread)
        print(f"specjax: {names}: ignored at --temperature 0, which is greedy", file=sys.stderr)


def _settle_drafter(
    config: GenerateConfig,
    generator: pipeline.TextGenerator,
    ids: list[list[int]],
    options: GenerationOptions,
) -> Drafter | None:
    """Return the drafter to use, after measuring it and drawing a draft if the options ask for it.

    None is plain decoding.
    """
    target, drafter = generator.target, generator.drafter
    if drafter is None:
        return None
    tokens, lengths = text.pad(ids)
    if isinstance(options.biases, TokenBiases):
        options = replace(options, biases=options.biases.encoded(generator.tokenizer))
    if options.is_constrained:
        # The measurements do not run masked steps. The rule is the one of constrained texts.
        left_out = "grammar" if options.grammar is not None else "thinking budget"
        rule = options.rule or "coupled"
        options = replace(options, grammar=None, thinking_budget=None, rule=rule)
        if config.draft == "auto" or config.only_if_faster or config.show_tree:
            print(f"measurements and pictures are of text without the {left_out}", file=sys.stderr)
    if config.draft == "auto":
        drafter, best = fastest_drafter(target, drafter, tokens, lengths, options=options)
        budget = f", budget {drafter.budget}" if isinstance(drafter, CompressedCache) else ""
        print(
            f"draft: {best.draft or 'plain decoding'}{budget}, expected {best.speedup:.2f}x",
            file=sys.stderr,
        )
    if config.show_tree:
        if drafter is not None:
            snapshot = take_snapshot(target, drafter, ids[0], options=options)
            if speaks():
                pictures.save(
                    snapshot.draw(generator.tokenizer), "show_tree", Path(config.show_tree)
                )
        print(
            f"picture: {config.show_tree}" if drafter else "no picture: decoding plainly",
            file=sys.stderr,
        )
    if config.only_if_faster and drafter is not None:
        speedup = trial_speedup(target, drafter, tokens, lengths, options=options)
        print(
            f"expected: {speedup:.2f}x with the drafter"
            + ("" if speedup > 1 else "; decoding plainly"),
            file=sys.stderr,
        )
        drafter = drafter if speedup > 1 else None
    return drafter
