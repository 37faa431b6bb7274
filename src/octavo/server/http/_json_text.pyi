"""A look at JSON text, native. All of it lets other threads run, and accepts what is not JSON too."""

def measure_json(data: bytes) -> tuple[int, int, int, int]:
    """The number of arrays and objects, of strings with names, of other values; and the depth."""

def split_json(data: bytes, begin: int, run_bytes: int, most_items: int) -> tuple[int, int, list[tuple[int, int, int]]]:
    """The items of the array or object that begins at data[begin]: their number, which is not counted further than one
    beyond most_items; the offset of its last byte, -1: it has none; and runs of whole items, each with its begin, its
    end and the number of its items, without the commas between them. A run has at most twice run_bytes, or one item."""

def find_json_string(data: bytes, begin: int) -> tuple[int, bool]:
    """The offset behind the string that begins at data[begin], the length of data if it does not end; and True if its
    bytes stand for themselves, without escapes and control characters."""

def cut_json_string(data: bytes, begin: int, end: int, wanted: int) -> int:
    """A place at or behind `wanted`, at most `end`, where the string can be cut: not within a character, an escape or a
    surrogate pair. begin: such a place before it."""
