"""Every bound, by name. Reaching one is a typed result that says what was cut."""

from __future__ import annotations

from dataclasses import dataclass, fields

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# The record.
EVENT_BYTES = 16 * KIB
INLINE_BYTES = 4 * KIB
"""A field of an event larger than this is kept as a blob."""
BLOB_BYTES = 1 * GIB
LEASE_S = 15.0
LEASE_RENEW_S = 5.0
GROUP_COMMIT_EVENTS = 512
SQLITE_BUSY_S = 10.0
READ_PAGE_EVENTS = 1000
APPEND_EVENTS = 512
"""Events in one append."""
WRITES_WAITING = 10_000
"""Appends of one process that wait for the writer; the next one is refused."""
READ_CONNECTIONS = 2
WAIT_POLL_S = 0.02
"""Between two looks at a log for what other processes appended, while somebody waits."""
WAL_PAGES = 1000
"""Pages of the write-ahead log after which they are copied into the database file."""
TITLE_CHARS = 80
NAME_CHARS = 200
"""Of an owner, a tool or a digest in a derived row."""
LOCK_FILE_KEPT_S = 3600.0
"""How long the lock file of a process that is gone stays, so that its claims are known to be free."""
BLOB_TEMP_S = 60.0
"""Age at which a temporary file that nobody writes is removed."""
BLOBS_REMEMBERED = 10_000
"""Names of blobs that this process knows to be durable."""

# The wire between harness and box (docs/protocol.md). sandbox/runner/bounds.py repeats the first four.
FRAME_BYTES = 1 * MIB
SPOOL_BYTES = 4 * MIB
ACK_BYTES = 256 * KIB
ACK_LATEST_S = 0.05
"""An acknowledgement goes with the next frame, at the latest after so long or so many bytes."""
OUT_CHUNK_BYTES = 32 * KIB
FILE_CHUNK_BYTES = 256 * KIB
CALLS_WAITING = 1000
FRAMES_UNREAD_BYTES = 16 * MIB
"""Of frames from a box that nobody has taken yet; a box that keeps the spool's bound stays far below."""
BOX_START_S = 30.0
BOX_END_S = 2.0
"""How long `destroy` waits for killed processes to be gone."""
LISTED_FILES = 100_000
COPY_LEFT_OUT = 200
"""Files that are not copied, named one by one."""
EXEC_ACK_BYTES = 256 * KIB
"""Output that `farhand exec` has shown before it tells the box so."""

# Output of an action, as the log keeps it.
WROTE_INTERVAL_S = 0.25
WROTE_BYTES = 64 * KIB
WROTE_KEPT_BYTES = 256 * KIB

# Interrupting.
INTERRUPT_GRACE_S = 0.12
"""Between SIGINT and SIGKILL when a person interrupts; the whole stop takes at most 250 ms."""
LIMIT_GRACE_S = 0.25
"""Between SIGINT and SIGKILL when an action reaches a time limit."""

# The model.
MODEL_REPLY_BYTES = 1 * MIB
MODEL_ATTEMPTS = 3
MODEL_REQUESTS = 10
"""Requests for one step, those included whose process died before the reply was recorded."""
MODEL_RETRY_S = 0.5
"""Wait before the second attempt; it doubles with each."""
MODEL_CONNECT_S = 10.0
MODEL_SILENCE_S = 300.0
"""Between two pieces of a reply, the longest wait."""
MODEL_ERROR_CHARS = 500
"""Of a server's own error text."""
LOCAL_MODEL_START_S = 120.0
REMINDERS = 3
"""Replies in a row without usable code before the turn fails."""
REPEATS = 3
"""So many identical actions in a row: the last is not run, and the model is told."""
TRANSCRIPT_OUTPUT_CHARS = 20_000
"""Of one action's output, what the model is shown: head and tail, the cut announced."""

TOOL_TIMEOUT_S = 300.0
TOOL_THREAD_IDLE_S = 10.0
"""How long a thread that ran a tool waits for the next one."""
TOOL_CANCEL_S = 0.2
"""How long a cancelled tool may take to end before it is left behind."""
STOP_AGAIN_S = 0.25
STOP_TRIES = 8
"""A box that does not end its action after so many interrupts is destroyed."""
ENVIRONMENT_BUILD_S = 1800.0
ENVIRONMENT_ERROR_LINES = 20
"""Of a failed installation, the last lines that the error keeps."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one agent. Each is a typed result, `limit.reached` with the field's name, when it is met.

    Per action: `wall_s` (seconds in which the code may run; waiting for tools does not count), `cpu_s`, `memory_bytes`,
    `processes` (processes and threads together), `disk_bytes` and `disk_files` (of /workspace and /tmp together),
    `output_bytes` (more is counted and cut), `displays`, `tool_calls`.
    Per turn: `steps`, `tokens` (input and output), `turn_s`.
    `result_bytes` bounds one value that crosses the wall.
    """

    wall_s: float = 120.0
    cpu_s: float = 120.0
    memory_bytes: int = 1 * GIB
    processes: int = 128
    disk_bytes: int = 256 * MIB
    disk_files: int = 10_000
    output_bytes: int = 4 * MIB
    displays: int = 20
    tool_calls: int = 500
    steps: int = 20
    tokens: int = 1_000_000
    turn_s: float = 1800.0
    result_bytes: int = 512 * KIB

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"Limits.{field.name} must be a number above 0, not {value!r}")
