-- Pass a latch that is open; if it is not, wait for a message, or leave it.
--
-- KEYS  as those of a lock (shared/begin.lua). Of a latch there are only two, and only for a time:
--       3 waiters: HASH, token -> channel; expires
--       6 counted: ZSET of the tokens that counted down, by time; expires
-- ARGV  as of acquire.lua: 2 token, 5 channel, '-' or '' without one, 7 how many open it
-- ->    {1, 0, now} it is open, or {0, milliseconds to wait for a message, now, 0}

local waiters, counted, token, channel = KEYS[3], KEYS[6], ARGV[2], ARGV[5]

-- include: shared/clock.lua

if redis.call('ZCARD', counted) >= tonumber(ARGV[7]) then
  redis.call('HDEL', waiters, token)
  return {1, 0, now}
end
if channel == '' or channel == '-' then
  redis.call('HDEL', waiters, token)
else
  redis.call('HSET', waiters, token, channel)
  redis.call('PEXPIRE', waiters, 10000)  -- every waiter asks again each second
end
return {0, 3600000, now, 0}
