"""Train EAGLE-3 drafters for a target with each kind of layer.

`tests.training.test_on_hybrids` has those with the delta rule, `tests.training.test_on_families`
those with windows.
"""

from functools import cache

import numpy as np
import pytest

from specjax.models.transformer import Target
from tests.conftest import BESIDE_ATTENTION, MIXTURES, SPARSE, tiny_target
from tests.models.families import zoo
from tests.models.test_models_with_states import MODELS
from tests.training import test_on_families as on_families
from tests.training import test_on_hybrids as on_hybrids

EAGLE3 = on_families.METHODS["eagle3"]
SMALL = {
    **MODELS,
    "mamba2 beside attention": BESIDE_ATTENTION | {"scale": 10.0},
    "latent attention": MIXTURES["deepseek_v3"],
    "indexer": SPARSE,
}
"""Changes of `tiny_target`."""

KINDS = (*SMALL, "llama4")
"""A target with each kind of layer; that of Llama 4, which attends to chunks, is of the zoo."""


@pytest.fixture(scope="module")
def target_of(tmp_path_factory):
    """Return a function that makes the target with a kind of layer."""

    @cache
    def make(kind: str) -> Target:
        if kind in SMALL:
            return tiny_target(**SMALL[kind] | {"vocab_size": zoo.VOCABULARY})
        directory = tmp_path_factory.mktemp("model")
        zoo.save(kind, directory)
        return Target.from_pretrained(directory, dtype=np.float32)

    return make


@pytest.mark.full
@pytest.mark.thorough_except("mamba2")
@pytest.mark.parametrize("kind", KINDS)
def test_eagle3_learns_what_its_drafter_does(target_of, kind) -> None:
    """Check that a drafter learns from the features that decoding reads.

    Two documents are in a row, each longer than a chunk of Llama 4 and than what an indexer
    selects.
    """
    on_families.learn(EAGLE3, target_of(kind))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_drafter_reads_of_a_document_is_as_of_the_document_alone(target_of, kind) -> None:
    on_hybrids.check_documents(target_of(kind))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_trained_is_read_back_and_halves_the_steps(target_of, kind, tmp_path) -> None:
    """Check targets with sharper distributions than those above.

    A loss below half of the first one would else be below some distributions' own entropy.
    """
    target = target_of(kind)
    target = target.replace(params=target.params | {"lm_head": 4 * target.params["lm_head"]})
    on_hybrids.check_trained(EAGLE3, target, on_hybrids.own_texts(target), tmp_path)
