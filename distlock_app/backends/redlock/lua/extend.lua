-- Extend a lock that is mine.
--
-- KEYS  1 lock, 2 part: see shared/begin.lua
-- ARGV  1 token, 2 ttl, 3 to end then, also sooner
-- ->    "1" mine, and without 3 never ending earlier than before, "0" not

-- include: shared/begin.lua
-- include: ../../redis/lua/shared/mine.lua

if not mine then return {ok = '0'} end
if ARGV[3] or redis.call('PTTL', lock) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', lock, ARGV[2])
end
return {ok = '1'}
