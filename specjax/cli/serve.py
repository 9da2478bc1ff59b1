"""The command ``specjax serve``: an OpenAI-compatible server."""

import math
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from specjax import decoding, pipeline
from specjax.cli.defaults import GenerationConfig, loading_options, say_defaults
from specjax.drafters import NoDraft
from specjax.drafters.methods.mixture_of_attentions import with_told
from specjax.errors import InputError
from specjax.grammars import GrammarChecker, GrammarLimits
from specjax.models.quantization import schemes
from specjax.models.quantized_cache import CacheType
from specjax.processes import speaks
from specjax.serving import ClientDrafts, Engine, earlier_answers, follow, memory
from specjax.sharding import spans_processes


@dataclass(frozen=True)
class ServeConfig:
    """Serve a model with an OpenAI-compatible API: /v1/completions and /v1/chat/completions.

    There is also a page to try the model at /, and metrics for Prometheus at /metrics.

    Attributes:
        target: the model to serve, a directory, a hub id, or a folder in a bucket (s3://, gs://);
            "embedded" is the small model that comes with specjax.
        drafter: the drafter, as for generate: METHOD:WHERE, or the directory or hub id of a
            checkpoint; "none" for plain decoding.
        corpus: text files that the drafter suffix drafts from beside each text itself, of at most
            16 MiB together. They are the same for all requests. Clients that draft themselves do
            not get them.
        drafts: draft shapes among which the engine chooses by load, such as none chain:3
            chain:6; "auto" lets the engine choose the shapes. With "clients" among them, clients
            may draft themselves (/v1/drafts), with the same drafter. With only "clients", or no
            value, all other requests are decoded plainly.
        told: what the server sends to clients with Mixture of Attentions for each token: summaries,
            which the server computes (the default), or entries, the KV entries of the target's
            layers, which need many more bytes.
        rows: maximum number of sequences that are decoded together (vLLM: max_num_seqs).
        capacity: maximum number of tokens of a sequence, prompt and output (vLLM: max_model_len); 0
            is what the models support, limited by cache_gb. Without cache_gb the limit is a quarter
            of the memory that is free after loading, but at least 4096 tokens.
        max_queue: maximum number of waiting requests; further requests are answered with status
            429.
        urgent_after: number of decode calls after which a waiting request goes before all
            priorities.
        reread: "on" reads texts that have ended once more while the server is idle, so that the
            next turn of a chat finds them in the prefix cache; "off" does not. Texts are the same.
        client_rows: maximum number of rows for the drafting clients of one API key, or of one
            address if there are no keys; further clients wait. 0 is half of ``rows``, at least 1.
        client_sessions: maximum number of open sessions of such clients. A further session replaces
            one that has ended or whose client is disconnected; otherwise it is refused, and the
            client tries again. 0 is half of all sessions.
        cache_gb: memory for the KV caches, including the states of rows and of shared prefixes, in
            GB of 10**9 bytes; 0 is enough for 1024 tokens in every row.
        page: tokens per page of the KV cache (vLLM: block_size); 0 is 64, or 256 on TPUs.
        chunk: tokens of a prompt that are prefilled at a time; 0 is 64 on CPUs and 512 elsewhere.
        host: address to listen at; an address that other machines can reach requires api_key_file
            or no_api_key.
        port: port to listen at; 0 is any free port.
        api_key_file: file with the API keys that clients must send, one per line.
        no_api_key: allow everybody who can reach the server.
        share_prefixes: let the requests of all API keys share cached prefixes and earlier answers.
            Without this option each key has its own, so that no client can find out another's
            prompts from response times.
        tls_cert: file with the server's certificate (PEM), to serve https; requires tls_key.
        tls_key: file with the certificate's private key, without a password.
        chat_template: file with a Jinja chat template that replaces the tokenizer's own.
        chat_template_kwargs: variables for the chat template, as JSON: '{"enable_thinking":
            false}'. Those of a request override them.
        generation_config: "auto" uses temperature, top_k, top_p and min_p of the target's
            generation_config.json for requests that do not give them, if the file has do_sample
            true; "none" ignores the file, and the default temperature is 1, as usual in this API.
        served_model_name: model names in the API; the default is the target's.
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
        max_logprobs: maximum number of top log-probabilities that a request may ask for; 0 disables
            logprobs.
        max_prediction: maximum length of a draft that is copied from a predicted output; 0 disables
            predictions.
        earlier_answers: number of tokens of earlier answers that are kept in memory for each API
            key and cache_salt, for later answers to be drafted from, such as 65536; it needs
            --drafter suffix or token-recycling, alone or together with others. 0 keeps none.
        grammars: "on" lets requests constrain their texts by JSON schemas, regexes and grammars;
            "auto" does so wherever it is supported, and "off" saves the memory of the programs.
        grammar_characters: maximum number of characters of a grammar.
        grammar_depth: maximum depth of nested brackets in a grammar.
        grammar_megabytes: memory that compiling a grammar may take, in MB of 10**6 bytes.
        grammar_seconds: CPU time that compiling a grammar may take.
        thought_tokens: texts that begin and end a thought, such as "<think>" "</think>", for
            requests with a thinking budget; the default is what the tokenizer's response template
            or chat template has. Thinking budgets need grammars.
        penalties: "on" lets requests have penalties, biases, allowed tokens and banned words;
            "auto" does so wherever it is supported, and "off" saves the memory: eight bytes for
            each row and token of the vocabulary.
        per_request_spec_decode_metrics: report in each answer how many drafted tokens were
            accepted.
        drain_seconds: seconds that running requests have to finish after SIGTERM.
        reader_seconds: seconds after which a client is disconnected that does not read its answer.
        max_connections: maximum number of connections, of which one address may have a quarter.
            Four more are reserved for /health and /metrics.
        cors_origin: origin of web pages, such as https://chat.example, whose scripts may use the
            server from a browser; "*" allows all. May be given several times.
        trusted_proxy: address or network of a proxy from which all connections may come. May be
            given several times.
        log: one line for each request on standard error: "text", "json", or "off". A line has ids,
            numbers and the model, never text.
        warm: compile all programs before the first request is answered. Otherwise the server is
            ready when the programs for plain requests are compiled, and the others follow; texts
            are the same.
    """

    target: str = "embedded"
    drafter: str = "none"
    corpus: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ("auto",)
    told: Literal["", "summaries", "entries"] = ""
    rows: int = 8
    capacity: int = 0
    max_queue: int = 64
    urgent_after: int = 256
    reread: Literal["on", "off"] = "on"
    client_rows: int = 0
    client_sessions: int = 0
    cache_gb: float = 0.0
    page: int = 0
    chunk: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str = ""
    no_api_key: bool = False
    share_prefixes: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    chat_template: str = ""
    chat_template_kwargs: str = ""
    generation_config: GenerationConfig = "auto"
    served_model_name: tuple[str, ...] = ()
    dtype: str = ""
    weights: str = schemes.AS_STORED
    cache_dtype: CacheType = "float"
    precision: Literal["default", "highest"] = "default"
    mesh: tuple[int, int] = (1, 1)
    max_logprobs: int = 20
    max_prediction: int = 16
    earlier_answers: int = 0
    grammars: Literal["auto", "on", "off"] = "auto"
    penalties: Literal["auto", "on", "off"] = "auto"
    grammar_characters: int = GrammarLimits.characters
    grammar_depth: int = GrammarLimits.depth
    grammar_megabytes: float = GrammarLimits.megabytes
    grammar_seconds: float = GrammarLimits.seconds
    thought_tokens: tuple[str, str] | None = None
    per_request_spec_decode_metrics: bool = False
    drain_seconds: float = 30.0
    reader_seconds: float = 60.0
    max_connections: int = 512
    cors_origin: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    trusted_proxy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    log: Literal["text", "json", "off"] = "text"
    warm: bool = False


