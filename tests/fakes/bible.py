"""A small bible.data: its windows, its packing, its kind of lines."""

import struct


def pack(data: bytes) -> bytes:
    """Unix `compress` without its header, as bible.data holds it (codes of 9 to 16 bits)."""
    table = {bytes([byte]): byte for byte in range(256)}
    num_codes, bits, out, current = 257, 9, bytearray(), b""
    group: list[int] = []

    def flush() -> None:
        packed = sum(code << (bits * i) for i, code in enumerate(group))
        out.extend(packed.to_bytes(-(-len(group) * bits // 8), "little"))
        group.clear()

    def emit(code: int) -> None:
        nonlocal bits, num_codes
        group.append(code)
        if len(group) == 8:
            flush()
        if num_codes < 1 << 16:
            num_codes += 1
        if num_codes > 1 << bits and bits < 16:
            if group:
                group.extend([0] * (8 - len(group)))
                flush()
            bits += 1

    for byte in data:
        longer = current + bytes([byte])
        if longer in table:
            current = longer
            continue
        emit(table[current])
        if len(table) + 1 < 1 << 16:
            table[longer] = len(table) + 1
        current = bytes([byte])
    if current:
        emit(table[current])
    flush()
    return bytes(out)


def bible(text: str, *, window_bytes: int = 65_536) -> bytes:
    """A file in the shape of bible.data."""
    raw = text.encode("latin-1")
    windows = [pack(raw[i : i + window_bytes]) for i in range(0, len(raw), window_bytes)]
    head = b"EC02Compressed Data File".ljust(0x54, b"\0") + struct.pack(
        ">II", window_bytes, len(windows)
    )
    begin = len(head) + 4 * len(windows)
    begins = [begin + sum(map(len, windows[:i])) for i in range(len(windows))]
    return head + struct.pack(f">{len(windows)}I", *begins) + b"".join(windows)


def verses(num_books: int = 3, num_chapters: int = 10) -> str:
    lines = ["Holy Bible, Authorized (King James) Version.  Textfile 930105."]
    for book in range(num_books):
        for chapter in range(1, num_chapters + 1):
            for verse in range(1, 31):
                words = " ".join(f"word{(verse * chapter + book * i) % 977}" for i in range(12))
                lines.append(f"{book + 1}Ki{chapter}:{verse} {words}.")
    return "\n".join(lines) + "\n"
