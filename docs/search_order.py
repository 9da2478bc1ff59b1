"""A MkDocs hook that ranks guides before measurements and the API in the search of the site."""

from typing import Any

BOOSTS = {"results/": 0.5, "api/": 0.5, "guides/drafters.md": 2.0}
"""Factors for the search scores of pages, by the beginning of their path. Other pages have 1.

Nearly every page has the word drafter, and the guide that explains drafters should be first.
"""


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Set the search boost of a page that does not set its own, and return its text unchanged."""
    for path, boost in BOOSTS.items():
        if page.file.src_uri.startswith(path):
            page.meta.setdefault("search", {"boost": boost})
    return markdown
