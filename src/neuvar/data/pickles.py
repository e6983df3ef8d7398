"""Read pickles of numpy arrays without running anything.

A pickle is a program for a small machine with a stack, two of whose instructions call whatever
the file names. This machine knows the instructions that pickles of plain containers and arrays
use, and it never calls: it recognises the handful of calls that stand for an array, and builds
the array itself after comparing its shape with the bytes that are really there. Its work and its
memory are bounded by the length of the file and by a number of instructions that the caller sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuvar.data.errors import DataError


class _Call(str):
    """Something that a pickle names in order to call it; it never is."""

    __slots__ = ()


RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
FROMBUFFER = ("numpy.core.numeric _frombuffer", "numpy._core.numeric _frombuffer")
KNOWN = (*RECONSTRUCT, *FROMBUFFER, "numpy ndarray", "numpy dtype", "_codecs encode")
DTYPES = ("u1", "f4", "i8")


class _Dtype:
    """The element type of arrays that follow."""

    def __init__(self, code: str) -> None:
        self.code = code


class _Array:
    """An array, or the place of one whose content comes later."""

    def __init__(self) -> None:
        self.values: NDArray[Any] | None = None


def load(content: bytes, name: str, instructions: int) -> Any:
    """What a pickle holds: dicts with str keys, lists, tuples, bytes, str, numbers and arrays.

    Args:
        content: the file; arrays are views of it.
        name: what to call it in an error.
        instructions: after how many instructions to give up.

    Raises:
        DataError: if the file needs anything else, is damaged or goes on after its end.

    >>> import pickle
    >>> load(pickle.dumps({"labels": [1, 2]}, protocol=2), "example", 100)
    {'labels': [1, 2]}
    >>> load(pickle.dumps(print), "example", 100)
    Traceback (most recent call last):
    neuvar.data.errors.DataError: example wants to use 'builtins print', which no file of data needs
    """
    return _Machine(content, name).run(instructions)


def array(value: Any, name: str, what: str) -> NDArray[Any]:
    """The array in a loaded pickle's value, which must be one that is complete."""
    if not isinstance(value, _Array) or value.values is None:
        raise DataError(f"{name}: {what} must be an array")
    return value.values


