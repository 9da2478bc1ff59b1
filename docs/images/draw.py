"""Draw the pictures of the documentation, each light and dark, from real tokens and results.

python -m docs.images.draw            draws all of them, in less than a minute
python -m docs.images.draw NAME ...   draws some of them

docs/images/record.py makes the recording of the demo.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from matplotlib.patches import FancyBboxPatch

import specjax
from benchmarks import arrivals_tables, client_server_tables, serving_tables
from benchmarks import long_context as benchmark
from specjax import decoding
from specjax.assets import embedded
from specjax.decoding.constrained import advance_under_masks
from specjax.decoding.options import GenerationOptions
from specjax.grammars import GrammarCompiler
from specjax.reports import pictures, style
from specjax.reports.snapshot import take_snapshot
from specjax.text import encode, load_tokenizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = Path(__file__).parent
ROOT = IMAGES.parents[1]
THEMES = {"": style.LIGHT, "-dark": style.DARK}
"""The themes, by the suffix of a picture's name."""


@cache
def _pair() -> tuple[specjax.Target, specjax.Target, Any]:
    """Return the embedded target, its draft model and their tokenizer."""
    models = (specjax.Target.from_pretrained(embedded(name)) for name in ("target", "draft"))
    return (*models, load_tokenizer(embedded("target")))


@dataclass(frozen=True)
class Step:
    """One greedy step with a chain.

    Attributes:
        before: the text so far.
        drafted: the proposed tokens, as texts.
        target_tokens: the target's own token in place of each drafted token, and after the last.
        accepted: the number of accepted tokens.
    """

    before: str
    drafted: tuple[str, ...]
    target_tokens: tuple[str, ...]
    accepted: int


@cache
def real_step(before: str = "    try:\n        import json\n    except") -> Step:
    """Return the step of the embedded pair with a chain of 4 after the text ``before``."""
    target, draft, tokenizer = _pair()
    prompt = encode(tokenizer, before)
    shot = take_snapshot(target, specjax.DraftModel(draft, draft=specjax.Chain(4)), prompt, steps=1)
    drafted = shot.tokens[1:]
    output, _ = target.forward(np.array([[*prompt, *drafted]]))
    target_tokens = np.argmax(output.logits[0, len(prompt) - 1 :], axis=-1)
    accepted = len(shot.path) - 1
    assert target_tokens[:accepted].tolist() == drafted[:accepted].tolist()
    assert target_tokens[accepted] == shot.bonus
    texts = [tokenizer.decode([token]) for token in (*drafted.tolist(), *target_tokens.tolist())]
    return Step(before, tuple(texts[: len(drafted)]), tuple(texts[len(drafted) :]), accepted)


@style.styled
def draw_step(step: Step) -> "Figure":
    """Draw the four parts of a step: propose, score, accept, keep.

    They are one below the other. Each drafted token has a column.
    """
    now, line, row, size = style.theme(), 0.23, 0.9, 12
    new = [*step.drafted[: step.accepted], step.target_tokens[step.accepted]]
    headings = (
        ("propose", f"the drafter guesses {len(step.drafted)} tokens, one by one"),
        ("score", "one pass of the target: what it would write"),
        ("accept", "guesses are kept as far as the two agree"),
        ("keep", f"{len(new)} new tokens for one pass of the target"),
    )
    last = step.before.split("\n")[-1]
    top = 0.35 + line * step.before.count("\n") + 0.48  # the y of the first heading
    end = top + 3 * row + 0.42 + line * "".join(new).count("\n")  # the y of the last line of code
    figure, (axes,) = style.new_figure(end + 0.82)
    figure.set_layout_engine("none")
    axes.set_position((0, 0, 1, 1))  # data are inches, y from the top
    axes.set(xlim=(0, style.WIDTH), ylim=(end + 0.82, 0))
    axes.axis("off")
    _code(axes, 1.5, 0.35, line, [(step.before, None)])
    axes.text(0.45, 0.35, "text", fontsize=14, fontweight="bold", va="center_baseline")
    for i, (name, about) in enumerate(headings):
        axes.text(
            0.1,
            top + i * row,
            f"{i + 1}",
            fontsize=14,
            fontweight="bold",
            color=now.muted,
            va="center",
        )
        axes.text(0.45, top + i * row, name, fontsize=14, fontweight="bold", va="center")
        axes.text(1.5, top + i * row, about, fontsize=size, color=now.muted, va="center")
    proposed = [(text, now.drafted, True) for text in step.drafted]
    scored = [
        (text, now.passed_over, i <= step.accepted) for i, text in enumerate(step.target_tokens)
    ]
    paints = [now.accepted] * step.accepted + [now.rejected] + [now.passed_over] * len(step.drafted)
    judged = [
        (text, paint, paint is now.accepted)
        for text, paint in zip(step.drafted, paints, strict=False)
    ]
    columns = _columns(proposed, scored, size)
    for i, tokens in enumerate((proposed, scored, judged)):
        y = top + i * row + 0.43
        for x, (text, paint, strong) in zip(columns, tokens, strict=False):
            pictures.write_token(axes, x, y, _visible(text), paint, size=size, strong=strong)
            if tokens is judged and not strong:  # struck out
                half = pictures.letters_width(len(text), size) / 2 + 0.04
                axes.plot([x - half, x + half], [y, y], color=paint.edge, linewidth=1.6, zorder=3)
    _code(
        axes,
        1.5,
        top + 3 * row + 0.42,
        line,
        [(last, None), *((text, now.accepted) for text in new)],
    )
    note = (
        "Real tokens of the embedded models, greedy. When sampling, rejection\n"
        "sampling decides: the text is distributed exactly as the target's."
    )
    axes.text(0.1, end + 0.3, note, fontsize=11, color=now.muted, va="top", linespacing=1.4)
    bend = {
        "arrowstyle": "-|>",
        "color": now.muted,
        "connectionstyle": "arc,armA=20,armB=20,rad=8",
        "linewidth": 1.6,
    }
    axes.annotate("", xy=(5.75, top), xytext=(5.75, top + 3 * row), arrowprops=bend)
    axes.text(
        6.12, top + 1.5 * row, "again", fontsize=size, color=now.muted, rotation=90, va="center"
    )
    return figure


