"""torch, for tests that compare specjax with it.

A test imports it from here: ``from tests.with_torch import torch``. If torch is not installed, the
import skips its test, or all tests of a file that begins with it, and the run says so. specjax
itself needs no torch: any other test that misses it fails.
"""

import pytest

REASON = "TORCH IS NOT INSTALLED, so nothing is compared with it: pip install -e '.[test-torch]'"
torch = pytest.importorskip("torch", reason=REASON)
