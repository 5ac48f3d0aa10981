-- Take several mutexes if all of them are free, or none.
--
-- KEYS  lock, queue, entries, index, counter, members, for each lock: see shared/begin.lua
-- ARGV  1 key, 2 token, 3 ttl, 4 "holder name", for each lock
-- ->    "1 fence ..." all are mine, or 0: none was taken, at least one is held or waited for

-- include: shared/begin.lua
-- include: shared/clock.lua
-- include: shared/take.lua
-- include: shared/extend_to.lua

-- Let the names and functions above mean this lock from now on.
local function choose(at)
  lock, queue, entries, index, counter, members = unpack(KEYS, 6 * at - 5, 6 * at)
  key, token = ARGV[4 * at - 3], ARGV[4 * at - 2]
  held = redis.call('GET', lock)
  mine = held and string.sub(held, 1, #token + 1) == token .. ' '
end

for at = 1, #KEYS / 6 do
  choose(at)
  if not mine and (held or redis.call('EXISTS', queue, members) > 0) then return 0 end
end
local fences = ''
for at = 1, #KEYS / 6 do
  choose(at)
  if mine then  -- a repeated request
    fences = fences .. string.match(held, '^%S+( %d+)')
    extend_to(ARGV[4 * at - 1])
  else
    fences = fences .. ' ' .. take(token, ARGV[4 * at - 1], '1', ARGV[4 * at])
  end
end
return {ok = '1' .. fences}