def _columns(proposed: list[Any], scored: list[Any], size: float) -> list[float]:
    """Return the x of the middle of each column, in inches."""
    letters = [
        max(len(token[0]) for token in tokens if token) for tokens in zip_longest(proposed, scored)
    ]
    inches = np.array([pictures.letters_width(count, size) + 0.22 for count in letters])
    return (0.45 + np.cumsum([0.0, *inches[:-1] + 0.2]) + inches / 2).tolist()


def _code(
    axes: "Axes", x: float, y: float, line: float, pieces: list[tuple[str, style.Paint | None]]
) -> None:
    """Write lines of code from ``y`` down.

    A piece with a paint has a background of that colour. The last piece has a dashed edge.
    """
    letter, column, number = pictures.letters_width(1, 12), 0, 0
    # The common indentation is not drawn.
    margin = min(len(text) - len(text.lstrip()) for text in pieces[0][0].split("\n"))
    for text, paint in pieces:
        for i, part in enumerate(text.split("\n")):
            if i:
                column, number = 0, number + 1
            start = (
                x + (column + len(part) - len(part.lstrip()) - margin) * letter,
                y + number * line,
            )
            column, shown = column + len(part), part.strip()
            if paint and shown:
                corner = start[0] - 0.01, start[1] - 0.1
                look = {
                    "facecolor": paint.face,
                    "edgecolor": paint.edge,
                    "linestyle": "--" if text is pieces[-1][0] else "-",
                }
                shape = "round,pad=0,rounding_size=0.04"
                axes.add_patch(
                    FancyBboxPatch(
                        corner, len(shown) * letter + 0.02, 0.2, boxstyle=shape, linewidth=1, **look
                    )
                )
            axes.text(*start, shown, family="monospace", fontsize=12, va="center_baseline")


def _visible(text: str) -> str:
    """Return the text with visible signs for spaces and line breaks."""
    return text.replace(" ", "·").replace("\n", "⏎")


def how_it_works() -> "Figure":
    """Draw one step of the loop."""
    return draw_step(real_step())


@cache
def _tree() -> Any:
    """Return a step with a dynamic tree, after one of the demo's prompts."""
    target, draft, tokenizer = _pair()
    drafter = specjax.DraftModel(draft, draft=specjax.DynamicTree(top_k=3, depth=4, nodes=12))
    prompt = 'def walk(self, node):\n    """Visit every child of the node."""\n    for'
    return take_snapshot(target, drafter, encode(tokenizer, prompt), steps=1)


def draft_tree() -> "Figure":
    """Draw a draft tree with its accepted path in green."""
    return _tree().draw(_pair()[2])


def union_tree() -> "Figure":
    """Draw the union of a draft model's tree and of the tokens that prompt lookup copies."""
    target, draft, tokenizer = _pair()
    parts = (
        specjax.DraftModel(draft, draft=specjax.DynamicTree(top_k=3, depth=3, nodes=8)),
        specjax.PromptLookup(draft=5),
    )
    prompt = "self.visited.append(node)\n        for child in node.children:\n            self."
    shot = take_snapshot(target, specjax.Together(parts), encode(tokenizer, prompt), steps=4)
    return shot.draw(tokenizer)


