"""How scripts are loaded, called and measured, and in which shard they run."""
