-- Take the lock if it is free; if not, wait in its queue, or leave it.
--
-- KEYS  lock, queue, entries, index, counter, members: see shared/begin.lua
-- ARGV  1 key, 2 token, 3 ttl, 4 "holder name", 5 channel to be woken on, '-' without one,
--       '' not to wait, 6 time of arrival as answered before, 0 at first, 7 limit
-- ->    {1, fence, now} mine, or {0, milliseconds until it may be free, now, time of arrival}

-- include: shared/begin.lua
-- include: shared/clock.lua
-- include: shared/take.lua

local ttl, about, channel, arrived, limit = ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]

-- Most locks are free. What follows takes longer to define than this to run.
if not held and redis.call('EXISTS', queue, members) == 0 then
  return {1, take(token, ttl, limit, about), now}
end

-- include: shared/members.lua
-- include: shared/extend_to.lua
-- include: shared/hand_over.lua

-- A repeated request, or a hand-over whose message was not heard.
if mine then
  extend_to(ttl)
  return {1, tonumber(string.match(held, '^%S+ (%d+)')), now}
elseif not held and is_member() then
  extend_to(ttl)
  return {1, tonumber(fence_of(token)), now}
end

if not held then drop_expired() end
local empty = not held and redis.call('EXISTS', queue) == 0
if empty and fits(limit) then return {1, take(token, ttl, limit, about), now} end
if channel ~= '' or not (empty or held) then
  if arrived == 0 then arrived = now end
  local back = channel == '' and '-' or channel
  local entry = text(now) .. ' ' .. ttl .. ' ' .. back .. ' ' .. limit .. ' ' .. about
  redis.call('HDEL', entries, token)  -- first, for a full server: see begin.lua
  redis.call('ZADD', queue, 'NX', arrived, token)
  redis.call('HSET', entries, token, entry)
  local life = held and QUEUE_MS or math.max(QUEUE_MS, redis.call('PTTL', members))
  redis.call('PEXPIRE', queue, life)
  redis.call('PEXPIRE', entries, life)
  local fence = not held and hand_over(token)
  if fence then return {1, fence, now} end
end
if channel == '' and not empty then
  drop(token)
  if not held then hand_over('') end  -- those behind may fit
end
local first = not held and redis.call('ZRANGE', members, 0, 0, 'WITHSCORES')[2]
return {0, first and first - now_ms or redis.call('PTTL', lock), now, arrived}
