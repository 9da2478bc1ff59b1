"""Tests of message sizes, against the paper's figures and the arrays that would be sent."""

import jax
import numpy as np
import pytest

from specjax.drafters import Eagle, MixtureOfAttentions, layer_attention
from specjax.errors import InputError
from specjax.models.config import MLA, ModelConfig
from specjax.planning.messages import message_sizes
from tests.conftest import HYBRID, LAYERED, tiny_config, tiny_target

LLAMA_3_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)


def test_the_papers_figures_for_llama_3_8b() -> None:
    """Compare the sizes with table 7 of the paper.

    Nodes take about 0.4 KB on the way up. A token takes 4 KB on the way down, 128 KB with the
    layers on the client, and 8 KB for EAGLE.
    """

    def a_token(reader, **options):
        return message_sizes(reader, LLAMA_3_8B, nodes=62, accepted=1, **options).down - 4

    assert message_sizes("moa", LLAMA_3_8B, nodes=62, accepted=4).up == 372
    assert a_token("moa") == 4 * 1024
    assert a_token("moa, layers on the client") == 128 * 1024
    assert a_token("eagle") == 8 * 1024
    assert a_token("eagle3") == 8 * 1024
    assert a_token("moa, no layers") == 8 * 1024
    assert a_token("draft model") == 0
    assert a_token("moa", tli=3) == (4 + 3 * 4) * 1024
    assert message_sizes("eagle", LLAMA_3_8B, nodes=62, accepted=5).down == 5 * (8 * 1024 + 4)


def test_they_are_the_sizes_of_the_arrays() -> None:
    target = tiny_target(num_layers=3)
    accepted = np.array([[1, 4, 2]])
    output, entries = target.score(accepted)
    drafter = MixtureOfAttentions.init(target, jax.random.key(0), tli=2)
    mean = layer_attention.mean_over_layers(
        drafter.params, drafter.config.lsa, layer_attention.by_token(entries)
    )
    last = entries[slice(*drafter.config.tli_layers_of(target.config.num_layers))]
    tokens = accepted.astype(np.int32).nbytes

    def down(reader, tli=0):
        options = {"nodes": 5, "accepted": 3, "tli": tli, "number_bytes": 4}
        return message_sizes(reader, target.config, **options).down - tokens

    def size(arrays):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))

    assert down("moa") == mean.nbytes
    assert down("moa", tli=2) == mean.nbytes + size(last)
    assert down("moa, layers on the client") == size(entries)
    assert down("moa, layers on the client", tli=2) == size(entries)
    assert down("eagle") == Eagle.init(target, jax.random.key(0)).features(output).nbytes
    draft = np.zeros(5, np.int32).nbytes + np.zeros(5, np.int16).nbytes
    assert message_sizes("moa", target.config, nodes=5, accepted=3).up == draft


@pytest.mark.parametrize(
    ("reader", "options", "message"),
    [
        ("eagle", {"nodes": -1, "accepted": 1}, "nodes=-1"),
        ("eagle", {"nodes": 1, "accepted": 0}, "accepted=0"),
        ("moa", {"nodes": 1, "accepted": 1, "tli": 2}, "tli from 0 to 1"),
        ("eagle", {"nodes": 1, "accepted": 1, "tli": 1}, "runs no layers of the target"),
        ("hass", {"nodes": 1, "accepted": 1}, "reader='hass': give one of 'draft model', 'eagle'"),
    ],
)
def test_numbers_out_of_range_are_refused(reader, options, message) -> None:
    with pytest.raises(InputError, match=message):
        message_sizes(reader, tiny_config(), **options)


def test_latents_cannot_be_sent() -> None:
    latent = tiny_config(mla=MLA(8, 4, 4, 4), num_kv_heads=4)
    with pytest.raises(InputError, match="caches latents"):
        message_sizes("moa", latent, nodes=1, accepted=1)


@pytest.mark.parametrize(
    ("reader", "tli"), [("moa", 0), ("moa, layers on the client", 0), ("moa, no layers", 1)]
)
def test_states_cannot_be_sent(reader, tli) -> None:
    hybrid = tiny_config(**HYBRID)
    with pytest.raises(InputError, match=r"target: its layers \[.*2\] keep a state"):
        message_sizes(reader, hybrid, nodes=1, accepted=1, tli=tli)
    sizes = message_sizes("moa, no layers", hybrid, nodes=1, accepted=1)
    assert sizes.down == 4 + 2 * hybrid.hidden_size


def test_layers_that_differ_are_counted_one_by_one_and_cannot_be_summarised() -> None:
    differing = tiny_config(**LAYERED["differing"])
    a_token = message_sizes("moa, no layers", differing, nodes=1, accepted=1, tli=2).down - 4
    assert a_token == 2 * (differing.hidden_size + 2 * 8 + 2 * 2 * 6)
    with pytest.raises(InputError, match=r"its layers cache \[16, 24\] numbers of a token"):
        message_sizes("moa", differing, nodes=1, accepted=1)
