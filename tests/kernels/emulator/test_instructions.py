"""The emulator's tensor and asynchronous units, each against formulas of the PTX manual, written by hand."""

import itertools

import numpy as np
import pytest

from minidist.kernels.cuda.runtime.matrix import TensorMap
from minidist.kernels.emulator.accesses import descriptors
from minidist.kernels.emulator.accesses.descriptors import chunk_addresses
from minidist.kernels.emulator.instructions import emulated_wgmma as wgmma
from minidist.kernels.emulator.instructions import mma, tensor_copies
from minidist.kernels.emulator.instructions.register_pool import at_launch
from minidist.kernels.emulator.ptx.fault import EmulatorError, Fault
from minidist.kernels.emulator.ptx.program import Program
from minidist.kernels.emulator.synchronization.mbarriers import Mbarrier
from tests.helpers import ptx_fragments as manual
from tests.helpers.ptx_fragments import bits_of, registers_of, words_of
from tests.helpers.refusals import refuses


def small_integers(rng, *shape):
    """Numbers that all formats hold, and whose products and sums float32 and float16 hold exactly."""
    return rng.integers(-4, 5, shape).astype(np.float32)


MMA = [
    ("m16n8k16", "f16", (manual.a_16x16, 8), (manual.b_16x8, 4)),
    ("m16n8k16", "bf16", (manual.a_16x16, 8), (manual.b_16x8, 4)),
    ("m16n8k8", "tf32", (manual.a_16x8_tf32, 4), (manual.b_8x8_tf32, 2)),
]


def side_by_side(tiles):
    """Registers of several warps: their lanes follow one another."""
    return np.concatenate(list(tiles), axis=-1)


@pytest.mark.parametrize(("shape", "dtype", "a_map", "b_map"), MMA)
def test_mma_multiplies_as_the_manual_places_the_elements(shape, dtype, a_map, b_map):
    rng = np.random.default_rng(1)
    m, n, k = 16, 8, int(shape.rpartition("k")[2])
    a, b = small_integers(rng, 3, m, k), small_integers(rng, 3, k, n)
    c = small_integers(rng, 3, m, n)
    c_map = (manual.c_16x8, 4)
    held = [
        side_by_side(words_of(registers_of(tile, *placed), dtype) for tile in tiles)
        for tiles, placed in ((a, a_map), (b, b_map))
    ]
    held.append(side_by_side(registers_of(tile, *c_map) for tile in c))
    d = mma.multiply_add(shape, dtype, *held)
    np.testing.assert_array_equal(d, side_by_side(registers_of(tile, *c_map) for tile in a @ b + c))
    # Several instructions: each of two tiles of a with the same b, which stands there once.
    left, right, added = (np.stack([x[:, :32], x[:, 32:64]], axis=1) for x in held)
    pairs = (np.array([1, 0]), np.array([0, 0]))
    once = mma.multiply_add(shape, dtype, left, right[:, :1], added, pairs)
    for i, (x, y) in enumerate(((1, 0), (0, 0))):
        one = mma.multiply_add(shape, dtype, left[:, x], right[:, y], added[:, i])
        np.testing.assert_array_equal(once[:, i], one)


def test_mma_names_what_it_does_not_have():
    zeros = np.zeros((4, 32), np.uint32)
    for shape, dtype in (("m8n8k16", "s8"), ("m16n8k8", "f16"), ("m16n8k16", "tf32"), ("m8n8k4", "f64")):
        with pytest.raises(EmulatorError, match="not emulated"):
            mma.multiply_add(shape, dtype, zeros, zeros, zeros)


def descriptor(start, leading, stride, span, base=0):
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[span]
    return np.uint64(start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | base << 49 | mode << 62)


def put(shared, address, bits):
    data = np.array([bits])
    shared[address : address + data.itemsize] = data.view(np.uint8)


# Where element (row of the tile, step of the depth) lies before the swizzle, in canonical layouts: rows of
# `span` bytes in groups of 8 for K-major; for MN-major, the same with the depth as rows. Written with the
# strides that the descriptor below names.
def k_major(start, leading, stride, span, size):
    def place(mn, depth):
        inner, chunk = depth * size % 16, depth * size // 16
        within = mn % 8 * (span or 16) + (chunk * 16 if span else chunk * leading)
        return start + mn // 8 * stride + within + inner

    return place


def mn_major(start, leading, stride, span, size):
    def place(mn, depth):
        if span:
            atom, within = divmod(mn * size, span)
            return start + atom * leading + depth // 8 * stride + depth % 8 * span + within
        return start + mn // 8 * stride + depth // 8 * leading + depth % 8 * 16 + mn % 8 * size

    return place


LAYOUTS = [
    (major, span, layout) for span in (0, 32, 64, 128) for major, layout in (("k", k_major), ("mn", mn_major))
]


