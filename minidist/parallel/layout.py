"""A layout: how many ranks work in each direction, and what else belongs to a strategy."""

from __future__ import annotations

from dataclasses import dataclass, fields

from minidist._names import unknown

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Layout:
    """How a model is trained on `dp * tp * pp` ranks.

    >>> Layout(dp=4)
    >>> Layout.parse("dp=4,micro_batches=2")

    Raises:
        TypeError: a field is of another type than its default.
        ValueError: a field is out of range.
    """

    dp: int = 1  # data parallel: ranks that share the rows of a batch
    tp: int = 1  # tensor parallel: ranks that share each layer's matrices
    pp: int = 1  # pipeline: ranks that share the layers
    zero: int = 0  # ZeRO stage: 1 shards the optimizer's state over dp, 2 gradients too, 3 parameters too
    micro_batches: int = 1  # parts that a rank's rows are cut into; gradients add up over them
    precision: str = "fp32"  # "fp32" computes in the parameters' own dtype; "bf16" and "fp16" mix
    recompute: bool = False  # recompute activations in the backward pass instead of keeping them

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if type(value) is not kind:
                raise TypeError(f"{field.name} is {value!r}; give {_KINDS[kind]}")
        for name in ("dp", "tp", "pp", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.zero not in range(4):
            raise ValueError(f"zero is {self.zero}; give stage 1, 2 or 3, or 0 for none")
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)

    @property
    def ranks(self) -> int:
        """Ranks that the layout needs: dp * tp * pp."""
        return self.dp * self.tp * self.pp

    @classmethod
    def parse(cls, text: str) -> Layout:
        """A layout from text such as "dp=2,tp=2" or "dp=4,precision=bf16".

        Raises:
            ValueError: an unknown field, with the nearest known one, or a value that does not fit it.
        """
        kinds = {field.name: type(field.default) for field in fields(cls)}
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
        """The fields that differ from their defaults, as `parse` reads them; "dp=1" where none does."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "dp=1"


_KINDS = {int: "a whole number", str: "a name", bool: "True or False"}


def _read(name: str, value: str, kind: type) -> int | str | bool:
    if kind is str:
        return value
    if kind is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if kind is int and value.lstrip("-").isdigit():
        return int(value)
    raise ValueError(f"{name} is {value!r}; give {_KINDS[kind]}")
