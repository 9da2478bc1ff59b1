"""The tokens that begin and end a model's thoughts, as its tokenizer states them.

They are those of the tokenizer's ``response_template``, if that has a field of thoughts with fixed
texts around it. Otherwise the chat template shows them: it writes an answer with a thought, and
what stands between the answer's beginning, the thought and the answer are the two texts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specjax.errors import InputError
from specjax.grammars import ThinkingBudget, ThoughtTokens
from specjax.templates import renderer
from specjax.text import REASONING_FIELDS, encode_continuation

_QUESTION, _THOUGHT, _ANSWER, _EARLIER = "Question0", "Thought0", "Answer0", "Earlier0"
"""The contents of the messages that a template is tried with."""

_CALL_ID = "call00000"
"""The id of a call. Templates of Mistral take 9 letters and digits only."""


def thought_tokens(tokenizer: Any, texts: Sequence[str] | None = None) -> ThoughtTokens:
    """Return the tokens that begin and end a thought.

    Args:
        tokenizer: a tokenizer of transformers.
        texts: the two texts that begin and end a thought; None: the tokenizer states them.

    Raises:
        InputError: the tokenizer does not state them, a text has no tokens, or its tokens depend
            on what stands beside it.

    Examples:
        >>> import specjax
        >>> from specjax.thoughts import thought_tokens
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> thought = thought_tokens(tokenizer, ("<think>", "</think>"))
        >>> tokenizer.decode(thought.begin_ids), tokenizer.decode(thought.end_ids)
        ('<think>', '</think>')
        >>> thought_tokens(tokenizer)
        Traceback (most recent call last):
        specjax.errors.InputError: thinking_budget: the tokenizer does not state what begins and ...
    """
    stated = stated_texts(tokenizer) if texts is None else (texts[0], texts[1])
    if stated is None:
        raise InputError(
            "thinking_budget: the tokenizer does not state what begins and ends a thought, neither"
            " in a response_template nor in its chat template; give thought_tokens=(BEGIN, END)"
            " (--thought-tokens BEGIN END)"
        )
    begin, end = (encode_continuation(tokenizer, it) for it in stated)
    if not (begin and end):
        raise InputError(
            f"thought_tokens={stated!r}: a text has no tokens; give two texts that have some"
        )
    for mark, ids in zip(stated, (begin, end), strict=True):
        if merged := _merged_text(tokenizer, mark, ids):
            raise InputError(
                f"thought_tokens={stated!r}: in {merged!r} the tokenizer joins {mark!r} with its"
                " neighbours, so a thought cannot be told by its tokens; give texts that are added"
                " tokens"
            )
    return ThoughtTokens(tuple(begin), tuple(end), answer_tokens(tokenizer, stated[0]))


_NEIGHBOURS = ("\n", "\n\n")
"""What templates write before and after the texts that begin and end a thought."""


def _merged_text(tokenizer: Any, mark: str, ids: Sequence[int]) -> str:
    """Return a text in which ``mark`` has other tokens than ``ids``; empty if there is none."""
    count = len(ids)
    for neighbour in _NEIGHBOURS:
        if encode_continuation(tokenizer, mark + neighbour)[:count] != list(ids):
            return mark + neighbour
        if encode_continuation(tokenizer, neighbour + mark)[-count:] != list(ids):
            return neighbour + mark
    return ""


def mark_tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the tokens of a text that marks a part of an answer.

    () if it has none, or if its tokens depend on what stands beside it.

    Examples:
        >>> import specjax
        >>> from specjax.thoughts import mark_tokens
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.decode(mark_tokens(tokenizer, "<tool_call>"))
        '<tool_call>'
        >>> mark_tokens(tokenizer, "")
        ()
    """
    ids = encode_continuation(tokenizer, text) if text else []
    return () if not ids or _merged_text(tokenizer, text, ids) else tuple(ids)


def encoded(budget: Any, tokenizer: Any) -> Any:
    """Return a thinking budget, or one for each row, with token ids for its thoughts.

    None stands for no budget.

    Raises:
        InputError: the tokens of thoughts are needed and cannot be found.

    Examples:
        >>> import specjax
        >>> from specjax.thoughts import encoded
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> budget = encoded(specjax.ThinkingBudget(100, ("<think>", "</think>")), tokenizer)
        >>> len(budget.thought.begin_ids) > 0
        True
    """
    if isinstance(budget, list | tuple):
        return [encoded(row, tokenizer) for row in budget]
    if not isinstance(budget, ThinkingBudget) or isinstance(budget.thought, ThoughtTokens):
        return budget
    return budget.with_thought(thought_tokens(tokenizer, budget.thought))


def stated_texts(tokenizer: Any) -> tuple[str, str] | None:
    """Return the texts that begin and end a thought, without white space around them.

    None: the tokenizer does not state them.

    Examples:
        >>> import specjax
        >>> from specjax.thoughts import stated_texts
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = (
        ...     "{% for it in messages %}{{ it.role }}: {% if it.reasoning_content %}<t>"
        ...     "{{ it.reasoning_content }}</t>{% endif %}{{ it.content }} {% endfor %}"
        ...     "{% if add_generation_prompt %}assistant: {% endif %}"
        ... )
        >>> stated_texts(tokenizer)
        ('<t>', '</t>')
    """
    return _of_response_template(tokenizer) or _of_chat_template(tokenizer)


