"""Executes a PTX kernel from nvcc on a CPU and counts its instructions: attend_decode, exact, combine and encode.

A warp's registers are arrays of 32 numbers. If lanes diverge, those at the earliest instruction run first. Global
memory is the process's memory. Shared memory finds races (shared_memory.py), and copies to it complete when their warp
waits for them. Tensor core products use the fragments of the PTX ISA (mma m8n8k16, m16n8k16 and m16n8k32 of bytes),
which does not define those of wmma.

It also counts trips: reads of global memory that wait for each other. A warp issues in order and waits where it uses a
number that has not arrived. The first read of a line of 128 bytes by a block is a trip; later ones arrive with it.
Shared memory, constants and arithmetic take no time.
"""

from __future__ import annotations

import collections
import ctypes as ct
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from shared_memory import SOME_LANE, Bytes, Places, Race, SharedMemory

LANES = 32
LOCAL = 256  # bytes of a lane
Bits = npt.NDArray[np.uint64]
Lanes = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]
# No array of a register or of lanes is changed in place.
NOTHING: Bits = np.zeros(LANES, np.uint64)
EVERY: Lanes = np.ones(LANES, bool)


@functools.cache
def n_bits(type_: str) -> int:
    return 1 if type_ == "pred" else int(type_[1:])


@functools.cache
def mask(type_: str) -> np.uint64:
    return np.uint64((1 << n_bits(type_)) - 1)


def from_bits(x: Bits, type_: str) -> Array:
    """Numbers of a PTX type: f32, s64 or u64."""
    if type_ == "f32":
        return x.astype(np.uint32).view(np.float32)
    if type_[0] == "s":
        n_above = 64 - n_bits(type_)
        return (x << np.uint64(n_above)).view(np.int64) >> np.int64(n_above)
    return x & mask(type_)


def to_bits(x: Array, type_: str) -> Bits:
    if type_ == "f32":
        return np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return x.astype(np.int64 if x.dtype == np.int64 else np.uint64).view(np.uint64) & mask(type_)


def _shift_left(x: Array, n: Array) -> Array:
    return np.where(n < 64, x << np.minimum(n, 63).astype(x.dtype), 0).astype(x.dtype)


def _shift_right(x: Array, n: Array) -> Array:
    past = x < 0 if x.dtype == np.int64 else np.zeros(len(x), bool)
    return np.where(n < 64, x >> np.minimum(n, 63).astype(x.dtype), -past.astype(np.int64)).astype(x.dtype)


def _divide(x: Array, y: Array) -> Array:
    if x.dtype == np.float32:
        return x / y
    whole = np.abs(x) // np.maximum(np.abs(y), 1)
    return np.where((x < 0) == (y < 0), whole, -whole)


def _reversed(x: Array) -> Array:
    bits = x[:, None] >> np.arange(32, dtype=np.uint64) & np.uint64(1)
    return (bits << np.arange(31, -1, -1).astype(np.uint64)).sum(axis=1)


OPERATIONS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda x, y, z: x * y + z,
    "fma": lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32),
    "div": _divide,
    "rem": lambda x, y: x - _divide(x, y) * y,
    "min": np.fmin,
    "max": np.fmax,
    "abs": np.abs,
    "neg": np.negative,
    "copysign": lambda sign, x: np.copysign(x, sign),
    "ex2": np.exp2,
    "rcp": lambda x: np.float32(1) / x,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "bfi": lambda x, y, start, n: y & ~(((1 << n) - 1) << start) | (x & ((1 << n) - 1)) << start,
    "brev": _reversed,
    "bfind": lambda x: 31 - np.where(x > 0, np.frexp(x.astype(np.float64))[1] - 1, 32),  # shiftamt of u32
    "shf": lambda low, high, n: (high << np.uint64(32) | low) << (n & np.uint64(31)) >> np.uint64(32),  # l.wrap
    "shl": _shift_left,
    "shr": _shift_right,
}
COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
LOCATION = re.compile(r"\.loc (\d+) (\d+) \d+(?:, function_name \S+, inlined_at \d+ \d+ \d+)? ?")
SIZES = {"m8n8k16": (8, 16), "m16n8k16": (16, 16), "m16n8k32": (16, 32)}  # rows and depth


