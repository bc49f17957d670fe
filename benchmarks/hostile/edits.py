"""Ways to damage a file: each takes a file and random numbers, changes the file, and says how in a few words."""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

Edit = Callable[[Path, Random], str]

NESTED, DIGITS = 100_000, 5_000
BOMB = 3 * 2**30
"""Bytes that a bomb unpacks to."""
BLOCK = 2**26

ODD_TEXTS = (
    *("", " ", "\x00", "a\x00b", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b2J", "line\nbreak", "\ud800", "\r"),
    *("../../etc", "x" * 100_000, "[bold]markup[/]", "%s%n", "nan", "-1", "é" * 300, "\u202etxt", "🦔"),
)
ODD_NUMBERS = (
    *(0, -1, 1, 2, 7, 2**31, 2**63, -(2**63), 2**64, 10**12, 10**30, 10**400),
    *(0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, *ODD_NUMBERS, *ODD_TEXTS),
    *([], {}, [[]], [None], [0] * 10_000, {"": {}}, {"a": {"b": {"c": 1}}}, ["x"] * 3, [1.5, "a"], [[1, 2], [3]]),
)


# ---- any file


def flip_bits(file: Path, random: Random) -> str:
    """Flip one bit or some."""
    data = bytearray(file.read_bytes())
    if not data:
        return "nothing (it is empty)"
    places = [random.randrange(len(data)) for _ in range(random.choice((1, 1, 1, 2, 8, 64)))]
    for place in places:
        data[place] ^= 1 << random.randrange(8)
    file.write_bytes(data)
    return f"{len(places)} bits flipped, the first in byte {places[0]}"


def flip_early(file: Path, random: Random) -> str:
    """Flip bits among the first bytes, where headers are."""
    data = bytearray(file.read_bytes())
    most = min(len(data), random.choice((8, 64, 512)))
    for _ in range(random.choice((1, 2, 4))):
        data[random.randrange(most)] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
    file.write_bytes(data)
    return f"bytes changed among the first {most}"


def truncate(file: Path, random: Random) -> str:
    """Cut the file off."""
    size = file.stat().st_size
    left = random.choice((0, 1, 7, size // 2, max(size - 1, 0), random.randrange(size + 1)))
    os.truncate(file, min(left, size))
    return f"cut off after {min(left, size)} of {size} bytes"


def insert(file: Path, random: Random) -> str:
    """Put bytes in."""
    data = file.read_bytes()
    place, more = random.randrange(len(data) + 1), random.randbytes(random.choice((1, 2, 16, 4096)))
    file.write_bytes(data[:place] + more + data[place:])
    return f"{len(more)} bytes put in at {place}"


def remove_span(file: Path, random: Random) -> str:
    """Take bytes out."""
    data = file.read_bytes()
    place = random.randrange(len(data) + 1)
    length = random.choice((1, 4, 100, 5000))
    file.write_bytes(data[:place] + data[place + length :])
    return f"{length} bytes taken out at {place}"


def overwrite(file: Path, random: Random) -> str:
    """Write one byte over many."""
    data = bytearray(file.read_bytes())
    place, length, byte = random.randrange(len(data)), random.choice((1, 4, 8, 256)), random.choice((0, 0xFF, 0x41))
    data[place : place + length] = bytes([byte]) * length
    file.write_bytes(data)
    return f"{length} bytes at {place} made {byte:#x}"


def repeat_span(file: Path, random: Random) -> str:
    """Bring a part twice."""
    data = file.read_bytes()
    place, length = random.randrange(len(data)), random.choice((4, 64, 1024))
    file.write_bytes(data[: place + length] + data[place:])
    return f"{length} bytes at {place} twice"


def replace_number(file: Path, random: Random) -> str:
    """Put a large or odd integer of 4 or 8 bytes somewhere."""
    data = bytearray(file.read_bytes())
    layout = random.choice(("<I", ">I", "<Q", ">Q"))
    most = 2 ** (8 * struct.calcsize(layout))
    number = random.choice((0, 1, most - 1, most // 2, most // 2 - 1, most // 256))
    place = random.randrange(min(len(data), random.choice((64, 1024, len(data)))))
    data[place : place + struct.calcsize(layout)] = struct.pack(layout, number)
    file.write_bytes(data)
    return f"the number {number} at byte {place}"


def replace_kind(file: Path, random: Random) -> str:
    """Put something in its place that is no file with contents, or another kind of file."""
    file.unlink()
    kind = random.choice(("empty", "folder", "fifo", "loop", "nowhere", "null", "pickle", "zip", "text", "random"))
    match kind:
        case "empty":
            file.touch()
        case "folder":
            file.mkdir()
        case "fifo":
            os.mkfifo(file)
        case "loop":
            file.symlink_to(file.name)
        case "nowhere":
            file.symlink_to("nowhere")
        case "null":
            file.symlink_to("/dev/null")
        case "pickle":
            file.write_bytes(b"cposix\nsystem\n(S'touch executed'\ntR.")
        case "zip":
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("../executed", "x")
        case "text":
            file.write_text(random.choice(ODD_TEXTS), encoding="utf-8", errors="replace")
        case "random":
            file.write_bytes(random.randbytes(random.choice((10, 1000, 100_000))))
    return f"{kind} in its place"


BYTES: tuple[Edit, ...] = (
    *(flip_bits, flip_bits, flip_early, truncate, insert, remove_span, overwrite, repeat_span, replace_number),
    replace_kind,
)


# ---- JSON


def edit_json(file: Path, random: Random) -> str:
    """Change values and keys of a JSON file, keeping it JSON."""
    tree = json.loads(file.read_text(encoding="utf-8"))
    said = [_edit_tree(tree, random) for _ in range(random.choice((1, 1, 1, 2, 5)))]
    with_digits(lambda: file.write_text(json.dumps(tree), encoding="utf-8"))
    return "; ".join(said)


def with_digits(write: Callable[[], object]) -> None:
    """Write numbers of more digits than Python usually writes."""
    import sys

    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        write()
    finally:
        sys.set_int_max_str_digits(most)


def _edit_tree(tree: Any, random: Random) -> str:
    holder, key = _pick(tree, random)
    where = f"{key!r}"
    match random.choice(("value", "value", "value", "remove", "rename", "add", "sibling", "type")):
        case "remove":
            del holder[key]
            return f"{where} removed"
        case "rename" if isinstance(holder, dict):
            new = random.choice((f"{key}s", str(key).upper(), "", "\x1b[2J"))
            holder[new] = holder.pop(key)
            return f"{where} renamed to {new!r}"
        case "add" if isinstance(holder, dict):
            new = random.choice(("extra", "", "__class__", "\x1b[31m", "a.b"))
            holder[new] = copy.deepcopy(random.choice(ODD_VALUES))  # which the next edit may change
            return f"{new!r} added"
        case "sibling":
            holder[key] = _pick(tree, random)[0]
            holder[key] = json.loads(json.dumps(holder[key])) if holder[key] is not holder else None
            return f"{where} made another part"
        case "type":
            holder[key] = [holder[key]] if random.random() < 0.5 else {"value": holder[key]}
            return f"{where} wrapped"
    holder[key] = copy.deepcopy(random.choice(ODD_VALUES))
    return f"{where} made {holder[key]!r:.60}" if not isinstance(holder[key], int) else f"{where} made a number"


def _pick(tree: Any, random: Random) -> tuple[Any, Any]:
    """A holder and a key in it, at any depth."""
    places = list(_places(tree))
    return random.choice(places) if places else ({"": tree}, "")


def _places(tree: Any) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def odd_json(file: Path, random: Random) -> str:
    """Text that is JSON at its limits, or a little beyond."""
    text = file.read_text(encoding="utf-8")
    tree = json.loads(text)
    key = json.dumps(random.choice(list(tree)) if isinstance(tree, dict) and tree else "x")
    kinds = {
        "nested lists": "[" * NESTED + "]" * NESTED,
        "nested objects": '{"a":' * NESTED + "1" + "}" * NESTED,
        "a value nested deeply": f"{{{key}: {'[' * NESTED}{']' * NESTED}}}",
        "a number of many digits": f"{{{key}: {'9' * DIGITS}}}",
        "a number among others": text.replace("1", "9" * DIGITS, 1),
        "NaN": text.replace(": 1", ": NaN", 1),
        "Infinity": text.replace(": 1", ": -Infinity", 1),
        "1e400": text.replace(": 1", ": 1e400", 1),
        "a byte order mark": "\ufeff" + text,
        "text behind it": text + "{}",
        "a comma too many": text.replace("}", ",}", 1),
        "keys twice": text.replace("{", f"{{{key}: null, ", 1),
        "no object": random.choice(("1", "null", '"x"', "[]", "true", '"\\ud800"', "{}", "")),
        "a lone surrogate": text.replace('": "', '": "\\ud800', 1),
        "escape sequences": text.replace('": "', '": "\\u001b[31m', 1),
        "a long text": text.replace('": "', '": "' + "x" * 2_000_000, 1),
    }
    name = random.choice(list(kinds))
    file.write_text(kinds[name], encoding="utf-8")
    return name


def recode(file: Path, random: Random) -> str:
    """The text in another encoding."""
    coding = random.choice(("utf-16", "utf-32", "latin-1"))
    text = file.read_text(encoding="utf-8").replace("a", "ä", 1)
    file.write_bytes(text.encode(coding, errors="replace"))
    return f"in {coding}"


JSON: tuple[Edit, ...] = (edit_json, edit_json, edit_json, edit_json, odd_json, odd_json, recode, *BYTES)


# ---- CSV


def edit_csv(file: Path, random: Random) -> str:
    """Change cells, columns and rows."""
    rows = [line.split(",") for line in file.read_text(encoding="utf-8").splitlines()]
    row = random.randrange(len(rows))
    column = random.randrange(len(rows[row]))
    match random.choice(("cell", "cell", "cell", "drop", "twice", "column", "header", "no rows")):
        case "cell":
            value = random.choice((*map(str, ODD_NUMBERS[:11]), *ODD_TEXTS, "1" * 200_000, '"', '"a', "1e400", "nan"))
            rows[row][column] = value
            said = f"cell {row}, {column} made {value!r:.40}"
        case "drop":
            del rows[row][column]
            said = f"cell {row}, {column} left out"
        case "twice":
            rows.append(rows[row])
            said = f"row {row} twice"
        case "column":
            rows = [[*cells[:column], *cells[column + 1 :]] for cells in rows]
            said = f"column {column} left out"
        case "header":
            del rows[0]
            said = "no header"
        case _:
            rows = rows[:1]
            said = "no rows"
    file.write_text("\n".join(map(",".join, rows)), encoding="utf-8", errors="replace")
    return said


CSV: tuple[Edit, ...] = (edit_csv, edit_csv, recode, *BYTES)


# ---- zip archives of arrays


def _members(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _write_members(file: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def edit_member(file: Path, random: Random) -> str:
    """Damage what is in a zip archive, whose checksums then are right."""
    members = _members(file)
    name = random.choice(list(members))
    part = file.with_name("member")
    part.write_bytes(members[name] or b"\0")
    said = random.choice((flip_bits, flip_early, flip_early, truncate, insert, remove_span, overwrite))(part, random)
    members[name] = part.read_bytes()
    part.unlink()
    _write_members(file, members)
    return f"{name}: {said}"


def edit_archive(file: Path, random: Random) -> str:
    """Leave members out, add some, pack them in other ways."""
    members = _members(file)
    name = random.choice(list(members))
    method = zipfile.ZIP_STORED
    match random.choice(("out", "rename", "extra", "lzma", "bzip2", "swap", "encrypted", "comment")):
        case "out":
            del members[name]
            said = f"{name} left out"
        case "rename":
            members[random.choice(("../x.npy", "/x.npy", "x", name + "\x1b[2J", "y.npy"))] = members.pop(name)
            said = f"{name} renamed"
        case "extra":
            members[random.choice(("../executed", "z.npy", "x_test.npy", "a" * 300))] = members[name]
            said = "another member"
        case "lzma":
            _write_members(file, members, zipfile.ZIP_LZMA)
            return f"lzma; {flip_bits(file, random)}"
        case "bzip2":
            _write_members(file, members, zipfile.ZIP_BZIP2)
            return f"bzip2; {flip_bits(file, random)}"
        case "swap":
            other = random.choice(list(members))
            members[name], members[other] = members[other], members[name]
            said = f"{name} and {other} swapped"
        case "encrypted":
            data = bytearray(file.read_bytes())
            for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
                data[data.index(magic) + flags] |= 1
            file.write_bytes(data)
            return "a member marked as encrypted"
        case _:
            _write_members(file, members)
            with zipfile.ZipFile(file, "a") as archive:
                archive.comment = random.randbytes(1000)
            return "a comment of random bytes"
    _write_members(file, members, method)
    return said


def edit_npy_header(file: Path, random: Random) -> str:
    """An array with a header that announces something else."""
    members = _members(file)
    name = random.choice([each for each in members if each.endswith(".npy")])
    array = np.load(io.BytesIO(members[name]), allow_pickle=False)
    shape, kind = str(array.shape), array.dtype.str
    header = random.choice(
        (
            f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({random.choice(ODD_NUMBERS[:12])},)}}",
            f"{{'descr': '{kind}', 'fortran_order': False, 'shape': (100000, 1000000, 4)}}",
            f"{{'descr': '{kind}', 'fortran_order': False, 'shape': (3000000000, 1)}}",
            f"{{'descr': '{kind}', 'fortran_order': True, 'shape': {shape}}}",
            f"{{'descr': '|O', 'fortran_order': False, 'shape': {shape}}}",
            f"{{'descr': '{random.choice(('<U9999999', '<c16', '|V8', '<M8[s]', '<f2', '>i8', 'x', ''))}', "
            f"'fortran_order': False, 'shape': {shape}}}",
            f"{{'descr': [('a', '<f4'), ('b', '<f4')], 'fortran_order': False, 'shape': {shape}}}",
            f"{{'descr': '{kind}', 'shape': {shape}}}",
            f"{{'descr': '{kind}', 'fortran_order': 1, 'shape': 'abc', 'more': ()}}",
            "(" * 500,
            "{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 18, 18)}",
            "{'descr': '|u1', 'fortran_order': False, 'shape': (1.5,)}",
            "__import__('os').mkdir('executed')",
            "{'descr': '|u1',",
            "\x00" * 64,
            "{" * 9000,
        )
    )
    encoded = header.encode("latin-1") + b"\n"
    members[name] = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(encoded)) + encoded + array.tobytes()
    _write_members(file, members, zipfile.ZIP_DEFLATED)
    return f"{name} with the header {header:.90}"


def edit_arrays(file: Path, random: Random) -> str:
    """Other arrays under the same names."""
    members = {name: np.load(io.BytesIO(data)) for name, data in _members(file).items()}
    name = random.choice(list(members))
    array = members[name]
    odd: dict[str, Callable[[], np.ndarray]] = {
        "empty": lambda: array[:0],
        "one number": lambda: np.array(3),
        "another axis": lambda: array[None, None, None],
        "floats": lambda: array.astype(np.float64) if array.dtype.kind != "U" else np.zeros(3),
        "nan": lambda: np.full(array.shape, np.nan, np.float32),
        "complex": lambda: np.zeros(array.shape, np.complex64),
        "negative": lambda: np.full(array.shape, -1, np.int64),
        "huge numbers": lambda: np.full(array.shape, 2**63 - 1, np.int64),
        "unsigned": lambda: np.full(array.shape, 2**64 - 1, np.uint64),
        "times": lambda: np.zeros(array.shape, "M8[s]"),
        "texts": lambda: np.full(array.shape, "\x1b[31mred\x07"),
        "bytes": lambda: np.full(array.shape, b"\xff\xfe"),
        "truths": lambda: np.ones(array.shape, bool),
        "half": lambda: array[: len(array) // 2],
        "one class": lambda: np.zeros(array.shape, np.int64),
    }
    said = random.choice(list(odd))
    members[name] = odd[said]()
    with file.open("wb") as opened:  # under the file's own name, whatever it ends in
        np.savez(opened, **{key.removesuffix(".npy"): value for key, value in members.items()})
    return f"{name}: {said}"


def bomb_npz(file: Path, _: Random) -> str:
    """An array of some GiB of zeros in a few MiB."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({BOMB // 324}, 18, 18)}}".ljust(117) + "\n"
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as member:
            member.write(start)
            for _ in range(BOMB // 324 * 324 // BLOCK + 1):
                member.write(bytes(BLOCK))
        archive.writestr("y.npy", start)
    return "a bomb"


NPZ: tuple[Edit, ...] = (
    *(edit_member, edit_member, edit_archive, edit_npy_header, edit_npy_header, edit_npy_header, edit_arrays),
    *(edit_arrays, *BYTES),
)


# ---- gzipped idx files


def _edit_unpacked(file: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(gzip.decompress(file.read_bytes()))
    change(data)
    file.write_bytes(gzip.compress(data, 1, mtime=0))


def edit_idx(file: Path, random: Random) -> str:
    """Change the header under the compression, where the checksum does not see it."""
    place = random.randrange(16)
    byte = random.choice((0, 1, 4, 0x0D, 0x7F, 0xFF))

    def change(data: bytearray) -> None:
        data[place] = byte

    _edit_unpacked(file, change)
    return f"byte {place} of what is packed made {byte:#x}"


def edit_idx_values(file: Path, random: Random) -> str:
    """Change values, or how many there are."""
    cut = random.choice((0, 3, 15, 16, 17, 10_000))
    _edit_unpacked(file, lambda data: data.__delitem__(slice(cut, None)))
    return f"{cut} bytes packed"


def unpack(file: Path, random: Random) -> str:
    """Unpacked under the name of a packed file, and damaged."""
    file.write_bytes(gzip.decompress(file.read_bytes()))
    return f"unpacked; {random.choice((flip_early, truncate))(file, random)}"


def bomb_gzip(file: Path, random: Random) -> str:
    """Zeros of some GiB, in many members that follow each other; behind a header that is right, or none."""
    start = gzip.decompress(file.read_bytes())[:16] if random.random() < 0.5 else b""
    block = gzip.compress(bytes(BLOCK), mtime=0)
    file.write_bytes(gzip.compress(start, mtime=0) + block * (BOMB // BLOCK))
    return "a bomb" + " behind a header" * bool(start)


IDX: tuple[Edit, ...] = (edit_idx, edit_idx, edit_idx_values, unpack, *BYTES)


# ---- images


def _png(width: int, height: int, depth: int, colour: int, rows: bytes, *more: tuple[bytes, bytes]) -> bytes:
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)), *more]
    chunks += [(b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _zeros(number: int) -> bytes:
    packer = zlib.compressobj(1)
    packed = [packer.compress(bytes(min(BLOCK, number - done))) for done in range(0, number, BLOCK)]
    return b"".join([*packed, packer.flush()])


def bomb_png(file: Path, random: Random) -> str:
    """A small file of very many pixels."""
    side, depth, colour = random.choice(((13_300, 8, 0), (9_000, 16, 0), (8_200, 8, 2), (13_000, 1, 0), (60_000, 1, 0)))
    bits = depth * (3 if colour == 2 else 1)
    file.write_bytes(_png(side, side, depth, colour, _zeros(side * (1 + -(-side * bits // 8)))))
    return f"a PNG of {side}×{side} pixels, {bits} bits each"


def odd_png(file: Path, random: Random) -> str:
    """A PNG whose chunks say odd things."""
    rows = zlib.compress(bytes(20 * 200))
    text = b"k\0" + zlib.compress(bytes(BLOCK))
    kinds: dict[str, bytes] = {
        "no pixels": _png(0, 0, 8, 0, rows),
        "one pixel": _png(1, 1, 8, 0, zlib.compress(b"\0\0")),
        "one row of very many": _png(30_000_000, 1, 8, 0, rows),
        "sides of 2³¹": _png(2**31 - 1, 2**31 - 1, 8, 0, rows),
        "an unknown depth": _png(18, 18, 3, 0, rows),
        "an unknown colour": _png(18, 18, 8, 9, rows),
        "a large profile": _png(18, 18, 8, 0, rows, (b"iCCP", text)),
        "a large text": _png(18, 18, 8, 0, rows, (b"zTXt", b"k\0" + text)),
        "no palette": _png(18, 18, 8, 3, rows),
        "odd EXIF": _png(18, 18, 8, 0, rows, (b"eXIf", random.randbytes(64))),
        "too few rows": _png(2000, 2000, 8, 0, rows),
        "an unknown critical chunk": _png(18, 18, 8, 0, rows, (b"ABCD", b"x")),
        "odd frames": _png(18, 18, 8, 0, rows, (b"acTL", struct.pack(">II", 2**31, 0))),
    }
    name = random.choice(list(kinds))
    file.write_bytes(kinds[name])
    return f"a PNG with {name}"


def odd_sizes(file: Path, random: Random) -> str:
    """The size in the header of an image made large."""
    data, size = bytearray(file.read_bytes()), random.choice((0, 1, 0x7FFF, 0xFFFF, 30_000))
    if (start := data.find(b"\xff\xc0")) > 0:
        data[start + 5 : start + 9] = struct.pack(">HH", size, size)
    elif data.startswith(b"GIF"):
        data[6:10] = struct.pack("<HH", size, size)
    elif data.startswith(b"BM"):
        data[18:26] = struct.pack("<ii", random.choice((size, -1, 2**31 - 1)), size)
    elif data.startswith(b"II"):
        data = bytearray(_edit_tiff(data, random))
    else:
        data[16:24] = struct.pack(">II", size, size)
    file.write_bytes(data)
    return f"a size of {size} in its header"


def _edit_tiff(data: bytearray, random: Random) -> bytearray:
    """One entry of the directory with another count or value."""
    (start,) = struct.unpack_from("<I", data, 4)
    (entries,) = struct.unpack_from("<H", data, start)
    place = start + 2 + 12 * random.randrange(entries)
    struct.pack_into("<I", data, place + random.choice((4, 8)), random.choice((0, 1, 65_535, 2**31, 2**32 - 1)))
    return data


IMAGES: tuple[Edit, ...] = (odd_sizes, odd_sizes, odd_png, odd_png, *BYTES)


# ---- weights


def edit_safetensors(file: Path, random: Random) -> str:
    """Change the header of weights, or the numbers, and keep the file readable."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    names = [name for name in header if name != "__metadata__"]
    name = random.choice(names)
    match random.choice(("tree", "tree", "shape", "dtype", "offsets", "nan", "nan", "length", "metadata", "extra")):
        case "tree":
            said = _edit_tree(header, random)
        case "shape":
            header[name]["shape"] = random.choice(([], [0], [2**40, 2**40], header[name]["shape"][::-1], [-1]))
            said = f"{name} of shape {header[name]['shape']}"
        case "dtype":
            header[name]["dtype"] = random.choice(("F16", "BF16", "I64", "F8_E4M3", "BOOL", "X", "C64", "U8"))
            said = f"{name} of {header[name]['dtype']}"
        case "offsets":
            header[name]["data_offsets"] = random.choice(([0, 4], [4, 0], [0, 2**63], [len(body), len(body) + 4], [0]))
            said = f"{name} at {header[name]['data_offsets']}"
        case "nan":
            start, stop = header[name]["data_offsets"]
            value = random.choice((float("nan"), float("inf"), 3e38))
            struct.pack_into("<f", body, start + 4 * random.randrange((stop - start) // 4), value)
            said = f"a number of {name} made {value}"
        case "length":
            length = random.choice((0, 2**63, len(data), 7))
            file.write_bytes(struct.pack("<Q", length) + data[8:])
            return f"a header of {length} bytes announced"
        case "metadata":
            header["__metadata__"] = random.choice(({"format": "\x1b[2J"}, {"format": 3}, [], {"x": "y" * 100_000}))
            said = "other metadata"
        case _:
            header["extra"] = header[name]
            said = f"{name} twice"
    text: list[bytes] = []
    with_digits(lambda: text.append(json.dumps(header).encode()))
    file.write_bytes(struct.pack("<Q", len(text[0])) + text[0] + body)
    return said


WEIGHTS: tuple[Edit, ...] = (edit_safetensors, edit_safetensors, edit_safetensors, *BYTES)


def edit_checkpoint(file: Path, random: Random) -> str:
    """Other values in a checkpoint, which stays one of torch's."""
    import torch

    tree = torch.load(file, weights_only=True)
    said = []
    for _ in range(random.choice((1, 1, 2))):
        holder, key = _pick(tree, random)
        old = holder[key]
        new: Any
        if isinstance(old, torch.Tensor) and old.numel() < 10**7 and random.random() < 0.8:
            made: dict[str, Callable[[], Any]] = {
                "sparse": lambda old=old: old.to_sparse(),
                "meta": lambda old=old: old.to("meta"),
                "nan": lambda old=old: torch.full_like(old, float("nan")),
                "empty": lambda: torch.empty(0),
                "another shape": lambda old=old: old[None],
                "integers": lambda old=old: old.long(),
                "complex": lambda old=old: old.to(torch.complex64),
                "half": lambda old=old: old.half(),
                "truths": lambda old=old: old > 0,
                "one number, spread": lambda old=old: torch.zeros(1).expand(old.shape) if old.ndim else torch.zeros(1),
                "a list": lambda old=old: old.tolist(),
                "huge": lambda: torch.zeros(1).expand(2**40),
            }
            what = random.choice(list(made))
            new = made[what]()
        else:
            new = random.choice((*ODD_VALUES[:20], [], {}, torch.zeros(3), torch.zeros((), dtype=torch.int64)))
            what = f"{type(new).__name__} {new!r:.30}" if not isinstance(new, int) else "a number"
        holder[key] = new
        said.append(f"{key!r}: {what}")
    torch.save(tree, file)
    return "; ".join(said)


CHECKPOINT: tuple[Edit, ...] = (
    *(edit_checkpoint, edit_checkpoint, edit_checkpoint, edit_checkpoint, edit_member, edit_archive, *BYTES),
)


# ---- ONNX


def edit_onnx(file: Path, random: Random) -> str:
    """Another description of the network, or another graph."""
    import onnx

    model = onnx.load(file)
    entries = {entry.key: entry for entry in model.metadata_props}
    key = random.choice(list(entries))
    match random.choice(
        ("entry", "entry", "entry", "shape", "names", "bytes", "constant", "output", "dimension", "op")
    ):
        case "entry":
            value = random.choice(ODD_VALUES)
            text: list[str] = []
            with_digits(lambda: text.append(json.dumps(value)))
            entries[key].value = text[0]
            said = f"{key} made {value!r:.40}" if not isinstance(value, int) else f"{key} made a number"
        case "shape":
            value = random.choice(("[true, 18, 18]", "[1, 18, 1e30]", "[1, 18, 18.0]", "[1,18,18,18]", "[" * NESTED))
            entries["torchcaps.in_shape"].value = value
            said = f"in_shape made {value:.30}"
        case "names":
            value = random.choice((["\x1b[31ma", "b\x07", "c\x9b"], ["a", "b"], ["a", "a", "a"], ["", " ", "\n"]))
            entries["torchcaps.class_names"].value = json.dumps(value)
            said = f"class_names made {value!r}"
        case "bytes":
            entries[key].value = "Q" * 12
            file.write_bytes(model.SerializeToString().replace(b"Q" * 12, b"\xff\xfe\x80\x1b" * 3))
            return f"{key} that is no UTF-8"
        case "constant":
            size = random.choice((2**32, 2**40, 2**62))
            shape = onnx.helper.make_tensor("size_of_it", onnx.TensorProto.INT64, [1], [size])
            model.graph.initializer.append(shape)
            model.graph.node.insert(0, onnx.helper.make_node("ConstantOfShape", ["size_of_it"], ["unused"]))
            said = f"a constant of {size} numbers"
        case "output":
            model.graph.output[0].name = random.choice(("other", "", "images"))
            said = "another name of an output"
        case "dimension":
            shape = model.graph.input[0].type.tensor_type.shape.dim[random.randrange(4)]
            shape.dim_value = random.choice((0, -1, 5, 2**40))
            said = "another size of the input"
        case _:
            node = random.choice(model.graph.node)
            node.op_type = random.choice(("Relu", "Nothing", "Loop", "Reshape"))
            said = "another operator"
    file.write_bytes(model.SerializeToString())
    return said


ONNX: tuple[Edit, ...] = (edit_onnx, edit_onnx, edit_onnx, *BYTES)


# ---- Matlab


def bomb_matlab(file: Path, random: Random) -> str:
    """A compressed element of some GiB of zeros, in a variable or as rubbish."""
    flags = struct.pack("<IIII", 6, 8, 9, 0)
    shape = struct.pack("<IIii", 5, 8, BOMB // 2**12, 2**12 - 1)
    name = struct.pack("<HH4s", 1, 1, b"X")
    length = (BOMB // 2**12) * (2**12 - 1)
    inner = flags + shape + name + struct.pack("<II", 2, length)
    packer = zlib.compressobj(1)
    packed = packer.compress(struct.pack("<II", 14, len(inner) + length) + inner if random.random() < 0.7 else b"")
    packed += b"".join(packer.compress(bytes(BLOCK)) for _ in range(length // BLOCK + 1)) + packer.flush()
    file.write_bytes(file.read_bytes()[:128] + struct.pack("<II", 15, len(packed)) + packed)
    return "a bomb"


# ---- folders of images


def edit_photos(folder: Path, random: Random) -> str:
    """Odd names, and odd things among the images."""
    classes = sorted(child for child in folder.iterdir() if child.is_dir())
    image = sorted(classes[0].iterdir())[0]
    name = random.choice(
        (b"\xff\xfe", b"\x1b[31mred\x1b[0m", b"a\nb", b"\x07", b"x" * 255, b"\xed\xa0\x80", b"-x", b" ")
    )
    match random.choice(("class", "class", "image", "fifo", "loop", "folder", "empty", "large", "one", "file", "many")):
        case "class":
            os.rename(classes[0], os.path.join(os.fsencode(folder), name))  # noqa: PTH104, PTH118
            return f"a class called {name!r}"
        case "image":
            target = os.path.join(os.fsencode(classes[0]), name[:200] + b".png")  # noqa: PTH118
            if random.random() < 0.5:
                image.write_bytes(b"no image")
            os.rename(image, target)  # noqa: PTH104
            return f"an image called {name!r}"
        case "fifo":
            os.mkfifo(classes[0] / "x.png")
        case "loop":
            (classes[0] / "x.png").symlink_to("x.png")
        case "folder":
            (classes[0] / "x.png").mkdir()
        case "empty":
            (classes[0] / "x.png").touch()
        case "large":
            bomb_png(classes[0] / "x.png", random)
        case "one":
            shutil.rmtree(classes[1])
            shutil.rmtree(classes[2])
        case "file":
            shutil.rmtree(classes[0])
            classes[0].write_text("no folder")
        case _:
            for number in range(300):
                (folder / f"class {number}").mkdir()
                shutil.copy(image, folder / f"class {number}" / "x.png")
            return "three hundred classes"
    return "something odd among the images"


def edit_a_photo(folder: Path, random: Random) -> str:
    """One image damaged."""
    image = random.choice(sorted(folder.glob("*/*.png")))
    return f"{image.name}: {random.choice(IMAGES)(image, random)}"


PHOTOS: tuple[Edit, ...] = (edit_photos, edit_photos, edit_a_photo)
