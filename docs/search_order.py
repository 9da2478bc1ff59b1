"""A MkDocs hook that ranks guides before measurements and the API in the search of the site."""

from typing import Any

BOOSTS = {"results/": 0.5, "api/": 0.5}
"""Factors for the search scores of pages, by the folder of the page. Other pages have 1."""


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Set the search boost of a page that does not set its own, and return its text unchanged."""
    for folder, boost in BOOSTS.items():
        if page.file.src_uri.startswith(folder):
            page.meta.setdefault("search", {"boost": boost})
    return markdown
