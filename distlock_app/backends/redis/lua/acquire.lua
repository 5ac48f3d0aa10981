-- Take the lock if it is free; if not, wait in its queue, or leave it.
--
-- KEYS  lock, queue, entries, index, counter, members: see shared/begin.lua
-- ARGV  1 key, 2 token, 3 time of arrival as answered before, 0 at first, 4 ttl, 5 "holder name",
--       6 channel to be woken on, '-' without one, '' not to wait, 7 limit
-- ->    "1 fence" mine, or "0 milliseconds now arrival": when it may be free, time of arrival

-- include: shared/begin.lua
-- include: shared/clock.lua
-- include: shared/take.lua

local arrived, ttl, about, channel, limit = tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6], ARGV[7]

-- Most locks are free. What follows takes longer to define than this to run.
if not held and redis.call('EXISTS', queue, members) == 0 then
  return {ok = '1 ' .. take(token, ttl, limit, about)}
end

-- include: shared/members.lua
-- include: shared/extend_to.lua
-- include: shared/hand_over.lua

-- A repeated request, or a hand-over whose message was not heard.
if mine then
  extend_to(ttl)
  return {ok = '1 ' .. string.match(held, '^%S+ (%d+)')}
elseif not held and is_member() then
  extend_to(ttl)
  return {ok = '1 ' .. (fence_of(token) or take(token, ttl, limit, about))}  -- evicted: anew
end

if not held then drop_expired() end
local empty = not held and redis.call('EXISTS', queue) == 0
if empty and fits(limit) then return {ok = '1 ' .. take(token, ttl, limit, about)} end
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
  if fence then return {ok = '1 ' .. fence} end
end
if channel == '' and not empty then
  drop(token)
  if not held then hand_over('') end  -- those behind may fit
end
local first = not held and redis.call('ZRANGE', members, 0, 0, 'WITHSCORES')[2]
local left = first and first - now_ms or redis.call('PTTL', lock)
return {ok = string.format('0 %.0f %.0f %.0f', left, now, arrived)}
