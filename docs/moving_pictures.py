"""Pictures that move in a file: SVG with CSS, which a code host shows too. docs/pictures.py writes them.

The library computes what moves: a schedule's `simulate`, or the messages of `comm.algorithms`, in the order
in which `proof.run` takes them. A reader who wants no motion sees one frame.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping

from minidist.comm import algorithms
from minidist.comm.algorithms.proof import Delivery, run
from minidist.parallel import schedules
from minidist.parallel.schedules.simulation import DRAWN

BLUE, ORANGE, GREEN, PINK = COLORS = ("#0072b2", "#d55e00", "#007a5a", "#a6487f")  # with white letters
Places = Mapping[str, tuple[float, float, str]]
"""Where each block is, and what it says; a block that is not named is hidden."""


class Film:
    """Frames of blocks, one after the other, again and again; `still` is the one without motion."""

    def __init__(self, width: int, height: int, still: int, seconds: float = 2.4) -> None:
        self.width, self.height, self.still, self.seconds = width, height, still, seconds
        self.behind: list[str] = []
        self.blocks: dict[str, tuple[float, float, str]] = {}
        self.frames: list[tuple[str, Places]] = []

    def label(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """A text that stays."""
        self.behind.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float) -> None:
        """A frame that stays."""
        self.behind.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="none" stroke="#777"/>'
        )

    def frame(self, note: str, places: Places) -> None:
        """Add a frame, and what it shows in a sentence."""
        self.frames.append((note, dict(places)))

    def svg(self) -> str:
        """The whole as a file."""
        rules, drawn = [], [*self.behind]
        for number, (key, (width, height, color)) in enumerate(self.blocks.items()):
            places = [frame.get(key) for _, frame in self.frames]
            known = next(each for each in places if each is not None)
            styles, words = [], []
            for place in places:
                known = place or known
                styles.append(
                    f"transform: translate({known[0]:g}px, {known[1]:g}px); opacity: {int(place is not None)}"
                )
                words.append(known[2])
            rules.append(self._animation(f"b{number}", styles, glides=True))
            texts = "".join(
                f'<text class="b{number}w{i}" x="{width / 2:g}" y="{height / 2 + 4:g}" text-anchor="middle" '
                f'fill="#fff" font-weight="600">{html.escape(word)}</text>'
                for i, word in enumerate(dict.fromkeys(words))
            )
            for i, word in enumerate(dict.fromkeys(words)):
                rules.append(
                    self._animation(f"b{number}w{i}", [f"opacity: {int(word == each)}" for each in words])
                )
            drawn.append(
                f'<g class="b{number}"><rect width="{width:g}" height="{height:g}" rx="3" fill="{color}"/>'
                f"{texts}</g>"
            )
        for i, (note, _) in enumerate(self.frames):
            shown = [f"opacity: {int(i == j)}" for j in range(len(self.frames))]
            rules.append(self._animation(f"n{i}", shown))
            drawn.append(f'<text class="n{i}" x="8" y="{self.height - 10}">{html.escape(note)}</text>')
        return document(self.width, self.height, rules, drawn)

    def _animation(self, name: str, styles: list[str], glides: bool = False) -> str:
        """A rule that goes through styles, a frame for each: it stays for 0.6 of it and glides, or jumps."""
        count = len(styles)
        steps = [
            f"{100 * i / count:.4g}%, {100 * (i + (0.6 if glides else 0.999)) / count:.4g}% {{{style}}}"
            for i, style in enumerate(styles)
        ]
        return (
            f".{name} {{{styles[self.still]}; animation: {name} {count * self.seconds:g}s infinite}}\n"
            f"@keyframes {name} {{{' '.join(steps)} 100% {{{styles[0 if not glides else -1]}}}}}"
        )


def document(width: int, height: int, rules: list[str], drawn: list[str]) -> str:
    """A file of SVG: black on white, on dark pages too."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="13" style="background: white">\n'
        f"<style>\n{chr(10).join(rules)}\n"
        "@media (prefers-reduced-motion: reduce) {* {animation: none !important}}\n</style>\n"
        f"{chr(10).join(drawn)}\n</svg>\n"
    )


def rounds(
    one: algorithms.CollectiveSchedule, inputs: list[list[str]], outputs: list[list[str]]
) -> Iterator[list[Delivery]]:
    """Run a collective on lists of words, and yield the messages of each round."""
    taken = list(run(one, inputs, outputs))
    for begins in range(1 + max(each.begins for each in taken)):
        yield [each for each in taken if each.begins == begins and each.sender != each.receiver]