def split(text: str) -> list[str]:
    """Operands: at commas outside of braces and brackets."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip()]


class Kernel:
    """The entry of a module whose name contains `part`."""

    def __init__(self, module: str, part: str) -> None:
        module = re.sub(r"//[^\n]*", "", module)
        self.constants: dict[str, int] = {}
        constants = bytearray()
        for type_, name, values in re.findall(
            r"\.const\s+\.align \d+\s+\.(\w+)\s+(\w+)\[\d+\]\s*=\s*\{(.*?)\}", module
        ):
            constants.extend(bytes(-len(constants) % 16))
            self.constants[name] = len(constants)
            for value in split(values):
                number = int(value[2:], 16) if value.startswith("0f") else int(value, 0)
                constants.extend((number & ((1 << n_bits(type_)) - 1)).to_bytes(n_bits(type_) // 8, "little"))
        self.memory = {"const": np.frombuffer(bytes(constants), np.uint8)}
        self.shared = SharedMemory(0)  # of the block that runs
        # predicate, operation, its parts, operands
        self.instructions: list[tuple[str, str, list[str], list[str]]] = []
        self.lines_of: list[str] = []  # by instruction: its file and line, if nvcc ran with -lineinfo
        self.immediates: dict[str, Bits] = {}
        self.labels: dict[str, int] = {}
        # where global memory may be accessed: starts, ends; None: all
        self.allowed: tuple[Places, Places] | None = None
        self.adds = True  # False: atomic additions change nothing, for a block that also runs elsewhere
        self.executed: collections.Counter[int] = collections.Counter()  # by instruction: of warps
        self.lines: dict[int, int] = {}  # of the block: when a line of global memory arrives, in trips
        self.trips: dict[str, int] = {}  # by the operation: when a block's last warp first reaches it
        body = next(text for text in re.split(r"\.entry\s+", module)[1:] if part in text.partition("(")[0])
        body = body[body.index("{") + 1 : body.index("\n}")]
        files, line = dict(re.findall(r'\.file\s+(\d+)\s+"(?:[^"]*/)?([^"/]+)"', module)), ""
        for text in re.findall(r"[^;:]*[;:]", re.sub(r"[{}](?=\s*(?:\n|\.reg|\}|$))", "", body)):
            text = " ".join(text.lstrip("\n\t {").split())
            while located := LOCATION.match(text):
                text = text[located.end() :].lstrip("{ ")
                line = f"{files[located[1]]}:{located[2]}"
            if text.endswith(":"):
                self.labels[text[:-1]] = len(self.instructions)
            elif not text.startswith(".") and (found := re.match(r"(?:@(!?%\w+) )?([a-z][\w.:]*) ?(.*);$", text)):
                self.lines_of.append(line)
                self.instructions.append((found[1] or "", found[2], found[2].split("."), split(found[3])))

    def allow(self, ranges: list[tuple[int, int]]) -> None:
        """Restricts global memory to these ranges, from the first byte to the one behind the last."""
        starts, ends = zip(*sorted(ranges), strict=True)
        self.allowed = np.array(starts), np.array(ends)

    def expect_allowed(self, at: Places, size: int) -> None:
        if self.allowed is not None:
            starts, ends = self.allowed
            of = np.searchsorted(starts, at, "right") - 1
            beside = (of < 0) | (at + size > ends[of])
            assert not beside.any(), f"global: {size} bytes beside any array, {(at - ends[of])[beside]} from an end"

    def run(self, block: tuple[int, int, int], parameters: bytes, shared: int, n_threads: int) -> None:
        self.memory["param"] = np.frombuffer(parameters, np.uint8)
        self.shared = SharedMemory(shared)
        self.lines = {}
        first: dict[str, int] = {}
        warps = [Warp(self, block, start, first) for start in range(0, n_threads, LANES)]
        while warps:  # each up to a barrier
            warps = [warp for warp in warps if warp.run()]
            self.shared.barrier()
            latest = max((warp.now for warp in warps), default=0)
            votes = [warp.vote[1] for warp in warps if warp.vote]
            for warp in warps:
                warp.now = latest
                if warp.vote:
                    found = any(votes) if warp.vote[2] == "or" else all(votes)
                    warp.put(warp.vote[0], np.full(LANES, found, np.uint64), EVERY)
        self.shared.end()
        self.trips = {name: max(at, self.trips.get(name, 0)) for name, at in first.items()}


class Warp:
    def __init__(self, kernel: Kernel, block: tuple[int, int, int], first: int, reached: dict[str, int]) -> None:
        """reached: of the block, when its last warp first reaches an operation."""
        self.kernel, self.reached, self.seen = kernel, reached, set[str]()
        self.warp = first // LANES
        self.local = np.full(LANES * LOCAL, 0xFF, np.uint8)
        self.now = 0  # trips
        self.copied = 0  # when the last asynchronous copy arrives
        # at a barrier that combines predicates: its result, ours, and how
        self.vote: tuple[str, bool, str] | None = None
        self.ready: dict[str, int] = {}  # when registers arrive, of those that may be late
        self.left = EVERY  # replaced, never changed, where lanes end
        self.together = 0  # the next instruction of all lanes that are left; -1 if they diverge
        self.at = np.zeros(LANES, np.int64)  # that of each, if they diverge
        self.registers: dict[str, Bits] = {"%tid.x": np.arange(first, first + LANES).astype(np.uint64)}
        for axis, index in zip("xyz", block, strict=True):
            self.registers[f"%ctaid.{axis}"] = np.full(LANES, index, np.uint64)

    def bits(self, operand: str) -> Bits:
        if operand.startswith("%"):
            return self.registers.get(operand, NOTHING)
        value = self.kernel.immediates.get(operand)
        if value is None:
            value = self.kernel.immediates[operand] = np.full(LANES, self.immediate(operand) & (1 << 64) - 1, np.uint64)
        return value

    def immediate(self, operand: str) -> int:
        if operand.startswith("0f"):
            return int(operand[2:], 16)
        if re.match(r"-?\d", operand):
            return int(operand.rstrip("U"), 0)
        return self.kernel.constants.get(operand, 0)  # a symbol: where it is in its memory

    def number(self, operand: str, type_: str) -> Array:
        return from_bits(self.bits(operand), type_)

    def true(self, predicate: str) -> Lanes:
        return (self.bits(predicate.removeprefix("!")) != 0) ^ predicate.startswith("!")

    def put(self, register: str, x: Bits, active: Lanes) -> None:
        self.registers[register] = x if active is EVERY else np.where(active, x, self.bits(register))

    def go(self, to: int, lanes: Lanes) -> None:
        """Continue with instruction `to` in these lanes."""
        if lanes is self.left:
            self.together = to
            return
        if self.together >= 0:
            self.at[:] = self.together
        self.at[lanes] = to
        of_left = self.at[self.left]
        self.together = int(of_left[0]) if len(of_left) and (of_left == of_left[0]).all() else -1

    def run(self) -> bool:
        """Up to the next barrier: False where the warp ends."""
        kernel, self.vote = self.kernel, None
        while self.left is EVERY or self.left.any():
            at, active = self.together, self.left
            if at < 0:
                at = int(self.at[self.left].min())
                active = self.left & (self.at == at)
            predicate, operation, (name, *modifiers), operands = kernel.instructions[at]
            kernel.executed[at] += 1
            self.wait_for(predicate, name, modifiers, operands)
            self.go(at + 1, active)
            chosen = active & self.true(predicate) if predicate else active
            if name == "bra":
                self.go(kernel.labels[operands[0]], chosen)
            elif name == "ret":
                self.left = self.left & ~chosen
            elif operation in ("bar.sync", "bar.red.or.pred", "bar.red.and.pred"):
                assert np.array_equal(active, self.left), "lanes of a warp at different barriers"
                if operation != "bar.sync":
                    ours = self.true(operands[2])[active]
                    self.vote = operands[0], bool(ours.any() if "or" in modifiers else ours.all()), modifiers[1]
                return True
            elif name == "bar":
                self.expect_all("bar.warp.sync", active, operands[0])
                kernel.shared.synchronise(self.warp)
            elif chosen is active or chosen.any():
                kernel.shared.instruction = at
                try:
                    self.execute(name, modifiers, operands, chosen)
                except AssertionError as e:
                    before = f", after {kernel.lines_of[e.before]}" if isinstance(e, Race) else ""
                    e.add_note(kernel.lines_of[at] + before)
                    raise
        return False

    def wait_for(self, predicate: str, name: str, modifiers: list[str], operands: list[str]) -> None:
        """Moves the warp's time to where all that the instruction uses has arrived."""
        written = operands[:1] if name not in ("st", "bra", "bar", "cp", "ret") else []
        used = ",".join([predicate, *operands[len(written) :]])
        for register in re.findall(r"%\w+", used) if self.ready else ():
            self.now = max(self.now, self.ready.get(register, 0))
        for register in re.findall(r"%\w+", ",".join(written)) if self.ready else ():
            self.ready.pop(register, None)
        if name == "cp" and "wait_group" in modifiers:
            self.now = max(self.now, self.copied)
        if name not in self.seen:
            self.seen.add(name)
            self.reached[name] = max(self.now, self.reached.get(name, 0))

    def arrival(self, at: Places, size: int) -> int:
        """When a read of global memory arrives."""
        lines = {int(a) // 128 for a in at} | {(int(a) + size - 1) // 128 for a in at}
        return max(self.kernel.lines.setdefault(line, self.now + 1) for line in lines)

    def execute(self, name: str, modifiers: list[str], operands: list[str], active: Lanes) -> None:
        type_ = modifiers[-1]
        if name in ("ld", "st"):
            self.access(name, modifiers[0], n_bits(type_) // 8, operands, type_, active)
        elif name == "cp":
            self.copy(modifiers[1], operands, active)
        elif name in ("atom", "red"):
            self.exchange(modifiers[-2], type_, operands[-2:], active)
        elif name == "mma":
            self.multiply(modifiers, operands, active)
        elif name == "wmma":
            assert active.all(), "wmma: all lanes expected"
            getattr(self, f"{modifiers[0]}_matrix")(modifiers, operands)
        elif name == "shfl":
            self.expect_all(name, active, operands[-1])
            lane = np.arange(LANES)
            by = self.bits(operands[2]).astype(np.int64)
            source = lane ^ by if "bfly" in modifiers else by % LANES
            self.put(operands[0].partition("|")[0], self.bits(operands[1])[source], active)
        elif name == "setp":
            x, y = (self.number(operand, type_) for operand in operands[1:3])
            comparison = modifiers[0]
            unordered = comparison not in COMPARISONS
            nan = np.isnan(x) | np.isnan(y) if type_ == "f32" else np.zeros(x.shape, bool)
            if comparison in ("nan", "num"):
                found = nan if comparison == "nan" else ~nan
            else:
                found = COMPARISONS[comparison[:-1] if unordered else comparison](x, y)
                found = found | nan if unordered else found & ~nan
            self.put(operands[0], found.astype(np.uint64), active)
        elif name == "selp":
            x, y = (self.bits(operand) for operand in operands[1:3])
            self.put(operands[0], np.where(self.true(operands[3]), x, y) & mask(type_), active)
        elif name == "vote":  # ballot
            self.expect_all(name, active, operands[-1])
            voted = np.flatnonzero(self.true(operands[1]) & active)
            self.put(operands[0], np.full(LANES, sum(1 << int(lane) for lane in voted), np.uint64), active)
        elif name == "prmt":
            self.put(operands[0], self.permute(*operands[1:]), active)
        elif name in ("mov", "cvta"):
            self.put(operands[0], self.bits(operands[1]), active)
        elif name == "cvt":
            self.put(operands[0], self.convert(modifiers, operands[1]), active)
        else:
            with np.errstate(all="ignore"):
                result = OPERATIONS[name](*self.inputs(name, operands[1:], type_))
            if "rm" in modifiers or "sat" in modifiers:
                result = self.rounded(result, modifiers, operands)
            if "hi" in modifiers:
                result = result >> n_bits(type_)
            wide = f"{type_[0]}{2 * n_bits(type_)}" if "wide" in modifiers else type_
            self.put(operands[0], to_bits(result, wide), active)

    def expect_all(self, name: str, active: Lanes, lanes: str) -> None:
        """All lanes of a warp execute an instruction together, and name each other."""
        named = self.bits(lanes)[active] & np.uint64(0xFFFFFFFF)
        assert active.all() and (named == 0xFFFFFFFF).all(), f"{name}: all lanes expected"

    def rounded(self, x: Array, modifiers: list[str], operands: list[str]) -> Array:
        """The result of an fma that rounds down, or is limited to 0 .. 1."""
        a, b, c = (self.number(operand, "f32").astype(np.float64) for operand in operands[1:])
        exact = a * b + c
        if "rm" in modifiers:
            x = np.where(x > exact, np.nextafter(x, np.float32(-np.inf)), x).astype(np.float32)
        return np.clip(np.nan_to_num(x), 0, 1).astype(np.float32) if "sat" in modifiers else x

    def inputs(self, name: str, operands: list[str], type_: str) -> list[Array]:
        types = [type_, "u32"] if name in ("shl", "shr") else [type_] * len(operands)
        return [self.number(operand, of) for operand, of in zip(operands, types, strict=True)]

    def convert(self, modifiers: list[str], operand: str) -> Bits:
        to, of = modifiers[-2:]
        if of == "f16":
            halves = self.bits(operand).astype(np.uint16).view(np.float16)
            return to_bits(halves.astype(np.float32), to)
        x = self.number(operand, of)
        if to == "f16":
            return x.astype(np.float16).view(np.uint16).astype(np.uint64)
        if "rni" in modifiers and to == "f32":
            return to_bits(np.rint(x), to)
        if "sat" in modifiers:
            return to_bits(np.clip(np.nan_to_num(x), 0, 1), to)
        if of == "f32" and to != "f32":
            return to_bits((np.rint(x) if "rni" in modifiers else np.trunc(x)).astype(np.int64), to)
        return to_bits(x.astype(np.float32) if to == "f32" else x, to)

    def permute(self, low: str, high: str, by: str) -> Bits:
        both = (self.bits(low) & np.uint64(0xFFFFFFFF)) | self.bits(high) << np.uint64(32)
        out = np.zeros(LANES, np.uint64)
        for i in range(4):
            nibble = self.bits(by) >> np.uint64(4 * i) & np.uint64(15)
            byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            sign = np.where(byte >= 128, 255, 0).astype(np.uint64)
            out |= np.where(nibble >= 8, sign, byte) << np.uint64(8 * i)
        return out

    def address(self, operand: str) -> Bits:
        base, _, offset = operand.strip("[] ").partition("+")
        return self.bits(base) + np.uint64(int(offset or "0") & (1 << 64) - 1)

    def access(self, name: str, space: str, size: int, operands: list[str], type_: str, active: Lanes) -> None:
        registers, at = operands if name == "ld" else operands[::-1]
        address = self.address(at)
        lanes = np.flatnonzero(active)
        if space == "local":  # that of each lane behind the other's
            address = np.arange(LANES, dtype=np.uint64) * np.uint64(LOCAL) + address
        elif space not in (*self.kernel.memory, "shared", "global"):  # a generic address, of one kind in all lanes
            space = "shared" if address[lanes].max() < len(self.kernel.shared.bytes) else "global"
        assert not (address[lanes] % size).any(), f"{name}.{space}.{type_}: multiples of {size} expected"
        for i, register in enumerate(registers.strip("{} ").split(",")):
            values = self.bits(register.strip())
            where = (address[lanes] + np.uint64(i * size)).astype(np.int64)
            if name == "st":
                data = np.ascontiguousarray(values[lanes]).view(np.uint8).reshape(-1, 8)[:, :size]
                self.write(space, lanes, where, data)
                continue
            if space == "global":
                self.ready[register.strip()] = self.arrival(where, size)
            read = np.zeros((len(lanes), 8), np.uint8)
            read[:, :size] = self.read(space, lanes, where, size)
            values = values.copy()
            values[lanes] = read.view(np.uint64)[:, 0]
            signed = from_bits(values, type_).view(np.uint64) if type_[0] == "s" else values
            self.put(register.strip(), signed, active)

    def read(self, space: str, lanes: Places, at: Places, size: int) -> Bytes:
        """Bytes [len(at)][size] of these lanes."""
        if space == "global":
            self.kernel.expect_allowed(at, size)
            return np.frombuffer(b"".join(ct.string_at(int(i), size) for i in at), np.uint8).reshape(-1, size)
        places = at[:, None] + np.arange(size)
        if space == "shared":
            return self.kernel.shared.read(self.warp, lanes, places)
        memory = self.local if space == "local" else self.kernel.memory[space]
        assert at.max() + size <= len(memory), f"{space}: {len(memory)} bytes expected, {at.max() + size} read"
        return memory[places]

    def write(self, space: str, lanes: Places, at: Places, data: Bytes) -> None:
        """data: bytes [len(at)][size] of these lanes."""
        size = data.shape[1]
        if space == "global":
            self.kernel.expect_allowed(at, size)
            for i, one in zip(at, data, strict=True):
                ct.memmove(int(i), one.tobytes(), size)
            return
        places = at[:, None] + np.arange(size)
        if space == "shared":
            self.kernel.shared.write(self.warp, lanes, places, data)
            return
        assert space == "local", f"a write to {space}"
        assert at.max() + size <= len(self.local), f"{space}: {LOCAL} bytes of a lane expected"
        self.local[places] = data

    def exchange(self, name: str, type_: str, operands: list[str], active: Lanes) -> None:
        """An atomic operation on global memory, lane by lane. What it read is not used by these kernels."""
        if name == "add" and not self.kernel.adds:
            return
        size, value = n_bits(type_) // 8, self.bits(operands[1])
        for lane in np.split(np.flatnonzero(active), active.sum()):
            at = self.address(operands[0])[lane].astype(np.int64)
            before = np.zeros((1, 8), np.uint8)
            before[:, :size] = self.read("global", lane, at, size)
            after = OPERATIONS[name](before.view(np.uint64)[0], value[lane])
            self.write("global", lane, at, after.view(np.uint8).reshape(1, 8)[:, :size])

    def copy(self, what: str, operands: list[str], active: Lanes) -> None:
        """cp.async: a copy, or the end of a group of copies, or the wait for groups."""
        shared = self.kernel.shared
        if what == "cg":
            to, at = (self.address(operand)[active].astype(np.int64) for operand in operands[:2])
            self.copied = max(self.copied, self.arrival(at, 16))
            assert not ((to | at) % 16).any(), "cp.async: multiples of 16 expected"
            lanes = np.flatnonzero(active)
            shared.copy(self.warp, lanes, to[:, None] + np.arange(16), self.read("global", lanes, at, 16))
            return
        assert np.array_equal(active, self.left), "cp.async: groups of all lanes expected"
        if what == "commit_group":
            shared.commit(self.warp)
        else:
            shared.wait(self.warp, int(operands[0]))

    def multiply(self, modifiers: list[str], operands: list[str], active: Lanes) -> None:
        assert active.all(), "mma: all lanes expected"
        n_rows, depth = SIZES[modifiers[2]]
        group, place = np.arange(LANES) // 4, np.arange(LANES) % 4
        sums, left, right, added = ([part.strip() for part in o.strip("{} ").split(",")] for o in operands)
        a, b = np.zeros((n_rows, depth), np.int64), np.zeros((depth, 8), np.int64)
        c = np.zeros((n_rows, 8), np.int64)
        of_rows = n_rows // 8  # registers of a one behind the other: rows first, then depths
        for byte in range(4):
            for i, register in enumerate(left):
                x = from_bits(self.bits(register) >> np.uint64(8 * byte), "s8")
                a[group + 8 * (i % of_rows), 4 * place + byte + 16 * (i // of_rows)] = x
            for i, register in enumerate(right):
                x = from_bits(self.bits(register) >> np.uint64(8 * byte), modifiers[-2])
                b[4 * place + byte + 16 * i, group] = x.astype(np.int64)
        for i, register in enumerate(added):
            c[group + 8 * (i // 2), 2 * place + i % 2] = self.number(register, "s32")
        c += a @ b
        for i, register in enumerate(sums):
            self.put(register, to_bits(c[group + 8 * (i // 2), 2 * place + i % 2], "s32"), active)

    def load_matrix(self, modifiers: list[str], operands: list[str]) -> None:
        """wmma.load: element i * 16 + j of a matrix is in lane (i * 16 + j) / 8; halves are in registers twice.

        Sums are loaded by the lanes that store them; which lane loads a factor is not defined.
        """
        registers, (space, type_) = operands[0].strip("{} ").split(","), modifiers[-2:]
        at, size = self.of_matrix(operands[1:], type_, modifiers[4] == "col")
        lanes = np.arange(len(at)) // 8 if type_ == "f32" else np.full(len(at), SOME_LANE)
        address = "shared" if space == "shared" or at.max() < len(self.kernel.shared.bytes) else "global"
        elements = np.ascontiguousarray(self.read(address, lanes, at, size)).reshape(LANES, -1)
        of_lane = elements.view(np.uint32).astype(np.uint64)
        for i, register in enumerate(registers):
            self.put(register.strip(), np.ascontiguousarray(of_lane[:, i % of_lane.shape[1]]), EVERY)

    def store_matrix(self, modifiers: list[str], operands: list[str]) -> None:
        at, size = self.of_matrix([operands[0], operands[2]], modifiers[-1], modifiers[4] == "col")
        data = self.matrix(operands[1], modifiers[-1]).astype(np.float32).reshape(-1, 1).view(np.uint8)
        self.write(modifiers[-2], np.arange(len(at)) // 8, at, data.reshape(-1, size))

    def mma_matrix(self, modifiers: list[str], operands: list[str]) -> None:
        a, b, c = (
            self.matrix(operand, type_) for operand, type_ in zip(operands[1:], ("f16", "f16", "f32"), strict=True)
        )
        made = (a @ b + c).astype(np.float32).reshape(LANES, 8)
        for i, register in enumerate(operands[0].strip("{} ").split(",")):
            self.put(register.strip(), to_bits(np.ascontiguousarray(made[:, i]), "f32"), EVERY)

    def of_matrix(self, operands: list[str], type_: str, columns: bool) -> tuple[Places, int]:
        """Addresses of a matrix's elements, row by row, and the size of one."""
        (start,), (stride,) = (np.unique(x) for x in (self.address(operands[0]), self.bits(operands[1])))
        assert start % 32 == 0, "wmma: multiples of 32 expected"
        i, j = np.divmod(np.arange(256), 16)
        size = n_bits(type_) // 8
        return int(start) + size * ((j if columns else i) * int(stride) + (i if columns else j)), size

    def matrix(self, operand: str, type_: str) -> Array:
        registers = [self.bits(register.strip()) for register in operand.strip("{} ").split(",")]
        of_lane = np.stack(registers[: 4 if type_ == "f16" else 8], axis=1).astype(np.uint32)
        return of_lane.view(np.float16 if type_ == "f16" else np.float32).astype(np.float64).reshape(16, 16)
