"""Quantized weights: matrices of 8-bit or 4-bit numbers with scales.

Decoding reads every weight for every token, so fewer bytes take less time. `weights` defines a
quantized matrix and quantizes floats to the nearest numbers. `gptq` takes the inputs of the matrix
into account. `schemes` defines which matrices of a model are quantized, and how. `published` finds
them in checkpoints, in the layouts of `stored` and `mxfp4`; `saved` writes them. The matrix
products are in `specjax.models.products`. The 8-bit KV cache is something else:
`specjax.models.quantized_cache`.
"""

from specjax.models.quantization.weights import Form, QuantizedMatrix, is_quantized, matrices_in

__all__ = ["Form", "QuantizedMatrix", "is_quantized", "matrices_in"]
