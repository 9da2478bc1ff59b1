"""PyTorch's files, as PyTorch writes them, and files that would do harm."""

import os
import pickle
import zipfile
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.drafters import Eagle
from specjax.drafts.shapes import Chain
from specjax.models import torch_zip
from specjax.models.fields import CheckpointError
from specjax.models.torch_zip import TorchFile
from tests.conftest import tiny_target
from tests.with_torch import torch


def test_tensors_are_those_that_torch_saved(tmp_path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    saved = {
        "float32": whole,
        "transposed": whole.T,
        "part": whole[1:3, 2:5],  # which shares the storage of the whole
        "bfloat16": whole.bfloat16(),
        "float16": whole.half(),
        "int64": torch.arange(5) - 2,
        "bool": torch.tensor([True, False, True]),
        "parameter": torch.nn.Parameter(whole + 1),
    }
    torch.save(saved, tmp_path / "model.bin")
    read = TorchFile(tmp_path / "model.bin").tensors
    assert set(read) == set(saved)
    for name, tensor in saved.items():
        assert read[name].get_shape() == list(tensor.shape)
        expected = tensor.detach().float().numpy() if tensor.is_floating_point() else tensor.numpy()
        np.testing.assert_array_equal(np.asarray(read[name][...], expected.dtype), expected)
    assert read["bfloat16"].get_dtype() == "BF16"
    assert read["bfloat16"][0:1].dtype == jnp.bfloat16
    assert read["transposed"][2:4, 1:].tolist() == whole.T[2:4, 1:].tolist()


def test_a_drafter_is_read_from_a_bin_file(tmp_path) -> None:
    """SafeAILab publishes drafters as ``pytorch_model.bin``, without safetensors."""
    drafter = Eagle.init(tiny_target(), jax.random.key(0), Chain(3))
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    torch.save(
        {name: torch.tensor(array) for name, array in tensors.items()},
        tmp_path / "pytorch_model.bin",
    )
    (tmp_path / "model.safetensors").unlink()
    read = Eagle.from_pretrained(tmp_path, draft=Chain(3))
    jax.tree.map(np.testing.assert_array_equal, read.params, drafter.params)
    data = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="is not a PyTorch file of version"):
        Eagle.from_pretrained(tmp_path)


class Harmful:
    def __init__(self, file) -> None:
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def archive(path, content) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model/data.pkl", content)


def test_no_code_in_a_file_is_run(tmp_path) -> None:
    archive(tmp_path / "model.bin", pickle.dumps({"weight": Harmful(tmp_path / "ran")}))
    with pytest.raises(
        CheckpointError, match=r"system', which is not a tensor: such a file could run any code"
    ):
        TorchFile(tmp_path / "model.bin")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps([1, 2]), "holds a list, not tensors by name"),
        (pickle.dumps({"weight": 3}), "holds a dict, not tensors by name"),
        (b"\x80\x02nothing", "is not a PyTorch file of version 1.6 or newer, or is damaged"),
        (pickle.dumps(np.float64(3)), "which is not a tensor"),
    ],
)
def test_what_holds_no_tensors_is_refused(content, words, tmp_path) -> None:
    archive(tmp_path / "model.bin", content)
    with pytest.raises(CheckpointError, match=words):
        TorchFile(tmp_path / "model.bin")


class Built:
    """An object that is pickled as a call of a function, whose result then gets ``state``."""

    def __init__(self, function, arguments, state) -> None:
        self.parts = function, arguments, state

    def __reduce__(self):
        return self.parts


STATES = [{"items": 3}, {"items": None, "keys": 3, "__len__": 3}, (None, {"items": 3})]


@pytest.mark.parametrize("state", STATES)
def test_attributes_of_a_dictionary_are_not_used(state, tmp_path) -> None:
    """PyTorch itself gives a state_dict attributes.

    Here the attributes would hide the methods of the dictionary.
    """
    weight = torch.arange(6.0)
    torch.save(Built(OrderedDict, ([("weight", weight)],), state), tmp_path / "model.bin")
    assert TorchFile(tmp_path / "model.bin").tensors["weight"][...].tolist() == weight.tolist()
    archive(tmp_path / "none.bin", pickle.dumps(Built(OrderedDict, ([("weight", 3)],), state)))
    with pytest.raises(CheckpointError, match="holds a OrderedDict, not tensors by name"):
        TorchFile(tmp_path / "none.bin")


@pytest.mark.parametrize(
    "state", [{"shape": (9,)}, (None, {"shape": (9,)}), (None, {"_replace": 3}), 3]
)
def test_a_tensor_cannot_be_changed_once_it_is_checked(state, tmp_path) -> None:
    weight = torch.arange(6.0)
    arguments = (weight.storage(), 0, (6,), (1,), False, OrderedDict())
    torch.save(
        {"weight": Built(torch._utils._rebuild_tensor_v2, arguments, state)}, tmp_path / "model.bin"
    )
    with pytest.raises(
        CheckpointError, match=r"is not a PyTorch file of version .*, or is damaged"
    ):
        TorchFile(tmp_path / "model.bin")


@pytest.mark.parametrize(
    "state", [b"}X\x05\x00\x00\x00extraK\x01sb", b"N}X\x0c\x00\x00\x00__defaults__(K\x01ts\x86b"]
)
def test_a_file_leaves_the_reader_as_it_is(state, tmp_path) -> None:
    """A file cannot set attributes of the functions that the reader offers it."""
    archive(tmp_path / "model.bin", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + state + b".")
    before = dict(vars(torch_zip._tensor)), torch_zip._tensor.__defaults__
    with pytest.raises(CheckpointError, match="holds a function, not tensors by name"):
        TorchFile(tmp_path / "model.bin")
    assert (dict(vars(torch_zip._tensor)), torch_zip._tensor.__defaults__) == before


def test_a_tensor_does_not_reach_beyond_its_numbers(tmp_path) -> None:
    torch.save({"weight": torch.arange(6.0)}, tmp_path / "model.bin")
    with zipfile.ZipFile(tmp_path / "model.bin") as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(tmp_path / "short.bin", "w") as file:
        for name, data in members.items():
            file.writestr(name, data[:8] if name.endswith("data/0") else data)
    with pytest.raises(CheckpointError, match="a tensor reaches beyond its storage"):
        TorchFile(tmp_path / "short.bin").tensors["weight"][...]
