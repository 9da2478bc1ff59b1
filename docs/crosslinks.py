"""A hook of MkDocs: a name in backticks, on any page, leads to where the API explains it.

A name is taken that has a dot, an underscore or a capital letter in it, and means one thing alone.
"""

import re
from collections import defaultdict
from typing import Any

from mkdocs.utils import get_relative_url

_UNTOUCHED = re.compile(
    r"(<pre\b.*?</pre>|<a\b.*?</a>|<h\d\b.*?</h\d>|<span class=\"doc.*?</span>)", re.DOTALL
)
_NAME = re.compile(r"<code>([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)</code>")
_SHOWN = re.compile(r"<h\d id=\"(specjax[\w.]*)\"")


def on_env(env: Any, *, config: Any, files: Any) -> Any:
    """Put in the links, once all pages have been rendered."""
    pages = [file.page for file in files.documentation_pages() if file.page and file.page.content]
    places = defaultdict(set)
    for page in pages:
        for shown in _SHOWN.findall(page.content):
            parts = shown.split(".")
            for first in range(len(parts)):
                places[".".join(parts[first:])].add(f"{page.url}#{shown}")
    for page in pages:
        pieces = _UNTOUCHED.split(page.content)
        pieces[::2] = [
            _NAME.sub(lambda found, page=page: _link(found, places, page.url), piece)
            for piece in pieces[::2]
        ]
        page.content = "".join(pieces)
    return env


def _link(found: re.Match[str], places: dict[str, set[str]], here: str) -> str:
    name = found[1]
    if name.islower() and "." not in name and "_" not in name:
        return found[0]
    where = places.get(name, set())
    if len(where) != 1:
        return found[0]
    return f'<a href="{get_relative_url(next(iter(where)), here)}">{found[0]}</a>'
