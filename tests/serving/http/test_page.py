"""Tests of the page as a file: it asks only its own server, and its parts fit together.

`test_browser` tests what it does.
"""

import base64
import hashlib
import re
from pathlib import Path

import pytest

from specjax.reports import style
from specjax.serving import http

PAGE = (Path(http.__file__).parent / "page.html").read_text()
SCRIPT = re.search("<script>(.*)</script>", PAGE, re.DOTALL)[1]
STYLE = re.search("<style>(.*)</style>", PAGE, re.DOTALL)[1]


def test_nothing_comes_from_elsewhere():
    named = PAGE.replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(
        r"//[\w.-]+\.\w+|https?:|\bsrc=|@import|url\(|<link(?! rel=\"icon\" href=\"data:)", named
    )


@pytest.mark.parametrize(("part", "directive"), [(STYLE, "style-src"), (SCRIPT, "script-src")])
def test_the_policy_allows_the_style_and_the_script_that_are_there_and_no_other(part, directive):
    digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
    policy = re.search('<meta http-equiv="Content-Security-Policy" content="(.*?)">', PAGE)[1]
    assert policy.startswith("default-src 'none'; ")
    assert re.search(f"{directive} ('.*?');", policy)[1] == f"'sha256-{digest}'"
    assert re.search("connect-src (.*?);", policy)[1] == "'self'"
    assert not re.search(r"<[^>]+ (style|on\w+)=", PAGE)  # the policy forbids these


def test_all_that_is_looked_up_is_there():
    ids = re.findall(r'\bid="([^"]+)"', PAGE)
    assert len(ids) == len(set(ids))
    looked_up = re.findall(r'element\("([^"]+)"\)', SCRIPT)
    assert len(looked_up) == SCRIPT.count("element(")  # all of them by a literal name
    assert not {*looked_up, *re.findall(r'(?:for|aria-describedby)="([^"]+)"', PAGE)} - set(ids)
    # The script reads every field.
    fields = re.findall(r'<(?:input|textarea)[^>]* id="([^"]+)"', PAGE)
    assert not set(fields) - set(looked_up)


def test_a_model_s_text_cannot_become_html():
    assert "textContent" in SCRIPT
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function",
        SCRIPT,
    )


def test_accepted_tokens_have_the_colours_that_they_have_in_the_pictures():
    for theme, rules in zip(
        (style.LIGHT, style.DARK), STYLE.split("prefers-color-scheme: dark", 1), strict=True
    ):
        assert f"--accepted: {theme.accepted.edge};" in rules
        assert f"--accepted-face: {theme.accepted.face};" in rules
        assert f"--paper: {theme.paper};" in rules
        assert f"--ink: {theme.ink};" in rules
        assert f"--muted: {theme.muted};" in rules
