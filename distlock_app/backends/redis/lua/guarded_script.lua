-- Run a script of the caller, the function `guarded` before this, if the lock is mine.
--
-- KEYS  lock, queue, entries, index, counter, members: see shared/begin.lua; from 7 its own
-- ARGV  1 key, 2 token; from 3 its own
-- ->    "1 <number that it returned>"; 0 not mine, not run

-- include: shared/begin.lua
-- include: shared/clock.lua
-- include: shared/take.lua
-- include: shared/members.lua

if not mine and not is_member() then return 0 end
local answer = guarded({unpack(KEYS, 7)}, {unpack(ARGV, 3)})
if type(answer) == 'table' and type(answer.err) == 'string' then return answer end
local number = tonumber(answer or 0)
if not number or number % 1 ~= 0 then  -- so for infinity and nan, too
  return {err = 'ERR it must return a whole number or nothing, not ' .. tostring(answer)}
end
return {ok = '1 ' .. text(number)}
