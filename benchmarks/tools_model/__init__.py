"""A small model that calls tools, made by a committed script.

    nice python -m benchmarks.tools_model --directory runs/tools_model
    python -m benchmarks.tools_model --directory runs/tools_model --predict 500
    python -m benchmarks.tools_model --directory runs/tools_model --evaluate 500
    python -m specjax serve --target runs/tools_model/model

It reads a list of tools, chooses the one that a request describes or names, and copies the tool's
name and the arguments. All names are random, so that they must be copied. The model knows nothing:
it matches words of the request with words of descriptions. What it reaches is in
docs/results/tools-model.md.
"""
