"""Animations that play below a cell, off line: frames of SVG, with buttons to play and to step.

    scene = Scene(700, 240)
    scene.still('<circle .../>')                           # what is there in every frame
    scene.block("a", width=40, height=24, color=BLUE)              # what moves
    scene.frame("First, a is on rank 0.", {"a": (10, 20, "3")})    # where each block is, and what it says
    scene.frame("Then it goes to rank 1.", {"a": (200, 20, "3")})
    animate(scene, "What it shows.", alt="In words.")

A block that a frame does not name is hidden in it. Blocks glide from one frame's place to the next's. Or
give `animate` a list of (note, matplotlib figure or svg), which are then shown one after the other.
"""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from checks.figures import WORDS, framed, svg

_numbers = itertools.count(1)

PLAYER = """
<div id="{own}-bar"
style="display: flex; flex-wrap: wrap; gap: 0.5em; align-items: center; margin-top: 0.3em">
<button type="button" aria-label="One step back" style="{button}">&#9664;</button>
<button type="button" aria-label="Play or pause" style="{button}">Play</button>
<button type="button" aria-label="One step on" style="{button}">&#9654;</button>
<input type="range" min="0" max="{last}" value="0" aria-label="Step" style="flex: 0 1 12em">
<span aria-live="polite"
style="flex: 1 1 15em; min-height: 2.6em; display: flex; align-items: center"></span></div>
<script>(() => {{
  const bar = document.getElementById("{own}-bar"), root = bar.parentElement.querySelector("svg, .stills");
  const [back, play, on] = bar.querySelectorAll("button"), range = bar.querySelector("input");
  const words = bar.querySelector("span"), frames = {frames};
  let now = 0, timer = null;
  function show(i) {{
    now = (i + frames.length) % frames.length;
    range.value = now; words.textContent = frames[now].note;
    {draw}
  }}
  function stop() {{ clearInterval(timer); timer = null; play.textContent = "Play"; }}
  play.onclick = () => {{
    if (timer) return stop();
    if (now == frames.length - 1) show(0);
    play.textContent = "Pause";
    timer = setInterval(() => {{ if (now == frames.length - 1) stop(); else show(now + 1); }}, {pause});
  }};
  back.onclick = () => {{ stop(); show(now - 1); }};
  on.onclick = () => {{ stop(); show(now + 1); }};
  range.oninput = () => {{ stop(); show(+range.value); }};
  show(0);
}})();</script>
"""
BUTTON = (
    "font: inherit; color: inherit; background: transparent; border: 1px solid currentColor; "
    "border-radius: 4px; padding: 0.1em 0.7em; cursor: pointer"
)
MOVE = """for (const block of root.querySelectorAll("[data-block]")) {
      const place = frames[now].blocks[block.dataset.block];
      block.style.opacity = place ? 1 : 0;
      if (!place) continue;
      block.style.transform = `translate(${place[0]}px, ${place[1]}px)`;
      block.querySelector("text").textContent = place[2];
      block.querySelector("rect").setAttribute("stroke-width", place[3] ? 2.5 : 0);
    }"""
SWAP = 'root.querySelectorAll(":scope > *").forEach((each, i) => {{ each.hidden = i != now; }});'


class Scene:
    """A picture with blocks that move.

    Args:
        width, height: in pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._stills: list[str] = []
        self._blocks: dict[str, tuple[float, float, str]] = {}
        self._frames: list[dict[str, Any]] = []

    def still(self, svg: str) -> None:
        """Add what does not move, as SVG; use currentColor, so that it is seen on light and dark."""
        self._stills.append(svg)

    def label(self, x: float, y: float, text: str, size: float = 13, anchor: str = "middle") -> None:
        """Add a text that does not move."""
        self.still(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="currentColor">'
            f"{html.escape(text)}</text>"
        )

    def block(self, key: str, width: float, height: float, color: str) -> None:
        """Add a block that moves, in one of the figures' colours."""
        self._blocks[key] = (width, height, color)

    def frame(self, note: str, places: Mapping[str, tuple[Any, ...]]) -> None:
        """Add a frame: a note, and for each block that is seen (x, y, its text[, True for an outline])."""
        self._frames.append({"note": note, "blocks": {key: list(place) for key, place in places.items()}})

    def html(self, caption: str, alt: str, pause: int) -> str:
        """The whole as HTML."""
        return framed(self.svg(), caption, alt, _player(self._frames, MOVE, pause))

    def svg(self, number: int = 0) -> str:
        """Frame `number`; the first is what a page without scripts shows."""
        places = self._frames[number]["blocks"] if self._frames else {}
        blocks = "".join(self._drawn(key, places.get(key)) for key in self._blocks)
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" font-family="system-ui, sans-serif" '
            f'style="width: 100%; max-width: {self.width}px">{"".join(self._stills)}'
            f"{blocks}</svg>"
        )

    def note(self, number: int) -> str:
        """What frame `number` says."""
        return str(self._frames[number]["note"])

    def _drawn(self, key: str, place: Sequence[Any] | None) -> str:
        """A block as SVG, at its place or hidden."""
        width, height, color = self._blocks[key]
        x, y, text, *outline = place or (0, 0, "")
        return (
            f'<g data-block="{html.escape(key)}" style="transition: transform 0.7s, opacity 0.3s; '
            f'opacity: {int(place is not None)}; transform: translate({x}px, {y}px)">'
            f'<rect width="{width}" height="{height}" rx="3" fill="{color}" fill-opacity="0.9" '
            f'stroke="currentColor" stroke-width="{2.5 if any(outline) else 0}"/>'
            f'<text x="{width / 2}" y="{height / 2}" dy="0.35em" font-size="12" text-anchor="middle" '
            f'fill="white" font-weight="600">{html.escape(str(text))}</text></g>'
        )


def animate(what: Scene | Sequence[tuple[str, Any]], caption: str, alt: str, pause: int = 1400) -> None:
    """Show an animation below the cell; `pause` is the time of a frame in milliseconds.

    Args:
        what: a `Scene`, or frames as (note, matplotlib figure or svg).
        caption: what it shows, in a sentence.
        alt: the same for those who do not see it, with what happens.
        pause: milliseconds from one frame to the next.
    """
    from IPython.display import HTML, display

    if isinstance(what, Scene):
        display(HTML(what.html(caption, alt, pause)))
        return
    pictures = [each if isinstance(each, str) else svg(each) for _, each in what]
    stills = "".join(f"<div{' hidden' * (i > 0)}>{picture}</div>" for i, picture in enumerate(pictures))
    frames = [{"note": note} for note, _ in what]
    player = _player(frames, SWAP.replace("{{", "{").replace("}}", "}"), pause)
    whole = framed(
        "",
        caption,
        alt,
        f'<div class="stills" role="img" aria-label="{html.escape(alt)}">{stills}</div>{player}',
    )
    display(HTML(whole))


def _player(frames: list[dict[str, Any]], draw: str, pause: int) -> str:
    return PLAYER.format(
        own=f"a{next(_numbers)}",
        last=len(frames) - 1,
        frames=json.dumps(frames).replace("</", "<\\/"),
        draw=draw,
        pause=pause,
        button=BUTTON,
    )


def color(name: str) -> str:
    """One of the figures' colours, as CSS that fits light and dark."""
    return WORDS.get(name, name)
