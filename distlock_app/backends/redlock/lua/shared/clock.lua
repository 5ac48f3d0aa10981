-- The node's clock, and numbers as text.
--
-- Include it only where the time is needed.

-- include: ../../../redis/lua/shared/clock.lua

local function text(number) return string.format('%.0f', number) end  -- '..' keeps 14 digits