@cache
def _masked_tree() -> dict[str, Any]:
    """Return a masked step with a dynamic tree, in the middle of a JSON object."""
    target, draft, tokenizer = _pair()
    drafter = specjax.DraftModel(draft, draft=specjax.DynamicTree(top_k=3, depth=4, nodes=12))
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "args": {"type": "array", "items": {"type": "string"}},
            "line": {"type": "integer"},
        },
        "required": ["name", "args", "line"],
        "additionalProperties": False,
    }
    compiler = GrammarCompiler(tokenizer, target.config.vocab_size)
    grammar = compiler.compile(specjax.JsonSchema(schema))
    options = GenerationOptions(max_new_tokens=32, grammar=grammar)
    prompt = encode(tokenizer, "def walk(self, node):\n    return ")
    _, state = decoding.start(target, drafter, [prompt], options=options)
    matcher, step = grammar.matcher(target.config.eos_token_ids), {}
    for _ in range(3):
        draft_of_step, state = jax.jit(decoding.propose_step)(target, drafter, state)
        on_host = jax.device_get(draft_of_step)
        tokens = on_host.tokens[0]
        parents = np.broadcast_to(on_host.parents, on_host.tokens.shape)[0]
        valid = np.append(True, on_host.drafted[0])
        masks, _ = matcher.masks(tokens.tolist(), parents.tolist(), valid.tolist())
        length = int(state.lengths[0])
        state, info = jax.jit(advance_under_masks)(
            target, drafter, state, draft_of_step, np.array([masks])
        )
        path = info.path[0, : info.emitted[0]].tolist()
        step = {
            "text": tokenizer.decode(state.tokens[0, len(prompt) : length]),
            "tokens": tokens,
            "parents": parents,
            "valid": valid,
            "masks": masks,
            "path": path,
            "bonus": int(state.roots[0]),
        }
        matcher.append(state.tokens[0, length : state.lengths[0]].tolist())
    return step


def masked_tree() -> "Figure":
    """Draw a draft tree under a grammar: the size of each mask, and what is not legal."""
    step, tokenizer = _masked_tree(), _pair()[2]
    tokens, parents, masks = step["tokens"], step["parents"], step["masks"]
    sizes = np.unpackbits(masks.view(np.uint8), axis=1).sum(axis=1)
    illegal: set[int] = set()
    reached = {0}
    for node in range(1, len(tokens)):
        above, token = int(parents[node]), int(tokens[node])
        if above not in reached:
            continue
        is_legal = masks[above][token // 32] >> np.uint32(token % 32) & 1
        (reached if is_legal else illegal).add(node)
    notes = [
        f"{sizes[node]:,} legal"
        if node in reached
        else "not legal"
        if node in illegal
        else "not reached"
        for node in range(len(tokens))
    ]
    return pictures.draw_draft(
        parents,
        step["path"],
        [_visible(tokenizer.decode([token])) for token in tokens],
        _visible(tokenizer.decode([step["bonus"]])),
        step["valid"],
        notes=notes,
        illegal=illegal,
        title=f"the text so far: {_visible(step['text'])}",
    )


def long_context() -> "Figure":
    """Draw the speed-up by rows and context, from `benchmarks/results/long_context.json`."""
    return benchmark.picture(
        json.loads((ROOT / "benchmarks/results/long_context.json").read_text())
    )


def _results(name: str) -> Any:
    """Return the results of a benchmark."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def arrivals_rows() -> "Figure":
    """Draw when each request had which row, in static batches and in an engine."""
    return arrivals_tables.rows_picture(_results("arrivals_batches"))


def arrivals_rates() -> "Figure":
    """Draw engines that draft never, always, and by load, at several rates of arrivals."""
    return arrivals_tables.rates_picture(_results("arrivals_rates"))


def serving_clients() -> "Figure":
    """Draw the servers of one model, by their number of clients."""
    return serving_tables.clients_picture(_results("serving"))


def client_server_networks() -> "Figure":
    """Draw the drafts of clients and of the server, over several networks."""
    return client_server_tables.networks_picture(_results("client_server"))


def client_server_clients() -> "Figure":
    """Draw drafting on clients and on the server, by the number of clients."""
    return client_server_tables.clients_picture(_results("client_server"))


def client_server_cut() -> "Figure":
    """Draw how far a drafter continues alone."""
    return client_server_tables.cut_picture(_results("client_server"))


PICTURES: dict[str, Callable[[], "Figure"]] = {
    "arrivals_rows": arrivals_rows,
    "arrivals_rates": arrivals_rates,
    "serving_clients": serving_clients,
    "client_server_networks": client_server_networks,
    "client_server_clients": client_server_clients,
    "client_server_cut": client_server_cut,
    "how_it_works": how_it_works,
    "draft_tree": draft_tree,
    "union_tree": union_tree,
    "masked_tree": masked_tree,
    "long_context": long_context,
}


def main(names: list[str]) -> None:
    """Draw the named pictures, or all, and write their files."""
    if unknown := set(names) - set(PICTURES):
        sys.exit(f"no such picture: {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    for name in names or PICTURES:
        for ending, theme in THEMES.items():
            with style.use(theme):
                pictures.save(PICTURES[name](), "picture", IMAGES / f"{name}{ending}.png")
            print(f"docs/images/{name}{ending}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
