"""``specjax serve``: an OpenAI-compatible server."""

import math
import os
import signal
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from specjax import decoding, pipeline
from specjax.cli.defaults import GenerationConfig, read_choice, say_defaults
from specjax.drafters import NoDraft
from specjax.drafters.methods.mixture_of_attentions import with_told
from specjax.errors import InputError
from specjax.models.quantization import schemes
from specjax.models.quantized_cache import CacheType
from specjax.processes import speaks
from specjax.serving import ClientDrafts, Engine, follow, memory
from specjax.sharding import mesh_for, spans_processes


@dataclass(frozen=True)
class ServeConfig:
    """Serve a model under OpenAI's interface: /v1/completions, /v1/chat/completions; a page at /, metrics at /metrics.

    Attributes:
        target: directory or hub id of the model to generate from; "embedded" is the small one that comes with specjax.
        drafter: as for generate: METHOD:WHERE, or the directory or hub id of a checkpoint; "none" for plain decoding.
        drafts: shapes of drafts to choose from by load, such as none chain:3 chain:6; "auto": the engine's choice. With
            "clients" among them, clients may draft for themselves (/v1/drafts), with the drafter that is named; with that word
            alone, or none at all, nobody else's texts are drafted.
        told: what clients with Mixture of Attentions are told of each token: summaries, which are made here (the default), or
            entries, all that the target's layers remember, which take many more bytes.
        rows: most texts that are generated at a time.
        capacity: most tokens of a text, prompt and output; 0: what the models have positions for, as far as cache_gb holds it.
            Without cache_gb, as far as a quarter of the memory does that is free when the models are loaded, but at least 4096.
        max_queue: most requests that wait for a row; more are answered with 429.
        client_rows: most rows that clients of one API key, or of one address where there are no keys, have at a time, their
            drafts being verified; further ones wait. 0: half of ``rows``, at least 1.
        client_sessions: most texts that such clients have open at a time. A further one takes the place of one that has
            ended, or whose client is away; else it is refused, and the client tries again. 0: half of all that are taken.
        cache_gb: memory of the caches, states of rows and of shared prefixes among them, in GB of 10**9 bytes; 0: enough for
            1024 tokens in every row.
        page: tokens of a page of the caches; 0: 64, on a TPU 256.
        chunk: tokens of a prompt that are read at a time; 0: 64 on a CPU, else 512.
        host: to listen at; one that other machines reach needs a key, or no_api_key.
        port: to listen at; 0: any that is free.
        api_key_file: file with the key that clients have to send, or with several, one a line.
        no_api_key: let everybody in who reaches it.
        tls_cert: file with the server's certificate (PEM): https in place of http; with tls_key.
        tls_key: file with its private key, without a password.
        chat_template: a file with a Jinja chat template, in place of the tokenizer's own.
        chat_template_kwargs: what the template is given beside the messages, as JSON: '{"enable_thinking": false}'. Those of a
            request go over these.
        generation_config: "auto": the temperature, top_k, top_p and min_p of the target's generation_config.json stand for
            those that a request does not give, where it has do_sample true; "none": they are not read, and the temperature is
            then 1, as everywhere with this interface.
        served_model_name: names that clients call the model by; by default the target's.
        dtype: of the params; by default float32 on CPU, bfloat16 elsewhere.
        weights: "int8", "w8a8", "int4" or "fp8" quantizes the weights, which are read in less time; "float" widens those of a
            checkpoint that has quantized ones; "stored" keeps what it has.
        cache_dtype: how the target remembers tokens: "float", in that type, or "int8", in 8 bits, which take about half of
            bfloat16's memory, and a quarter of float32's. The text is then that of plain decoding with such a cache.
        precision: "highest" keeps float32 products exact on TPU and GPU, whose default is faster and coarser.
        mesh: devices by axis, data and model.
        max_logprobs: most likeliest tokens that a request may ask for; 0: no logprobs.
        max_prediction: longest draft that is copied from a predicted output; 0: no predictions.
        per_request_spec_decode_metrics: tell in each answer how its drafts fared.
        drain_seconds: that requests have to end after SIGTERM.
        reader_seconds: after which a client is dropped that takes nothing of what is sent to it.
        max_connections: at a time; a quarter of them from one address. Four more may ask for /health and /metrics.
        cors_origin: origin of web pages, such as https://chat.example, whose scripts may use the server from a browser; "*":
            of all pages. May be given several times.
        trusted_proxy: address of a proxy, or network of several, from which all connections may come.
        warm: compile every program before the first request is answered. Otherwise plain requests are answered as soon as
            their programs are compiled, and the others follow meanwhile; texts are the same.
    """

    target: str = "embedded"
    drafter: str = "none"
    drafts: tuple[str, ...] = ("auto",)
    told: Literal["", "summaries", "entries"] = ""
    rows: int = 8
    capacity: int = 0
    max_queue: int = 64
    client_rows: int = 0
    client_sessions: int = 0
    cache_gb: float = 0.0
    page: int = 0
    chunk: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str = ""
    no_api_key: bool = False
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
    mesh: tuple[int, int] = field(default=(1, 1))
    max_logprobs: int = 20
    max_prediction: int = 16
    per_request_spec_decode_metrics: bool = False
    drain_seconds: float = 30.0
    reader_seconds: float = 60.0
    max_connections: int = 512
    cors_origin: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    trusted_proxy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    warm: bool = False


