# SPDX-License-Identifier: Apache-2.0
"""One visit of a drill: what was asked of a server, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Literal, NotRequired, TypedDict

from serving.console import now
from serving.summary import Report

Role = Literal["baseline", "candidate", "rollback"]
Mode = Literal["lru", "active"]


class Identity(TypedDict):
    """What a visit ran on, as far as its target can tell. `installation`: sha256 by file name."""

    gpu: str
    image: str | None
    blocks: NotRequired[int]
    torch: NotRequired[str]
    installation: NotRequired[dict[str, str]]


class Absent(Enum):
    """Stands for what a visit never came to; canary.json leaves such a field out."""

    ABSENT = "absent"

    def __bool__(self) -> Literal[False]:
        return False


ABSENT = Absent.ABSENT


@dataclass
class Visit:
    """One run of the workload against one server; docs/canary.schema.json has the same fields.

    The baseline and the rollback are lru visits, the rollback the last of a drill. What is judged
    is the report, None when the server never answered, and the error, how the server let the visit
    down. number: counted from 1. ready_s: seconds from the server's start until it answered, None
    where the target did not start it. vllm: the version the server names. scan_limit: what was
    asked for, where a drill asks. started_at, finished_at: UTC, to the second.
    """

    role: Role
    mode_asked: Mode
    number: int
    report: Report | None = None
    error: str | None = None
    started_at: str = field(default_factory=now)
    ready_s: float | Absent | None = ABSENT
    vllm: str | Absent | None = ABSENT
    identity: Identity | Absent = ABSENT
    scan_limit: int | Absent = ABSENT
    finished_at: str = ""

    @property
    def healthy(self) -> bool:
        """Whether it can be judged: answered without an error, a failure or a doubt."""
        if self.report is None or self.error:
            return False
        return not (self.report["failures"] or self.report["problems"])

    def record(self) -> dict:
        """Return it as canary.json holds it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not ABSENT}
