"""Files of W&B's: records over several blocks, and a file that a kill cut off."""

import struct

from lockstep.state.record.wandb_files import records

BLOCK = 32768
#: Records that fill blocks to the last byte, or leave less than a header of them, too.
RECORDS = [b"a" * 10, b"b" * (2 * BLOCK), b"", b"c" * (BLOCK - 300), b"d" * 5, b"e" * (BLOCK + 1)]


def written(contents: list[bytes]) -> bytes:
    """Return a file, in parts as LevelDB's log format has them."""
    file = b":W&B\x1c\xe5\x00"
    for content in contents:
        rest, is_first = content, True
        while is_first or rest:
            left = BLOCK - len(file) % BLOCK
            if left < 7:
                file += bytes(left)
                continue
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if is_first else 4) if not rest else (2 if is_first else 3)
            file += struct.pack("<IHB", 0, len(part), kind) + part
            is_first = False
    return file


def test_records_are_read_as_they_were_written() -> None:
    assert list(records(written(RECORDS))) == RECORDS


def test_a_file_that_is_cut_off_has_its_whole_records() -> None:
    file = written(RECORDS)
    ends = [len(written(RECORDS[: count + 1])) for count in range(len(RECORDS))]
    for size in (*range(0, len(file), 997), *ends, *(end - 1 for end in ends)):
        whole = sum(end <= size for end in ends)
        assert list(records(file[:size])) == RECORDS[:whole]
