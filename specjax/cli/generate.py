"""``specjax generate``: text from a target, drafted by what the command line names."""

import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax

from specjax import pipeline, text
from specjax.cli.defaults import GenerationConfig, read_choice, say_defaults
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
from specjax.sharding import mesh_for
from specjax.templates import check_is_chat


@dataclass(frozen=True)
class GenerateConfig:
    """Generate text; it is printed as it is accepted.

    Attributes:
        target: directory or hub id of the model to generate from; "embedded" is the small one that comes with specjax.
        drafter: METHOD:WHERE, such as draft-model:Qwen/Qwen3-0.6B, early-exit:4 (layers), streaming:256 or snapkv:256
            (the target with a cache of so many tokens) or prompt-lookup; or the bare directory or hub id of a checkpoint, whose
            config.json says what it is; or "none" for plain decoding. A draft model with another tokenizer drafts the tokens
            that both have, where these are half of the smaller vocabulary; draft-model-intersect:WHERE takes any.
            moa,tli=LAYERS:WHERE is a published Mixture of Attentions with target layer inference.
        prompt: the text to continue.
        prompts_file: instead of prompt, a file with one prompt a line (plain, or JSON with "prompt" or "text"); one batch.
        chat: put the prompt into the model's chat template.
        chat_template: a file with a Jinja chat template, in place of the tokenizer's own.
        chat_template_kwargs: what the template is given beside the messages, as JSON: '{"enable_thinking": false}'.
        draft: shape of a draft, by default the drafter's own: chain:LENGTH (chain:LENGTH,P ends it after its first token of a
            probability below P), complete:4,2,1, sampled:4,2,1, eagle, medusa, dynamic or dynamic:TOP_K,DEPTH,NODES; or auto,
            which measures and takes the fastest, of a compressed cache with the fastest of a few budgets.
        show_tree: draw the draft of which most was accepted in the first steps (of the first prompt), into this .png, .pdf or
            .svg.
        only_if_faster: measure first, and decode plainly where the drafter would not make these prompts faster.
        max_new_tokens: most tokens to emit for a prompt.
        temperature: 0 is greedy. By default this and the next three are the target's own, see generation_config; without any,
            the text is greedy.
        top_k: 0 is no limit.
        top_p: in (0, 1]; 1 is no limit.
        min_p: in [0, 1]; 0 is no limit.
        generation_config: "auto": the temperature, top_k, top_p and min_p of the target's generation_config.json stand for
            those that are not given, where it has do_sample true; "none": they are not read.
        seed: of the random draws.
        rule: how tokens are drawn and drafts verified; every one is exact. By default the one that suits the shape of
            the drafts. With "coupled" no drafter changes the text; "independent" draws each token with random numbers of its
            own, and verifies by the rule that fits the draft; "block" and "rejection" are two such rules for chains alone.
        ignore_eos: generate on after an end-of-sequence token.
        stop: strings before the first of which the text ends, such as the end of a turn where the model has no token for it.
        json: print one JSON object with token ids, text and statistics instead of a stream.
        dtype: of the params; by default float32 on CPU, bfloat16 elsewhere.
        weights: "int8", "w8a8", "int4" or "fp8" quantizes the weights, which are read in less time; "float" widens those of a
            checkpoint that has quantized ones; "stored" keeps what it has.
        cache_dtype: how the target remembers tokens: "float", in that type, or "int8", in 8 bits, which take about half of
            bfloat16's memory, and a quarter of float32's. The text is then that of plain decoding with such a cache.
        precision: "highest" keeps float32 products exact on TPU and GPU, whose default is faster and coarser.
        mesh: devices by axis, data and model.
    """

    target: str = "embedded"
    drafter: str = "none"
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
    generation_config: GenerationConfig = "auto"
    seed: int = 0
    rule: Rule | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    json: bool = False
    dtype: str = ""
    weights: str = schemes.AS_STORED
    cache_dtype: CacheType = "float"
    precision: Literal["default", "highest"] = "default"
    mesh: tuple[int, int] = field(default=(1, 1))


def load_generator(config: GenerateConfig) -> pipeline.TextGenerator:
    """The target with its tokenizer, and the drafter. Reads every config.json before any weight."""
    mesh = mesh_for(config.mesh)
    if config.drafter == "none":
        for name in ("draft", "only_if_faster", "show_tree"):
            if getattr(config, name) != getattr(GenerateConfig, name):
                raise InputError(f"drafter='none': {name}={getattr(config, name)} needs a drafter; name one or leave it out")
    shape = parse_shape(config.draft) if config.draft not in ("", "auto") else None
    kept = {"dtype": config.dtype or None, "weights": config.weights, "cache_dtype": config.cache_dtype}
    kept |= {"chat_template": config.chat_template, "chat_template_kwargs": config.chat_template_kwargs}
    kept |= {"generation_config": read_choice(config.generation_config)}
    return pipeline.load(config.target, config.drafter, draft=shape, mesh=mesh, **kept)


