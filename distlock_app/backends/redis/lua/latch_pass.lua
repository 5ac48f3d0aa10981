-- Pass a latch that is open; if it is not, wait for a message, or leave it.
--
-- KEYS  as those of a lock (shared/begin.lua). Of a latch there are only two, and only for a time:
--       3 waiters: HASH, token -> channel; expires
--       6 counted: ZSET of the tokens that counted down, by time; expires
-- ARGV  as of acquire.lua: 2 token, 6 channel, '-' or '' without one, 7 how many open it
-- ->    "1 0" it is open, or "0 milliseconds now 0", which is how long to wait for a message

local waiters, counted, token, channel = KEYS[3], KEYS[6], ARGV[2], ARGV[6]

-- include: shared/clock.lua

redis.call('HDEL', waiters, token)  -- first, for a full server: see shared/begin.lua
if redis.call('ZCARD', counted) >= tonumber(ARGV[7]) then return {ok = '1 0'} end
if channel ~= '' and channel ~= '-' then
  redis.call('HSET', waiters, token, channel)
  redis.call('PEXPIRE', waiters, 10000)  -- every waiter asks again each second
end
return {ok = string.format('0 3600000 %.0f 0', now)}