def run_serve(config: ServeConfig) -> int:
    """``specjax serve``."""
    from specjax.serving.http import run  # what no other command needs
    from specjax.serving.http.access import check_origins
    from specjax.serving.http.places import networks
    from specjax.serving.http.protocol import ConnectionLimits
    from specjax.serving.http.service import AppOptions, Service

    check_numbers(config)
    read_drafts(config)
    networks(config.trusted_proxy)  # refuses what is none
    check_origins(config.cors_origin)
    keys = read_keys(config)
    run.check_tls(config.tls_cert, config.tls_key)
    tls = (config.tls_cert, config.tls_key) if config.tls_cert else None
    names = config.served_model_name or (config.target,)
    if not speaks():  # of several processes the first listens, and decides when to end
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        follow(**engine_options(config)[0])
        return 0
    with run.bind(config.host, config.port) as bound:
        local = run.is_loopback(bound)
        if not local and not keys and not config.no_api_key:
            raise InputError(
                f"host={config.host!r}: other machines reach it; give --api-key-file FILE, or --no-api-key to let everybody in"
            )
        bounds = ConnectionLimits(
            reader_seconds=config.reader_seconds, connections=config.max_connections, trusted=config.trusted_proxy
        )
        with run.starting(bound, bounds=bounds, tls=tls):
            arguments, reason = engine_options(config)
            engine = Engine(**arguments)
        with engine:
            options = AppOptions(
                names=names,
                api_keys=keys,
                only_loopback=local and not keys,
                max_texts=config.rows + config.max_queue,
                with_acceptance=config.per_request_spec_decode_metrics,
                cors_origins=config.cors_origin,
                client_sessions=config.client_sessions or None,
                trusted_proxies=config.trusted_proxy,
            )
            where = run.address(bound, tls is not None)
            message = f"{where} is ready: {names[0]}, {config.rows} rows, texts of up to {engine.capacity} tokens ({reason})"
            service = Service(engine, options)
            status = run.serve(service, bound, bounds=bounds, drain_seconds=config.drain_seconds, message=message, tls=tls)
    if engine.is_compiling:  # which takes minutes for a large model; nothing else is left to do
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def read_drafts(config: ServeConfig) -> tuple[tuple[str | None, ...] | None, bool]:
    """The shapes to choose from, None for the engine's choice; and whether drafts of clients are taken.

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
        raise InputError(f"drafts={' '.join(config.drafts)}: auto is the engine's choice of shapes; give it, or give shapes")
    return tuple(None if word == "none" else word for word in words) or (None,), takes_drafts


def make_engine(config: ServeConfig) -> Engine:
    """The models, loaded, and the engine, compiled."""
    return Engine(**engine_options(config)[0])


def engine_options(config: ServeConfig) -> tuple[dict[str, Any], str]:
    """What `Engine` is given, in every process: the models, loaded, and the sizes; and why texts may be as long as they may."""
    shapes, takes_drafts = read_drafts(config)
    if config.precision != "default":
        jax.config.update("jax_default_matmul_precision", config.precision)
    mesh = mesh_for(config.mesh)
    kept = {"dtype": config.dtype or None, "weights": config.weights, "cache_dtype": config.cache_dtype}
    kept |= {"chat_template": config.chat_template, "chat_template_kwargs": config.chat_template_kwargs}
    kept |= {"generation_config": read_choice(config.generation_config)}
    generator = pipeline.load(config.target, config.drafter, mesh=mesh, **kept)
    say_defaults(generator.default_sampling, "temperature 1")
    drafter = generator.drafter
    if config.told:
        if drafter is None or not takes_drafts:
            raise InputError(
                f"told={config.told!r}: is for clients and their drafter; give --drafts and --drafter, or leave it out"
            )
        drafter = with_told(drafter, config.told)
    page, pages = config.page or memory.usual_page(), None
    sizes = {"rows": config.rows, "page": page, "chunk": config.chunk or None}
    capacity, reason = choose_capacity(config, generator, sizes)
    if config.cache_gb:
        pages = memory.pages_in(config.cache_gb, generator.target, generator.drafter, **sizes, capacity=capacity)
    options = {
        "target": generator,
        "rows": config.rows,
        "drafts": shapes,
        "capacity": capacity,
        "pages": pages,
        "page": page,
        "chunk": config.chunk or None,
        "max_waiting": config.max_queue,
        "max_logprobs": config.max_logprobs,
        "max_prediction": config.max_prediction,
        "clients": ClientDrafts(drafter) if takes_drafts else None,
        "client_rows": config.client_rows or None,
        "warm": config.warm,
    }
    return options, reason


def choose_capacity(config: ServeConfig, generator: pipeline.TextGenerator, sizes: dict[str, Any]) -> tuple[int, str]:
    """Return how many tokens a text may have, and why not more; with ``sizes`` as for `specjax.serving.memory.capacity_in`."""
    target, drafter = generator.target, generator.drafter
    if config.capacity:
        return config.capacity, "as --capacity says"
    positions = decoding.most_positions(target, drafter or NoDraft())
    usual = min(positions, memory.USUAL_CAPACITY)
    if config.cache_gb:
        capacity, why = (
            memory.capacity_in(config.cache_gb * 1e9, target, drafter, **sizes),
            f"in {config.cache_gb:g} GB of caches",
        )
    elif spans_processes(target.mesh):  # all processes must come to the same
        capacity, why = usual, "as long as neither --capacity nor --cache-gb is given"
    elif (free := memory.free_bytes(target.mesh)) is None:
        capacity, why = usual, "as nobody says how much memory is free"
    else:
        capacity = memory.capacity_in(free / 4, target, drafter, **sizes)
        if capacity < positions:  # a power of two, so that the programs of one start are found at the next, too
            capacity = max(usual, 1 << (capacity.bit_length() - 1))
        why = f"in a quarter of {free / 1e9:.3g} GB of free memory, or at least {usual}"
    if capacity == positions:
        return capacity, "all positions of the models"
    return capacity, f"{why}; the models have {positions} positions: see --capacity"


def check_numbers(config: ServeConfig) -> None:
    """Refuse what is out of range before anything is loaded. What the models have to do with is checked by `Engine`."""
    least = {"rows": 1, "max_connections": 1, "reader_seconds": 1}
    for option in fields(config):
        value = getattr(config, option.name)
        if isinstance(value, int | float) and not least.get(option.name, 0) <= value < math.inf:
            raise InputError(f"{option.name}={value}: must be at least {least.get(option.name, 0)}")
    if config.client_rows > config.rows:
        raise InputError(f"client_rows={config.client_rows}: must be at most rows={config.rows}")
    if not all(config.served_model_name or config.target):
        raise InputError("served_model_name: has an empty name; leave it out")


def read_keys(config: ServeConfig) -> tuple[str, ...]:
    """The keys of the file that is named; none: no file is."""
    if not config.api_key_file:
        return ()
    if config.no_api_key:
        raise InputError("no_api_key: there is an api_key_file too; give one of the two")
    try:
        lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"api_key_file={config.api_key_file!r}: cannot be read ({error})") from None
    keys = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not keys or not all(len(key) >= 8 and key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise InputError(
            f"api_key_file={config.api_key_file!r}: must hold a key of at least 8 visible ASCII characters, or several, one a "
            "line"
        )
    return keys