class _Machine:
    def __init__(self, content: bytes, name: str) -> None:
        self.content = memoryview(content)
        self.name = name
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.encoded = 0

    def run(self, instructions: int) -> Any:
        for _ in range(instructions):
            code = self.number(1)
            if code == ord("."):
                if self.at != len(self.content) or len(self.stack) != 1:
                    raise self.wrong("does not end where its content ends")
                return self.stack.pop()
            if code not in ACTIONS:
                raise self.wrong(f"uses instruction {code}, which no file of data needs")
            ACTIONS[code](self)
        raise self.wrong(f"goes on after {instructions} instructions, more than its data need")

    def wrong(self, what: str) -> DataError:
        return DataError(f"{self.name} {what}")

    # What follows an instruction in the file.

    def take(self, length: int) -> memoryview:
        end = self.at + length
        if end > len(self.content):
            raise self.wrong("ends too early")
        found = self.content[self.at : end]
        self.at = end
        return found

    def number(self, length: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(length), "little", signed=signed)

    def line(self) -> str:
        end = bytes(self.content[self.at : self.at + 200]).find(b"\n")
        if end < 0:
            raise self.wrong("has a name without an end")
        return bytes(self.take(end + 1))[:-1].decode("latin-1")

    def text(self, length: int) -> str:
        try:
            return str(self.take(length), "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self.wrong("has text that is not UTF-8") from None

    # The stack.

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise self.wrong("takes more from its stack than it put there")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        value = self.pop()
        self.push(value)
        if not isinstance(value, kind):
            raise self.wrong(f"needs a {kind.__name__.strip('_').lower()} where there is none")
        return value

    def since_mark(self) -> list[Any]:
        if not self.marks:
            raise self.wrong("lacks the beginning of a sequence")
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def last(self, count: int) -> tuple[Any, ...]:
        return tuple(reversed([self.pop() for _ in range(count)]))

    # Containers and the memo.

    def extend(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def update(self, values: list[Any]) -> None:
        target = self.top(dict)
        if len(values) % 2:
            raise self.wrong("has a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            text = key.decode("latin-1") if isinstance(key, bytes) else key
            if type(text) is not str:
                raise self.wrong("has a key that is not text")
            target[text] = value

    def put(self, place: int) -> None:
        self.memo[place] = self.top(object)

    def get(self, place: int) -> None:
        if place not in self.memo:
            raise self.wrong("refers to a value that it does not have")
        self.push(self.memo[place])

    # The calls that stand for arrays.

    def global_(self, module: str, attribute: str) -> None:
        name = f"{module} {attribute}"
        if name not in KNOWN:
            raise self.wrong(f"wants to use {name[:100]!r}, which no file of data needs")
        self.push(_Call(name))

    def global_from_stack(self) -> None:
        module, attribute = self.last(2)
        if type(module) is not str or type(attribute) is not str:
            raise self.wrong("has a name that is not text")
        self.global_(module, attribute)

    def reduce(self) -> None:
        call, arguments = self.last(2)
        if type(call) is not _Call or type(arguments) is not tuple:
            raise self.wrong("calls something that is no part of an array")
        if call in RECONSTRUCT and len(arguments) == 3 and type(arguments[0]) is _Call:
            self.push(_Array())
        elif call in FROMBUFFER and len(arguments) == 4:
            data, dtype, shape, order = arguments
            made = _Array()
            made.values = self.build_array(shape, dtype, order == "F", data)
            self.push(made)
        elif call == "numpy dtype" and arguments and (code := _word(arguments[0])) in DTYPES:
            self.push(_Dtype(code))
        elif call == "_codecs encode" and arguments and type(arguments[0]) is str:
            self.push(self.encode(arguments[0]))
        else:
            raise self.wrong(f"calls {str(call)!r} in a way that no file of data needs")

    def encode(self, text: str) -> bytes:
        self.encoded += len(text)
        # Text may be taken from the memo again and again; an honest file encodes it once.
        if self.encoded > len(self.content):
            raise self.wrong("holds more than its length allows")
        try:
            return text.encode("latin-1")
        except UnicodeEncodeError:
            raise self.wrong("has bytes that are not bytes") from None

    def build(self) -> None:
        target, state = self.last(2)
        if type(state) is not tuple:
            raise self.wrong("describes an array in an unexpected way")
        if isinstance(target, _Dtype) and len(state) in (8, 9):
            if _word(state[1]) not in ("<", "|"):
                raise self.wrong("has numbers whose bytes are in an unexpected order")
        elif isinstance(target, _Array) and len(state) == 5:
            _, shape, dtype, fortran, data = state
            target.values = self.build_array(shape, dtype, fortran is True, data)
        else:
            raise self.wrong("describes an array in an unexpected way")
        self.push(target)

    def build_array(self, shape: Any, dtype: Any, fortran: bool, data: Any) -> NDArray[Any]:
        """View bytes of the file as an array, if they are exactly as many as it needs."""
        fits = (
            isinstance(dtype, _Dtype)
            and isinstance(data, (bytes, memoryview))
            and type(shape) is tuple
            and len(shape) <= 4
            and all(type(n) is int and 0 <= n <= len(data) for n in shape)
        )
        if not fits or math.prod(shape) * int(dtype.code[1]) != len(data):
            raise self.wrong("has an array whose shape does not fit its bytes")
        flat = np.frombuffer(data, np.dtype(f"<{dtype.code}"))
        return flat.reshape(shape, order="F" if fortran else "C")


def _word(value: Any) -> str:
    """A short name, which older pickles hold as bytes."""
    if isinstance(value, (bytes, memoryview)) and len(value) < 9:
        return bytes(value).decode("latin-1")
    return value if type(value) is str else ""


def _bytes(length: int) -> Callable[[_Machine], None]:
    """An instruction that pushes bytes, of which ``length`` bytes tell how many there are."""

    def act(m: _Machine) -> None:
        found = m.take(m.number(length))
        # What is long is an array's content: a view is enough, and needs no second copy.
        m.push(bytes(found) if len(found) < 256 else found)

    return act


def _text(length: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.text(m.number(length)))


ACTIONS: dict[int, Callable[[_Machine], None]] = {
    ord(code): action
    for code, action in {
        "\x80": lambda m: m.number(1) and None,  # the version of the format
        "\x95": lambda m: m.number(8) and None,  # the length of a frame
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "K": lambda m: m.push(m.number(1)),
        "M": lambda m: m.push(m.number(2)),
        "J": lambda m: m.push(m.number(4, signed=True)),
        "\x8a": lambda m: m.push(m.number(m.number(1), signed=True)),
        "U": _bytes(1),
        "T": _bytes(4),
        "C": _bytes(1),
        "B": _bytes(4),
        "\x8e": _bytes(8),
        "\x96": _bytes(8),
        "X": _text(4),
        "\x8c": _text(1),
        "\x8d": _text(8),
        "(": lambda m: m.marks.append(len(m.stack)),
        "}": lambda m: m.push({}),
        "]": lambda m: m.push([]),
        ")": lambda m: m.push(()),
        "\x85": lambda m: m.push(m.last(1)),
        "\x86": lambda m: m.push(m.last(2)),
        "\x87": lambda m: m.push(m.last(3)),
        "t": lambda m: m.push(tuple(m.since_mark())),
        "a": lambda m: m.extend([m.pop()]),
        "e": lambda m: m.extend(m.since_mark()),
        "s": lambda m: m.update(list(m.last(2))),
        "u": lambda m: m.update(m.since_mark()),
        "q": lambda m: m.put(m.number(1)),
        "r": lambda m: m.put(m.number(4)),
        "\x94": lambda m: m.put(len(m.memo)),
        "h": lambda m: m.get(m.number(1)),
        "j": lambda m: m.get(m.number(4)),
        "c": lambda m: m.global_(m.line(), m.line()),
        "\x93": _Machine.global_from_stack,
        "R": _Machine.reduce,
        "b": _Machine.build,
    }.items()
}
"""What each instruction of the format does; those that are missing are refused."""