def pipeline_moves(ranks: int = 4, micro_batches: int = 8) -> str:
    """1F1B as it happens: each pass appears when it begins, and a line goes with the time."""
    found = schedules.simulate(schedules.one_f_one_b(ranks, micro_batches))
    scale, left, row, lasts = 17.5, 58, 34, 16.0
    width, height = round(left + scale * found.seconds + 10), ranks * row + 62
    end = left + scale * found.seconds
    rules, drawn = [], []
    begins = sorted({start for events in found.timeline for _, start, _ in events})
    for number, start in enumerate(begins):
        at = 88 * start / found.seconds  # the whole stays for the rest of the time
        rules.append(
            f".t{number} {{animation: t{number} {lasts}s infinite}} @keyframes t{number} "
            f"{{0%, {at:.4g}% {{opacity: 0.12}} {at + 0.01:.4g}%, 100% {{opacity: 1}}}}"
        )
    rules.append(
        f".now {{animation: now {lasts}s linear infinite; opacity: 0}} @keyframes now {{"
        f"0% {{transform: none; opacity: 1}} 88% {{transform: translate({end - left:g}px); opacity: 1}} "
        "88.1%, 100% {opacity: 0}}"
    )
    for rank, events in enumerate(found.timeline):
        y = 8 + rank * row
        drawn.append(f'<text x="4" y="{y + 19}">rank {rank}</text>')
        drawn.append(f'<rect x="{left}" y="{y}" width="{end - left:g}" height="{row - 4}" fill="#eee"/>')
        for each, start, stop in events:
            x, wide = left + scale * start, scale * (stop - start)
            drawn.append(
                f'<g class="t{begins.index(start)}"><rect x="{x:g}" y="{y}" width="{wide - 1:g}" '
                f'height="{row - 4}" fill="{DRAWN[each.kind][1]}"/>'
                f'<text x="{x + wide / 2:g}" y="{y + 19}" text-anchor="middle" font-size="11">'
                f"{each.micro_batch}</text></g>"
            )
    drawn.append(f'<path class="now" d="M{left} 4V{8 + ranks * row}" stroke="#000" stroke-width="2"/>')
    x = left
    for kind in ("forward", "backward"):
        drawn.append(f'<rect x="{x}" y="{height - 36}" width="11" height="11" fill="{DRAWN[kind][1]}"/>')
        drawn.append(f'<text x="{x + 17}" y="{height - 26}">{kind} pass</text>')
        x += 130
    drawn.append(
        f'<text x="{x}" y="{height - 26}">grey: the rank waits ({found.bubble:.1%} of the time)</text>'
    )
    return document(width, height, rules, drawn)


def ring_attention() -> str:
    """Keys and values go round a ring, and each rank's queries meet all that are not masked."""
    ranks, cell, top = 4, 46, 46
    film = Film(560, 280, still=3)
    film.label(80, 22, "keys and values here")
    film.label(300, 22, "its queries meet the keys of 0, 1, 2, 3")
    for rank in range(ranks):
        film.label(8, top + cell * rank + 24, f"rank {rank}")
        film.box(80, top + cell * rank, 110, 38)
        film.blocks[f"kv{rank}"] = (102, 30, COLORS[rank])
        for other in range(ranks):
            film.box(300 + cell * other, top + cell * rank, 42, 38)
            if other <= rank:
                film.blocks[f"{rank}x{other}"] = (42, 38, COLORS[other])
            else:
                film.label(321 + cell * other, top + cell * rank + 24, "-", "middle")
    at = {block: block for block in range(ranks)}
    met: dict[str, tuple[float, float, str]] = {}

    def frame(note: str) -> None:
        for block, rank in at.items():
            if block <= rank:
                met[f"{rank}x{block}"] = (300 + cell * block, top + cell * rank, "")
        film.frame(note, {f"kv{b}": (84, top + 4 + cell * r, f"k, v of {b}") for b, r in at.items()} | met)

    frame("Each rank's queries meet its own keys; later tokens are masked (-).")
    one = algorithms.schedule("all_gather", "ring", ranks, ranks)
    words = [[f"{rank}"] * ranks for rank in range(ranks)]
    for step, messages in enumerate(rounds(one, words, words), 1):
        at |= {each.sent.start: each.receiver for each in messages}
        frame(f"Step {step} of {ranks - 1}: the blocks go on to the next rank, and meet its queries.")
    return film.svg()


