"""A hook of MkDocs that links names in backticks, on any page, to their explanation in the API.

A name is linked if it has a dot, an underscore or a capital letter, and only one meaning.
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
    """Insert the links after all pages have been rendered."""
    pages = [file.page for file in files.documentation_pages() if file.page and file.page.content]
    addresses = defaultdict(set)
    for page in pages:
        for shown in _SHOWN.findall(page.content):
            parts = shown.split(".")
            for first in range(len(parts)):
                addresses[".".join(parts[first:])].add(f"{page.url}#{shown}")
    for page in pages:
        pieces = _UNTOUCHED.split(page.content)
        pieces[::2] = [
            _NAME.sub(lambda match, page=page: _link(match, addresses, page.url), piece)
            for piece in pieces[::2]
        ]
        page.content = "".join(pieces)
    return env


def _link(match: re.Match[str], addresses: dict[str, set[str]], here: str) -> str:
    """Return the name as a link, or unchanged if it has no explanation or several."""
    name = match[1]
    if name.islower() and "." not in name and "_" not in name:
        return match[0]
    explanations = addresses.get(name, set())
    if len(explanations) != 1:
        return match[0]
    return f'<a href="{get_relative_url(next(iter(explanations)), here)}">{match[0]}</a>'
