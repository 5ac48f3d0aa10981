-- Raise the fence of a lock that is mine to the one that the nodes agreed on.
--
-- KEYS  1 lock, 2 part: see shared/begin.lua
-- ARGV  1 token, 2 fence
-- ->    "1" mine, with that fence, "0" not; no later fence of this node is smaller or equal

-- include: shared/begin.lua
-- include: ../../redis/lua/shared/mine.lua

local fence = ARGV[2]
if tonumber(redis.call('HGET', part, ':') or 0) < tonumber(fence) then
  redis.call('HSET', part, ':', fence)
end
if not mine then return {ok = '0'} end
local rest = string.match(held, '^%S+ %d+ (.*)$')
redis.call('SET', lock, token .. ' ' .. fence .. ' ' .. rest, 'KEEPTTL')
return {ok = '1'}