def run_serve(config: ServeConfig) -> int:
    """Run ``specjax serve``."""
    from specjax.serving.http import run  # an import that no other command needs
    from specjax.serving.http.access import check_origins
    from specjax.serving.http.places import networks
    from specjax.serving.http.protocol import ConnectionLimits
    from specjax.serving.http.request_log import show_requests
    from specjax.serving.http.service import AppOptions, Service

    check_numbers(config)
    read_drafts(config)
    show_requests(config.log)
    networks(config.trusted_proxy)  # refuse invalid addresses
    check_origins(config.cors_origin)
    keys = read_keys(config)
    run.check_tls(config.tls_cert, config.tls_key)
    tls = (config.tls_cert, config.tls_key) if config.tls_cert else None
    names = config.served_model_name or (config.target,)
    if not speaks():  # of several processes, the first listens for requests and decides when to end
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        follow(**engine_options(config)[0])
        return 0
    with run.bind(config.host, config.port) as bound:
        local = run.is_loopback(bound)
        if not local and not keys and not config.no_api_key:
            raise InputError(
                f"host={config.host!r}: other machines can reach it; give --api-key-file FILE, or"
                " --no-api-key to allow all"
            )
        bounds = ConnectionLimits(
            reader_seconds=config.reader_seconds,
            connections=config.max_connections,
            trusted=config.trusted_proxy,
        )
        with run.starting(bound, bounds=bounds, tls=tls):
            arguments, reason = engine_options(config)
            checker = grammar_checker(config, arguments)
            engine = Engine(**arguments)
        with engine, checker or nullcontext():
            options = AppOptions(
                names=names,
                api_keys=keys,
                only_loopback=local and not keys,
                max_texts=config.rows + config.max_queue,
                with_acceptance=config.per_request_spec_decode_metrics,
                cors_origins=config.cors_origin,
                client_sessions=config.client_sessions or None,
                trusted_proxies=config.trusted_proxy,
                share_prefixes=config.share_prefixes,
            )
            where = run.address(bound, tls is not None)
            message = (
                f"{where} is ready: {names[0]}, {config.rows} rows, texts of up to"
                f" {engine.capacity} tokens ({reason})"
            )
            service = Service(engine, options, checker)
            status = run.serve(
                service,
                bound,
                bounds=bounds,
                drain_seconds=config.drain_seconds,
                message=message,
                tls=tls,
            )
    if engine.is_compiling:  # do not wait for the compiler, which takes minutes for a large model
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def read_drafts(config: ServeConfig) -> tuple[tuple[str | None, ...] | None, bool]:
    """Return the draft shapes, None for the engine's choice; and whether clients may draft.

    Examples:
        >>> from specjax.cli.serve import ServeConfig, read_drafts
        >>> read_drafts(ServeConfig())
        (None, False)
        >>> read_drafts(ServeConfig(drafts=("chain:3", "none", "clients")))
        (('chain:3', None), True)
        >>> read_drafts(ServeConfig(drafts=()))  # clients draft, or nobody
        ((None,), True)
    """
    words = tuple(word for word in config.drafts if word != "clients")
    takes_drafts = not config.drafts or len(words) < len(config.drafts)
    if words == ("auto",):
        return None, takes_drafts
    if "auto" in words:
        raise InputError(
            f"drafts={' '.join(config.drafts)}: auto lets the engine choose shapes; give either"
            " auto or shapes"
        )
    return tuple(None if word == "none" else word for word in words) or (None,), takes_drafts


