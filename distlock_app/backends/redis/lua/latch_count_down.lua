-- Count a token down, once, and wake all who wait if that opens the latch.
--
-- KEYS  3 waiters, 6 counted: see latch_pass.lua
-- ARGV  1 key, 2 token, 3 ttl, 4 how many open it
-- ->    how many are counted

local waiters, counted, ttl = KEYS[3], KEYS[6], ARGV[3]

-- include: shared/clock.lua

redis.call('ZADD', counted, 'NX', text(now), ARGV[2])
if redis.call('PTTL', counted) < tonumber(ttl) then redis.call('PEXPIRE', counted, ttl) end
local so_far = redis.call('ZCARD', counted)
if so_far >= tonumber(ARGV[4]) then
  local all = redis.call('HGETALL', waiters)
  for at = 1, #all, 2 do
    redis.call('PUBLISH', all[at + 1], all[at] .. ' ' .. ARGV[1] .. ' 0 ' .. text(now) .. ' 0')
  end
  redis.call('DEL', waiters)
end
return so_far