@pytest.mark.parametrize(("major", "span", "layout"), LAYOUTS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_wgmma_reads_every_canonical_layout(major, span, layout, dtype):
    size, depth = 2, 16
    rng = np.random.default_rng(span)
    mn = 72 if major == "k" else 128
    # Strides with gaps, so that no two of them can be confused.
    if major == "k":
        leading, stride = 16 if span else 512, 8 * (span or 16) + 1024
    elif span:
        leading, stride = 16 * span + 1024, 8 * span
    else:
        leading, stride = mn // 8 * 160 + 32, 160
    tiles = small_integers(rng, 3, mn, depth)
    shared = np.full((2, 1 << 16), 0xFF, np.uint8)
    starts = [1024, 8192, 32768]
    blocks = np.array([0, 0, 1])
    for tile, start, block in zip(tiles, starts, blocks, strict=True):
        place = layout(start, leading, stride, span, size)
        for i, p in itertools.product(range(mn), range(depth)):
            put(
                shared[block],
                int(descriptors.swizzle(np.int64(place(i, p)), span)),
                bits_of(tile[i, p], dtype),
            )
    words = np.array([descriptor(start, leading, stride, span) for start in starts])
    addresses = wgmma.operand_addresses(words, mn, major == "mn", 1 << 16)
    np.testing.assert_array_equal(wgmma.read_operand(shared, blocks, addresses, dtype, major == "mn"), tiles)


def test_wgmma_takes_descriptors_of_several_swizzles_at_once():
    spans = [128, 0, 32, 128, 64]
    words = np.array([descriptor(1024 * i, 256, 1024, span) for i, span in enumerate(spans)])
    together = chunk_addresses(words, 64, False)
    for i, word in enumerate(words):
        alone = chunk_addresses(np.array([word]), 64, False)
        np.testing.assert_array_equal(together[i], alone[0])


test_wgmma_names_a_wrong_descriptor = refuses(
    lambda word: wgmma.operand_addresses(np.array([word]), 64, False, 16384),
    (descriptor(64, 16, 1024, 128) | np.uint64(1 << 55), "reserved bits"),
    (descriptor(1024, 16, 1024, 128, base=1), "base offset is 1"),
    (descriptor(1024 + 128, 16, 1024, 128), "align the tile to 1024 bytes"),
    (descriptor(1024 + 112, 16, 1024, 128), "step through a line"),
    (descriptor(512 + 64, 16, 1024, 64), "align the tile to 512 bytes"),
    (descriptor(256 + 32, 16, 1024, 32), "align the tile to 256 bytes"),
    (descriptor(1024, 16, 4096, 128), r"up to byte 30720 of shared memory, and the block has 16384"),
    error=Fault,
)


@pytest.mark.parametrize("n", [8, 24, 128, 256])
def test_wgmma_accumulates_in_the_manual_s_registers(n):
    rng = np.random.default_rng(n)
    a, b, d = small_integers(rng, 2, 64, 16), small_integers(rng, 2, n, 16), small_integers(rng, 2, 64, n)
    held, wanted = (
        side_by_side(registers_of(tile, manual.d_64xn, n // 2, range(128)) for tile in tiles)
        for tiles in (d, a @ b.swapaxes(1, 2) + d)
    )
    np.testing.assert_array_equal(wgmma.multiply_add(a, b, held), wanted)


def tensor(values, box, swizzle=0, dtype=None, pitch=None):
    """A tensor map of a matrix whose rows lie `pitch` elements apart, and what is around it in memory."""
    rows, columns = values.shape
    pitch = pitch or (columns + 15) // 8 * 8
    memory = np.full(rows * pitch, 99, values.dtype)
    memory.reshape(rows, pitch)[:, :columns] = values
    return TensorMap(memory, rows, columns, pitch, *box, dtype or values.dtype.name, swizzle), memory


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("address", [0, 128, 3072])
def test_tensor_boxes_lie_where_wgmma_looks_for_them(span, address):
    """The box row by row, each byte at the swizzle of its place; 128-byte alignment is enough."""
    source, _ = tensor(np.arange(64 * 64, dtype=np.float16).reshape(64, 64), (16, (span or 64) // 2), span)
    addresses = tensor_copies.box_addresses(source, address, 8192)
    places = address + np.arange(16)[:, None] * (span or 64) + np.arange((span or 64) // 16) * 16
    np.testing.assert_array_equal(addresses, descriptors.swizzle(places, span))
    # No chunk twice, and none outside of the box's own bytes.
    assert sorted(addresses.reshape(-1)) == list(
        range(address, address + tensor_copies.box_bytes(source), 16)
    )


def test_tensor_copies_name_what_is_wrong():
    values = np.zeros((64, 64), np.float16)
    short = TensorMap(np.zeros(100, np.float16), 64, 64, 72, 16, 64, "float16", 128)
    with pytest.raises(Fault, match="64 rows at a pitch of 72, and the array 100 elements"):
        tensor_copies.load_box(short, 0, 0)
    narrow, _ = tensor(values, (16, 32), 128)
    with pytest.raises(EmulatorError, match="swizzle of less is not emulated"):
        tensor_copies.check(narrow)


def mbarrier(expected):
    nothing = np.zeros(4, np.int32)
    return Mbarrier(expected, nothing, 0, 1, nothing)


def test_mbarriers_name_what_is_undefined():
    with pytest.raises(Fault, match="1 to 1048575"):
        mbarrier(1 << 20)
    with pytest.raises(Fault, match="waits for 1048576 bytes: it counts to 1048575"):
        mbarrier(1).expect(1 << 20)


def test_registers_at_launch():
    def bounds(threads, **more):
        return Program("kernel", directives={"maxntid": (threads, 1, 1), **more})

    assert at_launch(bounds(384), 384) == 168
    assert at_launch(bounds(256), 256) == 248  # 256 would fit, and 255 is the most
    assert at_launch(bounds(128, minnctapersm=(2,)), 128) == 248
    assert at_launch(bounds(512, maxnreg=(96,)), 512) == 96
    with pytest.raises(EmulatorError, match="launch bounds"):
        at_launch(Program("kernel"), 128)
