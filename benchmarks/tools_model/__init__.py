"""A small model that can hold a tool call, trained by a committed script.

    nice python -m benchmarks.tools_model --directory runs/tools_model
    python -m benchmarks.tools_model --directory runs/tools_model --evaluate 500
    python -m specjax serve --target runs/tools_model/model

It reads lists of tools of 20 KB, chooses the tool that a request describes or names, and copies the
tool's name and the arguments. All names are random, so that they must be copied. Tests of programs
that use tools run against it, because a test cannot download a large model.

The model is small and knows nothing. It matches words of the request with words of descriptions.
"""
