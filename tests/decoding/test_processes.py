"""Two processes that decode together (`jax.distributed`) against one that decodes alone."""

import json

import pytest

from tests.conftest import tiny_target
from tests.decoding import two_processes
from tests.processes import processes, wait


@pytest.mark.thorough
@pytest.mark.parametrize("look", [False, True])
def test_two_processes_find_what_one_does(tmp_path, look) -> None:
    """Check that both processes have the tokens, streams and statistics of a single one.

    Rows are split over ``data`` and params over ``model``. The clock of process 0 calls drafting
    hopeless, and that of process 1 calls it free: both must go by process 0's.
    """
    sizes = {"num_layers": 1, "vocab_size": 12}
    tiny_target(**sizes).save_pretrained(tmp_path / "target")
    tiny_target(**sizes, scale=22.0).save_pretrained(tmp_path / "draft")
    if look:
        (tmp_path / two_processes.LOOK).touch()
    with processes(two_processes.__name__, tmp_path) as running:
        alone = two_processes.decode(tmp_path, None, two_processes.SLOW, choose=True, look=look)
        wait(running, tmp_path)
    alone = json.loads(json.dumps(alone))
    for process in range(2):
        for mesh, results in json.loads((tmp_path / f"{process}.json").read_text()).items():
            for what, value in results.items():
                assert value == alone[what], f"{what}, mesh over {mesh}, process {process}"
    assert len(alone["stream"]) > 2
    # Plain decoding is fastest, but not by the clock of process 1.
    assert next(iter(alone["speedups"])) == "None"
    assert alone["survival"][0] > 0
    differs = "corpus=['FILE']: process 1 has other tokens than process 0; give all processes the"
    differs += " same files and the same tokenizer"
    unread = "corpus=['FILE']: process 1 cannot read the files; its own error has the reason"
    missing = "corpus='FILE': No such file or directory; give text files"
    for process, message in enumerate((unread, missing)):
        messages = json.loads((tmp_path / f"{process}.messages").read_text())
        assert messages == ["", differs, message]