def make_engine(config: ServeConfig) -> Engine:
    """Load the models and compile the engine."""
    return Engine(**engine_options(config)[0])


def engine_options(config: ServeConfig) -> tuple[dict[str, Any], str]:
    """Load the models, and return the arguments of `Engine` for every process.

    Also returns the reason for the capacity, in words.
    """
    shapes, takes_drafts = read_drafts(config)
    generator = pipeline.load(config.target, config.drafter, **loading_options(config))
    say_defaults(generator.default_sampling, "temperature 1")
    drafter = generator.drafter
    if config.told:
        if drafter is None or not takes_drafts:
            raise InputError(
                f"told={config.told!r}: it applies to clients and their drafter; give --drafts and"
                " --drafter, or leave it out"
            )
        drafter = with_told(drafter, config.told)
    page, pages = config.page or memory.usual_page(), None
    may_constrain, may_adjust = has_grammars(config, generator), has_penalties(config, generator)
    sizes = {
        "rows": config.rows,
        "page": page,
        "chunk": config.chunk or None,
        "grammars": may_constrain,
        "penalties": may_adjust,
    }
    capacity, reason = choose_capacity(config, generator, sizes)
    if config.cache_gb:
        pages = memory.pages_in(
            config.cache_gb - _answer_bytes(config, generator) / 1e9,
            generator.target,
            generator.drafter,
            **sizes,
            capacity=capacity,
        )
    options = {
        "target": generator,
        "rows": config.rows,
        "drafts": shapes,
        "capacity": capacity,
        "pages": pages,
        "page": page,
        "chunk": config.chunk or None,
        "max_waiting": config.max_queue,
        "urgent_after": config.urgent_after,
        "reread": config.reread == "on",
        "max_logprobs": config.max_logprobs,
        "max_prediction": config.max_prediction,
        "earlier_answers": config.earlier_answers,
        "grammars": may_constrain,
        "penalties": may_adjust,
        "clients": ClientDrafts(drafter) if takes_drafts else None,
        "thought_tokens": config.thought_tokens,
        "client_rows": config.client_rows or None,
        "warm": config.warm,
    }
    return options, reason


def has_grammars(config: ServeConfig, generator: pipeline.TextGenerator) -> bool:
    """Return whether requests may have grammars.

    Raises:
        InputError: they shall, by ``--grammars on``, and this model does not support it.
    """
    if config.grammars == "off":
        return False
    try:
        generator.grammar_compiler  # noqa: B018 - it is built here, which refuses some tokenizers
    except InputError as error:
        if config.grammars == "on":
            raise InputError(f"grammars='on': {error}; give auto or off") from None
        print(f"requests may not have grammars: {error}", file=sys.stderr)
        return False
    return True


