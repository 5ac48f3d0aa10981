"""Lua scripts of latches on Redis.

Of a latch there are only, and only for a time:

    <prefix>:{<shard>}:<key>:m      ZSET of the tokens that counted down, by time; expires
    <prefix>:{<shard>}:<key>:w      HASH of waiters: token -> channel; expires
"""

from __future__ import annotations

from .scripts import Script

# KEYS 3 waiters, 6 counted     ARGV as of ACQUIRE: 2 token, 5 channel, 7 limit
# -> {1, 0, now} it is open, or {0, milliseconds to wait for a message, now, 0}
_PASS = """
local waiters, counted, token, channel = KEYS[3], KEYS[6], ARGV[2], ARGV[5]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

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
"""

# KEYS 3 waiters, 6 counted     ARGV 1 key, 2 token, 3 ttl, 4 limit
# -> how many are counted
_COUNT_DOWN = """
local waiters, counted, ttl = KEYS[3], KEYS[6], ARGV[3]
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])

redis.call('ZADD', counted, 'NX', now, ARGV[2])
if redis.call('PTTL', counted) < tonumber(ttl) then redis.call('PEXPIRE', counted, ttl) end
local so_far = redis.call('ZCARD', counted)
if so_far >= tonumber(ARGV[4]) then
  local all = redis.call('HGETALL', waiters)
  for at = 1, #all, 2 do
    redis.call('PUBLISH', all[at + 1], all[at] .. ' ' .. ARGV[1] .. ' 0 ' .. now .. ' 0')
  end
  redis.call('DEL', waiters)
end
return so_far
"""

PASS = Script(_PASS, args=7)
COUNT_DOWN = Script(_COUNT_DOWN, args=4)
