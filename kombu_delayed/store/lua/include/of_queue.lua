-- of_queue: the name of another key of the queue.
-- needs: wake
local function of_queue(name)
  return wake:sub(1, -5) .. name
end