def grammar_checker(config: ServeConfig, arguments: dict[str, Any]) -> GrammarChecker | None:
    """Return the checker of requests' grammars, if the engine of these arguments takes grammars.

    Its process starts while the engine compiles.
    """
    if not arguments["grammars"]:
        return None
    limits = GrammarLimits(
        config.grammar_characters,
        config.grammar_depth,
        config.grammar_megabytes,
        config.grammar_seconds,
    )
    return GrammarChecker(arguments["target"].grammar_compiler, limits)


def has_penalties(config: ServeConfig, generator: pipeline.TextGenerator) -> bool:
    """Return whether requests may have penalties, biases and banned words.

    Raises:
        InputError: they shall, by ``--penalties on``, and the mesh does not support it.
    """
    spans = spans_processes(generator.target.mesh)
    if spans and config.penalties == "on":
        raise InputError(
            "penalties='on': a mesh that spans processes does not support them; give auto or off"
        )
    return not spans and config.penalties != "off"


def choose_capacity(
    config: ServeConfig, generator: pipeline.TextGenerator, sizes: dict[str, Any]
) -> tuple[int, str]:
    """Return the maximum number of tokens of a text, and the reason for it in words.

    ``sizes`` are arguments of `specjax.serving.memory.capacity_in`.
    """
    target, drafter = generator.target, generator.drafter
    if config.capacity:
        return config.capacity, "set by --capacity"
    positions = decoding.most_positions(target, drafter or NoDraft())
    usual = min(positions, memory.USUAL_CAPACITY)
    if config.cache_gb:
        memory_left = config.cache_gb * 1e9 - _answer_bytes(config, generator)
        capacity = memory.capacity_in(memory_left, target, drafter, **sizes)
        why = f"in {config.cache_gb:g} GB of caches"
    elif spans_processes(target.mesh):  # all processes must choose the same capacity
        capacity, why = usual, "the default; see --capacity and --cache-gb"
    elif (free := memory.free_bytes(target.mesh)) is None:
        capacity, why = usual, "the default, as the free memory is unknown"
    else:
        memory_left = free / 4 - _answer_bytes(config, generator)
        capacity = memory.capacity_in(memory_left, target, drafter, **sizes)
        # Less is rounded to a power of two, so that the next start finds its compiled programs.
        if capacity < positions:
            capacity = max(usual, 1 << (capacity.bit_length() - 1))
        why = f"in a quarter of {free / 1e9:.3g} GB of free memory, or at least {usual}"
    if capacity == positions:
        return capacity, "all that the models support"
    return capacity, f"{why}; the models support {positions}: see --capacity"


def _answer_bytes(config: ServeConfig, generator: pipeline.TextGenerator) -> int:
    """Return the bytes of earlier answers on all devices together, which count as caches."""
    mesh = generator.target.mesh
    return earlier_answers.index_bytes(config.rows, config.earlier_answers, mesh)


def check_numbers(config: ServeConfig) -> None:
    """Refuse numbers that are out of range before anything is loaded.

    `Engine` checks the numbers whose range depends on the models.
    """
    minimums: dict[str, float] = {"rows": 1, "max_connections": 1, "reader_seconds": 1}
    minimums |= {"grammar_characters": 1, "grammar_depth": 1, "urgent_after": 1}
    minimums |= {"grammar_megabytes": 32, "grammar_seconds": 0.1}
    for option in fields(config):
        value = getattr(config, option.name)
        if isinstance(value, int | float) and not minimums.get(option.name, 0) <= value < math.inf:
            raise InputError(
                f"{option.name}={value}: must be at least {minimums.get(option.name, 0)}"
            )
    earlier_answers.check_capacity(config.earlier_answers, config.rows)
    if config.client_rows > config.rows:
        raise InputError(f"client_rows={config.client_rows}: must be at most rows={config.rows}")
    if not all(config.served_model_name or config.target):
        raise InputError("served_model_name: a name is empty; leave it out")


def read_keys(config: ServeConfig) -> tuple[str, ...]:
    """Return the API keys of the key file; none if there is no file."""
    if not config.api_key_file:
        return ()
    if config.no_api_key:
        raise InputError("no_api_key: api_key_file is given too; give only one of them")
    try:
        lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"api_key_file={config.api_key_file!r}: cannot be read ({error})"
        ) from None
    keys = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not keys or not all(
        len(key) >= 8 and key.isascii() and key.isprintable() and " " not in key for key in keys
    ):
        raise InputError(
            f"api_key_file={config.api_key_file!r}: must have one key per line, each of at least 8"
            " visible ASCII characters without spaces"
        )
    return keys
