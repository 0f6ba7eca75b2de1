"""How a PTX instruction becomes a function that Numba's kernels call.

Numba has no tensor cores, no asynchronous copies and no 16-byte loads. But a function may write LLVM code
where it is called (Numba's `@intrinsic`), and LLVM takes an instruction as text ("inline assembly").
`@instruction` joins the two: the decorated function gets an `Assembler` and the arguments of the call, and
writes one instruction. Numba's simulator compiles nothing, so there a Python function, the twin, takes its
place.

Where PTX takes an address these functions take (array, index), the element at that index of a 1-D array.
Bounds are not checked, and a negative index does not count from the end.

Source: LLVM Language Reference, "Inline Assembler Expressions"; PTX ISA (each file names its sections).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import config

INT16, INT32, INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOAT32, VOID = ir.FloatType(), ir.VoidType()
SHARED, GLOBAL = 3, 1  # LLVM's numbers of the address spaces

Value = Any  # an LLVM value while code is built: llvmlite has no types
Function = Callable[..., Any]


@dataclass(frozen=True)
class AsmOperand:
    """An argument of a call: its Numba type, and its LLVM value."""

    type: Any
    value: Value

    @property
    def literal(self) -> int:
        """The number itself, if it is known when compiling."""
        number: int = self.type.literal_value
        return number

    @property
    def element_bytes(self) -> int:
        """The bytes of an element of an array."""
        bits: int = self.type.dtype.bitwidth
        return bits // 8


class Assembler:
    """Writes LLVM code where an instruction is called."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context = context
        self.builder = builder

    def integer(self, x: AsmOperand, kind: str = "int32") -> Value:
        """An integer argument, cast to Numba's type `kind`."""
        from numba.cuda import types

        return self.context.cast(self.builder, x.value, x.type, getattr(types, kind))

    def start(self, array: AsmOperand) -> Value:
        """A pointer to element 0."""
        return self.context.make_array(array.type)(self.context, self.builder, value=array.value).data

    def pointer(self, array: AsmOperand, index: AsmOperand | int) -> Value:
        """A pointer to the element at this index."""
        return self.pointers(array, index, 1)[0]

    def pointers(self, array: AsmOperand, index: AsmOperand | int, count: int) -> list[Value]:
        """Pointers to `count` elements from `index` on.

        Each is an index from the array's start. From pointers that start at each other, LLVM for sm_100 does
        not make registers of a local array.
        """
        start = self.start(array)
        first = ir.Constant(INT64, index) if isinstance(index, int) else self.integer(index, "intp")
        offsets = [first, *(self.builder.add(first, ir.Constant(INT64, e)) for e in range(1, count))]
        return [self.builder.gep(start, [offset], inbounds=True) for offset in offsets]

    def global_address(self, array: AsmOperand, index: AsmOperand | int = 0) -> Value:
        """The 64-bit address of an element in global memory."""
        pointer = self.pointer(array, index)
        there = ir.PointerType(pointer.type.pointee, GLOBAL)
        return self.builder.ptrtoint(self.builder.addrspacecast(pointer, there), INT64)

    def shared_address(self, array: AsmOperand, index: AsmOperand) -> Value:
        """The 32-bit address of an element in shared memory, by 32-bit arithmetic."""
        pointer = self.start(array)
        there = ir.PointerType(pointer.type.pointee, SHARED)
        first = self.builder.ptrtoint(self.builder.addrspacecast(pointer, there), INT32)
        size = ir.Constant(INT32, array.element_bytes)
        return self.builder.add(first, self.builder.mul(self.integer(index), size))

    def load(self, array: AsmOperand, index: AsmOperand | int, count: int) -> list[Value]:
        """The values of `count` elements; of a local array under constant indices these are registers."""
        return [self.builder.load(pointer) for pointer in self.pointers(array, index, count)]

    def store(self, array: AsmOperand, index: AsmOperand | int, values: Sequence[Value]) -> None:
        """Write values to the elements from `index` on."""
        for pointer, value in zip(self.pointers(array, index, len(values)), values, strict=True):
            self.builder.store(value, pointer)

    def ptx(
        self,
        text: str,
        constraints: str,
        operands: Sequence[Value] = (),
        results: int = 0,
        kind: Any = INT32,
        pure: bool = False,
    ) -> list[Value]:
        """Write one instruction, and return its `results` results, each of LLVM type `kind`.

        In `text` $0 is the first result, and the operands follow the results. `constraints` names the kind of
        each as LLVM does: h, r and l are integers of 16, 32 and 64 bits, f is float32; = marks a result. An
        instruction that is not `pure` keeps its position among the accesses to memory.
        """
        if not pure:
            constraints = f"{constraints},~{{memory}}".lstrip(",")
        returned = VOID if results == 0 else kind if results == 1 else ir.LiteralStructType([kind] * results)
        function = ir.FunctionType(returned, [operand.type for operand in operands])
        made = ir.InlineAsm(function, text, constraints, side_effect=not pure)
        # Convergent: the threads of a warp may have to arrive together, so LLVM must not branch around it.
        value = self.builder.call(made, list(operands), attrs=("convergent",))
        if results < 2:
            return [value] * results
        return [self.builder.extract_value(value, e) for e in range(results)]


def instruction(
    twin: Function | None = None, literals: tuple[str, ...] = (), returns: str = "void"
) -> Callable[[Function], Function]:
    """Make an instruction of `lower(assembler, *operands)`, which writes it.

    In Numba's simulator (NUMBA_ENABLE_CUDASIM=1) the instruction is its `twin` instead. `literals` names
    parameters whose values must be known when compiling; `returns` is Numba's name of the result's type.
    """

    def decorate(lower: Function) -> Function:
        if config.ENABLE_CUDASIM:
            return twin or _missing(lower.__name__)
        from numba.cuda import types
        from numba.cuda.core.errors import RequireLiteralValue
        from numba.cuda.extending import intrinsic
        from numba.cuda.typing import signature

        names = lower.__code__.co_varnames[1 : lower.__code__.co_argcount]
        result = getattr(types, returns)

        @functools.wraps(lower)
        def define(typing_context: Any, *kinds: Any) -> Any:
            for name, kind in zip(names, kinds, strict=True):
                if name in literals and not isinstance(kind, types.IntegerLiteral):
                    raise RequireLiteralValue(f"{lower.__name__}: {name} has to be known when compiling")

            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
                operands = [AsmOperand(*pair) for pair in zip(signature.args, arguments, strict=True)]
                value = lower(Assembler(context, builder), *operands)
                return context.get_dummy_value() if returns == "void" else value

            return signature(result, *kinds), generate

        made: Function = intrinsic(define)
        return made

    return decorate


def _missing(name: str) -> Function:
    def missing(*arguments: Any) -> None:
        raise NotImplementedError(
            f"{name} is not in Numba's simulator: unset NUMBA_ENABLE_CUDASIM, and the emulator runs it"
        )

    return missing
