-- Extend a lock that is mine.
--
-- KEYS  lock, queue, entries, index, counter, members: see shared/begin.lua
-- ARGV  1 key, 2 token, 3 ttl, 4 to end then, also sooner
-- ->    1 mine, 0 not

-- include: shared/begin.lua
-- include: shared/clock.lua
-- include: shared/take.lua
-- include: shared/members.lua
-- include: shared/extend_to.lua

if not mine and not is_member() then return 0 end
if ARGV[4] then end_in(ARGV[3]) else extend_to(ARGV[3]) end
return 1
