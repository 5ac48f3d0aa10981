-- Write a value if the lock is mine, in one step.
--
-- KEYS  lock, queue, entries, index, counter, members: see shared/begin.lua; 7 what to write
-- ARGV  1 key, 2 token, 3 value, 4 its ttl or 0, 5 '1' to release as well
-- ->    1 written, 0 not mine, nothing written

-- include: shared/begin.lua
-- include: shared/clock.lua
-- include: shared/take.lua
-- include: shared/members.lua
-- include: shared/hand_over.lua

if not mine and not is_member() then return 0 end
if ARGV[4] == '0' then
  redis.call('SET', KEYS[7], ARGV[3])
else
  redis.call('SET', KEYS[7], ARGV[3], 'PX', ARGV[4])
end
if ARGV[5] == '1' then give_up() end
return 1
