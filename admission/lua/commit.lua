-- Append events to one run's log if the version they were decided on still stands. Knows nothing of the protocol.
-- KEYS 1 log, 2 head, 3 feed, 4 runs, 5 live, 6 attention, 7 timers, 8 lease, then one key a blob
-- ARGV 1 commit id, 2 run, 3 compare (L C N), 4 expected, 5 known, 6 fence or "", 7 "1" when sent again,
--      8 control events, 9 length of the feed, 10 index: live ("1" "0", "" for no index), 11 attention ms or "",
--      12 due ms or "", 13 unseen events at most, 14 number of events, 15 the events, one a line, then blobs
-- Answer: code, version (fenced: the epoch), control, server ms, log entries after known
-- Each redis.call costs more than what it does, so there are few: a commit is one entry, whose id is the position of
-- its last event, and indexes that stay as they are (head field i) are left alone.
local head = redis.call('HMGET', KEYS[2], 'v', 'c', 'i')
local version, control = tonumber(head[1] or 0), tonumber(head[2] or 0)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known, unseen_max, events = tonumber(ARGV[5]), tonumber(ARGV[13]), tonumber(ARGV[14])

local function unseen(last)
  if last <= known or last - known > unseen_max then return {} end
  return redis.call('XRANGE', KEYS[1], (known + 1) .. '-0', last .. '-0')
end

if ARGV[7] == '1' and events > 0 and version > known then
  -- Applied already? Before the fence: what is in the log is in the log.
  local start = known + 1
  repeat
    local page = redis.call('XRANGE', KEYS[1], start .. '-0', '+', 'COUNT', 256)
    for i = 1, #page do
      local last = tonumber(string.sub(page[i][1], 1, -3))
      if page[i][2][2] == ARGV[1] then return {'committed', last, control, now, unseen(last - events)} end
      start = last + 1
    end
  until #page == 0
end
if ARGV[6] ~= '' then
  local epoch = redis.call('HGET', KEYS[8], 'e') or '0'
  if epoch ~= ARGV[6] then return {'fenced', tonumber(epoch), control, now, {}} end
end
if version < known then return {'behind', version, control, now, {}} end
if ARGV[3] ~= 'N' and (ARGV[3] == 'L' and version or control) ~= tonumber(ARGV[4]) then
  return {version - known > unseen_max and 'far' or 'conflict', version, control, now, unseen(version)}
end

local missed, index = unseen(version), ARGV[10] .. ' ' .. ARGV[11] .. ' ' .. ARGV[12]
if ARGV[10] == '' or version > known then index = '' end
if events > 0 then -- The run's own keys last: an error before them leaves a needless bell, and no half commit.
  local bell = redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[9], '0-*', 'r', ARGV[2], 'v', version + events)
  redis.call('ZADD', KEYS[4], string.sub(bell, 3), ARGV[2])
end
if index ~= '' and (events == 0 or index ~= head[3]) then
  redis.call(ARGV[10] == '1' and 'SADD' or 'SREM', KEYS[5], ARGV[2])
  if ARGV[11] ~= '' then redis.call('ZADD', KEYS[6], ARGV[11], ARGV[2]) else redis.call('ZREM', KEYS[6], ARGV[2]) end
  if ARGV[12] ~= '' then redis.call('ZADD', KEYS[7], ARGV[12], ARGV[2]) else redis.call('ZREM', KEYS[7], ARGV[2]) end
elseif index == '' and events > 0 and head[3] ~= '' then
  redis.call('ZADD', KEYS[7], 0, ARGV[2])
end
if events == 0 and index ~= '' then redis.call('HSET', KEYS[2], 'i', index) end
if events == 0 then return {'committed', version, control, now, missed} end
for i = 9, #KEYS do redis.call('SET', KEYS[i], ARGV[7 + i]) end
version, control = version + events, control + ARGV[8]
redis.call('XADD', KEYS[1], version .. '-0', 'c', ARGV[1], 't', now, 'n', events, 'e', ARGV[15])
redis.call('HSET', KEYS[2], 'v', version, 'c', control, 'i', index)
return {'committed', version, control, now, missed}