def experts() -> str:
    """Tokens travel to the ranks of their experts and back, by two all-to-alls."""
    tokens, chosen = ("abcd", "efgh"), dict(zip("abcdefgh", (0, 2, 1, 3, 2, 0, 3, 1), strict=True))
    film = Film(560, 200, still=2)
    for rank in range(2):
        film.label(8, 40 + 70 * rank, f"rank {rank}")
        film.label(8, 58 + 70 * rank, f"experts {2 * rank}, {2 * rank + 1}")
        film.box(110, 18 + 70 * rank, 424, 48)
    for token in chosen:
        film.blocks[token] = (92, 36, COLORS[chosen[token]])

    def frame(note: str, held: list[list[str]], done: str = "") -> None:
        film.frame(
            note,
            {
                token: (
                    116 + 104 * i,
                    24 + 70 * rank,
                    f"{token}{done} -> {chosen[token]}" if not done else f"{token}{done}",
                )
                for rank, own in enumerate(held)
                for i, token in enumerate(own)
            },
        )

    def exchanged(held: list[list[str]], to: Callable[[str], int]) -> list[list[str]]:
        counts = [[sum(to(token) == rank for token in own) for rank in range(2)] for own in held]
        one = algorithms.schedule("all_to_all", "pairwise", 2, 4, counts)
        arrived = [["" for own in counts for _ in range(own[rank])] for rank in range(2)]
        for _ in rounds(one, held, arrived):
            pass
        return arrived

    own = [list(each) for each in tokens]
    frame("Each rank has four tokens; the router has chosen an expert for each.", own)
    sorted_ = [sorted(each, key=lambda token: chosen[token] // 2) for each in own]
    frame("They are sorted by the rank of their expert.", sorted_)
    there = exchanged(sorted_, lambda token: chosen[token] // 2)
    frame("An all-to-all: each token goes to the rank that holds its expert.", there)
    frame("The experts compute, each its own tokens.", there, "'")
    home = [sorted(each, key=lambda token: token in tokens[1]) for each in there]
    back = exchanged(home, lambda token: int(token in tokens[1]))
    frame("A second all-to-all brings them back.", back, "'")
    frame("In their order again, with what their experts made of them.", [sorted(each) for each in back], "'")
    return film.svg()


def tensor_parallel() -> str:
    """An MLP on two ranks: columns, then rows, and an all-reduce of what both have of the output."""
    film = Film(560, 210, still=3)
    x_at = 90, 210, 330
    for rank in range(2):
        y = 22 + 74 * rank
        film.label(8, y + 28, f"rank {rank}")
        film.box(84, y, 464, 52)
        for name in ("x", "h"):
            film.blocks[f"{name}{rank}"] = (100, 40, GREEN if name == "x" else COLORS[3 * rank])
        for part in range(2):
            film.blocks[f"{part} from {rank}"] = (98, 40, COLORS[3 * rank])
    here = {f"x{rank}": (x_at[0], 28.0 + 74 * rank, "x") for rank in range(2)}
    film.frame("Both ranks have the input x.", here)
    here |= {f"h{rank}": (x_at[1], 28 + 74 * rank, f"x a, half {rank}") for rank in range(2)}
    film.frame("The first matrix is cut by columns: each rank gets half of the middle.", here)
    words = [[f"{rank}"] * 2 for rank in range(2)]

    def outputs() -> dict[str, tuple[float, float, str]]:
        return {
            f"{part} from {rank}": (
                x_at[2] + 106 * part,
                28 + 74 * rank,
                "sum" if len(words[rank][part]) > 1 else "part",
            )
            for rank in range(2)
            for part in range(2)
        }

    film.frame("The second is cut by rows: each rank has its part of the sum for all of y.", here | outputs())
    one = algorithms.schedule("all_reduce", "ring", 2, 2)
    notes = ("An all-reduce, first step: each rank adds what arrives.", "Second step: the sums come back.")
    for note, messages in zip(notes, rounds(one, *[[["0"] * 2, ["1"] * 2]] * 2), strict=True):
        for each in messages:
            sent, there = words[each.sender][each.sent.start], words[each.receiver]
            there[each.sent.start] = sent + (there[each.sent.start] if each.received.reduce else "")
        film.frame(note, here | outputs())
    film.frame("Both have y. Backward, one more all-reduce sums the gradient of x.", here | outputs())
    return film.svg()


FILMS = (pipeline_moves, ring_attention, experts, tensor_parallel)
"""Functions; the file is named after each."""
