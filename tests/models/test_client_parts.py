"""Drafting at a client with a part of the target."""

import jax
import numpy as np
import pytest

import specjax
from specjax.client.device import ClientDevice, Settings
from specjax.drafters import Eagle3, MixtureOfAttentions


@pytest.mark.thorough
def test_a_client_drafts_with_a_part_what_it_drafts_with_the_whole(target) -> None:
    """A client drafts the same tree with a part of the target as with the whole.

    Mixture of Attentions runs the target's last layer, and EAGLE-3 none.
    """
    count, settings = target.config.num_layers, Settings.of(specjax.SamplingParams())
    key, texts = jax.random.key(1), ([5, 3, 1], [3, 1, 2])
    drafters = (MixtureOfAttentions.init(target, key, tli=1), Eagle3.init(target, key, taps=(0, 1)))
    for drafter, first in zip(drafters, (count - 1, count), strict=True):
        part, trees = target.part(layers=(first, count)), []
        for model in (target, part):
            device = ClientDevice(model, drafter, [specjax.Chain(2)], capacity=16)
            arrays = {
                name: np.ones((3, *shape), np.float32) for name, shape in device.hears.items()
            }
            state = device.append_remote(device.start(), *texts, arrays)
            trees.append(device.propose(state, 2, 4, settings, depth=2))
        np.testing.assert_array_equal(*[tree.tokens for tree in trees])
