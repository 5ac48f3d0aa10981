-- List the locks that are held at this node, for people.
--
-- KEYS  1 a part: see shared/begin.lua
-- ARGV  1 what a lock's name begins with, 2 the end of one name, '' for all
-- ->    "1 now JSON": [[end of the name, held, milliseconds left, waiters], ...]

local locks = {ARGV[1] .. ARGV[2]}
if ARGV[2] == '' then locks = redis.call('HKEYS', KEYS[1]) end
local found = {}
for _, lock in ipairs(locks) do
  local held = lock ~= ':' and redis.call('GET', lock)
  if held then
    local waiters = redis.call('ZCARD', lock .. ':q')
    found[#found + 1] = {string.sub(lock, #ARGV[1] + 1), held, redis.call('PTTL', lock), waiters}
  end
end
-- include: ../../redis/lua/shared/clock.lua
return {ok = '1 ' .. text(now) .. ' ' .. (#found > 0 and cjson.encode(found) or '[]')}
