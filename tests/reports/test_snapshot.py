"""Tests of snapshots: one step is shown with the tokens that were drafted and accepted."""

import numpy as np
import pytest

import specjax
from specjax.drafters import DraftModel, PromptLookup, Together
from specjax.drafts.shapes import Chain, DynamicTree, StaticTree
from specjax.reports.snapshot import take_snapshot
from tests.conftest import tiny_target

PROMPT = [1, 4, 2, 4, 2, 7]


class Letters:
    """A tokenizer whose tokens are letters; token 0 is a space."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(" bcdefghijk"[token] for token in tokens)


@pytest.mark.full
def test_a_perfect_drafter_is_shown_as_accepted_to_the_end(target) -> None:
    shot = take_snapshot(target, DraftModel(target, draft=Chain(3)), PROMPT)
    plain = specjax.generate(target, None, [PROMPT], max_new_tokens=4)
    text = np.asarray(plain.tokens)[0].tolist()
    assert shot.path == (0, 1, 2, 3)
    # The snapshot is of the first step, because no later step accepts more.
    assert [*shot.tokens, shot.bonus] == text[len(PROMPT) - 1 :]


@pytest.mark.full
@pytest.mark.thorough_except("static")
@pytest.mark.parametrize(
    "draft",
    [StaticTree(((0,), (1,), (0, 0))), DynamicTree(top_k=3, depth=3, nodes=9)],
    ids=["static", "dynamic"],
)
def test_the_accepted_path_is_part_of_the_text(target, draft) -> None:
    shot = take_snapshot(
        target, DraftModel(tiny_target(seed=5, num_layers=1), draft=draft), PROMPT, steps=8
    )
    assert shot.path[0] == 0
    assert len(shot.path) > 1
    assert [int(shot.parents[node]) for node in shot.path[1:]] == list(shot.path[:-1])
    plain = specjax.generate(target, None, [PROMPT], max_new_tokens=40)
    text = np.asarray(plain.tokens)[0].tolist()
    shown = [int(shot.tokens[node]) for node in shot.path] + [shot.bonus]
    assert any(text[i : i + len(shown)] == shown for i in range(len(text)))


@pytest.mark.full
def test_the_picture_names_every_node(target) -> None:
    shot = take_snapshot(
        target, DraftModel(tiny_target(seed=5, num_layers=1), draft=DynamicTree(3, 3, 9)), PROMPT
    )
    figure = shot.draw(Letters())
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert len(texts) == 9 + 1  # the bonus token
    assert set(texts) <= set("·bcdefghijk")
    bold = [text for text in figure.axes[0].texts if text.get_fontweight() == "bold"]
    assert len(bold) == len(shot.path) + 1
    assert f"8 tokens drafted, {len(shot.path) - 1} accepted" in figure.get_suptitle()


@pytest.mark.full
def test_of_several_drafters_each_node_has_their_names(target) -> None:
    parts = (DraftModel(target, draft=Chain(3)), PromptLookup(draft=2))
    shot = take_snapshot(target, Together(parts), PROMPT)
    assert shot.offered_by[0] == ()
    accepted = [shot.offered_by[node] for node in shot.path[1:]]
    assert all("DraftModel" in names for names in accepted)
    names = {text.get_text() for text in shot.draw(Letters()).axes[0].texts}
    assert "DraftModel" in names or "DraftModel + PromptLookup" in names
