"""What a consumer does: claim, hand out, ack, keep its leases, notice a standstill."""
