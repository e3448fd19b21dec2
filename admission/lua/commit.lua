-- Append events to one run's log if the version they were decided on still stands. Knows nothing of the protocol.
-- KEYS 1 log, 2 head, 3 feed, 4 runs, 5 commits, 6 live, 7 attention, 8 timers, 9 lease, then one key a blob
-- ARGV 1 commit id, 2 run, 3 compare (L C N), 4 expected, 5 known, 6 fence or "", 7 "1" when sent again,
--      8 control events, 9 length of the feed, 10 index: live ("1" "0", "" for no index), 11 attention ms or "",
--      12 due ms or "", 13 unseen entries at most, 14 number of events, then events, then blobs
-- Answer: code, version (fenced: the epoch), control, server ms, entries after known
local head = redis.call('HMGET', KEYS[2], 'v', 'c')
local version, control = tonumber(head[1] or 0), tonumber(head[2] or 0)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known, unseen_max, events = tonumber(ARGV[5]), tonumber(ARGV[13]), tonumber(ARGV[14])

local function unseen(last)
  if last <= known or last - known > unseen_max then return {} end
  return redis.call('XRANGE', KEYS[1], (known + 1) .. '-0', last .. '-0')
end

if ARGV[7] == '1' and events > 0 then -- Applied already? Before the fence: what is in the log is in the log.
  for start = known + 1, version, 256 do
    local page = redis.call('XRANGE', KEYS[1], start .. '-0', '+', 'COUNT', 256)
    for i = 1, #page do
      if page[i][2][2] == ARGV[1] then
        return {'committed', start + i + events - 2, control, now, unseen(start + i - 2)}
      end
    end
  end
end
if ARGV[6] ~= '' then
  local epoch = redis.call('HGET', KEYS[9], 'e') or '0'
  if epoch ~= ARGV[6] then return {'fenced', tonumber(epoch), control, now, {}} end
end
if version < known then return {'behind', version, control, now, {}} end
local compared = ARGV[3] == 'L' and version or control
if ARGV[3] ~= 'N' and compared ~= tonumber(ARGV[4]) then
  return {version - known > unseen_max and 'far' or 'conflict', version, control, now, unseen(version)}
end

local missed = unseen(version)
if events > 0 then -- The run's own keys last: an error before them leaves a needless bell, and no half commit.
  local number = redis.call('INCR', KEYS[5])
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[9], number .. '-0', 'r', ARGV[2], 'v', version + events)
  redis.call('ZADD', KEYS[4], number, ARGV[2])
end
if ARGV[10] ~= '' and version == known then
  redis.call(ARGV[10] == '1' and 'SADD' or 'SREM', KEYS[6], ARGV[2])
  if ARGV[11] ~= '' then redis.call('ZADD', KEYS[7], ARGV[11], ARGV[2]) else redis.call('ZREM', KEYS[7], ARGV[2]) end
  if ARGV[12] ~= '' then redis.call('ZADD', KEYS[8], ARGV[12], ARGV[2]) else redis.call('ZREM', KEYS[8], ARGV[2]) end
elseif events > 0 then
  redis.call('ZADD', KEYS[8], 0, ARGV[2])
end
if events == 0 then return {'committed', version, control, now, missed} end
for i = 10, #KEYS do redis.call('SET', KEYS[i], ARGV[5 + events + i], 'NX') end
for i = 1, events do redis.call('XADD', KEYS[1], (version + i) .. '-0', 'c', ARGV[1], 't', now, 'e', ARGV[14 + i]) end
redis.call('HSET', KEYS[2], 'v', version + events, 'c', control + ARGV[8])
return {'committed', version + events, control + ARGV[8], now, missed}
