"""Quantized weights: matrices of 8-bit or 4-bit numbers, and the scales that turn these into weights.

Decoding reads every weight for every token, so fewer bytes are less time. `weights` says what a quantized matrix is and makes
one of floats; `gptq` does so by what the matrix is multiplied with; `schemes` says which matrices of a model are quantized, and
how; `published` finds them in checkpoints, in the layouts of `stored` and `mxfp4`; `saved` writes them. The products with them
are in `specjax.models.products`. The 8-bit cache is another thing: `specjax.models.quantized_cache`.
"""

from specjax.models.quantization.weights import Form, QuantizedMatrix, is_quantized, matrices_in

__all__ = ["Form", "QuantizedMatrix", "is_quantized", "matrices_in"]
