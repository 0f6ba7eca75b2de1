"""How a PTX instruction becomes a function that Numba's kernels call.

Numba has no tensor cores, no asynchronous copies and no 16-byte loads. But a function may write LLVM code
where it is called (Numba's `@intrinsic`), and LLVM takes an instruction as text ("inline assembly"). `@ptx`
joins the two: the decorated function is a name, parameters and a docstring, and the text is what a call
becomes. `@instruction` is for those that also load or store arrays: the decorated function gets an
`Assembler` and the arguments of the call.

Where PTX takes an address these functions take (array, index), the element at that index of a 1-D array.
Bounds are not checked, and a negative index does not count from the end.

Source: LLVM Language Reference, "Inline Assembler Expressions"; PTX ISA (each file names its sections).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from llvmlite import ir

INT16, INT32, INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOAT32, VOID = ir.FloatType(), ir.VoidType()
SHARED, GLOBAL = 3, 1  # LLVM's numbers of the address spaces

Value = Any  # an LLVM value while code is built: llvmlite has no types
Function = Callable[..., Any]

# Kinds of parameters that `ptx` reads in a signature; others are int and float.
Shared: TypeAlias = Any  # an array in shared memory, which its index follows
Global: TypeAlias = Any  # the same in global memory
Tensor: TypeAlias = Any  # a tensor map: 128 bytes of global memory
Known: TypeAlias = Any  # a number that is known when compiling: it stands in the text, where <name> is
Mask: TypeAlias = Any  # 16 bits


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


LOWERED: dict[str, tuple[str, Callable[..., Value]]] = {
    "Shared": ("r", lambda to, array, index: to.shared_address(array, index)),
    "Global": ("l", lambda to, array, index: to.global_address(array, index)),
    "Tensor": ("l", lambda to, tensor: to.builder.ptrtoint(to.start(tensor), INT64)),
    "Mask": ("h", lambda to, x: to.builder.trunc(to.integer(x), INT16)),
    "int": ("r", lambda to, x: to.integer(x)),
    "float": ("f", lambda to, x: x.value),
}


def ptx(text: str, returns: str = "void", pure: bool = False) -> Callable[[Function], Function]:
    """Make an instruction of this text, as `Assembler.ptx` takes it; the function below has its parameters.

    `returns` is Numba's name of the result's type, which has 32 bits.
    """

    def decorate(described: Function) -> Function:
        kinds = [described.__annotations__[name] for name in _parameters(described)]
        known = [name for name, kind in zip(_parameters(described), kinds, strict=True) if kind == "Known"]

        @functools.wraps(described)
        def lower(to: Assembler, *operands: AsmOperand) -> Value:
            written, letters, values = text, ["=r"] * (returns != "void"), []
            left = iter(zip(_parameters(described), kinds, operands, strict=True))
            for name, kind, x in left:
                if kind == "Known":
                    written = written.replace(f"<{name}>", str(x.literal))
                    continue
                letter, lowered = LOWERED[kind]
                index = [next(left)[2]] if kind in ("Shared", "Global") else []
                letters.append(letter)
                values.append(lowered(to, x, *index))
            found = to.ptx(written, ",".join(letters), values, returns != "void", pure=pure)
            return found[0] if found else None

        return _intrinsic(lower, _parameters(described), known, returns)

    return decorate


def instruction(literals: Sequence[str] = (), returns: str = "void") -> Callable[[Function], Function]:
    """Make an instruction of `lower(assembler, *operands)`, which writes it.

    `literals` names parameters whose values must be known when compiling; `returns` is Numba's name of the
    result's type.
    """
    return lambda lower: _intrinsic(lower, _parameters(lower)[1:], literals, returns)


def _parameters(function: Function) -> tuple[str, ...]:
    names: tuple[str, ...] = function.__code__.co_varnames[: function.__code__.co_argcount]
    return names


def _intrinsic(lower: Function, names: Sequence[str], literals: Sequence[str], returns: str) -> Function:
    from numba.cuda import types
    from numba.cuda.core.errors import RequireLiteralValue
    from numba.cuda.extending import intrinsic
    from numba.cuda.typing import signature

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

    # Numba reads the parameters of a call here, behind a first one.
    shown = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("to", *names)]
    vars(define)["__signature__"] = inspect.Signature(shown)
    made: Function = intrinsic(define)
    return made
