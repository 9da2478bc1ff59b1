"""Check which library multiplies few rows on a CPU.

The choice must reach the compiled loop, and the text must be the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding, sharding
from specjax.decoding import few_rows
from specjax.decoding.options import GenerationOptions
from specjax.drafters import DraftModel, NoDraft
from specjax.drafts.shapes import Chain
from specjax.models.transformer import Target
from specjax.planning import costs
from tests.conftest import tiny_target

PROMPT = np.array([[1, 4, 2, 4, 2, 7]])
ZEN3 = "flags\t\t: fpu sse sse2 avx f16c fma avx2 bmi2 vaes"


@pytest.fixture
def eigen_is_faster(monkeypatch):
    def choose(answer: bool) -> None:
        monkeypatch.setattr(few_rows, "eigen_is_faster", lambda: answer)

    return choose


@pytest.mark.parametrize(
    ("cpuinfo", "lacks"),
    [
        (f"processor\t: 0\n{ZEN3}\nbugs\t\t: none\n", True),
        (f"processor\t: 0\n{ZEN3} avx512f avx512vl\n", False),
        ("flags\t\t: fpu sse sse2\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_only_an_x86_without_avx512_is_known_to_be_faster_with_eigen(cpuinfo, lacks) -> None:
    assert few_rows.lacks_avx512(cpuinfo) is lacks


def test_xla_knows_the_option_and_one_that_it_does_not_know_ends_nothing() -> None:
    assert few_rows.is_known(few_rows.WITHOUT_YNNPACK)
    assert not few_rows.is_known({"xla_cpu_no_such_option": ""})


def test_only_a_few_rows_of_float32_on_one_cpu_avoid_ynnpack(eigen_is_faster) -> None:
    target, drafter = tiny_target(), DraftModel(tiny_target(seed=5, num_layers=1))
    eigen_is_faster(True)
    assert [
        rows for rows in range(100) if few_rows.avoids_ynnpack(rows, (target, drafter))
    ] == list(range(3, 49))
    halves = Target(jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params), target.config)
    params = target.params | {
        "lm_head": jnp.ones((target.config.hidden_size, target.config.vocab_size), jnp.int8)
    }
    on_mesh = Target(target.params, target.config, sharding.make_mesh(1, 1))
    for unsuitable in (halves, Target(params, target.config), on_mesh):
        assert not few_rows.avoids_ynnpack(5, (unsuitable, drafter))
    assert not few_rows.avoids_ynnpack(5, (target, DraftModel(halves)))
    eigen_is_faster(False)
    assert not few_rows.avoids_ynnpack(5, (target, drafter))


@pytest.mark.full
def test_the_compiled_loop_is_without_ynnpack_and_writes_the_same_text(eigen_is_faster) -> None:
    target, drafter = tiny_target(), DraftModel(tiny_target(seed=5, num_layers=1), draft=Chain(4))
    options = GenerationOptions(max_new_tokens=24)
    uses, texts = {}, {}
    for answer in (False, True):
        eigen_is_faster(answer)
        texts[answer] = specjax.generate(target, drafter, PROMPT, max_new_tokens=24).tokens
        _, state = decoding.start(target, drafter, PROMPT, options=options)
        programs = {
            "decode": decoding.decode.lower(target, drafter, state, 5),
            "costs": costs._score.lower(target, state.cache, 5, 2),
            "drafting": costs._propose.lower(target, drafter, state, 2),
        }
        uses[answer] = {
            name: "__ynn_fusion" in lowered.compile().as_text()
            for name, lowered in programs.items()
        }
    assert uses == {
        answer: dict.fromkeys(("decode", "costs", "drafting"), not answer)
        for answer in (False, True)
    }
    np.testing.assert_array_equal(texts[True], texts[False])


@pytest.mark.full
def test_plain_decoding_of_one_row_is_compiled_as_ever(eigen_is_faster) -> None:
    target = tiny_target()
    _, state = decoding.start(target, None, PROMPT)
    lowered = []
    for answer in (False, True):
        eigen_is_faster(answer)
        lowered.append(decoding.decode.lower(target, NoDraft(), state, 5).compile().as_text())
    assert lowered[0] == lowered[1]


@pytest.mark.full
def test_a_loop_inside_another_program_is_compiled_with_it(eigen_is_faster) -> None:
    """Check that a loop inside a program compiles: XLA takes options of whole programs only."""
    target, drafter = tiny_target(), DraftModel(tiny_target(seed=5, num_layers=1), draft=Chain(4))
    _, state = decoding.start(target, drafter, PROMPT)
    eigen_is_faster(True)
    jax.jit(lambda *arguments: decoding.decode(*arguments, 5)).lower(target, drafter, state)
    jax.jit(lambda state: decoding.decode(target, drafter, state, 5)).lower(state)


@pytest.mark.full
def test_arguments_are_given_by_place_or_by_name(eigen_is_faster) -> None:
    target, drafter = tiny_target(), DraftModel(tiny_target(seed=5, num_layers=1), draft=Chain(4))
    eigen_is_faster(True)
    texts = []
    for named in (False, True):
        _, state = decoding.start(target, drafter, PROMPT)
        done = (
            decoding.decode(target=target, drafter=drafter, state=state, max_steps=3)
            if named
            else decoding.decode(target, drafter, state, 3)
        )
        texts.append(np.asarray(done.tokens))
    np.testing.assert_array_equal(*texts)
