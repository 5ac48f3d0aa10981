-- What every script of locks begins with: names for its KEYS and ARGV.
--
-- KEYS  1 lock  "token fence stamp holder name", expires with the lease
--       2 part  HASH of the last fence, ":", and of the locks taken lately, 'q' with waiters
-- Beside a lock with waiters: its queue of owners by ticket and what is known of them. queue.lua
-- names them, as nodes are single servers and each word more costs as much as a command. And for a
-- second, the stamp up to which the tries of an owner that is gone count no more: release.lua.
--
-- The stamp numbers the tries of an owner: what undoes a try may come late, over a connection of
-- its own, and must not take away what a later try was given.
--
-- As on a single server, what must work on a full node begins with a write that takes no memory.
--
-- ARGV  1 token, and then each script's own

local lock, part, token = KEYS[1], KEYS[2], ARGV[1]
