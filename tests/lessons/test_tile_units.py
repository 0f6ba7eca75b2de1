"""Lesson 6: on AMX the unit issues the instructions that the model stands for; elsewhere it is the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from checks import tile_units
from checks.tensor_cores import lesson
from checks.tile_units import OfThisCPU, Tiles
from minidist.kernels.cpu.support import tile_registers
from minidist.kernels.tpu.tiles import TileUnit
from tests.helpers.refusals import refuses

ADDS = {
    "add0": (0, 4, 6),
    "add1": (1, 4, 7),
    "add2": (2, 5, 6),
    "add3": (3, 5, 7),
}  # as tile_registers has them


def test_each_method_is_the_instruction_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model, called = TileUnit([]), set()

    def call(self: Any, name: str, *place: int) -> None:
        assert hasattr(tile_registers, name)
        called.add(name)
        model.memory = self.memory
        if name in ADDS:
            model.multiply(*ADDS[name])
        elif name == "begin_tiles":
            model.configure(tile_registers.configuration())
        elif name == "end_tiles":
            model.release()
        else:
            getattr(model, name[:-1])(int(name[-1]), *place)

    monkeypatch.setattr(tile_units._Instructions, "_call", call)
    a, b = (np.random.default_rng(i).integers(1, 9, (32, 32)).astype(np.float32) for i in (0, 1))
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
    c = np.full((32, 32), np.nan, np.float32)
    lesson.solution("tile_matmul")(OfThisCPU(), *bits, c)
    np.testing.assert_array_equal(c, a @ b)
    assert model.released
    assert len(called) == 2 + 4 * 4  # begin and end; four of each other kind
    with pytest.raises(ValueError, match="16 rows"):
        OfThisCPU().configure(15)


def test_without_amx_it_is_the_model_and_no_mode_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_units, "matrix_unit", lambda: "")
    assert type(tile_units.here()) is Tiles
    rates = tile_units.gigaflops(8, rounds=1)
    assert rates.pop("float32")
    assert rates == {"bf16x6": None, "bf16x3": None, "bf16": None}
    monkeypatch.setattr(tile_units, "matrix_unit", lambda: tile_units.AMX)
    assert type(tile_units.here()) is OfThisCPU


def tiles() -> Tiles:
    unit = Tiles()
    unit.configure(16)
    return unit


HALVES, SUMS = np.zeros((16, 32), np.uint16), np.zeros((16, 16), np.float32)
test_what_lies_outside_an_array_is_refused = refuses(
    lambda call: call(),
    (lambda: tiles().load(0, HALVES, 0, 0), "load takes tiles 4 to 7, not 0"),
    (lambda: tiles().load(4, HALVES, 1, 0), IndexError, "needs rows to 17 and columns to 32"),
    (lambda: tiles().load(4, np.zeros((32, 32), np.uint16).T, 0, 0), "np.ascontiguousarray"),
    (lambda: tiles().store(0, SUMS, 0, -16), IndexError, "begins at"),
)
