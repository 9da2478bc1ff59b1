"""Tests of conversations that go on: ended texts are read once more, and no text changes by it.

The oracle is an engine that reads nothing once more and forgets its prefixes before every request.
Both engines get one request at a time, so their calls have the same shapes and their numbers the
same bits.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sharding
from specjax.drafters import Eagle3, PromptLookup
from specjax.errors import InputError
from specjax.models import params
from specjax.models.cache import PagedCache
from specjax.pipeline import TextGenerator
from specjax.serving import engine_loop
from specjax.serving.device import ClientDrafts
from specjax.serving.engine import Engine
from specjax.serving.handle import Handle
from specjax.serving.pages import Prefix, chunk_key
from specjax.serving.scheduler import RereadChunk, Scheduler
from tests.conftest import HYBRID, compilations, tiny_target
from tests.serving.test_clients import Client
from tests.serving.test_engine import Request, check_at_rest
from tests.test_text import of_bytes_and_spaces

VOCABULARY, PAGE, CHUNK, CAPACITY, PATIENCE = 11, 8, 16, 256, 60.0
SIZES = {"rows": 2, "widths": (2,), "page": PAGE, "chunk": CHUNK, "capacity": CAPACITY, "steps": 4}


@pytest.fixture(autouse=True)
def read_at_once(monkeypatch) -> None:
    """Read ended texts once more as soon as the engine is idle."""
    monkeypatch.setattr(engine_loop, "REREAD_AFTER", 0.0)


def in_bfloat16(model: Any) -> Any:
    return model.replace(
        params=jax.tree.map(
            lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf,
            model.params,
        )
    )


def target_of(kind: str, **sizes: int) -> Any:
    if "hybrid" in kind:
        target = tiny_target(**HYBRID, **sizes)
        for number in target.config.linear_layers:  # heads that forget at different paces
            layer = target.params["layers"][number]
            layer["log_rate"] = np.linspace(-4.0, 0.0, layer["log_rate"].shape[0], dtype=np.float32)
    else:
        target = tiny_target(**sizes)
    if "8-bit weights" in kind:
        target = target.quantize("int8")
    if "bfloat16" in kind:
        target = in_bfloat16(target)
    return target.replace(cache_dtype="int8") if "8-bit cache" in kind else target


def engine_of(kind: str, positions: int = 512, **options: Any) -> Engine:
    """Make an engine of a kind such as "bfloat16, eagle3"; it has one draft, or none."""
    target, drafter = target_of(kind, max_positions=positions), None
    if "eagle3" in kind:
        drafter = Eagle3.init(target, jax.random.key(5))
    if "lookup" in kind:
        drafter = PromptLookup()
    drafts: tuple[str | None, ...] = (None,) if drafter is None else ("chain:3",)
    if "paused" in kind:  # the drafter reads later what calls without a draft emit
        drafts = (None, "chain:3")
    return Engine(target, drafter, **{"drafts": drafts, **SIZES, **options})


KINDS = (
    "float32",
    "bfloat16",
    "8-bit cache",
    "8-bit weights",
    "float32, eagle3",
    "bfloat16, eagle3",
    "float32, hybrid, lookup",
    "bfloat16, hybrid, eagle3",
)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the programs that most tests share. All engines of a kind have the same ones."""
    for kind in ("float32", "bfloat16"):
        engine_of(kind).close()


def wait_for_rereads(engine: Engine) -> None:
    """Wait until no ended text is left to read once more."""
    until = time.perf_counter() + PATIENCE
    while True:
        with engine._loop.wake:
            if engine._loop.scheduler.idle and not engine._loop.scheduler.has_ended_texts:
                return
        assert time.perf_counter() < until, "never read"
        time.sleep(0.001)


def generated(handle: Handle) -> list[int]:
    return list(handle.result(PATIENCE).tokens)


def random_tokens(draw: np.random.Generator, count: int) -> list[int]:
    return draw.integers(0, VOCABULARY, count).tolist()


