"""Three ops that shardplan does not have."""
