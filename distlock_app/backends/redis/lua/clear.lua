-- Take the lock away from one claim or from all, and let the next in.
--
-- KEYS  lock, queue, entries, index, counter, members: see shared/begin.lua
-- ARGV  1 key, 2 version (fence) of the claim to take away, '' all
-- ->    how many claims were taken away

-- include: shared/begin.lua
-- include: shared/clock.lua
-- include: shared/take.lua
-- include: shared/members.lua
-- include: shared/hand_over.lua

local version, cleared = token, 0
drop_expired()
if held and (version == '' or string.match(held, '^%S+ (%d+)') == version) then
  redis.call('DEL', lock)
  held = false
  cleared = 1
end
for _, owner in ipairs(redis.call('ZRANGE', members, 0, -1)) do
  if version == '' or fence_of(owner) == version then
    drop(owner)
    cleared = cleared + 1
  end
end
if cleared == 0 then return 0 end
redis.call('SET', counter, math.max((redis.call('GET', counter) or 0) + 1, now))
hand_over('')
return cleared
