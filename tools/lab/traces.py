# SPDX-License-Identifier: Apache-2.0
"""Request traces in the public Mooncake form: one JSON object a line.

A line holds ``timestamp_ms`` (or ``timestamp``), ``input_length`` and
``output_length`` in tokens, ``hash_ids`` (one per prompt block; an id stands for
the block *and* everything before it) and ``block_size`` in tokens. A last block
that the prompt does not fill is dropped: vLLM caches full blocks only.
"""

import gzip
import json
import math
from dataclasses import dataclass
from pathlib import Path

DEFAULT_BLOCK_SIZE = 512  # tokens; the published Mooncake files do not name theirs


class TraceError(ValueError):
    """A trace that cannot be used; the text names file, line and fault."""


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


def _line_fault(record: object, block_size: int) -> str | None:
    """What is wrong with one decoded line, or None."""
    if not isinstance(record, dict):
        return f"expected an object, found {type(record).__name__}"
    stamp = record.get("timestamp_ms", record.get("timestamp"))
    if isinstance(stamp, bool) or not isinstance(stamp, (int, float)):
        return f"timestamp_ms is {stamp!r}, expected a number of milliseconds"
    if not math.isfinite(stamp) or stamp < 0:
        return f"timestamp_ms is {stamp!r}, expected a finite number >= 0"
    for key, value, least in (
        ("block_size", block_size, 1),
        ("input_length", record.get("input_length"), 0),
        ("output_length", record.get("output_length", 0), 0),
    ):
        if type(value) is not int or value < least:
            return f"{key} is {value!r}, expected an integer >= {least}"
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
        return "hash_ids is not a list of integers >= 0"
    full, rest = divmod(record["input_length"], block_size)
    if len(ids) not in (full, full + bool(rest)):
        return (
            f"{len(ids)} hash_ids for {record['input_length']} tokens in blocks of "
            f"{block_size}, expected {full + bool(rest)}"
        )
    return None


def read_trace(path: Path) -> Trace:
    """Read a ``.jsonl`` or ``.jsonl.gz`` trace; requests in order of time.

    Raises TraceError as ``file:line: fault``, OSError when it cannot be read.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    rows: list[tuple[float, list[int]]] = []
    number = 0
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                record = json.loads(line)
                size = DEFAULT_BLOCK_SIZE
                if isinstance(record, dict):
                    size = record.get("block_size", size)
                if fault := _line_fault(record, size):
                    raise TraceError(f"{path}:{number}: {fault}")
                stamp = record.get("timestamp_ms", record.get("timestamp"))
                rows.append((stamp, record["hash_ids"][: record["input_length"] // size]))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}:{number}: not JSON: {error}") from error
    except (EOFError, gzip.BadGzipFile, gzip.zlib.error) as error:
        raise TraceError(f"{path}:{number + 1}: damaged gzip data: {error}") from error
    if not rows:
        raise TraceError(f"{path}:1: no requests in the file")
    rows.sort(key=lambda row: row[0])
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return trace_from_chains(name, [ids for _, ids in rows])


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
