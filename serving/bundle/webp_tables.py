"""How much memory the Huffman tables of a WebP file take: of lossless pixels (VP8L) and of a lossless alpha channel.

A file may have a group of five tables for every block of 4 x 4 pixels. A group takes 20 bits of the file and at least
5 kB of memory, so half a megabyte becomes 350 MB. The usual encoder writes at most 2,600 groups, in larger blocks.
The size of the blocks follows the small images that describe the transforms, so these are read here as far as needed:
where each symbol ends, not what it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from serving.bundle.structure import LosslessStream

MOST_STEPS, STEPS_PER_BYTE = 160_000, 0.5
"""Symbols that are read of all streams of a file, in a fifth of a second of processor time at most, and in milliseconds
of a small file, which the event loop may open. Libwebp writes up to 125,000 into an image of 16 megapixels."""
UNREAD = 16_000_000
"""Bytes of tables that are not looked at more closely: as much memory as a megapixel."""

_MOST_GROUPS = 65_536
_FEW_GROUPS = 1000
"""Decoders make tables for so many groups even where there are fewer blocks."""
_BYTES_PER_BYTE = 2300
"""The densest file: 20 bits for five tables of 1,024 bytes with 584 bytes beside them."""
_ENTRY_BYTES, _BESIDE = 4, 600
_ENTRIES = (2954, 2956, 2958, 2962, 2970, 2986, 3018, 3082, 3212, 3468, 3980, 5004)
"""Entries of the five tables of a group at most, by the bits of the colour cache."""
_LITERALS, _LENGTHS, _DISTANCES = 256, 24, 40
_ORDER = (17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
_REPEATS = {16: (2, 3), 17: (3, 3), 18: (7, 11)}
"""Codes for lengths that repeat one: extra bits, and the least number of repetitions."""
_MOST_LENGTH = 15


def table_bytes(content: bytes, streams: Sequence[LosslessStream], canvas: tuple[int, int]) -> int:
    """An upper bound of the memory of the tables that are in use at a time, when a file is decoded."""
    steps = _Steps(min(MOST_STEPS, int(STEPS_PER_BYTE * len(content))))
    return max((_bytes_of(content, stream, canvas, steps) for stream in streams), default=0)


def _bytes_of(content: bytes, stream: LosslessStream, canvas: tuple[int, int], steps: _Steps) -> int:
    size = stream.size or canvas
    most = min(_BYTES_PER_BYTE * (stream.end - stream.start), _of_groups(_groups(size, 2), max(_ENTRIES)))
    if most <= UNREAD:
        return most
    try:
        groups, entries = _layout(_Bits(content, stream.start, stream.end), size, steps)
    except ValueError:
        # The decoder may read it as something else.
        return most
    return min(most, _of_groups(groups, entries))


def _of_groups(groups: int, entries: int) -> int:
    return groups * (_ENTRY_BYTES * entries + _BESIDE)


def _groups(size: tuple[int, int], bits: int) -> int:
    """The most groups of an image whose blocks have 2^bits pixels per side."""
    return min(_MOST_GROUPS, max(_FEW_GROUPS, _blocks(size[0], bits) * _blocks(size[1], bits)))


def _blocks(pixels: int, bits: int) -> int:
    return -(-pixels >> bits)


def _layout(bits: _Bits, size: tuple[int, int], steps: _Steps) -> tuple[int, int]:
    """The most groups of a stream, and the most entries of each."""
    width, height = size
    while bits.take(1):
        steps.count(100)
        kind = bits.take(2)
        if kind < 2:
            block = 2 + bits.take(3)
            _skip_image(bits, (_blocks(width, block), _blocks(height, block)), steps)
        elif kind == 3:
            colours = 1 + bits.take(8)
            _skip_image(bits, (colours, 1), steps)
            # Several pixels of a palette are packed into one.
            width = _blocks(width, 0 if colours > 16 else 1 if colours > 4 else 2 if colours > 2 else 3)
    entries = _ENTRIES[_cache_bits(bits)]
    if not bits.take(1):
        return 1, entries
    return _groups((width, height), 2 + bits.take(3)), entries


def _skip_image(bits: _Bits, size: tuple[int, int], steps: _Steps) -> None:
    """Skip an image that has no groups of its own."""
    cache_bits = _cache_bits(bits)
    alphabets = (_LITERALS + _LENGTHS + (1 << cache_bits if cache_bits else 0), *3 * (_LITERALS,), _DISTANCES)
    steps.count(100)
    codes = [_read_code(bits, alphabet) for alphabet in alphabets]
    _skip_pixels(bits, codes, size[0] * size[1], steps)


def _skip_pixels(bits: _Bits, codes: list[_Code], pixels: int, steps: _Steps) -> None:
    green, red, blue, alpha, distance = codes
    if not any(code.mask for code in codes[:4]) and green.table[0] >> 4 < _LITERALS:
        # All pixels are the same, and take no bits.
        return
    greens, reds, blues, alphas = green.table, red.table, blue.table, alpha.table
    green_mask, red_mask, blue_mask, alpha_mask = green.mask, red.mask, blue.mask, alpha.mask
    place, end, content = bits.place, bits.end, bits.content
    done = counted = 0
    while done < pixels:
        counted += 1
        if counted == 100:
            steps.count(counted)
            counted = 0
        if place > end:
            raise ValueError("the file ends within an image")
        byte = place >> 3
        # 7 bits before it, and four codes of up to 15 bits, or two codes with up to 28 bits between and behind them.
        window = int.from_bytes(content[byte : byte + 10], "little") >> (place & 7)
        found = greens[window & green_mask]
        used, symbol = found & 15, found >> 4
        if symbol < _LITERALS:
            used += reds[window >> used & red_mask] & 15
            used += blues[window >> used & blue_mask] & 15
            used += alphas[window >> used & alpha_mask] & 15
            done += 1
        elif symbol < _LITERALS + _LENGTHS:
            extra, least = _prefix(symbol - _LITERALS)
            done += least + (window >> used & ((1 << extra) - 1))
            used += extra
            found = distance.table[window >> used & distance.mask]
            used += (found & 15) + _prefix(found >> 4)[0]
        else:
            # A colour of the cache.
            done += 1
        place += used
    steps.count(counted)
    bits.place = place


def _prefix(symbol: int) -> tuple[int, int]:
    """The extra bits of the symbol of a length or of a distance, and the least that it stands for."""
    if symbol < 4:
        return 0, symbol + 1
    extra = (symbol - 2) >> 1
    return extra, ((2 + (symbol & 1)) << extra) + 1


def _cache_bits(bits: _Bits) -> int:
    if not bits.take(1):
        return 0
    if 1 <= (size := bits.take(4)) < len(_ENTRIES):
        return size
    raise ValueError(f"a colour cache of {size} bits")


class _Code:
    """A prefix code: what the next bits stand for, as 16 times the symbol plus the bits that it takes."""

    def __init__(self, lengths: Sequence[int]) -> None:
        symbols = [symbol for symbol, length in enumerate(lengths) if length]
        if not symbols:
            raise ValueError("a code without symbols")
        if len(symbols) == 1:
            # It takes no bits.
            self.mask, self.table = 0, [symbols[0] << 4]
            return
        longest = max(lengths)
        if sum(1 << (longest - lengths[symbol]) for symbol in symbols) != 1 << longest:
            raise ValueError("a code that is not complete")
        self.mask, self.table = (1 << longest) - 1, [0] * (1 << longest)
        symbols.sort(key=lambda symbol: lengths[symbol])
        code = 0
        for symbol, after in pairwise((*symbols, symbols[-1])):
            length = lengths[symbol]
            # The first bit that is read is the highest of the code.
            start = int(f"{code:0{length}b}"[::-1], 2)
            self.table[start :: 1 << length] = [symbol << 4 | length] * (1 << (longest - length))
            code = (code + 1) << (lengths[after] - length)


def _read_code(bits: _Bits, alphabet: int) -> _Code:
    lengths = [0] * alphabet
    if bits.take(1):
        several = bits.take(1)
        for symbol_bits in ((8 if bits.take(1) else 1), *several * (8,)):
            symbol = bits.take(symbol_bits)
            if symbol >= alphabet:
                raise ValueError(f"symbol {symbol} of {alphabet}")
            lengths[symbol] = 1
        return _Code(lengths)
    of_lengths = [0] * len(_ORDER)
    for place in _ORDER[: 4 + bits.take(4)]:
        of_lengths[place] = bits.take(3)
    code = _Code(of_lengths)
    left = 2 + bits.take(2 + 2 * bits.take(3)) if bits.take(1) else alphabet
    symbol, before = 0, 8
    while symbol < alphabet and left:
        left -= 1
        length = bits.symbol(code)
        if length <= _MOST_LENGTH:
            lengths[symbol] = length
            symbol, before = symbol + 1, length or before
            continue
        extra, least = _REPEATS[length]
        count = least + bits.take(extra)
        if symbol + count > alphabet:
            raise ValueError("more lengths than symbols")
        lengths[symbol : symbol + count] = [before if length == 16 else 0] * count
        symbol += count
    return _Code(lengths)


class _Bits:
    """Reads bits, the lowest of each byte first."""

    def __init__(self, content: bytes, start: int, end: int) -> None:
        self.content, self.place, self.end = content, 8 * start, 8 * end

    def take(self, count: int) -> int:
        if self.place + count > self.end:
            raise ValueError("the file ends within a header")
        byte, skipped = self.place >> 3, self.place & 7
        self.place += count
        return int.from_bytes(self.content[byte : byte + 4], "little") >> skipped & ((1 << count) - 1)

    def symbol(self, code: _Code) -> int:
        byte = self.place >> 3
        window = int.from_bytes(self.content[byte : byte + 4], "little") >> (self.place & 7)
        found = code.table[window & code.mask]
        self.take(found & 15)
        return found >> 4


class _Steps:
    """Counts what is read, up to a limit."""

    def __init__(self, most: int) -> None:
        self._left = most

    def count(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise ValueError("too much to read before the pixels")
