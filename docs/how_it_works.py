"""Draws how_it_works.png: one step of the decoding loop. Run from anywhere: python docs/how_it_works.py."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

GREEN, RED, BLUE, GREY = "#2e8b57", "#c0392b", "#2c6fbb", "#888888"


def box(axes, x: float, y: float, width: float, text: str, edge: str, face: str = "white") -> None:
    """One token."""
    shape = FancyBboxPatch((x, y), width, 0.62, boxstyle="round,pad=0.02,rounding_size=0.12", ec=edge, fc=face, lw=1.8)
    axes.add_patch(shape)
    axes.text(x + width / 2, y + 0.31, text, ha="center", va="center", fontsize=12, family="monospace", color="black")


def row(axes, y: float, title: str, note: str, cells: list[tuple[str, str, str]]) -> None:
    """One stage: its name, a note, and its tokens as (text, edge colour, face colour)."""
    axes.text(0, y + 0.42, title, fontsize=14, fontweight="bold", va="center")
    axes.text(0, y + 0.08, note, fontsize=10, color="#444444", va="center")
    for i, (text, edge, face) in enumerate(cells):
        if text:
            box(axes, 4.6 + 1.45 * i, y, 1.25, text, edge, face)


def main() -> None:
    """Draw and save."""
    figure, axes = plt.subplots(figsize=(12.6, 5.6))
    axes.set_xlim(-0.1, 12.3)
    axes.set_ylim(-0.55, 5.05)
    axes.axis("off")
    committed = ("for", GREY, "#eeeeee")
    draft = ("item", "in", "self", ".x")
    proposed = [(text, BLUE, "white") for text in draft]
    scored = [(text, GREY, "#f6f6f6") for text in ("item", "in", "self", ".items", "…")]
    accepted = [(text, GREEN, "#e6f5ec") for text in draft[:3]]
    kept = [(text, GREY, "#eeeeee") for text in draft[:3]]
    row(axes, 4.1, "propose", "the drafter: 4 cheap passes", [committed, *proposed])
    row(axes, 3.0, "score", "the target: one pass over root and draft", scored)
    row(axes, 1.9, "accept", "rejection sampling: exactly the target's p", [committed, *accepted, (".x", RED, "#fbeaea")])
    row(axes, 0.8, "keep", "both caches: the path of 4 is appended", [committed, *kept, (".items", GREEN, "#e6f5ec")])
    axes.text(4.6, 4.86, "root", fontsize=10, color=GREY)
    axes.text(6.05, 4.86, "draft", fontsize=10, color=BLUE)
    axes.text(10.4, 0.6, "the target's own token:\nthe next root", fontsize=10, color=GREEN, va="top")
    for y in (3.92, 2.82, 1.72):
        axes.annotate("", xy=(8.1, y - 0.16), xytext=(8.1, y + 0.1), arrowprops={"arrowstyle": "-|>", "color": "#444444"})
    bend = "arc,angleA=0,angleB=0,armA=22,armB=22,rad=8"
    loop = {"arrowstyle": "-|>", "color": "#444444", "connectionstyle": bend}
    axes.annotate("", xy=(11.85, 4.41), xytext=(11.85, 1.1), arrowprops=loop)
    axes.text(
        0,
        -0.3,
        "4 tokens for one pass of the target. The whole loop is one lax.while_loop on the device: no host round trip.",
        fontsize=11.5,
    )
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110, bbox_inches="tight", facecolor="white")


if __name__ == "__main__":
    main()
