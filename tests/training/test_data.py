import numpy as np
import pytest

from specjax.config import ConfigError
from specjax.training import data, documents
from specjax.training.config import DataConfig
from specjax.training.documents import Document


def test_the_standard_library_is_found_without_tests_and_tables() -> None:
    names = {"/".join(file.parts) for file in documents.find_files("stdlib")}
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any("site-packages" in name or "/test/" in name or "/encodings/" in name for name in names)


def test_the_split_is_by_name_alone() -> None:
    everything = [Document(f"directory/{i}.py", text="text") for i in range(300)]
    train, held = data.split_documents(everything, 0.1)
    assert sorted((*train, *held), key=everything.index) == everything
    assert 0.03 < len(held) / len(everything) < 0.25
    fewer_train, fewer_held = data.split_documents(everything[::2], 0.1)
    assert set(fewer_train) <= set(train)
    assert set(fewer_held) <= set(held)


def test_packing_loses_and_repeats_nothing() -> None:
    texts = [[0, 5, 6], [0, 7], [0, 8, 9, 10, 11], [0, 1]]
    packed = data.pack(texts, window=3)
    flat = [token for text in texts for token in text]
    owner = [i for i, text in enumerate(texts) for _ in text]
    for i, (tokens, segments) in enumerate(zip(packed["tokens"], packed["segments"], strict=True)):
        assert tokens.tolist() == flat[3 * i : 3 * i + 4]
        assert segments.tolist() == owner[3 * i : 3 * i + 4]
    assert len(packed["tokens"]) == (len(flat) - 1) // 3
    assert packed["loss_mask"].shape == (len(packed["tokens"]), 3)
    assert np.all(packed["loss_mask"])


def test_batches_are_fixed_by_the_seed_and_resume_anywhere() -> None:
    packed = data.pack([list(range(101))], window=4)

    def take(iterator, count: int) -> np.ndarray:
        return np.stack([next(iterator)["tokens"] for _ in range(count)])

    whole = take(data.batches(packed, 4, seed=3), 20)
    np.testing.assert_array_equal(whole, take(data.batches(packed, 4, seed=3), 20))
    assert not np.array_equal(whole, take(data.batches(packed, 4, seed=4), 20))
    first = data.batches(packed, 4, seed=3)
    take(first, 9)
    resumed = data.batches(packed, 4, seed=3)
    resumed.set_state(first.get_state())
    np.testing.assert_array_equal(take(resumed, 11), whole[9:])
    epoch = whole[:6].reshape(-1, 5)[:, 0]  # 24 of 25 windows
    assert len(set(epoch.tolist())) == 24


def test_bad_sources_are_refused_by_name(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"data\.source="):
        documents.find_files(str(tmp_path / "*.txt"))
    with pytest.raises(ConfigError, match=r"data\.window=64"):
        data.pack([[1, 2, 3]], 64)
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(ConfigError, match=r"data\.holdout"):
        data.prepare(DataConfig(source=str(tmp_path)))
