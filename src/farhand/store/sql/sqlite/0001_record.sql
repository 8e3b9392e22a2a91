-- The log. One row is one event; its JSON is ASCII text of at most 16 KiB.
CREATE TABLE events (
    session_id TEXT NOT NULL,
    seq INTEGER NOT NULL CHECK (seq > 0),
    type TEXT NOT NULL,
    version INTEGER NOT NULL,
    time REAL NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (session_id, seq)
) WITHOUT ROWID;

-- Derived from the log in the transaction of its events; `rebuild` makes these two again.
CREATE TABLE sessions (
    session_id TEXT NOT NULL PRIMARY KEY,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    last_seq INTEGER NOT NULL,
    status TEXT NOT NULL,
    title TEXT NOT NULL,
    agent TEXT NOT NULL,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    generation INTEGER NOT NULL
) WITHOUT ROWID;

CREATE INDEX sessions_open ON sessions (status, session_id) WHERE status IN ('waiting', 'running');

CREATE TABLE effects (
    session_id TEXT NOT NULL REFERENCES sessions (session_id) ON DELETE CASCADE,
    effect_id TEXT NOT NULL,
    tool TEXT NOT NULL,
    digest TEXT NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome IN ('intended', 'unknown')),
    seq INTEGER NOT NULL,
    PRIMARY KEY (session_id, effect_id)
) WITHOUT ROWID;

-- Beside the log: the lease of the newest claim, moved by `renew` without an event.
CREATE TABLE leases (
    session_id TEXT NOT NULL PRIMARY KEY,
    generation INTEGER NOT NULL,
    owner TEXT NOT NULL,
    lease_s REAL NOT NULL,
    ends_at REAL NOT NULL
) WITHOUT ROWID;