# --- how much is computed -------------------------------------------------------------------------


def second_turn(engine: Engine, chunk: int, sizes: tuple[int, int, int], thoughts: int) -> int:
    """Have a chat of two turns, and return how many tokens the second prompt has computed.

    Args:
        engine: the engine.
        chunk: its tokens per chunk.
        sizes: the tokens of the first prompt, the answer and the new message.
        thoughts: the number of tokens at the beginning of the answer that the template removes.
    """
    draw = np.random.default_rng(7)
    prompt, message = random_tokens(draw, sizes[0]), random_tokens(draw, sizes[2])
    before = engine.statistics
    handle = engine.submit(prompt, max_new_tokens=sizes[1], eos_token_ids=())
    answer = generated(handle)
    wait_for_rereads(engine)
    after = engine.statistics
    chunks = [(length - 1) // chunk for length in (len(prompt), len(prompt) + len(answer))]
    assert after.tokens_reread - before.tokens_reread == (chunks[1] - chunks[0]) * chunk
    assert handle.cached_tokens == 0
    assert after.prompt_tokens_read - before.prompt_tokens_read == len(prompt) - 1
    assert after.preemptions == 0
    following = [*prompt, *answer[thoughts:], *message]
    handle = engine.submit(following, max_new_tokens=4)
    handle.result(PATIENCE)
    return len(following) - handle.cached_tokens


def test_a_next_turn_computes_its_message_and_a_chunk_at_most() -> None:
    with engine_of("float32") as engine:
        assert second_turn(engine, CHUNK, (90, 60, 9), thoughts=0) <= CHUNK + 9
        check_at_rest(engine)
        forget(engine)
        # Of the answer, 20 tokens are left.
        assert second_turn(engine, CHUNK, (90, 60, 9), thoughts=40) <= CHUNK + 20 + 9
    with engine_of("float32", reread=False) as engine:
        prompt = random_tokens(np.random.default_rng(7), 90)
        answer = generated(engine.submit(prompt, max_new_tokens=60, eos_token_ids=()))
        handle = engine.submit([*prompt, *answer, 1], max_new_tokens=4)
        handle.result(PATIENCE)
        assert (handle.cached_tokens, engine.statistics.tokens_reread) == (80, 0)


@pytest.mark.full
@pytest.mark.thorough_except("float32-0")
@pytest.mark.parametrize("thoughts", [0, 200])
@pytest.mark.parametrize("kind", ["float32", "float32, eagle3", "float32, hybrid, lookup"])
def test_a_next_turn_of_a_chat_of_4000_tokens(kind, thoughts) -> None:
    chunk, sizes = 64, (4000, 300, 30)
    with engine_of(kind, positions=8192, page=64, chunk=chunk, capacity=4608) as engine:
        answer = sizes[1] - thoughts if thoughts else 0
        assert second_turn(engine, chunk, sizes, thoughts) <= chunk + answer + sizes[2]
        check_at_rest(engine)


# --- no text changes ------------------------------------------------------------------------------


def forget(engine: Engine) -> None:
    """Forget all texts that have ended."""
    wait_for_rereads(engine)
    with engine._loop.wake:
        for pool in engine._loop.scheduler._pools:
            pool.forget_prefixes()


Answer = tuple[list[int], list[Any]]


def answer_of(engine: Engine, prompt: Sequence[int], settings: dict[str, Any]) -> Answer:
    """Return an answer with the log-probabilities of its tokens, if they are asked for."""
    handle = engine.submit(list(prompt), **settings)
    tokens = generated(handle)
    return tokens, [logprobs for piece in handle for logprobs in piece.logprobs]


def check_conversations(
    warm: Engine, cold: Engine, count: int, seed: int, logprobs: bool
) -> tuple[int, int]:
    """Have the same conversations on both engines, and compare every answer.

    Return how many tokens were shared and how many turns there were.
    """
    draw, turns = np.random.default_rng(seed), 0
    systems = [random_tokens(draw, 20) for _ in range(2)]
    conversations = [list(systems[draw.integers(2)]) for _ in range(count)]
    remaining = [int(draw.integers(2, 5)) for _ in range(count)]
    while open_ones := [number for number in range(count) if remaining[number]]:
        # They take turns, so that a text may be read once more late, or never.
        number = int(draw.choice(open_ones[:4]))
        remaining[number] -= 1
        prompt = [*conversations[number], *random_tokens(draw, int(draw.integers(1, 20)))]
        settings: dict[str, Any] = {
            "max_new_tokens": int(draw.integers(1, 40)),
            "temperature": float(draw.choice([0.0, 0.8])),
            "seed": int(draw.integers(100)),
            "eos_token_ids": (int(draw.integers(VOCABULARY)),) * int(draw.integers(2)),
        }
        if logprobs and draw.random() < 0.5:
            settings["logprobs"] = 1
        forget(cold)
        tokens, scores = answer_of(warm, prompt, settings)
        assert (tokens, scores) == answer_of(cold, prompt, settings)
        cut = int(draw.integers(len(tokens))) if draw.random() < 0.3 else 0
        conversations[number] = [*prompt, *tokens[cut:]]
        turns += 1
        if draw.random() < 0.7:
            wait_for_rereads(warm)
    return warm.statistics.prompt_tokens_shared, turns


@pytest.mark.full
def test_conversations_have_the_same_texts_with_and_without_history() -> None:
    with engine_of("float32") as warm, engine_of("float32", reread=False) as cold:
        check_conversations(warm, cold, 3, seed=1, logprobs=False)
        before = compilations()
        shared, turns = check_conversations(warm, cold, 6, seed=2, logprobs=False)
        assert compilations() == before
        assert shared > 16 * turns
        assert warm.statistics.tokens_reread > 0 == cold.statistics.tokens_reread
        assert cold.statistics.prompt_tokens_shared == 0
        check_at_rest(warm)


@pytest.mark.full
@pytest.mark.thorough_except("float32")
@pytest.mark.parametrize("kind", KINDS)
def test_conversations_of_every_kind_have_the_same_texts(kind) -> None:
    """Have 25 conversations, so that there are 200 of all kinds."""
    options = {"max_logprobs": 1} if kind in ("float32", "bfloat16, eagle3") else {}
    with engine_of(kind, **options) as warm, engine_of(kind, reread=False, **options) as cold:
        shared, turns = check_conversations(warm, cold, 25, seed=3, logprobs=bool(options))
        assert turns >= 50 and shared > 8 * turns
        assert warm.statistics.tokens_reread > 8 * turns
        check_at_rest(warm)


# --- what is shared has the bits of a prefill -----------------------------------------------------


def chain_of(engine: Engine, tokens: Sequence[int]) -> list[Prefix]:
    with engine._loop.wake:
        pool = engine._loop.scheduler._pools[0]
        return pool.find(tokens, engine.chunk, len(tokens) - 1)


def contents(engine: Engine, tokens: Sequence[int]) -> list[np.ndarray]:
    """Return what the pages of a text's prefixes hold, of target and drafter, and their state."""
    chain, state = chain_of(engine, tokens), engine._loop.device.state
    caches = jax.tree.leaves(
        (state.cache, state.drafter), is_leaf=lambda node: isinstance(node, PagedCache)
    )
    pages = np.array([page for prefix in chain for page in prefix.pages])
    pools = [cache.layers for cache in caches if isinstance(cache, PagedCache)]
    entries = [np.asarray(leaf)[pages] for leaf in jax.tree.leaves(pools)]
    prefix_state, _ = chain[-1].prefix_state
    # The table of a drafter's cache is a placeholder: every call has its own.
    prefix_state = jax.tree.map(
        lambda node: replace(node, table=()) if isinstance(node, PagedCache) else node,
        prefix_state,
        is_leaf=lambda node: isinstance(node, PagedCache),
    )
    return [*entries, *map(np.asarray, jax.tree.leaves(prefix_state))]


def bits(arrays: Sequence[np.ndarray]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


def reread_and_read(kind: str, **options: Any) -> tuple[list[bytes], list[bytes]]:
    """Return the pages of a text that decoding has written, and of a prompt with its tokens."""
    prompt = random_tokens(np.random.default_rng(11), 40)
    with engine_of(kind, **options) as engine:
        handle = engine.submit(prompt, max_new_tokens=60, eos_token_ids=(), temperature=1.0)
        text = [*prompt, *generated(handle)]
        wait_for_rereads(engine)
        assert len(chain_of(engine, text)) == 99 // engine.chunk
        shared = bits(contents(engine, text))
    with engine_of(kind, reread=False, **options) as engine:
        engine.submit(text, max_new_tokens=1).result(PATIENCE)
        assert len(chain_of(engine, text)) == 99 // engine.chunk
        return shared, bits(contents(engine, text))


def test_shared_pages_have_the_bits_that_a_prompt_of_these_tokens_writes() -> None:
    shared, prefilled = reread_and_read("bfloat16")
    assert len(shared) >= 4 and shared == prefilled


@pytest.mark.full
@pytest.mark.thorough_except("float32", "bfloat16", "8-bit cache")
@pytest.mark.parametrize("kind", [*KINDS, "float32, eagle3, paused"])
def test_shared_pages_and_states_of_every_kind_have_the_bits_of_a_prompt(kind) -> None:
    shared, prefilled = reread_and_read(kind)
    assert shared == prefilled


def share_what_decoding_wrote(scheduler: Scheduler, request: Any, length: int) -> None:
    """Make the pages of an ended text prefixes as they are: this is the broken rule."""
    contents, pool = scheduler._contents(request.row), scheduler._pool(request.row)
    chunk, state = scheduler._chunk, contents.prefixes[-1].prefix_state
    for start in range(len(contents.prefixes) * chunk, length - chunk, chunk):
        key = chunk_key(request.tokens, start, start + chunk, request.tenant)
        pages = tuple(contents.pages[: chunk // scheduler._page])
        contents.prefixes.append(pool.register(contents.prefixes[-1], key, pages, state))
        del contents.pages[: len(pages)]


def test_pages_that_decoding_wrote_would_be_noticed(monkeypatch) -> None:
    monkeypatch.setattr(Scheduler, "_note_end", share_what_decoding_wrote)
    shared, prefilled = reread_and_read("bfloat16")
    assert shared != prefilled


@pytest.mark.full
def test_texts_that_go_on_from_what_decoding_wrote_would_be_noticed(monkeypatch) -> None:
    monkeypatch.setattr(Scheduler, "_note_end", share_what_decoding_wrote)
    with (
        engine_of("bfloat16") as warm,
        engine_of("bfloat16", reread=False) as cold,
        pytest.raises(AssertionError),
    ):
        check_conversations(warm, cold, 200, seed=3, logprobs=False)


@pytest.mark.full
def test_chunks_that_begin_elsewhere_would_be_noticed(monkeypatch) -> None:
    """Read an ended text once more in chunks of a page each."""
    in_chunks, in_pages = reread_and_read("bfloat16"), reread_and_read("bfloat16", chunk=PAGE)
    assert in_pages[0] == in_pages[1]  # the same boundaries, the same bits
    assert in_chunks[0] != in_pages[0]


# --- who waits ------------------------------------------------------------------------------------


def note_reads(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, on_first: Callable[[], object]
) -> list[tuple[str, int]]:
    """Return a list of the prefill calls from now on: their kind and start.

    ``on_first`` is called while the first chunk that is read once more is queued. Before the call
    that follows such a chunk, the engine must have waited for the device.
    """
    read, wait, order = engine._loop._read, engine._loop.device.wait, []
    waits: list[int] = []

    def note_and_wait() -> None:
        waits.append(len(order))
        wait()

    def note_and_read(chunks: Any, *arguments: Any, **options: Any) -> Any:
        (chunk,) = chunks
        is_reread = isinstance(chunk, RereadChunk)
        if order and order[-1][0] == "again" and waits[-1:] != [len(order)]:
            order.append(("without waiting", 0))
        order.append(("again" if is_reread else "prompt", chunk.start))
        if is_reread and len([kind for kind, _ in order if kind == "again"]) == 1:
            on_first()
        return read(chunks, *arguments, **options)

    monkeypatch.setattr(engine._loop, "_read", note_and_read)
    monkeypatch.setattr(engine._loop.device, "wait", note_and_wait)
    return order


def test_a_request_that_comes_waits_for_one_chunk_and_shares_it(monkeypatch) -> None:
    prompt, handles = random_tokens(np.random.default_rng(5), 20), []
    with engine_of("float32") as engine:
        first = engine.submit(prompt, max_new_tokens=100, eos_token_ids=())

        def submit() -> None:
            handles.append(engine.submit([*prompt, *first.tokens[:14], 3, 4, 5], max_new_tokens=30))

        order = note_reads(engine, monkeypatch, submit)
        first.result(PATIENCE)
        while not handles:
            time.sleep(0.001)
        handles[0].result(PATIENCE)
        wait_for_rereads(engine)
    # After one chunk of the ended text comes the request, which begins after that very chunk. The
    # text goes on later, from where it was.
    assert order[:2] == [("prompt", 0), ("prompt", 16)]
    assert order[2:4] == [("again", 16), ("prompt", 32)]
    assert [start for kind, start in order[4:] if kind == "again"][:5] == [32, 48, 64, 80, 96]
    assert handles[0].cached_tokens == 32 and ("without waiting", 0) not in order


def test_a_closed_loop_is_not_delayed(monkeypatch) -> None:
    """Submit requests one right after another: no chunk is read once more in between."""
    monkeypatch.setattr(engine_loop, "REREAD_AFTER", 30.0)
    with engine_of("float32") as engine:
        for number in range(4):
            engine.submit([number] * 20, max_new_tokens=20).result(PATIENCE)
        assert engine.statistics.tokens_reread == 0
        with engine._loop.wake:
            assert engine._loop.scheduler.has_ended_texts


def test_after_a_while_without_work_texts_are_read_once_more(monkeypatch) -> None:
    monkeypatch.setattr(engine_loop, "REREAD_AFTER", 0.05)
    with engine_of("float32") as engine:
        engine.submit([1] * 20, max_new_tokens=20, eos_token_ids=()).result(PATIENCE)
        started = time.perf_counter()
        wait_for_rereads(engine)
        assert time.perf_counter() - started > 0.02
        assert engine.statistics.tokens_reread == CHUNK


# --- which texts ----------------------------------------------------------------------------------


def test_texts_with_a_salt_are_read_once_more_for_their_own_tenant_alone() -> None:
    prompt = random_tokens(np.random.default_rng(5), 20)
    with engine_of("float32") as engine:
        handle = engine.submit(
            prompt, max_new_tokens=30, eos_token_ids=(), tenant="shop", cache_salt="mine"
        )
        text = [*prompt, *generated(handle), 1]
        wait_for_rereads(engine)

        def cached(**scope: str) -> int:
            handle = engine.submit(text, max_new_tokens=1, **scope)
            handle.result(PATIENCE)
            return handle.cached_tokens

        assert cached() == cached(tenant="shop") == cached(cache_salt="mine") == 0
        assert cached(tenant="shop", cache_salt="mine") == 48


@pytest.mark.full
def test_only_free_pages_are_used(monkeypatch) -> None:
    """Fill all pages but a few with prefixes; a text that ends takes no page of theirs."""
    with engine_of("float32", pages=12, capacity=64) as engine:
        scheduler, evictions = engine._loop.scheduler, []
        drop = scheduler._pools[0]._drop

        def note_and_drop(prefix: Prefix) -> None:
            evictions.append(scheduler.idle)  # a request that needs pages has a row
            drop(prefix)

        monkeypatch.setattr(scheduler._pools[0], "_drop", note_and_drop)
        for number in range(5):
            engine.submit([number] * 33, max_new_tokens=30, eos_token_ids=()).result(PATIENCE)
            wait_for_rereads(engine)
        assert evictions and not any(evictions) and engine.statistics.tokens_reread > 0
        assert engine.statistics.preemptions == 0
        check_at_rest(engine)


@pytest.mark.full
def test_a_text_that_a_stop_string_ends_is_read_up_to_there() -> None:
    tokenizer = of_bytes_and_spaces("llama")
    generator = TextGenerator(tiny_target(vocab_size=len(tokenizer), eos_token_ids=(0,)), tokenizer)
    with Engine(generator, drafts=(None,), **SIZES) as engine:
        prompt = engine.encode("a the a the")
        options = {"max_new_tokens": 60, "eos_token_ids": (), "temperature": 1.5}
        for seed in range(6):
            handle = engine.submit(prompt, **options, seed=seed, cache_salt=f"whole {seed}")
            handle.result(PATIENCE)
            wait_for_rereads(engine)
            before = engine.statistics.tokens_reread
            stop = handle.text[24:26]
            cut = engine.submit(prompt, **options, seed=seed, cache_salt=f"{seed}", stop=stop)
            tokens = generated(cut)
            wait_for_rereads(engine)
            length = len(prompt) + len(tokens)
            chunks = (length - 1) // CHUNK - (len(prompt) - 1) // CHUNK
            assert cut.finish_reason == "stop"
            assert engine.statistics.tokens_reread - before == chunks * CHUNK


def test_cancelled_texts_are_not_read_once_more() -> None:
    with engine_of("float32") as engine:
        handle = engine.submit([1] * 20, max_new_tokens=200, eos_token_ids=())
        while len(handle.tokens) < 40:
            time.sleep(0.001)
        handle.cancel()
        check_at_rest(engine)
        wait_for_rereads(engine)
        assert handle.finish_reason == "cancelled" and engine.statistics.tokens_reread == 0


def test_reread_is_true_or_false() -> None:
    with pytest.raises(InputError, match="reread='on': must be True or False"):
        engine_of("float32", reread="on")


@pytest.mark.full
def test_texts_of_clients_that_draft_are_read_once_more() -> None:
    with engine_of("float32", clients=ClientDrafts(nodes=8, depth=4)) as engine:
        client = Client(engine, Request(tuple([1, 2, 3, 4] * 5), 30))
        while not client.over:
            client.ask(client.ready().root())
        client.row.close()
        wait_for_rereads(engine)
        assert engine.statistics.tokens_reread == 2 * CHUNK


@pytest.mark.full
@pytest.mark.thorough_except("sizes0")
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_each_group_of_a_mesh_reads_its_own_texts_once_more(sizes) -> None:
    mesh, target = sharding.make_mesh(*sizes), tiny_target()
    places = params.shardings(params.declare(target.config), mesh, target.config.axis_units)
    on_mesh = target.replace(params=jax.device_put(target.params, places), mesh=mesh)
    with Engine(on_mesh, drafts=(None,), **SIZES) as engine:
        before = None
        for turn in range(2):
            prompts = [[number] * 20 for number in (1, 2)]
            with engine._loop.wake:
                handles = [
                    engine.submit(prompt, max_new_tokens=30, eos_token_ids=()) for prompt in prompts
                ]
            texts = [[*p, *generated(it)] for p, it in zip(prompts, handles, strict=True)]
            wait_for_rereads(engine)
            assert engine.statistics.tokens_reread == (turn + 1) * 2 * 2 * CHUNK
            forget(engine)
            before = texts if before is None else before
            assert texts == before
        check_at_rest(engine)
