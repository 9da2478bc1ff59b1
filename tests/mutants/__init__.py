"""Small changes of the library that the fast tests must notice.

`python -m tests.mutants` tries them. `catalogue` lists them, and table.md holds the results of the
last run of all.
"""
