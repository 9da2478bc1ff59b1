"""One-line changes of the library that the fast tests must notice: `python -m tests.mutants` tries them.

The list is `catalogue`, what came of the last run of all of it is table.md.
"""
