"""Two ops that shardplan does not have."""
