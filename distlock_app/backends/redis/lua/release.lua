-- Give back the lock, or the place in its queue, and let the next in.
--
-- KEYS  lock, queue, entries, index, counter, members: see shared/begin.lua
-- ARGV  1 key, 2 token, 3 if given: leave the queue only, and keep what is held
-- ->    1 it was mine and is given back, 0 not; nothing of the token is left but what is kept

-- include: shared/begin.lua

if mine and not ARGV[3] and redis.call('EXISTS', queue) == 0 then  -- most often; see acquire.lua
  redis.call('DEL', lock)
  redis.call('ZREM', index, key)
  return 1
end

-- include: shared/clock.lua
-- include: shared/take.lua
-- include: shared/members.lua
-- include: shared/hand_over.lua

local was_mine = mine or is_member()
if was_mine and ARGV[3] then return 0 end
give_up()
return was_mine and 1 or 0