def read_prompts(config: GenerateConfig) -> list[str]:
    """The prompts asked for. Raises `InputError` when there are none, or one is given in two ways."""
    if bool(config.prompt) == bool(config.prompts_file):
        raise InputError("prompt: give either --prompt TEXT (not empty) or --prompts-file FILE")
    return [config.prompt] if config.prompt else text.read_prompts("prompts_file", config.prompts_file)


def run_generate(config: GenerateConfig) -> None:
    """``specjax generate``."""
    prompts = read_prompts(config)
    read_options(config)  # what is out of range is refused before anything is loaded
    text.check_stop(config.stop)
    check_is_chat(config.chat, config.chat_template, config.chat_template_kwargs)
    if config.show_tree:
        pictures.check_path("show_tree", config.show_tree)
    if config.precision != "default":
        jax.config.update("jax_default_matmul_precision", config.precision)
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
        waited_for = iter(run)
        first = next(waited_for)
    for pieces in itertools.chain([first], waited_for):
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
                "token_ids": list(made.tokens),
                "text": made.text,
                "statistics": asdict(made.statistics),
            }
            for prompt, prompt_ids, made in zip(prompts, ids, run.generations, strict=True)
        ]
        whole = outputs[0] if len(outputs) == 1 else {"outputs": outputs, "statistics": asdict(total)}
        print(json.dumps(whole | {"seconds": round(seconds, 4)}))
        return
    if streams:
        print()
    else:
        for prompt, made in zip(prompts, run.generations, strict=True):
            print(f"--- {prompt}\n{made.text}")
    print(
        f"{total.emitted} tokens in {seconds:.1f} s (compilation included); acceptance length "
        f"{total.acceptance_length:.2f}" + (f", acceptance rate {total.acceptance_rate:.2f}" if total.drafted else ""),
        file=sys.stderr,
    )


def read_options(config: GenerateConfig, default_sampling: Sampling | None = None) -> GenerationOptions:
    """The options of the generation, with the target's defaults. Refuses what is out of range."""
    options = pipeline.settings(
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        eos_token_ids=() if config.ignore_eos else None,
        rule=config.rule,
        **vars((default_sampling or GREEDY).with_explicit(**_stated(config))),
    )
    options.sampling.rows(1)
    return options


def _stated(config: GenerateConfig) -> dict[str, Any]:
    """Return how tokens are to be drawn, as far as the command says; None is what it leaves out."""
    return {name: getattr(config, name) for name in vars(GREEDY)}


def say_sampling(config: GenerateConfig, default_sampling: Sampling | None, options: GenerationOptions) -> None:
    """Say which of the target's defaults are in force, and which settings of the command are not read."""
    say_defaults(default_sampling, "greedy", _stated(config))
    if unread := pipeline.unread_settings(options.sampling):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unread)
        print(f"specjax: {names}: not read at --temperature 0, which is greedy", file=sys.stderr)


def _settle_drafter(
    config: GenerateConfig, generator: pipeline.TextGenerator, ids: list[list[int]], options: GenerationOptions
) -> Drafter | None:
    """The drafter to generate with, after what was asked to be measured and drawn first; None is plain decoding."""
    target, drafter = generator.target, generator.drafter
    if drafter is None:
        return None
    tokens, lengths = text.pad(ids)
    if config.draft == "auto":
        drafter, best = fastest_drafter(target, drafter, tokens, lengths, options=options)
        budget = f", budget {drafter.budget}" if isinstance(drafter, CompressedCache) else ""
        print(f"draft: {best.draft or 'plain decoding'}{budget}, expected {best.speedup:.2f}x", file=sys.stderr)
    if config.show_tree:
        if drafter is not None:
            snapshot = take_snapshot(target, drafter, ids[0], options=options)
            if speaks():
                pictures.save(snapshot.draw(generator.tokenizer), "show_tree", Path(config.show_tree))
        print(f"picture: {config.show_tree}" if drafter else "no picture: decoding plainly", file=sys.stderr)
    if config.only_if_faster and drafter is not None:
        speedup = trial_speedup(target, drafter, tokens, lengths, options=options)
        print(f"expected: {speedup:.2f}x with the drafter" + ("" if speedup > 1 else "; decoding plainly"), file=sys.stderr)
        drafter = drafter if speedup > 1 else None
    return drafter
