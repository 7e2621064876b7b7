# SPDX-License-Identifier: Apache-2.0
"""Request traces in the public Mooncake form: one JSON object a line.

A line holds ``timestamp_ms`` (or ``timestamp``), ``input_length`` and
``output_length`` in tokens, ``hash_ids`` (one per prompt block; an id stands for
the block *and* everything before it) and ``block_size`` in tokens. A last block
that the prompt does not fill is dropped, and its id may be left out of the line:
vLLM caches full blocks only.

Standard library only: scripts/ reads traces with it, too (scripts/serving/traces.py).
"""

import codecs
import gzip
import json
import reprlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEFAULT_BLOCK_SIZE = 512  # tokens; the published Mooncake files do not name theirs
GZIP_MAGIC = b"\x1f\x8b"
MOST = 2**53  # of milliseconds or tokens: above it a float no longer tells neighbours apart


class TraceError(ValueError):
    """A trace that cannot be used; the text names file, line and fault."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. Lengths and ``block_size`` are tokens; ``hash_ids`` name its full blocks."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_size: int


@dataclass(frozen=True)
class Trace:
    """Requests as chains of dense block ids ``0 .. unique_blocks - 1``.

    Ids are numbered by (parent, hash id), so one id has one parent: the cache
    that a trace describes is prefix closed by construction.
    """

    name: str
    requests: list[list[int]]
    unique_blocks: int

    @property
    def references(self) -> int:
        """Full prompt blocks over all requests."""
        return sum(map(len, self.requests))


def _integer(record: dict, key: str, least: int, default: int | None = None) -> int:
    value = record.get(key, default)
    if type(value) is not int or not least <= value <= MOST:
        shown = reprlib.repr(value)
        raise ValueError(f"{key} is {shown}, expected an integer >= {least} and at most 2**53")
    return value


def _milliseconds(record: dict) -> float:
    stamp = record.get("timestamp_ms", record.get("timestamp"))
    if isinstance(stamp, bool) or not isinstance(stamp, (int, float)):
        shown = reprlib.repr(stamp)
        raise ValueError(f"timestamp_ms is {shown}, expected a number of milliseconds")
    if not 0 <= stamp <= MOST:  # NaN is neither
        shown = reprlib.repr(stamp)
        raise ValueError(f"timestamp_ms is {shown}, expected a finite number >= 0, at most 2**53")
    return stamp


def _row(line: str) -> TraceRow:
    """The request that a line describes. Raises ValueError with what is wrong with it."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    except ValueError as error:  # Python converts no integer of more than 4,300 digits
        raise ValueError("not a request: a number in it has too many digits") from error
    except RecursionError as error:
        raise ValueError("not a request: nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, found {type(record).__name__}")
    stamp = _milliseconds(record)
    block_size = _integer(record, "block_size", 1, DEFAULT_BLOCK_SIZE)
    tokens = _integer(record, "input_length", 0)
    output = _integer(record, "output_length", 0, 0)
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
        raise ValueError("hash_ids is not a list of integers >= 0")
    full, rest = divmod(tokens, block_size)
    if len(ids) not in (full, full + bool(rest)):
        raise ValueError(
            f"{len(ids)} hash_ids for {tokens} tokens in blocks of "
            f"{block_size}, expected {full + bool(rest)}"
        )
    return TraceRow(stamp, tokens, output, ids[:full], block_size)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, from 1. Raises TraceError when the file cannot be read."""
    number = 0
    try:
        with path.open("rb") as file:
            # What a file is, not what it is called: either may have been renamed.
            zipped = file.peek(2)[:2] == GZIP_MAGIC
            with gzip.GzipFile(fileobj=file) if zipped else file as lines:
                for number, line in enumerate(lines, 1):
                    yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}:{number + 1}: damaged gzip data: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


def read_rows(path: Path) -> list[TraceRow]:
    """The requests of a trace file, gzip or not, in order of time; ties keep their places.

    Blank lines and a byte order mark are passed over. Raises TraceError as
    ``file:line: fault``, without a line when the file cannot be opened.
    """
    rows = []
    for number, line in _lines(path):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            rows.append(_row(line.decode()))
        except UnicodeDecodeError as error:
            raise TraceError(f"{path}:{number}: not JSON: {error}") from error
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
    if not rows:
        raise TraceError(f"{path}:1: no requests in the file")
    rows.sort(key=lambda row: row.timestamp_ms)
    return rows


def read_trace(path: Path) -> Trace:
    """The trace in a file, as chains of blocks. Raises TraceError as read_rows does."""
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return trace_from_chains(name, [row.hash_ids for row in read_rows(path)])


def trace_from_chains(name: str, chains: list[list[int]]) -> Trace:
    """Number the blocks of hash id chains densely, in order of first use."""
    known: dict[tuple[int, int], int] = {}
    requests = []
    for chain in chains:
        parent = -1
        request = []
        for hash_id in chain:
            parent = known.setdefault((parent, hash_id), len(known))
            request.append(parent)
        requests.append(request)
    return Trace(name, requests, len(known))


def half_of(trace: Trace, half: str) -> Trace:
    """The "first" or "second" half of the requests in time, or "all" of them.

    A half is a trace of its own: it starts with an empty cache and its unique
    blocks are counted anew.
    """
    middle = len(trace.requests) // 2
    if half == "all":
        return trace
    part = trace.requests[:middle] if half == "first" else trace.requests[middle:]
    return trace_from_chains(trace.name, part)
