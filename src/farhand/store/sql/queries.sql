-- Statements of the SQL adapters, in the dialect that SQLite and PostgreSQL share. Parameters are written :name.

-- name: session
SELECT session_id, created_at, updated_at, last_seq, status, title, agent, input_tokens, output_tokens, generation
FROM sessions WHERE session_id = :session_id;

-- name: sessions
SELECT session_id, created_at, updated_at, last_seq, status, title, agent, input_tokens, output_tokens, generation
FROM sessions ORDER BY updated_at DESC, session_id DESC LIMIT :limit;

-- name: sessions_by_status
SELECT session_id, created_at, updated_at, last_seq, status, title, agent, input_tokens, output_tokens, generation
FROM sessions WHERE status = :status ORDER BY updated_at DESC, session_id DESC LIMIT :limit;

-- name: put_session
INSERT INTO sessions
    (session_id, created_at, updated_at, last_seq, status, title, agent, input_tokens, output_tokens, generation)
VALUES
    (:session_id, :created_at, :updated_at, :last_seq, :status, :title, :agent, :input_tokens, :output_tokens, :generation)
ON CONFLICT (session_id) DO UPDATE SET
    created_at = excluded.created_at, updated_at = excluded.updated_at, last_seq = excluded.last_seq,
    status = excluded.status, title = excluded.title, agent = excluded.agent,
    input_tokens = excluded.input_tokens, output_tokens = excluded.output_tokens, generation = excluded.generation;

-- name: drop_session
DELETE FROM sessions WHERE session_id = :session_id;

-- name: last_seq
SELECT last_seq FROM sessions WHERE session_id = :session_id;

-- name: put_event
INSERT INTO events (session_id, seq, type, version, time, data)
VALUES (:session_id, :seq, :type, :version, :time, :data);

-- name: events
SELECT seq, type, version, time, data
FROM events WHERE session_id = :session_id AND seq > :after_seq ORDER BY seq LIMIT :limit;

-- name: logs
SELECT DISTINCT session_id FROM events
UNION
SELECT session_id FROM sessions
ORDER BY session_id;

-- name: effects
SELECT session_id, effect_id, tool, digest, outcome, seq
FROM effects WHERE session_id = :session_id ORDER BY seq, effect_id;

-- name: put_effect
INSERT INTO effects (session_id, effect_id, tool, digest, outcome, seq)
VALUES (:session_id, :effect_id, :tool, :digest, :outcome, :seq)
ON CONFLICT (session_id, effect_id) DO UPDATE SET
    tool = excluded.tool, digest = excluded.digest, outcome = excluded.outcome, seq = excluded.seq;

-- name: mark_effect
UPDATE effects SET outcome = 'unknown' WHERE session_id = :session_id AND effect_id = :effect_id;

-- name: drop_effect
DELETE FROM effects WHERE session_id = :session_id AND effect_id = :effect_id;

-- name: drop_effects
DELETE FROM effects WHERE session_id = :session_id;

-- name: lease
SELECT generation, owner, lease_s, ends_at FROM leases WHERE session_id = :session_id;

-- name: put_lease
INSERT INTO leases (session_id, generation, owner, lease_s, ends_at)
VALUES (:session_id, :generation, :owner, :lease_s, :ends_at)
ON CONFLICT (session_id) DO UPDATE SET
    generation = excluded.generation, owner = excluded.owner, lease_s = excluded.lease_s, ends_at = excluded.ends_at;

-- name: drop_lease
DELETE FROM leases WHERE session_id = :session_id;
