"""A small model that calls tools, trained by a committed script.

    nice python -m benchmarks.tools_model --directory runs/tools_model
    python -m benchmarks.tools_model --directory runs/tools_model --evaluate 500
    python -m specjax serve --target runs/tools_model/model

It reads a list of tools, chooses the one that a request describes or names, and copies the tool's
name and the arguments. All names are random, so that they must be copied. The model knows nothing:
it matches words of the request with words of descriptions.

No training has reached a model that chooses well yet. After 100 steps with one learning rate for
all parameters, it wrote the form of a call, copied names after their first token, and answered
results with text, but it chose the right tool in 3 of 8 short lists.
"""
