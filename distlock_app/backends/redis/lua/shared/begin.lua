-- What every script of locks begins with: names for its KEYS and ARGV.
--
-- KEYS of one lock, all in the hash slot of its shard and always all given:
--   1 lock     <prefix>:{<shard>}:<key>        "token fence holder name", expires with the lease
--   2 queue    <prefix>:{<shard>}:<key>:q      ZSET of waiting tokens by time of arrival
--   3 entries  <prefix>:{<shard>}:<key>:w      HASH of waiters and members:
--                                              token -> "heard ttl channel limit holder name"
--                                              token -> "fence limit holder name"
--   4 index    <prefix>:{<shard>}:held:<part>  ZSET of held keys by expiry, for people
--   5 counter  <prefix>:{<shard>}:fence        the last fence given; one key, and it stays
--   6 members  <prefix>:{<shard>}:<key>:m      ZSET of tokens that hold it together, by expiry
--
-- Times are microseconds of the server's clock, ttls and expiries milliseconds. The fence is such a
-- time too, so it grows even after the server lost its data, and says when the lock was acquired.
--
-- The limit of a claim says what it tolerates beside it: 1 nothing (a mutex, a writer), n up to
-- n - 1 semaphore permits, 0 other readers. Only one of the two, lock or members, exists.
--
-- A full server (noeviction) refuses what takes memory, but only as the first write of a script. So
-- what must work there begins with a write that takes none: PEXPIRE, ZREM, HDEL or DEL, before
-- ZADD, HSET, SET or GETSET. It grants no new lock; extensions, releases, hand-overs and waiting go
-- on.
--
-- ARGV 1 key, 2 token, and then each script's own

local lock, queue, entries, index, counter = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local members = KEYS[6]
local key, token = ARGV[1], ARGV[2]

-- include: mine.lua
