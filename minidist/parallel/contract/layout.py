"""`Layout`: how many ranks share the batch, the layers, the matrices and the tokens, and how."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from minidist._arguments import is_whole
from minidist._names import unknown
from minidist.parallel.contract.fp8_recipes import FP8_RECIPES
from minidist.parallel.contract.recompute_policies import EVERY_LAYER, POLICIES
from minidist.parallel.contract.residency import ROWS, Residency
from minidist.parallel.contract.schedule_kinds import DEFAULT_SCHEDULE, chunked_kinds, schedule_kind

PRECISIONS = ("fp32", "bf16", "fp16", *FP8_RECIPES)


@dataclass(frozen=True)
class Layout:
    """How a model is trained on `dp * tp * pp * cp` ranks.

    All axes can be combined, with micro-batches, every precision and recomputation. ZeRO 1 works with
    all of them, ZeRO 2 and 3 with all but pp.

    >>> Layout(dp=4)
    >>> Layout.parse("dp=2,tp=2,pp=2,micro_batches=4")

    Attributes:
        dp: data parallel: ranks that share the rows of a batch.
        tp: tensor parallel: ranks that share each layer's matrices.
        pp: pipeline: ranks that share the layers.
        zero: stage of ZeRO: 1 shards the optimizer's state over dp and cp, 2 also gradients, 3 also
            parameters.
        micro_batches: into how many parts a rank's rows are cut, over which gradients add up.
        precision: "fp32" computes in the parameters' own dtype; "bf16" and "fp16" mix it with float32;
            "fp8", "fp8_delayed", "fp8_blocks" and "fp8_mx" also round what linear layers multiply, which is
            emulated (training/fp8.py).
        recompute: recompute activations in the backward pass instead of keeping them: True for those of every
            layer, or the name of a policy, such as "every second layer" or "attention alone".
        cp: context parallel: ranks that share the tokens of each row.
        ep: expert parallel: neighbours over dp and cp that share the experts of each layer.
        cp_kind: with cp: how attention sees all tokens: "ring" passes keys around; "ulysses" trades tokens
            for heads, on at most as many ranks as there are key heads; "2x4": 2 neighbours trade heads, and
            4 groups of them form a ring.
        sequence_parallel: with tp: norms and dropout work on a share of the tokens.
        schedule: with pp: the order of forward and backward passes.
        chunks: with pp: parts of the model on each rank: 2 or more with the schedule interleaved, 2 with one
            on a V, 1 with any other.
        shard: with zero: neighbours over dp and cp that share one copy of the state; 0 for all.

    Raises:
        TypeError: a field has another type than its default.
        ValueError: a field is out of range, or conflicts with another one, which is named.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    micro_batches: int = 1
    precision: str = "fp32"
    recompute: bool | str = False
    cp: int = 1
    sequence_parallel: bool = False
    schedule: str = DEFAULT_SCHEDULE
    chunks: int = 1
    shard: int = 0
    cp_kind: str = "ring"
    ep: int = 1

    def __post_init__(self) -> None:
        if self.recompute == EVERY_LAYER:
            object.__setattr__(self, "recompute", True)
        for name, kind in _types().items():
            value = getattr(self, name)
            if type(value) is not kind and not (name == "recompute" and isinstance(value, str)):
                raise TypeError(f"{name} is {value!r}; give {_KINDS[kind]}")
        if isinstance(self.recompute, str) and self.recompute not in POLICIES:
            raise ValueError(
                f"recompute is {self.recompute!r}; give True or False, or the name of a policy: "
                f"{', '.join(POLICIES)}"
            )
        for name in ("dp", "tp", "pp", "cp", "ep", "micro_batches", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.zero not in ROWS:
            raise ValueError(f"zero is {self.zero}; give stage 1, 2 or 3, or 0 for none")
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if self.shard and self.residency.whole_state:
            raise ValueError(f"shard is {self.shard} with zero=0, which shares nothing; give zero=1, 2 or 3")
        if self.shard < 0 or (self.shard and self.dp * self.cp % self.shard):
            raise ValueError(
                f"shard is {self.shard}, which does not divide the {self.dp * self.cp} ranks of "
                f"dp={self.dp} and cp={self.cp}; give a divisor, such as the number of ranks on a host, or "
                "0 for all of them"
            )
        if self.dp * self.cp % self.ep:
            raise ValueError(
                f"ep is {self.ep}, which does not divide the {self.dp * self.cp} ranks of dp={self.dp} and "
                f"cp={self.cp}, whose neighbours share the experts; give a divisor"
            )
        if self.ep > 1 and self.shard:
            raise ValueError(
                f"shard is {self.shard} with ep={self.ep}: experts have owners of their own; leave one of "
                "them out"
            )
        if self.cp == 1 and self.cp_kind != "ring":
            raise ValueError(f"cp_kind is {self.cp_kind!r} with cp=1; give cp of 2 or more, or leave it out")
        trading, sign, ring = self.cp_kind.partition("x")
        if self.cp_kind not in ("ring", "ulysses") and not (
            sign and trading.isdecimal() and ring.isdecimal() and int(trading) * int(ring) == self.cp
        ):
            raise ValueError(
                f'cp_kind is {self.cp_kind!r}; give "ring", "ulysses", or two factors of cp={self.cp}, such '
                f'as "{self.cp}x1" for {self.cp} neighbours that trade heads'
            )
        schedule = schedule_kind(self.schedule)
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel is True with tp=1; give tp of 2 or more, or leave it out")
        if self.pp == 1 and (self.schedule, self.chunks) != (DEFAULT_SCHEDULE, 1):
            raise ValueError(
                f"schedule is {self.schedule!r} and chunks {self.chunks} with pp=1, where there is no "
                "pipeline; give pp of 2 or more, or leave them out"
            )
        if not schedule.takes_chunks(self.chunks):
            raise ValueError(
                f"chunks is {self.chunks} with schedule={self.schedule!r}; a layout has chunks of "
                f"{chunked_kinds()}, and 1 with any other"
            )
        if self.recompute and not schedule.allows_recompute:
            raise ValueError(
                f"recompute is {self.recompute!r} with schedule={self.schedule!r}: recomputed activations "
                "are kept for one backward pass, so that none is left to fill the bubble; give another "
                "schedule, or recompute=False"
            )

    @property
    def ranks(self) -> int:
        """How many ranks the layout needs: dp * tp * pp * cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def trading(self) -> int:
        """How many neighbours along cp trade tokens for heads; 1 if keys go around a ring of all."""
        if self.cp_kind in ("ring", "ulysses"):
            return self.cp if self.cp_kind == "ulysses" else 1
        return int(self.cp_kind.partition("x")[0])

    @property
    def residency(self) -> Residency:
        """What every rank keeps whole between steps, by `zero`."""
        return ROWS[self.zero]

    @property
    def owners(self) -> int:
        """How many ranks share one copy of the state, with ZeRO."""
        return self.shard or self.dp * self.cp

    @classmethod
    def parse(cls, text: str) -> Layout:
        """A layout from text such as "dp=2,tp=2" or "dp=4,precision=bf16".

        Raises:
            TypeError: `text` is not a string.
            ValueError: an unknown field, with the nearest known one, or a value that the field does not take.
        """
        if not isinstance(text, str):
            raise TypeError(f"the layout is {text!r}; give text such as 'dp=2,tp=2', or a Layout itself")
        kinds = _types()
        values: dict[str, int | str | bool] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, sign, value = (piece.strip() for piece in part.partition("="))
            if not sign:
                raise ValueError(f"the layout {text!r} has {part!r}; write it as name=value, such as dp=2")
            if name not in kinds:
                raise unknown("layout field", name, kinds)
            if name in values:
                raise ValueError(f"the layout {text!r} gives {name} twice; give it once")
            values[name] = _read(name, value, kinds[name])
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The fields that differ from their defaults, as `parse` reads them; "dp=1" if none does."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "dp=1"


def check_available(layout: Layout) -> None:
    """ValueError if a layout combines axes that training does not support together."""
    row = layout.residency
    if layout.pp > 1 and not (row.whole_parameters and row.whole_gradients):
        moved = "gradients" if row.whole_parameters else "parameters"
        raise ValueError(
            f"zero={layout.zero} with pp={layout.pp} in the layout would send {moved} once for each of a "
            "pipeline's micro-batches, which costs more than it saves; give zero=1, or pp=1"
        )


def check_secondary(layout: Layout, ranks: object) -> None:
    """ValueError unless so many ranks can share a second copy of the parameters."""
    owners = layout.owners
    if layout.residency.whole_parameters or not is_whole(ranks) or not 1 < ranks < owners or owners % ranks:
        raise ValueError(
            f"secondary is {ranks!r} with zero={layout.zero}, and {owners} ranks share the parameters; give, "
            "with zero=3, a smaller divisor of the ranks that share the parameters, from 2 on, such as the "
            "number of ranks on a host; or leave it out"
        )


@cache
def _types() -> dict[str, type]:
    """The type of each field of a layout."""
    return {field.name: type(field.default) for field in fields(Layout)}


_KINDS = {int: "a whole number", str: "a name", bool: "True or False"}


def _read(name: str, value: str, kind: type) -> int | str | bool:
    if kind is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if kind is str or name == "recompute":
        return value
    if kind is int and value.isascii() and value.removeprefix("-").isdigit():
        return int(value)
    raise ValueError(f"{name} is {value!r}; give {_KINDS[kind]}")
