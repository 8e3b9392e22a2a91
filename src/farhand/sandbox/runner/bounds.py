"""Bounds of the runner: what it keeps, sends, reads and waits for at most."""

from __future__ import annotations

VERSION = 1
KIB = 1024
# The first four stand in limits.py too.
FRAME_BYTES = 1024 * KIB
SPOOL_BYTES = 4096 * KIB
OUT_CHUNK_BYTES = 32 * KIB
FILE_CHUNK_BYTES = 256 * KIB
CALLS_WAITING = 1000
WORKER_FRAME_BYTES = FRAME_BYTES - 4 * KIB  # leaves room for what the supervisor adds
DEPTH = 200
RAN_KEPT = 1000
NAMES_KEPT = 500
NAME_CHARS = 100
ANSWERS = 100
BUNDLE_TYPES = 20
READ_BYTES = 64 * KIB
LINES_PER_STEP = 200  # worker frames handled before other boxes get their turn
PIPE_SMALL_BYTES = 4 * KIB
PIPE_REST_S = 0.002
IDLE_OUT_BYTES = 64 * KIB  # written while no action runs; then the pipes are left full and the writer waits
DOWN_BYTES = 1024 * KIB  # unread by the worker: no more of its frames are taken
DOWN_LIMIT_BYTES = 16 * 1024 * KIB  # unread by the worker: no more of the harness's frames are taken
DOWN_STALL_S = 1.0  # and it reads nothing for that long: it is ended
ANSWERS_BYTES = 4096 * KIB  # unread by the harness
FILES_LISTED = 100_000
FOLDER_DEPTH = 100
LISTING_ENTRIES = 2000
LISTING_BYTES = 256 * KIB
LEFT_OUT_NAMED = 100
TICK_SAMPLED_S = 0.02
TICK_S = 0.1
IDLE_SHARE = 0.1  # of a processor: below it a box that waits for a reply runs no code
LIMIT_GRACE_S = 0.25
GRACE_MAX_S = 60.0
KILL_WAIT_S = 0.1
EOF_WAIT_S = 0.05
ATTACH_S = 10.0
CONNECTIONS = 8
TEXT_BYTES = 256 * KIB  # of a value's text
BUNDLE_BYTES = 640 * KIB
TRACEBACK_CHARS = 16 * KIB
MESSAGE_CHARS = 4 * KIB
REPR_CHARS = 16 * KIB
SOURCES_KEPT = 500
ORPHAN_S = 3600.0
REHEARSALS = 12
LOOK_S = 5.0  # between two looks at whether anybody can still want the box
