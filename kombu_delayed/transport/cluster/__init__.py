"""`delayed+rediscluster://`: a channel whose queues are spread over the nodes of a Cluster."""