def _of_response_template(tokenizer: Any) -> tuple[str, str] | None:
    """Return the texts of the field of thoughts; None if there is none, or it has patterns."""
    template = getattr(tokenizer, "response_template", None)
    fields = template.get("fields") if isinstance(template, Mapping) else None
    for name in REASONING_FIELDS:
        field = fields.get(name) if isinstance(fields, Mapping) else None
        if not isinstance(field, Mapping):
            continue
        # Of several texts, the first is the usual one.
        values = [field.get("open"), field.get("close")]
        texts = [value[0] if isinstance(value, list) and value else value for value in values]
        begin, end = (it.strip() if isinstance(it, str) else "" for it in texts)
        if begin and end:
            return begin, end
    return None


def _of_chat_template(tokenizer: Any) -> tuple[str, str] | None:
    """Return the texts around the thought in an answer that the chat template writes."""
    question = {"role": "user", "content": _QUESTION}
    answer = {"role": "assistant", "content": _ANSWER}
    thinking = {**answer, **dict.fromkeys(REASONING_FIELDS, _THOUGHT)}
    for rendered in _rendered(tokenizer, [question, thinking]):
        before = _between(rendered, _QUESTION, _THOUGHT)
        after = _between(rendered, _THOUGHT, _ANSWER)
        if before is None or after is None or not after.strip():
            continue
        # What begins an answer without a thought: in a prompt, in an earlier turn, in the last one.
        earlier = [question, {"role": "assistant", "content": _EARLIER}, question]
        openings = [
            *_between_each(_rendered(tokenizer, [question], prompts=(True,)), _QUESTION, None),
            *_between_each(_rendered(tokenizer, earlier), _QUESTION, _EARLIER),
            *_between_each(_rendered(tokenizer, [question, answer]), _QUESTION, _ANSWER),
        ]
        rests = (before[_common(before, it) :].strip() for it in openings)
        begin = next(filter(None, rests), None)
        if begin is not None:
            return begin, _end(tokenizer, after)
    return None


def _end(tokenizer: Any, after: str) -> str:
    """Return the text that ends a thought, of all that stands between a thought and an answer.

    It is the added token that comes first, such as ``</think>``, or else the first line.
    """
    text = after.strip()
    backend = getattr(tokenizer, "get_added_vocab", None)
    added = sorted(backend() if backend else (), key=len, reverse=True)
    special = next((token for token in added if token.strip() and text.startswith(token)), None)
    return special or text.splitlines()[0].strip()


def answer_tokens(tokenizer: Any, begin: str = "") -> tuple[int, ...]:
    """Return the tokens that begin an answer in a prompt; () if they are not known.

    Args:
        tokenizer: a tokenizer of transformers, with a chat template.
        begin: the text that begins a thought. What comes from it on does not count.

    Examples:
        >>> import specjax
        >>> from specjax.thoughts import answer_tokens
        >>> answer_tokens(specjax.load("embedded").tokenizer)  # it has no chat template
        ()
    """
    opening = _opening(tokenizer, [{"role": "user", "content": _QUESTION}], begin)
    return tuple(encode_continuation(tokenizer, opening)) if opening else ()


def opening_after_result(tokenizer: Any, begin: str = "") -> str:
    """Return the text between a tool's result and the answer to it in a prompt.

    It is empty if the chat template does not take results. The arguments are those of
    `answer_tokens`.

    Examples:
        >>> import specjax
        >>> from specjax.thoughts import opening_after_result
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = "{{ messages[2].content }}[/TOOL_RESULTS]"
        >>> opening_after_result(tokenizer)
        '[/TOOL_RESULTS]'
    """
    function = {"name": "look_up", "arguments": {}}
    call = {"type": "function", "id": _CALL_ID, "function": function}
    messages = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": _ANSWER, "name": "look_up", "tool_call_id": _CALL_ID},
    ]
    return _opening(tokenizer, messages, begin)


def _opening(tokenizer: Any, messages: Sequence[Mapping[str, Any]], begin: str) -> str:
    """Return the text between the last message of a chat and the answer, up to ``begin``."""
    for rendered in _rendered(tokenizer, messages, prompts=(True,)):
        opening = _between(rendered, messages[-1]["content"], None) or ""
        return (opening.partition(begin)[0] if begin else opening).strip()
    return ""


def _rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], prompts: Sequence[bool] = (True, False)
) -> Iterator[str]:
    """Yield a chat in the tokenizer's template, with the beginning of an answer and without.

    Nothing is yielded where the template refuses it, or there is none.
    """
    if not getattr(tokenizer, "chat_template", None):
        return
    for is_prompt in prompts:
        try:
            yield renderer(tokenizer, end="answer" if is_prompt else "messages")(messages)
        except Exception:  # a template may raise anything for a chat that it does not take
            continue


def _between(text: str, first: str, second: str | None) -> str | None:
    """Return what stands between two marks; None: one is missing. None as second is the end."""
    _, mark, rest = text.rpartition(first) if second is None else text.partition(first)
    if not mark or (second is not None and second not in rest):
        return None
    return rest if second is None else rest.partition(second)[0]


def _between_each(texts: Iterator[str], first: str, second: str | None) -> Iterator[str]:
    """Yield what stands between two marks in each text that has both."""
    return (it for text in texts if (it := _between(text, first, second)) is not None)


def _common(first: str, second: str) -> int:
    """Return the length of the longest common beginning of two texts."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
